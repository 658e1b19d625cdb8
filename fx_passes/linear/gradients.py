"""The readers of the logits' gradient: the matmuls for hidden and weight, and the bias's sum.

Entry point: `products_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_backward, is_float_tensor, same, shape_of, value
from fx_passes.graph.operators import CASTS, RESHAPES, turns
from fx_passes.graph.user_lines import source_of
from fx_passes.linear.head import PRODUCTS, Head, Matrix
from fx_passes.linear.softcap import uncapped
from fx_passes.refused import Refused

aten = torch.ops.aten

_VIEWS = RESHAPES | {aten.alias.default, aten.detach.default}


@dataclass
class Products:
    """The nodes that one gradient of logits ends in.

    Attributes:
        hidden: [N, D], or [1, N, D] of a `bmm`.
        weight: [V, D], with `transposed` [D, V], or such a matrix with a leading 1.
        bias: the sum over rows, in whatever shape.
    """

    hidden: list[Node] = field(default_factory=list)
    weight: list[Node] = field(default_factory=list)
    transposed: list[Node] = field(default_factory=list)
    bias: list[Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        return [*self.hidden, *self.weight, *self.transposed, *self.bias]

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        """Whether there are gradients of hidden, weight and bias."""
        return bool(self.hidden), bool(self.weight or self.transposed), bool(self.bias)


def products_of(grad: Node, head: Head, derivative: set[Node], emit: Emitter) -> Products:
    """All uses of the gradient of logits `grad`; of capped ones, `derivative` makes what it is multiplied by.

    Raises:
        Refused: one use needs the gradient itself.
    """
    found = Products()
    vocab = shape_of(head.root)[-1]
    starts = [grad] if head.softcap is None else [*uncapped(grad, head.softcap, derivative)]
    for start in starts:
        if not is_float_tensor(start) or not _keeps_columns(start, vocab):
            raise Refused(_told(grad, start), start)
    waiting = [(start, False) for start in starts]
    while waiting:
        wide, turned = waiting.pop()
        for user in wide.users:
            if _take(found, user, wide, turned, head, emit):
                continue
            viewed = _is_view(user, head) and _keeps_columns(user, vocab)
            if not turned and (viewed or _moves_a_one(user)):
                waiting.append((user, turned))
            elif turns(user):
                waiting.append((user, not turned))
            else:
                raise Refused(_told(grad, user), user)
    return found


def _told(grad: Node, user: Node) -> str:
    made = "the gradient of the logits" if is_backward(grad) else "a softmax of the logits"
    where = source_of(user)
    what = "returned" if user.op == "output" else f"read by {user.target}"
    return f"{made} is {what}{f' at {where}' if where else ''}, so it is materialised in full"


def _is_view(user: Node, head: Head) -> bool:
    """What a softcap's derivative was taken of in a wider dtype is rounded to that of the logits."""
    rounds = head.softcap is not None and user.target in CASTS
    return user.target in _VIEWS or (rounds and value(user).dtype == head.dtype)


def _keeps_columns(node: Node, vocab: object) -> bool:
    """Rows stay rows; or columns get a dimension of size 1 behind them, as einsum does."""
    sizes = [size for size in shape_of(node) if not same(size, 1)]
    return bool(sizes) and same(sizes[-1], vocab)


def _moves_a_one(node: Node) -> bool:
    """A permutation that moves dimensions of size 1 only."""
    if node.target is not aten.permute.default:
        return False
    sizes = shape_of(node.args[0])
    order: Any = node.args[1]
    kept = [dim % len(sizes) for dim in order if not same(sizes[dim], 1)]
    return kept == sorted(kept)


def _take(found: Products, user: Node, wide: Node, turned: bool, head: Head, emit: Emitter) -> bool:
    """Notes a matmul or a sum of the gradient."""
    if user.target in PRODUCTS:
        return _take_product(found, user, wide, turned, head, emit)
    if user.target is aten.sum.dim_IntList and not turned and _sums_rows(user, wide):
        found.bias.append(user)
        return head.bias is not None
    return False


def _take_product(
    found: Products, user: Node, wide: Node, turned: bool, head: Head, emit: Emitter
) -> bool:
    left, right = user.args[:2]
    assert isinstance(left, Node), user
    assert isinstance(right, Node), user
    if left is right or not _is_matrix(wide):
        return False
    if left is wide and not turned and Matrix.of(right, emit) == head.weight:
        found.hidden.append(user)
    elif left is wide and turned and Matrix.of(right, emit) == head.hidden:
        found.weight.append(user)
    elif right is wide and not turned and Matrix.of(left, emit) == head.hidden.t:
        found.transposed.append(user)
    else:
        return False
    return True


def _is_matrix(wide: Node) -> bool:
    """[N, V] or [1, N, V], turned or not."""
    shape = shape_of(wide)
    return len(shape) == 2 or (len(shape) == 3 and same(shape[0], 1))


def _sums_rows(node: Node, wide: Node) -> bool:
    """A sum over every dimension but the last, in the dtype that is there."""
    rank = len(shape_of(wide))
    dims = sorted(dim % rank for dim in node.args[1])  # type: ignore[operator, union-attr]
    return dims == list(range(rank - 1)) and node.kwargs.get("dtype") is None
