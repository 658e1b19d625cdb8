"""Operators that only move rows: slices, selects, splits, reshapes, permutes and rolls, and their backward forms.

A form whose rows are moved keeps its coefficients, moved alike; its source becomes a view of the logits, and a `Step`
remembers the way back. Backward writes pieces into zeros (`slice_scatter`, `select_scatter`, `cat`): where the piece
came from exactly there, the result is a form over the whole again, with coefficients that are zero elsewhere. So
slices, chunk loops and loops over rows all end as one gradient of one root.

`ROW_MAPS` is the table: operator -> rule. Rows that are picked by data (`x[mask]`) are not row maps: what they
make is a root of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import Refused, add, only_known, scaled
from fx_passes.algebra.forms import Exp, Extent, Form, Mask, OneHot
from fx_passes.algebra.poly import Monomial, Poly
from fx_passes.builder import same, same_shape, shape_of, value
from fx_passes.walk import Step, Value, Walk

aten = torch.ops.aten
prims = torch.ops.prims
END = 9223372036854775807


# -- moving ------------------------------------------------------------------------------------------


def _full(w: Walk, form: Form, atom: Node) -> Node:
    """A row scalar of `form` spread over all its rows (its columns, usually one, stay)."""
    atom = w.builder.align(atom, len(form.shape))
    sizes = w.lead_sizes(form)
    sizes[form.vdim] = w.builder.size(atom, form.vdim)
    return w.builder.expand(atom, sizes)


def _moved(
    w: Walk, form: Form, shape: Sequence[Any], source: Node | None, step: Step | None, move: Any
) -> Form:
    """`form` over its moved `source`; `move` moves a row scalar."""
    only_known(form)
    each = move
    if source is not None:
        assert form.source is not None
        assert step is not None
        if source not in w.root_of:
            w.steps[source] = step
            w.root_of[source] = w.root_of[form.source]
        if source in w.steps and w.steps[source].parent is form.source:
            each = lambda atom: w.moved(source, atom)  # noqa: E731

    def change(atom: Node) -> Node:
        found = value(atom)
        return each(atom) if isinstance(found, torch.Tensor) and found.ndim else atom

    def poly(p: Poly) -> Poly:
        return p.map_atoms(change)

    return Form(
        tuple(shape),
        form.vdim,
        source,
        tuple(Exp(poly(t.scale), poly(t.shift), poly(t.a), poly(t.b)) for t in form.exps),
        poly(form.e),
        poly(form.f),
        tuple(OneHot(tuple(change(i) for i in t.index), poly(t.weight)) for t in form.hots),
    )


def _dim(form: Form, dim: int) -> int:
    return dim % len(form.shape)


def _rows(w: Walk, form: Form | Mask, dim: int) -> tuple[Form, int]:
    """The form and a leading dimension of it; a mask or the vocabulary dimension is refused."""
    if isinstance(form, Mask):
        raise Refused("rows of a full-vocabulary mask are moved")
    if dim == form.vdim:
        raise Refused("a part of the vocabulary is taken")
    return form, dim


def _bounds(size: Any, start: Any, stop: Any) -> tuple[Any, Any]:
    """Slice bounds in one spelling: numbers within the size where the size is a number, END for all that is left."""
    start = 0 if start is None else start
    stop = END if stop is None else stop
    if not isinstance(size, int):
        return start, END if same(stop, size) else stop
    if isinstance(start, int):
        start = min(max(start + size if start < 0 else start, 0), size)
    if isinstance(stop, int):
        stop = min(max(stop + size if stop < 0 else stop, 0), size)
    return start, stop


def _takes_all(size: Any, start: Any, stop: Any, step: Any) -> bool:
    start, stop = _bounds(size, start, stop)
    return step == 1 and start == 0 and (stop == END or same(stop, size))


def slice_rows(
    w: Walk, form: Form, shape: Sequence[Any], dim: int, start: Any, stop: Any, step: Any
) -> Form:
    if _takes_all(form.shape[dim], start, stop, step):
        return form
    start, stop = _bounds(form.shape[dim], start, stop)
    call = w.builder.call

    def move(atom: Node) -> Node:
        atom = w.builder.align(atom, len(form.shape))
        one = same(shape_of(atom)[dim], 1) and not same(form.shape[dim], 1)
        return atom if one else call(aten.slice.Tensor, atom, dim, start, stop, step)

    def back(atom: Node) -> Node:
        zeros = _zeros(w, form, atom)
        return call(aten.slice_scatter.default, zeros, atom, dim, start, stop, step)

    source = None
    if form.source is not None:
        source = call(aten.slice.Tensor, form.source, dim, start, stop, step)
        source = w.piece_of_root(form.source, dim, start, stop) or source
    key = ("slice", dim, start, stop, step)
    made = Step(form.source, key, form.vdim, move, back) if form.source is not None else None
    return _moved(w, form, shape, source, made, move)


def select_rows(w: Walk, form: Form, shape: Sequence[Any], dim: int, at: Any) -> Form:
    size = form.shape[dim]
    at = at + size if isinstance(at, int) and isinstance(size, int) and at < 0 else at
    call = w.builder.call

    def move(atom: Node) -> Node:
        atom = w.builder.align(atom, len(form.shape))
        one = same(shape_of(atom)[dim], 1)
        return call(aten.select.int, atom, dim, 0 if one else at)

    def back(atom: Node) -> Node:
        zeros = _zeros(w, form, atom)
        return call(aten.select_scatter.default, zeros, atom, dim, at)

    source = call(aten.select.int, form.source, dim, at) if form.source is not None else None
    made = (
        Step(form.source, ("select", dim, at), form.vdim, move, back)
        if form.source is not None
        else None
    )
    result = _moved(w, form, shape, source, made, move)
    return result.with_(vdim=form.vdim - (dim < form.vdim))


def reshape_rows(w: Walk, form: Form, shape: Sequence[Any], sizes: Sequence[Any]) -> Form:
    vdim = _moved_vocabulary(form, shape)
    before, after = w.lead_sizes(form), [1 if at == vdim else size for at, size in enumerate(sizes)]

    def move(atom: Node) -> Node:
        atom = _full(w, form, atom)
        columns = w.builder.size(atom, form.vdim)
        return w.builder.reshape(
            atom, [columns if at == vdim else size for at, size in enumerate(after)]
        )

    def back(atom: Node) -> Node:
        columns = w.builder.size(atom, vdim)
        atom = w.builder.expand(
            atom, [columns if at == vdim else size for at, size in enumerate(after)]
        )
        return w.builder.reshape(
            atom, [columns if at == form.vdim else s for at, s in enumerate(before)]
        )

    source, made = None, None
    if form.source is not None:
        source = w.builder.reshape(form.source, list(sizes))
        copies = bool(source.args) and source.args[0] in w.builder.packed
        made = Step(form.source, ("reshape",), form.vdim, move, back, copies)
        if source is form.source:
            return form
    return _moved(w, form, shape, source, made, move).with_(vdim=vdim)


def _moved_vocabulary(form: Form, shape: Sequence[Any]) -> int:
    """Where a reshape leaves the vocabulary: what follows it must be the same."""
    size, trailing = form.shape[form.vdim], form.shape[form.vdim + 1 :]
    for vdim in reversed(range(len(shape))):
        rest = [s for s in shape[vdim + 1 :] if not same(s, 1)]
        if same(shape[vdim], size) and same_shape(rest, [s for s in trailing if not same(s, 1)]):
            return vdim
    raise Refused("a reshape splits or joins the vocabulary dimension")


def permute_dims(w: Walk, form: Form, shape: Sequence[Any], dims: Sequence[int]) -> Form:
    rank = len(form.shape)
    dims = [dim % rank for dim in dims]
    inverse = [dims.index(dim) for dim in range(rank)]
    kept = [dim for dim in dims if not same(form.shape[dim], 1)]
    if kept == sorted(kept):
        sizes = _source_sizes(w, form)
        return reshape_rows(w, form, shape, [sizes[dim] for dim in dims])

    def turn(node: Node, order: list[int]) -> Node:
        node = w.builder.align(node, rank)
        if node.op == "call_function" and node.target is aten.permute.default:
            inner, given = node.args
            order = [cast(Sequence[int], given)[d] % rank for d in order]
            node = cast(Node, inner)
        if order == list(range(rank)):
            return node
        return w.builder.call(aten.permute.default, node, order)

    source, made = None, None
    if form.source is not None:
        source = turn(form.source, dims)
        made = Step(
            form.source,
            ("permute", *dims),
            form.vdim,
            lambda a: turn(a, dims),
            lambda a: turn(a, inverse),
        )
    return _moved(w, form, shape, source, made, lambda a: turn(a, dims)).with_(
        vdim=inverse[form.vdim]
    )


def _zeros(w: Walk, form: Form, like: Node) -> Node:
    """Zeros for the rows of `form`, with `like`'s columns and dtype."""
    sizes = w.lead_sizes(form)
    if form.vdim == len(form.shape) - 1:
        sizes[form.vdim] = w.builder.size(like, len(shape_of(like)) - 1)
    found = value(like)
    zero = 0.0 if found.dtype.is_floating_point else 0
    return w.builder.call(
        aten.full.default,
        sizes,
        zero,
        dtype=found.dtype,
        layout=torch.strided,
        device=found.device,
        pin_memory=False,
    )


# -- writing back -------------------------------------------------------------------------------------


def _embedded(
    w: Walk, form: Form, parent: Form, back: Callable[[Node], Node], extent: Extent | None
) -> Form:
    """`form` as a value over its parent's rows: zero in the rows that `back` fills."""
    only_known(form)
    source = form.source

    def place(node: Node) -> Node:
        placed = back(_full(w, form, node))
        w.builder.embedded.add(placed)
        return placed

    def stripped(atom: Node) -> Node | None:
        return w.stripped(source, atom) if source is not None else None

    def poly(p: Poly, vanish: bool) -> Poly:
        result = Poly()
        for monomial, number in p.terms.items():
            result += Poly.number(number) * _embed_monomial(
                w, form, monomial, stripped, place, vanish
            )
        return result

    def index(node: Node) -> Node:
        return stripped(node) or place(node)

    return parent.with_(
        source=parent.source,
        exps=tuple(
            Exp(
                poly(t.scale, False), poly(t.shift, False), poly(t.a, True), poly(t.b, True), extent
            )
            for t in form.exps
        ),
        e=poly(form.e, True),
        f=poly(form.f, True),
        hots=tuple(
            OneHot(tuple(index(i) for i in t.index), poly(t.weight, True), extent)
            for t in form.hots
        ),
    )


def _embed_monomial(
    w: Walk,
    form: Form,
    monomial: Monomial,
    stripped: Callable[[Node], Node | None],
    place: Callable[[Node], Node],
    vanish: bool,
) -> Poly:
    """Factors that came from the parent are the parent's; the others are written into zeros as one."""
    kept, rest = Poly.number(1.0), []
    for atom, power in monomial:
        above = stripped(atom)
        if above is None:
            rest.append((atom, power))
        else:
            kept = kept * Poly({((above, power),): 1.0})
    if not rest and not vanish:
        return kept
    dtype = w.dtype_of(form.source)
    inner = Poly({tuple(rest): 1.0}) if rest else Poly.number(1.0)
    like = form.source or monomial[0][0]
    return kept * Poly.atom(place(w.builder.emit_node(inner, dtype, like)))


def _parent(w: Walk, form: Form, key: tuple[Any, ...], shape: Sequence[Any], vdim: int) -> Form:
    """The empty form over the rows that `form` was taken from by the step `key`."""
    if form.source is None:
        return Form(tuple(shape), vdim)
    step = w.steps.get(form.source)
    if step is None or step.key != key or not same_shape(shape_of(step.parent), shape):
        raise Refused("rows are written to another place than they came from")
    return Form(tuple(shape), step.vdim, step.parent)


def write_rows(
    w: Walk, base: Form, piece: Form, key: tuple[Any, ...], shape: Sequence[Any], vdim: int
) -> Form:
    """`base` with `piece` written over the rows that the step `key` takes."""
    parent = _parent(w, piece, key, shape, vdim)
    placed = _piece_of(w, piece, parent, key)
    if base.is_row and base.e.is_zero:
        return placed
    hole = Form(piece.shape, piece.vdim, piece.source, e=Poly.number(1.0))
    gone = _piece_of(w, hole, parent, key).e
    return add(scaled(base, Poly.number(1.0) - gone), placed, w.builder.embedded)


# -- the rules ----------------------------------------------------------------------------------------


def slice_(
    w: Walk, node: Node, form: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Value:
    dim = _dim(_form(form), dim)
    if _takes_all(form.shape[dim], start, end, step):
        return form
    form, dim = _rows(w, form, dim)
    return slice_rows(w, form, shape_of(node), dim, start, end, step)


def select(w: Walk, node: Node, form: Any, dim: int, index: Any) -> Value:
    form = _form(form)
    dim = _dim(form, dim)
    if dim == form.vdim:
        return _one_column(w, node, form, index)
    return select_rows(w, form, shape_of(node), dim, index)


def _one_column(w: Walk, node: Node, form: Form, at: Any) -> Value:
    if not isinstance(at, int) or at < 0 or form.source is None:
        raise Refused("one column of the vocabulary is taken")
    options = {"layout": torch.strided, "device": value(form.source).device, "pin_memory": False}
    index = w.builder.call(aten.full.default, w.lead_sizes(form), at, dtype=torch.int64, **options)
    return w.row_result(node, w.column(form, (index,)), "row value", form, keepdim=False)


def split(w: Walk, node: Node, form: Any, sizes: Any, dim: int = 0) -> Value:
    """split, split_with_sizes: a tuple of slices."""
    form, dim = _rows(w, _form(form), _dim(_form(form), dim))
    pieces: list[Form] = []
    start: Any = 0
    parts = value(node)
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        stop = END if last else _plus(w, start, _length(w, part.shape[dim]))
        pieces.append(slice_rows(w, form, tuple(part.shape), dim, start, stop, 1))
        start = stop
    return tuple(pieces)


def _length(w: Walk, size: Any) -> Any:
    return size if isinstance(size, int) else w.known_size(size)


def _plus(w: Walk, left: Any, right: Any) -> Any:
    """The sum of two sizes, numbers or nodes."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return right if left == 0 else w.builder.call(operator.add, left, right)


def sym_size(w: Walk, node: Node, form: Any, dim: int) -> Value:
    """A size; read from the source, so that it keeps no full-vocabulary value."""
    form = _form(form)
    if form.source is None:
        raise Refused("a size of a value that no logits are in")
    made = w.builder.size(form.source, _dim(form, dim))
    if not isinstance(made, Node):
        return None
    w.replacements[node] = made
    w.builder.known_sizes.setdefault(value(node).node.expr, made)
    return made


def unbind(w: Walk, node: Node, form: Any, dim: int = 0) -> Value:
    form, dim = _rows(w, _form(form), _dim(_form(form), dim))
    return tuple(
        select_rows(w, form, tuple(part.shape), dim, at) for at, part in enumerate(value(node))
    )


def view(w: Walk, node: Node, form: Any, sizes: Sequence[Any]) -> Value:
    if isinstance(form, Mask):
        raise Refused("a full-vocabulary mask is reshaped")
    shape = shape_of(node)
    given = [s if not (isinstance(s, int) and s == -1) else None for s in sizes]
    if any(s is None for s in given):
        at = given.index(None)
        if not isinstance(shape[at], int):
            given[at] = w.builder.size(node, at)
        else:
            given[at] = shape[at]
    return reshape_rows(w, form, shape, given)


def unsqueeze(w: Walk, node: Node, form: Any, dim: int) -> Value:
    form = _form(form)
    sizes = _source_sizes(w, form)
    dim = dim % (len(form.shape) + 1)
    return reshape_rows(w, form, shape_of(node), [*sizes[:dim], 1, *sizes[dim:]])


def squeeze(w: Walk, node: Node, form: Any, dims: Any = None) -> Value:
    form = _form(form)
    rank = len(form.shape)
    wanted = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % rank for d in wanted if same(form.shape[d], 1)}
    sizes = [s for at, s in enumerate(_source_sizes(w, form)) if at not in gone]
    return reshape_rows(w, form, shape_of(node), sizes)


def _source_sizes(w: Walk, form: Form) -> list[Any]:
    sizes = w.lead_sizes(form)
    vocabulary = form.shape[form.vdim]
    if not isinstance(vocabulary, int):
        vocabulary = (
            w.builder.size(form.source, form.vdim)
            if form.source is not None
            else w.known_size(vocabulary)
        )
    sizes[form.vdim] = vocabulary
    return sizes


def permute(w: Walk, node: Node, form: Any, dims: Sequence[int]) -> Value:
    return permute_dims(w, _form(form), shape_of(node), dims)


def transpose(w: Walk, node: Node, form: Any, dim0: int, dim1: int) -> Value:
    dims = list(range(len(_form(form).shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute_dims(w, form, shape_of(node), dims)


def t(w: Walk, node: Node, form: Any) -> Value:
    return permute_dims(w, _form(form), shape_of(node), [1, 0])


def slice_scatter(
    w: Walk,
    node: Node,
    base: Any,
    piece: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Value:
    base, piece = _form(base), _form(piece)
    dim = _dim(base, dim)
    if _takes_all(base.shape[dim], start, end, step):
        return piece
    if dim == piece.vdim:
        raise Refused("a part of the vocabulary is written")
    start, stop = _bounds(base.shape[dim], start, end)
    return write_rows(w, base, piece, ("slice", dim, start, stop, step), shape_of(node), piece.vdim)


def select_scatter(w: Walk, node: Node, base: Any, piece: Any, dim: int, index: Any) -> Value:
    base, piece = _form(base), _form(piece)
    dim = _dim(base, dim)
    vdim = piece.vdim + (dim <= piece.vdim)
    if not isinstance(index, int):
        raise Refused("a row is written at a place that is not fixed")
    size = base.shape[dim]
    index = index + size if index < 0 and isinstance(size, int) else index
    return write_rows(w, base, piece, ("select", dim, index), shape_of(node), vdim)


def cat(w: Walk, node: Node, pieces: Sequence[Any], dim: int = 0) -> Value:
    """Pieces that are all the slices (or rows) of one value, in order: that value again; else a root of its own."""
    forms = [_form(piece) for piece in pieces]
    dim = _dim(forms[0], dim)
    if any(piece.vdim == dim for piece in forms):
        raise Refused("parts of the vocabulary are joined")
    parent, keys = _whole(w, forms, dim)
    total = parent
    for form, key in zip(forms, keys, strict=True):
        total = add(total, _piece_of(w, form, parent, key), w.builder.embedded)
    if keys[0][0] == "slice":
        return total
    if not all(isinstance(size, int) for size in shape_of(node)):
        raise Refused("rows of a dimension whose size is not fixed are joined")
    return reshape_rows(w, total, shape_of(node), list(shape_of(node)))


def _whole(w: Walk, forms: Sequence[Form], dim: int) -> tuple[Form, list[tuple[Any, ...]]]:
    """The value that the pieces are all of, and the step that took each."""
    steps = [w.steps[form.source] for form in forms if form.source in w.steps]
    if len(steps) < len(forms) or any(step.parent is not steps[0].parent for step in steps):
        raise Refused("values that are not the pieces of one value are joined")
    at: Any = 0
    kind = steps[0].key[0]
    for step in steps:
        if kind not in ("slice", "select") or step.key[:3] != (kind, dim, at):
            raise Refused("pieces are joined in another order than they were taken")
        at = at + 1 if kind == "select" else step.key[3]
    parent = steps[0].parent
    if not (at == END or same(at, shape_of(parent)[dim])) or (kind == "select" and dim != 0):
        raise Refused("pieces that are not all of a value are joined")
    return Form(shape_of(parent), steps[0].vdim, parent), [step.key for step in steps]


def _piece_of(w: Walk, form: Form, parent: Form, key: tuple[Any, ...]) -> Form:
    """`form` over its parent's rows, zero in the others."""
    kind, dim, *where = key
    target = aten.slice_scatter.default if kind == "slice" else aten.select_scatter.default

    def back(atom: Node) -> Node:
        return w.builder.call(target, _zeros(w, parent, atom), atom, dim, *where)

    return _embedded(w, form, parent, back, _extent(parent, key))


def _extent(parent: Form, key: tuple[Any, ...]) -> Extent | None:
    """The rows that a step takes, where their numbers are fixed."""
    kind, dim, start, *rest = key
    stop = start + 1 if kind == "select" else rest[0]
    fixed = isinstance(start, int) and isinstance(stop, int) and isinstance(parent.shape[dim], int)
    if not fixed or (kind == "slice" and rest[1] != 1):
        return None
    return Extent(dim, ((start, stop),))


def pad(w: Walk, node: Node, form: Any, pads: Sequence[Any], fill: Any = 0) -> Value:
    """A negative pad (the backward of a pad) takes rows away; a positive one makes a root of its own."""
    form = _form(form)
    rank = len(form.shape)
    result, shape = form, list(form.shape)
    for at in range(0, len(pads), 2):
        low, high, dim = pads[at], pads[at + 1], rank - 1 - at // 2
        if low == 0 and high == 0:
            continue
        if (
            dim == form.vdim
            or not (isinstance(low, int) and isinstance(high, int))
            or max(low, high) > 0
        ):
            raise Refused("rows are padded")
        shape[dim] = shape_of(node)[dim]
        result = slice_rows(w, result, tuple(shape), dim, -low, high if high else None, 1)
    return result


def roll(w: Walk, node: Node, form: Any, indices: Sequence[Any]) -> Value:
    """index with `fmod(iota + k, n)` in one leading dimension: a roll by -k."""
    form = _form(form)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if len(dims) != 1 or dims[0] == form.vdim:
        raise Refused("rows are picked by an index")
    dim = dims[0]
    size = form.shape[dim]
    shift = _rolled_by(indices[dim], size)
    if shift is None or not isinstance(size, int):
        raise Refused("rows are picked by an index")
    call = w.builder.call

    def turned(source: Node, by: int) -> Node:
        by %= size
        if by == 0:
            return source
        parts = [
            call(aten.slice.Tensor, source, dim, by, size, 1),
            call(aten.slice.Tensor, source, dim, 0, by, 1),
        ]
        return call(aten.cat.default, parts, dim)

    def move(atom: Node) -> Node:
        return turned(_full(w, form, atom), shift)

    def back(atom: Node) -> Node:
        return turned(atom, size - shift)

    if form.source is None:
        return _moved(w, form, form.shape, None, None, move)
    step = w.steps.get(form.source)
    if step is not None and step.key[:2] == ("roll", dim) and (step.key[2] + shift) % size == 0:
        parent = step.parent

        def undo(atom: Node) -> Node:
            return w.stripped(form.source, atom) or turned(_full(w, form, atom), shift)

        return _moved(w, form, form.shape, None, None, undo).with_(source=parent)
    source = turned(form.source, shift)
    made = Step(form.source, ("roll", dim, shift % size), form.vdim, move, back, copies=True)
    return _moved(w, form, form.shape, source, made, move)


def _rolled_by(index: Any, size: Any) -> int | None:
    """k where `index` is `fmod(iota(n) + k, n)`."""
    if not isinstance(index, Node) or index.target is not aten.fmod.Scalar or index.args[1] != size:
        return None
    added = index.args[0]
    if (
        not isinstance(added, Node)
        or added.target is not aten.add.Tensor
        or not isinstance(added.args[1], int)
    ):
        return None
    return added.args[1] if is_iota(added.args[0]) else None


def is_iota(node: Any) -> bool:
    """0, 1, 2, ... along its only dimension that is not 1, seen through views, integer casts and slices from 0."""
    while isinstance(node, Node) and node.op == "call_function":
        if node.target is prims.iota.default:
            return bool(node.kwargs.get("start", 0) == 0 and node.kwargs.get("step", 1) == 1)
        if (
            node.target is aten.slice.Tensor
            and node.args[2:3] in ((), (0,), (None,))
            and len(node.args) < 5
        ):
            node = node.args[0]
            continue
        looks_through = (
            aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.alias.default,
            prims.convert_element_type.default, aten.clone.default,
        )  # fmt: skip
        if node.target not in looks_through:
            return False
        node = node.args[0]
    return False


def _form(found: Any) -> Form:
    if isinstance(found, Form):
        return found
    if isinstance(found, Mask):
        raise Refused("rows of a full-vocabulary mask are moved")
    raise Refused("full-vocabulary rows meet a value that no logits are in")


ROW_MAPS: dict[Any, Callable[..., Value]] = {
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.unbind.int: unbind,
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.reshape.default: view,
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: t,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.cat.default: cat,
    aten.constant_pad_nd.default: pad,
    aten.sym_size.int: sym_size,
}
