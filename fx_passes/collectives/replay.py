"""Computes every rank's addends on every rank, from values gathered once."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

from fx_passes.collectives.plan import REDUCE, AllReduce, Kind, Plan, is_data, moved_from
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import SizeArg, value

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Replay:
    """Computes every rank's addends from the gathered values."""

    def __init__(self, emitter: Emitter, plan: Plan, group: str, ranks: int) -> None:
        self.emitter, self.plan, self.group, self.ranks = emitter, plan, group, ranks
        emitter.origin = plan.members[0].wait
        self.sent = list(dict.fromkeys(self._sent()))
        self.copies: list[dict[Node, Node]] = self._gathered()

    def results(self) -> dict[AllReduce, Node]:
        results = {}
        for each in self.plan.members:
            total, *rest = [self._on(rank, each.operand) for rank in range(self.ranks)]
            for addend in rest:
                total = self.emitter.call(REDUCE[each.operation], total, addend)
            results[each] = total
        return results

    def _sent(self) -> Iterable[Node]:
        """Own values read by the members' operands, in the order of the members."""
        seen: set[Node] = set()
        for each in self.plan.members:
            stack = [each.operand]
            while stack:
                node = stack.pop()
                if node in seen or not is_data(node):
                    continue
                seen.add(node)
                if self.plan.kinds[node] is Kind.OWN:
                    yield moved_from(node)
                elif self.plan.kinds[node] is Kind.MIXED:
                    stack.extend(reversed(node.all_input_nodes))

    def _gathered(self) -> list[dict[Node, Node]]:
        """One all-gather of all sent values; for each rank, its sent values."""
        call = self.emitter.call
        double = any(value(node).dtype is torch.float64 for node in self.sent)
        dtype = torch.float64 if double else torch.float32
        flat = [
            self.emitter.reshape(self.emitter.cast(node, dtype), [self._count(node)])
            for node in self.sent
        ]
        payload = call(aten.cat.default, flat)
        gathered = call(c10d.all_gather_into_tensor.default, payload, self.ranks, self.group)
        gathered = call(c10d.wait_tensor.default, gathered)
        table = self.emitter.reshape(gathered, [self.ranks, self.emitter.size(payload, 0)])
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
        shaped = self.emitter.reshape(row, self.emitter.sizes(node))
        if value(node).dtype is torch.bool:
            return self.emitter.call(aten.ne.Scalar, shaped, 0)
        return self.emitter.cast(shaped, value(node).dtype)

    def _count(self, node: Node) -> SizeArg:
        total: SizeArg = 1
        for size in self.emitter.sizes(node):
            if isinstance(total, int) and isinstance(size, int):
                total *= size
            elif total == 1:
                total = size
            else:
                total = self.emitter.call(operator.mul, total, size)
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
                copies[top] = top  # results of all-reduces are replaced later
                stack.pop()
                continue
            waiting = [arg for arg in top.all_input_nodes if arg not in copies]
            if waiting:
                stack.extend(waiting)
                continue
            self.emitter.origin = top
            args, kwargs = torch.fx.map_arg((top.args, top.kwargs), lambda a: copies[a])
            copies[top] = self.emitter.call(top.target, *args, **kwargs)
            stack.pop()
        return copies[node]

    def _is_fixed(self, node: Node) -> bool:
        """Sizes, and values equal on all ranks."""
        return not is_data(node) or self.plan.kinds[node] is Kind.SHARED
