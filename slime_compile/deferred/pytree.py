"""Deferred logits as a node of torch's pytrees, once this file is imported.

FSDP and DDP look for tensors in what a module returns.

The one leaf is hidden, to which they tie their hooks. A replaced leaf is taken for hidden if it
holds the same numbers, also in another dtype or without gradient: then the same was meant of the logits. Anything else
(twice the leaf is not twice the logits, where there is a bias) is an error.
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
    return [_product(logits.expression).hidden if kept is None else kept], logits


def _unflatten(leaves: Any, logits: DeferredLogits) -> Any:
    (leaf,) = leaves
    kept = logits.expression.kept
    if kept is not None:
        return logits if leaf is kept else leaf
    old = _product(logits.expression)
    if leaf is old.hidden:
        return logits
    if leaf is None:  # of a function that is called for what it does
        return None
    if not isinstance(leaf, Tensor) or not _same_numbers(leaf, old.hidden):
        raise TypeError(
            "a function over the leaves of a pytree must leave deferred logits as they are, or cast or detach them; "
            "give it logits.tensor()"
        )
    if old.hidden.requires_grad and not leaf.requires_grad:
        product = old.detached()
    else:
        product = old.of_hidden(leaf.to(old.hidden.dtype))
    made = _replaced(logits.expression, product)
    if leaf.dtype != old.hidden.dtype:
        made = Applied.of(made, "to", (leaf.dtype,), {})
    return DeferredLogits.of(made)


def _product(expression: Expression) -> Product:
    while isinstance(expression, Applied):
        assert expression.before is not None
        expression = expression.before
    return expression


def _replaced(expression: Expression, product: Product) -> Expression:
    if isinstance(expression, Product):
        return product
    assert expression.before is not None
    return dataclasses.replace(expression, before=_replaced(expression.before, product))


def _same_numbers(leaf: Tensor, hidden: Tensor) -> bool:
    if type(leaf.grad_fn).__name__ in _IDENTITIES:
        return True
    if leaf.shape != hidden.shape or leaf.device != hidden.device:
        return False
    return torch.equal(hidden.detach().to(leaf.dtype), leaf.detach())


register_pytree_node(
    DeferredLogits, _flatten, _unflatten, serialized_type_name="slime_compile.DeferredLogits"
)
