"""Roots, and their row moves.

A root is a floating `[..., V]` value at the start of full-vocabulary work: the logits. `x` is a root or a view of its
rows (a slice, a sample, another order); a `Step` remembers the move and its inverse. Row scalars of a root move with
it, and are recognised when backward moves them back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import Node

from fx_passes.algebra.forms import Form
from fx_passes.algebra.poly import ONE, Poly
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import rank_of, shape_of

Move: TypeAlias = Callable[[Node], Node]
Key: TypeAlias = tuple[Hashable, ...]


@dataclass(frozen=True)
class Step:
    """The move of rows from a parent to `x`: `move` applies it to a row scalar, `back` undoes it.

    `back` fills the parent's other rows with zeros. `key` names the step, to match it with the user's backward. `vdim`
    is the parent's vocabulary dimension. `copies`: `x` is no view.
    """

    parent: Node
    key: Key
    vdim: int
    move: Move
    back: Move
    copies: bool = False


class Roots:
    """The logits of a graph.

    Attributes:
        root_of: the root of every `x`.
        steps: for every `x` other than a root, the step from its parent.
        allies: roots joined from rows of other roots, accepted together with these.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.root_of: dict[Node, Node] = {}
        self.steps: dict[Node, Step] = {}
        self.allies: dict[Node, Node] = {}
        self._moved_from: dict[tuple[Node, Node], Node] = {}

    def identity(self, root: Node) -> Form:
        self.root_of.setdefault(root, root)
        shape = shape_of(root)
        return Form(shape, len(shape) - 1, root, f=ONE)

    def derive(self, x: Node, step: Step) -> bool:
        """Records that `x` came from its parent by `step`; False if it is known to have come otherwise."""
        if x not in self.root_of:
            self.steps[x] = step
            self.root_of[x] = self.root_of[step.parent]
        return x in self.steps and self.steps[x].parent is step.parent

    def moved(self, x: Node, atom: Node) -> Node:
        """A row scalar of the parent of `x`, moved as the rows were."""
        if not rank_of(atom):
            return atom
        result = self.steps[x].move(atom)
        self._moved_from.setdefault((x, result), atom)
        return result

    def stripped(self, x: Node, atom: Node) -> Node | None:
        """The parent's row scalar that was moved to `atom`, if any."""
        return self._moved_from.get((x, atom)) if rank_of(atom) else atom

    def strip(self, x: Node, poly: Poly) -> Poly | None:
        """`poly` in the parent's row scalars, if all its atoms came from there."""
        above = {atom: self.stripped(x, atom) for atom in poly.atoms()}
        if any(atom is None for atom in above.values()):
            return None
        return poly.map_atoms(lambda atom: above[atom])  # type: ignore[arg-type, return-value]

    def is_copy(self, x: Node) -> bool:
        """Somewhere on the way from the root the rows were copied."""
        step = self.steps.get(x)
        while step is not None and not step.copies:
            step = self.steps.get(step.parent)
        return step is not None
