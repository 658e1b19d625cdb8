"""Rows written back: pieces put into zeros, or joined, at their former places.

Backward writes the gradient of a slice into zeros (`slice_scatter`, `select_scatter`) or joins pieces (`cat`). If a
piece came from exactly there, the result is a form over the whole tensor again, with coefficients that are zero
elsewhere. So slices, chunk loops and loops over rows all end as one gradient of one root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from fx_passes.algebra.arithmetic import add, only_everywhere, only_known, scaled
from fx_passes.algebra.forms import Exp, Extent, Form
from fx_passes.algebra.poly import Monomial, Poly
from fx_passes.graph.facts import Size, hint, same, same_shape, shape_of
from fx_passes.graph.slices import END, Bound, bounds, takes_all
from fx_passes.refused import Refused
from fx_passes.rules.row_moves import reshape_rows, row_form, zeros_for
from fx_passes.walk.context import Context
from fx_passes.walk.results import Operand, Result
from fx_passes.walk.roots import Key
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten


# -- the rules ----------------------------------------------------------------------------------------


def slice_scatter(
    c: Context,
    node: Node,
    operand: Operand,
    src: Operand,
    dim: int = 0,
    start: Bound = None,
    end: Bound = None,
    step: int = 1,
) -> Result:
    base, piece = row_form(operand), row_form(src)
    dim %= len(base.shape)
    if takes_all(base.shape[dim], start, end, step):
        if hint(piece.shape[dim]) != hint(base.shape[dim]):
            raise Refused("fewer rows are written than there are in their place")
        return piece
    if dim == piece.vdim:
        raise Refused("a part of the vocabulary is written")
    key = ("slice", dim, *bounds(base.shape[dim], start, end), step)
    return write_rows(c, base, piece, key, shape_of(node), piece.vdim)


def select_scatter(
    c: Context, node: Node, operand: Operand, src: Operand, dim: int, index: Operand
) -> Result:
    base, piece = row_form(operand), row_form(src)
    dim %= len(base.shape)
    if not isinstance(index, int):
        raise Refused("a row is written at an index unknown at compile time")
    size = base.shape[dim]
    index = index + size if index < 0 and isinstance(size, int) else index
    vdim = piece.vdim + (dim <= piece.vdim)
    if piece.x is None and c.is_vocabulary(
        size
    ):  # not the rows: a column of as many rows as a vocabulary has
        raise Refused("a part of the vocabulary is written")
    return write_rows(c, base, piece, ("select", dim, index), shape_of(node), vdim)


def cat(c: Context, node: Node, operands: Sequence[Operand], dim: int = 0) -> Result:
    """All slices (or rows) of one value, joined in order: that value again. Otherwise a root of its own."""
    pieces = [row_form(operand) for operand in operands]
    dim %= len(pieces[0].shape)
    if any(piece.vdim == dim for piece in pieces):
        raise Refused("parts of the vocabulary are joined")
    parent, keys = _whole(c, pieces, dim)
    total = parent
    for piece, key in zip(pieces, keys, strict=True):
        total = add(total, _placed(c, piece, parent, key), c.rows.zero_outside)
    if keys[0][0] == "slice":
        return total
    sizes = [size for size in shape_of(node) if isinstance(size, int)]
    if len(sizes) < len(shape_of(node)):
        raise Refused("rows of a dimension of symbolic size are joined")
    return reshape_rows(c, total, shape_of(node), sizes)


def _whole(c: Context, pieces: Sequence[Form], dim: int) -> tuple[Form, list[Key]]:
    """The value of which the pieces are all parts, and each piece's step."""
    steps = [c.roots.steps[piece.x] for piece in pieces if piece.x in c.roots.steps]
    if len(steps) < len(pieces) or any(step.parent is not steps[0].parent for step in steps):
        raise Refused("the joined values are not the pieces of one value")
    at: object = 0
    kind = steps[0].key[0]
    for step in steps:
        one_by_one = kind == "select" or step.key[4:] == (1,)
        if kind not in ("slice", "select") or step.key[:3] != (kind, dim, at) or not one_by_one:
            raise Refused("pieces are joined in another order than they were taken")
        at = step.key[2] + 1 if kind == "select" else step.key[3]  # type: ignore[operator]
    parent = steps[0].parent
    all_taken = at == END or same(at, shape_of(parent)[dim])
    if not all_taken or (kind == "select" and dim != 0):
        raise Refused("the joined pieces are only a part of a value")
    return Form(shape_of(parent), steps[0].vdim, parent), [step.key for step in steps]


# -- writing ------------------------------------------------------------------------------------------


def write_rows(
    c: Context, base: Form, piece: Form, key: Key, shape: Sequence[Size], vdim: int
) -> Form:
    """`base` with `piece` written over the rows of the step `key`."""
    parent = _parent(c, piece, key, shape, vdim)
    placed = _placed(c, piece, parent, key)
    if base.is_zero:
        return placed
    hole = Form(piece.shape, piece.vdim, piece.x, e=Poly.number(1.0))
    gone = _placed(c, hole, parent, key).e
    assert c.emitter.origin is not None
    left = c.emit_rows(Poly.number(1.0) - gone, parent, c.emitter.origin)
    rest = Poly.atom(c.rows.place(left))  # one factor: overwritten values may be NaN
    return add(scaled(base, rest), placed, c.rows.zero_outside)


def _parent(c: Context, piece: Form, key: Key, shape: Sequence[Size], vdim: int) -> Form:
    """The empty form over the parent's rows, from which the step `key` took `piece`."""
    if piece.x is None:
        return Form(tuple(shape), vdim)
    step = c.roots.steps.get(piece.x)
    if step is None or step.key != key or not same_shape(shape_of(step.parent), shape):
        raise Refused("rows are written to another place than they came from")
    return Form(tuple(shape), step.vdim, step.parent)


def _placed(c: Context, form: Form, parent: Form, key: Key) -> Form:
    """`form` over its parent's rows, zero in the others."""
    kind, dim, *where = key
    target = aten.slice_scatter.default if kind == "slice" else aten.select_scatter.default

    def back(atom: Node) -> Node:
        return c.emitter.call(target, zeros_for(c, parent, atom), atom, dim, *where)

    return _Embedding(c, form, parent, back).form(_extent(parent, key))


def _extent(parent: Form, key: Key) -> Extent | None:
    """The rows of a step, if their numbers are static. For a step size above 1 the rows between are included."""
    kind, dim, start, *rest = key
    assert isinstance(dim, int), key
    stop = start + 1 if kind == "select" else rest[0]  # type: ignore[operator]
    if not isinstance(start, int) or not isinstance(stop, int):
        return None
    return Extent(dim, ((start, stop),)) if isinstance(parent.shape[dim], int) else None


class _Embedding:
    """A form's coefficients over its parent's rows: the parent's own stay, the others are written into zeros."""

    def __init__(self, c: Context, form: Form, parent: Form, back: Callable[[Node], Node]) -> None:
        only_known(form)
        only_everywhere(form)
        self.c, self.inner, self.parent, self.back = c, form, parent, back

    def form(self, extent: Extent | None) -> Form:
        shared, vanishing = self._poly, self._vanishing
        return self.parent.with_(
            exps=tuple(
                Exp(shared(t.scale), shared(t.shift), vanishing(t.a), vanishing(t.b), extent)
                for t in self.inner.exps
            ),
            e=vanishing(self.inner.e),
            f=vanishing(self.inner.f),
            hots=tuple(
                replace(
                    t,
                    index=tuple(map(self._index, t.index)),
                    weight=vanishing(t.weight),
                    extent=extent,
                )
                for t in self.inner.hots
            ),
        )

    def _poly(self, poly: Poly, vanish: bool = False) -> Poly:
        result = Poly()
        for monomial, number in poly.terms.items():
            result += Poly.number(number) * self._monomial(monomial, vanish)
        return result

    def _vanishing(self, poly: Poly) -> Poly:
        """A factor of a term: it must be zero in the other rows."""
        return self._poly(poly, vanish=True)

    def _monomial(self, monomial: Monomial, vanish: bool) -> Poly:
        """Factors of the parent stay the parent's; the others are written into zeros as one."""
        kept, rest = Poly.number(1.0), []
        for atom, power in monomial:
            above = self._stripped(atom)
            if above is None:
                rest.append((atom, power))
            else:
                kept = kept * Poly({((above, power),): 1.0})
        if not rest and not vanish:
            return kept
        inner = Poly({tuple(rest): 1.0}) if rest else Poly.number(1.0)
        like = self.inner.x or next((atom for atom, _ in monomial), self.c.emitter.origin)
        assert like is not None
        emitted = self.c.rows.emit_node(inner, dtype_of(self.inner), like)
        return kept * Poly.atom(self._place(emitted))

    def _index(self, node: Node) -> Node:
        return self._stripped(node) or self._place(node)

    def _stripped(self, atom: Node) -> Node | None:
        return None if self.inner.x is None else self.c.roots.stripped(self.inner.x, atom)

    def _place(self, node: Node) -> Node:
        return self.c.rows.place(self.back(self.c.spread(self.inner, node)))
