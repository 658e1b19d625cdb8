"""Programs that cut the rows of the matmul themselves: the same operators, or exactly what they were, with a reason.

The ways in which public trainers do it (shared classes F01 to F06): a loop over chunks in plain autograd, an
autograd.Function whose backward makes the logits again, one that takes the gradient in forward, `torch.func`, a
checkpoint per chunk, a running softmax over chunks of the vocabulary. Each is written here as they mean it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

import slime_compile
from tests.fx_passes.test_linear import compiled, example, last_report, notes, small_chunks
from tests.support.harness import MIN_VOCAB, VOCAB

__all__ = ["small_chunks"]

ROWS, PIECE = 8, 3  # the last piece is ragged; of a single row torch makes no matmul
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def slices(rows: int) -> Iterator[slice]:
    for start in range(0, rows, PIECE):
        yield slice(start, start + PIECE)


# ---- loops in plain autograd --------------------------------------------------------------------------------------


def summed(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """torchtune's way: cross entropies of chunks, added up."""
    total = hidden.new_zeros(())
    for states, tokens in zip(hidden.split(PIECE), target.split(PIECE), strict=True):
        total = total + F.cross_entropy(F.linear(states, weight).float(), tokens, reduction="sum")
    return total / target.shape[0]


def joined(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Unsloth's and oat's way: log-probs of chunks, joined; a temperature and a softcap."""
    found = []
    for at in slices(hidden.shape[0]):
        logits = 3 * torch.tanh((hidden[at] @ weight.t()) / 3) / 0.7
        taken = logits.gather(-1, target[at].unsqueeze(-1)).squeeze(-1)
        found.append(taken - logits.logsumexp(-1))
    return -torch.cat(found).mean()


# ---- Functions ----------------------------------------------------------------------------------------------------


class _MadeAgain(torch.autograd.Function):
    """verl's way: log-prob and entropy of chunks of tokens; backward makes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropies = [], []
        for at in slices(hidden.shape[0]):
            logits = ((hidden[at] @ weight.t()) / 0.7).float()
            log_softmax = logits.log_softmax(-1)
            log_probs.append(log_softmax.gather(-1, target[at, None])[:, 0])
            entropies.append(logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1))
        ctx.save_for_backward(hidden, weight, target)
        return torch.cat(log_probs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, of_log_probs: Tensor, of_entropy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight, target = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for at in slices(hidden.shape[0]):
            logits = ((hidden[at] @ weight.t()) / 0.7).float()
            softmax, log_softmax = logits.softmax(-1), logits.log_softmax(-1)
            taken = torch.zeros_like(logits).scatter_(-1, target[at, None], 1.0)
            entropy = logits.logsumexp(-1) - (softmax * logits).sum(-1)
            grad = (taken - softmax) * of_log_probs[at, None]
            grad = grad - of_entropy[at, None] * softmax * (log_softmax + entropy[:, None])
            grad = (grad / 0.7).to(hidden.dtype)
            of_hidden[at] += grad @ weight
            of_weight += grad.t() @ hidden[at]
        return of_hidden, of_weight, None


def made_again(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_probs, entropy = _MadeAgain.apply(hidden, weight, target)
    return -log_probs.mean() - 0.01 * entropy.mean()


class _TakenInForward(torch.autograd.Function):
    """Liger's way: each chunk's gradient while its logits are there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float32)
        rows = hidden.shape[0]
        for at in slices(rows):
            logits = (hidden[at] @ weight.t()).float()
            lse = logits.logsumexp(-1, keepdim=True)
            column = target[at, None]
            loss = loss + (lse - logits.gather(-1, column)).sum() / rows
            grad = (logits - lse).exp()
            grad = grad.scatter_add(-1, column, torch.full_like(lse, -1.0)) / rows
            of_hidden[at] = grad.to(hidden.dtype) @ weight
            of_weight += grad.to(hidden.dtype).t() @ hidden[at]
        ctx.save_for_backward(of_hidden, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        of_hidden, of_weight = ctx.saved_tensors
        return grad * of_hidden, grad * of_weight, None


def taken_in_forward(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _TakenInForward.apply(hidden, weight, target)  # type: ignore[no-any-return]


class _ByTorchFunc(torch.autograd.Function):
    """Liger's preference losses and veomni's: `grad_and_value` of each chunk in forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        def loss(states: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
            logits = F.linear(states, weight).float()
            return F.cross_entropy(logits, tokens, reduction="sum") / hidden.shape[0]

        total, of_hidden, of_weight = torch.zeros(()), [], torch.zeros_like(weight)
        step = torch.func.grad_and_value(loss, argnums=(0, 1))
        for at in slices(hidden.shape[0]):
            (of_states, of_matrix), value = step(hidden[at], weight, target[at])
            of_hidden.append(of_states)
            of_weight.add_(of_matrix)
            total = total + value
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        of_hidden, of_weight = ctx.saved_tensors
        return grad * of_hidden, grad * of_weight, None


def by_torch_func(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _ByTorchFunc.apply(hidden, weight, target)  # type: ignore[no-any-return]


class _RunningSoftmax(torch.autograd.Function):
    """TRL's way: a running maximum and sum over chunks of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows = hidden.shape[0]
        top, mass = hidden.new_full((rows,), -torch.inf), hidden.new_zeros(rows)
        taken = hidden.new_zeros(rows)
        for start in range(0, weight.shape[0], MIN_VOCAB):
            part = weight[start : start + MIN_VOCAB]
            logits = hidden @ part.t()
            higher = torch.maximum(top, logits.amax(-1))
            mass = mass * (top - higher).exp() + (logits - higher[:, None]).exp().sum(-1)
            top = higher
            inside = (target >= start) & (target < start + part.shape[0])
            column = (target - start).clamp(0, part.shape[0] - 1)
            taken = torch.where(inside, logits.gather(-1, column[:, None])[:, 0], taken)
        lse = top + mass.log()
        ctx.save_for_backward(hidden, weight, target, lse)
        return taken - lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden, weight, target, lse = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), []
        for start in range(0, weight.shape[0], MIN_VOCAB):
            part = weight[start : start + MIN_VOCAB]
            columns = torch.arange(start, start + part.shape[0])
            softmax = (hidden @ part.t() - lse[:, None]).exp()
            share = ((target[:, None] == columns).to(softmax.dtype) - softmax) * grad[:, None]
            of_hidden = of_hidden + share @ part
            of_weight.append(share.t() @ hidden)
        return of_hidden, torch.cat(of_weight), None


def running_softmax(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -_RunningSoftmax.apply(hidden, weight, target).mean()  # type: ignore[no-any-return]


def checkpoint_per_chunk(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """TRL's way for supervised training, and DeepSpeed's."""

    def loss(states: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy((states @ weight.t()).float(), tokens, reduction="sum")

    parts = [
        checkpoint(loss, hidden[at], target[at], use_reentrant=False) for at in slices(len(hidden))
    ]
    return torch.stack(parts).sum() / hidden.shape[0]


# ---- tests --------------------------------------------------------------------------------------------------------


def compare(function: Loss, fn: Loss) -> None:
    """Values and gradients, with another number than 1 behind the loss."""
    hidden, weight, target = example(ROWS)
    results = []
    for each in (function, fn):
        loss = each(hidden, weight, target)
        results.append([loss, *torch.autograd.grad(3 * loss, (hidden, weight))])
    for mine, eager in zip(*results, strict=True):
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("fn", [summed, joined, made_again])
@pytest.mark.parametrize("choice", ["never", "always"])
def test_becomes_the_operators(fn: Loss, choice: str, graphs: list[Graph]) -> None:
    """One chunk each, made again in backward, never taken in forward: that would keep a gradient of the weight each."""
    compare(compiled(fn, chunk_mib=2 * 4 * PIECE * VOCAB, grad_in_forward=choice), fn)
    report = last_report()
    assert report["fused"] == 2 * 3  # pieces, forward and backward
    assert report["chunked_heads"] == 3
    assert report["saved_bytes_after"] == 0
    assert report["rejections"] == []
    told = [note for note in notes(report) if note.startswith("the logits [3, 37]")]
    assert len(told) == 1
    assert told[0].endswith(" are a piece of all rows: recomputed in backward, not saved")
    targets = [node.target for node in graphs[-1].nodes]
    assert targets.count(torch.ops.slime_fused.row_loop.default) == 6


STAYS = [
    taken_in_forward,  # forward computes the gradient of each piece and frees them
    by_torch_func,
    checkpoint_per_chunk,  # which recomputes them in backward
]


@pytest.mark.parametrize("fn", STAYS)
def test_stays_as_it_was(fn: Loss, graphs: list[Graph]) -> None:
    compare(compiled(fn, chunk_mib=2 * 4 * PIECE * VOCAB), fn)
    mine = str(graphs[-1])
    assert last_report()["chunked_heads"] == 0
    torch._dynamo.reset()
    compare(compiled(fn, lm_head=False), fn)
    assert _without_regions(mine) == _without_regions(str(graphs[-1]))


def _without_regions(graph: str) -> list[str]:
    return [line.split(", {")[0] for line in graph.splitlines()]


def test_chunks_of_the_vocabulary_become_the_operators(graphs: list[Graph]) -> None:
    """Each as if it were a vocabulary of its own, where it is wide enough; what runs over them is the program's."""
    compare(compiled(running_softmax), running_softmax)
    report = last_report()
    assert report["chunked_heads"] == 1  # 32 columns; the other 5 are no vocabulary
    assert report["saved_bytes_after"] == 0
    (note,) = notes(report)
    assert note.startswith("the logits [8, 32] at ")
    assert report["rejections"] == []


def test_pieces_of_one_chunk_together_stay(graphs: list[Graph]) -> None:
    """Kept they take no more than a chunk, and no second matmul."""
    compare(compiled(summed, chunk_mib=4 * ROWS * VOCAB), summed)
    assert last_report()["chunked_heads"] == 0


def test_pieces_without_gradient(graphs: list[Graph]) -> None:
    with torch.no_grad():
        inputs = example(ROWS)
        function = compiled(summed, chunk_mib=4 * PIECE * VOCAB)
        torch.testing.assert_close(function(*inputs), summed(*inputs))
    assert last_report()["chunked_heads"] == 0


def test_pieces_take_no_more_memory_than_eager_code() -> None:
    """All pieces' logits would be 8 chunks; an eager Function keeps none."""
    rows, vocab, width = 4096, 8192, 64
    with torch._subclasses.FakeTensorMode():
        hidden = torch.empty(rows, width, requires_grad=True)
        weight = torch.empty(vocab, width, requires_grad=True)
        target = torch.empty(rows, dtype=torch.int64)
        whole = 4 * rows * vocab

        def cut(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            total = hidden.new_zeros(())
            for at in range(0, rows, 512):
                logits = hidden[at : at + 512] @ weight.t()
                total = total + F.cross_entropy(logits, target[at : at + 512])
            return total

        found = slime_compile.estimate_peak(cut, hidden, weight, target)
        kept = slime_compile.estimate_peak(cut, hidden, weight, target, lm_head=False)
    assert found.peak_bytes < 0.3 * whole
    assert kept.peak_bytes > whole
