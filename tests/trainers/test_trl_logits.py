"""TRL whose trainers make logits: the example does what it says. `make test-trainers` runs it with trl 1.10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainers.checks import check_runs

pytest.importorskip("trl", reason="trl is not installed; make test-trainers does")

import trl.trainer.grpo_trainer

if not hasattr(trl.trainer.grpo_trainer, "selective_log_softmax"):
    reason = f"the trainers of trl {trl.__version__} make no logits"
    pytest.skip(f"{reason}; make test-trainers runs 1.10, too", allow_module_level=True)

STEPS = 20


def test_the_example(example: Callable[[str], Any]) -> None:
    module = example("trl_grpo_logits")
    runs = module.main(["--steps", str(STEPS)])
    assert len(set(runs["as it is"].losses)) == STEPS  # it trains
    bounds = {"as it is": 4.2, "functions": 3.05, "deferred": 0.3}
    check_runs(runs, STEPS, bounds, module.LOGITS_BYTES, rel=1e-4, abs=1e-6)
    assert runs["as it is"].peak_bytes > 4 * module.LOGITS_BYTES
    # beside the four graphs with gradients the functions' scores have none, and deferred one operator in each of two
    assert [run.fused for run in runs.values()] == [0, 8, 10]
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 4]
