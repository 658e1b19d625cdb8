"""The fused operators: schema, fake kernels, dispatch.

    slime_fused::row_stats   statistics of each row of scaled logits        one read of x
    slime_fused::row_grad    a full-vocabulary value in row normal form     one read of x, one write
    slime_fused::row_grad_   the same, written over x

docs/design.md ("The operators") says what they compute, `reference.py` says it in plain torch, `cpu.py` and `cuda.py`
do it fast. Importing this module registers the operators; it needs neither Triton nor a GPU.

The operators are internal: the rewritten joint graph holds both directions, so they have no derivative and their
outputs never require grad. Differentiable code calls `slime_compile.rl.log_probs.log_probs_and_entropy`.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import sym_or

from slime_compile.ops import cpu, reference

__all__ = ["on_call", "row_grad", "row_grad_", "row_stats", "seen_regions"]

Stats = tuple[Tensor, Tensor, Tensor, Tensor]

seen_regions: dict[str, int] = {}
"""Calls of each named region in this process, also of those that came out of a warm compile cache."""


def on_call(region: str) -> None:
    """Counts one call of `region`; the empty string is no region."""
    if region:
        seen_regions[region] = seen_regions.get(region, 0) + 1


# ---- schema -------------------------------------------------------------------------------------------------------

# Lives as long as the module: its end would undo the operators. (The class has no types.)
_library: Any = cast(Any, torch.library).Library("slime_fused", "DEF")

# Any strides of x are read as they are, so inductor must not copy x for a layout.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library.define(
    "row_stats(Tensor x, Tensor? scale, float factor, str region)"
    " -> (Tensor max, Tensor log_sum, Tensor mean, Tensor total)",
    tags=_TAGS,
)
_library.define(
    "row_grad(Tensor x, Tensor terms, Tensor affine, Tensor index, Tensor weight,"
    " bool softmax, ScalarType dtype, str region) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "row_grad_(Tensor(a!) x, Tensor terms, Tensor affine, Tensor index, Tensor weight,"
    " bool softmax, str region) -> ()",
    tags=_TAGS,
)


# ---- what must hold -----------------------------------------------------------------------------------------------

# Raises RuntimeError; under tracing a condition on symbolic sizes becomes a guard or a run-time assertion.
_check: Callable[[bool | torch.SymBool, Callable[[], str]], None] = torch._check


def _check_root(x: Tensor) -> None:
    _check(x.dim() > 0, lambda: "`x` must have shape [..., V], got a tensor without dimensions")
    _check(x.dtype.is_floating_point, lambda: f"`x` must have a floating dtype, got {x.dtype}")


def _check_scale(x: Tensor, scale: Tensor) -> None:
    rows = [*x.shape[:-1], 1]

    def message() -> str:
        return f"`scale` must be broadcastable to {rows}, got {list(scale.shape)}"

    _check(scale.dim() <= len(rows), message)
    for size, wanted in zip(reversed(scale.shape), reversed(rows), strict=False):
        _check(sym_or(size == 1, size == wanted), message)


def _check_rows(name: str, value: Tensor, rows: Sequence[int], last: Sequence[int | str]) -> None:
    """Checks the shape rows + last; a name instead of a number in `last` stands for any size."""
    wanted = [*rows, *last]
    fits = value.dim() == len(wanted)

    def message() -> str:
        sizes = ", ".join(map(str, wanted))
        return f"`{name}` must have shape [{sizes}], got {list(value.shape)}"

    _check(fits, message)
    for size, number in zip(value.shape, wanted, strict=True):
        if not isinstance(number, str):
            _check(size == number, message)


def _check_dtype(name: str, value: Tensor, dtype: torch.dtype) -> None:
    _check(value.dtype == dtype, lambda: f"`{name}` must have dtype {dtype}, got {value.dtype}")


def _check_grad(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    _check_root(x)
    rows, compute = x.shape[:-1], reference.compute_dtype(x.dtype)
    _check_rows("terms", terms, rows, ("K", 5))
    _check_rows("affine", affine, rows, (3,))
    _check_rows("index", index, rows, ("M",))
    _check_rows("weight", weight, rows, (index.shape[-1],))
    _check_dtype("terms", terms, compute)
    _check_dtype("affine", affine, compute)
    _check_dtype("index", index, torch.int64)
    _check_dtype("weight", weight, compute)
    if softmax:
        _check(
            terms.shape[-2] == 1,
            lambda: f"`terms` must hold one term where softmax=True, got {terms.shape[-2]}",
        )


def _check_stats(x: Tensor, scale: Tensor | None) -> None:
    _check_root(x)
    _check(
        x.shape[-1] > 0,
        lambda: (
            f"`x` must have a vocabulary of at least one column, got shape {list(x.shape)}; "
            "is it a weight that has not been gathered yet?"
        ),
    )
    if scale is not None:
        _check_scale(x, scale)


def _check_result_dtype(dtype: torch.dtype) -> None:
    _check(dtype.is_floating_point, lambda: f"`dtype` must be a floating dtype, got {dtype}")


def _check_writable(x: Tensor) -> None:
    """The caller still owns a leaf, and a view of one is the leaf; rows that share memory have one value."""
    if torch._debug_has_internal_overlap(x) == 1:
        raise RuntimeError(
            "`x` must have no elements that share memory, since its values are overwritten; got shape "
            f"{list(x.shape)} with strides {list(x.stride())}. Call row_grad instead."
        )
    owner = x if x._base is None else x._base
    if owner.requires_grad and owner.is_leaf:
        raise RuntimeError(
            "`x` must not be a leaf that requires grad, since its values are overwritten; "
            f"got {'a leaf' if owner is x else 'a view of a leaf'} of shape {list(owner.shape)}. "
            "Call row_grad instead, or compile without options={'consume_logits': True}."
        )


# ---- fake kernels -------------------------------------------------------------------------------------------------


def _fake_row_stats(x: Tensor, scale: Tensor | None, factor: float, region: str) -> Stats:
    _check_stats(x, scale)

    def rows() -> Tensor:
        return x.new_empty([*x.shape[:-1], 1], dtype=reference.compute_dtype(x.dtype))

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
    _check_grad(x, terms, affine, index, weight, softmax)
    _check_result_dtype(dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _fake_row_grad_(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    region: str,
) -> None:
    _check_grad(x, terms, affine, index, weight, softmax)


# ---- dispatch -----------------------------------------------------------------------------------------------------


class _Kernels(Protocol):
    """What `reference.py`, `cpu.py` and `cuda.py` offer: the operators without `region`, arguments checked."""

    def row_stats(self, x: Tensor, scale: Tensor | None, factor: float) -> Stats: ...

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
def _cuda_kernels() -> _Kernels:
    if importlib.util.find_spec("triton") is None:
        return cast(_Kernels, reference)
    return cast(_Kernels, importlib.import_module("slime_compile.ops.cuda"))


def _kernels(x: Tensor) -> _Kernels:
    if x.device.type == "cpu":
        return cast(_Kernels, cpu)
    if x.dtype == torch.float64:
        return cast(_Kernels, reference)
    return _cuda_kernels()


# Without autograd below the operators: x may require grad, see `_register`.
@torch.no_grad()
def _row_stats(x: Tensor, scale: Tensor | None, factor: float, region: str) -> Stats:
    _check_stats(x, scale)
    on_call(region)
    return _kernels(x).row_stats(x, scale, factor)


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
    _check_grad(x, terms, affine, index, weight, softmax)
    _check_result_dtype(dtype)
    on_call(region)
    return _kernels(x).row_grad(x, terms, affine, index, weight, softmax, dtype)


@torch.no_grad()
def _row_grad_(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    region: str,
) -> None:
    _check_grad(x, terms, affine, index, weight, softmax)
    _check_writable(x)
    on_call(region)
    _kernels(x).row_grad_(x, terms, affine, index, weight, softmax)
    # Kernels may write by address, which autograd does not see: whoever saved x must get an error, not other values.
    torch.autograd.graph.increment_version(x)


def _register() -> None:
    kernels: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "row_stats": (_row_stats, _fake_row_stats),
        "row_grad": (_row_grad, _fake_row_grad),
        "row_grad_": (_row_grad_, _fake_row_grad_),
    }
    for name, (kernel, fake) in kernels.items():
        torch.library.register_fake(f"slime_fused::{name}", fake, lib=_library)
        for device in ("CPU", "CUDA"):
            _library.impl(name, kernel, device)
        # No derivative: go on to the kernel, and leave the outputs without requires_grad.
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")


_register()

row_stats = torch.ops.slime_fused.row_stats.default
row_grad = torch.ops.slime_fused.row_grad.default
row_grad_ = torch.ops.slime_fused.row_grad_.default
