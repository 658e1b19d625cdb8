"""The fused operators: schema, fake kernels, dispatch; importing this module registers them.

The operators are internal: the rewritten joint graph holds both directions, so they have no derivative and their
outputs never require grad. Differentiable code calls `slime_compile.rl.log_probs.log_probs_and_entropy`.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slime_compile.ops import cpu, holders, reference
from slime_compile.ops.checks import (
    check_alone,
    check_grad,
    check_result_dtype,
    check_stats,
    check_writable,
)
from slime_compile.ops.held_by import variables
from slime_compile.ops.reference import compute_dtype
from slime_compile.ops.regions import on_call, placed, was_under_hooks

__all__ = ["row_grad", "row_grad_", "row_grad_over", "row_stats"]

Stats = tuple[Tensor, Tensor, Tensor, Tensor]

# ---- schema -------------------------------------------------------------------------------------------------------

# Lives as long as the module: its end would undo the operators. (The class has no types.)
_library: Any = cast(Any, torch.library).Library("slime_fused", "DEF")

# Any strides of x are read as they are, so inductor must not copy x for a layout.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library.define(
    "row_stats(Tensor x, Tensor? scale, float factor, str region, *, bool mean=True, bool total=True)"
    " -> (Tensor peak, Tensor log_sum, Tensor mean, Tensor total)",
    tags=_TAGS,
)
_library.define(
    "row_grad(Tensor x, Tensor terms, Tensor affine, Tensor index, Tensor weight,"
    " bool softmax, ScalarType dtype, str region) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "row_grad_(Tensor(a!) x, Tensor terms, Tensor affine, Tensor index, Tensor weight,"
    " bool softmax, str region, *, Tensor[]? after=None) -> ()",
    tags=_TAGS,
)
# Its result may be x's memory; that is not declared: NOTE [What is decided at run time] in fx_passes/inplace.py.
_library.define(
    "row_grad_over(Tensor x, Tensor terms, Tensor affine, Tensor index, Tensor weight,"
    " bool softmax, str owner, str region, *, str place='', Tensor[]? others=None, Tensor[]? after=None,"
    " bool strided=False) -> Tensor",
    tags=_TAGS,
)
# Its result may be x's memory; that is not declared either. No other node of the graph reads x.
_library.define("writable(Tensor x) -> Tensor", tags=_TAGS)


# ---- fake kernels -------------------------------------------------------------------------------------------------


def _fake_row_stats(
    x: Tensor,
    scale: Tensor | None,
    factor: float,
    region: str,
    *,
    mean: bool = True,
    total: bool = True,
) -> Stats:
    check_stats(x, scale)

    def rows() -> Tensor:
        return x.new_empty([*x.shape[:-1], 1], dtype=compute_dtype(x.dtype))

    return rows(), rows(), rows(), rows()


def _fake_row_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    dtype: torch.dtype,
    region: str,
) -> Tensor:
    check_grad(x, terms, affine, index, weight, softmax)
    check_result_dtype(dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _fake_row_grad_(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    region: str,
    *,
    after: Sequence[Tensor] | None = None,
) -> None:
    check_grad(x, terms, affine, index, weight, softmax)


def _fake_row_grad_over(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    owner: str,
    region: str,
    *,
    place: str = "",
    others: Sequence[Tensor] | None = None,
    after: Sequence[Tensor] | None = None,
    strided: bool = False,
) -> Tensor:
    check_grad(x, terms, affine, index, weight, softmax)
    return _beside(x, strided)


def _fake_writable(x: Tensor) -> Tensor:
    return _beside(x, strided=True)


def _beside(x: Tensor, strided: bool) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride()) if strided else x.new_empty(x.shape)


# ---- dispatch -----------------------------------------------------------------------------------------------------


class Kernels(Protocol):
    """The interface of `reference.py`, `cpu.py` and `cuda.py`: the operators without `region`, arguments checked."""

    def row_stats(
        self, x: Tensor, scale: Tensor | None, factor: float, mean: bool, total: bool
    ) -> Stats: ...

    def row_grad(
        self,
        x: Tensor,
        terms: Tensor,
        affine: Tensor,
        index: Tensor,
        weight: Tensor,
        softmax: bool,
        dtype: torch.dtype,
    ) -> Tensor: ...

    def row_grad_(
        self,
        x: Tensor,
        terms: Tensor,
        affine: Tensor,
        index: Tensor,
        weight: Tensor,
        softmax: bool,
    ) -> None: ...


@cache
def _cuda_kernels() -> Kernels:
    if importlib.util.find_spec("triton") is None:
        return cast(Kernels, reference)
    return cast(Kernels, importlib.import_module("slime_compile.ops.cuda"))


def kernels_of(x: Tensor) -> Kernels:
    if x.device.type == "cpu":
        return cast(Kernels, cpu)
    if x.dtype == torch.float64:
        return cast(Kernels, reference)
    return _cuda_kernels()


# Without autograd below the operators: x may require grad, see `_register`.
@torch.no_grad()
def _row_stats(
    x: Tensor,
    scale: Tensor | None,
    factor: float,
    region: str,
    *,
    mean: bool = True,
    total: bool = True,
) -> Stats:
    check_stats(x, scale)
    on_call(region)
    return kernels_of(x).row_stats(x, scale, factor, mean, total)


@torch.no_grad()
def _row_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    dtype: torch.dtype,
    region: str,
) -> Tensor:
    check_grad(x, terms, affine, index, weight, softmax)
    check_result_dtype(dtype)
    on_call(region)
    return kernels_of(x).row_grad(x, terms, affine, index, weight, softmax, dtype)


@torch.no_grad()
def _row_grad_(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    region: str,
    *,
    after: Sequence[Tensor] | None = None,
) -> None:
    check_grad(x, terms, affine, index, weight, softmax)
    check_writable(x)
    on_call(region)
    _overwrite(x, terms, affine, index, weight, softmax)


def _row_grad_over(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    owner: str,
    region: str,
    *,
    place: str = "",
    others: Sequence[Tensor] | None = None,
    after: Sequence[Tensor] | None = None,
    strided: bool = False,
) -> Tensor:
    seen = holders.counts(sys.getrefcount(x), x)  # before all else
    if holders.probe.seen is not None:
        holders.probe.seen.append(seen)
        return terms
    if owner == "caller" and was_under_hooks(place):
        owner = "anyone"
    reason = why_beside(x, seen, owner, others or (), strided)
    check_grad(x, terms, affine, index, weight, softmax)
    on_call(region)
    placed(
        place, reason, partial(holders_named, reason, x)
    )  # no closure, because it would reference x
    with torch.no_grad():
        if not reason:
            _overwrite(x, terms, affine, index, weight, softmax)
            return x.detach()
        made = kernels_of(x).row_grad(x, terms, affine, index, weight, softmax, x.dtype)
        return _beside(x, strided).copy_(made) if strided else made


def _writable(x: Tensor) -> Tensor:
    """`x`, saved by autograd for this graph alone, in memory that may be overwritten."""
    again = holders.keeps_graph() or _is_recorded(x)
    return _beside(x, strided=True).copy_(x) if again else x.detach()


def _is_recorded(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def why_beside(
    x: Tensor, seen: holders.Counts, owner: str, others: Sequence[Tensor], strided: bool
) -> str:
    """Why the result is new memory, or "".

    Raises:
        RuntimeError: the caller's logits, which may be overwritten, are a leaf, or another input is a view of them.
    """
    if _is_recorded(x):
        return "a CUDA graph is being recorded"
    if owner == "caller":
        if holders.keeps_graph():
            return holders.RETAINED
        check_writable(x)
        check_alone(x, others)
        return _other_layout(x, strided)
    reason = holders.why_not(x, seen, sys._getframe(1))
    if owner == "graph" and reason.startswith(holders.UNCLEAR):
        reason = ""  # torch says that nothing else references them; code that has read autograd's saved tensors still may
    return reason or _other_layout(x, strided)


def holders_named(reason: str, x: Tensor) -> str:
    """The reason, with the user's variables behind it."""
    names: list[str] = []
    if reason in (holders.PYTHON, holders.MEMORY):
        with contextlib.suppress(Exception):  # errors of a user's object under inspection
            names = variables(x)
    return f"{reason} ({', '.join(names)})" if names else reason


def _other_layout(x: Tensor, strided: bool) -> str:
    return "" if strided or x.is_contiguous() else "their strides are not those of the gradient"


def _overwrite(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    kernels_of(x).row_grad_(x, terms, affine, index, weight, softmax)
    # Kernels may write by address, unseen by autograd: readers of a saved x must get an error, not other values.
    torch.autograd.graph.increment_version(x)


def register(library: Any, name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Gives an operator defined by `library` its kernel on all devices, its fake kernel, and no derivative."""
    torch.library.register_fake(f"slime_fused::{name}", fake, lib=library)
    for device in ("CPU", "CUDA"):
        library.impl(name, kernel, device)
    # No derivative: go on to the kernel, and leave the outputs without requires_grad.
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")


register(_library, "row_stats", _row_stats, _fake_row_stats)
register(_library, "row_grad", _row_grad, _fake_row_grad)
register(_library, "row_grad_", _row_grad_, _fake_row_grad_)
register(_library, "row_grad_over", _row_grad_over, _fake_row_grad_over)
register(_library, "writable", _writable, _fake_writable)

row_stats = torch.ops.slime_fused.row_stats.default
row_grad = torch.ops.slime_fused.row_grad.default
row_grad_ = torch.ops.slime_fused.row_grad_.default
row_grad_over = torch.ops.slime_fused.row_grad_over.default
