"""Operators moving rows only: slices, selects, splits, reshapes and permutes.

A form with moved rows keeps its coefficients, moved likewise. Its logits become a view of the logits, and a `Step`
remembers the way back: with it `row_writes.py` recognises backward's writes. Rows picked by data (`x[mask]`) are not
moved: the result is a root of its own.

Longer than other files: a kind of move is its rule, the move of a row scalar, and the way back, which belong together.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import only_known
from fx_passes.algebra.forms import Exp, Form, Mask
from fx_passes.algebra.poly import Poly
from fx_passes.graph.facts import Size, SizeArg, rank_of, same, same_shape, shape_of, value
from fx_passes.graph.slices import END, Bound, bounds, takes_all
from fx_passes.refused import Refused
from fx_passes.walk.columns import column
from fx_passes.walk.context import Context
from fx_passes.walk.results import Instead, Operand, Result
from fx_passes.walk.roots import Move, Step

aten = torch.ops.aten

# -- moving ------------------------------------------------------------------------------------------


def row_form(operand: Operand) -> Form:
    if isinstance(operand, Form):
        return operand
    if isinstance(operand, Mask):
        raise Refused("rows of a full-vocabulary mask are moved")
    raise Refused("rows of logits are combined with a value without logits, or an unsupported one")


def move_coefficients(form: Form, x: Node | None, shape: Sequence[Size], move: Move) -> Form:
    """`form` over `x`, every row scalar in it moved."""
    only_known(form)

    def change(atom: Node) -> Node:
        return move(atom) if rank_of(atom) else atom

    def poly(p: Poly) -> Poly:
        return p.map_atoms(change)

    return Form(
        tuple(shape),
        form.vdim,
        x,
        tuple(Exp(poly(t.scale), poly(t.shift), poly(t.a), poly(t.b)) for t in form.exps),
        poly(form.e),
        poly(form.f),
        tuple(
            replace(t, index=tuple(map(change, t.index)), weight=poly(t.weight), extent=None)
            for t in form.hots
        ),
        clamped=form.clamped,
        beside=form.beside and (poly(form.beside[0]), poly(form.beside[1])),
    )


def _moved(
    c: Context, form: Form, shape: Sequence[Size], x: Node | None, step: Step | None, move: Move
) -> Form:
    """`form` over its moved logits `x`, reached by `step`; `move` moves a row scalar."""
    if x is None or step is None or not c.roots.derive(x, step):
        return move_coefficients(form, x, shape, move)
    return move_coefficients(form, x, shape, lambda atom: c.roots.moved(x, atom))


def _leading(operand: Operand, dim: int) -> tuple[Form, int]:
    """The form and a leading dimension of it; a mask or the vocabulary dimension is refused."""
    form = row_form(operand)
    dim %= len(form.shape)
    if dim == form.vdim:
        raise Refused("a part of the vocabulary is taken")
    return form, dim


# -- slices -------------------------------------------------------------------------------------------


def slice_rows(
    c: Context, form: Form, shape: Sequence[Size], dim: int, start: Bound, stop: Bound, step: int
) -> Form:
    if takes_all(form.shape[dim], start, stop, step):
        return form
    start, stop = bounds(form.shape[dim], start, stop)
    call = c.emitter.call

    def move(atom: Node) -> Node:
        atom = c.emitter.align(atom, len(form.shape))
        one = same(shape_of(atom)[dim], 1) and not same(form.shape[dim], 1)
        return atom if one else call(aten.slice.Tensor, atom, dim, start, stop, step)

    def back(atom: Node) -> Node:
        zeros = zeros_for(c, form, atom)
        return call(aten.slice_scatter.default, zeros, atom, dim, start, stop, step)

    if form.x is None:
        return _moved(c, form, shape, None, None, move)
    x = call(aten.slice.Tensor, form.x, dim, start, stop, step)
    x = c.piece_of_root(form.x, dim, start, stop) or x
    key = ("slice", dim, start, stop, step)
    return _moved(c, form, shape, x, Step(form.x, key, form.vdim, move, back), move)


def slice_(
    c: Context,
    node: Node,
    operand: Operand,
    dim: int = 0,
    start: Bound = None,
    end: Bound = None,
    step: int = 1,
) -> Result:
    form = row_form(operand)
    dim %= len(form.shape)
    if takes_all(form.shape[dim], start, end, step):
        return form
    form, dim = _leading(form, dim)
    return slice_rows(c, form, shape_of(node), dim, start, end, step)


def split(c: Context, node: Node, operand: Operand, sizes: object, dim: int = 0) -> Result:
    """split, split_with_sizes: a tuple of slices."""
    form, dim = _leading(operand, dim)
    pieces: list[Form] = []
    start: SizeArg = 0
    parts = value(node)
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        stop = END if last else _plus(c, start, c.known_size(part.shape[dim]))
        pieces.append(slice_rows(c, form, tuple(part.shape), dim, start, stop, 1))
        start = stop
    return tuple(pieces)


def _plus(c: Context, left: SizeArg, right: SizeArg) -> SizeArg:
    """The sum of two sizes, numbers or nodes."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return right if left == 0 else c.emitter.call(operator.add, left, right)


# -- single rows --------------------------------------------------------------------------------------


def select_rows(c: Context, form: Form, shape: Sequence[Size], dim: int, at: Any) -> Form:
    size = form.shape[dim]
    at = at + size if isinstance(at, int) and isinstance(size, int) and at < 0 else at
    call = c.emitter.call

    def move(atom: Node) -> Node:
        atom = c.emitter.align(atom, len(form.shape))
        one = same(shape_of(atom)[dim], 1)
        return call(aten.select.int, atom, dim, 0 if one else at)

    def back(atom: Node) -> Node:
        return call(aten.select_scatter.default, zeros_for(c, form, atom), atom, dim, at)

    x, step = None, None
    if form.x is not None:
        x = call(aten.select.int, form.x, dim, at)
        step = Step(form.x, ("select", dim, at), form.vdim, move, back)
    return _moved(c, form, shape, x, step, move).with_(vdim=form.vdim - (dim < form.vdim))


def select(c: Context, node: Node, operand: Operand, dim: int, index: Any) -> Result:
    form = row_form(operand)
    dim %= len(form.shape)
    if dim == form.vdim:
        return _one_column(c, node, form, index)
    return select_rows(c, form, shape_of(node), dim, index)


def _one_column(c: Context, node: Node, form: Form, at: object) -> Result:
    if not isinstance(at, int) or at < 0 or form.x is None:
        raise Refused("one column of the vocabulary is taken")
    index = c.emitter.full(c.lead_sizes(form), at, torch.int64, form.x)
    return c.column_value(node, column(c, form, (index,)), "row value", form)


def unbind(c: Context, node: Node, operand: Operand, dim: int = 0) -> Result:
    form, dim = _leading(operand, dim)
    parts = enumerate(value(node))
    return tuple(select_rows(c, form, tuple(part.shape), dim, at) for at, part in parts)


# -- reshapes -----------------------------------------------------------------------------------------


def reshape_rows(c: Context, form: Form, shape: Sequence[Size], sizes: Sequence[SizeArg]) -> Form:
    vdim = _moved_vocabulary(form, shape)
    before = c.lead_sizes(form)
    after = [1 if at == vdim else size for at, size in enumerate(sizes)]

    def move(atom: Node) -> Node:
        atom = c.spread(form, atom)
        return c.emitter.reshape(atom, _with(after, vdim, c.emitter.size(atom, form.vdim)))

    def back(atom: Node) -> Node:
        columns = c.emitter.size(atom, vdim)
        atom = c.emitter.expand(atom, _with(after, vdim, columns))
        return c.emitter.reshape(atom, _with(before, form.vdim, columns))

    x, step = None, None
    if form.x is not None:
        x = c.emitter.reshape(form.x, list(sizes))
        copies = bool(x.args) and x.args[0] in c.emitter.packed
        step = Step(form.x, ("reshape",), form.vdim, move, back, copies)
        if x is form.x:
            return form
    return _moved(c, form, shape, x, step, move).with_(vdim=vdim)


def _with(sizes: Sequence[SizeArg], dim: int, size: SizeArg) -> list[SizeArg]:
    return [*sizes[:dim], size, *sizes[dim + 1 :]]


def _moved_vocabulary(form: Form, shape: Sequence[Size]) -> int:
    """The vocabulary dimension after a reshape; the sizes behind it must be equal."""
    size, trailing = form.shape[form.vdim], form.shape[form.vdim + 1 :]
    for vdim in reversed(range(len(shape))):
        rest = [s for s in shape[vdim + 1 :] if not same(s, 1)]
        if same(shape[vdim], size) and same_shape(rest, [s for s in trailing if not same(s, 1)]):
            return vdim
    raise Refused("a reshape splits or joins the vocabulary dimension")


def view(c: Context, node: Node, operand: Operand, sizes: Sequence[SizeArg]) -> Result:
    if isinstance(operand, Mask):
        raise Refused("a full-vocabulary mask is reshaped")
    given = [
        c.emitter.size(node, at) if isinstance(size, int) and size == -1 else size
        for at, size in enumerate(sizes)
    ]
    return reshape_rows(c, row_form(operand), shape_of(node), given)


def unsqueeze(c: Context, node: Node, operand: Operand, dim: int) -> Result:
    form = row_form(operand)
    sizes = c.all_sizes(form)
    dim %= len(form.shape) + 1
    return reshape_rows(c, form, shape_of(node), [*sizes[:dim], 1, *sizes[dim:]])


def squeeze(c: Context, node: Node, operand: Operand, dims: Any = None) -> Result:
    form = row_form(operand)
    rank = len(form.shape)
    wanted = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in wanted if same(form.shape[d], 1)}
    sizes = [size for at, size in enumerate(c.all_sizes(form)) if at not in gone]
    return reshape_rows(c, form, shape_of(node), sizes)


def sym_size(c: Context, node: Node, operand: Operand, dim: int) -> Result:
    """A size; read from the logits, so that no full-vocabulary value stays alive for it."""
    form = row_form(operand)
    if form.x is None:
        raise Refused("a size of a value without logits")
    size = c.emitter.size(form.x, dim % len(form.shape))
    return Instead(size) if isinstance(size, Node) else None


# -- orders -------------------------------------------------------------------------------------------


def permute_dims(c: Context, form: Form, shape: Sequence[Size], dims: Sequence[int]) -> Form:
    rank = len(form.shape)
    dims = [dim % rank for dim in dims]
    inverse = [dims.index(dim) for dim in range(rank)]
    kept = [dim for dim in dims if not same(form.shape[dim], 1)]
    if kept == sorted(kept):
        sizes = c.all_sizes(form)
        return reshape_rows(c, form, shape, [sizes[dim] for dim in dims])

    def move(atom: Node) -> Node:
        return _turned(c, c.emitter.align(atom, rank), dims)

    def back(atom: Node) -> Node:
        return _turned(c, c.emitter.align(atom, rank), inverse)

    x, step = None, None
    if form.x is not None:
        x = move(form.x)
        step = Step(form.x, ("permute", *dims), form.vdim, move, back)
    return _moved(c, form, shape, x, step, move).with_(vdim=inverse[form.vdim])


def _turned(c: Context, node: Node, order: list[int]) -> Node:
    if node.op == "call_function" and node.target is aten.permute.default:
        inner, given = node.args
        order = [cast(Sequence[int], given)[dim] % len(order) for dim in order]
        node = cast(Node, inner)
    if order == list(range(len(order))):
        return node
    return c.emitter.call(aten.permute.default, node, order)


def permute(c: Context, node: Node, operand: Operand, dims: Sequence[int]) -> Result:
    return permute_dims(c, row_form(operand), shape_of(node), dims)


def transpose(c: Context, node: Node, operand: Operand, dim0: int, dim1: int) -> Result:
    form = row_form(operand)
    dims = list(range(len(form.shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute_dims(c, form, shape_of(node), dims)


def t(c: Context, node: Node, operand: Operand) -> Result:
    return permute_dims(c, row_form(operand), shape_of(node), [1, 0])


def zeros_for(c: Context, form: Form, like: Node) -> Node:
    """Zeros for the rows of `form`, with `like`'s columns and dtype."""
    sizes = c.lead_sizes(form)
    if form.vdim == len(form.shape) - 1:
        sizes[form.vdim] = c.emitter.size(like, rank_of(like) - 1)
    dtype = value(like).dtype
    return c.emitter.full(sizes, 0.0 if dtype.is_floating_point else 0, dtype, like)
