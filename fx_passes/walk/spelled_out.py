"""A full-vocabulary value read by user code: plain arithmetic instead of `row_grad`.

Entry point: `spell_out`, once a walk is over and all readers are known.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form
from fx_passes.graph.facts import is_float_tensor, rank_of, same, same_shape, shape_of, value
from fx_passes.graph.operators import EXACT, MATMULS, REDUCTIONS, VIEWS, is_elementwise, under
from fx_passes.graph.order import computed
from fx_passes.walk.account import Account
from fx_passes.walk.context import Context
from fx_passes.walk.gradient import Coefficients, Leaving, adds_what_comes_in, with_others

aten = torch.ops.aten

_MOST_COLUMNS = 4  # of a one-hot term: each is a comparison of every element

# NOTE [Who reads a value decides how it is computed]
# `row_grad` is a separate kernel: its result is stored. That is right for a value stored anyway: one returned by the
# graph, read by a matmul, or overwriting the logits. But a value with element-wise and reducing readers only is not
# stored in the user's own code: the compiler computes it where it is needed. For such a value the same coefficients
# become arithmetic in the graph, for the compiler to do the same. A partial rewrite stores no more than the user's own
# code.
#
# Half-precision logits computed element by element by the program are rounded when they are stored for `row_stats`. A
# compiler recomputing them does not round, and exponentials of unrounded logits over the sum for rounded ones are no
# softmax. So the arithmetic rounds by manipulating bits, because the compiler removes a cast there and back.
#
# Logits of a matmul in the graph are left to `linear`, which takes `row_grad`s and need not compute the logits at all.
# Exception: if the function returns a part of them, their gradient is written into zeros, and added to, in one kernel.


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
    assert form.x is not None
    given = Coefficients(c, form)
    x = c.emitter.cast(form.x, given.dtype)
    if _is_rounded_if_stored(c.roots.root_of[form.x]):
        x = _rounded(c, x, value(form.x).dtype)
    operands = (given.ordered(x), *given.apart(), False, given.dtype)
    operator = torch.ops.slime_fused.row_grad.default
    made = c.config.formulas.emit(c.emitter, operator, *operands)
    return with_others(c, given.back(made), form, dtype)


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


# -- half precision -----------------------------------------------------------------------------------

_BITS_LESS = {torch.bfloat16: 16, torch.float16: 13}
"""By how many bits a significand is shorter than float32's."""


def _is_rounded_if_stored(node: Node) -> bool:
    """Half precision, and computed by arithmetic that a compiler may repeat at the reader."""
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
    """`x`, in float32, rounded to the nearest number of `dtype`, ties to even."""
    call, less = c.emitter.call, _BITS_LESS[dtype]
    bits = call(aten.view.dtype, x, torch.int32)
    last = call(aten.bitwise_right_shift.Tensor_Scalar, bits, less)
    odd = call(aten.bitwise_and.Scalar, last, 1)
    up = call(aten.add.Tensor, call(aten.add.Tensor, bits, 2 ** (less - 1) - 1), odd)
    nearest = call(aten.view.dtype, call(aten.bitwise_and.Scalar, up, -(2**less)), torch.float32)
    if dtype is torch.float16:  # a dtype with another largest number than float32's
        above = call(aten.gt.Scalar, call(aten.abs.default, nearest), torch.finfo(dtype).max)
        nearest = c.emitter.where(above, call(aten.mul.Tensor, nearest, math.inf), nearest)
    return c.emitter.where(call(aten.eq.Tensor, x, x), nearest, x)  # the bits of NaN may be all 1
