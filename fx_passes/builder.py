"""New nodes of the graph: emitted once each, with fake values, and thrown away again if the rewrite is refused.

`Builder.call` is the only place where the pass makes a node. Nodes of equal meaning are shared, so that row scalars
that the user's program computes twice cancel in the polynomials (`poly.py`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.distributed._functional_collectives  # registers the functional collectives
from torch.distributed.distributed_c10d import _get_group_size_by_name
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.utils._sympy.functions import FloorDiv

from fx_passes.algebra.poly import Monomial, Poly

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
}
SAME_VALUE = {aten.clone.default, aten.alias.default, aten.detach.default}
SIZE_ARITHMETIC = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}
ALL_REDUCE = {c10d.all_reduce.default, c10d.wait_tensor.default}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
VIEWS = (
    RESHAPES
    | SPLITS
    | (SAME_VALUE - {aten.clone.default})
    | {
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
    }
)
CASTS = {prims.convert_element_type.default, aten._to_copy.default}


def value(node: Any) -> Any:
    """The fake tensor (or symbolic number) of a node; other things are their own value."""
    return node.meta.get("val") if isinstance(node, Node) else node


def is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def shape_of(node: Node) -> tuple[Any, ...]:
    return tuple(value(node).shape)


def same(left: Any, right: Any) -> bool:
    """Equal sizes for certain; never adds a guard."""
    return statically_known_true(value(left) == value(right))


def guarded_same(left: Any, right: Any) -> bool:
    """Equal sizes; where they are for the sizes at hand, a guard makes it certain.

    For an index with as many rows as the logits: torch would allow fewer, so nothing else says that they are equal.
    """
    return bool(guard_or_false(value(left) == value(right)))


def same_shape(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(same(x, y) for x, y in zip(left, right, strict=True))


def is_float_tensor(node: Any) -> bool:
    found = value(node)
    return isinstance(found, torch.Tensor) and found.dtype.is_floating_point


def _is_pure(node: Node) -> bool:
    return not node.is_impure() and node.target.namespace in ("aten", "prims")  # type: ignore[union-attr]


def same_value(node: Node) -> Node | None:
    """The node whose value `node` has, whatever that is: under an alias, a copy, or an all-reduce over one rank."""
    if node.target in SAME_VALUE:
        return node.all_input_nodes[0]
    if node.target is aten.copy.default:
        into, written = node.args[:2]
        return written if same_shape(shape_of(into), shape_of(written)) else None  # type: ignore[arg-type, return-value]
    if node.target is c10d.wait_tensor.default:
        reduce = node.all_input_nodes[0]
        if reduce.target is c10d.all_reduce.default and ranks_of(reduce.args[2]) == 1:
            return reduce.all_input_nodes[0]
    return None


def ranks_of(group: Any) -> int:
    """Ranks of a process group, by its name in the graph."""
    return int(_get_group_size_by_name(group))


class Builder:
    """Emits nodes into `graph`, shares equal ones, and knows the sum that a row scalar stands for."""

    def __init__(self, graph: Graph, fake_mode: Any) -> None:
        self.graph = graph
        self.fake_mode = fake_mode
        self.origin: Node | None = None
        self.created: dict[Node, None] = {}
        self.known: dict[Node, Poly] = {}
        self.represents: dict[Node, Node] = {}
        self.embedded: set[Node] = set()
        self.packed: dict[Node, Node] = {}
        self._shared: dict[Any, Node] = {}
        self.known_sizes: dict[Any, Node] = {}

    # -- nodes -----------------------------------------------------------------------------------

    def adopt(self, node: Node) -> Node:
        """The first node of the user's graph that computes the same as `node`."""
        found = value(node)
        if isinstance(found, torch.SymInt):
            self.known_sizes.setdefault(found.node.expr, node)
        if node.op != "call_function" or not isinstance(found, torch.Tensor):
            return node
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable or not (_is_pure(node) or node.target in ALL_REDUCE):
            return node
        if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
            return node
        first = self._shared.setdefault(self._key(node.target, node.args, node.kwargs), node)
        self.represents[node] = first
        return first

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        key = self._key(target, args, kwargs)
        if key in self._shared:
            return self._shared[key]
        with self.fake_mode:
            fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value)
            result = target(*fake_args, **fake_kwargs)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = result
        node.meta["slime_fused"] = True
        self._copy_provenance(node)
        self.created[node] = None
        self._shared[key] = node
        return node

    def discard(self) -> None:
        """Erase every node made so far; the graph is the user's again."""
        for node in reversed(self.created):
            self.graph.erase_node(node)
        self.created.clear()

    def made(self, node: Node) -> bool:
        return node in self.created

    def _key(self, target: Any, args: Any, kwargs: Any) -> Any:
        def freeze(arg: Any) -> Any:
            if isinstance(arg, Node):
                return ("node", self.represents.get(arg, arg))
            if isinstance(arg, (list, tuple)):
                return ("list", *(freeze(item) for item in arg))
            if isinstance(arg, dict):
                return ("dict", *((key, freeze(arg[key])) for key in sorted(arg)))
            return (type(arg).__name__, repr(arg))

        return (target, freeze(args), freeze(kwargs))

    def _copy_provenance(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if any(is_backward(arg) for arg in inputs):
            node.meta["partitioner_tag"] = "is_backward"
        if self.origin is not None:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr"):
                if key in self.origin.meta:
                    node.meta[key] = self.origin.meta[key]

    # -- sizes -----------------------------------------------------------------------------------

    def size(self, node: Node, dim: int) -> Any:
        """`node.shape[dim]` as a number, or as the node that computes it."""
        found = shape_of(node)[dim]
        if isinstance(found, int):
            return found
        made = self.size_of(found.node.expr)
        return self.call(aten.sym_size.int, node, dim) if made is None else made

    def size_of(self, expr: Any) -> Any:
        """A symbolic size from the sizes that the graph has; None where they do not give it."""
        if expr.is_number:
            return int(expr)
        if expr in self.known_sizes:
            return self.known_sizes[expr]
        operation = SIZE_ARITHMETIC.get(expr.func)
        parts = [self.size_of(arg) for arg in expr.args]
        if operation is None or any(part is None for part in parts):
            return None
        return functools.reduce(lambda left, right: self.call(operation, left, right), parts)

    def sizes(self, node: Node) -> list[Any]:
        return [self.size(node, dim) for dim in range(len(shape_of(node)))]

    # -- views and casts -------------------------------------------------------------------------

    def reshape(self, node: Node, sizes: Sequence[Any]) -> Node:
        """`node` with another shape; reshapes of reshapes collapse, and one that changes nothing is none."""
        while node.op == "call_function" and (node.target in RESHAPES or node in self.packed):
            node = self.packed.get(node) or self.represents.get(node.args[0], node.args[0])  # type: ignore[arg-type, assignment]
        if same_shape(shape_of(node), sizes):
            return node
        try:
            return self.call(aten.view.default, node, list(sizes))
        except (RuntimeError, ValueError):
            packed = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
            self.packed[packed] = node
            return self.call(aten.view.default, packed, list(sizes))

    def expand(self, node: Node, sizes: Sequence[Any]) -> Node:
        if same_shape(shape_of(node), sizes):
            return node
        return self.call(aten.expand.default, node, list(sizes))

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if value(node).dtype == dtype:
            return node
        return self.call(prims.convert_element_type.default, node, dtype)

    def align(self, node: Node, rank: int) -> Node:
        """`node` with leading dimensions of size 1 so that it has `rank` dimensions."""
        missing = rank - len(shape_of(node))
        if missing <= 0:
            return node
        return self.reshape(node, [1] * missing + self.sizes(node))

    # -- polynomials -----------------------------------------------------------------------------

    def emit(self, poly: Poly, dtype: torch.dtype) -> Node | float:
        """The node that computes `poly` in `dtype`; a number if no row scalar is in it."""
        number = poly.as_number()
        if number is not None:
            return number
        total: Node | float | None = None
        for monomial, factor in poly.terms.items():
            term = self._monomial(monomial, abs(factor), dtype)
            if total is None:
                total = term if factor > 0 else self._negate(term)
            else:
                total = self._sum(total, term, factor > 0)
        assert isinstance(total, Node)
        self.known.setdefault(total, poly)
        return total

    def emit_node(self, poly: Poly, dtype: torch.dtype, like: Node) -> Node:
        """As `emit`, numbers as tensors on `like`'s device."""
        found = self.emit(poly, dtype)
        if isinstance(value(found), torch.Tensor):
            return found  # type: ignore[return-value]
        device = value(like).device
        return self.call(
            aten.full.default,
            [],
            found,
            dtype=dtype,
            layout=torch.strided,
            device=device,
            pin_memory=False,
        )

    def _negate(self, term: Node | float) -> Node | float:
        return self.call(aten.neg.default, term) if isinstance(term, Node) else -term

    def _sum(self, left: Node | float, right: Node | float, plus: bool) -> Node | float:
        if isinstance(left, Node):
            return self.call(aten.add.Tensor if plus else aten.sub.Tensor, left, right)
        assert isinstance(right, Node)
        return self.call(aten.add.Tensor, right if plus else self._negate(right), left)

    def _monomial(self, monomial: Monomial, factor: float, dtype: torch.dtype) -> Node | float:
        above = [(atom, power) for atom, power in monomial if power > 0]
        below = [(atom, -power) for atom, power in monomial if power < 0]
        result: Node | float = factor
        for atom, power in above:
            for _ in range(power):
                result = self._times(result, self._as_factor(atom, dtype))
        for atom, power in below:
            for _ in range(power):
                result = self._over(result, self._as_factor(atom, dtype))
        rows = next((atom for atom, _ in above if atom in self.embedded), None)
        if rows is None or not isinstance(result, Node) or len(monomial) == 1:
            return result
        return self._zero_where_zero(rows, result)

    def _zero_where_zero(self, rows: Node, product: Node) -> Node:
        """`product`, and 0 in the rows where its factor `rows` is 0, whatever the other factors are there."""
        outside = self.call(aten.eq.Scalar, rows, 0)
        zero = self.call(
            aten.scalar_tensor.default,
            0.0,
            dtype=value(product).dtype,
            device=value(product).device,
        )
        return self.call(aten.where.self, outside, zero, product)

    def _as_factor(self, atom: Node, dtype: torch.dtype) -> Node:
        return self.cast(atom, dtype) if isinstance(value(atom), torch.Tensor) else atom

    def _times(self, left: Node | float, right: Node) -> Node:
        if not isinstance(left, Node):
            return right if left == 1 else self.call(aten.mul.Tensor, right, left)
        if not isinstance(value(left), torch.Tensor):
            left, right = right, left
        return self.call(aten.mul.Tensor, left, right)

    def _over(self, left: Node | float, right: Node) -> Node:
        if isinstance(left, Node):
            return self.call(aten.div.Tensor, left, right)
        inverse = self.call(aten.reciprocal.default, right)
        return inverse if left == 1 else self.call(aten.mul.Tensor, inverse, left)

    # -- what a row scalar stands for ------------------------------------------------------------

    def meaning(self, node: Node) -> Poly:
        """The polynomial that `node` computes, seen through additions, scalings, views, casts and log of exp.

        Roundings of row scalars to a narrower dtype are looked through: inside a region they are kept in the compute
        dtype, as full-vocabulary values are.
        """
        node = self.represents.get(node, node)
        if node not in self.known:
            self.known[node] = Poly.atom(node)  # while its arguments are looked at
            self.known[node] = self._meaning(node)
        return self.known[node]

    def _meaning(self, node: Node) -> Poly:
        own = Poly.atom(node)
        if node.op != "call_function" or not is_float_tensor(node) or not node.args:
            return own
        target, args = node.target, node.args
        first = args[0]
        if not isinstance(first, Node) or (target not in CASTS and not is_float_tensor(first)):
            return own
        equal = same_value(node)
        if equal is not None:
            return self.meaning(equal)
        if target in CASTS:
            return self.meaning(first) if is_float_tensor(first) else own
        if target in RESHAPES:
            return self._moved(first, lambda atom: self.reshape(atom, self._view_sizes(node)))
        if target is aten.neg.default:
            return -self.meaning(first)
        if target in (aten.add.Tensor, aten.sub.Tensor) and node.kwargs.get("alpha", 1) == 1:
            return self._sum_meaning(node, 1.0 if target is aten.add.Tensor else -1.0)
        if target in (aten.mul.Tensor, aten.div.Tensor) and len(args) == 2 and not node.kwargs:
            return self._product_meaning(node, target is aten.div.Tensor)
        if target is aten.log.default:
            exponent = self.exponent(first)
            return own if exponent is None else exponent
        return own

    def _view_sizes(self, node: Node) -> list[Any]:
        if node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            sizes = node.args[1]
            if not any(isinstance(size, int) and size == -1 for size in sizes):  # type: ignore[union-attr]
                return list(sizes)  # type: ignore[arg-type]
        return self.sizes(node)

    def _moved(self, first: Node, move: Any) -> Poly:
        """`first`'s meaning with every atom moved alike; atoms that are spread over rows cannot be."""
        poly = self.meaning(first)
        whole = shape_of(first)
        for atom in poly.atoms():
            found = value(atom)
            if (
                isinstance(found, torch.Tensor)
                and found.ndim
                and not same_shape(shape_of(atom), whole)
            ):
                return Poly.atom(move(first))
        return poly.map_atoms(lambda a: move(a) if getattr(value(a), "ndim", 0) else a)

    def operand(self, arg: Any, rank: int) -> Poly | None:
        """A number, symbolic number or row scalar as a polynomial whose atoms have `rank` dimensions (or none)."""
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return Poly.number(float(arg))
        if not isinstance(arg, Node):
            return None
        found = value(arg)
        if isinstance(found, (torch.SymInt, torch.SymFloat)):
            return Poly.atom(arg)
        if not isinstance(found, torch.Tensor) or found.dtype.is_complex:
            return None
        constant = _scalar_constant(arg)
        if constant is not None:
            return Poly.number(constant)
        if not found.dtype.is_floating_point:
            return Poly.atom(self.aligned(arg, rank))
        return self.meaning(arg).map_atoms(lambda atom: self.aligned(atom, rank))

    def aligned(self, atom: Node, rank: int) -> Node:
        """A row scalar with `rank` dimensions; one without dimensions stays so, unless there is one row only."""
        found = value(atom)
        if not isinstance(found, torch.Tensor) or (found.ndim == 0 and rank != 1):
            return atom
        return self.align(atom, rank)

    def _sum_meaning(self, node: Node, sign: float) -> Poly:
        rank = len(shape_of(node))
        left, right = (self.operand(arg, rank) for arg in node.args[:2])
        if left is None or right is None or len(left.terms) + len(right.terms) > 8:
            return Poly.atom(node)
        return left + right * Poly.number(sign)

    def _product_meaning(self, node: Node, divided: bool) -> Poly:
        rank = len(shape_of(node))
        left, right = (self.operand(arg, rank) for arg in node.args[:2])
        if left is None or right is None:
            return Poly.atom(node)
        if divided:
            right = right.inverse()
        if right is None or len(left.terms) * len(right.terms) > 8:
            return Poly.atom(node)
        return left * right

    def exponent(self, node: Node) -> Poly | None:
        """`P` if `node` is `exp(P)`, seen through views and casts."""
        node = self.represents.get(node, node)
        poly = self.known.get(node) or self.meaning(node)
        single = poly.as_monomial()
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
        if atom.op != "call_function":
            return None
        if atom.target is aten.exp.default:
            return self.meaning(atom.args[0])  # type: ignore[arg-type]
        if atom.target in RESHAPES:
            inner = self._exponent_of_atom(atom.args[0])  # type: ignore[arg-type]
            if inner is None:
                return None
            return inner.map_atoms(
                lambda a: (
                    self.reshape(a, self._view_sizes(atom)) if getattr(value(a), "ndim", 0) else a
                )
            )
        return None


def _scalar_constant(node: Node) -> float | None:
    """The number in a 0-dimensional constant tensor made in the graph."""
    if node.op != "call_function":
        return None
    if node.target is aten.scalar_tensor.default and isinstance(node.args[0], (int, float)):
        return float(node.args[0])
    if node.target is aten.full.default and isinstance(node.args[1], (int, float)):
        return float(node.args[1])
    return None
