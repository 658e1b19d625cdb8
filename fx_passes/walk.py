"""One walk over the joint graph: what every node is as a form, and the new nodes for what leaves the region.

`Walk.visit` asks the table of `rules.py`; a rule answers with a form, a mask, a row scalar, or `Refused`. Nothing of
the user's graph is edited here: `replacements` says what `fuse.py` puts in place of which node once all is accepted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fx_passes.algebra.arithmetic import Refused, only_known
from fx_passes.algebra.forms import Exp, Form, Mask
from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.builder import RESHAPES, Builder, is_backward, is_float_tensor, same, shape_of, value
from fx_passes.graph.user_lines import source_of
from fx_passes.outcome import FuseConfig

aten = torch.ops.aten

Value: TypeAlias = Any  # Form | Mask | Node | tuple of those | number


@dataclass(frozen=True)
class Step:
    """How a source came from its parent by moving rows: `move` does the same to a row scalar, `back` undoes it.

    `back` fills rows that the parent has and the source has not with zeros. `key` names the step, so that the user's
    backward can be matched with it; `vdim` is where the parent keeps the vocabulary.
    """

    parent: Node
    key: tuple[Any, ...]
    vdim: int
    move: Callable[[Node], Node]
    back: Callable[[Node], Node]
    copies: bool = False


@dataclass(frozen=True)
class Stats:
    """Row statistics of `y = scale * x`, each `[..., 1]`; see docs/design.md."""

    max: Poly
    log_sum: Poly
    mean: Poly
    total: Poly


@dataclass(frozen=True)
class Refusal:
    node: Node
    reason: str
    roots: frozenset[Node]


class Walk:
    """The state of one walk: forms by node, statistics by root, replacements for the nodes that leave the region."""

    def __init__(
        self,
        graph: Graph,
        config: FuseConfig,
        fake_mode: Any,
        roots: frozenset[Node] | None,
        barriers: frozenset[Node],
        changed: frozenset[Node] = frozenset(),
    ) -> None:
        self.graph = graph
        self.config = config
        self.builder = Builder(graph, fake_mode)
        self.roots = roots
        self.barriers = barriers
        self.changed = changed
        self.env: dict[Node, Value] = {}
        self.steps: dict[Node, Step] = {}
        self.root_of: dict[Node, Node] = {}
        self.replacements: dict[Node, Node] = {}
        self.row_values: dict[Node, tuple[str, Node]] = {}
        self.kept: set[Node] = set()
        self.changed_logits: set[Node] = set()
        self.softmax_roots: set[Node] = set()
        self.masses: dict[Node, Poly] = {}
        self.refusals: list[Refusal] = []
        self.notes: dict[Node, tuple[Node, str]] = {}
        self.stats_nodes: dict[Node, Node] = {}
        self.leaves: dict[Node, Node] = {}
        self.allies: dict[Node, Node] = {}
        self.grad_nodes: dict[Node, Node] = {}
        self._stats: dict[Any, Stats] = {}
        self._moved_from: dict[tuple[Node, Node], Node] = {}

    # -- reading values --------------------------------------------------------------------------

    def read(self, arg: Any) -> Value:
        """What an argument of a node is: a form where it is full-vocabulary, otherwise the node itself."""
        if isinstance(arg, (list, tuple)):
            return type(arg)(self.read(item) for item in arg)
        if not isinstance(arg, Node):
            return arg
        found = self.env[arg]
        if isinstance(found, Node) and self._is_root(found):
            return self.identity(found)
        return found

    def _is_root(self, node: Node) -> bool:
        if not is_float_tensor(node) or self.builder.made(node):
            return False
        if node in self.changed or (self.roots is not None and node not in self.roots):
            return False
        shape = shape_of(node)
        return len(shape) >= 2 and self.is_vocabulary(shape[-1])

    def is_vocabulary(self, size: Any) -> bool:
        """Large enough to be a vocabulary; a symbolic size counts by its hint and adds no guard."""
        if isinstance(size, torch.SymInt):
            hint = size.node.hint if size.node.has_hint() else 0
            return int(hint) >= self.config.min_vocab
        return int(size) >= self.config.min_vocab

    def identity(self, root: Node) -> Form:
        self.root_of.setdefault(root, root)
        shape = shape_of(root)
        return Form(shape, len(shape) - 1, root, f=ONE)

    def dtype_of(self, source: Node | None) -> torch.dtype:
        """The compute dtype: float64 for float64 roots, float32 for all others."""
        found = value(source) if source is not None else None
        return (
            torch.float64 if found is not None and found.dtype == torch.float64 else torch.float32
        )

    # -- visiting --------------------------------------------------------------------------------

    def visit(self, node: Node, rules: dict[Any, Any]) -> None:
        self.builder.origin = node
        if node.op == "output" or node.target is aten.copy_.default:
            self._leave(node)
            self.env[node] = node
            return
        if node.op != "call_function" or node in self.barriers:
            self._keep_operands(node)
            self.env[node] = self.builder.adopt(node)
            return
        args, kwargs = self.read(node.args), {k: self.read(v) for k, v in node.kwargs.items()}
        rule = rules.get(node.target)
        meets = next(_region_values((args, kwargs)), None) is not None
        result = None
        try:
            if rule is not None and (meets or rule in CREATORS):
                result = rule(self, node, *args, **kwargs)
            elif meets:
                raise Refused(f"no rule for {node.target} on a full-vocabulary value")
        except Refused as refused:
            self._refuse(node, str(refused), (args, kwargs))
        if result is None:
            self._keep_operands(node)
            result = self.builder.adopt(node)
        self.env[node] = result

    def _refuse(self, node: Node, reason: str, operands: Any) -> None:
        regions = list(_region_values(operands))
        roots = frozenset(self.root_of[s] for r in regions if (s := _source(r)) is not None)
        if roots:
            self.refusals.append(Refusal(node, reason, roots))

    def _leave(self, output: Node) -> None:
        """What the graph returns is kept; logits that it returns changed (`logits / t`) become a root of their own."""
        for arg in output.all_input_nodes:
            found = self.env.get(arg)
            if isinstance(found, Form) and found.is_affine and not found.f.is_zero:
                self.changed_logits.add(arg)
        self._keep_operands(output)

    def _keep_operands(self, node: Node) -> None:
        for arg in node.all_input_nodes:
            self.keep(arg)

    def keep(self, node: Node) -> None:
        """`node`'s value leaves the region: computed from its form, or by the user's node where that is as good."""
        found = self.env.get(node)
        if isinstance(found, Node) or node in self.kept:
            return
        if isinstance(found, tuple) or found is None:
            self.kept.add(node)
            self._keep_operands(node)
            return
        self.kept.add(node)
        if isinstance(found, Form) and self._is_made(found) and node.target not in PASS_THROUGH:
            self.builder.origin = node
            made = self.row_grad(found, value(node).dtype)
            self.leaves[made] = self.root_of[found.source]  # type: ignore[index]
            self.replacements[node] = made
            return
        self._keep_operands(node)

    @staticmethod
    def _is_made(form: Form) -> bool:
        """Softmaxes, and what cancels to zero, are computed from the form; the rest is as cheap where it is."""
        vanishes = form.is_row and form.e.is_zero and form.source is not None
        return bool(form.exps) or vanishes

    def note_rounding(self, node: Node, form: Form) -> None:
        """A rounding of a full-vocabulary value that the rewrite leaves out."""
        root = self.root_of.get(form.source) if form.source is not None else None
        narrow = value(node).dtype
        if root is None or form.is_affine or value(root).dtype.itemsize <= narrow.itemsize:
            return
        kept = str(value(root).dtype).removeprefix("torch.")
        self.notes[node] = (
            root,
            f"{source_of(node) or 'a cast'} rounds a full-vocabulary value to {str(narrow).removeprefix('torch.')}; the "
            f"rewrite keeps {kept}, since no such value is stored and the result is nearer to what the program means",
        )

    # -- row scalars -----------------------------------------------------------------------------

    def operand(self, arg: Any, form: Form) -> Poly:
        """A number or row scalar that meets `form`, aligned to its rank."""
        rank = len(form.shape)
        poly = self.builder.operand(arg, rank)
        if poly is None:
            raise Refused(f"an operand is neither a number nor a row scalar: {arg}")
        found = value(arg) if isinstance(arg, Node) else None
        if isinstance(found, torch.Tensor) and found.ndim:
            sizes = (1,) * (rank - found.ndim) + tuple(found.shape)
            fits = len(sizes) == rank and all(
                same(size, 1) or (dim != form.vdim and same(size, form.shape[dim]))
                for dim, size in enumerate(sizes)
            )
            if not fits:
                raise Refused(
                    "an operand varies over the vocabulary and is not made from the logits"
                )
        return poly

    def row_result(self, node: Node, poly: Poly, label: str, form: Form, keepdim: bool) -> Node:
        """`node` computes a row scalar: emit it with the node's shape and dtype in the node's place."""
        like = form.source if form.source is not None else node
        dtype = self.dtype_of(form.source)
        lead = self.lead_sizes(form)
        made = self.builder.expand(self.builder.emit_node(poly, dtype, like), lead)
        if not keepdim:
            made = self.builder.reshape(made, [s for dim, s in enumerate(lead) if dim != form.vdim])
        if poly.as_number() is not None:
            self.builder.known[made] = poly
        return self.replace(node, made, label, form)

    def replace(self, node: Node, made: Node, label: str, form: Form) -> Node:
        made = self.builder.cast(made, value(node).dtype)
        self.replacements[node] = made
        self.builder.represents[node] = made
        if form.source is not None:
            self.row_values[node] = (label, self.root_of[form.source])
        return made

    def lead_sizes(self, form: Form) -> list[Any]:
        """The form's shape with 1 for the vocabulary, as numbers or nodes."""
        sizes = []
        for dim, size in enumerate(form.shape):
            if dim == form.vdim:
                sizes.append(1)
            elif isinstance(size, int):
                sizes.append(size)
            elif form.source is not None:
                sizes.append(self.builder.size(form.source, dim))
            else:
                sizes.append(self.known_size(size))
        return sizes

    def known_size(self, size: Any) -> Any:
        made = self.builder.size_of(size.node.expr)
        if made is None:
            raise Refused(f"the size {size.node.expr} is not computed in the graph")
        return made

    # -- statistics ------------------------------------------------------------------------------

    def total(self, form: Form) -> Poly:
        """sum_v (f x - max(f x)) + V max(f x), by statistics of any scale that are there already."""
        assert form.source is not None
        known = [
            (scale, stats)
            for (source, scale), stats in self._stats.items()
            if source is form.source
        ]
        for scale, stats in known:
            inverse = scale.inverse()
            if inverse is not None:
                whole: Poly = stats.total + stats.max * self.vocabulary(form)
                return whole * form.f * inverse
        stats = self.stats(form, form.f)
        return stats.total + stats.max * self.vocabulary(form)

    def vocabulary(self, form: Form) -> Poly:
        """V, as a number or the node that computes it."""
        size = form.shape[form.vdim]
        if isinstance(size, int):
            return Poly.number(float(size))
        found = (
            self.known_size(size)
            if form.source is None
            else self.builder.size(form.source, form.vdim)
        )
        return Poly.atom(found) if isinstance(found, Node) else Poly.number(float(found))

    def stats(self, form: Form, scale: Poly) -> Stats:
        """Row statistics of `scale * x` for the form's source, on the highest ancestor that has the scale."""
        if form.source is None:
            raise Refused("a softmax of a value that no logits are in")
        return self._stats_of(form.source, scale, form.vdim)

    def _stats_of(self, source: Node, scale: Poly, vdim: int) -> Stats:
        key = (source, scale)
        if key not in self._stats:
            step = self.steps.get(source)
            above = self._strip(source, scale) if step is not None else None
            if step is not None and above is not None:
                whole = self._stats_of(step.parent, above, step.vdim)
                self._stats[key] = Stats(
                    *(
                        poly.map_atoms(lambda atom: self.moved(source, atom))
                        for poly in (whole.max, whole.log_sum, whole.mean, whole.total)
                    )
                )
            else:
                self._stats[key] = self._emit_stats(source, scale, vdim)
        return self._stats[key]

    def _emit_stats(self, source: Node, scale: Poly, vdim: int) -> Stats:
        rank = len(shape_of(source))
        order = None if vdim == rank - 1 else [d for d in range(rank) if d != vdim] + [vdim]
        viewed = source if order is None else self.builder.call(aten.permute.default, source, order)
        dtype = self.dtype_of(source)
        number = scale.as_number()
        factor = 1.0 if number is None else number
        scale_node = None
        if number is None:
            scale_node = self.builder.emit_node(scale, dtype, source)
            if order is not None and value(scale_node).ndim:
                scale_node = self.builder.call(aten.permute.default, scale_node, order)
        node = self.builder.call(
            torch.ops.slime_fused.row_stats.default, viewed, scale_node, factor, ""
        )
        self.stats_nodes[node] = self.root_of[source]
        parts = [self.builder.call(operator.getitem, node, at) for at in range(4)]
        if order is not None:
            back = [order.index(dim) for dim in range(rank)]
            parts = [self.builder.call(aten.permute.default, part, back) for part in parts]
        return Stats(*(Poly.atom(part) for part in parts))

    def mass(self, exponent: Poly, source: Node) -> Node:
        """exp(exponent), a row's sum of exponentials; remembered, so that dividing by it is subtracting its log."""
        node = self.builder.emit_node(exponent, self.dtype_of(source), source)
        mass = self.builder.call(aten.exp.default, node)
        self.masses[mass] = exponent
        return mass

    def mass_exponent(self, atom: Node) -> Poly | None:
        """The exponent of a row's sum of exponentials, seen through views."""
        inner = atom
        while inner not in self.masses and inner.op == "call_function" and inner.target in RESHAPES:
            inner = inner.args[0]  # type: ignore[assignment]
        return self.builder.exponent(atom) if inner in self.masses else None

    # -- columns ---------------------------------------------------------------------------------

    def index_node(self, index: tuple[Node, ...]) -> Node:
        total = index[0]
        for part in index[1:]:
            total = self.builder.call(aten.add.Tensor, total, part)
        return total

    def column(self, form: Form, index: tuple[Node, ...]) -> Poly:
        """W at one column (or K columns) per row: a gather from the source, and arithmetic."""
        only_known(form)
        result = ZERO
        dtype = self.dtype_of(form.source)
        chosen = self.index_node(index)
        taken = ZERO
        if form.source is not None and (form.exps or not form.f.is_zero):
            taken = Poly.atom(self.builder.cast(self.gather(form.source, form.vdim, chosen), dtype))
        if not form.f.is_zero:
            result = self._affine_column(
                form.f, taken, dtype
            )  # first: (x - max) - log_sum, never x + (...)
        result = result + form.e
        if form.exps:
            for term in form.exps:
                result = result + self._exp_column(term, taken, dtype)
        for hot in form.hots:
            result = result + self._hot_column(hot.index, hot.weight, index, form, dtype)
        return result

    def _affine_column(self, f: Poly, taken: Poly, dtype: torch.dtype) -> Poly:
        """f * x at the column; a row whose f is 0 does not look at x, which may be infinite there."""
        if f.as_number() is not None:
            return taken * f
        factor = self.builder.emit(f, dtype)
        scaled = self.builder.emit(taken * f, dtype)
        off = self.builder.call(aten.eq.Scalar, factor, 0)
        zero = self.builder.emit_node(ZERO, dtype, next(iter(taken.atoms())))
        return Poly.atom(self.builder.call(aten.where.self, off, zero, scaled))

    def _exp_column(self, term: Exp, taken: Poly, dtype: torch.dtype) -> Poly:
        y = taken * term.scale
        found = self.builder.emit(y - term.shift, dtype)
        probability = self.builder.call(aten.exp.default, found)
        factor = Poly.atom(probability) * (term.a + term.b * y)
        if term.b.is_zero:
            return factor
        zero = self.builder.emit_node(ZERO, dtype, probability)
        null = self.builder.call(aten.eq.Scalar, probability, 0)
        weighted = self.builder.emit(factor, dtype)
        return Poly.atom(self.builder.call(aten.where.self, null, zero, weighted))

    def _hot_column(
        self,
        at: tuple[Node, ...],
        weight: Poly,
        index: tuple[Node, ...],
        form: Form,
        dtype: torch.dtype,
    ) -> Poly:
        if at == index:
            return weight
        mine, theirs = self.index_node(at), self.index_node(index)
        if not all(same(shape_of(node)[form.vdim], 1) for node in (mine, theirs)):
            raise Refused("columns of two different index tensors meet")
        hit = self.builder.call(aten.eq.Tensor, mine, theirs)
        held = self.builder.emit_node(weight, dtype, mine)
        zero = self.builder.emit_node(ZERO, dtype, mine)
        return Poly.atom(self.builder.call(aten.where.self, hit, held, zero))

    def gather(self, source: Node, vdim: int, index: Node) -> Node:
        """x at `index`; where the source would be a copy of the logits, the index moves to the logits instead."""
        step = self.steps.get(source)
        if step is not None and self._copied(source):
            return step.move(self.gather(step.parent, step.vdim, step.back(index)))
        return self.builder.call(aten.gather.default, source, vdim, index)

    def _copied(self, source: Node) -> bool:
        step = self.steps.get(source)
        return step is not None and (step.copies or self._copied(step.parent))

    # -- row maps --------------------------------------------------------------------------------

    def piece_of_root(self, source: Node, dim: int, start: Any, stop: Any) -> Node | None:
        """What a root that the user joined (`cat`) has in these rows: the source that was joined there."""
        if (
            source in self.steps
            or source.target is not aten.cat.default
            or not isinstance(stop, int)
        ):
            return None
        along = source.args[1] if len(source.args) > 1 else 0
        if not isinstance(along, int) or along % len(shape_of(source)) != dim:
            return None
        at = 0
        for piece in source.args[0]:  # type: ignore[union-attr]
            found, size = self.env.get(piece), shape_of(piece)[dim]  # type: ignore[arg-type]
            if not isinstance(size, int):
                return None
            if (at, at + size) == (start, stop) and isinstance(found, Form) and found.is_identity:
                self.allies[source] = self.root_of[found.source]  # type: ignore[index]
                return found.source
            at += size
        return None

    def moved(self, source: Node, atom: Node) -> Node:
        """A row scalar of the parent of `source`, moved as the rows were."""
        found = value(atom)
        if not isinstance(found, torch.Tensor) or not found.ndim:
            return atom
        result = self.steps[source].move(atom)
        self._moved_from.setdefault((source, result), atom)
        return result

    def stripped(self, source: Node, atom: Node) -> Node | None:
        """The parent's row scalar that `atom` was moved from, if it was."""
        found = value(atom)
        if not isinstance(found, torch.Tensor) or not found.ndim:
            return atom
        return self._moved_from.get((source, atom))

    def _strip(self, source: Node, poly: Poly) -> Poly | None:
        above = {atom: self.stripped(source, atom) for atom in poly.atoms()}
        if any(atom is None for atom in above.values()):
            return None
        return poly.map_atoms(lambda atom: above[atom])  # type: ignore[arg-type, return-value]

    # -- leaving ---------------------------------------------------------------------------------

    def row_grad(self, form: Form, dtype: torch.dtype) -> Node:
        """The full-vocabulary value itself: one read of the source and one write."""
        assert form.source is not None
        wanted = dtype
        for other, _ in form.others:  # what is added is rounded once, after the sum
            dtype = torch.promote_types(dtype, value(other).dtype)
        rank = len(form.shape)
        order = None
        if form.vdim != rank - 1:
            order = [dim for dim in range(rank) if dim != form.vdim] + [form.vdim]
        pack = _Packer(self, form, order)
        saved = self._saved_softmax(form, dtype)
        node = self.builder.call(
            torch.ops.slime_fused.row_grad.default,
            pack.ordered(form.source if saved is None else saved),
            pack.terms(),
            pack.affine(),
            *pack.columns(),
            saved is not None,
            dtype,
            "",
        )
        self.grad_nodes[node] = self.root_of[form.source]
        if self._in_backward():  # also where it depends on no upstream gradient
            node.meta["partitioner_tag"] = "is_backward"
        if order is not None:
            back = [order.index(dim) for dim in range(rank)]
            node = self.builder.call(aten.permute.default, node, back)
        for other, weight in form.others:
            factor = self.builder.emit(weight, dtype)
            term = other if factor == 1 else self.builder.call(aten.mul.Tensor, other, factor)
            node = self.builder.call(aten.add.Tensor, node, term)
        return self.builder.cast(node, wanted)

    def _saved_softmax(self, form: Form, dtype: torch.dtype) -> Node | None:
        """With save="softmax": exp(y - shift) made in forward; the gradient is computed from it and may overwrite it.

        None where it would not serve: several softmaxes, logits in the gradient, a shift that only backward knows.
        """
        if (
            self.config.save != "softmax"
            or len(form.exps) != 1
            or not form.f.is_zero
            or not self._in_backward()
        ):
            return None
        (term,) = form.exps
        if any(is_backward(atom) for poly in (term.scale, term.shift) for atom in poly.atoms()):
            return None
        softmax = form.with_(exps=(Exp(term.scale, term.shift, ONE),), e=ZERO, hots=(), others=())
        at, self.builder.origin = self.builder.origin, None
        try:
            return self.row_grad(softmax, dtype)
        finally:
            self.builder.origin = at

    def _in_backward(self) -> bool:
        return self.builder.origin is not None and is_backward(self.builder.origin)


class _Packer:
    """Coefficients of a form as the tensors that `row_grad` takes."""

    def __init__(self, walk: Walk, form: Form, order: list[int] | None) -> None:
        self.walk, self.form, self.order = walk, form, order
        self.builder = walk.builder
        self.dtype = walk.dtype_of(form.source)
        self.lead = walk.lead_sizes(form)

    def ordered(self, node: Node) -> Node:
        return (
            node
            if self.order is None
            else self.builder.call(aten.permute.default, node, self.order)
        )

    def cell(self, poly: Poly, columns: Any = 1) -> Node:
        """`poly` as a tensor `[..., columns]`."""
        assert self.form.source is not None
        sizes = list(self.lead)
        sizes[self.form.vdim] = columns
        return self.ordered(
            self.builder.expand(self.builder.emit_node(poly, self.dtype, self.form.source), sizes)
        )

    def joined(self, cells: Sequence[Node]) -> Node:
        return self.builder.call(aten.cat.default, list(cells), -1)

    def empty(self, *columns: int, dtype: torch.dtype | None = None) -> Node:
        """`[..., *columns]` with no elements."""
        dtype, device = dtype or self.dtype, value(self.form.source).device
        sizes = [*self.builder.sizes(self.cell(ZERO))[:-1], *columns]
        options = {"layout": torch.strided, "device": device, "pin_memory": False}
        return self.builder.call(aten.full.default, sizes, 0, dtype=dtype, **options)

    def terms(self) -> Node:
        if not self.form.exps:
            return self.empty(0, 5)
        cells = [self.cell(poly) for term in self.form.exps for poly in self._coefficients(term)]
        packed = self.joined(cells)
        return self.builder.reshape(
            packed, [*self.builder.sizes(packed)[:-1], len(self.form.exps), 5]
        )

    def _coefficients(self, term: Exp) -> tuple[Poly, ...]:
        """(scale, center, shift, a, b) around the center: a + b y = (a + b center) + b (y - center)."""
        center = _center(term.shift, self.walk.stats(self.form, term.scale).max)
        return term.scale, center, term.shift - center, term.a + term.b * center, term.b

    def affine(self) -> Node:
        e, f = self.form.e, self.form.f
        center = ZERO if f.is_zero else _center(-e, ZERO)
        return self.joined([self.cell(f), self.cell(center), self.cell(e + center)])

    def columns(self) -> tuple[Node, Node]:
        """index and weight `[..., M]`."""
        vdim, hots = self.form.vdim, self.form.hots
        if not hots:
            return self.empty(0, dtype=torch.int64), self.empty(0)
        indices, weights = [], []
        for hot in hots:
            index = self.walk.index_node(hot.index)
            count = self.builder.size(index, vdim)
            sizes = list(self.lead)
            sizes[vdim] = count
            wide = self.builder.expand(self.builder.cast(index, torch.int64), sizes)
            indices.append(self.ordered(wide))
            weights.append(self.cell(hot.weight, count))
        if len(hots) == 1:
            return indices[0], weights[0]
        return self.joined(indices), self.joined(weights)


def _center(shift: Poly, maximum: Poly) -> Poly:
    """The first part of the shift: the row maximum where it is in there, else the part that was subtracted first."""
    single = maximum.as_monomial()
    for wanted in ([single[1]] if single else []) + list(shift.terms):
        if shift.terms.get(wanted) == 1.0 and wanted:
            return Poly({wanted: 1.0})
    return ZERO


def _region_values(operands: Any) -> Any:
    if isinstance(operands, (Form, Mask)):
        yield operands
    elif isinstance(operands, dict):
        yield from _region_values(tuple(operands.values()))
    elif isinstance(operands, (list, tuple)):
        for item in operands:
            yield from _region_values(item)


def _source(found: Form | Mask) -> Node | None:
    return found.form.source if isinstance(found, Mask) else found.source


CREATORS: set[Any] = set()
"""Rules that may start a full-vocabulary value from row scalars or numbers; `rules.py` fills it."""

PASS_THROUGH = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
}
