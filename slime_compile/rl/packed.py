"""Where the samples of a micro-batch lie in its logits, so that the loss is one pass over all of
them.

A trainer's logits hold many samples: packed one after another (`thd`, `[1, T, V]`) or padded to one
length (`bshd`, `[B, S, V]`), and under context parallelism each rank has only some positions of
each. `Packing` describes one rank's part; `shifted_targets` gives every row its target, so that
log-probs and entropy are computed on all rows at once; `response_slices` says which rows predict
each sample's response, and `split_responses` and `join_responses` go from values per row to values
per sample and back.

Only indices are handled here. The loss itself is compiled by the caller, over rows: a graph that
sees rows and targets alone depends on a micro-batch by its number of rows, not by its samples'
lengths. `packed_log_probs` is the whole path for eager callers.

Not handled: more than one response per sample, and any other way to share positions between ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from slime_compile.rl.log_probs import log_probs_and_entropy

Format = Literal["thd", "bshd"]
ContextParallel = Literal["none", "zigzag", "all_gather"]


class ResponseSlice(NamedTuple):
    """Consecutive rows of one rank that predict consecutive response tokens of one sample."""

    rows: slice
    response: slice


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
      that many chunks; rank r holds chunk r and chunk `2 * cp_size - 1 - r`, which evens out the
      work of causal attention.
    - `"all_gather"`: the samples are concatenated first, and rank r holds rows `[r * rows, (r + 1)
      * rows)` of that, so a sample may lie on one rank or on several.

    Attributes:
        total_lengths: tokens of each sample, prompt and response.
        response_lengths: response tokens of each sample, at its end. At most `total_length - 1`:
            the first token of a sample has no row that predicts it.
        rows: rows of the logits on this rank, padding at the end included; None for as few as hold
            the samples.
        format: `"thd"` (packed) or `"bshd"` (padded).
        padded_length: `S`, the length every sample is padded to. Required for `"bshd"`, refused for
            `"thd"`.
        context_parallel: see above.
        cp_rank: this rank in the context-parallel group.
        cp_size: ranks in the context-parallel group.

    Raises:
        ValueError: lengths that do not fit together, too few rows, or `"bshd"` with `"all_gather"`.
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
                "`format` 'bshd' cannot be used with `context_parallel` 'all_gather': that layout "
                "cuts the concatenated samples, and padded samples are not concatenated; "
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

    def _segments(self) -> Iterator[_Segment]:
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


def shifted_targets(tokens: Sequence[Tensor], packing: Packing, *, fill: int = 0) -> Tensor:
    """The token that each row of the packed logits predicts.

    Args:
        tokens: per sample, `[total_length]` integer: the whole sample on every rank, as a row's
            target may be on another.
        packing: where the samples lie.
        fill: target of rows that predict nothing: a sample's last position and padding. The default
            is a valid token, for a gather; use -100 for `F.cross_entropy`.

    Returns:
        `[packing.local_rows]` int64, on the device of `tokens`.

    Raises:
        ValueError: `tokens` does not agree with `packing`.
    """
    shapes = [tuple(token.shape) for token in tokens]
    if shapes != [(total,) for total in packing.total_lengths]:
        raise ValueError(
            f"`tokens` must have one tensor per sample, of lengths {list(packing.total_lengths)}, "
            f"got shapes {shapes}"
        )
    if not tokens:
        return torch.full((packing.local_rows,), fill, dtype=torch.int64)
    target = tokens[0].new_full((packing.local_rows,), fill, dtype=torch.int64)
    for sample, row, position, length in packing._segments():
        predicted = tokens[sample][position + 1 : position + 1 + length]
        target[row : row + len(predicted)] = predicted
    return target


def response_slices(packing: Packing) -> list[tuple[ResponseSlice, ...]]:
    """Per sample, the rows of this rank that predict its response, in order.

    A sample has no slice where this rank predicts none of its response, one usually, two under
    `"zigzag"`. Row `position` predicts the token at `position + 1`, so the rows begin one before
    the response.

    Example:
        >>> response_slices(Packing([5], [2]))
        [(ResponseSlice(rows=slice(2, 4, None), response=slice(0, 2, None)),)]
    """
    slices: list[list[ResponseSlice]] = [[] for _ in packing.total_lengths]
    for sample, row, position, length in packing._segments():
        total, response = packing.total_lengths[sample], packing.response_lengths[sample]
        first = total - response - 1  # the position that predicts the first response token
        low, high = max(position, first), min(position + length, total - 1)
        if low < high:
            rows = slice(row + low - position, row + high - position)
            slices[sample].append(ResponseSlice(rows, slice(low - first, high - first)))
    return [tuple(sample_slices) for sample_slices in slices]


def split_responses(values: Tensor, packing: Packing) -> list[Tensor]:
    """Values per row to values per sample: each sample's response on this rank, its parts one after
    another.

    Args:
        values: `[packing.local_rows, ...]`, any dtype, for instance log-probs.
        packing: where the samples lie.

    Returns:
        Per sample `[response rows on this rank, ...]`. An empty one is a slice of `values` too: it
        stays attached to autograd, so that a rank without a response takes part in the backward.

    Raises:
        ValueError: `values` has another number of rows.
    """
    _check_rows("values", values, packing)
    return [
        torch.cat([values[part.rows] for part in parts] or [values[:0]])
        for parts in response_slices(packing)
    ]


def join_responses(values: Sequence[Tensor], packing: Packing, *, fill: float = 0.0) -> Tensor:
    """Values per sample to values per row, the inverse of `split_responses`: to compute a loss on
    rows.

    Args:
        values: per sample, `[response rows on this rank]`, one dtype and device, for instance old
            log-probs or advantages.
        packing: where the samples lie.
        fill: value of the rows that predict no response token.

    Returns:
        `[packing.local_rows]`, dtype and device of `values`.

    Raises:
        ValueError: `values` does not agree with `packing`.
    """
    slices = response_slices(packing)
    expected = [(sum(part.rows.stop - part.rows.start for part in parts),) for parts in slices]
    shapes = [tuple(value.shape) for value in values]
    if shapes != expected:
        raise ValueError(f"`values` must have shapes {expected}, one per sample, got {shapes}")
    if not values:
        return torch.full((packing.local_rows,), fill)
    joined = values[0].new_full((packing.local_rows,), fill)
    for value, parts in zip(values, slices, strict=True):
        taken = 0
        for part in parts:
            length = part.rows.stop - part.rows.start
            joined[part.rows] = value[taken : taken + length]
            taken += length
    return joined


def row_temperature(temperatures: Sequence[float], packing: Packing, logits: Tensor) -> Tensor:
    """Each row's temperature, from one per sample: rows are divided by `result.unsqueeze(-1)`.

    Args:
        temperatures: of the rollout, per sample, above 0.
        packing: where the samples lie.
        logits: floating, what will be divided: gives device and dtype.

    Returns:
        `[packing.local_rows]`, 1 for padding; float64 for float64 logits and float32 otherwise.

    Raises:
        ValueError: a temperature that is not above 0, or not one per sample.
    """
    if len(temperatures) != len(packing.total_lengths):
        raise ValueError(
            f"`temperatures` must have {len(packing.total_lengths)} entries, one per sample, "
            f"got {len(temperatures)}"
        )
    if not all(value > 0 for value in temperatures):
        raise ValueError(f"`temperatures` must be above 0, got {list(temperatures)}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = torch.ones(packing.local_rows, dtype=dtype)
    for sample, row, _, length in packing._segments():
        rows[row : row + length] = temperatures[sample]
    return rows.to(logits.device)


def flatten_logits(logits: Tensor, packing: Packing) -> Tensor:
    """Packed `[1, T, V]` or `[T, V]`, or padded `[B, S, V]`, logits as rows `[packing.local_rows,
    V]`.

    Raises:
        ValueError: `logits` does not have the rows that `packing` says.
    """
    if packing.format == "bshd":
        samples = len(packing.total_lengths)
        expected = [samples, packing.local_rows // max(samples, 1)]
    else:
        expected = [1, packing.local_rows]
    if list(logits.shape[:-1]) not in (expected, [packing.local_rows]):
        raise ValueError(
            f"`logits` must have shape {[*expected, 'V']} or [{packing.local_rows}, V], "
            f"got {list(logits.shape)}"
        )
    return logits.reshape(packing.local_rows, logits.shape[-1])


def packed_log_probs(
    logits: Tensor,
    tokens: Sequence[Tensor],
    packing: Packing,
    *,
    temperature: float | Sequence[float] = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Log-probs and entropies of each sample's response tokens, in one pass over all logits.

    For eager callers. It holds the logits and, in the backward, their gradient. In a function that
    is compiled for many micro-batches, compile what goes from rows and `shifted_targets` to a loss,
    and leave the samples' lengths outside.

    Args:
        logits: `[1, T, V]` or `[T, V]` (`"thd"`), `[B, S, V]` (`"bshd"`); any floating dtype. With a
            `group`, this rank's columns of them.
        tokens: per sample, `[total_length]` integer, see `shifted_targets`.
        packing: where the samples lie.
        temperature: what logits are divided by, one number or one per sample.
        with_entropy: whether to return the entropies.
        entropy_grad: whether the entropies carry a gradient.
        group: tensor-parallel group over which the vocabulary is sharded, equally.

    Returns:
        Log-probs and entropies (or None), per sample `[response rows on this rank]`, float32
        (float64 for float64 logits). Under `"all_gather"` what `redistribute_to_zigzag` takes.

    Raises:
        ValueError: arguments that do not agree with `packing`.
    """
    target = shifted_targets(tokens, packing)
    rows = flatten_logits(logits, packing)
    log_probs, entropy = log_probs_and_entropy(
        rows,
        target,
        group=group,
        temperature=temperature
        if isinstance(temperature, int | float)
        else row_temperature(temperature, packing, rows),
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
    )
    per_sample = split_responses(log_probs, packing)
    return per_sample, None if entropy is None else split_responses(entropy, packing)


def _check_rows(name: str, values: Tensor, packing: Packing) -> None:
    if values.dim() == 0 or values.shape[0] != packing.local_rows:
        raise ValueError(
            f"`{name}` must have {packing.local_rows} rows, got shape {list(values.shape)}"
        )
