"""The contract of the operators over `hidden @ weight.t() + bias`, in plain torch: the logits are made whole.

`linear_row_stats` and `linear_row_grad` say what the operators of the same names compute (docs/ops.md).
`linear_chunks.py` computes the same and never has all logits. Shapes are checked in `linear.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_compile.ops.reference import compute_dtype, row_grad, row_stats

__all__ = ["linear_row_grad", "linear_row_stats", "logits"]


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, V], rounded as the program rounds: once, to the dtype of `hidden`."""
    if bias is None:
        return hidden @ weight.t()
    return torch.addmm(bias, hidden, weight.t())


def linear_row_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Sequence[Tensor | None],
    factors: Sequence[float],
    means: Sequence[bool],
    totals: Sequence[bool],
    index: Tensor,
) -> tuple[Tensor, Tensor]:
    """Row statistics of the logits, and the logits at some columns of each row.

    Args:
        hidden: [N, D], any floating dtype.
        weight: [V, D], the same dtype, any strides.
        bias: [V], the same dtype, or None.
        scales: S times [N, 1], a number without dimensions, or None for 1.
        factors: S numbers.
        means, totals: S times whether anybody reads `mean` and `total`, which are NaN otherwise.
        index: [N, M] int64, columns in [0, V).

    Returns:
        `stats` [S, 4, N, 1] in the compute dtype: for each scale what `row_stats` gives of `factor * scale * logits`.
        `picked` [N, M] in the dtype of hidden: the logits at `index`.
    """
    x = logits(hidden, weight, bias)
    stats = [
        torch.stack(row_stats(x, scale, factor, mean, total))
        for scale, factor, mean, total in zip(scales, factors, means, totals, strict=True)
    ]
    empty = x.new_empty([0, 4, x.shape[0], 1], dtype=compute_dtype(x.dtype))
    return torch.stack(stats) if stats else empty, x.gather(1, index)


def linear_row_grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    values: Tensor,
    wanted: Sequence[bool],
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through the matmul, of logits whose own gradient is in row normal form.

    Args:
        hidden, weight, bias: as for `linear_row_stats`.
        terms, affine, index, values: [N, K, 5], [N, 3], [N, M], [N, M], what `row_grad` takes.
        wanted: which of the three gradients to make; [0] elements in place of the others.
        transposed: the gradient of the weight as [D, V].

    Returns:
        Gradients of hidden [N, D], weight [V, D], bias [V], in the dtype of hidden, contiguous.
    """
    x = logits(hidden, weight, bias)
    grad = row_grad(x, terms, affine, index, values, False, x.dtype)
    of_hidden, of_weight, of_bias = wanted
    empty = x.new_empty(0)
    grad_weight = hidden.t() @ grad if transposed else grad.t() @ hidden
    return (
        grad @ weight if of_hidden else empty,
        grad_weight if of_weight else empty,
        grad.sum(0) if of_bias else empty,
    )
