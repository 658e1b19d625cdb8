"""The measuring itself: cells that are kept, documents that are filled, peers that are missing. No times, no sizes."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import slime_compile
from bench.cases.losses import SPELLINGS, VARIANTS, Case, Problem, errors, truth
from bench.cases.peers import PEERS
from bench.cases.row_losses import LOSSES
from bench.commands import loss, memory, readme, speed, speed_losses, stand_in
from bench.commands.compile import _timed_passes
from bench.measure import cells
from bench.measure.cells import Store, finished, run_cells, write_table
from bench.measure.measure import CellFailed, Step
from slime_compile import backend
from slime_compile.backend import inductor

ROOT = Path(__file__).parents[2]
ROWS, VOCAB = 70, 1030  # more than the truth takes at a time; more than min_vocab, and odd


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s != "megatron"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_spellings_agree_with_the_truth(spelling: str, variant: str) -> None:
    problem = Problem(Case(variant, spelling, "float32", ROWS, VOCAB, 8))
    true = truth(problem)
    step = Step(problem, "eager")
    step.run()
    of_outputs, of_gradients = errors(step.result(), true)
    assert of_outputs < 1e-5  # of numbers around 10
    assert of_gradients < 1e-5


def test_own_copy_of_megatrons_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.cases.losses.has_megatron", lambda: False)
    problem = Problem(Case("given", "megatron", "float32", ROWS, VOCAB, chunk=33))
    true = truth(problem)
    step = Step(problem, "eager")
    step.run()
    of_outputs, of_gradients = errors(step.result(), true)
    assert of_outputs < 1e-5
    assert of_gradients < 2**-8  # the gradient is rounded to bfloat16, as Megatron's is


def test_who_takes_the_logits_owns_them_and_the_next_gets_the_same() -> None:
    problem = Problem(Case("given", "plain", "float32", ROWS, VOCAB), with_truth=False)
    before = problem.wide[0].clone()
    step = Step(problem, "eager")
    step.take().zero_()
    assert problem.wide == []
    step.prepare()
    assert torch.equal(problem.wide[0], before)


def failing() -> dict[str, Any]:
    raise CellFailed("OOM")


def test_finished_cells_stay(tmp_path: Path) -> None:
    store = Store(tmp_path, "some")
    run_cells(store, {"one": lambda: {"n": 1}, "two": failing})
    again = Store(tmp_path, "some", resume=True)
    assert again.cells == {"one": {"n": 1}, "two": {"error": "OOM"}}
    run_cells(again, {"one": lambda: pytest.fail("it is finished"), "three": lambda: {"n": 3}})
    saved = json.loads((tmp_path / "some.json").read_text())
    assert list(saved["cells"]) == ["one", "two", "three"]
    assert saved["stamp"]["torch"] == importlib.metadata.version("torch")


@pytest.mark.parametrize("key", ["device", "torch", "threads"])
def test_cells_of_another_machine_are_not_taken_over(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path, "some")
    store.stamp[key] = "another"
    store.put("one", {"n": 1})
    again = Store(tmp_path, "some", resume=True)
    assert not again.cells
    assert again.stamp[key] != "another"
    assert f"they have another {key}" in capsys.readouterr().out
    assert finished(tmp_path, "some") == {"one": {"n": 1}}
    assert finished(tmp_path, "none") == {}


def test_a_resumed_table_has_the_stamp_of_its_cells(tmp_path: Path) -> None:
    """Also where nothing was left to do: it is not today's, and has not this commit."""
    store = Store(tmp_path, "some")
    store.stamp.update(commit="1234567", date="2001-02-03")
    store.put("one", {"n": 1})
    again = Store(tmp_path, "some", resume=True)
    assert (again.stamp["commit"], again.stamp["date"]) == ("1234567", "2001-02-03")
    again.put("two", {"n": 2})
    first, second = again.stamp["commit"].split(", ")
    assert first == "1234567"
    assert second == cells.stamp()["commit"]
    assert again.stamp["date"] != "2001-02-03"


def test_the_short_table_is_a_part_of_the_whole_one() -> None:
    for variant in loss.SHORT.variants:
        assert set(loss.SHORT.ways_of(variant)) <= set(loss.WHOLE.ways_of(variant))
    assert set(loss.SHORT.dtypes) <= set(loss.WHOLE.dtypes)


def test_headline_of_readme(tmp_path: Path) -> None:
    assert readme._headline(tmp_path) == "Not measured yet.\n"
    assert readme._headline(cells.RESULTS) in (ROOT / "README.md").read_text()


def test_cells_are_left_when_time_is_up(tmp_path: Path) -> None:
    store = Store(tmp_path, "some")
    run_cells(store, {"late": lambda: pytest.fail("too late")}, until=0)
    assert not store.cells


def test_table_has_its_stamp(tmp_path: Path) -> None:
    store = Store(tmp_path, "some")
    write_table(store, [("Title", ["a", "b"], [["x", "1.50"]])])
    text = (tmp_path / "some.md").read_text()
    assert "**Title**" in text
    assert "1.50" in text
    assert cells.stamp_line(store.stamp) in text


def test_a_document_is_filled(tmp_path: Path) -> None:
    (tmp_path / "loss.md").write_text("a table\n")
    text = "x\n<!-- bench loss -->\nold\n<!-- end -->\n<!-- bench none -->\n<!-- end -->\n"
    once = readme.filled(text, tmp_path)
    assert "a table" in once
    assert "old" not in once
    assert "Not measured yet." in once
    assert readme.filled(once, tmp_path) == once


def test_options_of_the_documents_are_those_of_the_backend() -> None:
    text = (ROOT / "docs/options.md").read_text()
    assert readme._options() in text, "run `python -m bench readme`"


def test_every_table_can_be_made_of_what_failed(tmp_path: Path) -> None:
    store = Store(tmp_path, "some")
    names = memory._cells("measured", 1, True)
    store.cells = {name: {"error": "OOM"} for name in names}
    tables = memory._table(store, "measured", True)
    assert [len(rows) for _, _, rows in tables] == [3, 4]
    assert tables[1][2][2][-1] == "88.24"
    assert "OOM" in tables[0][2][0]


def test_tables_of_the_stand_in(tmp_path: Path) -> None:
    store = Store(tmp_path, "some")
    store.cells = {name: {"error": "OOM"} for name in stand_in._cells()}
    found = {"logits_bytes": 2**30, "allocated_bytes": 2**31, "estimated_bytes": 2**31 + 2**26}
    store.cells[next(iter(store.cells))] = found
    _, headers, rows = stand_in._table(store, "", stand_in._allocated)
    assert [len(row) for row in rows] == [len(headers)] * 7
    assert rows[0][2:4] == ["2.00 (2.00)", "OOM"]
    _, _, rows = stand_in._table(store, "", stand_in._estimated)
    assert rows[0][2] == "2.06 (+3.1%, TOO FAR)"


@pytest.mark.parametrize("variant", VARIANTS)
def test_ways_of_a_variant(variant: str) -> None:
    assert {"eager", "aot_eager", "inductor", "slime_fused"} <= set(loss.WHOLE.ways_of(variant))


def test_a_missing_peer_is_a_row_that_says_so(tmp_path: Path) -> None:
    case = Case("given", "plain", "float32", 8, VOCAB)
    store = Store(tmp_path, "some")
    times = {"eager": [2.0, 2.0], "inductor": [1.0, 1.0], "copy": [0.5, 0.0]}
    missing = {"Liger cross entropy": "not installed"}
    store.cells = {speed._name(case): {"times_ms": times, "missing": missing, "logits_bytes": 1}}
    _, _, rows = speed._table(store, case)
    assert ["Liger cross entropy", PEERS["Liger cross entropy"].computes, "not installed"] in rows
    assert rows[0][:6] == ["eager", "log-prob, entropy", "2.00", "2.00", "4.00", "2.00"]


def test_a_loss_stands_beside_inductor_and_a_copy(tmp_path: Path) -> None:
    store = Store(tmp_path, "some")
    names = list(speed_losses.cells(8, VOCAB, "cpu", 1.0))
    times = {f"{name}: inductor": [4.0, 6.0] for name in LOSSES}
    times |= {f"{name}: slime_fused": [2.0, 3.0] for name in LOSSES} | {"copy": [1.5, 0.0]}
    store.cells = {
        names[0]: {"times_ms": times, "logits_bytes": 1500},
        names[1]: {"error": "OOM"},
    }
    done, failed = speed_losses.tables(store, 8, VOCAB, "cpu")
    assert done[2][0] == ["cross entropy, mean", "10.0", "5.0", "0.50", "2.0", "38%", "3.0", "50%"]
    assert [row[0] for row in done[2]] == [*LOSSES, "copy: 1.5 ms, 0.0 GB/s"]
    assert failed[2] == [["OOM"]]
    store.cells = {names[-1]: {"times_ms": times, "logits_bytes": 1500}}
    ((name, _, rows),) = speed_losses.tables(store, 8, VOCAB, "cpu")
    assert "N = 250, V = 4000" in name
    assert rows[0] == ["cross entropy, mean", "10000", "5000", "-5000"]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_given_logits_are_fused(name: str) -> None:
    """Else the table would compare inductor with itself."""
    problem = Problem(Case("given", rows=8, vocab=VOCAB))
    arguments = [problem.wide[0].requires_grad_() * 1, *problem.rows]
    report = slime_compile.explain(LOSSES[name], min_vocab=VOCAB)(*arguments)
    assert report.fused == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.thorough
def test_gpu_script_measures_nothing_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "bench" / "gpu.sh"), str(tmp_path), sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "needs a CUDA device" in done.stderr
    assert importlib.metadata.version("torch") in (tmp_path / "stamp.txt").read_text()
    assert not list(tmp_path.glob("*.json"))


def test_a_checkout_that_is_not_installed_has_the_backend() -> None:
    """As on a GPU machine, where `bench/gpu.sh` runs from PYTHONPATH alone."""
    program = """
import importlib.metadata
every = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **k: every(
    **{n: v.replace("torch_dynamo_backends", "none") for n, v in k.items()}
)
import bench, torch
print(torch.compile(lambda x: x + 1, backend="slime_fused", options={"inner": "aot_eager"})(torch.ones(1)).item())
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "2.0", result.stderr


def test_passes_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`bench compile` puts a clock around our code, whatever arguments the backend gives it."""
    for home, name in ((backend, "new_record"), (backend, "prepare"), (inductor, "run_fuse"),
                       (inductor, "_plan_inplace"), (inductor, "run_inplace")):  # fmt: skip
        monkeypatch.setattr(home, name, getattr(home, name))  # put back at the end
    spent = _timed_passes()
    torch._dynamo.reset()
    logits = torch.randn(8, 4096, requires_grad=True)
    loss = torch.compile(torch.nn.functional.cross_entropy, backend="slime_fused")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    loss(logits * 1, torch.arange(8)).backward()
    assert spent["passes"] > 0
    assert spent["nodes"] > 3
