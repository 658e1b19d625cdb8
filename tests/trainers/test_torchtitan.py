"""torchtitan: the example does what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainers.checks import check_runs

pytest.importorskip("torchtitan", reason="torchtitan is not installed; make test-trainers does")
pytest.importorskip("spmd_types", reason="torchtitan's losses import spmd_types")

STEPS = 3


def test_the_example(example: Callable[[str], Any]) -> None:
    titan = example("torchtitan_fsdp2")
    runs = titan.main(["--steps", str(STEPS)])
    bounds = {"as it is": 3.2, "inductor": 2.2, "loss": 1.15, "deferred": 0.25}
    assert len(set(runs["as it is"].losses)) == STEPS  # it trains
    check_runs(runs, STEPS, bounds, titan.LOGITS_BYTES, rel=1e-5)
    assert runs["as it is"].peak_bytes > 3 * titan.LOGITS_BYTES
    assert [run.fused for run in runs.values()] == [0, 0, 2, 1]
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 0, 1]
