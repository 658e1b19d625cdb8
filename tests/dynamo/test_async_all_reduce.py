"""`trace_async_all_reduce`: over two ranks, each with half of the vocabulary, against the whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import slime_compile
from tests.support.ranks import on_ranks

ROWS, WIDTH = 5, 48
OPTIONS = {"inner": "aot_eager", "min_vocab": 32, "strict": True}


class LogProb(torch.autograd.Function):
    """Of the target, the maximum reduced while the targets of other ranks are found, as in ColossalAI."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int) -> Tensor:
        largest = logits.max(-1).values
        work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
        foreign = (target < start) | (target >= start + logits.shape[-1])
        column = torch.where(foreign, 0, target - start).unsqueeze(-1)
        work.wait()
        near = logits - largest.unsqueeze(-1)
        powers = near.exp()
        total = powers.sum(-1, keepdim=True)
        dist.all_reduce(total)
        picked = (near - total.log()).gather(-1, column).masked_fill(foreign.unsqueeze(-1), 0.0)
        dist.all_reduce(picked, dist.ReduceOp.SUM, None, True).wait()
        ctx.save_for_backward(powers / total, column, foreign)
        return picked.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, column, foreign = ctx.saved_tensors
        hit = (~foreign).to(softmax.dtype).unsqueeze(-1)
        one_hot = torch.zeros_like(softmax).scatter(-1, column, hit)
        return (one_hot - softmax) * grad.unsqueeze(-1), None, None


def log_prob(logits: Tensor, target: Tensor, start: int) -> Tensor:
    return LogProb.apply(logits, target, start)  # type: ignore[no-any-return]


def log_normaliser(logits: Tensor, target: Tensor, start: int) -> Tensor:
    """Without a Function: to autograd the collective is nothing, in eager code."""
    total = logits.exp().sum(-1)
    work = dist.all_reduce(total, async_op=True)
    known = work.wait() and work.is_completed()
    work = dist.all_reduce(torch.ones(1))
    return total.log() if known and work is None else total


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of both ranks, targets, and the weights of the rows."""
    draw = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(ROWS, 2 * WIDTH, generator=draw)
    target = torch.randint(0, 2 * WIDTH, (ROWS,), generator=draw)
    return logits, target, torch.rand(ROWS, generator=draw)


def step(fn: Any, rank: int) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of this rank's columns."""
    logits, target, weight = data()
    mine = logits[:, rank * WIDTH : (rank + 1) * WIDTH].clone().requires_grad_()
    values = fn(mine, target, rank * WIDTH)
    (gradient,) = torch.autograd.grad(values, mine, weight)
    return values.detach(), gradient


def on_a_rank(rank: int) -> dict[str, Any]:
    logits, target, _ = data()
    start = rank * WIDTH
    mine = logits[:, start : start + WIDTH].clone().requires_grad_()
    before = slime_compile.explain(log_prob, **OPTIONS)(mine, target, start)
    eager = step(log_normaliser, rank)
    slime_compile.trace_async_all_reduce()
    slime_compile.trace_async_all_reduce()
    kwargs = {"backend": "slime_fused", "options": OPTIONS, "fullgraph": True}
    found = step(torch.compile(log_prob, **kwargs), rank)  # type: ignore[call-overload]
    report = slime_compile.reports()[-1].to_dict()
    plain = step(torch.compile(log_normaliser, **kwargs), rank)  # type: ignore[call-overload]
    still_work = dist.all_reduce(torch.ones(1), async_op=True)
    return {
        "breaks": [each.reason for each in before.breaks],
        "found": found,
        "report": report,
        "eager": eager,
        "plain": plain,
        "notes": [note for g in slime_compile.reports()[-1].graphs for note in g.notes],
        "is_work": isinstance(still_work, dist.Work) and still_work.wait(),
    }


def test_two_ranks() -> None:
    logits, target, weight = data()
    logits = logits.double().requires_grad_()
    true = logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    (gradient,) = torch.autograd.grad(true, logits, weight.double())
    for rank, each in enumerate(on_ranks(2, on_a_rank)):
        assert not isinstance(each, Exception), each
        assert any("trace_async_all_reduce() brings it" in reason for reason in each["breaks"])
        values, mine = each["found"]
        columns = gradient[:, rank * WIDTH : (rank + 1) * WIDTH]
        torch.testing.assert_close(values.double(), true.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.double(), columns, rtol=1e-5, atol=1e-6)
        report = each["report"]
        assert (report["wide_after"], report["collectives_after"]) == (0, 1)
        for compiled, eager in zip(each["plain"], each["eager"], strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
        assert any(__file__ in note for note in each["notes"]), each["notes"]
        assert each["is_work"]
