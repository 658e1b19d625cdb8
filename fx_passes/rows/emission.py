"""The edits of `by_rows`: an operator for each loop, and the replacements of its results.

Entry point: `Emission`, of a `Plan`. New nodes are made first; nothing can refuse once `commit` has begun.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import BACKWARD, TAG, is_backward, value
from fx_passes.graph.order import ancestors, descendants
from fx_passes.refused import Refused
from fx_passes.rows.chunks import Sizes
from fx_passes.rows.loops import Loop
from fx_passes.rows.parts import Part
from fx_passes.rows.program import Program
from fx_passes.rows.region import Region, in_place_of

aten = torch.ops.aten
fused = torch.ops.slime_fused


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan for a region.

    Attributes:
        sizes: of each loop's chunks.
        tangent: replaced by 1 in the loops, if they compute backward's results in forward.
        puts: the row numbers of results put among other rows.
        waits: why forward does not make the gradients.
    """

    loops: list[Loop]
    sizes: list[Sizes]
    tangent: Node | None
    puts: dict[Node, Part]
    waits: str = ""


class Emission:
    """The new nodes: an operator for each loop, and the replacements of its results."""

    def __init__(self, plan: Plan, emit: Emitter, compiled: bool) -> None:
        self.plan, self.emit, self.compiled = plan, emit, compiled
        self.made: dict[Node, tuple[Node, Region]] = {}  # as [N, *sizes], and whose rows these are
        self.shown: dict[Node, Node] = {}  # in the shape of the user's value
        self.replacements: dict[Node, Node] = {}
        self.into_forward: list[Node] = []
        self.units: Units | None = None
        if plan.tangent is not None:
            self.units = Units(plan.tangent, descendants([plan.tangent]), emit)
        for loop, sizes in zip(plan.loops, plan.sizes, strict=True):
            self._loop(loop, sizes)

    def _loop(self, loop: Loop, sizes: Sizes) -> None:
        given = self.units.of if self.units is not None else self._as_shown
        made = {old: found for old, (found, of) in self.made.items() if of is loop.region}
        program = Program(loop, self.emit, self.plan.puts, made, given)
        if not program.rows:
            raise Refused("all rows are equal, and made of one", next(iter(loop.body)))
        self.emit.origin = next(iter(loop.results))
        node = self.emit.call(
            fused.row_loop.default,
            [each for each, *_ in program.rows],
            list(program.whole),
            list(program.sizes),
            program.text(),
            self.compiled,
            sizes.limit,
            "",
        )
        self._tag(node, loop)
        for at, old in enumerate(loop.results):
            self.emit.origin = old
            found = self.emit.call(operator.getitem, node, at)
            self._tag(found, loop)
            self._put(old, found, loop.region)

    def _as_shown(self, node: Node) -> Node:
        return self.shown.get(node, node)

    def _put(self, old: Node, found: Node, region: Region) -> None:
        part = self.plan.puts.get(old)
        if part is not None:  # a later loop reads what the graph has of it
            old, new = part.every, self.emit.reshape(found, self.emit.sizes(part.every))
        else:
            new = in_place_of(old, found, region, self.emit)
            self.made[old] = (new if old in region.sums else found), region
            self.shown[old] = new
        units = self.units
        if units is not None and old in units.moving:
            units.known(old, new)
            new = self.emit.call(aten.mul.Tensor, new, units.tangent)
            new.meta[TAG] = BACKWARD
        self.replacements[old] = self.emit.laid_out_as(new, old)

    def _tag(self, node: Node, loop: Loop) -> None:
        if loop.backward:
            node.meta[TAG] = BACKWARD
        else:
            node.meta.pop(TAG, None)
            self.into_forward.append(node)

    def commit(self) -> None:
        """The edits; nothing here can refuse."""
        if self.units is not None:
            for node in ancestors(self.into_forward):
                if is_backward(node):
                    del node.meta[TAG]
        for old, new in self.replacements.items():
            old.replace_all_uses_with(new)


class Units:
    """Values computed from the tangent and not from the logits, with 1 in place of the tangent."""

    def __init__(self, tangent: Node, moving: set[Node], emit: Emitter) -> None:
        self.tangent = tangent
        self.moving = moving
        self.emit = emit
        self._made: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        if node not in self.moving:
            return node
        if node not in self._made:
            if node is self.tangent:
                made = self.emit.full([], 1.0, value(node).dtype, node)
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.of)
                made = self.emit.call(node.target, *args, **kwargs)
            self._made[node] = made
        return self._made[node]

    def known(self, node: Node, made: Node) -> None:
        """`made` is `node` with 1 in the number's place."""
        self._made[node] = made
