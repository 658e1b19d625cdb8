"""A full-vocabulary value read by user code: plain arithmetic instead of `row_grad`.

Entry point: `spell_out`, once a walk is over and all readers are known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Exp, Form, OneHot
from fx_passes.algebra.poly import ONE, ZERO, Poly
from fx_passes.graph.facts import is_float_tensor, rank_of, same, same_shape, shape_of, value
from fx_passes.graph.operators import EXACT, MATMULS, REDUCTIONS, VIEWS, is_elementwise, under
from fx_passes.graph.order import computed
from fx_passes.walk.account import Account
from fx_passes.walk.columns import index_node
from fx_passes.walk.context import Context
from fx_passes.walk.gradient import Leaving, adds_what_comes_in, coefficients, with_others
from fx_passes.walk.near import affine_center
from fx_passes.walk.statistics import dtype_of

aten = torch.ops.aten

_MOST_COLUMNS = 4  # of a one-hot term: each is a comparison of every element

# NOTE [Who reads a value decides how it is computed]
# `row_grad` is a kernel of its own: what it makes is stored. That is right for a value that is stored anyway: one that
# the graph returns, that a matmul reads, that takes the logits' place. A value that only element-wise operators and
# reductions read would not be stored, had the user's code stayed as it was: the compiler computes it where it is
# needed. There the same coefficients are spelled out in the graph, for the compiler to do just that; a partial rewrite
# stores nothing that the user's own code did not.
#
# Half-precision logits that the program computes element by element are rounded where they are stored and `row_stats`
# reads them. Where a compiler computes them again it does not round them, and their exponentials over the sum of the
# others' are no softmax: the arithmetic rounds, by their bits, since a cast there and back is taken out.
#
# Logits that a matmul of the graph makes are left to `linear`, which takes `row_grad`s and need not make them at all;
# not if the function returns a part of them: its gradient is put among zeros, and added to, in one kernel.


def spell_out(c: Context, account: Account) -> None:
    """Arithmetic in place of each `row_grad` whose value is not needed in memory."""
    replaced: dict[Node, list[Node]] = {new: [] for new in account.leaving}
    for old, new in account.replacements.items():
        if new in replaced:
            replaced[new].append(old)  # the user's code may compute one value several times
    live = computed(c.emitter.graph, account.replacements)
    for new, leaving in list(account.leaving.items()):
        olds, form = replaced[new], leaving.form
        if new not in live or leaving.from_softmax or not _few_columns(form):
            continue
        absorbed = bool(form.others) or _only_absorbed([*olds, new], live)
        if absorbed and (_is_a_part_returned(c, form) or not _is_made_by_a_matmul(c, form)):
            _replace(c, account, olds, leaving)


def _replace(c: Context, account: Account, olds: list[Node], leaving: Leaving) -> None:
    form, new = leaving.form, leaving.node
    at, c.emitter.origin = c.emitter.origin, olds[0]
    spelled = arithmetic(c, form, value(new).dtype)
    c.emitter.origin = at
    del account.leaving[new]
    account.leaving[spelled] = replace(leaving, node=spelled, operators=())
    account.replacements |= dict.fromkeys(olds, spelled)
    new.replace_all_uses_with(spelled)


def arithmetic(c: Context, form: Form, dtype: torch.dtype) -> Node:
    """The full-vocabulary value itself, in `dtype`, as `gradient.row_grad` gives it."""
    return with_others(c, _Arithmetic(c, form).total(), form, dtype)


def _few_columns(form: Form) -> bool:
    counts = (shape_of(index)[form.vdim] for hot in form.hots for index in hot.index)
    return all(isinstance(count, int) and count <= _MOST_COLUMNS for count in counts)


def _is_a_part_returned(c: Context, form: Form) -> bool:
    assert form.x is not None
    whole = same_shape(form.shape, shape_of(c.roots.root_of[form.x]))
    return adds_what_comes_in(form) and not whole


def _is_made_by_a_matmul(c: Context, form: Form) -> bool:
    """Through whatever is done to the product element by element."""
    assert form.x is not None
    root = c.roots.root_of[form.x]
    vocab = shape_of(root)[-1]
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        if node.target in MATMULS:
            return True
        rows = [n for n in node.all_input_nodes if is_float_tensor(n) and rank_of(n) > 1]
        new = {n for n in rows if same(shape_of(n)[-1], vocab)} - seen
        seen |= new
        waiting += new
    return False


def _only_absorbed(nodes: list[Node], live: set[Node]) -> bool:
    """Whether no reader needs the value in memory; views are looked through."""
    waiting = [user for node in nodes for user in node.users if user in live]
    seen = set(waiting)
    while waiting:
        reader = waiting.pop()
        if reader.target in VIEWS:
            new = {user for user in reader.users if user in live} - seen
            seen |= new
            waiting += new
        elif not _absorbs(reader, nodes[0]):
            return False
    return True


def _absorbs(reader: Node, node: Node) -> bool:
    """Element-wise, joined piece by piece, or reduced to numbers per row (a sum over rows is a bias's gradient)."""
    if reader.target in REDUCTIONS:
        return rank_of(reader) == 0 or not same(shape_of(reader)[-1], shape_of(node)[-1])
    return reader.target is aten.cat.default or is_elementwise(reader)


class _Arithmetic:
    """A form as element-wise nodes, by the contract of `row_grad` (docs/ops.md): a zero factor does not look at x."""

    def __init__(self, c: Context, form: Form) -> None:
        assert form.x is not None
        self.c, self.form, self.call = c, form, c.emitter.call
        self.dtype = dtype_of(form)
        self.x = c.emitter.cast(form.x, self.dtype)
        if _is_rounded_if_stored(c.roots.root_of[form.x]):
            self.x = _rounded(c, self.x, value(form.x).dtype)
        self.zero = self._tensor(ZERO)

    def total(self) -> Node:
        """The sum of all terms in the compute dtype, `others` aside."""
        parts = [*map(self._exponential, self.form.exps)]
        for hot in self.form.hots:
            parts += self._columns(hot)
        parts.append(self._affine())  # last: p - 1 cancels, and the rest is not rounded as 1 is
        parts = [part for part in parts if part is not self.zero] or parts[:1]
        total = functools.reduce(functools.partial(self.call, aten.add.Tensor), parts)
        return self.c.emitter.expand(total, self.c.all_sizes(self.form))

    def _affine(self) -> Node:
        """f (x - center) + (e + f center)"""
        e, f = self.form.e, self.form.f
        if f.is_zero:
            return self._tensor(e)
        around = affine_center(self.c, self.form)
        rest = e + around.value
        beside = self._plus(self._scaled(f, around.center), rest)
        return self.c.where_any([f], beside, self._tensor(rest))

    def _exponential(self, term: Exp) -> Node:
        """exp(z - shift) (a + b z) with z = scale (x - center); 0 where z is -inf, unless the row has no softmax."""
        scale, center, shift, a, b = coefficients(self.c, self.form, term)
        z = self.c.where_any([scale], self._scaled(scale, center), self.zero)
        probability = self.call(aten.exp.default, self._plus(z, -shift))
        if b.is_zero:
            weighted = self._times(probability, a)
        else:
            weighted = self.call(aten.mul.Tensor, probability, self._plus(self._times(z, b), a))
        null = self.call(aten.eq.Scalar, z, -math.inf)
        if shift.as_number() is None:
            summed = self._tensor(shift)  # NaN in a row with +inf
            known = self.call(aten.eq.Tensor, summed, summed)
            null = self.call(aten.logical_and.default, null, known)
        return self.c.where_any([a, b], self.c.emitter.where(null, self.zero, weighted), self.zero)

    def _columns(self, hot: OneHot) -> Iterator[Node]:
        """The weight where the column is an index of the row's."""
        index, vdim = index_node(self.c, hot.index), self.form.vdim
        size = self.c.size_of(self.form, vdim)
        trailing = len(self.form.shape) - vdim - 1
        columns = self.c.emitter.reshape(self.c.emitter.iota(size, index), [size] + [1] * trailing)
        weight = self.c.emitter.align(self._tensor(hot.weight), len(self.form.shape))
        for at in range(shape_of(index)[vdim]):
            pick = functools.partial(self._at, vdim=vdim, at=at)
            hit = self.call(aten.eq.Tensor, columns, pick(index))
            yield self.c.emitter.where(hit, pick(weight), self.zero)

    def _at(self, node: Node, vdim: int, at: int) -> Node:
        """One column of several."""
        one = same(shape_of(node)[vdim], 1)
        return node if one else self.call(aten.slice.Tensor, node, vdim, at, at + 1)

    # -- arithmetic with coefficients ------------------------------------------------------------

    def _tensor(self, poly: Poly) -> Node:
        return self.c.rows.emit_node(poly, self.dtype, self.x)

    def _number_or_node(self, poly: Poly) -> Node | float:
        return self.c.rows.emit(poly, self.dtype)

    def _scaled(self, scale: Poly, center: Poly) -> Node:
        return self._times(self._plus(self.x, -center), scale)

    def _plus(self, node: Node, poly: Poly) -> Node:
        return (
            node if poly.is_zero else self.call(aten.add.Tensor, node, self._number_or_node(poly))
        )

    def _times(self, node: Node, poly: Poly) -> Node:
        return node if poly == ONE else self.call(aten.mul.Tensor, node, self._number_or_node(poly))


# -- half precision -----------------------------------------------------------------------------------

_BITS_LESS = {torch.bfloat16: 16, torch.float16: 13}
"""By how many bits a significand is shorter than float32's."""


def _is_rounded_if_stored(node: Node) -> bool:
    """Half precision, and made by arithmetic that a compiler may do where the value is read."""
    waiting = [node]
    while waiting:
        node = under(waiting.pop(), VIEWS)
        if not is_float_tensor(node) or value(node).dtype not in _BITS_LESS:
            continue
        if node.target in EXACT:
            waiting += node.all_input_nodes
        elif is_elementwise(node) or node.target in REDUCTIONS:
            return True
    return False


def _rounded(c: Context, x: Node, dtype: torch.dtype) -> Node:
    """`x`, which is float32, to the nearest number of `dtype`, or the even one of two."""
    call, less = c.emitter.call, _BITS_LESS[dtype]
    bits = call(aten.view.dtype, x, torch.int32)
    last = call(aten.bitwise_right_shift.Tensor_Scalar, bits, less)
    odd = call(aten.bitwise_and.Scalar, last, 1)
    up = call(aten.add.Tensor, call(aten.add.Tensor, bits, 2 ** (less - 1) - 1), odd)
    nearest = call(aten.view.dtype, call(aten.bitwise_and.Scalar, up, -(2**less)), torch.float32)
    if dtype is torch.float16:  # whose largest number is not float32's
        above = call(aten.gt.Scalar, call(aten.abs.default, nearest), torch.finfo(dtype).max)
        nearest = c.emitter.where(above, call(aten.mul.Tensor, nearest, math.inf), nearest)
    return c.emitter.where(call(aten.eq.Tensor, x, x), nearest, x)  # the bits of NaN may be all 1
