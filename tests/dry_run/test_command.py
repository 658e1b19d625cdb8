"""`python -m slime_compile explain`: a file's function, its inputs from the file or the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import slime_compile
from slime_compile.__main__ import main
from slime_compile.dry_run.command import parse_inputs
from slime_compile.dry_run.operators import Operator, operators

LOSS = """
import torch

def loss_fn(logits, tokens, temperature=1.0):
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, tokens[:, None]).sum()

class Losses:
    @staticmethod
    def nested(logits):
        return torch.logsumexp(logits, -1).sum()

NUMBER = 3
"""
INPUTS = """
def example_inputs():
    return (torch.randn(8, 2000, requires_grad=True), torch.zeros(8, dtype=torch.long)), {"temperature": 0.5}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a_loss.py"
    path.write_text(LOSS + INPUTS)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_the_files_own_inputs(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, f"{file}:loss_fn")
    assert "slime_fused: 2 fused operators in 1 graph" in text
    assert f"{file}:5" in text


def test_inputs_at_any_size(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = "grad:f32[205280,76032] i64[205280] temperature=0.7"
    text = said(capsys, f"{file}:loss_fn", "--inputs", inputs, "--option", "consume_logits=True")
    assert "[205280, 76032]" in text
    assert "the logits are an input and they are a leaf that requires grad" in text
    assert "2 fused" in said(capsys, f"{file}:Losses.nested", "--inputs", "grad:f32[4,2000]")


def test_json_and_version(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, f"{file}:loss_fn", "--json"))["fused"] == 2
    (softmax,) = [
        each
        for each in json.loads(said(capsys, f"{file}:loss_fn", "--operators", "--json"))
        if "log_softmax" in each["name"] or "amax" in each["name"]
    ]
    assert softmax["rule"]
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"slime_compile {slime_compile.__version__}\n"


def test_the_peak_of_a_function(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ["--inputs", "grad:f32[8,2000] i64[8]"]
    assert main(["estimate", f"{file}:loss_fn", *inputs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["inputs_bytes"] == 8 * 2000 * 4 + 8 * 8
    assert found["inputs_bytes"] <= found["forward_bytes"] < found["peak_bytes"]
    assert main(["estimate", f"{file}:loss_fn", *inputs]) == 0
    assert capsys.readouterr().out.startswith("estimated peak ")
    with pytest.raises(SystemExit):
        main(["estimate", f"{file}:loss_fn", "--operators"])


def test_a_report_as_a_page(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    text = said(capsys, f"{file}:loss_fn", "--save", "report.html")
    page = Path("report.html").read_text()
    assert "  a_loss.py:5" in text
    assert "<td>a_loss.py:5</td>" in page
    assert str(file.parent) not in text + page
    assert "http" not in page


def test_what_a_function_returned_is_no_function() -> None:
    value: Any = torch.zeros(())
    with pytest.raises(TypeError, match=r"explain\(fn\).* function or a module, got Tensor"):
        slime_compile.explain(value)
    with pytest.raises(TypeError, match=r"estimate_peak\(fn, .* got Tensor"):
        slime_compile.estimate_peak(value)
    with pytest.raises(RuntimeError, match="Options are keyword arguments here"):
        slime_compile.explain(torch.sin, options={"strict": True})


def test_operators_that_reach_the_pass(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, f"{file}:loss_fn", "--operators")
    (row,) = (line.split() for line in text.splitlines() if line.startswith("aten.gather"))
    assert row == ["aten.gather.default", "1", "0", "yes", f"{file}:6"]
    assert "log_softmax" not in text, "it is decomposed before the pass"


def test_counts_directions_and_rules() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sum(-1).log() + x.sort(-1).values[:, 0]).sum()

    found, report = operators(fn)(torch.randn(3, 2000, requires_grad=True))
    by_name = {each.name: each for each in found}
    line = f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    assert by_name["aten.log.default"] == Operator("aten.log.default", 1, 0, True, (line,))
    assert not by_name["aten.sort.default"].rule
    assert by_name["aten.mul.Tensor"].backward > 0
    assert len(report.graphs) == 1


def test_words() -> None:
    args, kwargs = parse_inputs("grad:f32[2,3] i64[] mean 0.5 mask=bool[2] group=None")
    weight, index, *rest = args
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((2, 3), torch.float32, True)
    assert (index.shape, index.dtype) == ((), torch.int64)
    assert rest == ["mean", 0.5]
    assert (kwargs["mask"].dtype, kwargs["group"]) == (torch.bool, None)


@pytest.mark.parametrize(
    ("place", "more", "message"),
    [
        ("loss_fn", (), "must be given as FILE.py:FUNCTION, got 'loss_fn'"),
        ("absent.py:loss_fn", (), "there is no file absent.py"),
        ("{file}:loss", (), r"must define `loss`, it defines Losses, example_inputs, loss_fn"),
        ("{file}:NUMBER", (), "must be a function or a module, got int"),
        ("{file}:loss_fn", ("--inputs", "f31[2]"), "the dtype of 'f31.2.' must be one of f64, f32"),
        ("{file}:loss_fn", ("--inputs", "f32[2;3] i64[2]"), r"must be given as dtype\[size,size"),
        (
            "{file}:loss_fn",
            ("--inputs", "f32[2,3]"),
            r"must fit loss_fn\(logits, tokens, .*'tokens'",
        ),
        ("{file}:loss_fn", ("--inputs", "f32[4,2000] i64[5,2,3]"), "cannot be called with these"),
        ("{file}:loss_fn", ("--option", "strict"), "--option must be NAME=VALUE, got 'strict'"),
    ],
)
def test_errors(
    file: Path, place: str, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=message) as raised:
        main(["explain", place.format(file=file), *more])
    assert raised.value.code == 2
    assert str(raised.value) in capsys.readouterr().err


def test_a_file_without_inputs(file: Path) -> None:
    file.write_text(LOSS)
    with pytest.raises(SystemExit, match=r"define example_inputs\(\) in the file"):
        main(["explain", f"{file}:loss_fn"])
    file.write_text(LOSS + "example_inputs = lambda: [1]")
    with pytest.raises(SystemExit, match=r"must return a tuple of arguments, .* got list"):
        main(["explain", f"{file}:loss_fn"])
