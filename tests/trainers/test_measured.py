"""What the examples share: peaks and times of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

LOGITS_BYTES = 2**20


@pytest.fixture
def measured(example: Callable[[str], Any]) -> Any:
    return example("measured")


def train(measured: Any, way: str, steps: int, inner: str) -> Any:
    run, buffers = measured.Run(), {"one": 1, "three": 3}[way]
    for number in range(steps):
        with run.step():
            kept = [torch.empty(LOGITS_BYTES, dtype=torch.uint8) for _ in range(buffers)]
            del kept
        run.losses.append(float(number))
    return run


def test_peaks(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    way_of = functools.partial(train, measured)
    runs = measured.compare(("three", "one"), way_of, LOGITS_BYTES, ["--steps", "3"])
    assert [run.peak_bytes for run in runs.values()] == [3 * LOGITS_BYTES, LOGITS_BYTES]
    printed = capsys.readouterr().out
    assert "three  peak    3.0 MiB, 3.00 N, last loss 2.000000" in printed
    assert "one    peak    1.0 MiB, 1.00 N, last loss 2.000000" in printed


def test_times(
    measured: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of each way's steps counts; nothing is recorded of their memory."""
    ticks = [0.0]
    for length in (9.0, 2.0, 2.0, 9.0, 1.0, 1.0):
        ticks += [ticks[-1] + length] * 2  # the end of a step, the start of the next
    clock = iter(ticks)
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
    way_of = functools.partial(train, measured)
    runs = measured.compare(("three", "one"), way_of, LOGITS_BYTES, ["--steps", "3", "--time"])
    assert [run.peak_bytes for run in runs.values()] == [0, 0]
    printed = capsys.readouterr().out
    assert "three    2000 ms a step, 1.00, last loss 2.000000" in printed
    assert "one      1000 ms a step, 0.50, last loss 2.000000" in printed
    assert measured.Run.probes
