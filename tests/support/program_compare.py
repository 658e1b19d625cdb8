"""Whether a tensor is as good as eager code's: special values first, then every row within eager's own error.

Entry point: `compare`. Beside `harness.no_worse_than_eager`, which judges many draws of one program by their RMSE, this
one judges one draw of thousands of programs: rows one by one, so that a row of large numbers hides no small one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FACTOR = 4  # on eager's largest error: one of thousands of samples is beyond 2 by luck
EXACT = torch.finfo(torch.float64).eps
BETWEEN = {
    2: 4.0,
    4: 50.0,
    8: 50.0,
}  # by itemsize: how large values on the way may be, whose rounding stays
EXPONENTIALS = {2: 64.0, 4: 1e4, 8: 1e20}  # by itemsize: larger ones excuse nothing that cancels


def compare(
    got: Tensor,
    plain: Tensor,
    true: Tensor,
    usual: float,
    allowed: Tensor,
    lost: Tensor,
    precision: torch.dtype | None = None,
    between: float = 0.0,
    exponential: float = 0.0,
) -> str:
    """The first difference that counts, or nothing.

    Args:
        got: what was compiled.
        plain: eager code in the same dtype; where a number is special, `got` is what this is, or what the truth is.
        true: the same in float64.
        usual: eager's largest error in any draw of this tensor; it counts where the magnitudes are alike.
        allowed: where a number may be finite that is not in eager code; what it is then, no error of eager's measures.
        lost: where NaN is as good.
        precision: the coarsest dtype that the program computes in, if that is not its results'.
        between: how large values on the way are at least.
        exponential: the largest that the program takes: larger numbers than `EXPONENTIALS` are made of it.
    """
    if not got.dtype.is_floating_point:
        same = (got == plain) | (got == true)  # an index that eager code's own rounding has moved
        return "" if same.all() else f"{got[~same][0]} where eager has {plain[~same][0]}"
    rounded = true.to(got.dtype).double()  # what the truth is in this dtype
    eps = max(torch.finfo(each).eps for each in (got.dtype, precision or got.dtype))
    dtype, got, plain, true = got.dtype, got.double(), plain.double(), true.double()
    fine = _alike(got, plain) | _alike(got, rounded)
    fine |= (got.isfinite() & ~plain.isfinite() | plain.isnan()) & allowed
    fine |= got.isnan() & lost
    fine |= (
        plain.isinf() & true.isinf() & (plain != true)
    )  # a rounding decides over the sign: 0 is as near
    if not fine.all():
        return (
            f"{got[~fine][0]} where eager has {plain[~fine][0]} and the truth is {true[~fine][0]}"
        )
    nobody_says = plain.isnan() & rounded.isinf() | ~plain.isfinite() & allowed
    true = true.where(~nobody_says, torch.nan)
    rows = [t.reshape(-1, t.shape[-1] if t.ndim > 1 else 1) for t in (got, plain, true)]
    finite = true[true.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    between = max(between, min(largest or torch.inf, BETWEEN[dtype.itemsize]))  # zeros tell no size
    limit = torch.finfo(torch.float32).max
    if exponential > EXPONENTIALS[dtype.itemsize]:
        limit = EXPONENTIALS[dtype.itemsize]
    # In float64 eager code is the truth itself, and its rounded values on the way are multiplied as others are
    if eps == EXACT:
        limit = 0.0
        between *= max(1.0, largest)
    found = (_row(*row, usual, largest, between, eps, limit) for row in zip(*rows, strict=True))
    return next(filter(None, found), "")


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """The same kind of number: finite, NaN, or the same infinity."""
    return (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan()) | (a == b)


def _row(
    got: Tensor,
    plain: Tensor,
    true: Tensor,
    usual: float,
    largest: float,
    between: float,
    eps: float,
    limit: float,
) -> str:
    both = got.isfinite() & true.isfinite()
    if not both.any():
        return ""
    known = both & plain.isfinite()
    own = float((plain - true)[known].abs().max()) if known.any() else 0.0
    magnitude = float(true[both].abs().max())
    budget = FACTOR * max(own, usual if magnitude >= 1e-3 * largest else 0.0)
    budget += eps * (8 * magnitude + FACTOR * max(1.0, between))
    if (
        magnitude > limit
    ):  # an exponential: the rounding of the exponent counts as often as it is large
        budget += 2 * eps * magnitude * abs(math.log(max(magnitude, EXACT)))
    error = (got - true)[both].abs()
    worst = int(error.argmax())
    if error[worst] <= budget:
        return ""
    return (
        f"{got[both][worst]:.9g} where eager has {plain[both][worst]:.9g} and the truth is "
        f"{true[both][worst]:.9g} (error {error[worst]:.2e}, budget {budget:.2e})"
    )
