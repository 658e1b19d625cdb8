"""Samples in packed logits: the loss is one pass over all of them.

`Packing` says where they lie. `shifted_targets` gives every row its target, so that log-probs and
entropy are computed on all rows at once; `response_slices` says which rows predict each sample's
response, and `split_responses` and `join_responses` go from values per row to values per sample and
back.

Only indices are handled here. The loss itself is compiled by the caller, over rows: a graph that
sees rows and targets alone depends on a micro-batch by its number of rows, not by its samples'
lengths. `packed_log_probs` is the whole path for eager callers.

Not handled: more than one response per sample.
"""

from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slime_compile.rl.log_probs import log_probs_and_entropy
from slime_compile.rl.packing import Packing


class ResponseSlice(NamedTuple):
    """Consecutive rows of one rank, predicting consecutive response tokens of one sample.

    Attributes:
        rows: the rows of this rank's logits.
        response: the predicted tokens, as positions in the sample's response.
    """

    rows: slice
    response: slice


def shifted_targets(tokens: Sequence[Tensor], packing: Packing, *, fill: int = 0) -> Tensor:
    """The target token of each row of the packed logits.

    Args:
        tokens: per sample, `[total_length]` integer: the whole sample on every rank, as a row's
            target may be on another.
        packing: the positions of the samples.
        fill: target of rows without one: a sample's last position and padding. The default
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
    for sample, row, position, length in packing.segments():
        predicted = tokens[sample][position + 1 : position + 1 + length]
        target[row : row + len(predicted)] = predicted
    return target


def response_slices(packing: Packing) -> list[tuple[ResponseSlice, ...]]:
    """Per sample, the rows of this rank predicting its response, in order.

    A sample has no slice if this rank predicts none of its response, one usually, two under
    `"zigzag"`. Row `position` predicts the token at `position + 1`, so the rows begin one before
    the response.

    Examples:
        >>> response_slices(Packing([5], [2]))
        [(ResponseSlice(rows=slice(2, 4, None), response=slice(0, 2, None)),)]
    """
    slices: list[list[ResponseSlice]] = [[] for _ in packing.total_lengths]
    for sample, row, position, length in packing.segments():
        total, response = packing.total_lengths[sample], packing.response_lengths[sample]
        first = total - response - 1  # the position that predicts the first response token
        low, high = max(position, first), min(position + length, total - 1)
        if low < high:
            rows = slice(row + low - position, row + high - position)
            slices[sample].append(ResponseSlice(rows, slice(low - first, high - first)))
    return [tuple(sample_slices) for sample_slices in slices]


def response_rows(packing: Packing) -> Tensor:
    """The rows of this rank predicting a response token, sample by sample.

    A compiled loss over `(hidden @ weight.t())[rows]` computes no other rows of the logits.

    Returns:
        `[response rows on this rank]` int64, on the CPU.
    """
    parts = [part.rows for parts in response_slices(packing) for part in parts]
    ranges = [torch.arange(rows.start, rows.stop) for rows in parts]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def split_response_rows(values: Tensor, packing: Packing) -> list[Tensor]:
    """Values at `response_rows` to values per sample, as `split_responses` gives them.

    Args:
        values: `[response rows on this rank, ...]`, any dtype.
        packing: the positions of the samples.

    Raises:
        ValueError: `values` has another number of rows.
    """
    counts = [
        sum(part.rows.stop - part.rows.start for part in parts)
        for parts in response_slices(packing)
    ]
    if values.dim() == 0 or values.shape[0] != sum(counts):
        raise ValueError(
            f"`values` must have {sum(counts)} rows, one per response token of this rank, "
            f"got shape {list(values.shape)}"
        )
    return list(values.split(counts))


def split_responses(values: Tensor, packing: Packing) -> list[Tensor]:
    """Values per row to values per sample: each sample's response on this rank, its parts one after
    another.

    Args:
        values: `[packing.local_rows, ...]`, any dtype, for instance log-probs.
        packing: the positions of the samples.

    Returns:
        Per sample `[response rows on this rank, ...]`. An empty one is a slice of `values` too: it
        stays attached to autograd, and a rank without a response takes part in backward.

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
        packing: the positions of the samples.
        fill: value of rows predicting no response token.

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


def row_temperature(
    temperatures: Sequence[float] | Tensor, packing: Packing, logits: Tensor
) -> Tensor:
    """Each row's temperature, from one per sample: rows are divided by `result.unsqueeze(-1)`.

    Args:
        temperatures: of the rollout, per sample, above 0; as a tensor, [samples].
        packing: the positions of the samples.
        logits: floating; only device and dtype are read.

    Returns:
        `[packing.local_rows]`, 1 for padding; float64 for float64 logits and float32 otherwise.

    Raises:
        ValueError: a temperature of 0 or less, or another number of temperatures than samples.
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
    for sample, row, _, length in packing.segments():
        rows[row : row + length] = temperatures[sample]
    return rows.to(logits.device)


def flatten_logits(logits: Tensor, packing: Packing) -> Tensor:
    """Packed `[1, T, V]` or `[T, V]`, or padded `[B, S, V]`, logits as rows `[packing.local_rows,
    V]`.

    Raises:
        ValueError: the rows of `logits` disagree with `packing`.
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
    temperature: float | Sequence[float] | Tensor = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Log-probs and entropies of each sample's response tokens, in one pass over all logits.

    For eager callers. Memory: the logits and, in backward, their gradient. For many micro-batches,
    compile the function from rows and `shifted_targets` to a loss, and keep the samples' lengths
    outside; the head then needs only `response_rows`. Compiled itself, it reads these rows alone:
    a head inside the same compiled function computes no others.

    Args:
        logits: `[1, T, V]` or `[T, V]` (`"thd"`), `[B, S, V]` (`"bshd"`); any floating dtype. With a
            `group`, this rank's columns of them.
        tokens: per sample, `[total_length]` integer, see `shifted_targets`.
        packing: the positions of the samples.
        temperature: divides the logits; one number (or a tensor without dimensions), or one per sample.
        with_entropy: whether to return the entropies.
        entropy_grad: whether the entropies carry a gradient.
        group: tensor-parallel group of equal vocabulary shards.

    Returns:
        Log-probs and entropies (or None), per sample `[response rows on this rank]`, float32
        (float64 for float64 logits). Under `"all_gather"`: the input of `redistribute_to_zigzag`.

    Raises:
        ValueError: arguments disagree with `packing`.
    """
    target = shifted_targets(tokens, packing)
    rows = flatten_logits(logits, packing)
    of_rows = _of_rows(temperature, packing, rows)
    split = split_responses
    if torch.compiler.is_compiling():
        chosen, split = response_rows(packing).to(rows.device), split_response_rows
        rows, target = rows[chosen], target[chosen]
        of_rows = of_rows[chosen] if isinstance(of_rows, Tensor) and of_rows.dim() else of_rows
    log_probs, entropy = log_probs_and_entropy(
        rows,
        target,
        group=group,
        temperature=of_rows,
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
    )
    return split(log_probs, packing), None if entropy is None else split(entropy, packing)


def _of_rows(
    temperature: float | Sequence[float] | Tensor, packing: Packing, logits: Tensor
) -> float | Tensor:
    """One temperature, or one of each row."""
    if isinstance(temperature, float | int | Real):  # numpy's numbers, too
        return float(temperature)
    if isinstance(temperature, Tensor) and temperature.dim() == 0:
        return temperature
    return row_temperature(temperature, packing, logits)


def _check_rows(name: str, values: Tensor, packing: Packing) -> None:
    if values.dim() == 0 or values.shape[0] != packing.local_rows:
        raise ValueError(
            f"`{name}` must have {packing.local_rows} rows, got shape {list(values.shape)}"
        )
