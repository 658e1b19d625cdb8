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


def test_a_limit_that_is_given() -> None:
    assert Sizes(2048, 32_000, 4, limit=1 << 20).row_chunk == 8
