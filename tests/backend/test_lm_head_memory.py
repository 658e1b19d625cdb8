"""The peak of a loss whose logits are made in the graph: one chunk of them, as measured and as estimated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import slime_compile
from bench.measure.measure import profiled_peak
from slime_compile.backend import options
from slime_compile.ops import torch_calls

# 4 MB of logits in float32; less than what the CPU operators share among threads, which the profiler does not see
ROWS, VOCAB, HIDDEN = 250, 4096, 16
CHUNK_ROWS = 25
SCRATCH_ROWS = 4  # of the CPU's row operators
SCRATCH_BYTES = 2 * SCRATCH_ROWS * VOCAB * 4
MATMUL_BYTES = 400_000  # what a matmul of bfloat16 takes on a CPU, whatever its size
ROW_BYTES = 160  # statistics, coefficients, targets of a row: forty numbers


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(options, "MIB", 1)
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", SCRATCH_ROWS * VOCAB)


def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_probs = (hidden @ weight.t()).float().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return (log_probs.gather(-1, target[:, None])[:, 0] + 0.1 * entropy).square().mean()


def arguments(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, HIDDEN, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,))


def measured(dtype: torch.dtype, **more: Any) -> int:
    """Bytes beyond inputs, in the second step."""
    inputs = arguments(dtype)
    chosen = {"inner": "aot_eager", "chunk_mib": CHUNK_ROWS * VOCAB * dtype.itemsize} | more
    function: Callable[..., Tensor] = torch.compile(loss, backend="slime_fused", options=chosen)

    def step() -> None:
        torch.autograd.grad(function(*inputs), inputs[:2])

    step()
    return profiled_peak(step)


def own_bytes(dtype: torch.dtype) -> int:
    """The gradients, and what is summed in float32 over chunks: that of the fewer rows or columns."""
    gradients = (ROWS + VOCAB) * HIDDEN * dtype.itemsize
    return gradients + (ROWS * HIDDEN * 4 if dtype.itemsize == 2 else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_is_one_chunk(dtype: torch.dtype) -> None:
    chunk = CHUNK_ROWS * VOCAB * dtype.itemsize
    peak = measured(dtype)
    taken = SCRATCH_BYTES + (MATMUL_BYTES if dtype.itemsize == 2 else 0)
    assert peak <= chunk + own_bytes(dtype) + taken + ROWS * ROW_BYTES
    assert measured(dtype, lm_head=False, by_rows=False) >= ROWS * VOCAB * dtype.itemsize > 2 * peak


DEPTHS = 3


def depths(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Multi-token prediction (DeepSeek-V3): states [K, N, D] of K depths under one head."""
    return _total([states @ weight.t() for states in hidden], target)


def depths_together(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The same, by one matmul."""
    return _total((hidden.flatten(0, 1) @ weight.t()).split(ROWS), target)


def _total(logits: Sequence[Tensor], target: Tensor) -> Tensor:
    losses = []
    for depth, rows in enumerate(logits):
        wanted = F.pad(target[depth:], (0, depth), value=-100)
        losses.append((0.1 if depth else 1.0) * F.cross_entropy(rows, wanted))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("grad_in_forward", ["auto", "never"])
@pytest.mark.parametrize("loss", [depths, depths_together])
def test_losses_over_one_head(loss: Callable[..., Tensor], grad_in_forward: str) -> None:
    """One chunk for all losses; a gradient of the weight for each matmul, until they are summed."""
    hidden = torch.randn(DEPTHS, ROWS, HIDDEN).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).requires_grad_()
    target = torch.randint(VOCAB, (ROWS,))
    chosen = {"inner": "aot_eager", "chunk_mib": CHUNK_ROWS * VOCAB * 4}
    function: Callable[..., Tensor] = torch.compile(
        loss, backend="slime_fused", options=chosen | {"grad_in_forward": grad_in_forward}
    )

    def gradients(loss: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        value = loss(*inputs, target)
        return value.detach(), *torch.autograd.grad(value, inputs)

    truth = gradients(loss, hidden.double(), weight.double())
    for ours, want in zip(gradients(function, hidden, weight), truth, strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-4, atol=2e-7)
    report = slime_compile.reports()[-1]
    report.assert_fused()
    matmuls = DEPTHS if loss is depths else 1
    assert report.to_dict()["chunked_heads"] == matmuls
    peak = profiled_peak(lambda: gradients(function, hidden, weight))
    own = matmuls * weight.nbytes + 2 * hidden.nbytes  # of hidden, each depth's and all together
    chunk = CHUNK_ROWS * VOCAB * 4
    assert peak <= chunk + SCRATCH_BYTES + own + DEPTHS * ROWS * ROW_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimate(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        fakes = arguments(dtype)
    found = slime_compile.estimate_peak(loss, *fakes, chunk_mib=CHUNK_ROWS * VOCAB * dtype.itemsize)
    torch._dynamo.reset()
    peak = measured(dtype)
    beyond = found.peak_bytes - found.inputs_bytes
    # whether the buffers of row operators and matmuls count depends on when the peak is
    taken = SCRATCH_BYTES + (MATMUL_BYTES if dtype.itemsize == 2 else 0)
    assert 0.97 * (peak - taken) <= beyond <= 1.03 * peak
