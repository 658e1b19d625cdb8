"""Equal matmuls of one hidden and one weight become one: same values and gradients, or the graph stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from fx_passes.equal_heads import share_heads
from fx_passes.row_demand.heads import heads_of

ROWS, VOCAB, HIDDEN = 6, 37, 4
Program = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def arguments() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=draw) for n in (ROWS, VOCAB))
    return hidden.requires_grad_(), weight.requires_grad_()


def run(program: Program, edit: Callable[[GraphModule], Any]) -> tuple[list[Tensor], list[Any]]:
    """Value and gradients of the program whose graph was edited; what each edit returned, and the heads after it."""
    answers: list[Any] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        answers.append((edit(gm), len(list(heads_of(gm.graph, 32))), len(gm.graph.nodes)))
        gm.graph.lint()
        gm.recompile()
        return gm

    inputs = arguments()
    value = torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    return [value, *torch.autograd.grad(value.sum(), inputs)], answers


def both(program: Program) -> tuple[int, int, int]:
    """How many heads are gone, how many are left, how many nodes."""
    want, _ = run(program, lambda gm: None)
    torch._dynamo.reset()
    found, (answer,) = run(program, lambda gm: share_heads(gm.graph, 32))
    torch.testing.assert_close(found, want)
    return answer


# ---- shared -------------------------------------------------------------------------------------------------------


def twice(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w).exp() + F.linear(h, w).tanh()


def rows_and_temperature(h: Tensor, w: Tensor) -> Tensor:
    first = (F.linear(h, w)[1:] / 2.0).float().log_softmax(-1)
    return first * (F.linear(h, w)[1:] / 2.0).float().exp()


def other_rows(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w)[1:].exp() + F.linear(h, w)[:-1].exp()


def a_metric(h: Tensor, w: Tensor) -> Tensor:
    loss = F.linear(h, w).exp()
    with torch.no_grad():
        with torch.enable_grad():
            logits = F.linear(h, w)
        metric = logits.tanh()
    return loss + metric


def beside_a_change(h: Tensor, w: Tensor) -> Tensor:
    """In place, of what neither the logits nor what they are made of is."""
    buffer = torch.zeros(ROWS, VOCAB)
    first = F.linear(h, w)
    buffer[1:] = first[1:].detach()
    F.relu(buffer, True)
    return first.exp() + F.linear(h, w).tanh() + buffer


@pytest.mark.parametrize(
    "program", [twice, rows_and_temperature, other_rows, a_metric, beside_a_change]
)
def test_shared(program: Program) -> None:
    gone, left, _ = both(program)
    assert (gone, left) == (1, 1)


def test_what_is_made_of_it_in_the_same_way_is_shared_too() -> None:
    _, _, nodes = both(rows_and_temperature)
    # two inputs; linear, slice, temperature, cast; log_softmax, exp, product; output
    assert nodes == 10


def test_twice_is_as_often_as_once() -> None:
    def again(gm: GraphModule) -> tuple[int, int]:
        return share_heads(gm.graph, 32), share_heads(gm.graph, 32)

    _, [(answer, *_)] = run(twice, again)
    assert answer == (1, 0)


# ---- left as it was -----------------------------------------------------------------------------------------------


def changed_in_place(h: Tensor, w: Tensor) -> Tensor:
    first = F.linear(h, w)
    second = F.linear(h, w)
    first.mul_(2)
    return first.exp() + second.exp()


def changed_through_a_view(h: Tensor, w: Tensor) -> Tensor:
    first = F.linear(h, w)
    second = F.linear(h, w)
    first[1:].mul_(2)
    return first.exp() + second.exp()


def weight_changes_between(h: Tensor, w: Tensor) -> Tensor:
    states, other = h.detach(), w * 1
    first = F.linear(states, other).exp()  # whose gradient needs the states only
    other.mul_(2)
    return first + F.linear(states, other).exp() + h.sum()


def another_weight(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w).exp() + F.linear(h, w * 2).exp()


def one_without_gradient(h: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        first = F.linear(h, w)
    return first.exp() + F.linear(h, w).exp()


def another_autocast(h: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = F.linear(h, w)
    return first.float().exp() + F.linear(h, w).exp()


def changed_by_a_flag(h: Tensor, w: Tensor) -> Tensor:
    first, second = F.linear(h, w), F.linear(h, w)
    F.relu(first, True)
    return first.exp() + second.exp()


def hidden_changes_between(h: Tensor, w: Tensor) -> Tensor:
    states, other = h * 1, w.detach()
    first = F.linear(states, other).exp()
    torch._foreach_mul_([states.detach()], 2)
    return first + F.linear(states, other).exp() + w.sum()


def hooked(h: Tensor, w: Tensor) -> Tensor:
    first, second = F.linear(h, w), F.linear(h, w)
    first.register_hook(lambda grad: grad * 2)
    return first.exp() + second.exp()


LEFT = [
    changed_by_a_flag,
    hidden_changes_between,
    hooked,
    changed_in_place,
    changed_through_a_view,
    weight_changes_between,
    another_weight,
    one_without_gradient,
    another_autocast,
]


@pytest.mark.parametrize("program", LEFT)
def test_left(program: Program) -> None:
    gone, left, _ = both(program)
    assert (gone, left) == (0, 2)


def test_returned_logits_are_left() -> None:
    def program(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = F.linear(h, w), F.linear(h, w)
        return first.exp(), first[1:], second.detach()

    answers = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        answers.append(share_heads(gm.graph, 32))
        return gm

    torch.compile(program, backend=backend, fullgraph=True)(*arguments())
    assert answers == [0]


def test_numbers_that_change_between_are_read_twice() -> None:
    """The logits are shared, and what is made of them is not."""

    def program(h: Tensor, w: Tensor) -> Tensor:
        shift = w[:ROWS, :1].detach() * 1
        first = (F.linear(h, w) + shift).tanh()
        F.relu(shift, True)
        return first + (F.linear(h, w) + shift).tanh()

    gone, left, _ = both(program)
    assert (gone, left) == (1, 1)


def test_numbers_of_another_type_are_others() -> None:
    def program(h: Tensor, w: Tensor) -> Tensor:
        return F.linear(h, w).mul(1).exp() + F.linear(h, w).mul(1.0).exp()

    want, [(_, _, before)] = run(program, lambda gm: None)
    torch._dynamo.reset()
    found, [(gone, _, after)] = run(program, lambda gm: share_heads(gm.graph, 32))
    torch.testing.assert_close(found, want)
    assert (gone, before - after) == (1, 1)
