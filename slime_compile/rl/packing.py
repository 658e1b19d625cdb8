"""The positions of a micro-batch's samples in its logits: `Packing` describes one rank's part.

A trainer's logits hold many samples: packed one after another (`thd`, `[1, T, V]`) or padded to one length (`bshd`,
`[B, S, V]`), and under context parallelism each rank has only some positions of each.

Not handled: any other way to share positions between ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

Format = Literal["thd", "bshd"]
ContextParallel = Literal["none", "zigzag", "all_gather"]


class _Segment(NamedTuple):
    """`length` rows from `row` on hold the sample's positions from `position` on."""

    sample: int
    row: int
    position: int
    length: int


@dataclass(frozen=True)
class Packing:
    """One rank's rows of a micro-batch.

    The three ways to share a sequence between `cp_size` context-parallel ranks:

    - `"none"`: every position is here; `cp_size` is 1.
    - `"zigzag"` (ring attention): each sample, padded to a multiple of `2 * cp_size`, is cut into
      that many chunks; rank r has chunks r and `2 * cp_size - 1 - r`. This balances causal
      attention.
    - `"all_gather"`: the samples are concatenated first, and rank r holds rows
      `[r * rows, (r + 1) * rows)` of the result, so a sample may lie on one rank or on several.

    Attributes:
        total_lengths: tokens of each sample, prompt and response.
        response_lengths: response tokens of each sample, at its end. At most `total_length - 1`:
            no row predicts the first token of a sample.
        rows: rows of the logits on this rank, padding at the end included; None for the least
            possible number.
        format: `"thd"` (packed) or `"bshd"` (padded).
        padded_length: `S`, the length every sample is padded to. Required for `"bshd"`, refused for
            `"thd"`.
        context_parallel: see above.
        cp_rank: this rank in the context-parallel group.
        cp_size: ranks in the context-parallel group.

    Raises:
        ValueError: inconsistent lengths, too few rows, or `"bshd"` with `"all_gather"`.
    """

    total_lengths: Sequence[int]
    response_lengths: Sequence[int]
    rows: int | None = None
    format: Format = "thd"
    padded_length: int | None = None
    context_parallel: ContextParallel = "none"
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_lengths", tuple(self.total_lengths))
        object.__setattr__(self, "response_lengths", tuple(self.response_lengths))
        self._check_options()
        self._check_lengths()
        needed = self._rows_needed()
        exact = self.format == "bshd"  # nothing follows the last sample's own padding
        if self.rows is not None and (self.rows < needed or (exact and self.rows != needed)):
            raise ValueError(
                f"`rows` must be {'' if exact else 'at least '}{needed} to hold "
                f"{len(self.total_lengths)} samples ({self.format}, {self.context_parallel}, "
                f"cp_size {self.cp_size}), got {self.rows}"
            )

    def _check_options(self) -> None:
        for name, value, valid in (
            ("format", self.format, get_args(Format)),
            ("context_parallel", self.context_parallel, get_args(ContextParallel)),
        ):
            if value not in valid:
                raise ValueError(f"`{name}` must be one of {', '.join(valid)}, got {value!r}")
        if self.format == "bshd" and self.context_parallel == "all_gather":
            raise ValueError(
                "`format` 'bshd' cannot be used with `context_parallel` 'all_gather': the layout "
                "cuts concatenated samples, and padded samples are not concatenated; "
                "use 'thd', or 'zigzag'"
            )
        if self.context_parallel == "none" and self.cp_size != 1:
            raise ValueError(
                "`context_parallel` must be 'zigzag' or 'all_gather' for "
                f"cp_size {self.cp_size}, got 'none'"
            )
        if not 0 <= self.cp_rank < self.cp_size:
            raise ValueError(f"`cp_rank` must be in [0, {self.cp_size}), got {self.cp_rank}")
        if (self.padded_length is None) == (self.format == "bshd"):
            raise ValueError(
                "`padded_length` must be given for 'bshd' and only there, "
                f"got {self.padded_length} for '{self.format}'"
            )

    def _check_lengths(self) -> None:
        if len(self.total_lengths) != len(self.response_lengths):
            raise ValueError(
                f"`response_lengths` must have {len(self.total_lengths)} entries, one per sample, "
                f"got {len(self.response_lengths)}"
            )
        for sample, (total, response) in enumerate(
            zip(self.total_lengths, self.response_lengths, strict=True)
        ):
            if total < 1 or not 0 <= response < total:
                raise ValueError(
                    f"`response_lengths[{sample}]` must be in [0, total length - 1] = "
                    f"[0, {total - 1}] (no row predicts a sample's first token), got {response}"
                )
            if self.padded_length is not None and total > self.padded_length:
                raise ValueError(
                    f"`total_lengths[{sample}]` must be at most padded_length "
                    f"{self.padded_length}, got {total}"
                )

    def _sample_rows(self, total: int) -> int:
        """Rows that one sample takes on a rank, unless samples are cut across (`all_gather`)."""
        length = total if self.padded_length is None else self.padded_length
        if self.context_parallel == "zigzag":
            return 2 * -(-length // (2 * self.cp_size))
        return length

    def _rows_needed(self) -> int:
        if self.context_parallel == "all_gather":
            return -(-sum(self.total_lengths) // self.cp_size)
        return sum(map(self._sample_rows, self.total_lengths))

    @property
    def local_rows(self) -> int:
        """Rows of the logits on this rank, padding included."""
        return self._rows_needed() if self.rows is None else self.rows

    def segments(self) -> Iterator[_Segment]:
        """The real positions on this rank, in the order of their rows."""
        if self.context_parallel == "all_gather":
            yield from self._contiguous_segments()
            return
        sample_rows = [self._sample_rows(total) for total in self.total_lengths]
        starts = accumulate(sample_rows, initial=0)
        chunks = (
            (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank)
            if self.context_parallel == "zigzag"
            else (0,)
        )
        for sample, (total, rows, row) in enumerate(
            zip(self.total_lengths, sample_rows, starts, strict=False)
        ):
            chunk_rows = rows // len(chunks)
            for place, chunk in enumerate(chunks):
                length = min(chunk_rows, total - chunk * chunk_rows)
                if length > 0:
                    yield _Segment(sample, row + place * chunk_rows, chunk * chunk_rows, length)

    def _contiguous_segments(self) -> Iterator[_Segment]:
        first = self.cp_rank * self.local_rows
        starts = accumulate(self.total_lengths, initial=0)
        for sample, (start, total) in enumerate(zip(starts, self.total_lengths, strict=False)):
            low = max(start, first)
            high = min(start + total, first + self.local_rows)
            if low < high:
                yield _Segment(sample, low - first, low - start, high - low)
