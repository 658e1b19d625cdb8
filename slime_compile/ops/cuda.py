"""The row operators on CUDA: `row_stats`, `row_grad`, `row_grad_` for bf16, fp16 and fp32 roots.

Same meaning as in `reference.py`. This module decides blocks, parts and strides and launches the kernels of
`triton_kernels.py` on the current stream; it never waits for the device, so a CUDA graph may capture it. `ops.py`
imports it lazily, as it needs Triton. docs/kernels.md gives the reasons for the numbers below.

x is never copied: its leading dimensions are merged if strides allow, two that cannot be merged are passed to
the kernel, and for three or more one kernel is launched per outer index.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

import torch
from torch import Tensor

from slime_compile.ops import triton_kernels as kernels

__all__ = ["row_grad", "row_grad_", "row_stats"]

WARPS = 4
LANES = 32 * WARPS
# the loads ahead are written out, so no software pipelining; multiply-add whatever the default of the Triton release
OPTIONS = {"num_warps": WARPS, "num_stages": 1, "enable_fp_fusion": True}
VECTOR_BYTES = 16  # the widest access of one thread
TILE_VECTORS = 4  # vectors of a thread in flight while it works on the four before them
STRIDED_DEPTH = 16  # single elements of a thread in flight where they cannot be vectors
PART_TILES_MIN = 4  # a smaller part of a row does not pay for merging its statistics
PART_TILES_MAX = (
    8  # of row_grad: short enough to balance, long enough to hide the loads of the coefficients
)
PARTS_MAX = 128  # of row_stats: parts merged by one program
PROGRAMS_PER_SM = 64  # eight waves of eight resident programs
ASSUMED_SMS = 132  # the device is the interpreter


# ---- rows as the kernels see them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launch:
    """Rows [start, stop) of the flattened leading dimensions, as views [outer, inner, V] of each tensor."""

    start: int
    stop: int
    views: tuple[Tensor, ...]


def _merged(
    sizes: list[int], strides: list[tuple[int, ...]]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Leading dimensions without those of size 1, neighbours merged if every tensor's strides allow."""
    out_sizes: list[int] = []
    out_strides: list[tuple[int, ...]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if out_sizes and all(a == b * size for a, b in zip(out_strides[-1], stride, strict=True)):
            out_sizes[-1] *= size
            out_strides[-1] = stride
        else:
            out_sizes.append(size)
            out_strides.append(stride)
    return out_sizes, out_strides


def _launches(*tensors: Tensor) -> Iterator[_Launch]:
    """Splits the rows of tensors of one shape so that each launch has at most two leading strides."""
    shape = tensors[0].shape
    by_dim = list(zip(*(t.stride() for t in tensors), strict=True))
    sizes, strides = _merged(list(shape[:-1]), by_dim[:-1])
    while len(sizes) < 2:
        sizes.insert(0, 1)
        strides.insert(0, (0,) * len(tensors))
    outer, rows = sizes[:-2], prod(sizes[-2:])
    for number, place in enumerate(product(*map(range, outer))):
        views = tuple(
            t.as_strided(
                (*sizes[-2:], shape[-1]),
                (strides[-2][i], strides[-1][i], by_dim[-1][i]),
                t.storage_offset() + sum(p * s[i] for p, s in zip(place, strides, strict=False)),
            )
            for i, t in enumerate(tensors)
        )
        yield _Launch(number * rows, (number + 1) * rows, views)


def _vector(*views: Tensor) -> int:
    """Elements per thread and access: 16 bytes, or 1 if the views of a row cannot all be aligned together."""
    vector = VECTOR_BYTES // min(v.element_size() for v in views)
    starts = {v.data_ptr() // v.element_size() % vector for v in views}
    steps = {tuple(s % vector for s in v.stride()[:-1]) for v in views}
    if any(v.stride(-1) != 1 for v in views) or len(starts) > 1 or len(steps) > 1:
        return 1
    return vector


def _depth(vector: int, *views: Tensor) -> int:
    """Vectors (or single elements) of a thread in one tile."""
    if vector == 1:
        return STRIDED_DEPTH
    return TILE_VECTORS * VECTOR_BYTES // (vector * max(v.element_size() for v in views))


def _programs_wanted(device: torch.device) -> int:
    """Programs that fill the device evenly."""
    return PROGRAMS_PER_SM * (_multiprocessors(device) if device.type == "cuda" else ASSUMED_SMS)


@cache
def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


# ---- row_stats ----------------------------------------------------------------------------------------------------


def row_stats(
    x: Tensor, scale: Tensor | None, factor: float, mean: bool = True, total: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of each row of `factor * scale * x`: max, log_sum, mean, total, each [..., 1] fp32.

    `mean` and `total`: whether these two are read; they are NaN otherwise.
    """
    rows = prod(x.shape[:-1])
    outs = [x.new_empty(rows, dtype=torch.float32) for _ in range(4)]
    row_scale, scaled = (outs[0], 0) if scale is None else (_row_scale(scale, x), 1)
    if x.numel() > 0:
        with torch.cuda.device_of(x):
            for launch in _launches(x):
                part = slice(launch.start, launch.stop)
                _launch_stats(
                    launch.views[0], row_scale[part], scaled, factor, [o[part] for o in outs],
                    MEAN=mean, TOTAL=total,
                )  # fmt: skip
    top, log_sum, mean_, total_ = (o.view(*x.shape[:-1], 1) for o in outs)
    return top, log_sum, mean_, total_


def _row_scale(scale: Tensor, x: Tensor) -> Tensor:
    """[N] fp32, one value per row; with stride 0 for one value for all."""
    scale = scale.to(torch.float32)
    if scale.numel() == 1:
        return scale.reshape(1).expand(prod(x.shape[:-1]))
    return scale.expand(*x.shape[:-1], 1).reshape(-1)


def _launch_stats(
    x: Tensor, scale: Tensor, scaled: int, factor: float, outs: list[Tensor], **wanted: bool
) -> None:
    outer, inner, vocab = x.shape
    rows = outer * inner
    vector = _vector(x)
    depth = _depth(vector, x)
    parts_possible = vocab // (LANES * depth * vector * PART_TILES_MIN)
    parts_wanted = _ceil(_programs_wanted(x.device), rows)
    parts = max(1, min(parts_wanted, parts_possible, PARTS_MAX))
    partial = outs[0] if parts == 1 else outs[0].new_empty(5, rows, parts)
    of_scale = (factor, scale.stride(0), scaled)
    kernels.row_stats_kernel[(rows * parts,)](
        x, scale, *outs, partial, *of_scale, rows, vocab, inner, *x.stride(), parts,
        DEPTH=depth, LANES=LANES, VEC=vector, **wanted, **OPTIONS,
    )  # fmt: skip
    if parts > 1:
        kernels.merge_parts_kernel[(rows,)](
            partial, scale, *outs, *of_scale, rows, parts, PARTS=PARTS_MAX, **wanted, **OPTIONS
        )


# ---- row_grad -----------------------------------------------------------------------------------------------------


def row_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    dtype: torch.dtype,
) -> Tensor:
    """A value in the row normal form, [..., V] of `dtype`, contiguous."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _write_grad(x, out, terms, affine, index, weight, softmax)
    return out


def row_grad_(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    """`row_grad` in x's dtype, written over x.

    Raises:
        RuntimeError: elements of x share memory.
    """
    if any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True)):
        raise RuntimeError(
            "`x` must not be expanded, since it is written to; "
            f"got shape {list(x.shape)} with strides {list(x.stride())}"
        )
    _write_grad(x, x, terms, affine, index, weight, softmax)


def _write_grad(
    x: Tensor,
    out: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
) -> None:
    if x.numel() == 0:
        return
    rows = prod(x.shape[:-1])
    lead = x.dim() - 1
    of_rows = [
        t.reshape(rows, *t.shape[lead:]).contiguous() for t in (terms, affine, index, weight)
    ]
    with torch.cuda.device_of(x):
        for launch in _launches(x, out):
            _launch_grad(launch.views, [t[launch.start : launch.stop] for t in of_rows], softmax)


def _launch_grad(views: tuple[Tensor, ...], of_rows: list[Tensor], softmax: bool) -> None:
    x, out = views
    terms, _, index, _ = of_rows
    outer, inner, vocab = x.shape
    rows = outer * inner
    vector = _vector(x, out)
    depth = _depth(vector, x, out)
    tiles = _ceil(vocab, LANES * depth * vector)
    parts = max(_ceil(tiles, PART_TILES_MAX), min(tiles, _ceil(_programs_wanted(x.device), rows)))
    kernels.row_grad_kernel[(rows * parts,)](
        x, out, *of_rows, vocab, inner, *x.stride(), *out.stride(), parts,
        K=terms.shape[1], M=index.shape[1], SOFTMAX=softmax,
        DEPTH=depth, LANES=LANES, VEC=vector, **OPTIONS,
    )  # fmt: skip
