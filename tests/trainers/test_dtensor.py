"""PyTorch's tensor parallelism over a transformers model: the example does what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import on_ranks
from tests.trainers.checks import check_runs, on_one_of_the_ranks

pytest.importorskip("transformers", reason="transformers is not installed")

NAME, STEPS = "dtensor_loss_parallel", 20


def test_the_example_over_two_ranks(example: Callable[[str], Any]) -> None:
    logits_bytes = example(NAME).LOGITS_BYTES
    ranks = on_ranks(2, on_one_of_the_ranks, NAME, STEPS)
    for found in ranks:
        assert not isinstance(found, Exception), found
        runs, told = found
        assert len(set(runs["as it is"].losses)) == STEPS  # it trains
        check_runs(runs, STEPS, {"as it is": 4.2, "loss": 1.2}, logits_bytes, rel=1e-5)
        assert runs["as it is"].peak_bytes > 4 * logits_bytes
        assert [len(graphs) for graphs in told.values()] == [0, 1]
        (graph,) = told["loss"]
        assert graph["fused"] == 2
        assert (graph["collectives_before"], graph["collectives_after"]) == (3, 1)
