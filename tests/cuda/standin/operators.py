"""ATen's operators on the stand-in: every one that has a CUDA kernel is computed by its CPU kernel. Entry: `install`.

What torch's own kernels would launch is not computed, so an operator that neither this nor a view covers would leave
whatever is in the memory; `counts.not_run` has the kernels of such.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.cuda.standin import NO_KERNELS, counts, graphs, half_softmax, kind
from tests.cuda.standin.memory import alias, is_cuda, new_like, tensors

# the host's work alone, or torch's way to wait for the device
KEPT = {
    "aten::_local_scalar_dense", "aten::record_stream", "aten::resize_", "aten::is_pinned", "aten::_pin_memory",
    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_", "aten::set_.source_Tensor",
    "aten::_nested_from_padded", "aten::_cudnn_init_dropout_state", "aten::_has_compatible_shallow_copy_type",
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::view_as_real",
    "aten::view_as_complex", "aten::_conj", "aten::is_set_to", "aten::squeeze", "aten::lift",
}  # fmt: skip
# the host waits for what they find
WAITS = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::repeat_interleave.Tensor", "aten::bincount", "aten::is_nonzero",
}  # fmt: skip
COMPOSITE = (
    "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional"
)  # fmt: skip
LARGE = 1 << 20
"""Elements from which an operator computes nothing in a run without kernels."""

_generators: dict[tuple[int, int], torch.Generator] = {}


def wait() -> None:
    torch.cuda.current_stream().synchronize()


# ---- one operator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """Called in the place of an operator's CUDA kernel."""

    op: Any
    name: str

    @cached_property
    def written(self) -> list[str]:
        """Names of the arguments that it writes to, in their order."""
        arguments = self.op._schema.arguments
        return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        counts.count(self.name)
        if self.name in WAITS:
            wait()
        if kind() == NO_KERNELS and _is_large((args, kwargs)):
            return self._without_values(args, kwargs)
        plain = tree_map(_on_cpu, (args, kwargs))
        plain[1].update({"pin_memory": False} if "pin_memory" in kwargs else {})
        if self.written:
            return self._in_place(args, kwargs, *plain)
        return self._fresh(args, kwargs, *plain)

    def _given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """What it writes to: these are its results."""
        names = [a.name for a in self.op._schema.arguments]
        by_name = {**dict(zip(names, args, strict=False)), **kwargs}
        return [by_name[name] for name in self.written]

    def _results(self, given: list[Any]) -> Any:
        if not self.op._schema.returns:
            return None
        return given[0] if len(given) == 1 else tuple(given)

    def _in_place(self, args: Any, kwargs: Any, plain: Any, plain_kwargs: Any) -> Any:
        given, made = self._given(args, kwargs), self._given(plain, plain_kwargs)

        def action() -> None:
            self._compute(plain, plain_kwargs)
            for mine, theirs in zip(tensors(given), tensors(made), strict=True):
                if mine.shape != theirs.shape:  # an `out` without elements, resized
                    mine.resize_(theirs.shape)
                    alias(mine).copy_(theirs)

        graphs.perform(action)
        return self._results(given)

    def _fresh(self, args: Any, kwargs: Any, plain: Any, plain_kwargs: Any) -> Any:
        """Its shapes may depend on values: while it is captured it is computed once, too, and that is dropped."""
        found, captured = self._compute(plain, plain_kwargs), graphs.is_captured()
        device = _device_of(args, kwargs)
        results = tree_map(lambda t: new_like(t, device) if isinstance(t, Tensor) else t, found)
        into = [alias(t) for t in tensors(results)]

        def action() -> None:
            values = self._compute(plain, plain_kwargs) if captured else found
            for mine, theirs in zip(into, tensors(values), strict=True):
                mine.copy_(theirs)

        graphs.perform(action)
        return results

    def _compute(self, args: Any, kwargs: Any) -> Any:
        types = [str(a.type) for a in self.op._schema.arguments]
        number = any(
            t == "Tensor" and isinstance(v, int | float) for t, v in zip(types, args, strict=False)
        )
        op = (
            self.op.overloadpacket if number else self.op
        )  # a number in a tensor's place, which another overload takes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return op(*args, **kwargs)

    def _without_values(self, args: Any, kwargs: Any) -> Any:
        if self.written:
            return self._results(self._given(args, kwargs))
        device = _device_of(args, kwargs)
        found = self.op(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        return tree_map(lambda t: new_like(t, device) if isinstance(t, Tensor) else t, found)


def _is_large(arguments: Any) -> bool:
    return any(t.numel() > LARGE for t in tensors(arguments))


def _device_of(args: Any, kwargs: Any) -> torch.device:
    found = next((t.device for t in tensors((args, kwargs)) if t.is_cuda), None)
    return found or kwargs.get("device") or torch.device("cuda", torch.cuda.current_device())


def _on_cpu(value: Any) -> Any:
    if is_cuda(value):
        return alias(value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return _generator(value) if isinstance(value, torch.Generator) else value


def _on_meta(value: Any) -> Any:
    """Numbers on the host stay, since a kernel reads them."""
    if isinstance(value, Tensor) and (value.is_cuda or value.dim()):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _generator(given: torch.Generator) -> torch.Generator:
    """The CPU's generator for one of the device, which goes on with its own numbers."""
    if given.device.type == "cpu":
        return given
    key = (id(given), given.initial_seed())
    if key not in _generators:
        _generators[key] = torch.Generator("cpu").manual_seed(given.initial_seed())
    return _generators[key]


# ---- copies -------------------------------------------------------------------------------------------------------


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Between a device and the host it waits, but for pinned memory where `non_blocking`."""
    counts.count("aten::copy_")
    if self.is_cuda != src.is_cuda:
        host = src if self.is_cuda else self
        if not non_blocking or not host.is_pinned():
            wait()
    if kind() == NO_KERNELS and self.numel() > LARGE:
        return self
    into, out_of = _on_cpu(self), _on_cpu(src)
    graphs.perform(lambda: into.copy_(out_of))
    return self


# ---- all of them --------------------------------------------------------------------------------------------------

_registered: list[Any] = []


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    _registered.append(library)
    special = {"copy_": copy_, **half_softmax.KERNELS}
    with _silent():  # one warning for each operator
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            short = name.removeprefix("aten::")
            op = _operator(short) if name.startswith("aten::") else None
            if op is not None and short not in special and _is_computed(name, op):
                library.impl(short, Operator(op, name), "CUDA", allow_override=True)
        for short, kernel in special.items():
            library.impl(short, kernel, "CUDA", allow_override=True)


def _operator(short: str) -> Any:
    packet, _, overload = short.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _is_computed(name: str, op: Any) -> bool:
    """Not a view, no new memory alone, and there is a kernel for the CPU."""
    if name in KEPT or name.startswith("aten::empty"):
        return False
    if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, key) for key in ("CPU", *COMPOSITE))


@contextmanager
def _silent() -> Iterator[None]:
    """Without warnings, and what C++ prints to stderr."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(kept, 2)
        os.close(null)
        os.close(kept)
