"""The function a dry run traces: a copy of the user's function, unknown to Dynamo."""

import contextlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slime_compile.torch_private import innermost_fn


def check_callable(fn: object, use: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"{use} must be given a function or a module, got {type(fn).__name__}: pass the function "
            "itself, and its arguments separately"
        )


@contextlib.contextmanager
def without_grad_warnings() -> Iterator[None]:
    """Torch reads `.grad` of every tensor before faking it, leaf or not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


def with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` over a copy of its code object: Dynamo ties compiled code to the code object."""
    plain = innermost_fn(fn)
    if isinstance(plain, torch.nn.Module):
        plain = plain.forward
    if inspect.ismethod(plain):
        return types.MethodType(_copied(plain.__func__), plain.__self__)
    return _copied(plain) if inspect.isfunction(plain) else plain


def _copied(fn: Any) -> types.FunctionType:
    made = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__module__ = fn.__module__
    return made
