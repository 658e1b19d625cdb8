"""Spellings of log-probs, entropies and losses (`tests/cases/spellings.py`) on the device: one of each class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import slime_compile
from tests.cases.spellings import MUST_FUSE, SPELLINGS, Spelling
from tests.support import harness

DRAWS = 2


def _one_of_each_class() -> list[Spelling]:
    """The first that has a class of which there was none; those over a process group are `test_ranks.py`'s."""
    seen: set[str] = set()
    found = []
    for spelling in SPELLINGS:
        if (
            not spelling.collectives
            and set(spelling.classes) - seen
            and harness.must_fuse(spelling)
        ):
            seen |= set(spelling.classes)
            found.append(spelling)
    return found


CHOSEN = _one_of_each_class()


def test_classes() -> None:
    covered = {name for spelling in CHOSEN for name in spelling.classes}
    assert {name for name in MUST_FUSE if "sharded" not in name} <= covered


@pytest.mark.parametrize("spelling", CHOSEN, ids=lambda spelling: spelling.name)
def test_spelling(spelling: Spelling) -> None:
    harness.prepare(spelling)
    compiled = torch.compile(spelling.fn, backend="slime_fused", options=harness.OPTIONS)
    pools: dict[str, harness.Pool] = {}
    earlier = len(slime_compile.reports())
    for seed in range(DRAWS):
        _draw(compiled, spelling, seed, pools)
    for what, pool in pools.items():
        pool.check(f"{spelling.name}, {what}")
    harness.check_report(spelling, harness.merged(slime_compile.reports()[earlier:]))


def _draw(
    compiled: Callable[..., Any], spelling: Spelling, seed: int, pools: dict[str, harness.Pool]
) -> None:
    inputs = [_on_device(v) for v in harness.make_inputs(spelling, torch.bfloat16, seed)]
    with torch.device("cuda"):
        runs = [harness.call(f, spelling, inputs) for f in (compiled, spelling.fn)]
        with harness.in_float64():
            wide = harness.to_float64(harness.inputs_with_grad(inputs))
            runs.append(harness.call(spelling.fn, spelling, wide))
        values = zip(*(_values(run, n) for n, run in enumerate(runs)), strict=True)
    for number, (got, eager, true) in enumerate(values):
        pools.setdefault(f"value {number}", harness.Pool()).add(got, eager, true)


def _values(run: harness.Run, number: int) -> Sequence[Tensor]:
    """Outputs and gradients; the last run is the truth."""
    outputs = run.outputs
    chosen = [i for i, output in enumerate(outputs) if output.requires_grad]
    upstream: list[Tensor | None] = [torch.ones_like(output) for output in outputs]
    if number < 2:
        return [*outputs, *harness.gradients(run, chosen, upstream)]
    with harness.in_float64():
        return [*outputs, *harness.gradients(run, chosen, upstream)]


def _on_device(value: Tensor) -> Tensor:
    return value.detach().to("cuda").requires_grad_(value.requires_grad)
