"""Every text that `linear` gives a user as a reason, word for word, each with a small program that provokes it.

Three kinds: logits that stay whole, logits whose gradient waits for backward, and a graph that no program was found
for. `test_refusals.py` reads the texts from the source.
"""

from __future__ import annotations

import operator
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
from fx_passes.linear import LinearConfig, linear
from tests.cases.heads import HEADS, values_of
from tests.cases.spellings import Outputs
from tests.fx_passes.test_linear import (
    CHUNK,
    compiled,
    example,
    full_logits,
    head_loss,
    last_report,
    notes,
    small_chunks,
)
from tests.support import harness
from tests.support.harness import HIDDEN, ROWS, VOCAB
from tests.support.ranks import on_threads, own_copy
from tests.support.scratch import Scratch

__all__ = ["small_chunks"]

aten = torch.ops.aten
fused = torch.ops.slime_fused

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


def _bent(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(torch.sin(hidden @ weight.t()), target)


def _read_before_the_softcap(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(2 * torch.tanh(logits / 2), target), logits.argmax(-1)  # before


def _capped_in_bfloat16(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(torch.tanh((hidden @ weight.t()).bfloat16() / 2).float(), target)


def _argmax(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(logits, target), logits.argmax(-1)  # argmax


def _sorted(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    probabilities = logits.softmax(-1)
    return *values_of(logits, target), probabilities.detach().sort(-1).values[:, :2]  # sorted


WHOLE = [
    (
        _bent,
        "the logits come from aten.sin.default, not from a matmul, so they are materialised in full",
    ),
    (
        _read_before_the_softcap,
        f"the logits are read before their softcap by aten.argmax.default at {line_of('before')}",
    ),
    (
        _argmax,
        f"the logits are read by aten.argmax.default at {line_of('argmax')}, so they are materialised in full",
    ),
    (
        _sorted,
        f"a softmax of the logits is read by aten.sort.default at {line_of('sorted')}, so it is materialised in full",
    ),
]


def test_no_head() -> None:
    """Of logits that were given, nothing is told of a matmul."""

    def fn(logits: Tensor, rows: Tensor, target: Tensor) -> Outputs:
        return values_of(logits[rows], target)

    _, weight, target = example()
    logits = torch.randn(2 * len(target), len(weight), requires_grad=True)
    compiled(fn)(logits, torch.arange(0, len(logits), 2), target)
    assert last_report()["fused"]
    assert not last_report()["rejections"]


def test_narrow_softcap() -> None:
    """Rounded to bfloat16, no two programs are equal to the last bit; the reason is what counts here."""
    compiled(_capped_in_bfloat16)(*example())
    found = [r["reason"] for r in last_report()["rejections"]]
    assert "the softcap rounds the logits to a narrower dtype" in found


@pytest.mark.parametrize(("fn", "text"), WHOLE, ids=lambda each: getattr(each, "__name__", ""))
def test_whole(fn: Loss, text: str, graphs: list[Graph]) -> None:
    same_as_eager(compiled(fn), fn)
    report = last_report()
    assert text in [r["reason"] for r in report["rejections"]]
    assert notes(report) == []
    assert full_logits(graphs[-1])


def test_size_that_nothing_gives() -> None:
    """Dynamo hands every size to the graph as an input of its own, so the graph is made by hand."""
    s = Scratch(dynamic=True)
    hidden, weight = s.input("rows", (ROWS, HIDDEN)), s.input("rows", (VOCAB, HIDDEN))
    logits = s.call(aten.mm.default, hidden, s.call(aten.t.default, weight))
    some = s.call(aten.slice.Tensor, logits, 0, 0, -1)
    largest = s.call(operator.getitem, s.call(fused.row_stats.default, some, None, 1.0, ""), 0)
    s.graph.output((largest, s.call(aten.sym_size.int, some, 0)))
    before = str(s.graph)
    outcome = linear(s.graph, LinearConfig(4 * CHUNK))
    assert outcome.chunked == ()
    assert [r.reason for r in outcome.rejections] == [
        "a needed size of the logits appears nowhere else in the graph"
    ]
    assert str(s.graph) == before


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


def _complex_number(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    log_probs, _ = values_of(hidden @ weight.t(), target)
    turned = log_probs.detach() * 1j  # complex
    return ((turned.abs() * log_probs).mean(),)


def _other_dtype(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    scale = torch.full((1,), 0.5, dtype=torch.bfloat16)
    log_probs, _ = values_of(hidden @ weight.t(), target)
    return ((log_probs * scale).exp().mean(),)  # dtype


def _rows_broadcast(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    log_probs, entropy = values_of(hidden @ weight.t(), target)
    return ((log_probs[None] * entropy.detach()).mean(),)  # broadcast


WAIT = [
    (_several_gradients, "the function computes several gradients of these logits"),
    (_rows_read_alone, "some rows of the logits are read alone"),
    (
        _complex_number,
        f"an argument of aten.mul.Tensor at {line_of('complex')} is 1j, no real number",
    ),
    (
        _other_dtype,
        f"an operand of aten.mul.Tensor at {line_of('dtype')} has another dtype than its result",
    ),
    (_rows_broadcast, f"rows are broadcast in aten.mul.Tensor at {line_of('broadcast')}"),
]


@pytest.mark.parametrize(("fn", "text"), WAIT, ids=lambda each: getattr(each, "__name__", ""))
def test_waits(fn: Loss, text: str, graphs: list[Graph]) -> None:
    same_as_eager(compiled(fn, grad_in_forward="always"), fn)
    (note,) = notes(last_report())
    assert note.partition(WAITS)[2] == text
    assert not full_logits(graphs[-1])


def _power_of_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    log_probs, _ = values_of(hidden @ weight.t(), target)
    return ((log_probs * target.shape[0]).exp().mean(),)  # size


def _columns(hidden: Tensor, weight: Tensor, columns: Tensor) -> Outputs:
    return ((hidden @ weight.t()).log_softmax(-1).gather(-1, columns).mean(),)


WAIT_ANY_SIZE = [
    (_power_of_rows, (ROWS,), f"a size is an operand of aten.mul.Tensor at {line_of('size')}"),
    (_columns, (ROWS, 3), "the number of picked columns is symbolic"),
]


@pytest.mark.parametrize(("fn", "shape", "text"), WAIT_ANY_SIZE, ids=["size", "columns"])
def test_waits_for_any_size(
    fn: Loss, shape: tuple[int, ...], text: str, graphs: list[Graph]
) -> None:
    target = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))
    same_as_eager(compiled(fn, grad_in_forward="always", dynamic=True), fn, target)
    (note,) = notes(last_report())
    assert note.partition(WAITS)[2] == text
    assert not full_logits(graphs[-1])


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
