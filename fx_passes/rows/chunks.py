"""The sizes of chunks of logits [N, V]: plain numbers, for the operators and for the pass reporting them.

All logits are cut into eighths, or quarters if an eighth has too few rows. Larger chunks would only take more memory.
Smaller chunks would starve the matmuls, because they read all weights for each chunk (on an H200, 8192 x 4096 x 128256
in bfloat16, chunks of 256 rows took 53.0 ms, of 2048 rows 37.7 ms, of 4096 rows 35.1 ms, and the matmul alone 32.7 ms;
on two cores, `bench lm_head`'s policy loss of 2048 x 1024 x 32000 in float32 took 1.05 of inductor's time with 256
rows, 0.94 with 512, 0.92 with 1024). The weights are [V, D] and a chunk is [rows, V]: a chunk of 2 D rows, at most 512,
is read and written for longer than the weights. It has a byte limit, too: 512 rows have 32 MiB or more, fewer rows less
in proportion. No chunk is larger than 512 MiB.

A loop without a matmul reads nothing twice: a chunk is a 32nd of the logits, 2 MiB at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARE, LARGEST_SHARE = 8, 4
SHARE_GIVEN = 32  # without a matmul
ROWS_MIN, ROWS_OF_DEPTH = 512, 2
LEAST_BYTES, MIN_BYTES, MAX_BYTES = 2 << 20, 32 << 20, 512 << 20
COLUMNS_MULTIPLE = 64  # keeps the rows of a chunk aligned, and the matmuls' tiles full
COLUMNS_MIN = 512  # a narrower chunk wastes the matmuls; then rows, whatever the sums cost


@dataclass(frozen=True)
class Sizes:
    """Logits [rows, vocab] of `itemsize` bytes each; `limit` are the bytes of a chunk, 0 for the default.

    A chunk's rows are a multiple of `multiple`, if as many fit. A matmul of [rows, `depth`] computes them; 0: none.
    """

    rows: int
    vocab: int
    itemsize: int
    limit: int = 0
    multiple: int = 1
    depth: int = ROWS_MIN

    @property
    def bytes(self) -> int:
        return self.rows * self.vocab * self.itemsize

    @property
    def chunk_bytes(self) -> int:
        """The limits of a chunk."""
        least = min(ROWS_OF_DEPTH * self.depth, ROWS_MIN)
        some_rows = min(least * self.vocab * self.itemsize, self.bytes // LARGEST_SHARE)
        share = self.bytes // (SHARE if self.depth else SHARE_GIVEN)
        floor = max(MIN_BYTES * least // ROWS_MIN, LEAST_BYTES)
        return self.limit or min(max(share, some_rows, floor), MAX_BYTES)

    @property
    def row_chunk(self) -> int:
        """Rows of a chunk of whole rows."""
        fit = self.chunk_bytes // max(self.vocab * self.itemsize, 1)
        size = _even(self.rows, fit)
        aligned = -(-size // self.multiple) * self.multiple
        return min(aligned, self.rows) if aligned <= fit else size

    @property
    def column_chunk(self) -> int:
        """Columns of a chunk of whole columns."""
        fit = self.chunk_bytes // max(self.rows * self.itemsize, 1)
        size = _even(self.vocab, fit)
        aligned = -(-size // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
        return min(aligned, self.vocab) if aligned <= fit else size

    @property
    def whole(self) -> bool:
        """One chunk holds all logits."""
        return self.row_chunk >= self.rows

    def by_columns(self, wanted: Sequence[bool]) -> bool:
        """Whether backward cuts columns: then hidden's gradient is a sum over chunks, instead of the weight's.

        Only for half precision, where a sum takes a buffer in float32 beside the gradient, and where that of hidden
        is smaller. In float32 the sum is the gradient itself. See NOTE [The same logits twice].

        Args:
            wanted: the computed ones of the gradients of hidden, weight and bias.
        """
        of_hidden, of_weight, _ = wanted
        if self.itemsize > 2 or self.whole or self.column_chunk < min(COLUMNS_MIN, self.vocab):
            return False
        return (self.rows if of_hidden else 0) < (self.vocab if of_weight else 0)


# NOTE [The same logits twice]
# Backward makes the logits again. Where it multiplies the same rows by the same matrix as forward did, it gets the same
# bits, and what is subtracted from them (a maximum, an expected value) is what was taken of them. Chunks of columns are
# another matmul, whose rounding may differ: in float32 two temperatures' entropies had twice the error of eager code.
# In half precision nearly all elements are rounded to the same number again; the others differ by one rounding, as
# eager's do from the truth.


def _even(total: int, fit: int) -> int:
    """The size of the fewest equal pieces within the limit."""
    pieces = max(-(-total // max(fit, 1)), 1)
    return -(-total // pieces)
