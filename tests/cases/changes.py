"""Functions that change memory, or hook a gradient, around heads, selected rows and returned logits.

A row is a function of hidden [N, D], weight [V, D] and target [N] with `@changes`. What Dynamo traces of it, before
functionalisation, says of few of these nodes that they change what they are given.

Entry point: `CHANGES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

Outputs = tuple[Tensor, ...]
Changing = Callable[[Tensor, Tensor, Tensor], Outputs]
CHANGES: dict[str, Changing] = {}


def changes(function: Changing) -> Changing:
    """Enter the decorated function into the table."""
    CHANGES[function.__name__] = function
    return function


@torch.library.custom_op("slime_tests::scaled", mutates_args=("x",))
def scaled(x: Tensor, by: float) -> None:
    x.mul_(by)


class Doubled(Function):
    """Changes its input, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class DoubledUnmarked(Function):
    """Changes its input, and does not say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.ones(())


# ---- ways to change memory ------------------------------------------------------------------------------------------


def _in_dropout(x: Tensor) -> None:
    F.dropout(x, 1.0, True, True)


def _by_its_out(x: Tensor) -> None:
    torch.mul(x, 2, out=x)


def _in_a_list(x: Tensor) -> None:
    torch._foreach_mul_([x], 2)


def _by_a_packet(x: Tensor) -> None:
    torch.ops.slime_tests.scaled(x, 2.0)


def _by_an_overload(x: Tensor) -> None:
    torch.ops.slime_tests.scaled.default(x, 2.0)


def _by_aten(x: Tensor) -> None:
    torch.ops.aten.mul_(x, 2)


def _by_its_data(x: Tensor) -> None:
    x.data.mul_(2)


def _set(x: Tensor) -> None:
    x.set_(x * 2)


def _copied(x: Tensor) -> None:
    x.copy_(x * 2)


def _through_a_view(x: Tensor) -> None:
    x[1:].view(-1)[3:].copy_(x[1:].reshape(-1)[3:] * 2)


def _in_a_checkpoint(x: Tensor) -> None:
    checkpoint(lambda x: x.mul_(2).sum(), x, use_reentrant=False)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "relu": lambda x: F.relu(x, True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1, True),
    "hardtanh": nn.Hardtanh(-0.1, 0.1, inplace=True),
    "dropout": _in_dropout,
    "function": lambda x: Doubled.apply(x),
    "unmarked_function": lambda x: DoubledUnmarked.apply(x),
    "out": _by_its_out,
    "foreach": _in_a_list,
    "packet": _by_a_packet,
    "overload": _by_an_overload,
    "aten": _by_aten,
    "data": _by_its_data,
    "set": _set,
    "copy": _copied,
    "view": _through_a_view,
    "checkpoint": _in_a_checkpoint,
    "method": lambda x: torch.Tensor.mul_(x, 2),
    "operator": lambda x: x.__imul__(2),
    "item": lambda x: x.__setitem__(slice(1, None), 0),
}
"""Each changes its argument."""


def chosen(z: Tensor, target: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, target[: len(z), None])


# ---- two heads ------------------------------------------------------------------------------------------------------


def _between_heads(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        h, w = hidden * 1, weight.detach().t()  # so that backward reads no hidden states
        first = chosen(h @ w, target)
        way(h.detach())
        return first, chosen(h @ w, target)

    return function


def _between_others_weights(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        h, w = hidden.detach(), weight * 1
        first = chosen(F.linear(h, w), target)
        way(w.detach())
        return first, chosen(F.linear(h, w), target)

    return function


def _of_one_of_two(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        with torch.no_grad():
            first, second = hidden @ weight.t(), hidden @ weight.t()
            way(first)
        return first.logsumexp(-1), second.logsumexp(-1), chosen(hidden @ weight.t(), target)

    return function


# ---- rows -----------------------------------------------------------------------------------------------------------


def _before_rows(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        h, w = hidden * 1, weight.detach().t()
        z = h @ w
        way(h.detach())
        return (chosen(z[torch.arange(3) + 2], target),)

    return function


def _before_a_temperature(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        tau = 1.5 + target.float()[:, None].sin()
        z = hidden @ weight.t() / tau.clone() - tau
        way(tau)
        return (chosen(z[2:5], target),)

    return function


def _of_logits_before_rows(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        with torch.no_grad():
            z = hidden @ weight.t()
            way(z)
        return z[2:5].logsumexp(-1), chosen(hidden @ weight.t(), target)

    return function


def _of_overlapping_rows(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        z = hidden @ weight.t()
        first, second = z[1:4], z[2:5]
        way(first.detach())
        return chosen(first, target), chosen(second, target)

    return function


# ---- returned logits ------------------------------------------------------------------------------------------------


def _before_the_loss(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        z = F.linear(hidden, weight)
        way(z)
        return chosen(z, target).sum(), z

    return function


def _after_the_loss(way: Callable[[Tensor], Any]) -> Changing:
    def function(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        z = F.linear(hidden, weight) / 2
        loss = chosen(z * 2, target).sum()
        way(z)
        return loss, z

    return function


PLACES = {
    "between_heads": _between_heads,
    "between_others_weights": _between_others_weights,
    "of_one_of_two": _of_one_of_two,
    "before_rows": _before_rows,
    "before_a_temperature": _before_a_temperature,
    "of_logits_before_rows": _of_logits_before_rows,
    "of_overlapping_rows": _of_overlapping_rows,
    "before_the_loss": _before_the_loss,
    "after_the_loss": _after_the_loss,
}
WITHOUT_GRADIENT = {"out", "set"}
"""Ways that torch refuses where a gradient is recorded."""

CHANGES |= {
    f"{way}_{place}": PLACES[place](WAYS[way])
    for place in PLACES
    for way in WAYS
    if not (way in WITHOUT_GRADIENT and place.endswith("the_loss"))
}


# ---- hooks ----------------------------------------------------------------------------------------------------------


@changes
def a_hook_on_one_of_two(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    first, second = hidden @ weight.t(), hidden @ weight.t()
    first.register_hook(lambda grad: grad * 3)
    return chosen(first, target), chosen(second, target)


@changes
def a_hook_on_a_slice_of_one_of_two(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    first, second = (hidden @ weight.t())[:3], (hidden @ weight.t())[:3]
    second.register_hook(lambda grad: grad * 3)
    return chosen(first, target), chosen(second, target)


@changes
def a_hook_before_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t()
    z.register_hook(lambda grad: grad * grad.shape[0])
    return (chosen(z[2:5], target),)


@changes
def a_hook_on_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = (hidden @ weight.t())[2:5]
    z.register_hook(lambda grad: grad * grad.shape[0])
    return chosen(z, target), z


@changes
def a_hook_on_returned_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t()
    z.register_hook(lambda grad: grad * 3)
    return chosen(z, target).sum(), z


@changes
def a_hook_below_returned_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t()
    z.register_hook(lambda grad: grad * 3)
    z = z / 0.7
    return chosen(z, target).sum(), z


@changes
def a_hook_below_a_softcap(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t() / 30
    z.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    z = 30 * torch.tanh(z)
    return chosen(z, target).sum(), z


@changes
def a_hook_on_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    h = hidden.tanh()
    z = h @ weight.t()
    h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return chosen(z, target).sum(), z


# ---- equal logits that leave ----------------------------------------------------------------------------------------


@changes
def equal_logits_both_returned(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    first, second = hidden @ weight.t(), hidden @ weight.t()
    return chosen(first, target), first, second


@changes
def equal_logits_both_returned_by_views(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    first, second = hidden @ weight.t(), hidden @ weight.t()
    return chosen(first, target), first[1:].detach(), second.detach()[:-1]


@changes
def equal_logits_one_returned(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    first, second = hidden @ weight.t(), hidden @ weight.t()
    return chosen(first, target), second.detach()


# ---- what is read beside the logits ---------------------------------------------------------------------------------


@changes
def a_shift_changes_between(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    shift = target.float()[:, None]
    first = (hidden @ weight.t() + shift).tanh().sum(-1)
    shift.mul_(2)
    return first, (hidden @ weight.t() + shift).tanh().sum(-1)


@changes
def a_temperature_changes_between(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    tau = 1.5 + target.float()[:, None].sin()
    first = (hidden @ weight.t() + tau).tanh().sum(-1)
    F.relu(tau.sub_(1), True)
    return first, (hidden @ weight.t() + tau).tanh().sum(-1)


@changes
def an_index_changes_by_a_flag(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    rows = target[:3] % 4 - 2
    first = (hidden @ weight.t())[rows.clone()].logsumexp(-1)
    z = hidden @ weight.t()
    F.relu(rows, True)
    return first, z[rows].logsumexp(-1)


@changes
def a_bias_changes_between(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    bias = weight[:, 0].detach() * 1
    first = chosen(F.linear(hidden, weight, bias), target)
    F.relu(bias, True)
    return first, chosen(F.linear(hidden, weight, bias), target)


@changes
def numbers_change_between(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """In what is made of equal logits in the same way."""
    shift = target.float()[:, None] - 9
    first = ((hidden @ weight.t()) + shift).logsumexp(-1)
    F.relu(shift, True)
    return first, ((hidden @ weight.t()) + shift).logsumexp(-1)


# ---- results that overlap -------------------------------------------------------------------------------------------


@changes
def two_overlapping_slices_returned(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t()
    return chosen(z[1:4], target), z[1:4], z[2:5]


@changes
def two_slices_of_detached_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t()
    return chosen(z[1:4], target), z.detach()[1:4], z.detach()[2:5]


@changes
def two_views_of_one_buffer(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t()
    buffer = torch.zeros(len(z), 3)
    buffer[:, 0] = z.logsumexp(-1)
    buffer[:, 1] = chosen(z, target)[:, 0]
    return buffer[:, :2], buffer[:, 1:], z.logsumexp(-1)


@changes
def two_views_of_detached_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    z = hidden @ weight.t()
    values = chosen(z, target)[:, 0]
    return (values * values.detach()).sum(), values.detach()[1:4], values.detach()[2:5]
