"""Deferred logits as a node of torch's pytrees, once this file is imported.

FSDP and DDP look for tensors in a module's outputs.

The leaves are the hidden states of each product, for the hooks of FSDP and DDP. A replaced leaf becomes the new hidden
if it has the same numbers, also in another dtype or without gradient: the same was meant for the logits. Any other
replacement (twice the leaf is not twice the logits if there is a bias) is an error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from slime_compile.deferred.expressions import Applied, Expression, Product
from slime_compile.deferred.logits import DeferredLogits

_IDENTITIES = {"_DDPSinkBackward", "RegisterPostBackwardFunctionBackward"}


def _flatten(logits: DeferredLogits) -> tuple[list[Tensor], DeferredLogits]:
    kept = logits.expression.kept
    return [each.hidden for each in _products(logits.expression)] if kept is None else [
        kept
    ], logits


def _unflatten(leaves: Any, logits: DeferredLogits) -> Any:
    leaves = list(leaves)
    kept = logits.expression.kept
    if kept is not None:
        return logits if leaves[0] is kept else leaves[0]
    old = _products(logits.expression)
    if all(leaf is each.hidden for leaf, each in zip(leaves, old, strict=True)):
        return logits
    if leaves[0] is None:  # of a function called for its effect
        return None
    made = {id(each): _of_leaf(leaf, each) for leaf, each in zip(leaves, old, strict=True)}
    expression = _replaced(logits.expression, made)
    dtypes = [
        leaf.dtype
        for leaf, each in zip(leaves, old, strict=True)
        if leaf.dtype != each.hidden.dtype
    ]
    for dtype in dtypes[:1]:
        expression = Applied.of(expression, "to", (dtype,), {})
    return DeferredLogits.of(expression)


def _of_leaf(leaf: Any, old: Product) -> Product:
    """The product of hidden as `leaf` has it."""
    if not isinstance(leaf, Tensor) or not _same_numbers(leaf, old.hidden):
        raise TypeError(
            "a function over the leaves of a pytree must leave deferred logits as they are, or cast or detach them; "
            "give it logits.tensor()"
        )
    if old.hidden.requires_grad and not leaf.requires_grad:
        return old.detached()
    return old.of_hidden(leaf.to(old.hidden.dtype))


def _products(expression: Expression) -> list[Product]:
    if isinstance(expression, Product):
        return [expression]
    return [product for each in expression.operands() for product in _products(each)]


def _replaced(expression: Any, made: dict[int, Product]) -> Any:
    """With other products; arguments other than expressions stay."""
    if isinstance(expression, Product):
        return made[id(expression)]
    if not isinstance(expression, Applied):
        return expression
    before = _replaced(expression.before, made)
    args = tuple(_replaced(each, made) for each in expression.args)
    return dataclasses.replace(expression, before=before, args=args)


def _same_numbers(leaf: Tensor, hidden: Tensor) -> bool:
    if type(leaf.grad_fn).__name__ in _IDENTITIES:
        return True
    if leaf.shape != hidden.shape or leaf.device != hidden.device:
        return False
    return torch.equal(hidden.detach().to(leaf.dtype), leaf.detach())


register_pytree_node(
    DeferredLogits, _flatten, _unflatten, serialized_type_name="slime_compile.DeferredLogits"
)
