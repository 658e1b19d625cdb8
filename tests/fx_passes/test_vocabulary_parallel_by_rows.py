"""Divergences over vocabulary shards by chunks of rows: each rank exchanges the same, whatever else it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slime_compile
from slime_compile.backend import check_ranks
from tests.support import harness
from tests.support.ranks import on_ranks

ROWS, HIDDEN, WIDTHS = 48, 12, (160, 96)
BYTES = ROWS * WIDTHS[0]  # a quarter of rank 0's logits
OPTIONS = {"inner": "aot_eager", "min_vocab": 16, "strict": True, "check_ranks": True}


def log_softmax(x: Tensor) -> Tensor:
    peak = x.amax(-1, keepdim=True)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    total = (x - peak).exp().sum(-1, keepdim=True)
    dist.all_reduce(total)
    return x - peak - total.log()


class Divergence(torch.autograd.Function):
    """Forward or reverse KL per row; each rank has the gradient of its own columns."""

    @staticmethod
    def forward(ctx, student, teacher, reverse):  # type: ignore[no-untyped-def]
        log_p, log_q = log_softmax(student.float()), log_softmax(teacher.float())
        one, other = (log_p, log_q) if reverse else (log_q, log_p)
        found = (one.exp() * (one - other)).sum(-1, keepdim=True)
        dist.all_reduce(found)
        ctx.save_for_backward(log_p, log_q, found)
        ctx.reverse = reverse
        return found.squeeze(-1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        log_p, log_q, found = ctx.saved_tensors
        p = log_p.exp()
        own = p * (log_p - log_q - found) if ctx.reverse else p - log_q.exp()
        return own * grad[..., None], None, None


class SoftCrossEntropy(torch.autograd.Function):
    """Of targets whose mass need not be 1."""

    @staticmethod
    def forward(ctx, student, target):  # type: ignore[no-untyped-def]
        log_p = log_softmax(student.float())
        both = torch.stack([-(target * log_p).sum(-1), target.sum(-1)])
        dist.all_reduce(both)
        ctx.save_for_backward(log_p, target, both[1])
        return both[0]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        log_p, target, mass = ctx.saved_tensors
        return (log_p.exp() * mass[..., None] - target) * grad[..., None], None


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "forward KL": lambda student, teacher: Divergence.apply(student, teacher, False).mean(),
    "reverse KL": lambda student, teacher: Divergence.apply(student, teacher, True).mean(),
    "soft targets": lambda student, q: SoftCrossEntropy.apply(student, q.sigmoid()).mean(),
}


def over_heads(loss: Loss) -> Callable[..., Tensor]:
    def fn(hidden: Tensor, weight: Tensor, other: Tensor, frozen: Tensor) -> Tensor:
        return loss(hidden @ weight.t(), (other @ frozen.t()).detach())

    return fn


def arguments(rank: int, head: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    start = rank * WIDTHS[0]
    columns = slice(start, start + WIDTHS[rank])

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw)

    if not head:
        return [drawn(ROWS, sum(WIDTHS))[:, columns].clone() for _ in range(2)]
    return [
        each
        for _ in range(2)
        for each in (drawn(ROWS, HIDDEN), drawn(sum(WIDTHS), HIDDEN)[columns])
    ]


def step(fn: Any, args: list[Tensor], gradient: bool) -> list[Tensor]:
    """The loss, and the gradients of the student."""
    leaves = [each.clone().requires_grad_(gradient) for each in args[: len(args) // 2]]
    loss = fn(*leaves, *args[len(args) // 2 :])
    found = torch.autograd.grad(loss, leaves) if gradient else ()
    return [loss.detach(), *found]


def compared(rank: int, name: str, head: bool, alone: dict[str, Any]) -> dict[str, Any]:
    """The report, where rank 1 has `alone` for itself."""
    check_ranks.TIMEOUT = timedelta(minutes=10)
    fn = over_heads(LOSSES[name]) if head else LOSSES[name]
    args, own = arguments(rank, head), dict(alone) if rank else {}
    gradient = own.pop("gradient", True)
    options = OPTIONS | {"chunk_mib": BYTES} | own
    with harness.chunks_in_bytes():
        compiled = torch.compile(lambda *given: fn(*given), backend="slime_fused", options=options)
        got = step(compiled, args, gradient)
    for mine, eager in zip(got, step(fn, args, gradient), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-6)
    report = slime_compile.reports()[-1]
    return report.to_dict() | {"notes": [note for graph in report.graphs for note in graph.notes]}


ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one chunk": {"chunk_mib": 4 * BYTES},
    "no gradient": {"gradient": False},
    "no chunks": {"by_rows": False},
}


def _thorough_but(chosen: str, names: Iterable[str]) -> list[Any]:
    """Two processes for each."""
    return [pytest.param(n, marks=() if n == chosen else pytest.mark.thorough) for n in names]


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("head", [False, True], ids=["given", "head"])
@pytest.mark.parametrize("name", _thorough_but("reverse KL", LOSSES))
def test_every_rank_exchanges_the_same(name: str, head: bool, alone: str) -> None:
    found = on_ranks(2, compared, name, head, ALONE[alone])
    for report in found:
        assert not isinstance(report, Exception), str(report)[-2000:]
    first, second = found
    assert (first["stored"], list(first["rejections"])) == (0, [])
    before = 5 if "KL" in name else 3
    for report in found:
        assert (report["collectives_before"], report["collectives_after"]) == (before, 2)
    assert any("chunks of" in note for note in first["notes"]), first["notes"]
    assert second["stored"] == 0 or alone == "no chunks"
