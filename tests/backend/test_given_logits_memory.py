"""Peaks of in-place losses on given logits: two full-vocabulary values, the logits and what becomes the gradient.

By the allocator's events, as `test_memory.py`; graphs are interpreted.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure.measure import profiled_peak
from slime_compile.ops import native
from tests.cases.given_logits import LOSSES
from tests.support import harness

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

ROWS, VOCAB = 250, 4096  # 4 MB in float32, far above what rows and the profiler take
ROW_BYTES = 200  # of forty numbers in float32 and some: statistics, coefficients, targets


class _Handed(torch.autograd.Function):
    """Hands the logits over as something that was computed, and drops their gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


def _peak(fn: Callable[..., Tensor], logits: Tensor) -> int:
    anchor, target = torch.zeros((), requires_grad=True), torch.arange(ROWS)

    def step() -> None:
        fn(_Handed.apply(anchor, logits), target).sum().backward()

    step()
    return profiled_peak(step) + logits.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_two_values_at_one_time(name: str, dtype: torch.dtype) -> None:
    from megatron.core import parallel_state

    if native.functions() is None:
        pytest.skip(native.description())
    harness.world()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch._dynamo.reset()

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return LOSSES[name](logits, target, dist.group.WORLD)

    options = {"inner": "aot_eager", "strict": True}
    compiled = torch.compile(loss, backend="slime_fused", options=options)
    logits = torch.randn(ROWS, VOCAB).to(dtype)
    assert _peak(compiled, logits) <= 2 * logits.nbytes + ROWS * ROW_BYTES
