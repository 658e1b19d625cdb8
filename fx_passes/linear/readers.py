"""The readers of the logits: fused operators and gathers, through row moves.

Entry point: `readers_of`. `Rows` replays what was done to the rows of the logits on anything else that has these rows:
hidden states, columns to gather.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_float_tensor, same, shape_of, value
from fx_passes.graph.operators import SAME_ROWS, WRITES, under
from fx_passes.graph.user_lines import source_of
from fx_passes.linear.softcap import derivative_of
from fx_passes.refused import Refused

aten = torch.ops.aten
fused = torch.ops.slime_fused


@dataclass
class Readers:
    """Readers of one head's logits, in the order of the graph.

    Attributes:
        derivative: what makes the derivative of a softcap.
    """

    stats: list[Node] = field(default_factory=list)
    picks: list[Node] = field(default_factory=list)
    grads: list[Node] = field(default_factory=list)
    sizes: list[Node] = field(default_factory=list)
    derivative: set[Node] = field(default_factory=set)


def has_statistics(root: Node) -> bool:
    """Whether statistics are taken of rows of `root`."""
    return any(
        user.target is fused.row_stats.default for wide in _moved_rows(root) for user in wide.users
    )


def gradients_of(root: Node) -> list[Node]:
    """The gradients that are made over rows of `root`."""
    readers = (user for wide in _moved_rows(root) for user in wide.users)
    return [user for user in readers if user.target is fused.row_grad.default]


def _moved_rows(root: Node) -> dict[Node, None]:
    """`root` and everything that has rows of it."""
    moved = {root: None}
    waiting = [root]
    while waiting:
        for user in waiting.pop().users:
            if user not in moved and _moves_rows(user, moved):
                moved[user] = None
                waiting.append(user)
    return moved


def rows_of(wide: Node) -> Node:
    """The value whose rows, or some of them, `wide` has."""
    while wide.op == "call_function":
        first = wide.args[0] if wide.args else None
        inner = first[0] if isinstance(first, list | tuple) and first else first
        if not isinstance(inner, Node) or not _moves_rows(
            wide, dict.fromkeys(wide.all_input_nodes)
        ):
            break
        wide = inner
    return wide


def readers_of(root: Node, capped: bool) -> Readers:
    """All readers of the logits and of what moves their rows; `capped`: root is a softcap's tanh.

    Raises:
        Refused: one reader needs the logits themselves.
    """
    found = Readers(derivative=derivative_of(root) if capped else set())
    moved = _moved_rows(root)
    known = found.derivative.union(moved)
    for wide in moved:
        for user in wide.users:
            if user not in known and not _sort(found, user, wide, capped):
                raise Refused(_told(user), user)
    return found


def _told(user: Node) -> str:
    if user.op == "output":
        return "the logits are returned, so they are materialised in full"
    where = source_of(user)
    return f"the logits are read by {user.target}{f' at {where}' if where else ''}, so they are materialised in full"


def _sort(found: Readers, user: Node, wide: Node, capped: bool) -> bool:
    """Notes a reader that chunks can serve."""
    into: list[Node] | None = None
    if user.target is fused.row_stats.default and user.args[0] is wide:
        into = found.stats if all(u.target is operator.getitem for u in user.users) else None
    elif user.target is aten.gather.default and user.args[0] is wide:
        into = found.picks if _picks_columns(user) else None
    elif user.target is fused.row_grad.default and wide in user.args[:1]:
        into = found.grads if _is_logits_gradient(user, capped) else None
    elif user.target is aten.sym_size.int:
        into = found.sizes
    if into is None:
        return False
    if user not in into:
        into.append(user)
    return True


def _picks_columns(node: Node) -> bool:
    """A gather over the vocabulary, with an index for each row."""
    wide, dim, index = node.args[:3]
    shape, wanted = shape_of(wide), shape_of(index)
    if len(shape) < 2 or dim % len(shape) != len(shape) - 1:  # type: ignore[operator]
        return False
    return all(same(a, b) for a, b in zip(shape[:-1], wanted[:-1], strict=True))


def _is_logits_gradient(node: Node, capped: bool) -> bool:
    """In the logits' dtype; a softcap's derivative may take it in a wider one, and round it afterwards."""
    wide, *_, softmax, dtype, _ = node.args
    own = value(wide).dtype
    return softmax is False and (dtype == own or (capped and dtype.itemsize > own.itemsize))  # type: ignore[union-attr]


# ---- moving rows --------------------------------------------------------------------------------------------------


def _moves_rows(node: Node, moved: dict[Node, None]) -> bool:
    """Whether `node` gives rows of its first argument, each whole."""
    target = node.target
    if not is_float_tensor(node):
        return False
    wide = node.args[0]
    if target is aten.cat.default:
        pieces: Any = wide
        return all(piece in moved for piece in pieces) and _is_row_dim(node, _dim(node, 1))
    if not isinstance(wide, Node) or not is_float_tensor(wide) or not shape_of(wide):
        return False
    if target in SAME_ROWS:
        return len(shape_of(node)) > 1 and same(shape_of(node)[-1], shape_of(wide)[-1])
    if target in (aten.slice.Tensor, aten.select.int, aten.index_select.default):
        return len(shape_of(node)) > 1 and _is_row_dim(wide, _dim(node, 1))
    return False


def _dim(node: Node, place: int) -> int:
    found = node.args[place] if len(node.args) > place else 0
    assert isinstance(found, int), node
    return found


def _is_row_dim(wide: Node, dim: int) -> bool:
    rank = len(shape_of(wide))
    return dim % rank != rank - 1


def origin_of(wide: Node) -> Node:
    """The value whose rows `wide` has, all of them and in the same order."""
    return under(wide, SAME_ROWS)


class Rows:
    """The row moves between `root` and the values that are read."""

    def __init__(self, emit: Emitter, root: Node) -> None:
        self.emit = emit
        self.root = root

    def replay(self, wide: Node, on: Node, known: dict[Node, Node] | None = None) -> Node:
        """What was done to the rows of `root` to get `wide`, done to `on`, [rows of root, any columns]."""
        known = {} if known is None else known
        if wide is self.root:
            return on
        if wide not in known:
            known[wide] = self._replayed(wide, on, known)
        return known[wide]

    def _replayed(self, wide: Node, on: Node, known: dict[Node, Node]) -> Node:
        call = self.emit.call
        if wide.target is aten.cat.default:
            joined: Any = wide.args[0]
            pieces = [self.replay(piece, on, known) for piece in joined]
            return call(aten.cat.default, pieces, *wide.args[1:])
        inner = self.replay(wide.args[0], on, known)  # type: ignore[arg-type]
        if wide.target in SAME_ROWS:
            columns = self.emit.size(inner, len(shape_of(inner)) - 1)
            return self.emit.reshape(inner, [*self.emit.sizes(wide)[:-1], columns])
        return call(wide.target, inner, *wide.args[1:], **wide.kwargs)

    def can_undo(self, wide: Node) -> bool:
        """Whether `undo` works: rows were viewed, or some of them left out."""
        while wide is not self.root:
            if wide.target not in SAME_ROWS | set(WRITES):
                return False
            wide = wide.args[0]  # type: ignore[assignment]
        return True

    def undo(self, wide: Node, on: Node) -> Node:
        """`on`, [rows of wide, any columns], at the rows of `root` that they come from; 0 in the others."""
        while wide is not self.root:
            inner = wide.args[0]
            assert isinstance(inner, Node), wide
            columns = self.emit.size(on, len(shape_of(on)) - 1)
            sizes = [*self.emit.sizes(inner)[:-1], columns]
            if wide.target in SAME_ROWS:
                on = self.emit.reshape(on, sizes)
            else:
                zeros = self.emit.full(sizes, 0, value(on).dtype, on)
                on = self.emit.call(WRITES[wide.target], zeros, on, *wide.args[1:])
            wide = inner
        return on
