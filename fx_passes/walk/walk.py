"""One walk over the joint graph, in order: the table of rules reads each node, and the answer is recorded.

The user's graph is not edited here: new, unused nodes are added, and `Account.replacements` says which nodes `fuse.py`
replaces by them if all is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.algebra.arithmetic import TWO_LOGITS
from fx_passes.algebra.forms import Form, Mask
from fx_passes.algebra.poly import Poly
from fx_passes.graph.aliases import Aliases
from fx_passes.graph.changes import Changes
from fx_passes.graph.facts import is_backward, is_float_tensor, is_wide, same, shape_of, value
from fx_passes.graph.operators import (
    CASTS,
    COMPARISONS,
    SAME_VALUE,
    VIEWS,
    WHOLE_VIEWS,
    Target,
    read_back,
    under,
    written_over,
)
from fx_passes.graph.order import ancestors
from fx_passes.graph.user_lines import source_of
from fx_passes.outcome import FuseConfig
from fx_passes.refused import Refused
from fx_passes.torch_private import FakeTensorMode
from fx_passes.walk.account import Account, Refusal
from fx_passes.walk.context import MADE_OF_LOGITS, Context, dtype_name
from fx_passes.walk.exchange import exchanged
from fx_passes.walk.gradient import row_grad
from fx_passes.walk.layouts import keep_layouts
from fx_passes.walk.left_out import only_with_its_columns
from fx_passes.walk.near import only_one_offset
from fx_passes.walk.results import (
    SOFTMAX_LABELS,
    Instead,
    Item,
    Result,
    RowValue,
    Rule,
    Starts,
    full_vocabulary,
    logits_of,
)
from fx_passes.walk.row_nodes import RowNodes
from fx_passes.walk.row_scalars import RowRule
from fx_passes.walk.spelled_out import spell_out
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_MOVES = VIEWS - {aten.select.int}  # select may take a column: a number per row


@dataclass(frozen=True)
class Tables:
    """The rules, by operator; `rules/__init__.py` has them.

    Attributes:
        rules: of operators on full-vocabulary values.
        row_scalars: what operators mean on row scalars.
    """

    rules: Mapping[Target, Rule]
    row_scalars: Mapping[Target, RowRule]


class Walk:
    """The state of one walk.

    Args:
        graph: functional, with fake values.
        only: the accepted roots; None in the first walk, where every candidate is a root.
        barriers: nodes read as they are, whatever a rule would answer.
        changes: inputs changed in place by the graph: no roots, or roots in forward only.
    """

    def __init__(
        self,
        graph: Graph,
        config: FuseConfig,
        fake_mode: FakeTensorMode,
        tables: Tables,
        only: frozenset[Node] | None = None,
        barriers: frozenset[Node] = frozenset(),
        changes: Changes | None = None,
    ) -> None:
        self.graph = graph
        self.tables = tables
        self.barriers = barriers
        self.context = Context(graph, config, fake_mode, tables.row_scalars, only, changes)
        self.account = Account()
        # the caller may write to returned logits: they do not stand for equal ones that backward reads
        returned = Aliases(graph).of_outputs(graph)
        self.returned = {node for node in returned if is_wide(node, config.min_vocab)}

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        with self.graph.inserting_before(nodes[-1]):
            for node in nodes:
                self.context.emitter.origin = node
                self.context.values[node] = self._visit(node)
                if self._is_of_logits(node):
                    self.context.rows.of_logits.add(node)
            spell_out(self.context, self.account)
            keep_layouts(self.context.emitter, self.account)

    def root(self, node: Node) -> Node | None:
        """The root of a full-vocabulary value of the user's."""
        meaning = self.context.values.get(node)
        x = logits_of(meaning) if isinstance(meaning, (Form, Mask)) else None
        return None if x is None else self.context.roots.root_of.get(x)

    def _is_of_logits(self, node: Node) -> bool:
        """Full-vocabulary, a replaced number per row, or computed from such."""
        rows = self.context.rows
        if not isinstance(self.context.values[node], Node) or node in self.account.replacements:
            return True
        return any(arg in rows.of_logits for arg in node.all_input_nodes)

    # -- visiting --------------------------------------------------------------------------------

    def _visit(self, node: Node) -> Result:
        if node.target is aten.copy_.default and self._put_back(node):
            return node
        if node.op == "output" or node.target is aten.copy_.default:
            self._return(node)
            return node
        if node.op != "call_function" or node in self.barriers:
            return self._plain(node)
        written = read_back(node)
        if written is not None and self._are_over_one_root(written, node.args[0]):
            return self.context.values[written]
        read, base = self.context.read, written_over(node)
        args = node.args if base is None else (base, *node.args[1:])
        operands = (read(args), {key: read(arg) for key, arg in node.kwargs.items()})
        try:
            result = self._apply_rule(node, *operands)
            _check_precision(node, result)
            if isinstance(result, Form):
                _check_shape(node, result)
                self._check_rounding(result)
                only_one_offset(self.context, result)
                only_with_its_columns(self.context, result)
        except Refused as refused:
            made = refused.reason == TWO_LOGITS and self._are_made_of_logits(operands)
            self._refuse(node, MADE_OF_LOGITS if made else refused.reason, operands)
            result = None
        if result is None and node.target is c10d.wait_tensor.default:
            return self._receive(node)
        return self._plain(node) if result is None else self._record(node, result)

    def _check_rounding(self, form: Form) -> None:
        """Refuses to subtract a number reduced from rounded exponentials: the rewrite does not round exponentials.

        `e^x - max` may be far above 0 if only the max comes from rounded e^x.
        """
        if not form.exps:
            return
        for node in ancestors(form.e.atoms(), self._inputs_with_exponentials):
            wide = isinstance(self.context.values.get(node), Form)
            if wide and value(node).dtype.itemsize < dtype_of(form).itemsize:
                raise Refused("a reduction of rounded exponentials is added to exact ones")

    def _inputs_with_exponentials(self, node: Node) -> list[Node]:
        return [arg for arg in node.all_input_nodes if self._may_have_exponentials(arg)]

    def _may_have_exponentials(self, node: Node) -> bool:
        """A form with exponentials, or a number per row possibly computed from such."""
        meaning = self.context.values.get(node)
        if isinstance(meaning, Form):
            return bool(meaning.exps)
        return self.context.emitter.made(node) or node in self.context.rows.of_logits

    def _are_over_one_root(self, written: Node, whole: Any) -> bool:
        """Otherwise the overwritten value has become logits of its own, and `written` is a part of these."""
        both = isinstance(self.context.values[written], Form) and self.root(written) is not None
        return both and self.root(written) is self.root(whole)

    def _apply_rule(self, node: Node, args: Any, kwargs: Any) -> Result:
        rule = self.tables.rules.get(node.target)
        wide = full_vocabulary((args, kwargs))
        if rule is not None and (wide or isinstance(rule, Starts)):
            if node.target not in _MOVES:
                self.account.asked |= self._roots_of(wide)
            return rule(self.context, node, *args, **kwargs)
        if wide:
            raise Refused(f"no rule for {node.target} on a full-vocabulary value")
        return None

    def _plain(self, node: Node) -> Node:
        """No affair of the pass: the node stays, and so do its operands."""
        self._keep_operands(node)
        return node if node in self.returned else self.context.emitter.adopt(node)

    def _receive(self, wait: Node) -> Node:
        """Numbers per row from other ranks: the program's, or their replacement."""
        merged = self.context.config.merge_collectives
        stands_in = exchanged(self.context, wait) if merged else None
        if stands_in is None:
            return self._plain(wait)
        self.account.replacements[wait] = stands_in
        self.context.emitter.represents[wait] = stands_in
        return stands_in

    # -- recording -------------------------------------------------------------------------------

    def _record(self, node: Node, result: Result) -> Result:
        if isinstance(result, RowValue):
            return self._record_row_value(node, result)
        if isinstance(result, Instead):
            return self._record_instead(node, result)
        if isinstance(result, Form) and node.target in CASTS:
            self._note_rounding(node, result)
        return result

    def _record_row_value(self, node: Node, result: RowValue) -> Node:
        stands_in = self.context.emitter.cast(result.node, value(node).dtype)
        self.account.replacements[node] = stands_in
        self.context.emitter.represents[node] = stands_in
        if result.form.x is not None:
            root = self.context.roots.root_of[result.form.x]
            self.account.row_values[node] = (result.label, root)
            if result.label in SOFTMAX_LABELS:
                self.account.softmax_roots.add(root)
        return stands_in

    def _record_instead(self, node: Node, result: Instead) -> Item:
        for each in result.keeps:
            self._keep(each)
        self.account.replacements[node] = result.node
        if result.meaning is not None:
            return result.meaning
        self.context.emitter.represents[node] = result.node
        size = value(node)
        if isinstance(size, torch.SymInt):
            self.context.emitter.known_sizes.setdefault(size.node.expr, result.node)
        return result.node

    def _refuse(self, node: Node, reason: str, operands: object) -> None:
        roots = self._roots_of(full_vocabulary(operands))
        if roots:
            self.account.refusals.append(Refusal(node, reason, roots))
        if node.target in COMPARISONS and any(map(self._is_replaced, node.all_input_nodes)):
            self.account.doubtful |= roots

    def _are_made_of_logits(self, operands: object) -> bool:
        """Whether presumed logits are computed from other logits, in an unknown way."""
        roots = self._roots_of(full_vocabulary(operands))
        return not roots.isdisjoint(self.context.rows.of_logits)

    def _roots_of(self, wide: list[Form | Mask]) -> frozenset[Node]:
        xs = map(logits_of, wide)
        return frozenset(self.context.roots.root_of[x] for x in xs if x is not None)

    def _is_replaced(self, node: Node) -> bool:
        """A number per row computed differently than in the user's program, seen through views and copies."""
        while node not in self.account.row_values:
            if node.target not in VIEWS and node.target not in SAME_VALUE:
                return False
            node = node.all_input_nodes[0]
        return True

    def _note_rounding(self, node: Node, form: Form) -> None:
        """A rounding of a full-vocabulary value that the rewrite omits."""
        root = None if form.x is None else self.context.roots.root_of.get(form.x)
        if root is None or form.is_affine:
            return
        if value(root).dtype.itemsize > value(node).dtype.itemsize:
            text = (
                f"{source_of(node) or 'a cast'} rounds a full-vocabulary value to {dtype_name(node)}; the rewrite keeps "
                f"{dtype_name(root)}, because the value is not stored and the result is more accurate"
            )
            self.account.notes[node] = (root, text)

    # -- leaving ---------------------------------------------------------------------------------

    def _return(self, output: Node) -> None:
        """Returned values are kept; changed logits among them (`logits / t`) become a root of their own.

        Exception: if the graph returns a part of their memory (`logits[:, :-1]`), the logits exist, and have one
        gradient.
        """
        for arg in output.all_input_nodes:
            meaning = self.context.values.get(arg)
            if not isinstance(meaning, Form) or not meaning.is_affine or meaning.f.is_zero:
                continue
            if not (meaning.is_identity and under(arg, VIEWS) in self.context.roots.root_of):
                self.account.returned.add(arg)
        self._keep_operands(output)

    def _put_back(self, copy: Node) -> bool:
        """A value linear in the logits that backward copies over them; False for any other copy.

        Nothing is done if the logits have that value already (verl's entropy subtracts, and adds again).
        """
        into, copied = copy.args[:2]
        form = self.context.values.get(copied)  # type: ignore[arg-type]
        if not (isinstance(form, Form) and form.x is into and is_backward(copy)) or copy.users:
            return False
        if not (form.is_affine and form.is_everywhere):
            return False
        if form.is_identity:
            self.account.unchanged.append(copy)
        elif value(into).dtype == value(copied).dtype:
            self._leave(copied, form)  # type: ignore[arg-type]
        return True

    def _keep_operands(self, node: Node) -> None:
        for arg in node.all_input_nodes:
            self._keep(arg)

    def _keep(self, node: Node) -> None:
        """`node`'s value leaves the algebra: computed from its form, or by the user's node if that is as good."""
        waiting = [node]
        while waiting:
            each = waiting.pop()
            meaning = self.context.values.get(each)
            if isinstance(meaning, Node) or each in self.account.kept:
                continue
            self.account.kept.add(each)
            if isinstance(meaning, Form) and (
                _is_computed(meaning, each) or self._subtracts_a_rounded_peak(each, meaning)
            ):
                self._leave(each, meaning)
            else:
                waiting += reversed(each.all_input_nodes)

    def _subtracts_a_rounded_peak(self, node: Node, form: Form) -> bool:
        """Whether the user's nodes subtract the peak in a rounded number (a logsumexp, over a temperature).

        Reductions of such a value cancel its rounding; the statistics do not have that rounding.
        """
        linear = form.is_affine and not form.f.is_zero and form.is_everywhere
        if not linear or node in self.account.returned:
            return False
        rows, values = self.context.rows, self.context.values
        waiting, seen = [node], {node}
        while waiting:
            for arg in waiting.pop().all_input_nodes:
                meaning = values.get(arg)
                if isinstance(meaning, Form) and arg not in seen:
                    waiting.append(arg)
                    seen.add(arg)
                elif isinstance(meaning, Node) and is_float_tensor(meaning):
                    poly = rows.meaning(meaning)
                    if any(rows.fact(atom).peak for atom in poly.atoms()) and not _is_exact(
                        rows, poly
                    ):
                        return True
        return False

    def _leave(self, node: Node, form: Form) -> None:
        assert form.x is not None
        at, self.context.emitter.origin = self.context.emitter.origin, node
        leaving = row_grad(self.context, form, value(node).dtype)
        self.context.emitter.origin = at
        root = self.context.roots.root_of[form.x]
        self.account.gradients.update(dict.fromkeys(leaving.operators, root))
        self.account.leaving[leaving.node] = leaving
        self.account.replacements[node] = leaving.node


def _is_exact(rows: RowNodes, poly: Poly) -> bool:
    """A peak times a power of two, of some of the rows maybe."""
    number, monomial = poly.as_monomial() or (0.0, ())
    others = {atom for atom, _ in monomial if not rows.fact(atom).peak}
    return math.frexp(abs(number))[0] == 0.5 and others <= rows.zero_outside


def _check_precision(node: Node, result: Result) -> None:
    """Values in float64 are not computed in a narrower dtype."""
    form = result.form if isinstance(result, RowValue) else result
    if not isinstance(form, Form) or value(node).dtype is not torch.float64:
        return
    if dtype_of(form) is not torch.float64:
        given = "float32" if form.x is None else dtype_name(form.x)
        raise Refused(f"it is computed in float64 from {given} values")


def _check_shape(node: Node, form: Form) -> None:
    """The logits are not broadcast over rows: statistics and gradients have the rows of the logits."""
    shape = shape_of(node)
    for given in (form.shape, shape_of(form.x) if form.x is not None else shape):
        pairs = zip(given, shape, strict=False)
        if len(given) != len(shape) or any(same(a, 1) and not same(b, 1) for a, b in pairs):
            raise Refused("the logits are broadcast against a larger value")


def _is_computed(form: Form, node: Node) -> bool:
    """Softmaxes, and values that cancel to zero, are computed from the form; others are as cheap in the user's node."""
    vanishes = form.is_zero and form.x is not None
    known = form.beside is None and (bool(form.exps) or vanishes)
    return node.target not in WHOLE_VIEWS and known
