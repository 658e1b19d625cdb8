"""Rows whose number data alone says: cut at a number out of a tensor, or selected by a mask, in one graph.

Torch learns such programs release by release: what it cannot compile without us is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from tests.support import harness
from tests.support.ranks import own_copy

ROWS, WIDTH, VOCAB, MISSED = 24, 8, 64, 5

Loss = Callable[..., Tensor]
LOSSES: dict[str, Loss] = {}


def loss(fn: Loss) -> Loss:
    LOSSES[fn.__name__] = fn
    return fn


def logits_of(hidden: Tensor, weight: Tensor | None) -> Tensor:
    return hidden if weight is None else hidden @ weight.t()


def counted(labels: Tensor) -> int:
    return int((labels != -100).sum())


@loss
def a_mean_over_a_number(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    log_probs = logits_of(hidden, weight).log_softmax(-1)
    return F.nll_loss(log_probs, labels, reduction="sum") / max(counted(labels), 1)


@loss
def logits_cut(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    rows = counted(labels)
    return F.cross_entropy(logits_of(hidden, weight)[:rows], labels[:rows])


@loss
def log_probs_cut(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    rows = (labels != -100).sum(0, keepdim=True).tolist()[0]
    log_probs = logits_of(hidden, weight).log_softmax(-1)
    return log_probs[rows:].gather(1, labels[rows:, None].clamp(min=0)).sum()


@loss
def entropy_cut_twice(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    """Inductor of torch 2.15 cannot cut a number per row that is a view of what it has not made yet."""
    rows = counted(labels)
    logits = logits_of(hidden, weight)
    entropy = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return entropy[:rows].mean() + entropy[rows:].sum()


@loss
def logits_selected(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    mask = labels != -100
    return F.cross_entropy(logits_of(hidden, weight)[mask], labels[mask])


@loss
def logits_picked(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    rows = (labels != -100).nonzero().squeeze(1)
    log_probs = logits_of(hidden, weight)[rows].log_softmax(-1)
    return log_probs.gather(1, labels[rows, None]).sum()


@loss
def log_probs_selected(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    log_probs = logits_of(hidden, weight).log_softmax(-1)
    chosen = log_probs.gather(1, labels[:, None].clamp(min=0)).squeeze(1)
    return chosen.masked_select(labels != -100).mean()


def sequences(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Four of them, and without those that have no token to learn; and their targets."""
    targets = labels.view(4, -1)
    kept = (targets != -100).all(1)
    return logits_of(hidden, weight).view(*targets.shape, VOCAB)[kept], targets[kept]


@loss
def sequences_shifted_and_flattened(
    hidden: Tensor, weight: Tensor | None, labels: Tensor
) -> Tensor:
    logits, targets = sequences(hidden, weight, labels)
    rows = logits[:, :-1].contiguous().view(-1, VOCAB)
    return F.cross_entropy(rows, targets[:, 1:].flatten(), reduction="none").square().sum()


@loss
def sequences_turned_and_flattened(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    """No view shows rows in this order."""
    logits, targets = sequences(hidden, weight, labels)
    log_probs = logits.transpose(0, 1).reshape(-1, VOCAB).log_softmax(-1)
    return log_probs.gather(-1, targets.t().reshape(-1, 1)).square().sum()


@loss
def rows_repeated(hidden: Tensor, weight: Tensor | None, labels: Tensor) -> Tensor:
    rows = (labels != -100).nonzero()[:, 0]
    logits = logits_of(hidden, weight)[rows].repeat_interleave(2, 0)
    targets = labels[rows].repeat_interleave(2)
    return logits.log_softmax(-1).gather(-1, targets[:, None]).square().sum()


@pytest.fixture(autouse=True)
def one_graph() -> Iterator[None]:
    captured = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(captured):
        yield


def data(head: bool) -> tuple[list[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (VOCAB, WIDTH)] if head else [(ROWS, VOCAB)]
    leaves = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    labels = torch.randint(0, VOCAB, (ROWS,), generator=draw)
    labels[:MISSED] = -100
    return leaves, labels


def compiled(name: str, backend: str, options: dict[str, Any] | None = None) -> Any:
    torch._dynamo.reset()
    return torch.compile(own_copy(LOSSES[name]), backend=backend, options=options, fullgraph=True)


def fails_in_plain_torch(name: str, backend: str, arguments: list[Any]) -> bool:
    try:
        compiled(name, backend)(*arguments).backward()
    except Exception:
        return True
    return False


@harness.each_inner
@pytest.mark.parametrize("head", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("name", LOSSES)
def test_equal_to_eager(name: str, head: bool, inner: str) -> None:
    options: dict[str, Any] = {"inner": inner, "min_vocab": 32}
    leaves, labels = data(head)
    arguments = [*leaves, *([] if head else [None]), labels]
    known = len(slime_compile.reports())
    try:
        found = compiled(name, "slime_fused", options)(*arguments)
    except Exception:
        assert fails_in_plain_torch(name, inner, arguments)
        pytest.skip("torch fails on it without us, too")
    wanted = LOSSES[name](*arguments)
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    (report,) = slime_compile.reports()[known:]
    if inner == "aot_eager":
        assert report.fused > 0, report
        assert not report.graphs[0].failed, report
