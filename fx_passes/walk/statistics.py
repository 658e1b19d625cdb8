"""Row statistics: once per root and scale, on the highest ancestor with the scale."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form
from fx_passes.algebra.poly import Poly
from fx_passes.graph.facts import rank_of, shape_of, value
from fx_passes.graph.operators import CASTS, SHOWN, under
from fx_passes.refused import Refused
from fx_passes.walk.roots import Roots
from fx_passes.walk.row_scalars import RowScalars

aten = torch.ops.aten


@dataclass(frozen=True)
class Stats:
    """Row statistics of `y = scale * x`, each `[..., 1]`; see docs/ops.md."""

    scale: Poly
    peak: Poly
    log_sum: Poly
    mean: Poly
    total: Poly

    @property
    def max(self) -> Poly:
        return self.scale * self.peak

    @property
    def logsumexp(self) -> Poly:
        return self.max + self.log_sum


def compute_dtype(x: Node | None) -> torch.dtype:
    """float64 for float64 logits, float32 for all others."""
    return torch.float64 if x is not None and value(x).dtype == torch.float64 else torch.float32


def dtype_of(form: Form) -> torch.dtype:
    """The dtype of the form's coefficients: without logits, the widest dtype of its rows.

    A form of constants and masks only, which may be float64, has float64.
    """
    if form.x is not None:
        return compute_dtype(form.x)
    rows = [atom for atom in form.atoms() if not is_mask(atom)]
    dtypes = {getattr(value(atom), "dtype", torch.int64) for atom in rows}
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    return torch.float32 if floating and torch.float64 not in floating else torch.float64


def is_mask(atom: Node) -> bool:
    """Whether a row scalar is 0 or 1 by its dtype, or was so before a cast."""
    return getattr(value(under(atom, CASTS | SHOWN)), "dtype", None) is torch.bool


class Statistics:
    """The requested statistics.

    Attributes:
        operators: their operators, each with its root.
    """

    def __init__(self, roots: Roots, rows: RowScalars) -> None:
        self.roots, self.rows, self.emitter = roots, rows, rows.emitter
        self.operators: dict[Node, Node] = {}
        self._known: dict[tuple[Node, Poly], Stats] = {}

    def of(self, form: Form, scale: Poly) -> Stats:
        """Statistics of `scale * x` for the form's logits."""
        if form.x is None:
            raise Refused("a softmax of a value without logits")
        return self._of(form.x, scale, form.vdim)

    def known(self, form: Form, scale: Poly) -> Stats | None:
        """Statistics requested before."""
        return None if form.x is None else self._known.get((form.x, scale))

    def is_one(self, atom: Node) -> bool:
        """Whether a row scalar is one of the statistics, of some of the rows or in another shape maybe."""
        atom = under(atom, SHOWN)
        return bool(atom.target is operator.getitem and atom.args[0] in self.operators)

    def any_in(self, poly: Poly) -> bool:
        return any(map(self.is_one, poly.atoms()))

    def shifts(self, form: Form) -> bool:
        """Whether the shift of the logits contains a statistic of theirs: NaN in rows of -inf only."""
        root = None if form.x is None else self.roots.root_of[form.x]
        return any(
            self.operators[under(atom, SHOWN).all_input_nodes[0]] is root
            for atom in form.e.atoms()
            if self.is_one(atom)
        )

    def any_scale(self, form: Form) -> tuple[Poly, Stats]:
        """Existing statistics of any scale, otherwise new ones of the form's own factor."""
        for (x, scale), stats in self._known.items():
            factor = form.f.over(scale)
            if x is form.x and factor is not None:
                return factor, stats
        return Poly.number(1.0), self.of(form, form.f)

    def _of(self, x: Node, scale: Poly, vdim: int) -> Stats:
        key = (x, scale)
        if key not in self._known:
            step = self.roots.steps.get(x)
            above = self.roots.strip(x, scale) if step is not None else None
            if step is None or above is None:
                self._known[key] = self._emit(x, scale, vdim)
            else:
                whole = self._of(step.parent, above, step.vdim)
                self._known[key] = Stats(scale, *(self._moved(x, p) for p in _parts(whole)))
        return self._known[key]

    def _moved(self, x: Node, poly: Poly) -> Poly:
        return poly.map_atoms(lambda atom: self.roots.moved(x, atom))

    def _emit(self, x: Node, scale: Poly, vdim: int) -> Stats:
        call, rank = self.emitter.call, len(shape_of(x))
        order = None if vdim == rank - 1 else [d for d in range(rank) if d != vdim] + [vdim]
        viewed = x if order is None else call(aten.permute.default, x, order)
        factor, rows = scale.as_number(), None
        if factor is None:
            factor, rows = 1.0, self.rows.emit_node(scale, compute_dtype(x), x)
            if order is not None and rank_of(rows):
                rows = call(aten.permute.default, rows, order)
        node = call(torch.ops.slime_fused.row_stats.default, viewed, rows, factor, "")
        self.operators[node] = self.roots.root_of[x]
        parts = [call(operator.getitem, node, at) for at in range(4)]
        self.rows.tell(parts[0], peak=True, logits=self.roots.root_of[x])
        for part in parts[1:]:
            self.rows.tell(part, level_free=True)
        if order is not None:
            back = [order.index(dim) for dim in range(rank)]
            parts = [call(aten.permute.default, part, back) for part in parts]
        return Stats(scale, *(Poly.atom(part) for part in parts))


def _parts(stats: Stats) -> tuple[Poly, ...]:
    return stats.peak, stats.log_sum, stats.mean, stats.total
