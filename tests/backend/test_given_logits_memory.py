"""Peaks of in-place losses on given logits: two full-vocabulary values, the logits and what becomes the gradient.

By the allocator's events, as `test_memory.py`.
"""

import itertools
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
from tests.support.ranks import on_ranks

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


def _over(names: list[str], inner: str) -> dict[tuple[str, torch.dtype], float]:
    """Peaks of this rank in bytes over two logits, for each loss and dtype."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
    over = {}
    for name, dtype in itertools.product(names, (torch.float32, torch.bfloat16)):
        torch._dynamo.reset()

        def loss(logits: Tensor, target: Tensor, name: str = name) -> Tensor:
            return LOSSES[name](logits, target, dist.group.WORLD)

        compiled = torch.compile(
            loss, backend="slime_fused", options={"inner": inner, "strict": True}
        )
        logits = torch.randn(ROWS, VOCAB).to(dtype)
        over[name, dtype] = _peak(compiled, logits) - 2 * logits.nbytes
    return over


def _on_rank(rank: int, inner: str) -> dict[tuple[str, torch.dtype], float]:
    return _over(list(LOSSES), inner)


@pytest.fixture(autouse=True)
def operators() -> None:
    if native.functions() is None:
        pytest.skip(native.description())


@harness.each_inner
@pytest.mark.parametrize("name", LOSSES)
def test_two_values_at_one_time(name: str, inner: str) -> None:
    harness.world()
    over = _over([name], inner)
    assert max(over.values()) <= ROWS * ROW_BYTES, over


@pytest.mark.thorough
@harness.each_inner
def test_two_values_at_one_time_on_two_ranks(inner: str) -> None:
    """Each rank's logits are its shard of a vocabulary twice as large."""
    for over in on_ranks(2, _on_rank, inner):
        assert not isinstance(over, Exception), over
        assert max(over.values()) <= ROWS * ROW_BYTES, over
