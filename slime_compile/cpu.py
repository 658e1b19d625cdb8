"""The fused operators on the CPU: plain torch over chunks of rows that stay in cache.

`row_stats`, `row_grad` and `row_grad_` compute what `reference.py` says, without any [N, V] temporary: a chunk of rows
comes from memory once, and every further pass over it is served by the cache. The passes that only special values need
(a logit of -inf) run on the chunks that hold such a value. Shapes are checked in `ops.py`, not here.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from slime_compile.reference import compute_dtype, empty_rows

__all__ = ["row_grad", "row_grad_", "row_stats"]

_CHUNK_ELEMENTS = 1 << 19


def row_stats(
    x: Tensor, scale: Tensor | None, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.row_stats`."""
    compute = compute_dtype(x.dtype)
    rows = [*x.shape[:-1], 1]
    if scale is not None:
        scale = (scale.to(compute) * factor).expand(rows).reshape(-1, 1)
    top, log_sum, mean, total = (x.new_empty(rows, dtype=compute) for _ in range(4))
    stats = [stat.view(-1, 1) for stat in (top, log_sum, mean, total)]
    scratch = _scratch(x, compute, 2)
    for at, part in _chunks(x):
        d, p = (buffer[: part.shape[0]] for buffer in scratch)
        factors = factor if scale is None else scale[at]
        _chunk_stats(part, factors, d, p, [stat[at] for stat in stats])
    return top, log_sum, mean, total


def _chunk_stats(
    x: Tensor, scale: Tensor | float, d: Tensor, p: Tensor, stats: list[Tensor]
) -> None:
    # x [R, V] any dtype and strides, read only; d, p [R, V] scratch; stats 4 * [R, 1] written
    top, log_sum, mean, total = stats
    y = _scaled(x, scale, d)
    torch.amax(y, -1, keepdim=True, out=top)
    torch.sub(y, top, out=d)
    torch.sum(d, -1, keepdim=True, out=total)
    torch.exp(d, out=p)
    sum_exp = p.sum(-1, keepdim=True)
    torch.sum(p.mul_(d), -1, keepdim=True, out=mean)
    if (
        mean.isnan().any()
    ):  # perhaps 0 * -inf: an element without probability has no share in the mean
        torch.sum(p.masked_fill_(d == -torch.inf, 0.0), -1, keepdim=True, out=mean)
    mean.div_(sum_exp)
    torch.log(sum_exp, out=log_sum).masked_fill_(top == -torch.inf, -torch.inf)


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
    out = x.new_empty(x.shape, dtype=dtype)
    _write_grad(x, terms, affine, index, weight, softmax, out)
    return out


def row_grad_(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    """See `reference.row_grad_`."""
    _write_grad(x, terms, affine, index, weight, softmax, x)


def _write_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    out: Tensor,
) -> None:
    # out: x itself or a new contiguous tensor
    lead = x.dim() - 1
    live = _flat(~empty_rows(terms, affine, weight), lead)[:, 0]
    coefficients = [_flat(value, lead) for value in (terms, affine, index, weight)]
    direct = out is not x and out.dtype == terms.dtype
    scratch = _scratch(x, terms.dtype, 3)
    for at, part in _chunks(x):
        target = part if out is x else _flat(out, lead)[at]
        chosen = live[at].nonzero()[:, 0]
        every = chosen.shape[0] == part.shape[0]
        if not every:  # the other rows are not read
            part = part[chosen]
            target.zero_()
        if chosen.shape[0] == 0:
            continue
        z, p, result = (buffer[: part.shape[0]] for buffer in scratch)
        if direct and every:
            result = target
        _chunk_grad(part, [value[at][chosen] for value in coefficients], softmax, z, p, result)
        if not every:
            target[chosen] = result.to(target.dtype)
        elif result is not target:
            target.copy_(result)


def _chunk_grad(
    x: Tensor, coefficients: list[Tensor], softmax: bool, z: Tensor, p: Tensor, out: Tensor
) -> None:
    # x [R, V] any dtype and strides, read only; coefficients [R, ...]; z, p [R, V] scratch; out [R, V] written
    terms, affine, index, weight = coefficients
    if terms.shape[1] == 0:
        out.zero_()
    for k, term in enumerate(terms.unbind(1)):
        _chunk_term(x, term, softmax, z, p if k else out)
        if k:
            out.add_(p)
    _add_affine(x, affine, z, out)
    inside = (index >= 0) & (index < x.shape[1])
    out.scatter_add_(1, index.where(inside, 0), weight.where(inside, 0.0))


def _chunk_term(x: Tensor, term: Tensor, softmax: bool, z: Tensor, out: Tensor) -> None:
    # out = exp(z - shift) * (a + b * z)
    scale, center, shift, a, b = term.unsqueeze(1).unbind(2)
    if softmax:
        torch.log(out.copy_(x), out=z).add_(shift)
    else:
        torch.sub(_scaled(x, scale, z), center, out=z)
        torch.sub(z, shift, out=out).exp_()
    masked = None
    if not z.amin() > -torch.inf:  # -inf, or NaN, which hides it
        masked = out == 0 if softmax else z == -torch.inf
    out.mul_(z.mul_(b).add_(a))
    if masked is not None:
        out.masked_fill_(masked, 0.0)


def _add_affine(x: Tensor, affine: Tensor, z: Tensor, out: Tensor) -> None:
    f, center, e = affine.unsqueeze(1).unbind(2)
    if f.any():
        z.copy_(x).mul_(f).sub_(center).add_(e)
        out.add_(torch.where(f == 0, e, z))
    elif e.any():
        out.add_(e)


def _scaled(x: Tensor, scale: Tensor | float, buffer: Tensor) -> Tensor:
    """scale * x in buffer's dtype: x itself where that is the same, else written to buffer."""
    one = scale == 1 if isinstance(scale, float) else bool((scale == 1).all())
    if x.dtype == buffer.dtype and x.stride(1) == 1:
        return x if one else torch.mul(x, scale, out=buffer)
    buffer.copy_(x)
    return buffer if one else buffer.mul_(scale)


def _flat(value: Tensor, lead: int) -> Tensor:
    """[..., *rest] with `lead` leading dimensions as [N, *rest]."""
    return value.unsqueeze(0) if lead == 0 else value.flatten(0, lead - 1)


def _chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows of x [..., V] in order: their numbers, and a view [R, V] of them."""
    if x.numel() == 0:
        return
    start, size = 0, _chunk_rows(x)
    for slab in _slabs(x):
        for first in range(0, slab.shape[0], size):
            part = slab[first : first + size]
            yield slice(start, start + part.shape[0]), part
            start += part.shape[0]


def _slabs(x: Tensor) -> Iterator[Tensor]:
    """The rows of x in order, as few views [R, V] as x's strides allow."""
    if x.dim() <= 2:
        yield x if x.dim() == 2 else x.unsqueeze(0)
        return
    try:
        flat = x.view(-1, x.shape[-1])
    except RuntimeError:  # its leading dimensions have no common stride
        for part in x.unbind(0):
            yield from _slabs(part)
    else:
        yield flat


def _chunk_rows(x: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // x.shape[-1])


def _scratch(x: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    rows = min(_chunk_rows(x), x.numel() // x.shape[-1]) if x.numel() else 0
    return x.new_empty([count, rows, x.shape[-1]], dtype=dtype)
