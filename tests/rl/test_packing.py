"""Descriptions of a packed micro-batch that do not fit together; what fits is tested in test_packed.py."""

from collections.abc import Iterator

import pytest

from slime_compile.rl.packing import Packing


def bad_packings() -> Iterator[tuple[dict[str, object], str]]:
    lengths = {"total_lengths": [4, 3], "response_lengths": [2, 1]}
    yield {**lengths, "response_lengths": [2]}, "must have 2 entries, one per sample, got 1"
    yield {**lengths, "response_lengths": [4, 1]}, r"lengths\[0\]` must be .*\[0, 3\].* got 4"
    yield {**lengths, "response_lengths": [2, -1]}, r"lengths\[1\]` must be in .* got -1"
    yield {**lengths, "total_lengths": [4, 0]}, r"lengths\[1\]` must be in"
    yield {**lengths, "rows": 6}, "`rows` must be at least 7 to hold 2 samples .* got 6"
    yield {**lengths, "format": "bhsd"}, "`format` must be one of thd, bshd, got 'bhsd'"
    yield {**lengths, "context_parallel": "ring"}, "one of none, zigzag, all_gather, got 'ring'"
    yield {**lengths, "cp_size": 2}, "must be 'zigzag' or 'all_gather' for cp_size 2"
    yield (
        {**lengths, "context_parallel": "zigzag", "cp_size": 2, "cp_rank": 2},
        r"`cp_rank` must be in \[0, 2\), got 2",
    )
    yield {**lengths, "padded_length": 4}, "must be given for 'bshd' and only there, got 4"
    yield {**lengths, "format": "bshd"}, "must be given for 'bshd' and only there, got None"
    padded = {**lengths, "format": "bshd", "padded_length": 4}
    yield {**padded, "padded_length": 3}, r"`total_lengths\[0\]` must be at most .* 3, got 4"
    yield {**padded, "rows": 9}, "`rows` must be 8 to hold 2 samples .* got 9"
    yield (
        {**padded, "context_parallel": "all_gather", "cp_size": 2},
        "`format` 'bshd' cannot be used with `context_parallel` 'all_gather'.* use 'thd'",
    )


@pytest.mark.parametrize(("arguments", "message"), list(bad_packings()))
def test_bad_packing(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packing(**arguments)
