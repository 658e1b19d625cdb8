"""What a forward returns beside its results, as torch 2.11 writes it: dropped, or the gradient is lost."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fx_passes.function_outputs import drop_unread_outputs

apply = torch.ops.higher_order.autograd_function_apply


def body(outputs: int, reads: int) -> tuple[GraphModule, GraphModule]:
    """`x -> 2 x`, doubled in place and returned `outputs` times; backward reads the first `reads` gradients."""
    forward = Graph()
    made = forward.call_method("clone", (forward.placeholder("x"),))
    doubled = forward.call_method("mul_", (made, 2))
    forward.output(((made, *[doubled] * (outputs - 1)), ()))
    backward = Graph()
    gradients = [backward.placeholder(f"g{at}") for at in range(outputs)]
    total = gradients[0]
    for other in gradients[1:reads]:
        total = backward.call_function(operator.add, (total, other))
    backward.output((backward.call_function(operator.mul, (total, 2)),))
    return GraphModule({}, forward), GraphModule({}, backward)


def calling(outputs: int, reads: int, results: tuple[int, ...], marked: list[int]) -> GraphModule:
    root = torch.nn.Module()
    root.forward_body, root.backward_body = body(outputs, reads)
    graph = Graph()
    x = graph.placeholder("x")
    bodies = [graph.get_attr("forward_body"), graph.get_attr("backward_body")]
    named = {"non_differentiable_idx": marked, "saved_for_backward_idx": []}
    call = graph.call_function(apply, (*bodies, x), named)
    graph.output(tuple(graph.call_function(operator.getitem, (call, at)) for at in results))
    return GraphModule(root, graph)


def call_of(gm: GraphModule) -> Node:
    (call,) = gm.graph.find_nodes(op="call_function", target=apply)
    return call


def gradient(gm: GraphModule, x: Tensor) -> Tensor:
    return torch.autograd.grad(gm(x)[0].sum(), x)[0]


def test_the_gradient_is_not_lost() -> None:
    x = torch.ones(3, requires_grad=True)
    gm = calling(outputs=3, reads=1, results=(0,), marked=[])
    assert gradient(gm, x).tolist() == [0, 0, 0], "torch returns one tensor at several places"
    assert drop_unread_outputs(gm) == 2
    gm.graph.lint()
    assert gradient(gm, x).tolist() == [2, 2, 2]
    assert drop_unread_outputs(gm) == 0


def test_what_is_read_stays_and_is_renumbered() -> None:
    gm = calling(outputs=4, reads=1, results=(0, 3), marked=[1, 3])
    assert drop_unread_outputs(gm) == 2
    assert [user.args[1] for user in call_of(gm).users] == [0, 1]
    assert call_of(gm).kwargs["non_differentiable_idx"] == [1]


def test_an_output_whose_gradient_is_read_stays() -> None:
    gm = calling(outputs=2, reads=2, results=(0,), marked=[])
    assert drop_unread_outputs(gm) == 0


def test_a_body_of_two_calls_stays() -> None:
    gm = calling(outputs=2, reads=1, results=(0,), marked=[])
    call = call_of(gm)
    with gm.graph.inserting_after(call):
        gm.graph.call_function(apply, call.args, dict(call.kwargs))
    assert drop_unread_outputs(gm) == 0


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        made = x.clone()
        made.mul_(2)
        return made

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * 2


class Returned(InPlace):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone().mul_(2)


@pytest.mark.parametrize("function", [InPlace, Returned])
def test_compiled(function: type[torch.autograd.Function]) -> None:
    """On torch 2.11 with backend="inductor": 0."""
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    fn = torch.compile(
        lambda x: function.apply(x), backend="slime_fused", options={"inner": "aot_eager"}
    )
    fn(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
