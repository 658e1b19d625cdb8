"""How near a fused operator has to be to the truth: `check_stats`, `check_grad`.

The budget of an element is the largest error of the reference in the operator's own precision, plus what the order of
additions and another exponential may change. That is an upper bound from the operations, never a usual value: a few
rows are not enough to tell what is usual. What is usual is compared over many rows, by `rms_errors`.
"""

import numpy as np
import torch
from torch import Tensor

from slime_compile import ops
from slime_compile.ops import reference

__all__ = ["Coefficients", "check_grad", "check_stats", "rms_errors"]

INF = float("inf")
Coefficients = tuple[Tensor, Tensor, Tensor, Tensor]

# In eps. On its longest way into the sum of a row of 100,000 float64 an element is added 16 times in its lane, 9 times
# with the lane's strips, 6 times over 4 lanes and 4 vectors, 16 times over blocks, 4 times over segments: each rounds
# by half an eps. The exponential is within one eps; the rest is for sums that a later, larger maximum scales down.
SUM = 32
# exponential 1, a + b z 1, their product 1/2, x log() of a softmax 1; over up to 3 terms and 3 columns 3; each of them
# in the operator and in the reference, less what both do alike
VALUE = 8


def check_stats(x: Tensor, scale: Tensor | None = None, factor: float = 1.0) -> None:
    """`ops.row_stats` of x against the reference."""
    results = ops.row_stats(x, scale, factor, "")
    sames = reference.row_stats(x.contiguous(), scale, factor)  # sums go in memory's order
    truths = _true_stats(x, scale, factor)
    top, log_sum, mean, total = (np.abs(truth) for truth in truths)
    # sums of one sign; log_sum takes the relative error of one that is at least 1, mean is a quotient of two
    units = (top, SUM + log_sum, 2 * SUM * mean, SUM * total)
    for result, same, truth, unit in zip(results, sames, truths, units, strict=True):
        _check(result, same, truth, torch.finfo(same.dtype).eps * unit)


def check_grad(x: Tensor, coefficients: Coefficients, softmax: bool = False) -> None:
    """`ops.row_grad` of x against the reference, into x's dtype and into float32."""
    terms, affine, index, weight = (_double(value) for value in coefficients)
    true = reference.row_grad(x.double(), terms, affine, index, weight, softmax, torch.float64)
    size = _size_of_parts(x.double(), terms, affine, index, weight, softmax)
    allowed = VALUE * torch.finfo(coefficients[0].dtype).eps * size
    for dtype in {x.dtype, torch.float32}:
        result = ops.row_grad(x, *coefficients, softmax, dtype, "")
        same = reference.row_grad(x, *coefficients, softmax, dtype)
        _check(result, same, _exact(true), _exact(allowed))


def rms_errors(x: Tensor) -> list[tuple[float, float]]:
    """Of log_sum, mean and total over all rows of x: the operator's error and the reference's."""
    results, sames = ops.row_stats(x, None, 1.0, "")[1:], reference.row_stats(x, None, 1.0)[1:]
    truths = _true_stats(x, None, 1.0)[1:]
    return [
        (_rms(_exact(result) - truth), _rms(_exact(same) - truth))
        for result, same, truth in zip(results, sames, truths, strict=True)
    ]


def _check(result: Tensor, same: Tensor, truth: np.ndarray, allowed: np.ndarray) -> None:
    assert result.dtype == same.dtype
    assert tuple(result.shape) == truth.shape
    assert result.is_contiguous()
    finite = same.isfinite()
    torch.testing.assert_close(
        result[~finite], same[~finite], rtol=0, atol=0, equal_nan=True, check_dtype=False
    )
    if not finite.any():
        return
    here = finite.numpy()
    truth, allowed = truth[here], np.nan_to_num(allowed[here])
    info = torch.finfo(result.dtype)
    rounding = info.eps * (np.abs(truth) + info.smallest_normal)  # half in each of the two
    error = np.abs(_exact(result[finite]) - truth)
    usual = np.abs(_exact(same[finite]) - truth).max()
    excess = error - usual - allowed - rounding
    worst = excess.argmax()
    assert excess[worst] <= 0, (
        f"error {error[worst]:.3e} at {truth[worst]:.9g}; the reference's largest is {usual:.3e}, "
        f"other roundings may add {allowed[worst] + rounding[worst]:.3e}"
    )


# ---- truths -------------------------------------------------------------------------------------------------------


def _true_stats(x: Tensor, scale: Tensor | None, factor: float) -> list[np.ndarray]:
    """The formulas of `reference.row_stats`: in longdouble, or of scaled logits in float64."""
    if scale is not None or factor != 1.0:
        return [_exact(s) for s in reference.row_stats(x.double(), _double(scale), factor)]
    y = _exact(x)
    with np.errstate(all="ignore"):
        top = y.max(-1, keepdims=True)
        d = y - top
        p = np.exp(d)
        mass, first = (v.sum(-1, keepdims=True) for v in (p, np.where(d == -INF, 0, p * d)))
        log_sum = np.where(top == -INF, -INF, np.log(mass))
        return [top, log_sum, first / mass, d.sum(-1, keepdims=True)]


def _size_of_parts(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> Tensor:
    """The sum of the absolute values of everything that `row_grad` adds up: what its roundings are relative to."""
    f, center, e = affine.unsqueeze(-2).abs().unbind(-1)
    size = torch.where(f == 0, e, f * x.abs() + center + e)
    for k in range(terms.shape[-2]):
        for part in (3, 4):  # a alone, b alone
            alone = terms[..., k : k + 1, :].clone()
            alone[..., 7 - part] = 0.0
            size = size + _only(x, index, weight, terms=alone, softmax=softmax).abs()
        if softmax:  # z = log(x) + shift, of other signs
            *_, shift, _, b = terms[..., k, :].unsqueeze(-2).unbind(-1)
            size = size + torch.where(x == 0, 0.0, x * b * shift).abs()
    return size + _only(x, index, weight.abs())


def _only(
    x: Tensor, index: Tensor, weight: Tensor, terms: Tensor | None = None, softmax: bool = False
) -> Tensor:
    """The terms alone, or without them the columns alone."""
    rows = x.shape[:-1]
    if terms is None:
        terms = x.new_zeros(*rows, 0, 5)
    else:
        weight = torch.zeros_like(weight)
    none = x.new_zeros(*rows, 3)
    return reference.row_grad(x, terms, none, index, weight, softmax, torch.float64)


def _double(value: Tensor | None) -> Tensor | None:
    return value.double() if value is not None and value.is_floating_point() else value


def _exact(value: Tensor) -> np.ndarray:
    return value.double().numpy().astype(np.longdouble)


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.square(errors).mean()))
