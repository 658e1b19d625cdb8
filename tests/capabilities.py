"""The numerical tests with each set of vector instructions that this machine has: `make test-capabilities`.

ATEN_CPU_CAPABILITY chooses what torch and the C++ operators are compiled for; one that the processor lacks would end in
an illegal instruction. Each set comes with another number of threads and another order of the tests, none of which may
matter. Each set has a cache of its own: inductor's code for other instructions, if found there, does not compile.
Further arguments go to pytest.

`--quick`, for CI: of `NUMERICAL` the files of `QUICK`, with one thread, and not with the machine's best set, with which
`make test` has run them. What they leave out (the walk, the rules, spellings, generated programs) runs in CI with the
best set only.
"""

import os
import subprocess
import sys

import torch

CAPABILITIES = ("default", "avx2", "avx512")  # each of them has those before it
QUICK = (  # what calls the operators, two minutes for two sets on two cores
    "tests/ops/test_ops.py",
    "tests/ops/test_native.py",
    "tests/ops/test_linear.py",
    "tests/fx_passes/algebra",
    "tests/fx_passes/test_soundness.py",
    "tests/fx_passes/test_near_misses.py",
    "tests/fx_passes/test_linear_in_forward.py",
    "tests/fx_passes/test_given_logits.py",
    "tests/rl/test_log_probs_and_entropy.py",
)
NUMERICAL = (
    *QUICK,
    "tests/fx_passes/walk",
    "tests/fx_passes/rules",
    "tests/fx_passes/test_rules.py",
    "tests/fx_passes/test_spellings.py",
    "tests/fx_passes/test_programs.py",
    "tests/fx_passes/test_small_programs.py",
)


def available() -> tuple[str, ...]:
    """Of `CAPABILITIES`, what the processor has; of other processors nothing but what torch was built for."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    count = CAPABILITIES.index(best) + 1 if best in CAPABILITIES else 1
    return CAPABILITIES[:count]


def main() -> int:
    quick = "--quick" in sys.argv
    further = [argument for argument in sys.argv[1:] if argument != "--quick"]
    capabilities, files = (available()[:-1], QUICK) if quick else (available(), NUMERICAL)
    failed = []
    for at, capability in enumerate(capabilities):
        threads = str(1 if quick else 2**at)  # CI's two processes have two cores
        print(f"ATEN_CPU_CAPABILITY={capability} OMP_NUM_THREADS={threads}", flush=True)
        set_to = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads}
        options = ["-m", "not slow and not thorough", "--shuffle", str(at), *further]
        command = [sys.executable, "-m", "pytest", *options, *files]
        if subprocess.run(command, env=os.environ | set_to, check=False).returncode:
            failed.append(capability)
    print(f"failed with {', '.join(failed)}" if failed else "all passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
