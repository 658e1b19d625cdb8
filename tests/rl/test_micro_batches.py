"""Micro-batches under a cap: properties, the bound on their number, ranks."""

import functools
import itertools
import random
import time

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_compile.rl import bins
from slime_compile.rl.micro_batches import micro_batch_count, partition_by_tokens
from tests.support.ranks import on_ranks

lengths_and_cap = st.integers(1, 60).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(1, cap), max_size=40), st.just(cap))
)


def tokens_of(partitions: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in partition) for partition in partitions]


@given(lengths_and_cap, st.integers(0, 6), st.integers(1, 5))
@settings(max_examples=300)
def test_partitions(lengths_cap: tuple[list[int], int], at_least: int, multiple_of: int) -> None:
    lengths, cap = lengths_cap
    needed = max(micro_batch_count(lengths, cap), at_least)
    count = -(-needed // multiple_of) * multiple_of
    if count > len(lengths):
        with pytest.raises(ValueError, match=f"at least {count} sequences.* got {len(lengths)}"):
            partition_by_tokens(lengths, cap, at_least=at_least, multiple_of=multiple_of)
        return
    partitions = partition_by_tokens(lengths, cap, at_least=at_least, multiple_of=multiple_of)
    assert sorted(itertools.chain.from_iterable(partitions)) == list(range(len(lengths)))
    assert len(partitions) == count
    tokens = tokens_of(partitions, lengths)
    assert all(0 < total <= cap for total in tokens)
    assert tokens == sorted(tokens, reverse=True)
    assert all(partition == sorted(partition) for partition in partitions)


def fewest_micro_batches(lengths: list[int], cap: int) -> int:
    """By trying everything: for each set of sequences, fewest full ones and room used in the last."""

    @functools.cache
    def best(chosen: int) -> tuple[int, int]:
        if not chosen:
            return 0, cap
        options = []
        for index, length in enumerate(lengths):
            if chosen >> index & 1:
                count, used = best(chosen & ~(1 << index))
                fits = used + length <= cap
                options.append((count, used + length) if fits else (count + 1, length))
        return min(options)

    return best((1 << len(lengths)) - 1)[0]


@given(
    st.integers(5, 30).flatmap(
        lambda cap: st.tuples(st.lists(st.integers(1, cap), max_size=9), st.just(cap))
    )
)
@settings(max_examples=150)
def test_count_is_within_its_bound(lengths_cap: tuple[list[int], int]) -> None:
    lengths, cap = lengths_cap
    fewest = fewest_micro_batches(lengths, cap)
    count = micro_batch_count(lengths, cap)
    assert fewest <= count
    assert 9 * count <= 11 * fewest + 6


def first_fit_decreasing(lengths: list[int], cap: int) -> int:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        for place, left in enumerate(room):
            if length <= left:
                room[place] -= length
                break
        else:
            room.append(cap - length)
    return len(room)


@given(lengths_and_cap)
@settings(max_examples=200)
def test_count_is_first_fit_decreasing(lengths_cap: tuple[list[int], int]) -> None:
    assert micro_batch_count(*lengths_cap) == first_fit_decreasing(*lengths_cap)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 10))
@settings(max_examples=200)
def test_balance(lengths: list[int], count: int) -> None:
    """Karmarkar-Karp's own guarantee: no two micro-batches differ by more than one sequence."""
    if count > len(lengths):
        return
    tokens = tokens_of(partition_by_tokens(lengths, sum(lengths), at_least=count), lengths)
    assert len(tokens) == count
    assert tokens[0] - tokens[-1] <= max(lengths)


def karmarkar_karp(lengths: list[int], count: int) -> list[int]:
    """The tokens of its partitions, as the method is written down: all sums, all solutions."""
    solutions = [sorted([length] + [0] * (count - 1), reverse=True) for length in lengths]
    while len(solutions) > 1:
        solutions.sort(key=lambda sums: sums[-1] - sums[0])
        first, second, *others = solutions
        joined = sorted((a + b for a, b in zip(first, reversed(second), strict=True)), reverse=True)
        solutions = [*others, joined]
    return solutions[0]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_balance_is_karmarkar_karps(count: int) -> None:
    """Lengths so far apart that the order of equally uneven solutions does not come up."""
    generator = random.Random(0)
    for _ in range(30):
        lengths = [generator.randrange(1, 10**9) for _ in range(generator.randrange(count, 50))]
        tokens = tokens_of(partition_by_tokens(lengths, sum(lengths), at_least=count), lengths)
        assert tokens == karmarkar_karp(lengths, count)


def test_the_known_example() -> None:
    """8 7 6 5 4 into two: 16 and 14 by differencing, where the best is 15 and 15."""
    lengths = [4, 5, 6, 7, 8]
    assert tokens_of(partition_by_tokens(lengths, 30, at_least=2), lengths) == [16, 14]


def test_balancing_that_breaks_the_cap() -> None:
    """The fallback: differencing makes 16, first-fit decreasing 15, and both are two."""
    lengths = [4, 5, 6, 7, 8]
    assert karmarkar_karp(lengths, 2)[0] == 16
    assert tokens_of(partition_by_tokens(lengths, 15), lengths) == [15, 15]


@pytest.mark.parametrize("more", [1, 2])
def test_more_micro_batches_than_the_fallback_needs(more: int) -> None:
    """Where differencing breaks the cap, the fallback's are halved, the fullest first."""
    generator = random.Random(0)
    fallbacks = 0
    for _ in range(20):  # 150 sequences: hard enough that differencing often breaks the cap
        lengths = [generator.randrange(1, 100) for _ in range(150)]
        count = first_fit_decreasing(lengths, 100) + more
        fallbacks += bins.karmarkar_karp(lengths, count)[1] > 100
        partitions = partition_by_tokens(lengths, 100, at_least=count)
        tokens = tokens_of(partitions, lengths)
        assert sorted(itertools.chain.from_iterable(partitions)) == list(range(150))
        assert len(tokens) == count
        assert max(tokens) <= 100
        assert tokens == sorted(tokens, reverse=True)
    assert fallbacks > 0


@pytest.mark.parametrize("kind", ["exponential", "equal", "short"])
def test_100_000_sequences(kind: str) -> None:
    """Time grows little faster than their number; a second or less where nothing else is at work."""
    generator = random.Random(0)
    draw = {
        "exponential": lambda: min(9216, 1 + int(generator.expovariate(1 / 1500))),
        "equal": lambda: 1000,
        "short": lambda: generator.randint(1, 300),
    }[kind]
    lengths = [draw() for _ in range(100_000)]

    def seconds(count: int) -> float:
        start = time.process_time()
        partition_by_tokens(lengths[:count], 9216, multiple_of=8)
        return time.process_time() - start

    few, all_ = (min(seconds(count) for _ in range(3)) for count in (10_000, 100_000))
    assert all_ < 40 * few  # 100 times as much for a quadratic algorithm
    partitions = partition_by_tokens(lengths, 9216, multiple_of=8)
    assert max(tokens_of(partitions, lengths)) <= 9216
    assert len(partitions) * 9216 <= sum(lengths) * 1.03  # equal: 9 of 1000 leave 2 % empty


def test_no_sequences() -> None:
    assert partition_by_tokens([], 10) == []
    assert micro_batch_count([], 10) == 0


@pytest.mark.parametrize(
    ("lengths", "cap", "arguments", "message"),
    [
        (
            [3, 17, 4],
            10,
            {},
            r"`lengths\[1\]` must be at most max_tokens = 10, got 17: 7 too long;",
        ),
        ([30, 17, 4], 10, {}, r"`lengths\[0\]` .* got 30: 20 too long, and 1 more sequences are"),
        ([3, 0], 10, {}, r"`lengths\[1\]` must be at least 1, got 0"),
        ([3], 0, {}, "`max_tokens` must be at least 1, got 0"),
        ([3], 10, {"multiple_of": 0}, "`multiple_of` must be at least 1, got 0"),
        ([3], 10, {"at_least": -1}, "`at_least` must be at least 0, got -1"),
        (
            [3, 4],
            10,
            {"multiple_of": 4},
            r"at least 4 sequences.*\(1 needed for 10 .* of 4\), got 2",
        ),
    ],
)
def test_errors(lengths: list[int], cap: int, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_by_tokens(lengths, cap, **arguments)


# ---------------------------------------------------------------- several ranks

RANK_LENGTHS = {
    "uneven": [[5, 5, 5, 5], [10, 10, 10, 1], [1, 1, 1, 1]],
    "one too long": [[5, 5], [11, 1], [1, 1]],
    "too few on one": [[10, 10, 10], [1, 1], [1, 1, 1]],
}


def partition_on_rank(rank: int, kind: str) -> list[list[int]] | str:
    group = dist.group.WORLD
    try:
        return partition_by_tokens(RANK_LENGTHS[kind][rank], 10, multiple_of=2, group=group)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def test_the_same_number_on_all_ranks() -> None:
    for partitions, lengths in zip(
        on_ranks(3, partition_on_rank, "uneven"), RANK_LENGTHS["uneven"], strict=True
    ):
        assert len(partitions) == 4
        assert sorted(itertools.chain.from_iterable(partitions)) == [0, 1, 2, 3]
        assert max(tokens_of(partitions, lengths)) <= 10


def test_an_error_on_one_rank_ends_all() -> None:
    first, second, third = on_ranks(3, partition_on_rank, "one too long")
    assert second.startswith("ValueError: `lengths[0]` must be at most max_tokens = 10, got 11")
    assert first == third
    assert first.startswith("RuntimeError: another rank of the group cannot partition")


def test_too_few_sequences_on_one_rank() -> None:
    for message in on_ranks(3, partition_on_rank, "too few on one"):
        assert message.startswith("ValueError: `lengths` must have at least 4 sequences")
        assert message.endswith("got 2 on a rank")
