"""Micro-batches that fit: sequences put together so that no micro-batch has too many tokens.

A loss over a vocabulary of 150,000 takes about a megabyte a token, so one micro-batch that is
longer than planned ends the job. `partition_by_tokens` balances micro-batches and never exceeds the
cap; `max_tokens_for` says what the cap can be, from the peak of a loss compiled under
`slime_fused`.

Not handled: sequences longer than the cap (an error says which); cutting a sequence is the
trainer's decision.
"""

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heappushpop, heapreplace
from typing import Any, Literal

import torch
import torch.distributed as dist

from slime_compile.backend.options import Options
from slime_compile.rl.redistribute import group_device


def partition_by_tokens(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    at_least: int = 0,
    multiple_of: int = 1,
    group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Partition sequences into micro-batches of at most `max_tokens` tokens, as even as may be.

    The number of micro-batches is `micro_batch_count`, or `at_least`, or what another rank of
    `group` needs if that is more, rounded up to a multiple of `multiple_of`. They are balanced by
    Karmarkar-Karp; where that breaks the cap, first-fit decreasing is used, which cannot.

    Args:
        lengths: tokens of each sequence.
        max_tokens: the cap, in tokens: `max_tokens_for`, times the context-parallel size.
        at_least: fewest micro-batches, for instance what another rank needs.
        multiple_of: the virtual pipeline's group of micro-batches.
        group: data-parallel group whose ranks all make this call, each with its own lengths, and
            get the same number of micro-batches. One all-reduce of three numbers.

    Returns:
        Per micro-batch the indices into `lengths`, ascending; none is empty. The one with the most
        tokens comes first, so that a run that does not fit ends at its first step.

    Raises:
        ValueError: a sequence is longer than `max_tokens`, or there are fewer sequences (here, or
            on a rank of `group`) than micro-batches.
        RuntimeError: another rank of `group` raised.
    """
    problem = _problem(lengths, max_tokens, at_least, multiple_of)
    packed = [] if problem else _first_fit_decreasing(lengths, max_tokens)
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
    balanced, most_tokens = _karmarkar_karp(lengths, count)
    if most_tokens <= max_tokens:
        return _grouped(balanced, lengths)
    return _split_up_to(_grouped(packed, lengths), lengths, count)


def micro_batch_count(lengths: Sequence[int], max_tokens: int) -> int:
    """How many micro-batches of at most `max_tokens` tokens hold the sequences.

    At most 11/9 of the fewest possible plus 6/9: first-fit decreasing's bound (Dosa, 2007, "The
    tight bound of first fit decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9").

    Raises:
        ValueError: a sequence is longer than `max_tokens`.
    """
    problem = _problem(lengths, max_tokens, at_least=0, multiple_of=1)
    if problem is not None:
        raise ValueError(problem)
    return _count(_first_fit_decreasing(lengths, max_tokens))


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


# ---------------------------------------------------------------- first-fit decreasing


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Longest first, each into the first partition with room; returns each sequence's partition.

    A tournament tree over the partitions' room finds that one in log time; equal lengths, which
    100,000 sequences have many of, fill it together.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    partition_of = [0] * len(lengths)
    # Sequences longer than half the cap are alone at first.
    alone = bisect_left(order, True, key=lambda index: 2 * lengths[index] <= max_tokens)
    for partition, index in enumerate(order[:alone]):
        partition_of[index] = partition
    room = _room_tree([max_tokens - lengths[i] for i in order[:alone]], lengths, max_tokens)
    leaves = len(room) // 2
    while alone < len(order):
        length = lengths[order[alone]]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        left = room[node]
        while left >= length and alone < len(order) and lengths[order[alone]] == length:
            partition_of[order[alone]] = node - leaves
            left -= length
            alone += 1
        room[node] = left
        while node > 1:
            most = left if left > room[node ^ 1] else room[node ^ 1]
            node //= 2
            if room[node] == most:
                break
            left = room[node] = most
    return partition_of


def _room_tree(taken: list[int], lengths: Sequence[int], max_tokens: int) -> list[int]:
    """A complete binary tree, `tree[1]` its root: the most room below each node.

    `taken` is the room of the first leaves; there are enough others: no two micro-batches fit into
    one, so fewer are needed than twice the tokens' worth.
    """
    most_needed = min(len(lengths), 2 * -(-sum(lengths) // max_tokens))
    leaves = 1 << max(most_needed - 1, 0).bit_length()
    tree = [max_tokens] * leaves + taken + [max_tokens] * (leaves - len(taken))
    for node in range(min(leaves - 1, (leaves + len(taken)) // 2), 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return tree


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
        for places in _grouped(_karmarkar_karp(inside, 2)[0], inside):
            half = [indices[i] for i in places]
            if len(half) == 1:
                result.append(half)
            else:
                heappush(heap, (negative_tokens(half), half))
    result += [indices for _, indices in heap]
    return sorted(result, key=negative_tokens) if missing else result


# ---------------------------------------------------------------- Karmarkar-Karp


def _karmarkar_karp(lengths: Sequence[int], count: int) -> tuple[list[int], int]:
    """`count` partitions with nearly equal tokens: each sequence's, and the most tokens of one.

    The largest differencing method (Karmarkar and Karp, 1982): every sequence begins as a partial
    solution; the two that are most uneven are joined, the fullest bin of one with the emptiest of
    the other, until one is left. Joining costs the size of the smaller, so that n sequences take
    about n log(n), not n * count.
    """
    if count <= 1:
        return [0] * len(lengths), sum(lengths)
    chains = _Chains(lengths)
    singles = sorted(range(len(lengths)), key=lengths.__getitem__)  # the longest last
    partials: list[tuple[int, int, _Partial]] = []  # a heap, most uneven first: (-spread, age, _)
    ages = itertools.count()
    current = _Partial(chains, count, singles.pop())
    while singles or partials:
        longest = lengths[singles[-1]] if singles else -1
        if longest > (-partials[0][0] if partials else -1):
            current.add(singles.pop())
        else:
            current = current.joined(heappop(partials)[2])
        # The most uneven goes on. Usually that is still `current`.
        longest = lengths[singles[-1]] if singles else -1
        most_uneven = -partials[0][0] if partials else -1
        if current.spread < max(longest, most_uneven):
            entry = (-current.spread, next(ages), current)
            if longest > most_uneven:
                heappush(partials, entry)
                current = _Partial(chains, count, singles.pop())
            else:
                current = heappushpop(partials, entry)[2]
    return chains.partition_of(current.bins), current.fullest >> chains.bits


class _Chains:
    """Bins as numbers: tokens in the upper bits, below them the first of a chain of sequences."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.bits = len(lengths).bit_length()
        self.singles = [length << self.bits | index for index, length in enumerate(lengths)]
        self.following = [-1] * len(lengths)
        self.last = list(range(len(lengths)))  # of the chain that begins at an index

    def tied(self, one: int, other: int) -> int:
        """The bin with the sequences of both."""
        mask = (1 << self.bits) - 1
        first, second = one & mask, other & mask
        self.following[self.last[first]] = second
        self.last[first] = self.last[second]
        return one + other - second

    def partition_of(self, bins: list[int]) -> list[int]:
        partition_of = [0] * len(self.following)
        for partition, one in enumerate(bins):
            index = one & ((1 << self.bits) - 1)
            while index >= 0:
                partition_of[index] = partition
                index = self.following[index]
        return partition_of


class _Partial:
    """Some of the sequences in `count` bins, of which the empty ones are not stored."""

    __slots__ = ("bins", "chains", "count", "fullest")

    def __init__(self, chains: _Chains, count: int, index: int) -> None:
        self.chains = chains
        self.count = count
        self.bins = [chains.singles[index]]  # a heap where no bin is empty: fewest tokens first
        self.fullest = self.bins[0]

    @property
    def spread(self) -> int:
        """Tokens between the fullest and the emptiest bin."""
        bits = self.chains.bits
        emptiest = self.bins[0] >> bits if len(self.bins) == self.count else 0
        return (self.fullest >> bits) - emptiest

    def add(self, index: int) -> None:
        """One more sequence, into the emptiest bin."""
        new = self.chains.singles[index]
        if len(self.bins) == self.count:
            new = self.chains.tied(self.bins[0], new)
            heapreplace(self.bins, new)
        else:
            self.bins.append(new)
            if len(self.bins) == self.count:
                heapify(self.bins)
        if new > self.fullest:
            self.fullest = new

    def joined(self, other: "_Partial") -> "_Partial":
        """The fullest bins of one in the emptiest of the other; reuses both."""
        if len(self.bins) < len(other.bins):
            return other.joined(self)
        added = sorted(other.bins, reverse=True)
        empty = self.count - len(self.bins)
        into = added[empty:]
        few = empty == 0 and len(into) * 8 < len(self.bins)  # then keep the heap
        if few:
            emptiest = [heappop(self.bins) for _ in into]
        else:
            self.bins.sort()
            emptiest = self.bins[: len(into)]
            del self.bins[: len(into)]
        new = list(map(self.chains.tied, emptiest, into)) + added[:empty]
        if few:
            for one in new:
                heappush(self.bins, one)
        else:
            self.bins += new
            if len(self.bins) == self.count:
                heapify(self.bins)
        self.fullest = max(self.fullest, *new)
        return self


# ---------------------------------------------------------------- the cap

# Per-row values of a loss that are alive at the peak: statistics, targets, coefficients of the
# gradient, the caller's log-probs, advantages and masks. Small beside a row of logits.
_ROW_BYTES = 256


def peak_bytes(
    tokens: int,
    vocab_local: int,
    hidden: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    *,
    logits: Literal["given", "inside"] = "given",
    training: bool = True,
) -> int:
    """Peak memory of a loss compiled under `slime_fused`, the logits included.

    In multiples of the logits, N * V elements of `dtype`:

    - `training=False`, without a gradient: 1.
    - given logits: 2, the logits and their gradient.
    - given logits and `consume_logits`: 1, the gradient is written over them.
    - logits made inside the compiled function: 1, for the same reason.
    - `save="softmax"`: 2, the logits and the softmax, which becomes the gradient.

    Logits made inside the compiled function, `hidden_states @ weight.T`, add the hidden states,
    their gradient and the weight's gradient. The weight itself and all that is alive before the
    loss are not counted, nor what the operators take on the CPU whatever the size: 4 to 6 MiB a
    thread.

    Args:
        tokens: N, rows of the logits.
        vocab_local: V, this rank's columns.
        hidden: size of the hidden states; only counts for logits made inside.
        dtype: of the logits (and hidden states and weight).
        options: of the backend, as given to `torch.compile`.
        logits: whether the compiled function is given the logits or makes them.
        training: whether there is a backward.

    Returns:
        Bytes.

    Raises:
        ValueError: a size below 1, or a dtype that is not floating.
        RuntimeError: options that the backend does not know.
    """
    fixed, per_token = _peak_model(vocab_local, hidden, dtype, options, logits, training)
    return fixed + tokens * per_token


def max_tokens_for(
    memory_bytes: int,
    vocab_local: int,
    hidden: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    *,
    logits: Literal["given", "inside"] = "given",
    training: bool = True,
) -> int:
    """The longest micro-batch whose loss fits: the largest N with `peak_bytes(N, ...)` in memory.

    Args:
        memory_bytes: what is free for the loss: with parameters, optimizer, gradients and saved
            activations of a micro-batch already there, but not the logits.
        vocab_local: see `peak_bytes`, as for all others.

    Returns:
        Tokens per rank: rows of the logits. A cap for `partition_by_tokens` counts whole sequences:
        times the context-parallel size.

    Raises:
        ValueError: not even one token fits, or see `peak_bytes`.
        RuntimeError: options that the backend does not know.

    Example:
        >>> max_tokens_for(20 * 2**30, 76032, 4096, torch.float32)  # TP 2 of a 152,064 vocabulary
        35277
    """
    fixed, per_token = _peak_model(vocab_local, hidden, dtype, options, logits, training)
    if memory_bytes < fixed + per_token:
        raise ValueError(
            f"`memory_bytes` must be at least {fixed + per_token} for one token "
            f"({fixed} and {per_token} per token), got {memory_bytes}"
        )
    return (memory_bytes - fixed) // per_token


def _peak_model(
    vocab_local: int,
    hidden: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None,
    logits: Literal["given", "inside"],
    training: bool,
) -> tuple[int, int]:
    """Bytes whatever the number of tokens, and bytes per token."""
    for name, value in (("vocab_local", vocab_local), ("hidden", hidden)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    if not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be floating, got {dtype}")
    if logits not in ("given", "inside"):
        raise ValueError(f"`logits` must be 'given' or 'inside', got {logits!r}")
    parsed = Options.parse(options)
    row = wide = vocab_local * dtype.itemsize
    if training and not _gradient_takes_the_place_of_logits(parsed, logits):
        wide += row
    fixed = per_token = 0
    if logits == "inside":
        per_token = hidden * dtype.itemsize * (2 if training else 1)
        fixed = vocab_local * hidden * dtype.itemsize if training else 0
    return fixed, wide + per_token + _ROW_BYTES


def _gradient_takes_the_place_of_logits(options: Options, logits: str) -> bool:
    return options.save == "logits" and (logits == "inside" or options.consume_logits)
