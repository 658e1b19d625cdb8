"""Micro-batches under a token cap.

A loss over a vocabulary of 150,000 takes about a megabyte a token, so one micro-batch that is
longer than planned ends the job. `partition_by_tokens` balances micro-batches and never exceeds the
cap; `max_tokens_for` of `memory_model` says what the cap can be.

Not handled: sequences longer than the cap (an error says which); cutting a sequence is the
trainer's decision.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

import torch
import torch.distributed as dist

from slime_compile.rl.bins import first_fit_decreasing, karmarkar_karp
from slime_compile.rl.redistribute import group_device


def partition_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    at_least: int = 0,
    multiple_of: int = 1,
    group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Partition sequences into micro-batches of at most `max_tokens` tokens, as evenly as possible.

    The number of micro-batches is the largest of `micro_batch_count` on each rank of `group` and
    `at_least`, rounded up to a multiple of `multiple_of`. Karmarkar-Karp balances them. If its
    result breaks the cap, first-fit decreasing replaces it and keeps the cap.

    Args:
        lengths: tokens of each sequence.
        max_tokens: the cap, in tokens: `max_tokens_for`, times the context-parallel size.
        at_least: fewest micro-batches, for instance another rank's number.
        multiple_of: the virtual pipeline's group of micro-batches.
        group: data-parallel group. All its ranks make this call, each with its own lengths, and
            get the same number of micro-batches. One all-reduce of three numbers.

    Returns:
        Per micro-batch the indices into `lengths`, ascending; none is empty. The one with the most
        tokens comes first: a run too large for the memory ends at its first step.

    Raises:
        ValueError: a sequence is longer than `max_tokens`, or there are fewer sequences (here, or
            on a rank of `group`) than micro-batches.
        RuntimeError: another rank of `group` raised.
    """
    problem = _problem(lengths, max_tokens, at_least, multiple_of)
    packed = [] if problem else first_fit_decreasing(lengths, max_tokens)
    needed, fewest = max(_count(packed), at_least), len(lengths)
    if group is not None:
        needed, fewest = _agree(needed, fewest, problem is not None, group)
    if problem is not None:
        raise ValueError(problem)
    count = -(-needed // multiple_of) * multiple_of
    if fewest < count:
        raise ValueError(
            f"`lengths` must have at least {count} sequences, one per micro-batch "
            f"({needed} needed for {max_tokens} tokens each, rounded up to a multiple of "
            f"{multiple_of}), got {fewest}{' on a rank' if group is not None else ''}"
        )
    balanced, most_tokens = karmarkar_karp(lengths, count)
    if most_tokens <= max_tokens:
        return _grouped(balanced, lengths)
    return _split_up_to(_grouped(packed, lengths), lengths, count)


def micro_batch_count(lengths: Sequence[int], max_tokens: int) -> int:
    """The number of micro-batches of at most `max_tokens` tokens for the sequences.

    At most 11/9 of the fewest possible plus 6/9: first-fit decreasing's bound (Dosa, 2007, "The
    tight bound of first fit decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9").

    Raises:
        ValueError: a sequence is longer than `max_tokens`.
    """
    problem = _problem(lengths, max_tokens, at_least=0, multiple_of=1)
    if problem is not None:
        raise ValueError(problem)
    return _count(first_fit_decreasing(lengths, max_tokens))


def _count(partition_of: list[int]) -> int:
    return max(partition_of, default=-1) + 1


def _grouped(partition_of: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """The partitions, given the number of each sequence's: most tokens first, indices ascending."""
    partitions: list[list[int]] = [[] for _ in range(_count(partition_of))]
    tokens = [0] * len(partitions)
    for index, partition in enumerate(partition_of):
        partitions[partition].append(index)
        tokens[partition] += lengths[index]
    fullest_first = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)
    return [partitions[i] for i in fullest_first]


def _problem(
    lengths: Sequence[int], max_tokens: int, at_least: int, multiple_of: int
) -> str | None:
    for name, value, least in (
        ("max_tokens", max_tokens, 1),
        ("at_least", at_least, 0),
        ("multiple_of", multiple_of, 1),
    ):
        if value < least:
            return f"`{name}` must be at least {least}, got {value}"
    for index, length in enumerate(lengths):
        if length < 1:
            return f"`lengths[{index}]` must be at least 1, got {length}"
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is None or lengths[longest] <= max_tokens:
        return None
    over = sum(length > max_tokens for length in lengths)
    return (
        f"`lengths[{longest}]` must be at most max_tokens = {max_tokens}, got {lengths[longest]}: "
        f"{lengths[longest] - max_tokens} too long"
        + (f", and {over - 1} more sequences are too long" if over > 1 else "")
        + "; drop or cut it, or raise the cap"
    )


def _agree(needed: int, fewest: int, failed: bool, group: dist.ProcessGroup) -> tuple[int, int]:
    """The most micro-batches and the fewest sequences of all ranks."""
    numbers = torch.tensor([needed, -fewest, int(failed)], device=group_device(group))
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    needed, negative_fewest, any_failed = numbers.tolist()
    if any_failed and not failed:
        raise RuntimeError(
            "another rank of the group cannot partition its sequences, see its error"
        )
    return needed, -negative_fewest


def _split_up_to(
    partitions: list[list[int]], lengths: Sequence[int], count: int
) -> list[list[int]]:
    """More partitions, by halving the one with the most tokens; none gets more tokens.

    `partitions` come with the most tokens first, and go so.
    """

    def negative_tokens(indices: list[int]) -> int:
        return -sum(lengths[i] for i in indices)

    missing = count - len(partitions)
    can_split = [place for place, indices in enumerate(partitions) if len(indices) > 1][:missing]
    split = set(can_split)
    heap = [(negative_tokens(partitions[place]), partitions[place]) for place in can_split]
    result = [part for place, part in enumerate(partitions) if place not in split]
    for _ in range(missing):
        _, indices = heappop(heap)
        inside = [lengths[i] for i in indices]
        for places in _grouped(karmarkar_karp(inside, 2)[0], inside):
            half = [indices[i] for i in places]
            if len(half) == 1:
                result.append(half)
            else:
                heappush(heap, (negative_tokens(half), half))
    result += [indices for _, indices in heap]
    return sorted(result, key=negative_tokens) if missing else result
