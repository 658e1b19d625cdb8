"""`python -m bench holders`: loops of one's own, which need no package; a trainer that is not there; the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench.cases.trainers import STEPS, TRAINERS
from bench.commands import holders
from bench.measure.cells import Store, run_cells
from bench.measure.measure import CellFailed
from slime_compile import ops

FREE, KEPT, *PACKAGED = TRAINERS


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own."""
    torch._dynamo.reset()
    monkeypatch.setattr(ops, "placements", {})
    monkeypatch.setattr(ops.regions, "placements", ops.placements)
    monkeypatch.setattr(holders, "in_fresh_process", lambda function, *args: function(*args))


def test_a_loop_that_keeps_nothing() -> None:
    assert holders.cell(FREE) == {"calls": STEPS, "over": STEPS, "reasons": []}


def test_a_loop_that_keeps_the_output() -> None:
    found = holders.cell(KEPT)
    assert (found["calls"], found["over"]) == (STEPS, 0)
    (reason,) = found["reasons"]
    assert "(`out.logits` in loop (trainers.py:" in reason


def test_nothing_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINERS, "nothing", lambda: None)
    with pytest.raises(CellFailed, match="no gradient counted the references to the logits"):
        holders.cell("nothing")


@pytest.mark.parametrize("name", PACKAGED)
def test_a_package_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "trl", "megatron", "slime", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError):
        TRAINERS[name]()


def test_the_table(tmp_path: Path) -> None:
    store = Store(tmp_path, "some")
    run_cells(store, {"one": lambda: {"calls": 41, "over": 40, "reasons": ["a", "b"]}})
    store.put("two", {"error": "ImportError: no"})
    assert holders._texts(store.cells["one"]) == ["40 of 41", "a; b"]
    assert holders._texts(store.cells["two"]) == ["not run", "ImportError: no"]
