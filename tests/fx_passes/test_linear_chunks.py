"""How large a chunk of logits is where nobody says."""

import pytest

from fx_passes.rows.chunks import MAX_BYTES, MIN_BYTES, Sizes


@pytest.mark.parametrize(
    ("rows", "vocab", "itemsize", "wanted"),
    [
        (8192, 32_000, 4, 1024),  # an eighth
        (2048, 32_000, 4, 512),  # an eighth would be 256 rows
        (1024, 128_256, 4, 256),  # no more than a quarter
        (2048, 32_000, 2, 512),  # 32 MiB
        (256, 32_000, 4, 256),  # all of them have 32 MiB
        (205_280, 76_032, 2, 3480),  # 512 MiB
        (0, 32_000, 4, 0),
    ],
)
def test_rows_of_a_chunk(rows: int, vocab: int, itemsize: int, wanted: int) -> None:
    sizes = Sizes(rows, vocab, itemsize)
    assert sizes.row_chunk == wanted
    assert MIN_BYTES <= sizes.chunk_bytes <= MAX_BYTES
    assert sizes.whole == (wanted >= rows)


@pytest.mark.parametrize(
    ("rows", "vocab", "depth", "wanted"),
    [
        (1024, 32_000, 64, 128),  # an eighth, and 2 D rows
        (1024, 32_000, 128, 256),
        (1024, 32_000, 4096, 256),  # no more than a quarter
        (4096, 8192, 64, 512),  # an eighth
        (256, 8192, 64, 256),  # all of them have 8 MiB
        (256, 8192, 0, 64),  # 2 MiB
        (8192, 8192, 0, 256),  # a 32nd
    ],
)
def test_rows_of_a_matmul_of_some_depth(rows: int, vocab: int, depth: int, wanted: int) -> None:
    assert Sizes(rows, vocab, 4, depth=depth).row_chunk == wanted


def test_a_limit_that_is_given() -> None:
    assert Sizes(2048, 32_000, 4, limit=1 << 20).row_chunk == 8
