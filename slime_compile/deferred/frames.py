"""Functions Dynamo traces as a part of the user's function, and never alone.

Entry point: `only_inlined`.

NOTE [Frames of ours]
At a graph break Dynamo calls the user's next function in eager code, and compiles each Python frame below it alone.
A method of deferred logits would then seem to be a part of the user's graph, and keep no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from slime_compile.torch_private import skip_code

__all__ = ["only_inlined"]


def only_inlined(*modules: ModuleType) -> None:
    """All functions and methods defined in these modules."""
    files = {module.__file__ for module in modules}
    for module in modules:
        for code in _codes(module):
            if code.co_filename in files:
                skip_code(code)


def _codes(owner: Any) -> Iterator[CodeType]:
    for value in vars(owner).values():
        if isinstance(value, type) and value.__module__ == owner.__name__:
            yield from _codes_of_class(value)
        elif hasattr(value, "__code__"):
            yield value.__code__


def _codes_of_class(owner: type) -> Iterator[CodeType]:
    for value in vars(owner).values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if hasattr(function, "__code__"):
            yield function.__code__
