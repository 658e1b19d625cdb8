"""What a node of Dynamo's graph changes, by every way there is to change a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from fx_passes.graph.writes import Writes, example
from tests.cases.changes import WAYS

torch.library.define("slime_tests::fresh", "(Tensor x, Tensor(a!) log) -> Tensor")
torch.library.impl(
    "slime_tests::fresh", "CompositeExplicitAutograd", lambda x, log: log.copy_(x) + 1
)
torch.library.register_fake("slime_tests::fresh", lambda x, log: torch.empty_like(x))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class SquareInPlaceBackward(Square):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(grad)


def _hooked(x: Tensor) -> None:
    x.register_hook(lambda grad: grad * 2)


def _buffer(x: Tensor) -> Tensor:
    buffer = torch.zeros_like(x)
    buffer[1:] = x[1:]
    return buffer.div_(2)


def _in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


MORE_WAYS: dict[str, Callable[[Tensor], Any]] = {
    "a function's backward": lambda x: SquareInPlaceBackward.apply(x),
    "one argument of several": lambda x: torch.ops.slime_tests.fresh(torch.ones(5, 6), x),
    "a view of a view": lambda x: x[1:].t()[2:].mul_(2),
    "a list of outputs": lambda x: torch.frexp(
        x * 1, out=(x, torch.empty(5, 6, dtype=torch.int32))
    ),
    "a shape": lambda x: x.t_(),
    "a hook": _hooked,
    "another dtype": lambda x: x.view(torch.int32).zero_(),
}

NO_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + x.sum(-1, keepdim=True)).relu(),
    "views": lambda x: x[1:].t().reshape(-1).split(3)[0],
    "a copy that is changed": lambda x: x.clone().mul_(2),
    "a buffer": _buffer,
    "an out of its own": lambda x: torch.mul(x.detach(), 2, out=torch.empty_like(x)),
    "a flag that is off": lambda x: F.dropout(F.relu(x, False), 0.5, True, False),
    "a loss": lambda x: F.cross_entropy(x, torch.arange(5)),
    "an autograd function": lambda x: Square.apply(x),
    "a checkpoint": lambda x: checkpoint(lambda x: x.exp().mul_(2), x, use_reentrant=False),
    "autocast": _in_autocast,
    "a gradient mode": _without_gradient,
    "an operator that logs": lambda x: torch.ops.slime_tests.fresh(x, torch.empty(5, 6)),
    "a number": lambda x: x.shape[0] + x.dim() + x.numel(),
    "a conversion": lambda x: x.float().to(torch.float64).contiguous(),
    "rows by data": lambda x: x[x[:, 0] > 0].sum(),
}


def changes(function: Callable[[Tensor], Any], grad: bool, dynamic: bool = False) -> bool:
    """Whether the graph of `function` says that its argument's memory changes, or its gradient by a hook."""
    found: list[bool] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        graph: Graph = gm.graph
        before = [_facts(node) for node in graph.nodes]
        writes = Writes(graph)
        made = graph.find_nodes(op="call_function", target=torch.mul)
        found.append(writes.change(graph.nodes, writes.memory(made[:1])))
        assert [_facts(node) for node in graph.nodes] == before
        return gm

    def program(x: Tensor) -> Any:
        x = torch.mul(x, 1)
        made = function(x)
        return x.sum(), made

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(
            torch.randn(5, 6, requires_grad=grad)
        )
    return found[0]


def _facts(node: torch.fx.Node) -> Any:
    value = example(node)
    if not isinstance(value, Tensor):
        return type(value)
    return value.shape, value.requires_grad, value._version, value.untyped_storage()._cdata


@pytest.mark.parametrize("way", [*WAYS, *MORE_WAYS])
def test_a_change_is_seen(way: str) -> None:
    assert changes((WAYS | MORE_WAYS)[way], "function" in way or way == "a hook")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", NO_CHANGES)
def test_nothing_changes(way: str, dynamic: bool) -> None:
    assert not changes(NO_CHANGES[way], True, dynamic)


def test_an_unknown_function_may_change_what_it_is_given() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    called = graph.call_function(lambda x: x, (x,))
    graph.output((called, y))
    with torch._subclasses.FakeTensorMode():
        for node in (x, y, called):
            node.meta["example_value"] = torch.ones(3)
    writes = Writes(graph)
    assert writes.change([called], writes.memory([x]))
    assert not writes.change([called], writes.memory([y]))


def test_nothing_runs_before_somebody_asks() -> None:
    graph = Graph()
    graph.output(graph.placeholder("x"))  # of which nothing is known
    writes = Writes(graph)
    assert not writes._runs
    assert writes.change([], frozenset())
