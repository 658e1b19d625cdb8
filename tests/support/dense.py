"""The executed meaning of what the walk says: forms, masks and polynomials as tensors in float64.

Entry points: `Values` runs the nodes of a graph on concrete data, `dense` is the row normal form of docs/design.md
written out, `dense_mask` what a mask says of each element. No rule and no packer is used, so that both can be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from fx_passes.algebra.forms import Exp, Form, Guard, Mask, OneHot
from fx_passes.algebra.poly import Poly
from fx_passes.graph.facts import hint, is_float_tensor
from fx_passes.graph.operators import under
from fx_passes.graph.order import ancestors
from slime_compile.ops import reference

aten = torch.ops.aten

_OPERATORS: dict[Any, Callable[..., Any]] = {
    torch.ops.slime_fused.row_stats.default: lambda x, s, f, _: reference.row_stats(x, s, f),
    torch.ops.slime_fused.row_grad.default: lambda *args: reference.row_grad(*args[:-1]),
}


class Values:
    """The value of each node of a graph on one set of inputs, computed when it is asked for.

    Args:
        inputs: the placeholders' values, in `dtype` where they are floating.
        dtype: what every floating value is computed in; None for the dtypes of the graph itself.
    """

    def __init__(self, inputs: Mapping[Node, Tensor], dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._known: dict[Node, Any] = dict(inputs)
        self._largest: dict[Node, float] = {}

    def __getitem__(self, node: Node) -> Any:
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [arg for arg in top.all_input_nodes if arg not in self._known]
            if waiting and top not in self._known:
                stack += waiting
                continue
            stack.pop()
            if top not in self._known:
                self._known[top] = self._run(top)
        return self._known[node]

    def _run(self, node: Node) -> Any:
        assert node.op == "call_function", node.format_node()
        args, kwargs = map_aggregate((node.args, node.kwargs), self._argument)
        if self.dtype is not None and node.target is aten.view.dtype:  # of bits that are rounded
            rounded = is_float_tensor(node)
            return self._known[_before_rounding(node)] if rounded else args[0].float().view(args[1])
        return _OPERATORS.get(node.target, node.target)(*args, **kwargs)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            return self._known[arg]
        floating = isinstance(arg, torch.dtype) and arg.is_floating_point
        return self.dtype if floating and self.dtype is not None else arg

    def largest(self, node: Node) -> float:
        """The largest finite number that the value is made of, at least 1: its roundings are the result's."""
        for each in (*ancestors([node]), node):
            if each not in self._largest:
                self._largest[each] = largest_of(self[each])
        return max(self._largest[each] for each in (*ancestors([node]), node))


def _before_rounding(node: Node) -> Node:
    """The value whose bits `node` has, some of them cut off."""
    bits = under(node.args[0], {aten.bitwise_and.Scalar, aten.add.Tensor})  # type: ignore[arg-type]
    assert bits.target is aten.view.dtype, node.format_node()
    return bits.all_input_nodes[0]


def largest_of(found: Any) -> float:
    if not isinstance(found, Tensor) or not found.numel() or not found.is_floating_point():
        return 1.0
    return max(1.0, float(found.nan_to_num(0.0, 0.0, 0.0).abs().max()))


# -- polynomials --------------------------------------------------------------------------------------


class _Sum:
    """Adds up, and remembers the largest number that was added."""

    def __init__(self, total: Tensor) -> None:
        self.total, self.largest = total, 1.0

    def add(self, addend: Tensor, size: float = 1.0) -> None:
        self.total = self.total + addend
        self.largest = max(self.largest, size, largest_of(addend))


def dense_poly(
    poly: Poly, values: Values, zero_outside: Container[Node] = ()
) -> tuple[Tensor, float]:
    """The number of each row, float64, and the largest number on the way.

    A monomial is 0 where one of its atoms that vanish outside their rows is 0.
    """
    result = _Sum(torch.zeros((), dtype=torch.float64))
    for monomial, number in poly.terms.items():
        product = torch.tensor(number, dtype=torch.float64)
        outside = torch.zeros((), dtype=torch.bool)
        for atom, power in monomial:
            factor = torch.as_tensor(values[atom]).double()
            product = product * factor**power
            if atom in zero_outside and power > 0:
                outside = outside | (factor == 0)
        sizes = [values.largest(atom) for atom, _ in monomial]
        result.add(torch.where(outside, 0.0, product), max(sizes, default=1.0))
    return result.total, result.largest


# -- forms --------------------------------------------------------------------------------------------


def dense(form: Form, values: Values, zero_outside: Container[Node] = ()) -> tuple[Tensor, float]:
    """The form's elements, float64, of the form's shape; and the largest number on the way.

    What a coefficient of 0 stands before is not looked at, and an element whose exponent is -inf contributes 0.

    Raises:
        AssertionError: a coefficient does not have one number per row, or the logits do not have the form's shape.
    """
    sizes = _sizes(form)
    result = _Sum(torch.zeros(sizes, dtype=torch.float64))

    def row(poly: Poly) -> Tensor:
        found, size = dense_poly(poly, values, zero_outside)
        result.largest = max(result.largest, size)
        return _aligned(found, form, "a coefficient", columns=1)

    x = torch.zeros(sizes, dtype=torch.float64)
    if form.x is not None:
        x = values[form.x].double()
        assert x.shape == sizes, f"logits of shape {list(x.shape)} in a form of {list(sizes)}"
        result.largest = values.largest(form.x)
    result.add(row(form.e))
    result.add(_times(row(form.f), x))
    for term in form.exps:
        value, certain = _exponential(term, x, row)
        result.add(value)
        result.largest = result.largest if certain else torch.inf
    for hot in form.hots:
        result.add(_columns(hot, form, values, zero_outside))
    for node, weight in form.others:
        result.add(_times(row(weight), values[node].double()))
    return result.total.expand(sizes), result.largest


def _times(factor: Tensor, value: Tensor) -> Tensor:
    """The product, and 0 where the factor is."""
    return torch.where(factor == 0, 0.0, factor * value)


def _exponential(term: Exp, x: Tensor, row: Callable[[Poly], Tensor]) -> tuple[Tensor, bool]:
    """exp(y - shift) * (a + b * y); the shift part by part, since a large maximum would swallow what is added to it.

    And whether it is certain: rounded numbers that float64 has no fractions of may cancel in the exponent.
    """
    y = exponent = _times(row(term.scale), x)
    a, b = row(term.a), row(term.b)
    for monomial, number in term.shift.terms.items():
        exponent = exponent - row(Poly({monomial: number}))
    large = y.isfinite() & (y.abs() > 1e15) & (exponent > -1e-9 * y.abs())
    weighted = exponent.exp() * (a + _times(b, y))
    absent = ((a == 0) & (b == 0)) | (y == -torch.inf)
    certain = term.scale.as_number() is not None or not large.any()
    return torch.where(absent, 0.0, weighted), certain


def is_no_factor(form: Form, values: Values, zero_outside: Container[Node] = ()) -> Tensor:
    """Where the softmax is zero or NaN beside which the form is known, if there is one: their product is, too."""
    if form.beside is None or form.x is None:
        return torch.zeros((), dtype=torch.bool)
    scale, shift = (dense_poly(poly, values, zero_outside)[0] for poly in form.beside)
    return ~((scale * values[form.x].double() - shift).exp() > 0)


def _columns(hot: OneHot, form: Form, values: Values, zero_outside: Container[Node]) -> Tensor:
    """sum_k weight_k * [v == index_k]"""
    index = torch.zeros((), dtype=torch.int64)
    for node in hot.index:
        assert not values[node].is_floating_point(), f"the columns are {values[node].dtype}"
        index = index + values[node].long()
    weight, _ = dense_poly(hot.weight, values, zero_outside)
    index, weight = _aligned(index, form, "an index"), _aligned(weight, form, "a weight")
    index, weight = torch.broadcast_tensors(index, weight)
    total = torch.zeros(_sizes(form), dtype=torch.float64)
    for k in range(index.shape[form.vdim]):
        here = index.narrow(form.vdim, k, 1) == _iota(form)
        total = total + torch.where(here, weight.narrow(form.vdim, k, 1), 0.0)
    return total


def _sizes(form: Form) -> tuple[int, ...]:
    return tuple(map(hint, form.shape))


def _iota(form: Form) -> Tensor:
    """0 ... V-1 along the vocabulary."""
    sizes = [1] * len(form.shape)
    sizes[form.vdim] = -1
    return torch.arange(hint(form.shape[form.vdim])).view(sizes)


def _aligned(tensor: Tensor, form: Form, what: str, columns: int | None = None) -> Tensor:
    """With the form's rank; a number per row, or any number of columns."""
    rank = len(form.shape)
    if not tensor.ndim:
        return tensor.view([1] * rank)
    fits = tensor.ndim == rank and all(
        size in (1, whole) or (dim == form.vdim and columns is None)
        for dim, (size, whole) in enumerate(zip(tensor.shape, _sizes(form), strict=True))
    )
    fits = fits and columns in (None, tensor.shape[form.vdim])
    assert fits, (
        f"{what} must have a number per row of {list(form.shape)} with the vocabulary in dimension {form.vdim}, "
        f"got shape {list(tensor.shape)}"
    )
    return tensor


# -- masks --------------------------------------------------------------------------------------------


def dense_mask(mask: Mask, values: Values, zero_outside: Container[Node] = ()) -> Tensor:
    """What a mask says of each element, of the form's shape."""
    found = _guarded(mask, values, zero_outside).expand(_sizes(mask.form))
    return ~found if mask.negated else found


def _guarded(mask: Mask, values: Values, zero_outside: Container[Node]) -> Tensor:
    form = mask.form
    if mask.guard in (Guard.COLUMN, Guard.ROW):
        assert mask.index is not None, mask
        index = _aligned(values[mask.index], form, "a mask", columns=1)
        return index.eq(_iota(form)) if mask.guard is Guard.COLUMN else index.bool()
    value, _ = dense(form, values, zero_outside)
    if mask.guard is Guard.NEVER:
        return torch.zeros_like(value, dtype=torch.bool)
    if mask.guard is Guard.NULL:
        return value == 0
    if mask.guard is Guard.MINUS_INF:
        return value == -torch.inf
    if mask.guard is Guard.LOWEST:
        return value <= torch.finfo(value.dtype).min
    if mask.guard is Guard.NAN:
        return value.isnan()
    peak = value.amax(form.vdim, keepdim=True)
    return (value >= peak - 1e-9 * (1 + peak.abs())) | (value == peak)
