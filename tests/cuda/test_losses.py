"""Losses on the device: values and gradients against float64, launches and waits of a step."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.judge import chunks_in_bytes, compare, compiled, results
from tests.cuda.losses import BF16, HALVES, LOSSES, Row, given, inside, policy
from tests.cuda.losses import head as head_loss

CASES = [
    pytest.param(row, dtype, id=f"{row.name}-{str(dtype)[6:]}".replace(" ", "_"))
    for row in LOSSES
    for dtype in row.dtypes
]
WARM = 2  # steps before one is counted


@pytest.mark.parametrize(("row", "dtype"), CASES)
def test_loss(row: Row, dtype: torch.dtype) -> None:
    compare(row, row.data(dtype))


def test_dtypes_of_the_table() -> None:
    assert len(CASES) >= 40
    assert set(HALVES) < {dtype for row in LOSSES for dtype in row.dtypes}


COUNTED = [
    (Row("given", policy), given, 8),
    (Row("given, aot_eager", policy, options={"inner": "aot_eager"}), given, 50),
    (Row("head", head_loss, options={"grad_in_forward": "never"}, chunk_rows=4), inside, 80),
    (Row("head in forward", head_loss, options={"grad_in_forward": "always"}, chunk_rows=4), inside, 200),
]  # fmt: skip


@pytest.mark.usefixtures("_counted")
@pytest.mark.parametrize(("row", "data", "most"), COUNTED, ids=[row.name for row, *_ in COUNTED])
def test_a_step_waits_for_nothing(row: Row, data: object, most: int) -> None:
    """A warm step: no wait for the device, no memory of the driver, few operators and kernels."""
    from tests.cuda.standin import counts

    assert callable(data)
    made = data(BF16)
    function = compiled(row, BF16, made.leaves[-1].shape[0 if row.chunk_rows else -1])
    with chunks_in_bytes():
        for _ in range(WARM):
            results(function, made)
        counts.reset()
        counts.ran.clear()
        results(function, made)
    asked = counts.counts()
    assert asked.waits == 0, str(asked)
    assert asked.mallocs == 0, str(asked)
    calls = {name: n for name, n in counts.ran.items() if name != "aten::clone"}
    assert sum(calls.values()) <= most, calls
