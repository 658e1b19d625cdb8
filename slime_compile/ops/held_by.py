"""Finds the variable referencing a tensor, for the report's remedy; it runs for some calls of each gradient.

Entry point: `variables`. It looks for the tensor, or another one with its memory, in the local variables of every
thread's frames, in the variables of their modules, and two levels deep into these. If it finds none there, it looks
into closures and generators of the user's. Deeper references, and references from C++, are not found.
"""

import gc
import inspect
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import (
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor

from slime_compile.ops.holders import local_variables

MOST = 3
_LARGEST = 1000  # entries of a container to look at
_DEPTH = 2
_LIBRARY = sysconfig.get_paths()["stdlib"]
_PACKAGES = tuple(str(path) for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_KINDS = {GeneratorType: "generator", CoroutineType: "coroutine"}


def variables(x: Tensor) -> list[str]:
    """The variables referencing `x` or its memory, as "`name` in function (file:line)", at most `MOST`."""
    found = dict.fromkeys(_named(x.untyped_storage()._cdata)) or dict.fromkeys(_suspended(x))
    return list(found)[:MOST]


def _suspended(x: Tensor) -> Iterator[str]:
    """In suspended code of the user's only: torch's and ours has cells of its own with the tensor."""
    for each in gc.get_referrers(x):
        if isinstance(each, CellType):
            yield from _closures(each)
        elif type(each) in _KINDS:
            code = each.gi_code if isinstance(each, GeneratorType) else each.cr_code
            if is_users(code):
                yield f"the {_KINDS[type(each)]} {_place(code, code.co_firstlineno)}"


def _closures(cell: CellType) -> Iterator[str]:
    for cells in gc.get_referrers(cell):
        if type(cells) is not tuple:
            continue
        for function in gc.get_referrers(cells):
            if isinstance(function, FunctionType) and function.__closure__ is cells:
                code = function.__code__
                names = [n for n, c in zip(code.co_freevars, cells, strict=True) if c is cell]
                if names and is_users(code):
                    yield f"`{names[0]}` in the closure {_place(code, code.co_firstlineno)}"


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_name} ({Path(code.co_filename).name}:{line})"


def is_users(code: CodeType) -> bool:
    """Neither torch's, ours, the library's nor generated."""
    from slime_compile.torch_private import cache_dir

    file = code.co_filename
    library = file.startswith(_LIBRARY) and "site-packages" not in file
    generated = file.startswith("<") and not file.startswith(("<ipython", "<stdin", "<string"))
    return not (library or generated or file.startswith((cache_dir(), *_PACKAGES)))


def _named(memory: int) -> Iterator[str]:
    modules: dict[int, Mapping[str, Any]] = {}
    for frame in _frames():
        code = frame.f_code
        modules[id(frame.f_globals)] = frame.f_globals
        if code.co_flags & inspect.CO_OPTIMIZED:  # else its variables are the module's
            where = _place(code, frame.f_lineno)
            names = list(_holding(local_variables(frame), memory))
            yield from (f"`{name}` in {where}" for name in names)
    for space in modules.values():
        for name in _holding(space, memory):
            yield f"`{name}` of module {space.get('__name__', '?')}"


def _frames() -> Iterator[FrameType]:
    """The user's, of all threads, innermost first."""
    for frame in _innermost():
        while frame is not None:
            if is_users(frame.f_code):
                yield frame
            frame = frame.f_back


def _innermost() -> list[FrameType | None]:
    """Of each thread; of this one the caller's: a frame stored in one of its own variables would keep itself alive."""
    found: dict[int, FrameType | None] = {**sys._current_frames()}
    found[threading.get_ident()] = sys._getframe(2)
    return list(found.values())


def _holding(space: Mapping[str, Any], memory: int) -> Iterator[str]:
    """Variables with the memory, or containing a value with it."""
    for name, value in list(space.items()):
        if _has(value, memory):
            yield name
        else:
            yield from (name + part for part in _inside(value, memory, _DEPTH))


def _inside(value: Any, memory: int, depth: int) -> Iterator[str]:
    for part, each in _parts(value):
        if _has(each, memory):
            yield part
        elif depth > 1:
            yield from (part + below for below in _inside(each, memory, depth - 1))


# A user's object may run code when it is inspected, so it is not inspected.


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """The direct contents of a variable, in Python's notation."""
    kind = type(value)
    if kind in (list, tuple) and len(value) <= _LARGEST:
        return [(f"[{i}]", each) for i, each in enumerate(value)]
    if issubclass(kind, dict) and dict.__len__(value) <= _LARGEST:
        return [(f"[{key!r}]", each) for key, each in dict.items(value) if type(key) is str]
    getattribute: Any = kind.__getattribute__
    plain = getattribute in (object.__getattribute__, SimpleNamespace.__getattribute__)
    if not plain or not hasattr(value, "__dict__"):
        return []
    own = value.__dict__
    return [(f".{key}", each) for key, each in own.items()] if type(own) is dict else []


def _has(value: Any, memory: int) -> bool:
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return bool(plain and value.untyped_storage()._cdata == memory)
