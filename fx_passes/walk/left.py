"""Logits changed in place by forward: backward is computed from the softmax in them.

Entry point: `softmax_left`. See NOTE [Logits that the graph changes] in `graph/changes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Exp, Form, Mask
from fx_passes.algebra.poly import ONE, Poly
from fx_passes.graph.facts import is_backward, value
from fx_passes.graph.operators import WHOLE_VIEWS, under
from fx_passes.walk.context import Context
from fx_passes.walk.results import logits_of
from fx_passes.walk.statistics import compute_dtype, dtype_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Left:
    """The softmax written into the logits by forward (the user's `node`), and the `term` to compute over it."""

    node: Node
    term: Exp


def in_backward(c: Context) -> bool:
    """Whether the current node is one of backward."""
    return c.emitter.origin is not None and is_backward(c.emitter.origin)


def softmax_left(c: Context, form: Form) -> Left | None:
    """The exponential in the logits' memory, from which `form`'s single term is computed in backward.

    In memory is `exp(y - t) u`, needed is `exp(y - s) (a + b y)`: the former times exp(t - s) (a + b y) / u, with y its
    logarithm plus t minus log u. None for any other form; if t is neither s nor the row's maximum; or if the value in
    memory is rounded and the program itself computes its gradient from another value.
    """
    node = None if form.x is None else c.changes.left.get(c.roots.root_of[form.x])
    if node is None or form.x is None or len(form.exps) != 1 or not in_backward(c):
        return None
    node = under(node, WHOLE_VIEWS)
    left = c.values.get(node)
    if not isinstance(left, Form) or left.x is not form.x or not left.is_exp or len(left.exps) != 1:
        return None
    (there,), (term,) = left.exps, form.exps
    if there.scale != term.scale or not there.b.is_zero or there.extent is not None:
        return None
    inverse = ONE.over(there.a)
    if inverse is None or not _exact(c, form.x, node):
        return None
    ratio = _ratio(c, form, there, term)
    if ratio is None:
        return None
    shift = there.shift if term.b.is_zero else there.shift - _log(c, there.a, form)
    factor = inverse * ratio
    return Left(node, Exp(term.scale, shift, term.a * factor, term.b * factor))


def _ratio(c: Context, form: Form, there: Exp, term: Exp) -> Poly | None:
    """exp(t - s): 1, or one over the row's sum if the exponentials in memory are not normalised."""
    if there.shift == term.shift:
        return ONE
    stats = c.statistics.known(form, term.scale)
    if stats is None or there.shift != stats.max or term.shift != stats.logsumexp:
        return None
    assert form.x is not None
    less = c.rows.emit_node(-stats.log_sum, dtype_of(form), form.x)
    return Poly.atom(c.emitter.call(aten.exp.default, less))


def _log(c: Context, factor: Poly, form: Form) -> Poly:
    if factor == ONE:
        return Poly()
    assert form.x is not None
    emitted = c.rows.emit_node(factor, dtype_of(form), form.x)
    return Poly.atom(c.emitter.call(aten.log.default, emitted))


def _exact(c: Context, x: Node, node: Node) -> bool:
    """Reading `node` loses nothing: it is not rounded, or the leaving value is computed from nothing else."""
    if value(node).dtype == compute_dtype(x):
        return True
    seen, waiting = {node}, [c.emitter.origin]
    while waiting:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        meaning = c.values.get(each)
        if each.op == "placeholder" and each in c.roots.root_of:
            return False
        if isinstance(meaning, (Form, Mask)) and logits_of(meaning) is not None:
            waiting += each.all_input_nodes
    return True
