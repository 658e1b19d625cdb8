"""Everything a rule may use: meanings of nodes, roots, row scalars, statistics, and the emitter of new nodes.

Replacements in the user's graph are not here: rules do not see `account.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.algebra.forms import Exp, Form
from fx_passes.algebra.poly import ZERO, Poly
from fx_passes.graph.changes import Changes
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    Size,
    SizeArg,
    hint,
    is_wide,
    rank_of,
    same,
    shape_of,
    value,
)
from fx_passes.graph.operators import Target
from fx_passes.graph.order import ancestors
from fx_passes.graph.per_row import exchanges, numbers_per_row
from fx_passes.outcome import FuseConfig
from fx_passes.refused import Refused
from fx_passes.torch_private import FakeTensorMode
from fx_passes.walk.results import Result, RowValue
from fx_passes.walk.roots import Roots
from fx_passes.walk.row_scalars import RowRule, RowScalars
from fx_passes.walk.statistics import Statistics, Stats, compute_dtype, dtype_of

aten = torch.ops.aten


MADE_OF_LOGITS = (
    "an operand varies over the vocabulary and comes from logits by an unsupported operator"
)


class Context:
    """The walk as seen by a rule.

    Attributes:
        values: the meaning of every visited node: a form, a mask, a tuple of those, or the node itself.
        only: the accepted roots; None in the first walk, where every candidate is a root.
        changes: inputs changed in place by the graph: no roots, or roots in forward only.
    """

    def __init__(
        self,
        graph: Graph,
        config: FuseConfig,
        fake_mode: FakeTensorMode,
        row_table: Mapping[Target, RowRule],
        only: frozenset[Node] | None,
        changes: Changes | None,
    ) -> None:
        self.config = config
        self.only, self.changes = only, changes or Changes()
        self.emitter = Emitter(graph, fake_mode)
        self.rows = RowScalars(self.emitter, row_table)
        self.roots = Roots(self.emitter)
        self.statistics = Statistics(self.roots, self.rows)
        # all ranks of an exchange must treat the same values as logits, whatever the sizes of their shards
        self.per_row = numbers_per_row(graph) if any(map(exchanges, graph.nodes)) else frozenset()
        self.values: dict[Node, Result] = {}
        self._free: set[Node] = set()

    # -- reading ---------------------------------------------------------------------------------

    def read(self, arg: Any) -> Any:
        """The meaning of an argument: a form if it is full-vocabulary, otherwise the node itself."""
        if isinstance(arg, (list, tuple)):
            return type(arg)(self.read(item) for item in arg)
        if not isinstance(arg, Node):
            return arg
        meaning = self.values[arg]
        if isinstance(meaning, Node) and self._is_root(meaning):
            return self.roots.identity(meaning)
        return meaning

    def _is_root(self, node: Node) -> bool:
        if self.emitter.made(node) or node in self.changes.never or node in self.per_row:
            return False
        if self.only is not None and node not in self.only:
            return False
        return is_wide(node, self.config.min_vocab)

    def is_vocabulary(self, size: Size) -> bool:
        """Large enough to be a vocabulary; a symbolic size counts by its hint and adds no guard."""
        return hint(size) >= self.config.min_vocab

    def is_free_of_logits(self, node: Node) -> bool:
        """Whether `node` is computed from no logits."""

        def is_logits(node: Node) -> bool:
            return node in self.rows.of_logits or self._is_root(node)

        def inputs(node: Node) -> list[Node]:
            return [] if is_logits(node) else [n for n in node.all_input_nodes if n not in free]

        free = self._free
        if node in free:
            return True
        found = {node, *ancestors([node], inputs)}
        if any(map(is_logits, found)):
            return False
        free |= found
        return True

    # -- numbers per row -------------------------------------------------------------------------

    def operand(self, arg: object, form: Form) -> Poly:
        """A number or row scalar to combine with `form`, aligned to its rank."""
        rank = len(form.shape)
        poly = self.rows.operand(arg, rank)
        if poly is None:
            raise Refused(f"an operand is neither a number nor a row scalar: {arg}")
        if rank_of(arg):
            sizes = (1,) * (rank - rank_of(arg)) + shape_of(arg)
            fits = len(sizes) == rank and all(
                same(size, 1) or (dim != form.vdim and same(size, form.shape[dim]))
                for dim, size in enumerate(sizes)
            )
            if not fits:
                raise Refused(
                    MADE_OF_LOGITS
                    if arg in self.rows.of_logits
                    else "an operand varies over the vocabulary and is not computed from the logits"
                )
        return poly

    def emit_rows(self, poly: Poly, form: Form, node: Node) -> Node:
        """`poly` as a node in the form's compute dtype; `node` is the user's, for the device."""
        if form.x is not None:
            return self.rows.emit_node(poly, dtype_of(form), form.x)
        return self.rows.emit_node(poly, compute_dtype(node), node)

    def row_value(self, node: Node, poly: Poly, label: str, form: Form, keepdim: bool) -> RowValue:
        """`node` computes a row scalar of complete rows: emits it with the node's shape."""
        result = self._per_row(self.emit_sum(poly, form, node), form, keepdim)
        if poly.as_number() is not None:
            self.rows.meanings[result] = poly
        return RowValue(result, label, form)

    def column_value(self, node: Node, poly: Poly, label: str, form: Form) -> RowValue:
        """`node` is one column of `form`; the column need not depend on the others."""
        return RowValue(self._per_row(self.emit_rows(poly, form, node), form, False), label, form)

    def _per_row(self, number: Node, form: Form, keepdim: bool) -> Node:
        lead = self.lead_sizes(form)
        result = self.emitter.expand(number, lead)
        if keepdim:
            return result
        return self.emitter.reshape(result, [s for dim, s in enumerate(lead) if dim != form.vdim])

    def emit_sum(self, poly: Poly, form: Form, node: Node) -> Node:
        """`poly`, the sum of `form`.

        A softmax sums to 1. Exception: in a row with NaN, with +inf, or of -inf only, the sum must be NaN. A softmax
        with factors of zero in a row is not looked at there, as everywhere.
        """
        number = self.emit_rows(poly, form, node)
        result = Poly.atom(number)
        for term in form.exps:
            stats, factor = self.stats(form, term.scale), self._without_mean(term)
            if factor.is_zero or term.shift != stats.logsumexp:
                continue  # a mean, or the factor sum of exponentials, is NaN in such a row
            nothing, zero = self.nothing(form, stats), self.emit_rows(ZERO, form, number)
            result += Poly.atom(self.where_any([factor], nothing, zero))
        total = self.emit_rows(result, form, number)
        if total is not number:
            self.rows.meanings[total] = poly
        return total

    def _without_mean(self, term: Exp) -> Poly:
        """The part of the factor `a` in terms without a mean (b = 0): only these can hide a row without a softmax."""
        means = list(map(self.rows.placed_in, term.b.terms))
        hidden = {
            monomial: number
            for monomial, number in term.a.terms.items()
            if not any(rows <= self.rows.placed_in(monomial) for rows in means)
        }
        return Poly(hidden)

    def nothing(self, form: Form, stats: Stats) -> Node:
        """Per row 0, or NaN if the row has no softmax."""
        assert form.x is not None
        log_sum = self.emit_rows(stats.log_sum, form, form.x)
        zero = self.emitter.call(aten.sub.Tensor, log_sum, log_sum)  # inductor takes 0 * NaN for 0
        self.rows.tell(zero, nothing=True)
        return zero

    def is_empty(self, form: Form, stats: Stats) -> Node:
        """A row mask: rows of -inf only. A peak of -inf may also come with a NaN."""
        assert form.x is not None
        log_sum = self.emit_rows(stats.log_sum, form, form.x)
        return self.emitter.call(aten.eq.Scalar, log_sum, -math.inf)

    def where_any(self, factors: list[Poly], node: Node, otherwise: Node) -> Node:
        """`otherwise` in rows where all factors are zero; a number other than zero is never zero."""
        if any(factor.as_number() for factor in factors):
            return node
        off = [
            self.emitter.call(
                aten.eq.Scalar, self.rows.emit_node(factor, value(node).dtype, node), 0
            )
            for factor in factors
            if not factor.is_zero
        ]
        if not off:
            return otherwise
        off_row = functools.reduce(
            functools.partial(self.emitter.call, aten.logical_and.default), off
        )
        return self.emitter.where(off_row, otherwise, node)

    def mass(self, height: Poly, log_sum: Poly, x: Node, exact: Poly | None = None) -> Node:
        """exp(height + log_sum), a row's sum of exponentials over `x`; `exact` is how the height is computed."""
        return self.rows.mass(height, log_sum, compute_dtype(x), x, exact)

    def weighted(self, mass: Node, number: Poly) -> Node:
        """A row's sum of exponentials times a number; 0 if the sum is 0, whatever the number is.

        In one piece: a mass that overflows would cancel against its negative in the sum of its products.
        """
        dtype = value(mass).dtype
        null = self.emitter.call(aten.eq.Scalar, mass, 0)
        zero = self.rows.emit_node(ZERO, dtype, mass)
        product = self.emitter.call(aten.mul.Tensor, mass, self.rows.emit_node(number, dtype, mass))
        product = self.rows.zero_where_placed(number.common(), product)
        return self.emitter.where(null, zero, product)

    # -- sizes -----------------------------------------------------------------------------------

    def lead_sizes(self, form: Form) -> list[SizeArg]:
        """The form's shape with 1 for the vocabulary, as numbers or nodes."""
        return [
            1 if dim == form.vdim else self.size_of(form, dim) for dim in range(len(form.shape))
        ]

    def all_sizes(self, form: Form) -> list[SizeArg]:
        return [self.size_of(form, dim) for dim in range(len(form.shape))]

    def size_of(self, form: Form, dim: int) -> SizeArg:
        size = form.shape[dim]
        if isinstance(size, int):
            return size
        return self.known_size(size) if form.x is None else self.emitter.size(form.x, dim)

    def known_size(self, size: Size) -> SizeArg:
        if isinstance(size, int):
            return size
        computed = self.emitter.size_of(size.node.expr)
        if computed is None:
            raise Refused(f"the size {size.node.expr} is not computed in the graph")
        return computed

    def vocabulary(self, form: Form) -> Poly:
        """V, as a number or the node that computes it."""
        size = self.size_of(form, form.vdim)
        return Poly.atom(size) if isinstance(size, Node) else Poly.number(float(size))

    def spread(self, form: Form, atom: Node) -> Node:
        """A row scalar of `form` over all its rows (its columns, usually one, stay)."""
        atom = self.emitter.align(atom, len(form.shape))
        sizes = self.lead_sizes(form)
        sizes[form.vdim] = self.emitter.size(atom, form.vdim)
        return self.emitter.expand(atom, sizes)

    # -- the logits ------------------------------------------------------------------------------

    def stats(self, form: Form, scale: Poly) -> Stats:
        return self.statistics.of(form, scale)

    def total(self, form: Form) -> Poly:
        """sum_v f x as V max(f x) + sum_v (f x - max(f x)), from existing statistics."""
        factor, stats = self.statistics.any_scale(form)
        whole = self.as_one(form, factor)
        return stats.max * self.vocabulary(form) * factor + stats.total * whole

    def as_one(self, form: Form, factor: Poly) -> Poly:
        """A factor of a value that may be -inf, as one number: distributed over its terms, it could give inf - inf.

        Exception: a factor that is 0 outside its rows stays as it is, because there it removes NaN.
        """
        if len(factor.terms) < 2 or self.rows.is_placed(factor):
            return factor
        assert form.x is not None
        return Poly.atom(self.rows.emit_node(factor, dtype_of(form), form.x))

    def gather(self, x: Node, vdim: int, index: Node) -> Node:
        """x at `index`. If x would be a copy of the logits, the index is moved to the logits instead."""
        if not self.roots.is_copy(x):
            return self.emitter.call(aten.gather.default, x, vdim, index)
        step = self.roots.steps[x]
        return step.move(self.gather(step.parent, step.vdim, step.back(index)))

    def piece_of_root(self, x: Node, dim: int, start: Any, stop: Any) -> Node | None:
        """The logits in these rows of a root that the user joined (`cat`)."""
        joined = x not in self.roots.steps and x.target is aten.cat.default
        if not joined or not isinstance(stop, int):
            return None
        along = x.args[1] if len(x.args) > 1 else 0
        if not isinstance(along, int) or along % len(shape_of(x)) != dim:
            return None
        at = 0
        for piece in x.args[0]:  # type: ignore[union-attr]
            meaning, size = self.values.get(piece), shape_of(piece)[dim]  # type: ignore[arg-type]
            if not isinstance(size, int):
                return None
            same_rows = (at, at + size) == (start, stop)
            if same_rows and isinstance(meaning, Form) and meaning.is_identity and meaning.x:
                self.roots.allies[x] = self.roots.root_of[meaning.x]
                return meaning.x
            at += size
        return None


def dtype_name(node: Node) -> str:
    return str(value(node).dtype).removeprefix("torch.")
