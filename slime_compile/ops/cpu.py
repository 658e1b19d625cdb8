"""The fused operators on the CPU: one vectorised pass each in C++ if it could be built, else plain torch.

`row_stats`, `row_grad` and `row_grad_` match `reference.py`. They are in `cpu_kernels.cpp`, built and loaded by
`native.py`; without a compiler, and for other dtypes, in `torch_calls.py`. Shapes are checked in `ops`, not here.
"""

import torch
from torch import Tensor

from slime_compile.ops import native, torch_calls
from slime_compile.ops.reference import compute_dtype

__all__ = ["row_grad", "row_grad_", "row_stats"]

Stats = tuple[Tensor, Tensor, Tensor, Tensor]


def row_stats(
    x: Tensor, scale: Tensor | None, factor: float, mean: bool = True, total: bool = True
) -> Stats:
    """See `reference.row_stats`."""
    functions = native.functions() if x.dtype in native.DTYPES else None
    if functions is None:
        return torch_calls.row_stats(x, scale, factor, mean, total)
    compute = compute_dtype(x.dtype)
    rows = (*x.shape[:-1], 1)
    top, log_sum, mean_, total_ = (torch.empty(rows, dtype=compute) for _ in range(4))
    if x.numel() == 0:
        return top, log_sum, mean_, total_
    if scale is not None:
        scale = (scale.to(compute) * factor).expand(rows).contiguous()
    functions.row_stats(
        x.data_ptr(), native.DTYPES[x.dtype], x.dim(), native.layout(x),
        None if scale is None else scale.data_ptr(), factor,
        top.data_ptr(), log_sum.data_ptr(), mean_.data_ptr(), total_.data_ptr(), mean, total,
    )  # fmt: skip
    return top, log_sum, mean_, total_


def row_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    dtype: torch.dtype,
) -> Tensor:
    """See `reference.row_grad`."""
    out = torch.empty(x.shape, dtype=dtype)
    if not _write_grad(x, terms, affine, index, weight, softmax, out):
        torch_calls.write_grad(x, terms, affine, index, weight, softmax, out)
    return out


def row_grad_(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    """See `reference.row_grad_`."""
    if not _write_grad(x, terms, affine, index, weight, softmax, x):
        torch_calls.write_grad(x, terms, affine, index, weight, softmax, x)


def _write_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    out: Tensor,
) -> bool:
    """Whether the C++ could do it."""
    # out: x itself or a new contiguous tensor
    functions = native.functions()
    if functions is None or x.dtype not in native.DTYPES or out.dtype not in native.DTYPES:
        return False
    if x.numel() == 0:
        return True
    coefficients = [value.contiguous() for value in (terms, affine, index, weight)]
    terms_at, affine_at, index_at, weight_at = (value.data_ptr() for value in coefficients)
    functions.row_grad(
        x.data_ptr(), native.DTYPES[x.dtype], out.data_ptr(), native.DTYPES[out.dtype], x.dim(),
        native.layout(x, out), terms_at, terms.shape[-2], affine_at,
        index_at, weight_at, index.shape[-1], softmax,
    )  # fmt: skip
    return True
