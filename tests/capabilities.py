"""The numerical tests with each set of vector instructions that this machine has: `make test-capabilities`.

ATEN_CPU_CAPABILITY chooses what torch and the C++ operators are compiled for; one that the processor lacks would end in
an illegal instruction. Each set comes with another number of threads and another order of the tests, none of which may
matter. Further arguments go to pytest.
"""

import os
import subprocess
import sys

import torch

CAPABILITIES = ("default", "avx2", "avx512")  # each of them has those before it
NUMERICAL = (
    "tests/ops/test_ops.py",
    "tests/ops/test_native.py",
    "tests/ops/test_linear.py",
    "tests/fx_passes/algebra",
    "tests/fx_passes/walk",
    "tests/fx_passes/test_soundness.py",
    "tests/fx_passes/test_near_misses.py",
    "tests/fx_passes/test_linear_in_forward.py",
    "tests/rl/test_log_probs_and_entropy.py",
)


def available() -> tuple[str, ...]:
    """Of `CAPABILITIES`, what the processor has; of other processors nothing but what torch was built for."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    count = CAPABILITIES.index(best) + 1 if best in CAPABILITIES else 1
    return CAPABILITIES[:count]


def main() -> int:
    failed = []
    for at, capability in enumerate(available()):
        threads = str(2**at)
        print(f"ATEN_CPU_CAPABILITY={capability} OMP_NUM_THREADS={threads}", flush=True)
        set_to = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads}
        options = ["-m", "not slow and not thorough", "--shuffle", str(at), *sys.argv[1:]]
        command = [sys.executable, "-m", "pytest", *options, *NUMERICAL]
        if subprocess.run(command, env=os.environ | set_to, check=False).returncode:
            failed.append(capability)
    print(f"failed with {', '.join(failed)}" if failed else "all passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
