"""Heads with a forward of their own: LoRA, weights that are cast, scaled or dequantised.

Entry points: `width_of`, the vocabulary of such a head, and `Deferring`: while its forward runs, each linear map to
that many columns returns `DeferredLogits`. Casts, factors and sums of these stay deferred (`methods.py`): LoRA's
forward returns them. The rest of the forward runs at once, for instance LoRA's dropout and narrow matmul, or a
dequantisation. A forward doing anything else with the product computes it there.

Not handled: matmuls inside an autograd.Function or a custom operator (bitsandbytes, torchao, Transformer Engine).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slime_compile.deferred.expressions import is_computing

__all__ = ["Deferring", "width_of"]

Made = Callable[[Tensor, Tensor, Tensor | None], Any]
"""Deferred logits of (hidden, weight, bias), or None."""

_MATMULS: set[Any] = {
    torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__,
}  # fmt: skip


def width_of(head: nn.Module) -> int | None:
    """The columns of its logits: the module's own number, or its widest linear map."""
    said = getattr(head, "out_features", None)
    if isinstance(said, int):
        return said
    inner = [each.out_features for each in head.modules() if isinstance(each, nn.Linear)]
    return max(inner, default=None)


class Deferring(TorchFunctionMode):
    """Around a head's forward, in eager code.

    Args:
        width: of the deferred linear maps' results.
        made: defers one.
    """

    def __init__(self, width: int, made: Made) -> None:
        super().__init__()
        self._width = width
        self._made = made

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operands = None if is_computing() else _operands(func, args, kwargs or {})
        if operands is not None and operands[1].shape[0] == self._width:
            made = self._made(*operands)
            if made is not None:
                return made
        return func(*args, **(kwargs or {}))


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """(hidden, weight [V, D], bias) of a linear map of tensors."""
    if func is F.linear:
        hidden, weight, bias = _arguments(*args, **kwargs)
    elif func in _MATMULS and len(args) == 2 and not kwargs:
        hidden, weight, bias = *args, None
    elif func is torch.addmm and len(args) == 3 and not kwargs:
        bias, hidden, weight = args
    else:
        return None
    if not _is_linear(hidden, weight, bias):
        return None
    return hidden, weight if func is F.linear else weight.t(), bias


def _arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _is_linear(hidden: Any, weight: Any, bias: Any) -> bool:
    if not isinstance(hidden, Tensor) or not isinstance(weight, Tensor):
        return False
    one_per_column = bias is None or (isinstance(bias, Tensor) and bias.dim() == 1)
    return hidden.dim() >= 2 and weight.dim() == 2 and one_per_column
