"""Row scalars: nodes with one number per row as polynomials, and back to nodes.

`meaning` reads the user's nodes, by the table `rules.ROW_SCALARS`; `emit` (`row_nodes.py`) computes a polynomial by new
nodes. Between the two the algebra is exact: a maximum added and subtracted again is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch.fx import Node

from fx_passes.algebra.poly import Poly
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    SizeArg,
    is_float_tensor,
    rank_of,
    same_shape,
    shape_of,
    value,
)
from fx_passes.graph.operators import (
    ALL_REDUCE,
    CASTS,
    RESHAPES,
    TO_SHAPE,
    VIEWS,
    Target,
    same_value,
    under,
)
from fx_passes.walk.row_nodes import RowNodes

aten = torch.ops.aten

RowRule: TypeAlias = "Callable[[RowScalars, Node], Poly | None]"


class RowScalars(RowNodes):
    """The meaning of row scalars, and nodes for the polynomials of rules.

    Attributes:
        of_logits: the user's nodes computed from the logits.
    """

    def __init__(self, emitter: Emitter, table: Mapping[Target, RowRule]) -> None:
        super().__init__(emitter)
        self.table = table
        self.of_logits: set[Node] = set()

    # -- meaning ---------------------------------------------------------------------------------

    def meaning(self, node: Node) -> Poly:
        """The polynomial computed by `node`, as far as the table reads it.

        Roundings of row scalars to a narrower dtype are ignored: inside a rewrite they have the compute dtype, as
        full-vocabulary values do.
        """
        node = self.emitter.represents.get(node, node)
        for inner in self._unread(node):
            self.meanings[inner] = Poly.atom(inner)  # while the rule looks at it
            self.meanings[inner] = self._read(inner) or Poly.atom(inner)
        return self.meanings[node]

    def _unread(self, node: Node) -> Iterator[Node]:
        """`node` and the nodes of its meaning, inputs first: chains may be longer than Python's recursion limit."""
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = (
                [] if top in self.meanings or not self._is_readable(top) else self._inputs(top)
            )
            if waiting:
                stack += waiting
                continue
            stack.pop()
            if top not in self.meanings:
                yield top

    def _inputs(self, node: Node) -> list[Node]:
        inputs = map(self._representative, node.all_input_nodes)
        return [arg for arg in inputs if arg not in self.meanings]

    def _representative(self, node: Node) -> Node:
        return self.emitter.represents.get(node, node)

    def _is_readable(self, node: Node) -> bool:
        if node.op != "call_function" or not is_float_tensor(node) or not node.args:
            return False
        read = node.target in self.table or node.target is aten.exp.default
        return read or same_value(node) is not None

    def _read(self, node: Node) -> Poly | None:
        if not self._is_readable(node):
            return None
        first = node.args[0]
        several = isinstance(first, (list, tuple))
        if not several and node.target not in CASTS and not is_float_tensor(first):
            return None
        equal = same_value(node)
        if equal is not None:
            return self.meaning(equal)
        rule = self.table.get(node.target)
        return None if rule is None else rule(self, node)

    def moved(self, first: Node, move: Callable[[Node], Node]) -> Poly:
        """`first`'s meaning with every atom moved alike; atoms spread over rows cannot be moved."""
        poly, whole = self.meaning(first), shape_of(first)
        tensors = [atom for atom in poly.atoms() if rank_of(atom)]
        if any(not same_shape(shape_of(atom), whole) for atom in tensors):
            return Poly.atom(move(first))
        return poly.map_atoms(lambda atom: move(atom) if rank_of(atom) else atom)

    def view_sizes(self, node: Node) -> list[SizeArg]:
        """The sizes of a reshape."""
        if node.target in TO_SHAPE:
            sizes = list(node.args[1])  # type: ignore[arg-type]
            if not any(isinstance(size, int) and size == -1 for size in sizes):
                return sizes
        return self.emitter.sizes(node)

    def operand(self, arg: object, rank: int, of_form: bool = True) -> Poly | None:
        """A number, symbolic number or row scalar as a polynomial in atoms of `rank` dimensions (or none).

        With `of_form`, the dimensions are a form's, vocabulary included; otherwise those of a value with one number per
        row.
        """
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return Poly.number(float(arg))
        if not isinstance(arg, Node):
            return None
        fake = value(arg)
        if isinstance(fake, (torch.SymInt, torch.SymFloat)):
            return Poly.atom(arg)
        if not isinstance(fake, torch.Tensor) or fake.dtype.is_complex:
            return None
        constant = _constant(arg)
        if constant is not None:
            return constant
        if not fake.dtype.is_floating_point:
            return Poly.atom(self.aligned(arg, rank, of_form))
        return self.meaning(arg).map_atoms(lambda atom: self.aligned(atom, rank, of_form))

    def aligned(self, atom: Node, rank: int, of_form: bool = True) -> Node:
        """A row scalar with `rank` dimensions; one without stays so, unless a form has none but the vocabulary's."""
        if not isinstance(value(atom), torch.Tensor):
            return atom
        if rank_of(atom) == 0 and not (of_form and rank == 1):
            return atom
        return self.emitter.align(atom, rank)

    def is_given(self, atom: Node) -> bool:
        """A tensor of the user, computed without the logits."""
        node = under(atom, VIEWS | CASTS)
        given = not self.emitter.made(node) and node not in self.of_logits
        return given and is_float_tensor(node) and not self._is_placed(atom)

    # -- exponentials ----------------------------------------------------------------------------

    def exponent(self, node: Node) -> Poly | None:
        """`P` if `node` is `exp(P)`, seen through views and casts."""
        node = self._representative(node)
        single = (self.meanings.get(node) or self.meaning(node)).as_monomial()
        if single is None or single[0] != 1.0:
            return None
        result = Poly()
        for atom, power in single[1]:
            inner = self._exponent_of_atom(atom)
            if inner is None:
                return None
            result += inner * Poly.number(power)
        return result

    def _exponent_of_atom(self, atom: Node) -> Poly | None:
        views = []
        while atom.op == "call_function" and atom.target in RESHAPES:
            views.append(atom)
            atom = atom.args[0]  # type: ignore[assignment]
        mass = self.fact(atom, ()).exponent
        if mass is not None:
            poly = mass
        elif atom.op == "call_function" and atom.target is aten.exp.default:
            poly = self.meaning(atom.args[0])  # type: ignore[arg-type]
        else:
            return None
        for view in reversed(views):
            poly = self.reshaped(poly, view.args[0], self.view_sizes(view))  # type: ignore[arg-type]
        return poly

    def reshaped(self, poly: Poly, whole: Node, sizes: Sequence[SizeArg]) -> Poly:
        """`poly` of the rows of `whole` in another shape; an atom with one number for many rows is spread first."""

        def shaped(atom: Node) -> Node:
            if not rank_of(atom):
                return atom
            return self.emitter.reshape(self.emitter.expand(atom, self.emitter.sizes(whole)), sizes)

        return poly.map_atoms(shaped)

    def log_argument(self, atom: Node) -> Node | None:
        """s if the row scalar is log(s), below views."""
        inner = under(atom, RESHAPES)
        if inner.op != "call_function" or inner.target is not aten.log.default:
            return None
        argument = inner.args[0]
        assert isinstance(argument, Node)
        return self.emitter.reshape(self._representative(argument), self.emitter.sizes(atom))

    def mass(
        self, height: Poly, log_sum: Poly, dtype: torch.dtype, like: Node, exact: Poly | None = None
    ) -> Node:
        """exp(height + log_sum), a row's sum of exponentials; `exact`: compute the height from this polynomial.

        It is remembered, so that dividing by it is subtracting its log. It is computed as a product, because the sum in
        the exponent would be rounded to the digits of the larger summand.
        """
        factors = [
            self.emitter.call(aten.exp.default, self.emit_node(part, dtype, like))
            for part in (height if exact is None else exact, log_sum)
            if not part.is_zero
        ]
        node = factors[0] if len(factors) == 1 else self.emitter.call(aten.mul.Tensor, *factors)
        self.meanings[node] = Poly.atom(node)
        self.tell(node, exponent=height + log_sum)
        return node

    def mass_exponent(self, atom: Node) -> Poly | None:
        """The exponent of a row's sum of exponentials."""
        return None if self.fact(atom).exponent is None else self.exponent(atom)

    def is_positive(self, poly: Poly) -> bool:
        """Greater than zero in every row: a positive number times exponentials, on all ranks."""
        single = poly.as_monomial()
        return single is not None and single[0] > 0 and all(map(self._is_positive, dict(single[1])))

    def _is_positive(self, atom: Node) -> bool:
        inner = under(atom, RESHAPES)
        if inner.target is aten.exp.default or self.fact(inner).exponent is not None:
            return True
        own = under(inner, RESHAPES | CASTS | ALL_REDUCE)
        return own is not inner and self.is_positive(self.meaning(own))


_FILL: dict[Target, int] = {aten.scalar_tensor.default: 0, aten.full.default: 1}
"""The position of a constant's number among the arguments."""


def _constant(node: Node) -> Poly | None:
    """The number, or symbolic number, in a 0-dimensional constant tensor of the graph."""
    at = _FILL.get(node.target)
    fill, dtype = None if at is None else node.args[at], value(node).dtype
    if isinstance(fill, Node):
        symbolic = isinstance(value(fill), (torch.SymInt, torch.SymFloat))
        return Poly.atom(fill) if symbolic and dtype.is_floating_point else None
    if not isinstance(fill, (int, float)):
        return None
    if dtype is torch.bool:
        return Poly.number(float(bool(fill)))
    return Poly.number(float(fill) if dtype.is_floating_point else float(int(fill)))
