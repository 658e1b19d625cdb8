"""Equal matmuls of one hidden and one weight become one, with the same values and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from fx_passes.equal_heads import share_heads
from fx_passes.graph.facts import is_wide

aten = torch.ops.aten
ROWS, VOCAB, HIDDEN = 6, 37, 4
Program = Callable[[Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def arguments() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=draw) for n in (ROWS, VOCAB))
    return hidden.requires_grad_(), weight.requires_grad_()


def run(program: Program, times: int) -> tuple[list[Tensor], list[int], Counter[Any]]:
    """Value and gradients; how many heads are gone each time; of the edited graph how often it calls what."""
    gone: list[int] = []
    calls: Counter[Any] = Counter()

    def partition(gm: GraphModule, inputs: Any, **more: Any) -> Any:
        gone.extend(share_heads(gm.graph, 32) for _ in range(times))
        gm.graph.lint()
        gm.recompile()
        calls.update(n.target for n in gm.graph.nodes)
        calls["heads"] = sum(n.target is aten.mm.default and is_wide(n, 32) for n in gm.graph.nodes)
        return default_partition(gm, inputs, **more)

    backend = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition
    )
    inputs = arguments()
    value = torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    total = sum(each.sum() for each in value) if isinstance(value, tuple) else value.sum()
    return [total, *torch.autograd.grad(total, inputs)], gone, calls


def both(program: Program, times: int = 1) -> tuple[list[int], Counter[Any]]:
    want, _, _ = run(program, times=0)
    torch._dynamo.reset()
    found, gone, calls = run(program, times)
    torch.testing.assert_close(found, want)
    return gone, calls


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


def _others(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (h * 0.37).detach() @ w.detach().t(), (h * 0.61).detach() @ w.detach().t()


def integers_beside(h: Tensor, w: Tensor) -> Tensor:
    """A cast to integers is not linear."""
    one, other = _others(h, w)
    counted = (9 * one).int() + (9 * other).int()
    return F.linear(h, w).exp() + F.linear(h, w).tanh() + counted.square()


def sums_of_two_shapes(h: Tensor, w: Tensor) -> Tensor:
    one, other = _others(h, w)
    beside = one.sum(0) + other.sum(0, keepdim=True)
    return F.linear(h, w).exp() + F.linear(h, w).tanh() + beside.amax(1)


SHARED = [
    twice, rows_and_temperature, other_rows, a_metric, beside_a_change, one_without_gradient, changed_in_place,
    changed_through_a_view, changed_by_a_flag, hooked,
]  # fmt: skip


@pytest.mark.parametrize("program", SHARED)
def test_shared(program: Program) -> None:
    """What is changed in place, or has a hook, is another value made of the same matmul."""
    gone, calls = both(program)
    assert (gone, calls["heads"]) == ([1], 1)


def test_gradients_are_added_before_they_are_multiplied() -> None:
    _, calls = both(twice)
    assert calls[aten.mm.default] == 3  # logits; the gradients of hidden and weight


@pytest.mark.parametrize("program", [integers_beside, sums_of_two_shapes])
def test_sums_beside_it_that_are_not_of_one_linear_function(program: Program) -> None:
    assert both(program)[0] == [1]


def test_what_is_made_of_it_in_the_same_way_is_shared_too() -> None:
    _, calls = both(rows_and_temperature)
    assert calls[aten.slice.Tensor] == 1


def test_twice_is_as_often_as_once() -> None:
    assert both(twice, times=2)[0] == [1, 0]


def test_numbers_that_change_between_are_read_twice() -> None:
    """The logits are shared, and what is made of them is not."""

    def program(h: Tensor, w: Tensor) -> Tensor:
        shift = w[:ROWS, :1].detach() * 1
        first = (F.linear(h, w) + shift).tanh()
        F.relu(shift, True)
        return first + (F.linear(h, w) + shift).tanh()

    gone, calls = both(program)
    assert gone == [1]
    assert calls[aten.tanh.default] == 2


# ---- left as it was -----------------------------------------------------------------------------------------------


LEFT = [hidden_changes_between, weight_changes_between, another_weight, another_autocast]


@pytest.mark.parametrize("program", LEFT)
def test_left(program: Program) -> None:
    gone, calls = both(program)
    assert (gone, calls["heads"]) == ([0], 2)


def returned(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first, second = F.linear(h, w), F.linear(h, w)
    return first.exp(), first[1:], second.tanh()


def both_returned(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(h, w), F.linear(h, w)


@pytest.mark.parametrize("program", [returned, both_returned])
def test_returned_logits_are_left(program: Program) -> None:
    """The caller may write to them."""
    gone, calls = both(program)
    assert (gone, calls["heads"]) == ([0], 2)
