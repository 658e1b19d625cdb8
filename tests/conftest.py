"""Options of every test process: how many threads torch takes, and in which order the tests run.

One thread where OMP_NUM_THREADS does not say otherwise: several processes run beside each other, and threads that wait
for each other spin. On a busy machine a softmax of 7 x 37 numbers takes 5 ms with two threads and 5 us with one.
"""

import gc
import os
import random
from collections import Counter

import pytest
import torch
import torch._dynamo.guards
import torch._logging._internal
from hypothesis import HealthCheck, settings
from tabulate import tabulate
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

# Inductor's cache (torch 2.13) does not ask for which vector instructions a kernel was written. Its imports have
# written the place into the environment.
capability = os.environ.get("ATEN_CPU_CAPABILITY")
if capability and cache_dir() == default_cache_dir():
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{default_cache_dir()}_{capability}"

# No test depends on how busy the machine is. A guard against hangs is pytest's `timeout` (pyproject.toml).
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# The logits of the tests are small and stand for large ones: the operators are called.
os.environ.setdefault("SLIME_FUSED_INLINE_BELOW", "0")

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)

# A torch for CUDA without a device replaces its guard by an object of the first thread that traces, and torch 2.11
# calls it after that thread has ended. This thread lasts.
torch._C._ensureCUDADeviceGuardSet()

# For its log, Dynamo times the guards of all that it compiles, and flushes the processor's caches to do so: a fifth of
# the time of a small compile.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# pytest hangs its handlers on every logger that keeps its records from the root's, so on torch's trace, too. Where that
# has a handler, torch and we write out every graph of every compile: a twelfth of the time.
if "TORCH_TRACE" not in os.environ:
    torch._logging._internal.trace_log.propagate = True
    torch._logging._internal.trace_log.handlers.clear()

# A compile makes many objects, of which few are garbage: collecting after every 700 is a twentieth of the time.
gc.set_threshold(10_000, 10, 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the tests in this random order"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:  # the same on every worker of xdist
        random.Random(seed).shuffle(items)


def pytest_collection_finish() -> None:
    """What the imports have made stays, and no collection has to look at it again: a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the generated programs came to (`test_programs.py`), of all workers."""
    totals: dict[str, Counter[str]] = {}
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if getattr(report, "when", "") != "call":
            continue
        for how, counts in (found for name, found in report.user_properties if name == "programs"):
            totals.setdefault(how, Counter()).update(counts)
    if totals:
        terminalreporter.section("generated programs")
        rows = [{"compiled with": how, **counts} for how, counts in totals.items()]
        terminalreporter.write_line(tabulate(rows, headers="keys"))
