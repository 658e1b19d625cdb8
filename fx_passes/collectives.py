"""Fewer collectives: the row-level all-reduces of a vocabulary-parallel loss become one all-gather.

Entry point: `merge`, over a graph whose softmaxes are fused already. What a rank adds to an all-reduce is a function of
a few row values of its own (maximum, log-sum, mean, target logit) and of earlier results. So the ranks exchange those
row values once, and every rank computes every rank's addends, and reduces them in rank order:

    all_reduce(f(own, earlier results))   ->   reduce_r f(gathered[r], earlier results)

NOTE [The same on all ranks]
What is merged, and the order of what is gathered, follows from the forward graph alone, never from a rank's data, from
whether it needs gradients, or from what it compiled before. A row value or a number in f is another one on another
rank: row values are gathered, and a number that the user wrote in f is a reason not to merge.

On a group of one rank an all-reduce is its operand.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.builder import (
    SPLITS,
    VIEWS,
    Builder,
    is_backward,
    is_float_tensor,
    ranks_of,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.user_lines import source_of

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

REDUCE: dict[str, Callable[..., Any]] = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}
OTHERS = {
    operator.getitem,
    aten.cat.default,
    aten.clone.default,
    prims.convert_element_type.default,
}
CONSTANTS = {aten.full.default, aten.scalar_tensor.default, aten.lift_fresh_copy.default}
MAX_NODES = 4096


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of the graph; `wait` is the node that holds its result."""

    wait: Node
    operand: Node
    operation: str
    group: Any

    @classmethod
    def of(cls, wait: Node) -> AllReduce | None:
        reduce = wait.args[0]
        if not isinstance(reduce, Node) or reduce.target is not c10d.all_reduce.default:
            return None
        operand, operation, group = reduce.args
        assert isinstance(operand, Node)
        return cls(wait, operand, str(operation), group)


@dataclass(frozen=True)
class Merged:
    """Collectives of the graph, forward and backward, before and after; why some were not merged."""

    before: int = 0
    after: int = 0
    notes: tuple[str, ...] = ()


class _Kind(enum.Enum):
    OWN = "a rank's own value"
    SHARED = "the same on all ranks"
    MIXED = "made of both: what another rank has there can be computed from what it sends"
    STUCK = "depends on a result in a way that cannot be computed for another rank"


def merge(graph: Graph, fake_mode: Any, is_wide: Callable[[Node], bool], enabled: bool) -> Merged:
    """Merges the all-reduces over each group; `is_wide` tells full-vocabulary values.

    Args:
        graph: a functional ATen graph, joint or inference, after `fuse`; changed in place.
        fake_mode: of the graph's values.
        is_wide: whether a node holds a full-vocabulary value, which is never gathered.
        enabled: False only counts.
    """
    before = _count(graph)
    notes: list[str] = []
    if before and enabled:
        for group in dict.fromkeys(each.group for each in _all_reduces(graph)):
            if isinstance(group, str):
                notes += _merge_group(graph, fake_mode, is_wide, group)
    return Merged(before, _count(graph), tuple(dict.fromkeys(notes)))


def is_collective(node: Node) -> bool:
    """A functional collective; not the wait for its result."""
    functional = getattr(node.target, "namespace", "") == "_c10d_functional"
    return functional and node.target is not c10d.wait_tensor.default


def _count(graph: Graph) -> int:
    return sum(map(is_collective, graph.nodes))


def _all_reduces(graph: Graph) -> list[AllReduce]:
    """Those of forward, in order."""
    waits = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    return [each for wait in waits if (each := AllReduce.of(wait)) and not is_backward(wait)]


def _merge_group(
    graph: Graph, fake_mode: Any, is_wide: Callable[[Node], bool], group: str
) -> list[str]:
    found = [each for each in _all_reduces(graph) if each.group == group]
    ranks = ranks_of(group)
    if ranks == 1:
        _replace(graph, {each: each.operand for each in found})
        return []
    _drop_copies(each.wait for each in found)
    plan = _Plan({each.wait: each for each in found}, is_wide)
    for node in graph.nodes:
        plan.visit(node)
    if len(plan.members) < 2:
        return plan.notes
    if plan.cost() * ranks > MAX_NODES:
        return [
            f"{len(plan.members)} all-reduces are left apart: {plan.cost()} operations for each of {ranks} ranks "
            f"are more than {MAX_NODES}"
        ]
    builder = Builder(graph, fake_mode)
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        _replace(graph, _Replay(builder, plan, group, ranks).results())
    return plan.notes


def _drop_copies(waits: Iterable[Node]) -> None:
    """An in-place all-reduce is traced as a copy of the result into the operand."""
    for wait in waits:
        for user in _aliases(wait):
            for copy in list(user.users):
                into = copy.args[0]
                if copy.target is aten.copy.default and copy.args[1] is user and _alike(into, wait):
                    copy.replace_all_uses_with(wait)
                    copy.graph.erase_node(copy)


def _aliases(node: Node) -> list[Node]:
    same = (aten.detach.default, aten.alias.default)
    return [node, *(n for user in node.users if user.target in same for n in _aliases(user))]


def _alike(left: Any, right: Node) -> bool:
    return same_shape(shape_of(left), shape_of(right)) and value(left).dtype == value(right).dtype


def _replace(graph: Graph, results: dict[AllReduce, Node]) -> None:
    for each, made in results.items():
        each.wait.replace_all_uses_with(made)
    for each in results:
        (reduce,) = each.wait.all_input_nodes
        graph.erase_node(each.wait)
        graph.erase_node(reduce)


# -- planning -----------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """Which all-reduces are merged, and what every forward node is to the other ranks."""

    waits: dict[Node, AllReduce]
    is_wide: Callable[[Node], bool]
    kinds: dict[Node, _Kind] = field(default_factory=dict)
    of_rows: set[Node] = field(default_factory=set)
    members: list[AllReduce] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def visit(self, node: Node) -> None:
        if is_backward(node) or node.op == "output":
            self.kinds[node] = _Kind.STUCK
            return
        self._mark_rows(node)
        each = self.waits.get(node)
        self.kinds[node] = self._kind(node) if each is None else self._member(each)

    def _mark_rows(self, node: Node) -> None:
        """Row values: statistics, target logits, and what is made of them."""
        starts = node.target in (torch.ops.slime_fused.row_stats.default, aten.gather.default)
        made = starts or any(arg in self.of_rows for arg in node.all_input_nodes)
        if made and not self.is_wide(node):
            self.of_rows.add(node)

    def _member(self, each: AllReduce) -> _Kind:
        reason = self._obstacle(each)
        if reason is None:
            self.members.append(each)
            return _Kind.SHARED
        if each.operand in self.of_rows:
            where = source_of(each.wait) or each.wait.name
            self.notes.append(f"the all-reduce at {where} stays: {reason}")
        return _Kind.OWN if self.kinds[each.operand] is _Kind.OWN else _Kind.STUCK

    def _obstacle(self, each: AllReduce) -> str | None:
        operand = each.operand
        if operand not in self.of_rows:
            return "not a row value of a fused softmax"
        if each.operation not in REDUCE:
            return f"{each.operation} is not one of {sorted(REDUCE)}"
        if not is_float_tensor(operand) or self.is_wide(operand):
            return "not a floating row value"
        if self.kinds[operand] is _Kind.STUCK:
            return self._why_stuck(operand)
        if self.kinds[operand] is _Kind.OWN and not self.can_send(operand):
            return "only floating row values and masks are gathered"
        return None

    def _why_stuck(self, node: Node) -> str:
        while True:
            inner = [a for a in node.all_input_nodes if self.kinds[a] is _Kind.STUCK]
            if not inner:
                return f"what another rank has at {node.target} ({source_of(node)}) is not known to this one"
            node = inner[0]

    def _kind(self, node: Node) -> _Kind:
        found = {self.kinds[arg] for arg in node.all_input_nodes if is_data(arg)}
        if _Kind.STUCK in found:
            return _Kind.STUCK
        if found <= {_Kind.OWN}:
            return _Kind.OWN
        if not self._replayable(node):
            return _Kind.STUCK
        return _Kind.SHARED if found == {_Kind.SHARED} else _Kind.MIXED

    def _replayable(self, node: Node) -> bool:
        target = node.target
        known = target in VIEWS or target in OTHERS
        known = known or _is_masked_fill(node)
        if not known and torch.Tag.pointwise not in getattr(target, "tags", ()):
            return False
        if self.is_wide(node) or (has_number(node) and not node.meta.get("slime_fused")):
            return False
        own = [a for a in node.all_input_nodes if self.kinds[a] is _Kind.OWN and is_data(a)]
        return all(self.can_send(arg) for arg in own)

    def can_send(self, node: Node) -> bool:
        """Floating row values, masks and constants; a number that changed once is a tensor without dimensions."""
        node = moved_from(node)
        found = value(node)
        if not isinstance(found, torch.Tensor) or self.is_wide(node):
            return False
        if not found.ndim and node.target not in CONSTANTS:
            return False
        return found.dtype.is_floating_point or found.dtype is torch.bool

    def cost(self) -> int:
        return sum(kind is _Kind.MIXED for kind in self.kinds.values())


def _is_masked_fill(node: Node) -> bool:
    """`value[mask] = number`, which is traced as an index_put of a tensor without dimensions."""
    if node.target is not aten.index_put.default or len(node.args) > 3:
        return False
    base, *masks, fill = node.all_input_nodes
    return (
        len(masks) == 1
        and value(masks[0]).dtype is torch.bool
        and same_shape(shape_of(masks[0]), shape_of(base))
        and not value(fill).ndim
    )


def is_data(node: Node) -> bool:
    """A tensor (or several), not a size."""
    return not isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat))


def has_number(node: Node) -> bool:
    """Whether an operand of the arithmetic is a number: not a size, a dimension or a dtype."""
    if node.target in VIEWS or node.target in OTHERS:
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    numbers = ("Tensor", "number", "Scalar", "float")
    return any(
        isinstance(given, (int, float)) and not isinstance(given, bool)
        and any(kind in str(argument.type) for kind in numbers)
        for given, argument in zip(node.args, arguments, strict=False)
    )  # fmt: skip


def moved_from(node: Node) -> Node:
    """The value of which `node` only shows a part, or another shape or order."""
    while node.op == "call_function" and _is_move(node):
        node = node.all_input_nodes[0]
    return node


def _is_move(node: Node) -> bool:
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in SPLITS
    return node.target in VIEWS


# -- replaying ----------------------------------------------------------------------------------------


class _Replay:
    """Computes every rank's addends from what was gathered."""

    def __init__(self, builder: Builder, plan: _Plan, group: str, ranks: int) -> None:
        self.builder, self.plan, self.group, self.ranks = builder, plan, group, ranks
        builder.origin = plan.members[0].wait
        self.reduced: dict[Node, Node] = {}  # by wait
        self.sent = list(dict.fromkeys(self._sent()))
        self.copies: list[dict[Node, Node]] = self._gathered()

    def results(self) -> dict[AllReduce, Node]:
        results = {}
        for each in self.plan.members:
            total, *rest = [self._on(rank, each.operand) for rank in range(self.ranks)]
            for addend in rest:
                total = self.builder.call(REDUCE[each.operation], total, addend)
            results[each] = self.reduced[each.wait] = total
        return results

    def _sent(self) -> Iterable[Node]:
        """Own values that the members' operands are made of, in the order of the members."""
        seen: set[Node] = set()
        for each in self.plan.members:
            stack = [each.operand]
            while stack:
                node = stack.pop()
                if node in seen or not is_data(node):
                    continue
                seen.add(node)
                if self.plan.kinds[node] is _Kind.OWN:
                    yield moved_from(node)
                elif self.plan.kinds[node] is _Kind.MIXED:
                    stack.extend(reversed(node.all_input_nodes))

    def _gathered(self) -> list[dict[Node, Node]]:
        """One all-gather of all sent values; for each rank what it sent."""
        call = self.builder.call
        double = any(value(node).dtype is torch.float64 for node in self.sent)
        dtype = torch.float64 if double else torch.float32
        flat = [
            self.builder.reshape(self.builder.cast(node, dtype), [self._count(node)])
            for node in self.sent
        ]
        payload = call(aten.cat.default, flat)
        gathered = call(c10d.all_gather_into_tensor.default, payload, self.ranks, self.group)
        gathered = call(c10d.wait_tensor.default, gathered)
        table = self.builder.reshape(gathered, [self.ranks, self.builder.size(payload, 0)])
        pieces = call(aten.split_with_sizes.default, table, [self._count(n) for n in self.sent], 1)
        copies: list[dict[Node, Node]] = []
        for rank in range(self.ranks):
            of_rank = {}
            for at, node in enumerate(self.sent):
                row = call(aten.select.int, call(operator.getitem, pieces, at), 0, rank)
                of_rank[node] = self._as(row, node)
            copies.append(of_rank)
        return copies

    def _as(self, row: Node, node: Node) -> Node:
        shaped = self.builder.reshape(row, self.builder.sizes(node))
        if value(node).dtype is torch.bool:
            return self.builder.call(aten.ne.Scalar, shaped, 0)
        return self.builder.cast(shaped, value(node).dtype)

    def _count(self, node: Node) -> Any:
        total: Any = 1
        for size in self.builder.sizes(node):
            if isinstance(total, int) and isinstance(size, int):
                total *= size
            elif total == 1:
                total = size
            else:
                total = self.builder.call(operator.mul, total, size)
        return total

    def _on(self, rank: int, node: Node) -> Node:
        """`node` as it is on `rank`."""
        copies = self.copies[rank]
        stack = [node]
        while stack:
            top = stack[-1]
            if top in copies:
                stack.pop()
                continue
            if self._is_fixed(top):
                copies[top] = self.reduced.get(top, top)
                stack.pop()
                continue
            waiting = [arg for arg in top.all_input_nodes if arg not in copies]
            if waiting:
                stack.extend(waiting)
                continue
            self.builder.origin = top
            args, kwargs = torch.fx.map_arg((top.args, top.kwargs), lambda a: copies[a])
            copies[top] = self.builder.call(top.target, *args, **kwargs)
            stack.pop()
        return copies[node]

    def _is_fixed(self, node: Node) -> bool:
        """Sizes, and values that are the same on all ranks."""
        return not is_data(node) or self.plan.kinds[node] is _Kind.SHARED
