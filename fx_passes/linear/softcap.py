"""Logits under a softcap: `softcap * tanh(logits / softcap)`, as in Gemma.

`fuse` takes `tanh(...)` for the logits, since only that is bent: the factor outside belongs to its scales and
coefficients. Here it is a head like others, capped, its gradient multiplied by tanh's derivative.

Entry points: `under_softcap`, forward's side; `derivative_of` and `uncapped`, backward's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fx_passes.graph.facts import same, shape_of, value
from fx_passes.graph.operators import CASTS, RESHAPES, SAME_VALUE

aten = torch.ops.aten

_AS_IT_IS = RESHAPES | SAME_VALUE | CASTS
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}


@dataclass(frozen=True)
class Softcap:
    """`tanh(logits / value)`, in `dtype`.

    Attributes:
        between: the nodes between the matmul's result and tanh, the last first.
    """

    value: float
    dtype: torch.dtype
    between: tuple[Node, ...]


def under_softcap(node: Node) -> Iterator[tuple[Node, Softcap]]:
    """What `node` may cap: every value below it, as far as it is only viewed, cast and divided by numbers."""
    if node.op != "call_function" or node.target is not aten.tanh.default:
        return
    rate = 1.0
    between: list[Node] = []
    below = node.args[0]
    while isinstance(below, Node) and rate > 0:
        yield below, Softcap(1 / rate, value(node).dtype, tuple(between))
        factor = _factor(below)
        if factor is None:
            return
        rate *= factor
        between.append(below)
        below = below.args[0]


def _factor(node: Node) -> float | None:
    """What `node` multiplies its first operand by; None where that is not all it does."""
    if node.op != "call_function":
        return None
    if node.target in _AS_IT_IS:
        kept = same(shape_of(node)[-1], shape_of(node.args[0])[-1]) if shape_of(node) else False
        return 1.0 if kept else None
    if node.target not in _PRODUCTS | _QUOTIENTS or node.kwargs:
        return None
    number = node.args[1]
    if not isinstance(node.args[0], Node) or not isinstance(number, int | float) or number == 0:
        return None
    return float(number) if node.target in _PRODUCTS else 1 / number


# ---- backward -----------------------------------------------------------------------------------------------------


def derivative_of(root: Node) -> set[Node]:
    """Nodes that make `1 - root ** 2` and serve nothing but products with a gradient."""
    found: set[Node] = set()
    values, waiting = {root}, [root]
    while waiting:
        for user in waiting.pop().users:
            if user not in values and (user.target in _AS_IT_IS or _derives(user, values)):
                values.add(user)
                waiting.append(user)
    for node in sorted(values - {root}, reverse=True):
        if (_is_complement(node) and _only_multiplied(node)) or (
            node.users and found.issuperset(node.users)
        ):
            found.add(node)
    return found


def _derives(user: Node, values: set[Node]) -> bool:
    square = user.target is aten.mul.Tensor and user.args[0] is user.args[1]
    return square or (_is_complement(user) and user.args[1] in values)


def _is_complement(node: Node) -> bool:
    """`1 - x ** 2`."""
    if node.target is not aten.sub.Tensor or node.args[0] != 1 or node.kwargs:
        return False
    squared = node.args[1]
    if not isinstance(squared, Node) or squared.target is not aten.mul.Tensor:
        return False
    return squared.args[0] is squared.args[1]


def _only_multiplied(node: Node) -> bool:
    return all(
        user.target is aten.mul.Tensor and user.args[0] is not user.args[1] for user in node.users
    )


def uncapped(grad: Node, softcap: Softcap, derivative: set[Node]) -> Iterator[Node]:
    """The gradients of the logits that the gradient `grad` of capped values becomes, or nodes that are none."""
    waiting = [(grad, 1 / softcap.value, False)]
    while waiting:
        wide, rate, multiplied = waiting.pop()
        if multiplied and math.isclose(rate, 1, rel_tol=1e-12):
            yield wide
            continue
        for user in wide.users:
            factor = _factor(user)
            if not multiplied and _times_derivative(user, wide, derivative):
                waiting.append((user, rate, True))
            elif factor is not None and user.args[0] is wide:
                waiting.append((user, rate / factor, multiplied))
            else:
                yield user


def _times_derivative(user: Node, wide: Node, derivative: set[Node]) -> bool:
    if user.target is not aten.mul.Tensor:
        return False
    others = [each for each in user.args if each is not wide]
    return len(others) == 1 and others[0] in derivative and _is_complement(others[0])  # type: ignore[arg-type]
