"""Sequences into bins: first-fit decreasing keeps a cap, Karmarkar-Karp balances.

Entry points: `first_fit_decreasing` and `karmarkar_karp`; both return the bin of each sequence. 100,000 sequences take
less than a second.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heappushpop, heapreplace

__all__ = ["first_fit_decreasing", "karmarkar_karp"]

# ---------------------------------------------------------------- first-fit decreasing


def first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Longest first, each into the first partition with room; returns each sequence's partition.

    A tournament tree over the partitions' room finds that one in log time. Equal lengths, frequent among
    100,000 sequences, fill it together.
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

    `taken` is the room of the first leaves. There are enough others: any two micro-batches together exceed
    one, so fewer are needed than twice the tokens' worth.
    """
    most_needed = min(len(lengths), 2 * -(-sum(lengths) // max_tokens))
    leaves = 1 << max(most_needed - 1, 0).bit_length()
    tree = [max_tokens] * leaves + taken + [max_tokens] * (leaves - len(taken))
    for node in range(min(leaves - 1, (leaves + len(taken)) // 2), 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return tree


# ---------------------------------------------------------------- Karmarkar-Karp


def karmarkar_karp(lengths: Sequence[int], count: int) -> tuple[list[int], int]:
    """`count` partitions with nearly equal tokens: each sequence's, and the most tokens of one.

    The largest differencing method (Karmarkar and Karp, 1982): every sequence begins as a partial
    solution. The two most uneven ones are joined, the fullest bin of one with the emptiest of the other,
    until one remains. Joining costs the size of the smaller, so n sequences take about n log(n), not
    n * count.
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
        # The most uneven one is next. Usually that is still `current`.
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
        self.last = list(range(len(lengths)))  # of the chain starting at an index

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
    """Some of the sequences in `count` bins; empty bins are not stored."""

    __slots__ = ("bins", "chains", "count", "fullest")

    def __init__(self, chains: _Chains, count: int, index: int) -> None:
        self.chains = chains
        self.count = count
        self.bins = [chains.singles[index]]  # a heap if no bin is empty: fewest tokens first
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
