"""torchtitan: the examples do what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import on_ranks
from tests.trainers.checks import check_runs, on_one_of_the_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed; make test-trainers does")
pytest.importorskip("spmd_types", reason="torchtitan's losses import spmd_types")

STEPS = 20


def test_the_example(example: Callable[[str], Any]) -> None:
    titan = example("torchtitan_fsdp2")
    runs = titan.main(["--steps", str(STEPS)])
    bounds = {"as it is": 3.2, "inductor": 2.2, "loss": 1.15, "deferred": 0.25}
    assert len(set(runs["as it is"].losses)) == STEPS  # it trains
    check_runs(runs, STEPS, bounds, titan.LOGITS_BYTES, rel=1e-5)
    assert runs["as it is"].peak_bytes > 3 * titan.LOGITS_BYTES
    assert [run.fused for run in runs.values()] == [0, 0, 2, 1]
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 0, 1]


def test_the_example_over_two_ranks(example: Callable[[str], Any]) -> None:
    logits_bytes = example("torchtitan_tensor_parallel").LOGITS_BYTES
    for found in on_ranks(2, on_one_of_the_ranks, "torchtitan_tensor_parallel", STEPS):
        assert not isinstance(found, Exception), found
        runs, told = found
        assert len(set(runs["as it is"].losses)) == STEPS  # it trains
        check_runs(
            runs, STEPS, {"as it is": 4.2, "inductor": 3.2, "loss": 1.2}, logits_bytes, rel=1e-5
        )
        assert runs["as it is"].peak_bytes > 4 * logits_bytes
        assert [len(graphs) for graphs in told.values()] == [0, 0, 1]
        (graph,) = told["loss"]
        assert graph["fused"] == 2
        assert (graph["collectives_before"], graph["collectives_after"]) == (3, 1)
