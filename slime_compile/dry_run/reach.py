"""Everything Python code can assign to, found by a walk from the user's function, and its restoration.

Entry point: `Reached`. The walk goes through dicts, lists, sets, closures, instances and their classes, through the
globals named by a function's code, from there to those functions, and so on. Not searched: functions, classes and
modules of torch, of this package and of the standard library; objects inside C extensions (arrays, iterators).
"""

import collections
import contextlib
import functools
import random
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_STDLIB = sysconfig.get_paths()["stdlib"]
_OURS = ("torch", "slime_compile", "fx_passes")
_ABSENT: Any = object()
_ATOMS = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    object,
    torch.dtype,
    torch.device,
    torch.Size,
)
_CONTAINERS = (dict, list, set, collections.deque)
_HOLDERS = ("types", "collections", "weakref", "_thread", "argparse")
"""Modules of Python whose objects keep values of the user's."""

_WRAPPERS = (staticmethod, classmethod, MethodType, functools.partial, property)

Replace = Callable[[Any], Any]


class Reached:
    """The objects found from `roots`, and their state."""

    def __init__(self, roots: Any):
        self._waiting: list[Any] = [roots]
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []

    def look(self, tensor: Callable[[Tensor], None], replace: Replace) -> None:
        """Records the state.

        Args:
            tensor: called with each tensor.
            replace: the substitute of a value in containers, closures and instances until `restore`.
        """
        self._replace = replace
        while self._waiting:
            value = self._waiting.pop()
            if type(value) in _ATOMS or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                tensor(value)
                self._waiting.append(value.grad if value.is_leaf else None)
            self._visit(value)

    def restore(self) -> None:
        while self._undo:
            with contextlib.suppress(
                AttributeError, TypeError
            ):  # an attribute that cannot be assigned to has not changed
                self._undo.pop()()

    # ---- one value ------------------------------------------------------------------------------------------------

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, _CONTAINERS):
            self._container(value)
        elif isinstance(value, tuple | frozenset):
            self._waiting += value
        elif kind is FunctionType:
            self._function(value)
        elif kind is CellType:
            self._cell(value)
        elif isinstance(value, _WRAPPERS):
            self._waiting += _inside(value)
        elif isinstance(value, type):
            self._class(value)
        elif kind is ContextVar:
            self._waiting.append(value.get(None))
        else:
            self._undo += _random_state(value)
        if not isinstance(value, type | ModuleType) and _is_looked_into(kind):
            self._instance(value)

    def _container(self, value: Any) -> None:
        before = _contents(value)
        self._undo.append(lambda: _refill(value, before))
        self._waiting += [part for each in before for part in each]
        _refill(value, [tuple(map(self._replace, each)) for each in before])

    def _cell(self, cell: CellType) -> None:
        try:
            before = cell.cell_contents
        except ValueError:
            before = _ABSENT
        self._undo.append(lambda: _set_cell(cell, before))
        if before is not _ABSENT:
            self._waiting.append(before)
            cell.cell_contents = self._replace(before)

    def _instance(self, value: Any) -> None:
        self._undo.append(functools.partial(_set_type, value, type(value)))
        with contextlib.suppress(AttributeError):
            local = isinstance(value, threading.local)  # this thread's part
            own = vars(value) if local else object.__getattribute__(value, "__dict__")
            self._waiting.append(own if type(own) is dict else None)
        for slot in _slots(type(value)):
            before = _slot(slot, value)
            self._undo.append(functools.partial(_set_slot, slot, value, before))
            self._waiting.append(before)
        self._waiting.append(type(value))

    def _function(self, function: FunctionType) -> None:
        self._waiting += [function.__dict__, function.__defaults__, function.__kwdefaults__]
        if not _is_librarys(function.__code__.co_filename):
            self._waiting += function.__closure__ or ()
            self._names(function.__globals__, _names_of(function.__code__))

    def _names(self, space: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            before = space.get(name, _ABSENT)
            self._undo.append(functools.partial(_set_name, space, name, before))
            if isinstance(before, ModuleType):
                if not _is_named_ours(before.__name__):
                    self._names_of_module(before, names)
            else:
                self._waiting.append(before)

    def _names_of_module(self, module: ModuleType, names: Iterable[str]) -> None:
        inside = vars(module)
        if id(inside) not in self._seen:
            self._seen[id(inside)] = inside
            self._names(inside, [name for name in names if name in inside])

    def _class(self, kind: type) -> None:
        if _is_named_ours(kind.__module__):
            return
        before = _own(kind)
        self._undo.append(lambda: _set_class(kind, before))
        self._waiting += [*vars(kind).values(), *kind.__bases__]


# ---- the search ---------------------------------------------------------------------------------------------------


def _is_librarys(file: str) -> bool:
    library = file.startswith(_STDLIB) and "site-packages" not in file
    return library or file.startswith(_PACKAGES)


def _is_named_ours(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _OURS or root in sys.stdlib_module_names or root == "numpy"


def _is_looked_into(kind: type) -> bool:
    """Instances of the user's classes, and of torch's and Python's classes for users (modules, optimizers, maps)."""
    home = kind.__module__
    if home in _HOLDERS or issubclass(kind, Tensor):
        return True
    return home.startswith(("torch.nn", "torch.optim", "slime_compile")) or not _is_named_ours(home)


def _slots(kind: type) -> list[Any]:
    every = (value for each in kind.__mro__ for value in vars(each).values())
    return [value for value in every if type(value) is types.MemberDescriptorType]


def _inside(value: Any) -> list[Any]:
    match value:
        case MethodType():
            return [value.__self__, value.__func__]
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case property():
            return [value.fget, value.fset]
    return [value.__func__]


def _names_of(code: CodeType) -> list[str]:
    """All names used by a function and by functions defined in it: globals, and attributes of modules among them."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= dict.fromkeys(_names_of(constant))
    return list(found)


def _random_state(value: Any) -> list[Callable[[], object]]:
    """What brings a random generator back to its state; of other values nothing."""
    if isinstance(value, torch.Generator):
        return [functools.partial(value.set_state, value.get_state())]
    if isinstance(value, random.Random):
        return [functools.partial(value.setstate, value.getstate())]
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.random.RandomState):
        return [functools.partial(value.set_state, value.get_state())]
    if numpy and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return [functools.partial(setattr, bits, "state", bits.state)]
    return []


# ---- the recorded state -------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """The built-in type of a container: its methods run no code of the user's."""
    kinds = (collections.OrderedDict, *_CONTAINERS)
    return next(kind for kind in kinds if isinstance(value, kind))


def _contents(value: Any) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return list(_plain(value).items(value))
    return [(each,) for each in _plain(value).__iter__(value)]


def _same(some: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]]) -> bool:
    """The same objects in the same order."""
    pairs = (pair for a, b in zip(some, others, strict=False) for pair in zip(a, b, strict=True))
    return len(some) == len(others) and all(a is b for a, b in pairs)


def _refill(value: Any, contents: list[tuple[Any, ...]]) -> None:
    if _same(_contents(value), contents):
        return
    plain = _plain(value)
    add = getattr(plain, "append", None) or getattr(plain, "add", None) or plain.__setitem__
    plain.clear(value)
    for each in contents:
        add(value, *each)


def _set_name(space: dict[str, Any], name: str, before: Any) -> None:
    if before is not _ABSENT:
        space[name] = before
    elif name in space:
        del space[name]


def _set_type(value: Any, before: type) -> None:
    if type(value) is not before:
        object.__setattr__(value, "__class__", before)


def _slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _ABSENT


def _set_slot(slot: Any, value: Any, before: Any) -> None:
    now = _slot(slot, value)
    if now is before:
        return
    if before is _ABSENT:
        slot.__delete__(value)
    else:
        slot.__set__(value, before)


def _set_cell(cell: CellType, before: Any) -> None:
    if before is not _ABSENT:
        cell.cell_contents = before
    else:
        with contextlib.suppress(ValueError):  # it is empty
            del cell.cell_contents


def _own(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _set_class(kind: type, before: dict[str, Any]) -> None:
    now = _own(kind)
    for name in {**before, **now}:
        if name not in before:
            type.__delattr__(kind, name)
        elif now.get(name, _ABSENT) is not before[name]:
            type.__setattr__(kind, name, before[name])
