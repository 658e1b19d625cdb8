"""The tests in this folder need a CUDA device: `make test-cuda` runs them on a stand-in (`standin/`), on no GPU.

Those in `at_size` need a stand-in that computes no values, all others one that does, or a GPU. Each test also asserts
what the stand-in has counted: no kernel of torch's that nothing computes, nothing that a capture forbids.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.cuda import standin

AVAILABLE = torch.cuda.is_available()
IGNORED = (
    # of inductor and torch, about kernels that nothing times here
    "ignore:.*TensorFloat32 tensor cores:UserWarning",
    "ignore:(?s).*Online softmax is disabled on the fly:UserWarning",
    "ignore:.*Not enough SMs to use max_autotune_gemm:UserWarning",
    # `verify=True` draws on all devices, as torch says that it does
    "ignore:CUDA reports that you have 2 available devices:UserWarning",
)

if not AVAILABLE:
    collect_ignore_glob = ["*"]
elif standin.kind() == standin.NO_KERNELS:
    collect_ignore_glob = ["test_*.py"]
else:
    collect_ignore_glob = ["at_size"]


def pytest_configure(config: pytest.Config) -> None:
    for line in IGNORED:
        config.addinivalue_line("filterwarnings", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    where = f"on {torch.cuda.get_device_name()}" if AVAILABLE else "not run, no CUDA device"
    terminalreporter.write_line(f"tests/cuda: {where}; `make test-cuda` has a stand-in, no GPU")


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    if not standin.kind():
        yield
        return
    from tests.cuda.standin import counts

    counts.not_run.clear()
    before = counts.counts().illegal
    yield
    assert not counts.not_run, "kernels of torch's that the stand-in does not compute"
    assert counts.counts().illegal == before, "what a capture or a launch forbids"


@pytest.fixture
def _counted() -> None:
    """For tests that assert what the stand-in counts."""
    if not standin.kind():
        pytest.skip("counts are the stand-in's")
