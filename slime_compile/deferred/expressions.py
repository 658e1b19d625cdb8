"""The value behind deferred logits: a product of hidden states and a weight, and the operations on it since.

Entry points: `Product`, and `Applied`, a tensor method on another expression. `tensor()` computes the value. Eager code
computes it once. In a function being compiled each call computes it, because a kept value would leave the graph
(`fx_passes.equal_heads` merges equal matmuls).

An expression never changes. It computes the value that the program would have had at its line: with that line's
gradient mode and autocast. If an operand has been overwritten since, it raises.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

__all__ = [
    "Applied",
    "Expression",
    "Product",
    "changed_copy",
    "is_computing",
    "is_read",
    "is_sharded",
    "packed_transpose",
    "storage_of",
]

Expression: TypeAlias = "Product | Applied"


@dataclass(eq=False)
class Product:
    """`F.linear(hidden, weight, bias)` at a line of the model.

    Attributes:
        hidden: [..., D]
        weight: [V, D]
        bias: [V] or None
        cast: the dtype of autocast at that line, or None.
        grad: whether autograd recorded at that line.
        expired: an optimizer has changed the weight since.
        read: a compiled function has computed them with gradients, in its own graph.
        kept: the logits, once eager code needed them.
        told: called when they are computed in eager code.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    cast: torch.dtype | None
    grad: bool
    expired: bool = False
    read: bool = False
    kept: Tensor | None = None
    told: Callable[[], None] | None = None
    versions: tuple[int, ...] = ()
    kept_version: int = 0

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, told: Callable[[], None] | None
    ) -> Product:
        """As of this line."""
        device = hidden.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if torch.compiler.is_compiling():
            return cls(hidden, weight, bias, cast, torch.is_grad_enabled())
        weight, bias = _reachable(weight), None if bias is None else _reachable(bias)
        if not hidden.requires_grad:
            hidden = hidden.detach()  # whatever becomes of it later
        made = cls(hidden, weight, bias, cast, torch.is_grad_enabled(), told=told)
        made.versions = made.read_versions()
        _watch(made)
        return made

    def of_hidden(self, hidden: Tensor) -> Product:
        """The same product of another tensor with the same numbers; changes of the weight since then still count."""
        made = replace(self, hidden=hidden)
        made.versions = self.versions and (_version(hidden), *self.versions[1:])
        _watch(made)
        return made

    def detached(self) -> Product:
        bias = None if self.bias is None else self.bias.detach()
        made = replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)
        _watch(made)
        return made

    def transposed(self, first: int, second: int) -> Product:
        """With two dimensions of its rows exchanged: the same product of hidden with them exchanged."""
        self._check()
        with torch.set_grad_enabled(self.grad):
            return self.of_hidden(self.hidden.transpose(first, second).contiguous())

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def requires_grad(self) -> bool:
        return self.grad and any(each.requires_grad for each in self._read())

    def tensor(self) -> Tensor:
        """The logits [..., V].

        Raises:
            RuntimeError: an operand has been overwritten, or freed, since the head ran.
        """
        if self.kept is not None:
            return self.kept
        if self.expired:
            raise RuntimeError(_CHANGED.format("`weight`"))
        if torch.compiler.is_compiling():
            if self.grad and torch.is_grad_enabled():
                self.read = True
            return _in_mode(self._computed, self.grad)
        self._check()
        if self.told is not None:
            self.told()
        self.kept = _once(self._computed, self.grad)
        self.kept_version = self.kept._version
        return self.kept

    def empty(self) -> Tensor:
        """On the meta device."""
        dtype = self._operand(self.hidden).dtype
        shape = (*self.hidden.shape[:-1], self.weight.shape[0])
        return torch.empty(shape, dtype=dtype, device="meta")

    def _computed(self) -> Tensor:
        operands = [self._operand(each) for each in self._read()]
        if not torch.is_autocast_enabled(self.hidden.device.type):
            return F.linear(*operands)
        with torch.autocast(self.hidden.device.type, enabled=False):
            return F.linear(*operands)

    def _operand(self, each: Tensor) -> Tensor:
        """The operand of a matmul under autocast."""
        if not self.grad and each.requires_grad:
            each = each.detach()
        return each if self.cast is None or each.dtype == torch.float64 else each.to(self.cast)

    def _read(self) -> list[Tensor]:
        every = (self.hidden, self.weight, self.bias)
        return [each for each in every if each is not None]

    def parameters(self) -> list[Tensor]:
        return self._read()[1:]

    def read_versions(self) -> tuple[int, ...]:
        return tuple(_version(each) for each in self._read())

    def _check(self) -> None:
        names = ("hidden", "weight", "bias")
        for name, each in zip(names, self._read(), strict=False):
            if each.numel() and each.untyped_storage().nbytes() == 0:
                raise RuntimeError(_FREED.format(name, list(each.shape)))
        if self.versions:
            for name, then, now in zip(names, self.versions, self.read_versions(), strict=False):
                if then != now:
                    raise RuntimeError(_CHANGED.format(f"`{name}`"))


_CHANGED = (
    "deferred logits must be read before their inputs change: {} has been overwritten since the head ran "
    "(optimizer.step, load_state_dict, an operator in place). Read them before, or keep `logits.tensor()`"
)
_FREED = (
    "`{}` must have memory when deferred logits are read, got shape {} over a storage of 0 bytes. Has FSDP sharded "
    "it again? Keep the head in the root's group, or its parameters gathered until backward "
    "(fully_shard(..., reshard_after_forward=False))"
)


def _reachable(parameter: Tensor) -> Tensor:
    """A view: DDP looks for unused parameters behind the `grad_fn` of a model's outputs, and a leaf has none.

    Detached if no gradient goes through it at that line, whatever happens to the parameter later.
    """
    used = parameter.requires_grad and torch.is_grad_enabled()
    return parameter.view_as(parameter) if used else parameter.detach()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class Applied:
    """`getattr(before, name)(*args, **kwargs)`; with `copies`, on a copy, because the method changes it."""

    before: Expression | None
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    copies: bool = False
    grad: bool = True
    kept: Tensor | None = None
    expired: bool = False
    versions: tuple[int, ...] = ()
    kept_version: int = 0

    @classmethod
    def of(
        cls,
        before: Expression,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        copies: bool = False,
    ) -> Applied:
        grad = torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # no version counter shows a change
            kwargs = {key: _as_now(each) for key, each in kwargs.items()}
            return cls(before, name, tuple(_as_now(each) for each in args), kwargs, copies, grad)
        made = cls(before, name, args, dict(kwargs), copies, grad)
        made.versions = made.read_versions()
        _watch(made)
        return made

    @property
    def device(self) -> torch.device:
        if self.before is None:
            assert self.kept is not None
            return self.kept.device
        return self.before.device

    @property
    def requires_grad(self) -> bool:
        if self.kept is not None:
            return self.kept.requires_grad
        assert self.before is not None
        given = (*self.operands(), *self._given())
        return self.grad and self.name != "detach" and any(each.requires_grad for each in given)

    def operands(self) -> list[Expression]:
        """The deferred logits it is computed from; none once it is computed."""
        every = (self.before, *self.args)
        return [each for each in every if isinstance(each, Product | Applied)]

    def tensor(self) -> Tensor:
        """The method's result; see `Product.tensor`."""
        if self.kept is not None:
            return self.kept
        if self.expired:
            raise RuntimeError(_CHANGED.format(f"an argument of `{self.name}`"))
        if torch.compiler.is_compiling():
            return _in_mode(self._computed, self.grad)
        assert self.before is not None
        if self.versions != self.read_versions():
            raise RuntimeError(_CHANGED.format(f"an argument of `{self.name}`"))
        for each in self.operands():
            if each.tensor()._version != each.kept_version:
                raise RuntimeError(_CHANGED.format(f"the tensor of `{self.name}`"))
        self.kept = _once(self._computed, self.grad)
        self.kept_version = self.kept._version
        self.before, self.args = (
            None,
            (),
        )  # other readers of the full logits have their own reference
        return self.kept

    def empty(self) -> Tensor:
        """On the meta device."""
        assert self.before is not None
        return self.on_meta(self.before.empty())

    def on_meta(self, before: Tensor) -> Tensor:
        """The method's result on the meta tensor `before`: shape, strides, whether it is a view of it."""
        args = [_as_meta(each) for each in self.args]
        kwargs = {key: _as_meta(each) for key, each in self.kwargs.items()}
        return changed_copy(before, self.name, args, kwargs, self.copies)

    def _computed(self) -> Tensor:
        assert self.before is not None
        args = [
            each.tensor() if isinstance(each, Product | Applied) else each for each in self.args
        ]
        return changed_copy(self.before.tensor(), self.name, args, self.kwargs, self.copies)

    def parameters(self) -> list[Tensor]:
        return self._given()

    def read_versions(self) -> tuple[int, ...]:
        return tuple(_version(each) for each in self._given())

    def _given(self) -> list[Tensor]:
        given = (*self.args, *self.kwargs.values())
        flat = [part for each in given for part in (each if isinstance(each, tuple) else (each,))]
        return [each for each in flat if isinstance(each, Tensor)]


def is_read(expression: Expression | None) -> bool:
    """Whether a compiled function has computed it with gradients, and eager code has no value of it."""
    if expression is None or expression.kept is not None:
        return False
    if isinstance(expression, Applied):
        return any(map(is_read, expression.operands()))
    return expression.read


def is_sharded(expression: Expression) -> bool:
    """Whether its tensor is a DTensor."""
    if expression.kept is not None:
        return isinstance(expression.kept, DTensor)
    if isinstance(expression, Product):
        return isinstance(expression.weight, DTensor)
    return any(map(is_sharded, expression.operands()))


def packed_transpose(expression: Expression) -> Product | None:
    """The result of `contiguous()` on a product [s, b, V] transposed to [b, s, V] (Megatron's), if it is one."""
    if not isinstance(expression, Applied) or expression.name != "transpose" or expression.kwargs:
        return None
    product, rank = expression.before, len(expression.args) and expression.empty().dim()
    if not isinstance(product, Product) or product.kept is not None:
        return None
    first, second = (dim % rank for dim in expression.args)
    return None if rank - 1 in (first, second) else product.transposed(first, second)


def changed_copy(
    tensor: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], copies: bool
) -> Tensor:
    """A method's result, or a copy of `tensor` changed by it."""
    if not copies:
        made: Tensor = getattr(tensor, name)(*args, **kwargs)
        return made
    copy = tensor.clone()
    getattr(copy, name)(*args, **kwargs)
    return copy


def _as_now(each: Any) -> Any:
    if isinstance(each, tuple):
        return tuple(_as_now(part) for part in each)
    return each.clone() if isinstance(each, Tensor) else each


def _as_meta(each: Any) -> Any:
    if isinstance(each, Product | Applied):
        return each.empty()
    if isinstance(each, tuple):
        return tuple(_as_meta(part) for part in each)
    return each.to("meta") if isinstance(each, Tensor) else each


def _in_mode(compute: Callable[[], Tensor], grad: bool) -> Tensor:
    """In the gradient mode of the deferred line."""
    if grad == torch.is_grad_enabled():
        return compute()
    with torch.set_grad_enabled(grad):
        return compute()


def _once(compute: Callable[[], Tensor], grad: bool) -> Tensor:
    """In the gradient mode of the deferred line, and with its own saved tensors.

    With a reader inside a checkpoint, the kept value must not be part of the checkpoint: it is computed only once. Nor
    is it a tensor of inference mode, because autograd would refuse it afterwards.
    """
    with ExitStack() as stack:
        stack.enter_context(_computing())
        contexts: list[AbstractContextManager[Any]] = [torch.set_grad_enabled(grad)]
        if torch.is_inference_mode_enabled():
            contexts.insert(0, torch.inference_mode(False))
        if grad:
            contexts.append(saved_tensors_hooks(_same, _same))
        for each in contexts:
            stack.enter_context(each)
        return compute()


_in_thread = threading.local()


@contextmanager
def _computing() -> Iterator[None]:
    before = is_computing()
    _in_thread.computing = True
    try:
        yield
    finally:
        _in_thread.computing = before


def is_computing() -> bool:
    """Whether this thread computes logits now, perhaps below a head's forward."""
    return getattr(_in_thread, "computing", False)


def _same(tensor: Tensor) -> Tensor:
    return tensor


# NOTE [What an optimizer changes]
# In eager code an expression compares the versions of its operands. A compiled function cannot: Dynamo has no guard on
# a tensor's version. It guards on `expired`, set here after every step of an optimizer: if a version has changed, or if
# the optimizer had a gradient of an operand (it may write `p.data`, which has no version).

_alive: weakref.WeakSet[Expression] = weakref.WeakSet()
_watching = False


def _watch(made: Expression) -> None:
    """Not for an expression made by a compiled function: it has no versions to compare."""
    global _watching
    if not made.versions:
        return
    _alive.add(made)
    if not _watching:
        register_optimizer_step_post_hook(_after_step)
        _watching = True


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    changed = {storage_of(p) for p in every if p.grad is not None and _is_plain(p)}
    for made in list(_alive):
        written = any(storage_of(each) in changed for each in made.parameters())
        made.expired |= written or made.versions != made.read_versions()


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, Parameter)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
