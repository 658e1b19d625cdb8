"""Reports and the dry run: what they say, that it is true, and that explaining changes nothing."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import slime_compile
from slime_compile import Report, explain
from slime_compile.report import text
from slime_compile.report.values import GraphReport

ROWS, VOCAB = 6, 1030  # just above the default min_vocab
INTERPRETED = {"inner": "aot_eager"}
KEYS = {
    "fused",
    "wide_before",
    "wide_after",
    "saved_bytes_before",
    "saved_bytes_after",
    "collectives_before",
    "collectives_after",
    "rejections",
    "in_place",
    "breaks",
    "python_frames",
    "notes",
    "other_graphs",
    "graphs",
}


def log_probs(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, VOCAB, requires_grad=True) * 1, torch.randint(0, VOCAB, (ROWS,))


def line_of(function: Callable[..., Any], offset: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}"


# ---- explain ------------------------------------------------------------------------------------------------------


def test_what_was_fused_and_where() -> None:
    report = explain(log_probs)(*data())
    assert report.fused == 2
    (graph,) = report.graphs
    assert graph.training
    assert {v.kind for v in graph.values} == {"log-prob", "statistics", "gradient"}
    assert {v.source for v in graph.values} == {line_of(log_probs, 1)}
    report.assert_fused(2)


def test_dict_is_stable_and_json() -> None:
    found = explain(log_probs)(*data()).to_dict()
    assert set(found) == KEYS
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, sort_keys=True))
    assert found["fused"] == 2
    assert found["wide_before"] > found["wide_after"] == 0
    assert found["saved_bytes_before"] > found["saved_bytes_after"] > 0


def test_text_is_for_people() -> None:
    said = str(explain(log_probs)(*data()))
    assert "slime_fused: 2 fused operators in 1 graph" in said
    assert line_of(log_probs, 1) in said
    assert "not in place: the logits are an input of the compiled function" in said


def test_text_without_tabulate(monkeypatch: pytest.MonkeyPatch) -> None:
    report = explain(log_probs)(*data())
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    said = str(report)
    assert "log-prob" in said
    assert line_of(log_probs, 1) in said


def test_in_place_and_options() -> None:
    report = explain(log_probs, consume_logits=True)(*data())
    assert [p.in_place for p in report.graphs[0].placements] == [True]
    assert explain(log_probs, min_vocab=4096)(*data()).fused == 0
    with pytest.raises(RuntimeError, match="Unexpected option bogus"):
        explain(log_probs, bogus=1)


def test_rejections_have_reason_node_and_line() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.t(), -1) @ value

    tensors = [torch.randn(size, requires_grad=True) for size in ((4, 8), (VOCAB, 8), (VOCAB, 8))]
    found = explain(attention)(*tensors).to_dict()
    assert found["fused"] == 0
    assert found["rejections"]
    for rejection in found["rejections"]:
        assert set(rejection) == {"reason", "node", "source"}
        assert rejection["reason"]
    assert line_of(attention, 1) in [r["source"] for r in found["rejections"]]


def test_graph_breaks() -> None:
    def broken(logits: Tensor, target: Tensor) -> Tensor:
        values = log_probs(logits, target)
        torch._dynamo.graph_break()
        return values + log_probs(logits * 2, target)

    report = explain(broken)(*data())
    assert len(report.graphs) == 2
    assert report.fused == 4
    assert [(b.name, b.source) for b in report.breaks] == [("broken", line_of(broken, 2))]
    assert "graph breaks:" in str(report)


def test_frames_left_to_python() -> None:
    def lost(logits: Tensor, target: Tensor) -> Tensor:
        total = logits.new_zeros(())
        for _ in range(2):
            torch._dynamo.graph_break()
            total = total + torch.softmax(logits, -1).sum()
        return total

    report = explain(lost)(*data())
    assert report.graphs == ()
    assert [(f.name, f.source) for f in report.python_frames] == [("lost", line_of(lost, 3))]
    assert "no graph at all, everything runs in Python" in str(report)
    with pytest.raises(AssertionError, match="left to Python"):
        report.assert_fused()


def test_logits_in_no_graph() -> None:
    report = explain(lambda x: (x * 2).sum())(torch.randn(4))
    assert "the logits are in no graph" in str(report)
    assert not report.graphs[0].has_vocabulary


def test_a_value_that_the_dry_run_does_not_have() -> None:
    def asks(logits: Tensor, target: Tensor) -> Tensor:
        values = log_probs(logits, target)
        if values.sum() > 0:
            return values
        return -values

    report = explain(asks)(*data())
    assert report.fused == 2
    assert "the dry run ended here" in report.notes[0]


def test_production_sizes_cost_nothing() -> None:
    logits = torch.zeros(1).expand(200_000, 150_000)  # 112 GiB if anything were computed
    assert explain(log_probs)(logits, torch.zeros(200_000, dtype=torch.long)).fused == 1


def test_modules_and_compiled_functions() -> None:
    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(8, VOCAB)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            return log_probs(self.head(hidden), target)

    target = torch.randint(0, VOCAB, (ROWS,))
    assert explain(Loss())(torch.randn(ROWS, 8), target).fused == 2
    assert explain(torch.compile(log_probs, backend="eager"))(*data()).fused == 2


def test_explaining_leaves_no_trace() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(log_probs, backend="slime_fused", options=INTERPRETED)
    compiled(*data())
    known = len(slime_compile.reports())
    counters = {k: dict(v) for k, v in torch._dynamo.utils.counters.items()}
    metrics = len(torch._dynamo.utils.get_compilation_metrics())
    state = torch.random.get_rng_state()
    explain(log_probs)(*data_without_randomness())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {k: dict(v) for k, v in torch._dynamo.utils.counters.items()} == counters
    assert len(torch._dynamo.utils.get_compilation_metrics()) == metrics
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*data())
    assert len(slime_compile.reports()) == known


def data_without_randomness() -> tuple[Tensor, Tensor]:
    return torch.zeros(ROWS, VOCAB, requires_grad=True), torch.zeros(ROWS, dtype=torch.long)


# ---- reports ------------------------------------------------------------------------------------------------------


def test_nothing_to_fuse_is_said() -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin(), backend="slime_fused", options=INTERPRETED)(torch.randn(4))
    report = slime_compile.reports()[-1]
    assert report.fused == 0
    assert "the logits are in no graph" in str(report)


def test_too_many_recompiles_are_reported() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()

    def sized(logits: Tensor, target: Tensor) -> Tensor:
        return log_probs(logits, target)

    fn = torch.compile(sized, backend="slime_fused", options=INTERPRETED, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(2, 6):
            fn(torch.randn(rows, VOCAB), torch.randint(0, VOCAB, (rows,)))
    told = [
        f for f in slime_compile.reports()[-1].python_frames if "too many recompiles" in f.reason
    ]
    assert [f.name for f in told] == ["sized"]
    assert line_of(sized, 0) in told[0].source
    assert "recompile_limit" in told[0].reason
    torch.compile(log_probs, backend="slime_fused", options=INTERPRETED)(*data())
    assert slime_compile.reports()[-1].fused == 2, "the last report is that of the last compile"


def test_dynamic_sizes() -> None:
    torch._dynamo.reset()
    fn = torch.compile(log_probs, backend="slime_fused", options=INTERPRETED, dynamic=True)
    fn(*data())
    report = slime_compile.reports()[-1]
    assert report.fused == 2
    (gradient,) = (v for v in report.graphs[0].values if v.kind == "gradient")
    assert re.fullmatch(r"\[s\d+, s\d+\]", gradient.shape)
    json.dumps(report.to_dict())


def test_a_report_of_nothing_is_not_empty() -> None:
    assert str(Report()) == "slime_fused: no graph at all"
    assert "0 fused operators" in str(Report((GraphReport("loss"),)))
