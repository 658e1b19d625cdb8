"""The contract of the fused operators, in plain torch.

`row_stats` and `row_grad` define `slime_fused::row_stats` and `slime_fused::row_grad` (docs/ops.md). They
are written to be read, work in every floating dtype, and keep several [N, V] temporaries; the fast implementations
(`cpu.py`, `cuda.py`) must match them. Shapes are checked in `checks.py`, not here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "AFFINE",
    "TERM",
    "compute_dtype",
    "row_grad",
    "row_grad_",
    "row_stats",
    "scaled",
]

TERM = 5  # scale, center, shift, a, b
AFFINE = 3  # f, center, e


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 roots, float32 for every other floating dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_stats(
    x: Tensor, scale: Tensor | None, factor: float, mean: bool = True, total: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of each row of `y = factor * scale * x`, around the x where y is largest.

    Args:
        x: [..., V], any floating dtype.
        scale: broadcastable to [..., 1], or None for 1.
        factor: a number.
        mean: whether `mean` is read; it is NaN otherwise.
        total: the same for `total`.

    Returns:
        `peak`, `log_sum`, `mean`, `total`, each [..., 1] in the compute dtype.
    """
    compute = compute_dtype(x.dtype)
    x = x.to(compute)
    rate = factor if scale is None else scale.to(compute) * factor
    peak = _where_largest(x, rate)
    d = scaled(x - peak, rate)  # NaN in a row with +inf, with NaN, or with nothing but -inf
    p = d.exp()
    sum_exp = p.sum(-1, keepdim=True)
    sum_exp_d = torch.where(d == -torch.inf, 0.0, p * d).sum(-1, keepdim=True)
    log_sum = torch.where(rate * peak == -torch.inf, -torch.inf, sum_exp.log())
    unread = torch.full_like(peak, torch.nan)
    return (
        peak,
        log_sum,
        sum_exp_d / sum_exp if mean else unread,
        d.sum(-1, keepdim=True) if total else unread.clone(),
    )


Column = Tensor | float
Columns = Tensor | Sequence[Column]
"""The numbers of each row; or a list with a tensor `[..., 1]` for each of them, or a number equal in all rows."""


def row_grad(
    x: Tensor,
    terms: Columns,
    affine: Columns,
    index: Columns,
    weight: Columns,
    softmax: bool,
    dtype: torch.dtype,
) -> Tensor:
    """A full-vocabulary value in the row normal form.

    Args:
        x: [..., V], any floating dtype; with `softmax` the probabilities of term 1.
        terms: [..., K, 5] compute dtype: (scale, center, shift, a, b) of each exponential term.
        affine: [..., 3] compute dtype: (f, center, e).
        index: [..., M] int64: column of each one-hot term; outside [0, V) matches nothing.
        weight: [..., M] compute dtype: value of each one-hot term.
        softmax: whether x holds `exp(z - shift)` instead of the root.
        dtype: floating dtype of the result.

    Returns:
        [..., V] of `dtype`, contiguous.
    """
    x = x.to(compute_dtype(x.dtype))
    f, center, e = _columns(affine, x.ndim)
    numbers = _columns(terms, x.ndim)
    packed = [numbers[k : k + TERM] for k in range(0, len(numbers), TERM)]
    first, *rest = [_exponential_term(x, term, softmax) for term in packed] or [torch.zeros_like(x)]
    out = sum(rest, first)
    column = torch.arange(x.shape[-1], device=x.device)
    for at, value in zip(_columns(index, x.ndim), _columns(weight, x.ndim), strict=True):
        out = torch.where(column == at, out + value, out)
    out = out + _affine(x, f, center, e)
    return out.to(dtype).contiguous()


def _columns(value: Columns, rank: int) -> list[Any]:
    """Numbers, and tensors `[..., 1]` of `rank` dimensions."""
    if not isinstance(value, Tensor):
        return list(value)
    return [column.unsqueeze(-1) for column in value.flatten(rank - 1).unbind(-1)]


def _affine(x: Tensor, f: Column, center: Column, e: Column) -> Any:
    if isinstance(f, Tensor):
        return torch.where(f == 0, e, f * (x - center) + e)
    return f * (x - center) + e if f else e


def _exponential_term(x: Tensor, term: Sequence[Any], softmax: bool) -> Tensor:
    scale, center, shift, a, b = term
    unread = (a == 0) & (b == 0)
    if softmax:
        return torch.where(unread | (x == 0), 0.0, x * (a + b * (x.log() + shift)))
    z = scaled(x - center, scale)
    null = (z == -torch.inf) & (shift == shift)  # NaN: a row with +inf has no softmax
    factor = a + b * z if isinstance(b, Tensor) or b else a
    return torch.where(unread | null, 0.0, (z - shift).exp() * factor)


def scaled(x: Tensor, scale: Column) -> Tensor:
    """scale * x; a row of scale 0 is zeros, whatever x is there."""
    if isinstance(scale, Tensor):
        return torch.where(scale == 0, 0.0, x * scale)
    return x * scale if scale else torch.zeros_like(x)


def _where_largest(x: Tensor, scale: Column) -> Tensor:
    """The element of each row that is largest after scaling; 0 for a scale of 0."""
    if not isinstance(scale, Tensor):
        largest = (torch.amin if scale < 0 else torch.amax)(x, -1, keepdim=True)
        return largest if scale else torch.zeros_like(largest)
    largest = torch.where(scale < 0, x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))
    return largest.masked_fill(scale == 0, 0.0)


def row_grad_(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    """`row_grad` in x's dtype, written over x."""
    x.copy_(row_grad(x, terms, affine, index, weight, softmax, x.dtype))
