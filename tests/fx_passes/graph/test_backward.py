"""What belongs to backward: torch's tags, and what Dynamo traced of an autograd.Function, which has none."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

import slime_compile
from fx_passes.graph.backward import mark_backward
from fx_passes.graph.facts import is_backward
from slime_compile.backend import interpreted
from tests.support.harness import OPTIONS
from tests.support.ranks import on_threads, own_copy

ROWS, VOCAB = 5, 64


class Exponentials(torch.autograd.Function):
    """The exponentials as they are, and their sum over all ranks; backward has three full-vocabulary values."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        height, e = logits.amax(-1), logits.exp()
        total = e.sum(-1)
        dist.all_reduce(height, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        ctx.save_for_backward(e)
        return e, total.log() + height

    @staticmethod
    def backward(ctx: Any, grad_e: Tensor, grad_log: Tensor) -> Tensor:
        (e,) = ctx.saved_tensors
        half = e * 0.5
        return (half + e * 0.25) * grad_log[:, None] + half * grad_log[:, None]


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    e, log = Exponentials.apply(logits)
    return e.detach(), log


def _collectives_left(rank: int, train: bool) -> int:
    logits = torch.randn(ROWS, VOCAB, requires_grad=train)
    explained = slime_compile.explain(own_copy(exponentials), **OPTIONS)
    return int(explained(logits).to_dict()["collectives_after"])


def test_a_rank_without_gradient_exchanges_what_the_others_do() -> None:
    """Forward alone decides where there are collectives; what an autograd.Function does in backward is not forward."""
    assert on_threads(2, _collectives_left, True) == on_threads(2, _collectives_left, False)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y.mul_(y.mean() + 1) * grad[:, None]


def test_the_backward_of_an_autograd_function(monkeypatch: Any) -> None:
    seen: dict[str, bool] = {}

    def keep(graph: Graph, *_: object) -> None:
        mark_backward(graph)
        for node in graph.nodes:
            seen.setdefault(str(node.target), is_backward(node))

    monkeypatch.setattr(interpreted, "run_fuse", keep)
    torch._dynamo.reset()
    x = torch.randn(ROWS, VOCAB, requires_grad=True)
    torch.compile(lambda x: Scaled.apply(x), backend="slime_fused", options=OPTIONS)(x)
    assert not seen["aten.exp.default"]
    assert not seen["aten.sum.dim_IntList"]
    assert seen["aten.mean.default"], (
        "it reads forward's values alone, but was traced after forward"
    )
    assert seen["aten.mul.Tensor"]
    assert seen["tangents_1"]
    assert not seen["primals_1"]


def test_a_gradient_that_forward_takes_itself(monkeypatch: Any) -> None:
    """Torch tags it as backward's; but it is returned."""
    returned: list[bool] = []

    def keep(graph: Graph, *_: object) -> None:
        mark_backward(graph)
        returned.extend(map(is_backward, graph.output_node().all_input_nodes))

    monkeypatch.setattr(interpreted, "run_fuse", keep)
    torch._dynamo.reset()

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.grad_and_value(lambda x: x.log_softmax(-1)[:, 0].mean())(x)

    x = torch.randn(ROWS, VOCAB, requires_grad=True)
    torch.compile(program, backend="slime_fused", options=OPTIONS)(x)
    assert returned == [False, False, True]  # the gradient, the value, backward's gradient
