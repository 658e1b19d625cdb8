"""The reasons a user gets for a head, word for word, each with a small program that provokes it.

Two kinds: logits that are materialised in full, and gradients that wait for backward. `test_refusals.py` reads the
texts from the source.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

import slime_compile
from tests.cases.heads import HEADS, values_of
from tests.cases.spellings import Outputs
from tests.fx_passes.test_linear import (
    compiled,
    example,
    full_logits,
    head_loss,
    last_report,
    notes,
    small_chunks,
)
from tests.support import harness
from tests.support.ranks import on_threads, own_copy

__all__ = ["small_chunks"]

Loss = Callable[..., Outputs]
WAITS = "the gradient is computed in backward: "


def line_of(mark: str) -> str:
    """`file:line` of this file's line that ends in the comment `mark`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return f"{__file__}:{number}"


def same_as_eager(function: Loss, fn: Loss, target: Tensor | None = None) -> None:
    """Runs both, and compares values and gradients; the loss is scaled after the compiled function."""
    results = []
    for each in (function, fn):
        hidden, weight, plain = example()
        outputs = each(hidden, weight, plain if target is None else target)
        total = sum(3 * o.sum() for o in outputs if o.requires_grad)
        gradients = torch.autograd.grad(total, (hidden, weight))  # type: ignore[arg-type]
        results.append([*outputs, *gradients])
    for mine, eager in zip(*results, strict=True):
        torch.testing.assert_close(mine, eager)


# ---- logits that stay whole ---------------------------------------------------------------------------------------


def test_no_head() -> None:
    """Of logits that were given, nothing is told of a matmul."""

    def fn(logits: Tensor, rows: Tensor, target: Tensor) -> Outputs:
        return values_of(logits[rows], target)

    _, weight, target = example()
    logits = torch.randn(2 * len(target), len(weight), requires_grad=True)
    compiled(fn)(logits, torch.arange(0, len(logits), 2), target)
    assert last_report()["fused"]
    assert not last_report()["rejections"]


def _larger_than_another_row(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """Wide values of different rows meet."""
    logits = hidden @ weight.t()
    return *values_of(logits, target), (logits > logits.flip(0)).sum(-1)  # flipped


def test_read_by_another_operator() -> None:
    same_as_eager(compiled(_larger_than_another_row), _larger_than_another_row)
    text = f"the logits are materialised in full: prims.rev.default at {line_of('flipped')} does not work row by row"
    assert text in [r["reason"] for r in last_report()["rejections"]]


# ---- gradients that wait for backward -----------------------------------------------------------------------------


class _WeightLearnsTwiceAsFast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        return grad @ weight, (2 * grad).t() @ hidden


def _several_gradients(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return (F.cross_entropy(_WeightLearnsTwiceAsFast.apply(hidden, weight), target),)


def _rows_read_alone(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    turned = torch.cat([logits[4:], logits[:3]]).detach()
    return F.cross_entropy(logits, target), turned.logsumexp(-1)


def test_several_gradients_of_the_same_logits(graphs: list[Graph]) -> None:
    same_as_eager(compiled(_several_gradients, grad_in_forward="always"), _several_gradients)
    (note,) = notes(last_report())
    assert note.endswith(", with the gradient computed in forward")
    assert not full_logits(graphs[-1])


def test_rows_read_alone() -> None:
    same_as_eager(compiled(_rows_read_alone), _rows_read_alone)
    (found,) = [r["reason"] for r in last_report()["rejections"]]
    assert found.startswith("the logits are materialised in full: aten.slice.Tensor at ")


class _OverAllTokens(torch.autograd.Function):
    """The gradient is divided by the number of tokens on all ranks, which only backward asks for."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        tokens = ctx.saved_tensors[0].clone()
        dist.all_reduce(tokens)
        return grad / tokens, None


def _over_all_tokens(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    log_probs, _ = values_of(hidden @ weight.t(), target)
    return (_OverAllTokens.apply(log_probs, (target > 3).sum().float()).sum(),)


def _over_all_tokens_from_the_start(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    tokens = (target > 3).sum().float()
    dist.all_reduce(tokens)
    return (values_of(hidden @ weight.t(), target)[0].sum() / tokens,)


@pytest.mark.parametrize(
    ("fn", "ending"),
    [
        (
            _over_all_tokens,
            f"; {WAITS}it needs a collective of backward; other ranks may not run it in forward",
        ),
        (_over_all_tokens_from_the_start, ", with the gradient computed in forward"),
    ],
    ids=["backward", "forward"],
)
def test_collective(fn: Loss, ending: str) -> None:
    """What forward exchanges anyway may be used there."""
    known = len(slime_compile.reports())

    def on_rank(rank: int) -> None:
        mine = own_copy(fn)
        same_as_eager(compiled(own_copy(mine), grad_in_forward="always"), mine)

    on_threads(2, on_rank)
    reports = [r.to_dict() for r in slime_compile.reports()[known:]]
    assert len(reports) == 2
    for report in reports:
        (note,) = (n for n in notes(report) if "never materialised in full" in n)
        assert note.endswith(f"chunks of 2 x 37{ending}")


# ---- chunks -------------------------------------------------------------------------------------------------------


def test_chunks_of_backward_are_told() -> None:
    """Half precision cuts columns in backward."""
    row = next(row for row in HEADS if row.name == "matmul")
    harness.compare(compiled(row.fn, 2), row, torch.bfloat16, data=row.data, draws=1)
    (note,) = notes(last_report())
    assert (
        f"are never materialised in full: chunks of 2 x 37 and 7 x 10 in backward; {WAITS}" in note
    )


def test_without_gradient_nothing_waits() -> None:
    with torch.no_grad():
        inputs = example()
        for mine, eager in zip(compiled(head_loss)(*inputs), head_loss(*inputs), strict=True):
            torch.testing.assert_close(mine, eager)
    (note,) = notes(last_report())
    assert note.endswith(" are never materialised in full: chunks of 2 x 37")
