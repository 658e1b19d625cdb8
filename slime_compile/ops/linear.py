"""The operators over chunks of logits: schema, fake kernels, dispatch; importing this module registers them.

    slime_fused::linear_row_stats   row statistics of hidden @ weight.t() + bias, and its columns   one chunk of logits
    slime_fused::linear_row_grad    gradients of hidden, weight, bias                               one chunk of logits

`linear_reference.py` says what they compute, `linear_chunks.py` does it. Like the row operators they have no derivative
and their outputs never require grad: their caller, `rl/linear_log_probs.py`, holds both directions.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from slime_compile.ops import linear_chunks
from slime_compile.ops.checks import check_memory
from slime_compile.ops.operators import kernels_of, register
from slime_compile.ops.reference import AFFINE, TERM, compute_dtype
from slime_compile.ops.regions import on_call
from slime_compile.torch_private import torch_check

__all__ = ["linear_row_grad", "linear_row_stats"]

# ---- schema -------------------------------------------------------------------------------------------------------

_library: Any = cast(Any, torch.library).Library("slime_fused", "FRAGMENT")

# Any strides of the matrices are read as they are.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library.define(
    "linear_row_stats(Tensor hidden, Tensor weight, Tensor? bias, Tensor?[] scales, float[] factors,"
    " bool[] means, bool[] totals, Tensor index, int chunk_bytes, str region)"
    " -> (Tensor stats, Tensor picked)",
    tags=_TAGS,
)
_library.define(
    "linear_row_grad(Tensor hidden, Tensor weight, Tensor? bias, Tensor terms, Tensor affine, Tensor index,"
    " Tensor values, bool[3] wanted, bool transposed, int chunk_bytes, str region)"
    " -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    tags=_TAGS,
)

# ---- what must hold -----------------------------------------------------------------------------------------------

_check: Callable[[bool | torch.SymBool, Callable[[], str]], None] = torch_check


def _check_shape(name: str, value: Tensor, wanted: Sequence[int | str]) -> None:
    """Checks the shape; a name instead of a number stands for any size."""

    def message() -> str:
        return f"`{name}` must have shape [{', '.join(map(str, wanted))}], got {list(value.shape)}"

    _check(value.dim() == len(wanted), message)
    for size, number in zip(value.shape, wanted, strict=True):
        if not isinstance(number, str):
            _check(size == number, message)


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_shape("hidden", hidden, ("N", "D"))
    _check(
        hidden.dtype.is_floating_point,
        lambda: f"`hidden` must have a floating dtype, got {hidden.dtype}",
    )
    _check_shape("weight", weight, ("V", hidden.shape[1]))
    _check(
        weight.shape[0] > 0,
        lambda: (
            f"`weight` must have a vocabulary of at least one row, got shape {list(weight.shape)}; "
            "has the weight not been gathered yet?"
        ),
    )
    if bias is not None:
        _check_shape("bias", bias, (weight.shape[0],))
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            _check_same("dtype", name, other.dtype, hidden.dtype)
            _check_same("device", name, other.device, hidden.device)


def _check_same(what: str, name: str, given: object, wanted: object) -> None:
    _check(
        given == wanted, lambda: f"`{name}` must have the {what} of `hidden`, {wanted}, got {given}"
    )


def _check_dtype(name: str, value: Tensor, dtype: torch.dtype) -> None:
    _check(value.dtype == dtype, lambda: f"`{name}` must have dtype {dtype}, got {value.dtype}")


def _check_index(name: str, index: Tensor, hidden: Tensor) -> None:
    _check_shape(name, index, (hidden.shape[0], "M"))
    _check_dtype(name, index, torch.int64)


def _check_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Sequence[Tensor | None],
    factors: Sequence[float],
    means: Sequence[bool],
    totals: Sequence[bool],
    index: Tensor,
) -> None:
    _check_head(hidden, weight, bias)
    _check_index("index", index, hidden)
    counts = [len(each) for each in (scales, factors, means, totals)]
    _check(
        len(set(counts)) == 1,
        lambda: f"`scales`, `factors`, `means` and `totals` must be as many, got {counts}",
    )
    for scale in scales:
        if scale is not None and scale.dim():
            _check_shape("scales", scale, (hidden.shape[0], 1))


def _check_grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    values: Tensor,
    wanted: Sequence[bool],
) -> None:
    _check_head(hidden, weight, bias)
    rows, compute = hidden.shape[0], compute_dtype(hidden.dtype)
    _check_shape("terms", terms, (rows, "K", TERM))
    _check_shape("affine", affine, (rows, AFFINE))
    _check_index("index", index, hidden)
    _check_shape("values", values, (rows, index.shape[1]))
    for name, value in (("terms", terms), ("affine", affine), ("values", values)):
        _check_dtype(name, value, compute)
    _check(len(wanted) == 3, lambda: f"`wanted` must have 3 values, got {len(wanted)}")


# ---- fake kernels -------------------------------------------------------------------------------------------------


def _fake_linear_row_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Sequence[Tensor | None],
    factors: Sequence[float],
    means: Sequence[bool],
    totals: Sequence[bool],
    index: Tensor,
    chunk_bytes: int,
    region: str,
) -> tuple[Tensor, Tensor]:
    _check_stats(hidden, weight, bias, scales, factors, means, totals, index)
    shape = [len(scales), 4, hidden.shape[0], 1]
    stats = hidden.new_empty(shape, dtype=compute_dtype(hidden.dtype))
    return stats, hidden.new_empty(index.shape)


def _fake_linear_row_grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    values: Tensor,
    wanted: Sequence[bool],
    transposed: bool,
    chunk_bytes: int,
    region: str,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_grad(hidden, weight, bias, terms, affine, index, values, wanted)
    of_weight = weight.t() if transposed else weight
    shapes = (hidden.shape, of_weight.shape, weight.shape[:1])
    hidden_, weight_, bias_ = (
        hidden.new_empty(shape if made else [0]) for shape, made in zip(shapes, wanted, strict=True)
    )
    return hidden_, weight_, bias_


# ---- dispatch -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _linear_row_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Sequence[Tensor | None],
    factors: Sequence[float],
    means: Sequence[bool],
    totals: Sequence[bool],
    index: Tensor,
    chunk_bytes: int,
    region: str,
) -> tuple[Tensor, Tensor]:
    _check_stats(hidden, weight, bias, scales, factors, means, totals, index)
    check_memory(hidden=hidden, weight=weight, bias=bias)
    on_call(region)
    head = linear_chunks.Head(hidden, weight, bias)
    statistics = linear_chunks.Statistics(scales, factors, means, totals)
    return linear_chunks.linear_row_stats(kernels_of(hidden), head, statistics, index, chunk_bytes)


@torch.no_grad()
def _linear_row_grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    values: Tensor,
    wanted: Sequence[bool],
    transposed: bool,
    chunk_bytes: int,
    region: str,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_grad(hidden, weight, bias, terms, affine, index, values, wanted)
    check_memory(hidden=hidden, weight=weight, bias=bias)
    on_call(region)
    head = linear_chunks.Head(hidden, weight, bias)
    coefficients = (terms, affine, index, values)
    return linear_chunks.linear_row_grad(
        kernels_of(hidden), head, coefficients, wanted, transposed, chunk_bytes
    )


register(_library, "linear_row_stats", _linear_row_stats, _fake_linear_row_stats)
register(_library, "linear_row_grad", _linear_row_grad, _fake_linear_row_grad)

linear_row_stats = torch.ops.slime_fused.linear_row_stats.default
linear_row_grad = torch.ops.slime_fused.linear_row_grad.default
