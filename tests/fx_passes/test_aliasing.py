"""Writing the gradient over the logits is never seen by anybody: each program of `aliasing_cases.py`.

Without code generation every case runs here; under inductor, which orders and fuses by itself, those run for which that
matters, in a process with a cold compile cache and in one with the cache that the first left.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases import aliasing as aliasing_cases

INDUCTOR_CASES = [
    "donated_logits_are_overwritten",
    "returned_logits_are_not",
    "logits_with_a_second_use",
    "retain_graph",
    "checkpoints",
    "one_output_of_two",
    "given_logits_are_left_alone",
    "consumed_logits_hold_the_gradient",
    "consumed_logits_with_other_readers",
    "a_leaf_is_never_consumed",
    "returned_given_logits_are_not_consumed",
    "two_inputs_with_one_storage",
    "logits_divided_in_place",
    "peak_of_logits_made_inside",
    "peak_of_consumed_logits",
]


@pytest.mark.parametrize("name", aliasing_cases.CASES)
def test_without_code_generation(name: str) -> None:
    graphs = aliasing_cases.run(name, {"inner": "aot_eager", "strict": True})
    assert all(fused for fused, _ in graphs), "the case is about fused gradients"


def in_a_process(cache: Path, result: Path) -> dict[str, Any]:
    options = json.dumps({"inner": "inductor", "strict": True})
    done = subprocess.run(
        [sys.executable, "-m", aliasing_cases.__name__, options, str(result), *INDUCTOR_CASES],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    errors = {name: f["error"] for name, f in found.items() if "error" in (f or {})}
    assert not errors, "\n".join(errors.values())
    return found


@pytest.mark.thorough
def test_inductor_with_a_cold_and_a_warm_cache(tmp_path: Path) -> None:
    cold = in_a_process(tmp_path / "cache", tmp_path / "cold.json")
    warm = in_a_process(tmp_path / "cache", tmp_path / "warm.json")
    assert warm["counters"] == {"hits": sum(cold["counters"].values()), "misses": 0}
    assert {n: cold[n] for n in INDUCTOR_CASES} == {n: warm[n] for n in INDUCTOR_CASES}
