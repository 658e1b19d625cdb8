"""Does an `autograd.Function` run the line computing or reading deferred logits?

Entry points: `run_by_function` for the line computing them, `within_function` for a line reading them. Autograd gives a
Function's result the Function's backward if an argument is a tensor that requires grad and the result is a tensor.
Deferred logits are none: in eager code the gradient would be lost, and Dynamo would differentiate the forward instead
of using the backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set
from types import CodeType

import torch
from torch.autograd.function import Function

__all__ = ["run_by_function", "within_function"]

_FORWARD = ("forward", "setup_context")
_BACKWARD = ("backward", "vjp")


def within_function() -> bool:
    """In eager code, and while Dynamo traces."""
    return _traced() if torch.compiler.is_compiling() else _run()


def _run() -> bool:
    return not torch.is_grad_enabled() and _is_below(set(_codes(Function, _FORWARD)))


def run_by_function() -> bool:
    """Whether a Function's forward or backward runs the line: a reentrant checkpoint runs a part of a model in both.

    Its forward's result has its backward if it is a tensor.
    """
    return _run() or _is_below(set(_codes(Function, _BACKWARD)))


@torch.compiler.assume_constant_result
def _traced() -> bool:
    """Whether Dynamo is tracing the call: its own frames are above, possibly above those of a Function."""
    from slime_compile.torch_private import AutogradFunctionVariable

    return _run() or _is_below({AutogradFunctionVariable.call_apply.__code__})


def _codes(function: type[Function], methods: tuple[str, ...]) -> Iterator[CodeType]:
    """The code of every Function; `apply`, their caller, has no frame since torch 2.15."""
    for kind in function.__subclasses__():
        for method in (getattr(kind, name) for name in methods):
            if hasattr(method, "__code__"):
                yield method.__code__
        yield from _codes(kind, methods)


def _is_below(codes: Set[CodeType]) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame.f_code in codes
