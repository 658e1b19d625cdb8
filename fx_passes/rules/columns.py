"""One column (or several) per row: read by gather and index, written by scatter and index_put."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form
from fx_passes.algebra.poly import Poly
from fx_passes.graph.facts import Shape, SizeArg, guarded_same, hint, rank_of, same, shape_of, value
from fx_passes.refused import Refused
from fx_passes.rules.indices import are_distinct, counting_axis
from fx_passes.rules.operands import is_constant
from fx_passes.rules.row_moves import slice_rows
from fx_passes.rules.row_writes import write_rows
from fx_passes.walk.columns import column, plus_column, with_column
from fx_passes.walk.context import Context
from fx_passes.walk.results import Operand, Result, RowValue, as_form

aten = torch.ops.aten


# -- reading ------------------------------------------------------------------------------------------


def gather(
    c: Context,
    node: Node,
    operand: Operand,
    dim: int,
    index: Operand,
    sparse_grad: bool = False,
) -> Result:
    form = as_form(operand)
    if dim % len(form.shape) != form.vdim or not isinstance(index, Node) or not rank_of(index):
        raise Refused("a gather over another dimension than the vocabulary")
    sizes = c.emitter.sizes(index)
    form = _first_rows(c, form, sizes)
    poly = column(c, form, (index,))
    result = c.emitter.expand(c.emit_rows(poly, form, node), sizes)
    return RowValue(result, _label(form), form)


def index(c: Context, node: Node, operand: Operand, indices: Sequence[Operand]) -> Result:
    if not isinstance(operand, Form):
        raise Refused("a value is indexed with full-vocabulary values")
    if sum(each is not None for each in indices) == 1:
        raise Refused("rows are picked by an index")
    form, columns = _row_and_column(c, operand, indices)
    poly = column(c, form, (columns,))
    sizes = c.emitter.sizes(columns)
    result = c.emitter.expand(c.emit_rows(poly, form, node), sizes)
    return RowValue(c.emitter.reshape(result, sizes[:-1]), _label(form), form)


def _label(form: Form) -> str:
    if not form.e.is_zero:
        return "log-prob"
    return "target logit" if form.is_affine else "target probability"


def _first_rows(c: Context, form: Form, sizes: Sequence[SizeArg]) -> Form:
    """The rows named by an index: all, or the first of a dimension."""
    if len(sizes) != len(form.shape):
        raise Refused("an index of another rank than the logits")
    for dim, size in enumerate(sizes):
        if dim != form.vdim and not guarded_same(size, form.shape[dim]):
            if hint(value(size)) > hint(form.shape[dim]):
                raise Refused("an index of more rows than the logits")
            whole = list(form.shape)
            whole[dim] = value(size)
            form = slice_rows(c, form, whole, dim, 0, size, 1)
    return form


def _row_and_column(c: Context, form: Form, indices: Sequence[Operand]) -> tuple[Form, Node]:
    """[iota, ..., index]: one column of the first rows; those rows, and the index with the form's rank."""
    lead = len(form.shape) - 1
    nodes = [each for each in indices if isinstance(each, Node)]
    if not (len(nodes) == len(indices) == lead + 1) or form.vdim != lead:
        raise Refused("the logits are indexed by something else than row number and column")
    *rows, columns = nodes
    if rank_of(columns) != lead:
        raise Refused("the logits are indexed by something else than row number and column")
    if not all(_counts_rows(each, dim, columns) for dim, each in enumerate(rows)):
        raise Refused("the logits are indexed by something else than row number and column")
    wanted = [*c.emitter.sizes(columns), 1]
    columns = c.emitter.call(aten.unsqueeze.default, columns, lead)
    return _first_rows(c, form, wanted), _from_the_end(c, form, columns)


def _counts_rows(rows: Node, dim: int, columns: Node) -> bool:
    """0, 1, 2, ... along `dim` of the columns."""
    place = dim - rank_of(columns) + rank_of(rows)
    counted = place >= 0 and counting_axis(rows) == place
    return counted and guarded_same(shape_of(rows)[place], shape_of(columns)[dim])


def _from_the_end(c: Context, form: Form, columns: Node) -> Node:
    """Indexing takes -1 for the last column; gather does not."""
    call = c.emitter.call
    columns = c.emitter.cast(columns, torch.int64)
    counted = call(aten.add.Tensor, columns, c.known_size(form.shape[form.vdim]))
    return c.emitter.where(call(aten.lt.Scalar, columns, 0), counted, columns)


# -- writing ------------------------------------------------------------------------------------------


def scatter(
    c: Context, node: Node, operand: Operand, dim: int, index: Operand, src: Operand
) -> Result:
    """W with `src` at one column per row, or at several different ones: W + [v == index] (src - W[index])."""
    return _scattered(c, node, operand, dim, index, src, accumulate=False)


def scatter_add(
    c: Context, node: Node, operand: Operand, dim: int, index: Operand, src: Operand
) -> Result:
    """W + [v == index] * src; any number of columns per row."""
    return _scattered(c, node, operand, dim, index, src, accumulate=True)


def index_put(
    c: Context,
    node: Node,
    operand: Operand,
    indices: Sequence[Operand],
    values: Operand,
    accumulate: bool = False,
) -> Result:
    """As scatter and scatter_add, for [iota, ..., index]."""
    if not isinstance(operand, Form):
        raise Refused("a full-vocabulary value is written by index")
    form = operand
    if form.is_row and not form.e.atoms():
        form = form.with_(vdim=len(form.shape) - 1)
    picked, columns = _row_and_column(c, form, indices)
    if isinstance(values, Node) and rank_of(values):
        values = c.emitter.call(aten.unsqueeze.default, values, rank_of(values))
    written = _written(c, node, picked, columns, _weight(c, form, values), accumulate)
    return _put_back(c, form, written)


def _scattered(
    c: Context,
    node: Node,
    operand: Operand,
    dim: int,
    index: Operand,
    src: Operand,
    accumulate: bool,
) -> Form:
    if not isinstance(operand, Form) or not isinstance(index, Node):
        raise Refused("a scatter of full-vocabulary values")
    form, dim = operand, dim % len(operand.shape)
    if form.is_row and not form.e.atoms():
        form = form.with_(vdim=dim)
    if dim != form.vdim or not _covers_rows(form, shape_of(index)):
        raise Refused("a scatter over another dimension than the vocabulary")
    if not (accumulate or same(shape_of(index)[dim], 1) or are_distinct(index, dim)):
        raise Refused("several columns per row are overwritten")
    weight = _weight(c, form, src)
    shape = src.shape if isinstance(src, Form) else _shape_of_rows(src)
    if shape and not _matches(form, shape, index):
        raise Refused("a scatter of only some of the given values")
    return _written(c, node, form, index, weight, accumulate)


def _shape_of_rows(src: Operand) -> Shape:
    """Of a tensor with dimensions; numbers have none."""
    return shape_of(src) if isinstance(src, Node) and rank_of(src) else ()


def _covers_rows(form: Form, shape: Shape) -> bool:
    """An operand of this shape has the form's rows, and any number of columns."""
    return len(shape) == len(form.shape) and all(
        at == form.vdim or guarded_same(size, whole)
        for at, (size, whole) in enumerate(zip(shape, form.shape, strict=True))
    )


def _matches(form: Form, shape: Shape, index: Node) -> bool:
    """As many rows as the form, and as many columns as the index."""
    return _covers_rows(form, shape) and same(shape[form.vdim], shape_of(index)[form.vdim])


def _weight(c: Context, form: Form, src: Operand) -> Poly:
    """The value to write at a column. A sum computed by the user keeps its rounding.

    The user's sum over the vocabulary contains the same rounded numbers, and only equal numbers cancel in it. A single
    number over as many rows as a vocabulary looks like a full-vocabulary constant.
    """
    if isinstance(src, Form) and is_constant(src):
        return src.e
    weight = c.rows.operand(src, len(form.shape))
    if weight is None:
        raise Refused("full-vocabulary values are written at columns")
    if len(weight.terms) > 1 and isinstance(src, Node):
        return Poly.atom(c.rows.aligned(src, len(form.shape)))
    return weight


def _written(
    c: Context, node: Node, form: Form, index: Node, weight: Poly, accumulate: bool
) -> Form:
    if accumulate:
        several = not same(shape_of(index)[form.vdim], 1)
        half = value(node).dtype.itemsize < torch.float32.itemsize
        return plus_column(c, form, index, weight, rounded=several and half)
    if not form.f.is_zero:
        raise Refused("a value linear in the logits is overwritten, and may be infinite there")
    return with_column(c, form, index, weight)


def _put_back(c: Context, form: Form, rows: Form) -> Form:
    """`form` with its first rows replaced by `rows`."""
    short = [dim for dim in range(form.vdim) if not same(rows.shape[dim], form.shape[dim])]
    if not short:
        return rows
    if len(short) > 1 or form.x is not None or not isinstance(rows.shape[short[0]], int):
        raise Refused("some of the rows are written by index")
    key = ("slice", short[0], 0, rows.shape[short[0]], 1)
    return write_rows(c, form, rows, key, form.shape, form.vdim)
