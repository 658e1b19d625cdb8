"""`python -m bench tp`: the sharded loss is right, what the ranks measure, and tables of what failed. No times."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases import losses
from bench.commands import tp
from bench.commands.tp import Group
from bench.measure.cells import Store, write_table
from bench.measure.measure import CellFailed

ROWS, SHARD = 70, 1030  # more than the truth takes at a time; just above the default min_vocab
SMALL: dict[str, Any] = {"rows": ROWS, "shard": SHARD, "seconds": 0.0}


@pytest.mark.thorough
def test_two_ranks_measure_the_loss_before_and_after() -> None:
    group = Group(2, ("eager", "slime_fused"), megatron=False, **SMALL)
    found = tp.measured(group)
    assert len(found) == 2
    for ranks in found:
        eager, fused = ranks["eager"], ranks["slime_fused"]
        assert eager["collectives"] == 5
        assert fused["collectives_before"] == 5
        assert fused["collectives"] == fused["collectives_after"] == 1
        assert (fused["graphs"], fused["breaks"]) == (1, 0)
        assert fused["allocated_bytes"] > fused["shard_bytes"] == ROWS * SHARD * 4
        assert eager["gradient_error"] < 2**-8  # the gradient is rounded to bf16, as Megatron's is
        assert fused["gradient_error"] < 1e-5
        assert len(fused["rounds_ms"]) == len(eager["rounds_ms"]) >= tp.LEAST_ROUNDS - 1


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_one_rank_agrees_with_the_truth(megatron: bool, nested: bool) -> None:
    if megatron:
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    losses.world()
    group = Group(1, ("eager",), megatron=megatron, nested=nested, **SMALL)
    logits, rows, true = tp._data(group, 0)
    with torch.compiler.set_stance("force_eager"):  # Megatron and the entropy compile pieces
        found = tp._Step(group, "eager", logits, rows).run()
    of_output, of_gradient = losses.errors(found, true)
    assert of_output < 1e-5
    assert of_gradient < 2**-8


def test_tables_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks that differ, a cell that failed, and cells that are missing."""
    numbers = {
        "allocated_bytes": 210,
        "shard_bytes": 100,
        "collectives": 1,
        "collectives_before": 5,
        "collectives_after": 1,
        "gradient_error": 1e-6,
        "graphs": 1,
        "breaks": 0,
        "rounds_ms": [3.0, 5.0, 4.0],
    }
    other = numbers | {"allocated_bytes": 200, "rounds_ms": [9.0, 1.0, 1.0]}
    store = Store(tmp_path, "tp")
    store.put("TP = 2", {"by_rank": [dict.fromkeys(tp.WAYS, n) for n in (numbers, other)]})
    store.put("TP = 4", {"error": "OOM"})
    write_table(store, [tp._table(store), tp._nested_table(store)])
    text = (tmp_path / "tp.md").read_text()
    assert "2.00 to 2.10" in text
    assert "5 -> 1" in text
    assert "1.00 (5 ms)" in text  # the slowest rank of each round: 9, 5, 4
    assert "OOM" in text
    assert "not run" in text
    tp.plot(store, tmp_path / "tp.png")
    capsys.readouterr()


def test_finished_cells_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def failing(group: Group) -> Any:
        asked.append(tp._name(group))
        raise CellFailed("OOM")

    monkeypatch.setattr(tp, "measured", failing)
    options = argparse.Namespace(out=tmp_path, resume=False, seconds=0.0)
    tp.main(options)
    assert asked == ["TP = 1", "TP = 2", "TP = 4", "TP = 2 nested", "TP = 2 nested, inlined"]
    options.resume = True
    tp.main(options)
    assert len(asked) == 5
