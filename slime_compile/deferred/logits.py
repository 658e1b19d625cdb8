"""`DeferredLogits`: in eager code as good as the tensor, in a compiled function a matmul of its graph.

It is a plain object with `__torch_function__`, no tensor: Dynamo traces its methods like any Python. Operations of
models and trainers between head and loss (rows, casts, temperatures, a softcap) stay deferred: `STAYS`. Any other
operation computes the tensor, once, and continues with it. Readers of the same object see in-place work; reading an
older view of the logits then is an error, because nothing may be silently wrong.

Not possible: `isinstance(logits, torch.Tensor)` is False. Code that insists on a tensor gets `logits.tensor()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fx_passes.graph.user_lines import skip_folder
from slime_compile.deferred import sharded
from slime_compile.deferred.autograd_functions import within_function
from slime_compile.deferred.expressions import (
    Applied,
    Expression,
    Product,
    is_read,
    is_sharded,
    packed_transpose,
    storage_of,
)
from slime_compile.deferred.methods import (
    CASTS,
    CHANGING,
    FACTS,
    FLAGS,
    FORWARDED,
    FUNCTIONS,
    IN_PLACE,
    NEW_MEMORY,
    STAYING_OPERATORS,
    STAYS,
    SUMS,
    changes,
    is_change,
)

__all__ = ["DeferredLogits", "with_tensors"]

skip_folder(str(Path(__file__).parent))  # a report names the line reading the logits


class _Memory:
    """Shared by a tensor and its views: the number of its changes."""

    def __init__(self) -> None:
        self.version = 0


@dataclass(eq=False, repr=False)
class DeferredLogits:
    """Lazy logits, returned by a head after `slime_compile.defer_logits`.

    They have the methods and attributes of a tensor. Selecting rows, casting and scaling stay lazy; other operations
    compute the logits, once. Exception: `isinstance(logits, torch.Tensor)` is False, so code testing for a tensor
    needs `logits.tensor()`.

    They are a dataclass and a node of torch's pytrees, because DDP and FSDP search a module's outputs for tensors.
    """

    expression: Expression
    memory: _Memory
    version: int = 0

    @classmethod
    def of(cls, expression: Expression) -> DeferredLogits:
        return cls(expression, _Memory())

    __array_priority__ = Tensor.__array_priority__  # numpy's numbers leave operators to it

    # ---- the tensor

    def tensor(self) -> Tensor:
        """The logits as a tensor; in eager code computed once and kept.

        Raises:
            RuntimeError: the logits can no longer be computed as on their line, for example after a change of the
                weight. The message gives the reason.
        """
        self._check_fresh()
        if self.expression.requires_grad and within_function():
            raise RuntimeError(
                "an autograd.Function must be given logits as a tensor, got deferred logits, and autograd does not "
                "see those. Call it with logits.tensor(), or compile slime_compile.with_tensors(loss): the matmul is in the graph "
                "all the same"
            )
        return self.expression.tensor()

    def _check_fresh(self) -> None:
        if self.version != self.memory.version:
            raise RuntimeError(
                "deferred logits must not be read after an in-place change through another view of them. "
                "Read the changed view, change it out of place (logits / t instead of logits.div_(t)), "
                "or call .tensor() on the logits first"
            )

    # ---- what stays deferred

    def _apply(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A method without effect on the logits themselves."""
        self._check_fresh()
        if name != "__getitem__":
            args = tuple(tuple(each) if isinstance(each, list) else each for each in args)
        if name in SUMS:
            args = tuple(_uncomputed(each) for each in args)
        if self.expression.kept is not None or not _replays(name, args, kwargs):
            return getattr(self.tensor(), name)(*_tensors(args), **_tensors(dict(kwargs)))
        if name == "contiguous" and not args and not kwargs:
            product = self._packed()
            if product is not None:
                return DeferredLogits.of(product)
        applied = Applied.of(self.expression, name, args, kwargs)
        made = DeferredLogits.of(applied)
        if torch.compiler.is_compiling():
            shared = name not in NEW_MEMORY
        else:
            vars(made)["_like"] = applied.on_meta(self._like)
            shared = storage_of(made._like) == storage_of(self._like)
        if shared:
            made.memory, made.version = self.memory, self.version
        return made

    def _packed(self) -> Product | None:
        """Rows in another order, as a product of their own: a head's matmul may compute it in chunks."""
        if torch.compiler.is_compiling() or self._like.is_contiguous():
            return None
        return packed_transpose(self.expression)

    def _change(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A method changing the logits in place."""
        self._check_fresh()
        given = (_tensors(args), _tensors(dict(kwargs)))
        compiling = torch.compiler.is_compiling()
        partly = _has_values(self.expression)  # this may be a view of a value in eager code
        if self.expression.kept is not None or (not compiling and (partly or name not in IN_PLACE)):
            getattr(self.tensor(), name)(*given[0], **given[1])
            return self
        if partly or name not in (*IN_PLACE, "__setitem__"):
            raise RuntimeError(
                f"in a compiled function deferred logits must not be changed by `{name}`; "
                "call the out-of-place method, or give the function logits.tensor()"
            )
        copies = name == "__setitem__"
        plain = name if copies else IN_PLACE[name]
        self.expression = Applied.of(self.expression, plain, *given, copies)
        self.memory.version += 1
        self.version = self.memory.version
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Like `Tensor.to`. A cast stays lazy; a move to another device computes the logits."""
        self._check_fresh()
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        there = probe.to(*_tensors(args), **_tensors(kwargs))
        if there.device != probe.device or "memory_format" in kwargs:
            return self.tensor().to(*_tensors(args), **_tensors(kwargs))
        if there.dtype != probe.dtype:
            return self._apply("to", (there.dtype,), {})
        return self if there is probe else self._apply("clone", (), {})

    def type(self, dtype: Any = None, **kwargs: Any) -> Any:
        """Like `Tensor.type`. A cast to a `torch.dtype` stays lazy; every other call computes the logits."""
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        return self.tensor().type(dtype, **kwargs)

    # ---- what is known without computing

    @functools.cached_property
    def _like(self) -> Tensor:
        """On the meta device: shape, strides, dtype."""
        return self.expression.empty()

    @property
    def device(self) -> torch.device:
        return self.expression.device

    @property
    def requires_grad(self) -> bool:
        return self.expression.requires_grad

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        if self.expression.kept is not None:
            return repr(self.expression.kept)
        shape, dtype = list(self.shape), self.dtype
        return f"DeferredLogits({shape}, dtype={dtype}, device='{self.device}', not computed)"

    # ---- everything else

    def __getattr__(self, name: str) -> Any:
        if name in sharded.FACTS or name in sharded.METHODS:
            return self._of_shards(name)
        if not hasattr(Tensor, name) or (name[:2] == "__" and name != "__cuda_array_interface__"):
            raise AttributeError(f"'DeferredLogits' object has no attribute '{name}'")
        if callable(getattr(Tensor, name)) and is_change(name):
            return functools.partial(_called, self, name)
        if torch.compiler.is_compiling():
            return getattr(self.tensor(), name)
        self._check_fresh()
        if name in FACTS:
            return getattr(self._like if self.expression.kept is None else self.tensor(), name)
        if name == "is_leaf":
            return not self.requires_grad
        if name in FLAGS:
            return getattr(torch.empty(0, dtype=self.dtype, device=self.device), name)
        if callable(getattr(Tensor, name)):
            return functools.partial(_called, self, name)
        return getattr(self.tensor(), name)

    def _of_shards(self, name: str) -> Any:
        """A DTensor's attributes beyond a tensor's."""
        product = self.expression
        if not is_sharded(product):
            raise AttributeError(f"'DeferredLogits' object has no attribute '{name}'")
        if not isinstance(product, Product) or product.kept is not None:
            return getattr(self.tensor(), name)
        if name == "placements":
            return sharded.placements_of(product.hidden, product.weight)
        if name == "device_mesh":
            return getattr(product.weight, name)
        return self._redistributed if name == "redistribute" else getattr(self.tensor(), name)

    def _redistributed(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> Any:
        """`ColwiseParallel` asks for Shard(-1), their own placement."""
        same = device_mesh in (None, self.device_mesh) and not options.keys() - {"async_op"}
        if same and sharded.are_same(placements, self.placements, self.dim()):
            return self
        return self.tensor().redistribute(device_mesh, placements, **options)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Tensor, name) and name not in ("version", "expression", "memory"):
            setattr(self.tensor(), name, value)
        else:
            object.__setattr__(self, name, value)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.autograd.grad:
            for each in (args, *given.values()):
                _check_differentiated(each)
        if func in FUNCTIONS and args and isinstance(args[0], cls) and "out" not in given:
            return args[0]._apply(FUNCTIONS[func], args[1:], given)
        if torch.compiler.is_compiling() and changes(func, args, given):
            raise RuntimeError(
                "in a compiled function deferred logits must not be given to a function changing its arguments in place; "
                "call the out-of-place function"
            )
        return func(*_tensors(args), **_tensors(given))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensor().unbind(0))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._change("__setitem__", (index, value), {})

    def __itruediv__(self, other: Any) -> Any:
        return self._change("div_", (other,), {})

    def __imul__(self, other: Any) -> Any:
        return self._change("mul_", (other,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().__reduce_ex__(protocol)

    __hash__ = object.__hash__


def with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function`: it gets tensors in place of lazy logits.

    For a loss you cannot edit, with an `autograd.Function` inside (such as vocabulary-parallel ones). Under
    torch.compile the matmul is still in the graph.

    Examples:
        >>> loss_fn = torch.compile(slime_compile.with_tensors(loss_fn), backend="slime_fused")
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*_tensors(args), **_tensors(kwargs))

    return call


def _check_unread(logits: DeferredLogits, what: str) -> None:
    if is_read(logits.expression):
        raise RuntimeError(
            f"{what} must see deferred logits before a compiled function reads them, because that function computes them itself. "
            "Call it before the loss, or give the loss logits.tensor()"
        )


def _check_differentiated(value: Any) -> None:
    if isinstance(value, DeferredLogits):
        _check_unread(value, "torch.autograd.grad")
    elif isinstance(value, tuple | list):
        for each in value:
            _check_differentiated(each)


def _called(logits: DeferredLogits, name: str, *args: Any, **kwargs: Any) -> Any:
    if name in ("register_hook", "retain_grad"):
        _check_unread(logits, name)
    if is_change(name):
        return logits._change(name, args, kwargs)
    return getattr(logits.tensor(), name)(*_tensors(args), **_tensors(kwargs))


def _replays(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the method may be called later: on the same arguments, and with a result of known shape."""
    given = [part for each in (*args, *kwargs.values()) for part in _parts(each)]
    return all(_replays_with(name, each) for each in given)


def _replays_with(name: str, given: Any) -> bool:
    """False for arguments that may change later without notice: lists, numpy's arrays, slices of tensors."""
    if isinstance(given, Tensor):
        if name != "__getitem__":
            return name in ("div", "mul")
        return given.dim() > 0 and given.dtype not in (torch.bool, torch.uint8)
    if isinstance(given, Product | Applied):
        return True
    if isinstance(given, slice):
        return all(_is_constant(each) for each in (given.start, given.stop, given.step))
    if isinstance(given, bool):
        return name != "__getitem__"
    return given is Ellipsis or _is_constant(given)


def _uncomputed(value: Any) -> Any:
    """The expression of deferred logits; of computed ones the tensor."""
    if not isinstance(value, DeferredLogits):
        return value
    value._check_fresh()
    return value.tensor() if _has_values(value.expression) else value.expression


def _is_constant(value: Any) -> bool:
    if value is None or isinstance(value, str | torch.dtype | torch.SymInt | torch.memory_format):
        return True
    return isinstance(value, Number)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _tensors(value: Any) -> Any:
    """`value` with the tensors of deferred logits in it."""
    if isinstance(value, DeferredLogits):
        return value.tensor()
    if type(value) in (tuple, list):
        return type(value)(_tensors(each) for each in value)
    if type(value) is dict:
        return {key: _tensors(each) for key, each in value.items()}
    return value


def _has_values(expression: Expression | None) -> bool:
    """Whether eager code has computed a part of `expression`: it may be a view of that."""
    if expression is None or expression.kept is not None:
        return expression is not None
    return isinstance(expression, Applied) and any(map(_has_values, expression.operands()))


# ---- methods by name ------------------------------------------------------------------------------------------------


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.tensor(), name)(*_tensors(args), **_tensors(kwargs))

    return method


def _staying(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return self._apply(name, args, kwargs)

    return method


def _summed(name: str) -> Callable[..., Any]:
    dunder = f"__{name}__"

    def method(self: DeferredLogits, other: Any) -> Any:
        if isinstance(other, DeferredLogits):
            return self._apply(name, (other,), {})
        return getattr(self.tensor(), dunder)(other)

    return method


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return self.to(dtype, *args, **kwargs)

    return method


def _changing(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return self._change(name, args, kwargs)

    return method


def _define() -> None:
    made: dict[str, Callable[..., Any]] = {}
    for name in FORWARDED:
        dunder = f"__{name}__"
        if hasattr(Tensor, dunder):
            made[dunder] = _forwarded(dunder)
    made |= {name: _staying(name) for name in STAYS}
    made |= {f"__{name}__": _summed(name) for name in SUMS}
    made |= {name: _staying(method) for name, method in STAYING_OPERATORS.items()}
    made |= {name: _cast(dtype) for name, dtype in CASTS.items()}
    made |= {f"__{name}__": _changing(f"__{name}__") for name in CHANGING}
    made |= {name: _changing(name) for name in IN_PLACE}
    for name, method in made.items():
        method.__name__ = name
        setattr(DeferredLogits, name, method)


_define()
