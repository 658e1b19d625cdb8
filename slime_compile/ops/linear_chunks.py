"""The operators over `hidden @ weight.t() + bias` by chunks of logits, on the CPU and on CUDA.

`linear_row_stats` and `linear_row_grad` compute what `linear_reference.py` says. At any time there is one chunk of
logits, in a buffer that is made once: a matmul fills it, the row operators of the device read it or write the
gradient over it, and matmuls take that on. Nothing waits for the device, and for a chunk nothing is allocated that has
more than a few numbers per row: a CUDA graph may capture it.

Which chunks:

    forward                rows, since statistics need whole rows
    backward, by rows      hidden's gradient is complete after each chunk, the weight's is a sum over chunks
    backward, by columns   the weight's gradient is complete after each chunk, hidden's is a sum over chunks

The smaller sum wins; `fx_passes/rows/chunks.py` says how large a chunk is. A sum over chunks is kept in float32
(float64 for float64): for narrower dtypes each chunk's share is rounded to the dtype once, by the matmul, and the sum
once more at the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_passes.rows.chunks import Sizes
from slime_compile.ops.operators import Kernels
from slime_compile.ops.reference import compute_dtype

__all__ = [
    "Head",
    "Statistics",
    "linear_row_grad",
    "linear_row_stats",
]


_BLOCK_ELEMENTS = 1 << 18  # 1 MiB in float32
_MATMUL_COLUMNS = 1024  # float32 on the CPU: MKL took 5 to 9 % longer for 32,000 at once


@dataclass(frozen=True)
class Statistics:
    """What forward takes of the logits: `max`, `log_sum`, and where read `mean`, `total`, for each scale and factor."""

    scales: Sequence[Tensor | None]
    factors: Sequence[float]
    means: Sequence[bool]
    totals: Sequence[bool]

    def new(self, hidden: Tensor) -> Tensor:
        """[S, 4, N, 1]."""
        shape = [len(self.scales), 4, hidden.shape[0], 1]
        return hidden.new_empty(shape, dtype=compute_dtype(hidden.dtype))

    def take(self, kernels: Kernels, x: Tensor, at: slice, stats: Tensor) -> None:
        """Writes the statistics of the chunk `x` of rows `at`."""
        every = zip(self.scales, self.factors, self.means, self.totals, strict=True)
        for k, (scale, factor, mean, total) in enumerate(every):
            of_rows = scale[at] if scale is not None and scale.dim() else scale
            found = kernels.row_stats(x, of_rows, factor, mean, total)
            for into, each in zip(stats[k], found, strict=True):
                into[at] = each


@dataclass(frozen=True)
class Head:
    """What makes the logits: hidden [N, D], weight [V, D], bias [V] or None, all of one dtype."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def sizes(self, limit: int) -> Sizes:
        """`limit` are the bytes of a chunk, 0 for the default."""
        (rows, depth), vocab = self.hidden.shape, self.weight.shape[0]
        return Sizes(rows, vocab, self.hidden.element_size(), limit, depth=depth)

    def fill(self, buffer: Tensor, rows: slice, columns: slice) -> Tensor:
        """Makes logits[rows, columns], in the memory of a buffer."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        out = buffer[: shape[0] * shape[1]].view(shape)
        hidden, weight = self.hidden[rows], self.weight[columns]
        in_blocks = out.dtype == torch.float32 and out.device.type == "cpu"
        for at in _pieces(weight.shape[0], _MATMUL_COLUMNS if in_blocks else weight.shape[0]):
            if self.bias is None:
                torch.mm(hidden, weight[at].t(), out=out[:, at])
            else:
                torch.addmm(self.bias[columns][at], hidden, weight[at].t(), out=out[:, at])
        return out


# ---- forward ------------------------------------------------------------------------------------------------------


def linear_row_stats(
    kernels: Kernels, head: Head, statistics: Statistics, index: Tensor, limit: int
) -> tuple[Tensor, Tensor]:
    """See `linear_reference.linear_row_stats`; `limit` are the bytes of a chunk, 0 for the default."""
    stats = statistics.new(head.hidden)
    picked = head.hidden.new_empty(index.shape)
    size = head.sizes(limit).row_chunk
    every = slice(0, head.weight.shape[0])
    buffer = head.hidden.new_empty(size * every.stop)
    for at in _pieces(head.hidden.shape[0], size):
        x = head.fill(buffer, at, every)
        torch.gather(x, 1, index[at], out=picked[at])
        statistics.take(kernels, x, at, stats)
    return stats, picked


def _pieces(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, max(size, 1)):
        yield slice(start, min(start + size, total))


def stats_scratch(head: Head, limit: int) -> list[Tensor]:
    """What forward holds beside its results: the buffer."""
    size = head.sizes(limit).row_chunk
    return [head.hidden.new_empty(size * head.weight.shape[0])]


# ---- backward -----------------------------------------------------------------------------------------------------


def linear_row_grad(
    kernels: Kernels,
    head: Head,
    coefficients: tuple[Tensor, Tensor, Tensor, Tensor],
    wanted: Sequence[bool],
    transposed: bool,
    limit: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `linear_reference.linear_row_grad`; `coefficients` are terms, affine, index, values."""
    sizes = head.sizes(limit)
    if sizes.by_columns(wanted):
        return _by_column_chunks(
            kernels, head, coefficients, wanted, transposed, sizes.column_chunk
        )
    return _by_row_chunks(kernels, head, coefficients, wanted, transposed, sizes.row_chunk)


def grad_scratch(head: Head, wanted: Sequence[bool], limit: int) -> list[Tensor]:
    """What backward holds beside its results: the buffer, and a sum in float32 where the gradient is narrower."""
    sizes, (rows, vocab) = head.sizes(limit), (head.hidden.shape[0], head.weight.shape[0])
    by_columns = sizes.by_columns(wanted)
    elements = rows * sizes.column_chunk if by_columns else sizes.row_chunk * vocab
    made = [head.hidden.new_empty(elements)]
    summed = head.hidden if by_columns else head.weight
    wide = compute_dtype(summed.dtype)
    if wanted[0 if by_columns else 1] and wide != summed.dtype and not sizes.whole:
        made.append(summed.new_empty(summed.shape, dtype=wide))
    return made


class Sum:
    """A matrix that is the sum of one product per chunk, or the only product."""

    def __init__(self, out: Tensor, chunks: int) -> None:
        self.out = out
        wide = compute_dtype(out.dtype)
        apart = wide != out.dtype and chunks > 1
        self.total = out.new_empty(out.shape, dtype=wide) if apart else out
        self.added, self.chunks = 0, chunks

    def add(self, left: Tensor, right: Tensor) -> None:
        first, last = self.added == 0, self.added == self.chunks - 1
        self.added += 1
        if self.total is self.out:
            self.out.addmm_(left, right, beta=0 if first else 1)
            return
        torch.mm(left, right, out=self.out)
        for total, share in zip(*map(_blocks, (self.total, self.out)), strict=True):
            if first:
                total.copy_(share)
            else:
                total.add_(share)
            if last:
                share.copy_(total)

    def result(self) -> Tensor:
        """Complete after the last chunk; 0 where there is none."""
        return self.out if self.chunks else self.out.zero_()


def _blocks(matrix: Tensor) -> Sequence[Tensor]:
    """Rows at a time on the CPU, where an addend of another dtype is converted whole first; else all of them."""
    if matrix.device.type != "cpu" or matrix.shape[1] == 0:
        return [matrix]
    return matrix.split(max(_BLOCK_ELEMENTS // matrix.shape[1], 1))


def _by_row_chunks(
    kernels: Kernels,
    head: Head,
    coefficients: tuple[Tensor, Tensor, Tensor, Tensor],
    wanted: Sequence[bool],
    transposed: bool,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = head.hidden.shape[0], head.weight.shape[0]
    pieces = list(_pieces(rows, size))
    sums = _Gradients(head, wanted, transposed, len(pieces))
    buffer = head.hidden.new_empty(size * vocab)
    for at in pieces:
        terms, affine, index, values = (each[at] for each in coefficients)
        x = head.fill(buffer, at, slice(0, vocab))
        kernels.row_grad_(x, terms, affine, index, values, softmax=False)
        sums.add(x, at)
    return sums.result()


class _Gradients:
    """The gradients of hidden, weight and bias, from chunks of rows of the gradient of logits."""

    def __init__(self, head: Head, wanted: Sequence[bool], transposed: bool, chunks: int) -> None:
        of_hidden, of_weight, of_bias = wanted
        self.head, self.wanted, self.transposed = head, wanted, transposed
        weight = head.weight.t() if transposed else head.weight
        self.hidden = _empty_like(head.hidden, of_hidden)
        self.weight = Sum(_empty_like(weight, of_weight), chunks)
        self.bias = _bias_sum(head.hidden, head.weight.shape[0] if of_bias else 0)
        self.share = torch.empty_like(self.bias)

    def add(self, x: Tensor, at: slice) -> None:
        of_hidden, of_weight, of_bias = self.wanted
        hidden = self.head.hidden[at]
        if of_hidden:
            torch.mm(x, self.head.weight, out=self.hidden[at])
        if of_weight and self.transposed:
            self.weight.add(hidden.t(), x)
        elif of_weight:
            self.weight.add(x.t(), hidden)
        if of_bias:
            self.bias.add_(torch.sum(x, 0, dtype=self.bias.dtype, out=self.share))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight.result(), self.bias.to(self.head.hidden.dtype)


def _by_column_chunks(
    kernels: Kernels,
    head: Head,
    coefficients: tuple[Tensor, Tensor, Tensor, Tensor],
    wanted: Sequence[bool],
    transposed: bool,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of_hidden, of_weight, of_bias = wanted
    hidden, weight = head.hidden, head.weight
    rows, vocab = hidden.shape[0], weight.shape[0]
    terms, affine, index, values = coefficients
    pieces = list(_pieces(vocab, size))
    grad_hidden = Sum(_empty_like(hidden, of_hidden), len(pieces))
    grad_weight = _empty_like(weight.t() if transposed else weight, of_weight)
    grad_bias = hidden.new_empty(vocab if of_bias else 0)
    buffer = hidden.new_empty(rows * size)
    shifted = torch.empty_like(index, memory_format=torch.contiguous_format)
    for at in pieces:
        # a column of another chunk is outside this one, where it matches nothing
        torch.sub(index, at.start, out=shifted)
        x = head.fill(buffer, slice(0, rows), at)
        kernels.row_grad_(x, terms, affine, shifted, values, softmax=False)
        if of_hidden:
            grad_hidden.add(x, weight[at])
        if of_weight and transposed:
            torch.mm(hidden.t(), x, out=grad_weight[:, at])
        elif of_weight:
            torch.mm(x.t(), hidden, out=grad_weight[at])
        if of_bias:
            torch.sum(x, 0, out=grad_bias[at])
    return grad_hidden.result(), grad_weight, grad_bias


def _empty_like(tensor: Tensor, made: bool) -> Tensor:
    """A contiguous tensor of the same shape, or one without elements."""
    return tensor.new_empty(tensor.shape if made else [0])


def _bias_sum(hidden: Tensor, vocab: int) -> Tensor:
    return hidden.new_zeros(vocab, dtype=compute_dtype(hidden.dtype))
