"""Full-vocabulary values stacked and reduced again: computed element by element.

Entry point: `unstack`, on the joint graph before `fuse`. `torch.logsumexp(torch.stack([a, b]), 0)`, a usual spelling of
the logarithm of a mixture, writes both values to memory, and backward reads them again. As arithmetic on `a` and `b` it
is element-wise code, which the compiler fuses with what is around, and which backward computes again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import hint, rank_of, same, same_shape, shape_of, value
from fx_passes.graph.operators import TO_SHAPE, Target, is_elementwise
from fx_passes.graph.order import descendants, tidy
from fx_passes.torch_private import detect_fake_mode

aten = torch.ops.aten

MAX_PIECES = 4
"""A mixture has two, or a few; more are samples, and arithmetic on all of them is no small kernel."""

_TOGETHER: dict[Target, Target] = {
    aten.sum.dim_IntList: aten.add.Tensor,
    aten.mean.dim: aten.add.Tensor,
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
}
"""A reduction over the stack, and what it does to two pieces."""


@dataclass(frozen=True)
class Stack:
    """Pieces along dimension `dim`, each of size 1 there."""

    dim: int
    pieces: tuple[Node, ...]


class _Stays(Exception):
    """Something reads the stack that cannot be done piece by piece."""


def unstack(graph: Graph, min_vocab: int) -> int:
    """Does what is done to stacks of up to `MAX_PIECES` full-vocabulary values, `[..., V]`, to their pieces.

    Args:
        graph: a functional ATen graph with fake values, decomposed.
        min_vocab: the smallest last dimension that is taken for a vocabulary.

    Returns:
        How many stacks are gone; with 0 the graph is exactly as it was. A stack stays where anything but element-wise
        operators, reductions and selections reads it.
    """
    found = [node for node in graph.nodes if _joins(node, min_vocab)]
    fake_mode = detect_fake_mode([value(node) for node in found]) if found else None
    if fake_mode is None:
        return 0
    return sum(_unstack(graph, join, Emitter(graph, fake_mode)) for join in found)


def _joins(node: Node, min_vocab: int) -> bool:
    """Whether equally large full-vocabulary values are joined."""
    if node.target is not aten.cat.default:
        return False
    pieces: Any = node.args[0]
    shape = shape_of(pieces[0])
    return (
        1 < len(pieces) <= MAX_PIECES
        and hint(shape[-1]) >= min_vocab
        and all(same_shape(shape_of(piece), shape) for piece in pieces)
    )


def _join_dim(node: Node) -> int:
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim) % rank_of(node)


def _unstack(graph: Graph, join: Node, emit: Emitter) -> bool:
    stacks: dict[Node, Stack] = {}
    instead: dict[Node, Node] = {}
    region = descendants([join])
    try:
        with graph.inserting_before(graph.output_node()):
            for node in [node for node in graph.nodes if node in region]:
                if node is join or any(n is join or n in stacks for n in node.all_input_nodes):
                    emit.origin = node
                    made = _piece_by_piece(emit, node, join, stacks)
                    if isinstance(made, Node):
                        instead[node] = made
                    elif made is not None:
                        stacks[node] = made
    except _Stays:
        emit.discard()
        return False
    for old, new in instead.items():
        old.replace_all_uses_with(new)
    tidy(graph)
    return True


def _piece_by_piece(
    emit: Emitter, node: Node, join: Node, stacks: dict[Node, Stack]
) -> Stack | Node | None:
    """What `node` is: a stack still, or one value; None for the join itself, where a view has to make it a stack.

    Pieces of size 1 are a stack as they are joined, and may be viewed as one for all that.
    """
    if node is join:
        pieces, dim = _pieces(emit, join), _join_dim(join)
        return Stack(dim, pieces) if same(shape_of(pieces[0])[dim], 1) else None
    if join in node.all_input_nodes and (join not in stacks or node.target in TO_SHAPE):
        return _viewed(emit, node, join)
    first: Any = node.args[0]
    if node.target is aten.select.int:
        return _selected(emit, node, stacks[first])
    if node.target is aten.slice.Tensor:
        return _sliced(emit, node, stacks[first])
    if node.target in _TOGETHER:
        return _reduced(emit, node, stacks[first])
    if is_elementwise(node):
        return _mapped(emit, node, stacks)
    raise _Stays


def _viewed(emit: Emitter, node: Node, join: Node) -> Stack:
    """`torch.stack` reaches the graph as a view of values that are joined: `[.., pieces x rows, ..]`."""
    pieces, dim = _pieces(emit, join), _join_dim(join)
    shape = shape_of(pieces[0])
    if node.target not in TO_SHAPE:
        raise _Stays  # which reads the join itself
    if not same_shape(shape_of(node), (*shape[:dim], len(pieces), *shape[dim:])):
        raise _Stays
    return Stack(dim, tuple(emit.call(aten.unsqueeze.default, piece, dim) for piece in pieces))


def _pieces(emit: Emitter, join: Node) -> tuple[Node, ...]:
    """In the dtype of what they are joined to: rows of two dtypes are promoted."""
    pieces: Any = join.args[0]
    return tuple(emit.cast(piece, value(join).dtype) for piece in pieces)


def _selected(emit: Emitter, node: Node, stack: Stack) -> Node:
    _, dim, index = node.args
    if dim % rank_of(stack.pieces[0]) != stack.dim or not isinstance(index, int):  # type: ignore[operator]
        raise _Stays
    return _taken(emit, emit.call(aten.squeeze.dim, stack.pieces[index], stack.dim))


def _sliced(emit: Emitter, node: Node, stack: Stack) -> Node:
    """One piece, as the gradient of values that are joined is taken apart."""
    for index, piece in enumerate(stack.pieces):
        if node.args[1:] == (stack.dim, index, index + 1):
            return _taken(emit, piece)
    raise _Stays


def _taken(emit: Emitter, piece: Node) -> Node:
    """A piece in memory of its own, as in the stack: it may be returned, and be a view of what the caller has."""
    return emit.call(aten.clone.default, piece)


def _reduced(emit: Emitter, node: Node, stack: Stack) -> Stack | Node:
    rank = rank_of(stack.pieces[0])
    given: Any = node.args[1] if len(node.args) > 1 else ()
    keeps = len(node.args) > 2 and bool(node.args[2])
    dims = sorted(dim % rank for dim in given or range(rank))
    if dims[0] > stack.dim:
        each = (emit.call(node.target, p, dims, keeps, **node.kwargs) for p in stack.pieces)
        return Stack(stack.dim, tuple(each))
    if dims != [stack.dim]:
        raise _Stays
    dtype = value(node).dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    two = functools.partial(emit.call, _TOGETHER[node.target])
    whole = functools.reduce(two, (emit.cast(piece, wide) for piece in stack.pieces))
    if node.target is aten.mean.dim:
        whole = emit.call(aten.div.Tensor, whole, len(stack.pieces))
    whole = emit.cast(whole, dtype)
    return whole if keeps else emit.call(aten.squeeze.dim, whole, stack.dim)


def _mapped(emit: Emitter, node: Node, stacks: dict[Node, Stack]) -> Stack:
    """An element-wise operator, on each piece with what is beside it."""
    mine = [stacks[arg] for arg in node.all_input_nodes if arg in stacks]
    dim, count, rank = mine[0].dim, len(mine[0].pieces), rank_of(node)
    if any(each.dim != dim or rank_of(each.pieces[0]) != rank for each in mine):
        raise _Stays

    def beside(index: int) -> Callable[[Node], Node]:
        def piece(operand: Node) -> Node:
            if operand in stacks:
                return stacks[operand].pieces[index]
            at = dim - (rank - rank_of(operand))  # as operands are aligned: at the last dimension
            if at < 0 or same(shape_of(operand)[at], 1):
                return operand
            return emit.call(aten.slice.Tensor, operand, at, index, index + 1)

        return piece

    made = [
        emit.call(
            node.target, *torch.fx.map_arg((node.args, node.kwargs), beside(i))[0], **node.kwargs
        )
        for i in range(count)
    ]
    return Stack(dim, tuple(made))
