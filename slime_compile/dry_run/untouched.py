"""State a dry run leaves unchanged: the user's tensors and objects, `.grad`, and random generators.

Entry point: `untouched`, around the call of the user's function.

NOTE [How a dry run changes nothing]
No operator gets a real tensor to write to. Dry runs replace the inputs of each graph by fake tensors (`fake`), and a
dispatch mode (`nothing_real`) does the same for Python code between graphs; a real tensor always has the same
fake one. Autograd's notes on a real tensor around an operator (its version, its history, `.grad`) are restored at the
end. So are assignments by Python code, also to `.data`; see `dry_run/reach.py`. Not seen: writes past torch's
operators, by NumPy or to a storage.
"""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from slime_compile.dry_run.reach import Reached
from slime_compile.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode, set_versions


@contextlib.contextmanager
def untouched(mode: FakeTensorMode, *reached: Any) -> Iterator["Untouched"]:
    """Inside, the user's function may be called on fake tensors; afterwards everything is as it was.

    Args:
        reached: the function and its arguments.
    """
    with _generators(), torch.set_grad_enabled(torch.is_grad_enabled()):
        kept = Untouched(mode, reached)
        try:
            kept.look()
            yield kept
        finally:
            kept.restore()


class Untouched:
    """The user's tensors, how they were, and the fake ones in their place."""

    def __init__(self, mode: FakeTensorMode, reached: Any):
        self.mode = mode
        self._tensors: dict[int, _State] = {}
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        self._device = _device_of(reached)
        self._reached = Reached(reached)

    def look(self) -> None:
        """Records the state of all reachable objects; tensors on "meta" are replaced there, see `_on`."""
        self._reached.look(self._see, lambda value: self._fake(value) if _is_meta(value) else value)

    def restore(self) -> None:
        """Everything is as it was noted."""
        self._reached.restore()
        with torch.no_grad():
            for state in self._tensors.values():
                state.restore()

    @contextlib.contextmanager
    def nothing_real(self) -> Iterator[None]:
        """From here on no operator sees a real tensor."""
        with self.mode, _NothingReal(self):
            yield

    def fake(self, values: Any) -> Any:
        """`values` with a fake tensor in the place of each real one."""
        return tree_map_only(Tensor, self._fake, values)

    def _fake(self, tensor: Tensor) -> Tensor:
        if _is_meta(tensor):
            if id(tensor) not in self._moved:
                self._moved[id(tensor)] = tensor, _on(self._device, self.mode, tensor)
            return self._moved[id(tensor)][1]
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        self._see(tensor)
        return self.mode.from_tensor(tensor, static_shapes=True)

    def is_moved(self, tensor: Tensor) -> bool:
        """Whether it stands for a tensor on "meta"."""
        return any(tensor is fake for _, fake in self._moved.values())

    def _see(self, tensor: Tensor) -> None:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = _State.of(tensor)


class _NothingReal(TorchDispatchMode):
    """On top of a fake mode. A fake mode alone computes for real if all tensors of a call are real."""

    def __init__(self, kept: Untouched):
        super().__init__()
        self._kept = kept

    @classmethod
    def is_infra_mode(cls) -> bool:  # Dynamo gives up under any other mode
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*self._kept.fake(args), **self._kept.fake(kwargs or {}))


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _State(NamedTuple):
    """How a tensor was.

    Attributes:
        data: the same memory, unless torch shows none.
        hooks: by attribute, what it had of them.
        version: -1 for an inference tensor.
    """

    tensor: Tensor
    data: Tensor | None
    version: int
    leaf: bool
    requires_grad: bool
    grad: Tensor | None
    hooks: dict[str, dict[int, Any]]

    @classmethod
    def of(cls, tensor: Tensor) -> "_State":
        leaf = tensor.is_leaf
        version = -1 if tensor.is_inference() else tensor._version
        grad = tensor.grad if leaf else None
        data = tensor.data if _memory(tensor) else None
        hooks = {name: dict(getattr(tensor, name, None) or {}) for name in _HOOKS}
        return cls(tensor, data, version, leaf, tensor.requires_grad, grad, hooks)

    def restore(self) -> None:
        tensor = self.tensor
        if self.data is not None and _memory(tensor) != _memory(self.data):
            tensor.data = self.data
        if self.leaf and not tensor.is_leaf:
            with contextlib.suppress(RuntimeError):  # of a view
                tensor.detach_()
        if self.leaf and tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad
        for name, before in self.hooks.items():
            now = getattr(tensor, name, None)
            if now is not None and now != before:
                now.clear()
                now.update(before)
        if self.version >= 0 and tensor._version != self.version:
            set_versions((tensor,), (self.version,))


def _memory(tensor: Tensor) -> Any:
    """Which elements of which storage it shows; None if it has no storage of its own."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


# ---- tensors on "meta" --------------------------------------------------------------------------------------------


def _is_meta(value: object) -> bool:
    plain = type(value) in (Tensor, torch.nn.Parameter, FakeTensor)
    return plain and isinstance(value, Tensor) and value.device.type == "meta"


def _device_of(values: Any) -> torch.device:
    """The first one other than "meta"."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    others = (each.device for each in tensors if each.device.type != "meta")
    return next(others, torch.device("cpu"))


def _on(device: torch.device, mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor like one on "meta": on "meta" torch lacks the derivative of some operators (of cross entropy's)."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, tensor.requires_grad)
        made.requires_grad_(tensor.requires_grad)
        with torch.enable_grad():
            return made if tensor.is_leaf else made.clone()


# ---- random numbers -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    """Torch's, Python's and NumPy's own."""
    numpy = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    state, numpys = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpys)
