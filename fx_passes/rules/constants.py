"""The first full-vocabulary values: constants, and row scalars broadcast over the vocabulary."""

from __future__ import annotations

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form, Guard, Mask
from fx_passes.graph.facts import is_float_tensor, same, shape_of, value
from fx_passes.refused import Refused
from fx_passes.rules.operands import is_constant
from fx_passes.walk.context import Context
from fx_passes.walk.results import Operand, Result


def filled(c: Context, node: Node, sizes: object, fill: Operand = 0, **_: object) -> Result:
    """full: a constant in every element, of no logits yet."""
    shape = shape_of(node)
    constant = c.rows.operand(fill, 0)
    wide = [dim for dim, size in enumerate(shape) if c.is_vocabulary(size)]
    if not wide or constant is None or not is_float_tensor(node):
        return None
    return Form(shape, wide[-1], e=constant)


def full_like(c: Context, node: Node, like: Operand, fill: Operand = 0, **_: object) -> Result:
    constant = c.rows.operand(fill, 0)
    if not isinstance(like, Form) or constant is None or not is_float_tensor(node):
        raise Refused("a constant of another type")
    return Form(like.shape, like.vdim, e=constant)


def zeros_like(c: Context, node: Node, like: Operand, **_: object) -> Result:
    return full_like(c, node, like, 0)


def ones_like(c: Context, node: Node, like: Operand, **_: object) -> Result:
    return full_like(c, node, like, 1)


def expand(c: Context, node: Node, operand: Operand, sizes: object, **_: object) -> Result:
    """A row scalar or a row mask spread over the vocabulary; a form keeps its rows."""
    if isinstance(operand, (Form, Mask)):
        return _expanded_form(c, node, operand)
    is_mask = value(node).dtype is torch.bool
    if not isinstance(operand, Node) or not (is_mask or is_float_tensor(node)):
        return None
    shape, was = shape_of(node), shape_of(operand)
    was = (1,) * (len(shape) - len(was)) + was
    grown = [dim for dim in range(len(shape)) if not same(was[dim], shape[dim])]
    wide = [dim for dim in grown if c.is_vocabulary(shape[dim])]
    if not wide:
        return None
    form = Form(shape, len(shape) - 1 if len(shape) - 1 in wide else wide[-1])
    number = c.operand(operand, form)
    return Mask(Guard.ROW, form, index=operand) if is_mask else form.with_(e=number)


def _expanded_form(c: Context, node: Node, operand: Form | Mask) -> Result:
    form, shape = operand.form if isinstance(operand, Mask) else operand, shape_of(node)
    if len(shape) == len(form.shape) and all(map(same, shape, form.shape)):
        return operand
    if not (isinstance(operand, Form) and is_constant(operand)):
        raise Refused("the logits are repeated")
    # one number over as many rows as a vocabulary has, say, and now over the vocabulary
    wide = [dim for dim, size in enumerate(shape) if c.is_vocabulary(size)]
    return Form(shape, wide[-1] if wide else len(shape) - 1, e=operand.e)
