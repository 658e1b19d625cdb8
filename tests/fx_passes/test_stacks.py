"""Stacks of full-vocabulary values that are reduced again become arithmetic on their pieces; other stacks stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from fx_passes.stacks import unstack
from tests.support.harness import OPTIONS, VOCAB, no_worse_than_eager

ROWS = 64
Mixture = Callable[[list[Tensor]], Tensor]
"""Of log-probs `[N, V]`, one tensor `[N, V]`."""

REDUCED: dict[str, Mixture] = {
    "logsumexp": lambda p: torch.stack(p).logsumexp(0),
    "logsumexp, rows first": lambda p: torch.stack(p, 1).logsumexp(1),
    "logsumexp, dimension kept": lambda p: torch.stack(p, -2).logsumexp(-2, True)[:, 0],
    "logsumexp, of one sample": lambda p: torch.stack([each[None] for each in p]).logsumexp(0)[0],
    "logsumexp, of one sample, behind it": lambda p: torch.stack(
        [each[None] for each in p], 1
    ).logsumexp(1)[0],
    "joined by hand": lambda p: torch.cat([each[None] for each in p]).logsumexp(0),
    "weights of their own": lambda p: (
        torch.stack(p) + p[0].new_tensor([-1.0, -0.5, 0.25][: len(p)])[:, None, None]
    ).logsumexp(0),
    "weights per row": lambda p: (
        torch.stack(p, 1) * torch.arange(ROWS * len(p)).view(ROWS, len(p), 1)
    ).sum(1),
    "sum of probabilities": lambda p: torch.stack(p).exp().sum(0).log(),
    "mean": lambda p: torch.stack(p).exp().mean(0).log(),
    "maximum": lambda p: torch.stack(p).amax(0),
    "minimum": lambda p: torch.stack(p, 1).amin(1),
    "one of them": lambda p: torch.stack(p)[1] - torch.stack(p)[0],
    "sums over the vocabulary": lambda p: torch.stack(p).exp().square().sum(-1).sum(0)[:, None],
    "sums over the vocabulary, kept": lambda p: torch.stack(p, 1).square().sum(-1, True).sum(1),
    "products of two stacks": lambda p: (torch.stack(p) * torch.stack(p[::-1])).sum(0),
    "counted": lambda p: (torch.stack(p) > -4).sum(0) * p[0],
}

OTHERS: dict[str, Mixture] = {
    "sorted": lambda p: torch.stack(p).sort(0).values[0],
    "the maximum and where": lambda p: torch.stack(p).max(0).values,
    "over the vocabulary, too": lambda p: torch.stack(p).exp().sum((0, 2))[:, None] * p[0],
    "over rows": lambda p: torch.stack(p, 1).exp().sum(0).amax(0) * p[0],
    "behind the vocabulary": lambda p: torch.stack(p, -1).amax(-1),
    "running sum": lambda p: torch.stack(p).cumsum(0)[-1],
    "over all": lambda p: torch.stack(p).exp().sum() * p[0],
    "more than a few": lambda p: torch.stack(p * 3).logsumexp(0),
    "not as large": lambda p: torch.cat([p[0], p[1][:1]]).exp().sum(0, True) * p[0],
    "samples joined": lambda p: (
        torch.cat([each[None] for each in p]).view(-1, VOCAB).exp().sum(0, True) * p[0]
    ),
    "rows joined": lambda p: torch.cat(p).exp().sum(0, True) * p[0],
}


def loss_of(mixture: Mixture) -> Callable[..., Tensor]:
    def loss(*logits: Tensor) -> Tensor:
        return mixture([x.log_softmax(-1) for x in logits]).square().mean(-1)

    return loss


def draw(count: int, seed: int = 0) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    made = [3 * torch.randn(ROWS, VOCAB, generator=drawn) for _ in range(count)]
    made[0][0, 3] = made[1][0, 3] = -math.inf  # what all pieces forbid
    made[1][1, 5] = -math.inf
    return made


def run(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given]
    value = fn(*leaves)
    return [value.detach(), *torch.autograd.grad(value[2:].sum(), leaves, materialize_grads=True)]


def joins(graphs: list[Graph]) -> int:
    target = torch.ops.aten.cat.default
    found = [n for g in graphs for n in g.find_nodes(op="call_function", target=target)]
    return sum(VOCAB in node.all_input_nodes[0].meta["val"].shape for node in found)


def check(mixture: Mixture, count: int) -> None:
    """As near to the truth as eager code is in any of several draws."""
    loss = loss_of(mixture)
    torch._dynamo.reset()
    fused = torch.compile(loss, backend="slime_fused", options=OPTIONS)
    drawn = [draw(count, seed) for seed in range(8)]
    eager = [run(loss, given) for given in drawn]
    truth = [run(loss, [x.double() for x in given]) for given in drawn]
    for at, actual in enumerate(run(fused, drawn[0])):
        errors = torch.cat([(e[at] - t[at]).flatten() for e, t in zip(eager, truth, strict=True)])
        usual = errors[errors.isfinite()].abs()
        no_worse_than_eager(actual, eager[0][at], truth[0][at], torch.float32, more_errors=usual)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", REDUCED)
def test_reduced(name: str, count: int, graphs: list[Graph]) -> None:
    check(REDUCED[name], count)
    assert not joins(graphs)


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin"])
def test_half_precision(name: str) -> None:
    """Pieces are summed in float32, as in a reduction: 256 + 1 + 1 is 258, not 256."""

    def program(*pieces: Tensor) -> Tensor:
        return getattr(torch.cat([piece[None] for piece in pieces]), name)(0)

    pieces = [torch.full([1, VOCAB], number, dtype=torch.bfloat16) for number in (256, 1, 1)]
    module = make_fx(program, tracing_mode="fake")(*pieces)
    assert unstack(module.graph, VOCAB) == 1
    module.recompile()
    assert torch.equal(module(*pieces), program(*pieces))


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@pytest.mark.parametrize("second", DTYPES, ids=str)
@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_rows_of_two_dtypes(first: torch.dtype, second: torch.dtype) -> None:
    """All of them are promoted before anything is done to the stack, and what is taken out stays promoted."""

    def program(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        stack = torch.stack([x, z])
        joined = torch.cat([x[None], z[None]])
        return (
            stack[0],
            stack.exp().sum(0),
            stack.mean(0),
            stack.amax(0),
            joined.exp().sum(0),
        )

    x, z = (3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    given = x.to(first), z.to(second)
    table = get_decompositions([torch.ops.aten.stack])
    module = make_fx(program, tracing_mode="fake", decomposition_table=table)(*given)
    assert unstack(module.graph, VOCAB) == 2
    module.recompile()
    for got, wanted in zip(module(*given), program(*given), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", OTHERS)
def test_what_stays(name: str, graphs: list[Graph]) -> None:
    check(OTHERS[name], 2)
    assert joins(graphs)


def test_what_is_taken_out_is_no_view_of_what_was_put_in(graphs: list[Graph]) -> None:
    def loss(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        stack = torch.stack([x, z])
        return stack.logsumexp(0), stack[1]

    torch._dynamo.reset()
    fn = torch.compile(loss, backend="slime_fused", options=OPTIONS)
    x, z = draw(2)
    _, taken = fn(x, z)
    assert not joins(graphs)
    assert torch.equal(taken, z)
    taken.zero_()
    assert z.any()


def test_without_logits(graphs: list[Graph]) -> None:
    """Stacks of anything that is as wide as a vocabulary; of nothing else."""

    def loss(x: Tensor, z: Tensor) -> Tensor:
        return torch.stack([x.sin(), z.cos()]).logsumexp(0)

    fn = torch.compile(loss, backend="slime_fused", options=OPTIONS)
    for count, columns in ((0, VOCAB), (1, VOCAB // 2)):
        torch._dynamo.reset()
        graphs.clear()
        given = [each[2:, :columns] for each in draw(2)]
        torch.testing.assert_close(fn(*given), loss(*given))
        (graph,) = graphs
        target = torch.ops.aten.cat.default
        assert len(graph.find_nodes(op="call_function", target=target)) == count
