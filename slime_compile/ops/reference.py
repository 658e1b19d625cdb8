"""The contract of the fused operators, in plain torch.

`row_stats` and `row_grad` say what `slime_fused::row_stats` and `slime_fused::row_grad` compute (docs/ops.md). They
are written to be read, work in every floating dtype, and keep several [N, V] temporaries; the fast implementations
(`cpu.py`, `cuda.py`) must match them. Shapes are checked in `checks.py`, not here.
"""

import torch
from torch import Tensor

__all__ = [
    "AFFINE",
    "TERM",
    "compute_dtype",
    "empty_rows",
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
        mean: whether anybody reads `mean`, which is NaN otherwise.
        total: the same of `total`.

    Returns:
        `peak`, `log_sum`, `mean`, `total`, each [..., 1] in the compute dtype.
    """
    compute = compute_dtype(x.dtype)
    x = x.to(compute)
    rate = x.new_full([], factor) if scale is None else scale.to(compute) * factor
    peak = torch.where(rate < 0, x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))
    peak = peak.masked_fill(rate == 0, 0.0)
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


def row_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
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
    f, center, e = affine.unsqueeze(-2).unbind(-1)
    out = torch.zeros_like(x)
    for term in terms.unbind(-2):
        out = out + _exponential_term(x, term, softmax)
    column = torch.arange(x.shape[-1], device=x.device)
    for k in range(index.shape[-1]):
        out = out + torch.where(column == index[..., k, None], weight[..., k, None], 0.0)
    out = out + torch.where(f == 0, e, f * (x - center) + e)
    out = torch.where(empty_rows(terms, affine, weight), 0.0, out)
    return out.to(dtype).contiguous()


def _exponential_term(x: Tensor, term: Tensor, softmax: bool) -> Tensor:
    scale, center, shift, a, b = term.unsqueeze(-2).unbind(-1)
    unread = (a == 0) & (b == 0)
    if softmax:
        return torch.where(unread | (x == 0), 0.0, x * (a + b * (x.log() + shift)))
    z = scaled(x - center, scale)
    null = (z == -torch.inf) & ~shift.isnan()  # a row with +inf has no softmax
    return torch.where(unread | null, 0.0, (z - shift).exp() * (a + b * z))


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """scale * x; a row whose scale is 0 is a row of zeros, whatever x is there."""
    return torch.where(scale == 0, 0.0, x * scale)


def empty_rows(terms: Tensor, affine: Tensor, weight: Tensor) -> Tensor:
    """[..., 1] bool: rows whose a, b, f, e and weights are all 0."""
    factors = terms[..., -2:].flatten(-2), affine[..., ::2], weight
    return (torch.cat(factors, -1) == 0).all(-1, keepdim=True)


def row_grad_(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    """`row_grad` in x's dtype, written over x."""
    x.copy_(row_grad(x, terms, affine, index, weight, softmax, x.dtype))
