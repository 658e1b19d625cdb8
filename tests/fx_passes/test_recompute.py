"""What the partitioner is told to compute again in backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from fx_passes.graph import recompute
from tests.support import harness

ROWS, VOCAB = 5, 64
Program = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]


def masked(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.masked_fill(~allowed, -math.inf), target)


def doubled(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    return masked(logits * 2 - allowed.float(), allowed, target)


def returned(logits: Tensor, allowed: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = logits.masked_fill(~allowed, -math.inf)
    return F.cross_entropy(kept, target), kept


def logits_returned(logits: Tensor, allowed: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A view of them, which is the caller's anyway."""
    return masked(logits, allowed, target), logits.detach()[0]


def softmax_returned(logits: Tensor, allowed: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    probs = logits.masked_fill(~allowed, -math.inf).softmax(-1)
    return -probs.gather(-1, target[:, None]).log().mean(), probs.detach()


def read_by_a_matmul(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    """In backward, the copy: the gradient of what it is multiplied by."""
    kept = logits.masked_fill(~allowed, -9.0)
    return F.cross_entropy(kept, target) + (kept @ logits.t()).square().mean()


def among_columns(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    """Of a mask that is computed from the logits."""
    return masked(logits, logits >= logits.topk(60, -1).values[:, -1:].detach(), target)


def among_chosen_columns(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    """Of a mask that no arithmetic makes."""
    chosen = torch.zeros_like(allowed.expand(ROWS, -1)).scatter(-1, logits.topk(60, -1).indices, 1)
    return masked(logits, chosen, target)


def made_inside(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    return masked(logits @ torch.eye(VOCAB), allowed, target)


def picked(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    """Rows that are a copy: backward may write over it."""
    return masked(logits[target.flip(0)], allowed, target)


def plain(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


@pytest.mark.parametrize(
    ("program", "copies"),
    [
        (masked, 1),
        (doubled, 1),
        (returned, 1),
        (logits_returned, 1),
        (softmax_returned, 0),
        (read_by_a_matmul, 0),
        (among_columns, 1),
        (among_chosen_columns, 0),
        (made_inside, 0),
        (picked, 0),
        (plain, 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_copies(program: Program, copies: int, graphs: list[torch.fx.Graph]) -> None:
    leaf = torch.randn(ROWS, VOCAB, requires_grad=True)
    allowed, target = torch.arange(VOCAB) < VOCAB - 2, torch.arange(ROWS)
    fused = torch.compile(program, backend="slime_fused", options=dict(harness.OPTIONS))
    losses = [fn(leaf, allowed, target) for fn in (program, fused)]
    one, two = (loss[0] if isinstance(loss, tuple) else loss for loss in losses)
    torch.testing.assert_close(torch.autograd.grad(one, leaf), torch.autograd.grad(two, leaf))
    (graph,) = graphs
    statistics = torch.ops.slime_fused.row_stats.default
    read = {n.args[0] for n in graph.find_nodes(op="call_function", target=statistics)}
    again = {n for n in graph.nodes if n.meta.get("recompute") == CheckpointPolicy.PREFER_RECOMPUTE}
    assert len(read & again) == copies
    assert all(node.meta["val"].shape == (ROWS, VOCAB) for node in again)
    made_of = {n for copy in read & again for n in copy.all_input_nodes if n.op == "call_function"}
    assert all(
        n in again for n in made_of if n.meta["val"].is_floating_point() and n.meta["val"].ndim
    )
    for node in graph.nodes:  # what someone has decided stays
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    recompute.recompute_elements(graph)
    policies = [node.meta.get("recompute") for node in graph.nodes]
    assert CheckpointPolicy.PREFER_RECOMPUTE not in policies


def rescaled(logits: Tensor, allowed: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = F.softplus(logits)
    return F.cross_entropy(kept, target), kept.detach()


def both_returned(logits: Tensor, allowed: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One is made of the other."""
    kept = logits / 0.7
    only = kept.masked_fill(~allowed, -math.inf)
    return F.cross_entropy(only, target), kept.detach(), only.detach()


def of_bfloat16(logits: Tensor, allowed: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = F.softplus(logits.bfloat16())
    return (kept.log_softmax(-1) * kept.softmax(-1)).sum(), kept.detach()


@pytest.mark.parametrize("program", [returned, rescaled, both_returned, of_bfloat16])
def test_results_that_the_caller_overwrites(program: Program) -> None:
    """The caller's results are not read in backward where what they are made of can be."""
    leaf = torch.randn(ROWS, VOCAB, requires_grad=True)
    allowed, target = torch.arange(VOCAB) < VOCAB - 2, torch.arange(ROWS)
    fused = torch.compile(program, backend="slime_fused", options=dict(harness.OPTIONS))
    found = []
    for fn in (program, fused):
        loss, *results = fn(leaf, allowed, target)
        with torch.no_grad():
            for result in results:
                result.detach().zero_()
        found.append(torch.autograd.grad(loss, leaf)[0])
    atol = 1e-2 if program is of_bfloat16 else 1e-6
    torch.testing.assert_close(found[1], found[0], atol=atol, rtol=0)


@pytest.mark.parametrize(
    "unchanged",
    [lambda logits: logits / 1.0, lambda logits: logits + torch.zeros([])],
    ids=["a temperature of 1", "a bias of 0"],
)
def test_what_torch_takes_out(unchanged: Callable[[Tensor], Tensor]) -> None:
    """Its mark, to compute it again, would be that of the logits."""

    def loss(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
        return masked(unchanged(logits), allowed, target)

    leaf = torch.randn(ROWS, VOCAB, requires_grad=True)
    allowed, target = torch.arange(VOCAB) < VOCAB - 2, torch.arange(ROWS)
    options = {"inner": "inductor", "min_vocab": VOCAB, "strict": True}
    fused = torch.compile(loss, backend="slime_fused", options=options)
    one, two = (torch.autograd.grad(fn(leaf, allowed, target), leaf) for fn in (loss, fused))
    torch.testing.assert_close(one, two)


def test_given_logits_that_forward_changes() -> None:
    def changed(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
        loss = masked(logits, allowed, target)
        logits.detach().zero_()
        return loss

    leaf = torch.randn(ROWS, VOCAB, requires_grad=True)
    allowed, target = torch.arange(VOCAB) < VOCAB - 2, torch.arange(ROWS)
    fused = torch.compile(changed, backend="slime_fused", options=dict(harness.OPTIONS))
    one, two = (torch.autograd.grad(fn(leaf * 1, allowed, target), leaf) for fn in (changed, fused))
    torch.testing.assert_close(one, two)
