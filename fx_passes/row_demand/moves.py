"""Operators selecting or moving rows, and the same moves on another tensor with these rows.

A row is a place in all dimensions but the last; a move that touches the last one is none. `kind_of` says what an
operator does to rows; `Replay` does it to hidden states, or to a temperature of each row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.graph.facts import same
from fx_passes.graph.writes import example
from fx_passes.row_demand.heads import copied

Kind = Literal["view", "take", "pieces", "piece", "join"]

_RESHAPES = {"view", "reshape", torch.reshape}
_BY_DIM: dict[Any, Kind] = {
    "narrow": "take",
    torch.narrow: "take",
    "select": "take",
    torch.select: "take",
    "index_select": "take",
    torch.index_select: "take",
    "split": "pieces",
    torch.split: "pieces",
    "chunk": "pieces",
    torch.chunk: "pieces",
    "unbind": "pieces",
    torch.unbind: "pieces",
}
"""Operators along a dimension, which is their third argument or `dim`, or the second one of `_SECOND`."""

_SECOND = {
    "narrow", torch.narrow, "select", torch.select, "index_select", torch.index_select,
    "unbind", torch.unbind,
}  # fmt: skip
_GATHERS = {"gather", torch.gather}
_JOINS = {torch.cat, torch.concat, torch.concatenate}


def kind_of(node: Node, inner: Node) -> Kind | None:
    """What `node` does to the rows of `inner`; None where it does something else."""
    target: Any = node.target
    if target is operator.getitem:
        if isinstance(example(inner), tuple | list):
            return "piece"
        return "take" if _keeps_last(node.args[1], example(inner)) else None
    rank = example(inner).dim() if isinstance(example(inner), Tensor) else 0
    if target in _RESHAPES:
        return "view" if _reshapes_rows(node, inner) else None
    if target in ("flatten", torch.flatten):
        stop = _argument(node, 2, "end_dim", -1)
        return "view" if stop % rank != rank - 1 else None
    if target in ("squeeze", torch.squeeze):
        dim = _argument(node, 1, "dim", None)
        return "view" if isinstance(dim, int) and dim % rank != rank - 1 else None
    if target in ("unsqueeze", torch.unsqueeze):
        dim = _argument(node, 1, "dim", None)
        return "view" if isinstance(dim, int) and dim % (rank + 1) != rank else None
    if target in ("transpose", torch.transpose):
        dims = (_argument(node, 1, "dim0", None), _argument(node, 2, "dim1", None))
        return "view" if all(isinstance(d, int) and d % rank != rank - 1 for d in dims) else None
    if target in _GATHERS:
        return "take" if _gathers_rows(node, rank) else None
    if target in _BY_DIM:
        place = 1 if target in _SECOND else 2
        dim = _argument(node, place, "dim", 0)
        return _BY_DIM[target] if isinstance(dim, int) and dim % rank != rank - 1 else None
    return None


def _gathers_rows(node: Node, rank: int) -> bool:
    """A gather by one row number for all columns."""
    dim, index = _gathered(node)
    if not isinstance(index, Node) or index.target != "expand" or not _has_sizes(index):
        return False
    narrow, wide = example(index.args[0]), example(index)
    if not isinstance(narrow, Tensor) or narrow.dim() != rank or wide.dim() != rank:
        return False
    whole = same(wide.shape[-1], example(node.args[0]).shape[-1])
    return whole and narrow.shape[-1] == 1 and isinstance(dim, int) and dim % rank != rank - 1


def _gathered(node: Node) -> tuple[Any, Any]:
    return _argument(node, 1, "dim", None), _argument(node, 2, "index", None)


def joins(node: Node) -> Sequence[Node] | None:
    """The values whose rows `node` puts one behind the other."""
    if node.target not in _JOINS:
        return None
    pieces = _argument(node, 0, "tensors", ())
    dim = _argument(node, 1, "dim", 0)
    ranks = {example(each).dim() for each in pieces if isinstance(example(each), Tensor)}
    if len(ranks) != 1 or not isinstance(dim, int) or dim % ranks.pop() == example(node).dim() - 1:
        return None
    return list(pieces)


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _keeps_last(index: Any, inner: Tensor) -> bool:
    """Whether an index leaves the last dimension, and leaves it last."""
    entries = list(index) if isinstance(index, tuple) else [index]
    after = entries
    for at, entry in enumerate(entries):
        if entry is Ellipsis:
            after = entries[at + 1 :]
            if not after:
                return True
            return after[-1] == slice(None) if isinstance(after[-1], slice) else False
    taken = sum(_dims_of(entry) for entry in entries)
    if taken < inner.dim():
        return True
    return isinstance(entries[-1], slice) and entries[-1] == slice(None)


def _dims_of(entry: Any) -> int:
    if entry is None:
        return 0
    found = example(entry)
    return found.dim() if isinstance(found, Tensor) and found.dtype == torch.bool else 1


def _sizes(node: Node) -> list[Any]:
    given = node.args[1:] or (node.kwargs.get("shape", node.kwargs.get("size")),)
    return list(given[0]) if isinstance(given[0], list | tuple) else list(given)


def _has_sizes(node: Node) -> bool:
    """Whether its sizes are written one by one: neither a dtype nor another tensor's `shape`, all in one value."""
    return all(isinstance(example(size), int | torch.SymInt) for size in _sizes(node))


def _reshapes_rows(node: Node, inner: Node) -> bool:
    before, after = example(inner), example(node)
    if not isinstance(after, Tensor) or after.dim() < 1 or not _has_sizes(node):
        return False
    return after.dim() > 1 and same(before.shape[-1], after.shape[-1])


# ---- replaying ----------------------------------------------------------------------------------------------------


class Replay:
    """What a program does to the rows of `base`, done to something else that has these rows.

    Args:
        base: where the moves begin.
        start: [rows of base, any columns].
        inner: of each node between, the value whose rows it has or moves.
        columns: the last size of `start`: a number, or the node that computes it.
    """

    def __init__(self, base: Node, start: Node, inner: Mapping[Node, Node], columns: Any) -> None:
        self.inner = inner
        self.columns = columns
        self._done: dict[Node, Node] = {base: start}

    def of(self, node: Node) -> Node:
        """What became of the rows that `node` has, made where the graph inserts."""
        if node not in self._done:
            self._done[node] = self._made(node)
        return self._done[node]

    def _made(self, node: Node) -> Node:
        pieces = joins(node)
        if pieces is not None:
            rest = {name: each for name, each in node.kwargs.items() if name != "tensors"}
            return copied(node, ([self.of(piece) for piece in pieces], *node.args[1:]), rest)
        inner = self.inner[node]
        below = self.of(inner)
        if kind_of(node, inner) is None:  # another value of the same row
            return below
        if node.target in _RESHAPES:
            # rows of hidden may lie as no view can show them, where those of new logits do not
            made = copied(node, (below, *_sizes(node)[:-1], self.columns), {})
            made.op, made.target = "call_method", "reshape"
            return made
        if node.target in _GATHERS:
            dim, index = _gathered(node)
            return copied(node, (below, dim, self._widened(index)), {})
        return copied(node, (below, *node.args[1:]), dict(node.kwargs))

    def _widened(self, index: Node) -> Node:
        """An index of rows, expanded over other columns."""
        sizes = (*_sizes(index)[:-1], self.columns)
        narrow = index.args[0]
        return copied(index, (narrow, *sizes), {})
