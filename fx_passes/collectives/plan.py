"""Chooses the all-reduces to merge: can another rank compute each forward node, from its own or from gathered
values?"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.facts import is_backward, is_float_tensor, same_shape, shape_of, value
from fx_passes.graph.operators import SPLITS, VIEWS, Target
from fx_passes.graph.user_lines import source_of

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

REDUCE: dict[str, Callable[..., Any]] = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}
OTHERS: set[Target] = {
    operator.getitem,
    aten.cat.default,
    aten.clone.default,
    prims.convert_element_type.default,
}
CONSTANTS: set[Target] = {
    aten.full.default,
    aten.scalar_tensor.default,
    aten.lift_fresh_copy.default,
}


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of the graph; `wait` is the node with its result."""

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


class Kind(enum.Enum):
    OWN = "a rank's own value"
    SHARED = "the same on all ranks"
    MIXED = "of both kinds: computed for another rank from its sent values"
    STUCK = "depends on a result and cannot be computed for another rank"


@dataclass
class Plan:
    """The all-reduces to merge, and the kind of every forward node for the other ranks."""

    waits: dict[Node, AllReduce]
    is_wide: Callable[[Node], bool]
    kinds: dict[Node, Kind] = field(default_factory=dict)
    of_rows: set[Node] = field(default_factory=set)
    members: list[AllReduce] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def visit(self, node: Node) -> None:
        if is_backward(node) or node.op == "output":
            self.kinds[node] = Kind.STUCK
            return
        self._mark_rows(node)
        each = self.waits.get(node)
        self.kinds[node] = self._kind(node) if each is None else self._member(each)

    def _mark_rows(self, node: Node) -> None:
        """Row values: statistics, target logits, and values computed from them."""
        starts = node.target in (torch.ops.slime_fused.row_stats.default, aten.gather.default)
        made = starts or any(arg in self.of_rows for arg in node.all_input_nodes)
        if made and not self.is_wide(node):
            self.of_rows.add(node)

    def _member(self, each: AllReduce) -> Kind:
        reason = self._obstacle(each)
        if reason is None:
            self.members.append(each)
            return Kind.SHARED
        if each.operand in self.of_rows:
            where = source_of(each.wait) or each.wait.name
            self.notes.append(f"the all-reduce at {where} stays: {reason}")
        return Kind.OWN if self.kinds[each.operand] is Kind.OWN else Kind.STUCK

    def _obstacle(self, each: AllReduce) -> str | None:
        operand = each.operand
        if operand not in self.of_rows:
            return "not a row value of a fused softmax"
        if each.operation not in REDUCE:
            return f"{each.operation} is not one of {sorted(REDUCE)}"
        if not is_float_tensor(operand):
            return "not a floating row value"
        if self.kinds[operand] is Kind.STUCK:
            return self._why_stuck(operand)
        if self.kinds[operand] is Kind.OWN and not self.can_send(operand):
            return "only floating row values and masks are gathered"
        return None

    def _why_stuck(self, node: Node) -> str:
        while True:
            inner = [a for a in node.all_input_nodes if self.kinds[a] is Kind.STUCK]
            if not inner:
                return f"another rank's value at {node.target} ({source_of(node)}) cannot be computed on this rank"
            node = inner[0]

    def _kind(self, node: Node) -> Kind:
        found = {self.kinds[arg] for arg in node.all_input_nodes if is_data(arg)}
        if Kind.STUCK in found:
            return Kind.STUCK
        if found <= {Kind.OWN}:
            return Kind.OWN
        if not self._replayable(node):
            return Kind.STUCK
        return Kind.SHARED if found == {Kind.SHARED} else Kind.MIXED

    def _replayable(self, node: Node) -> bool:
        target = node.target
        known = target in VIEWS or target in OTHERS
        known = known or _is_masked_fill(node)
        if not known and torch.Tag.pointwise not in getattr(target, "tags", ()):
            return False
        if self.is_wide(node) or (has_number(node) and not node.meta.get("slime_fused")):
            return False
        own = [a for a in node.all_input_nodes if self.kinds[a] is Kind.OWN and is_data(a)]
        return all(self.can_send(arg) for arg in own)

    def can_send(self, node: Node) -> bool:
        """Floating row values, masks and constants. A number changed in place is a tensor without dimensions."""
        node = moved_from(node)
        found = value(node)
        if not isinstance(found, torch.Tensor) or self.is_wide(node):
            return False
        if not found.ndim and node.target not in CONSTANTS:
            return False
        return found.dtype.is_floating_point or found.dtype is torch.bool

    def cost(self) -> int:
        return sum(kind is Kind.MIXED for kind in self.kinds.values())


def _is_masked_fill(node: Node) -> bool:
    """`value[mask] = number`, traced as an index_put of a tensor without dimensions."""
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
    """The node whose elements `node` shows, as a part or in another shape or order."""
    while node.op == "call_function" and _is_move(node):
        node = node.all_input_nodes[0]
    return node


def _is_move(node: Node) -> bool:
    if node.target is operator.getitem:
        return node.all_input_nodes[0].target in SPLITS
    return node.target in VIEWS
