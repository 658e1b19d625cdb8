"""Whether the line that reads deferred logits is in an `autograd.Function`, which has not been given a tensor then.

Entry point: `within_function`. Autograd gives a Function's result the Function's backward if one of the arguments is a
tensor that requires grad. Deferred logits are none: in eager code the gradient would be lost, under Dynamo the forward
would be differentiated in place of the backward.
"""

from __future__ import annotations

import sys
from types import CodeType

import torch
from torch.autograd.function import Function

__all__ = ["within_function"]

_APPLY: CodeType = Function.apply.__func__.__code__  # type: ignore[attr-defined]


def within_function() -> bool:
    """In eager code, and while Dynamo traces."""
    return _traced() if torch.compiler.is_compiling() else _run()


def _run() -> bool:
    return not torch.is_grad_enabled() and _is_below(_APPLY)


@torch.compiler.assume_constant_result
def _traced() -> bool:
    """Runs while Dynamo traces the call, below Dynamo's own frames, which may be below those of a Function."""
    from slime_compile.torch_private import AutogradFunctionVariable

    return _run() or _is_below(AutogradFunctionVariable.call_apply.__code__)


def _is_below(code: CodeType) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_code is code
