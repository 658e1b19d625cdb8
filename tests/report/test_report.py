"""Reports and the dry run: what they say, that it is true, and that explaining changes nothing."""

import functools
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from fx_passes import pipeline
from slime_compile import Report, explain, ops
from slime_compile.dynamo import frames
from slime_compile.report import process, text
from slime_compile.report.places import shortened
from slime_compile.report.values import GraphReport
from tests.support.processes import run_python

ROWS, VOCAB = 6, 1030  # just above the default min_vocab
INTERPRETED = {"inner": "aot_eager"}
KEYS = {
    "fused",
    "wide_before",
    "wide_after",
    "saved_bytes_before",
    "saved_bytes_after",
    "stored",
    "collectives_before",
    "collectives_after",
    "chunked_heads",
    "rejections",
    "in_place",
    "breaks",
    "python_frames",
    "notes",
    "other_graphs",
    "eager_calls",
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
    assert text.shortened(line_of(log_probs, 1)) in said
    assert "reuses the logits' buffer if nothing else references them" in said


def test_text_without_tabulate(monkeypatch: pytest.MonkeyPatch) -> None:
    report = explain(log_probs)(*data())
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    said = str(report)
    assert "log-prob" in said
    assert text.shortened(line_of(log_probs, 1)) in said


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
    assert "slime_fused: no graph; 1 frame runs in Python" in str(report)
    with pytest.raises(AssertionError, match="running in Python"):
        report.assert_fused()


def test_a_frame_that_is_left_to_python_again_is_told_again() -> None:
    """`torch._dynamo.reset` lets Dynamo try once more; the summary of the process lists the frame once."""

    def lost_again(logits: Tensor) -> Tensor:
        total = logits.new_zeros(())
        for _ in range(2):
            torch._dynamo.graph_break()
            total = total + torch.softmax(logits, -1).sum()
        return total

    def mine(report: slime_compile.Report) -> list[str]:
        return [f.name for f in report.python_frames if f.name == "lost_again"]

    known = len(slime_compile.reports())
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(lost_again, backend="slime_fused")
        for _ in range(2):
            compiled(data()[0])
    assert [mine(each) for each in slime_compile.reports()[known:]] == [["lost_again"]] * 2
    assert mine(slime_compile.summary()) == ["lost_again"]


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


def test_keyword_arguments_and_captured_parameters() -> None:
    head = torch.nn.Linear(8, VOCAB)

    def loss(hidden: Tensor, *, target: Tensor, scale: float = 1.0) -> Tensor:
        return log_probs(head(hidden) * scale, target)

    hidden, target = torch.randn(ROWS, 8), torch.randint(0, VOCAB, (ROWS,))
    report = explain(loss)(hidden, target=target, scale=0.5)
    report.assert_fused(2, in_place=True)
    assert report.graphs[0].training


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


@pytest.mark.parametrize("loss", [torch.nn.functional.cross_entropy, torch.nn.CrossEntropyLoss()])
def test_a_function_of_torchs_is_named_by_its_caller(loss: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="slime_fused", options=INTERPRETED)
    compiled(*data())
    line = line_of(test_a_function_of_torchs_is_named_by_its_caller, 4)
    assert f"(called at {line})" in slime_compile.reports()[-1].graphs[0].name
    assert f"(called at {__file__}:" in explain(loss)(*data()).graphs[0].name


def test_no_report_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.Reports([Report()])[-1] == Report()
    with pytest.raises(IndexError, match="there is no report: this process has called no function"):
        process.Reports()[-1]


def test_eager_calls_of_the_operators_are_in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "reports", list)
    ops.eager_calls.clear()
    logits, target = data()
    hidden, weight = torch.randn(ROWS, 8), torch.randn(VOCAB, 8)
    for _ in range(2):
        slime_compile.linear_log_probs_and_entropy(hidden, weight, target)
    slime_compile.log_probs_and_entropy(logits, target)
    report = slime_compile.summary()
    report.assert_fused(2)
    assert "slime_fused: no graph; eager code calls the operators" in str(report)
    assert "eager code: linear_log_probs_and_entropy, 2 calls" in str(report)
    calls = {"linear_log_probs_and_entropy": 2, "log_probs_and_entropy": 1}
    assert report.to_dict()["eager_calls"] == calls
    torch.compile(slime_compile.log_probs_and_entropy, backend="eager")(logits, target)
    assert ops.eager_calls == calls, "in compiled code they are part of a graph"
    ops.eager_calls.clear()
    assert str(slime_compile.summary()) == "slime_fused: no graph"


def test_a_report_of_nothing_is_not_empty() -> None:
    assert str(Report()) == "slime_fused: no graph"
    assert "0 fused operators" in str(Report((GraphReport("loss"),)))


# ---- assert_fused and summary -------------------------------------------------------------------------------------


def half_fused(logits: Tensor, target: Tensor) -> Tensor:
    values = torch.log_softmax(logits, -1)
    return values.gather(-1, target[:, None])[:, 0] + values.sort(-1).values[:, 0]


def broken(logits: Tensor, target: Tensor) -> Tensor:
    values = log_probs(logits, target)
    torch._dynamo.graph_break()
    return values + log_probs(logits * 2, target)


def refused(logits: Tensor, target: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return torch.softmax(logits, -1) * 2


def test_what_is_left_of_the_vocabulary_is_no_fused_loss() -> None:
    report = explain(half_fused)(*data())
    left = report.graphs[0].stored
    assert report.fused == 1
    assert left > 0
    with pytest.raises(
        AssertionError, match=f"at most 0 full-vocabulary values stored, got {left}"
    ):
        report.assert_fused()
    report.assert_fused(max_full_vocabulary=left)


BESIDE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "nothing": (lambda logits: logits.sum(), 0),
    "sorted": (lambda logits: logits.sort(-1).values[:, :5].sum(), 2),  # values and numbers
    "largest": (lambda logits: logits.topk(5).values.sum(), 0),
    "summed up": (lambda logits: logits.cumsum(-1).cos().sum(), 3),
}
"""What is made of the logits beside their loss, and how many full-vocabulary values that leaves at least."""


@pytest.mark.parametrize(("more", "left"), BESIDE.values(), ids=BESIDE)
def test_what_is_made_of_the_logits_themselves_is_left(
    more: Callable[[Tensor], Tensor], left: int
) -> None:
    report = explain(lambda logits, target: log_probs(logits, target).sum() + more(logits))(*data())
    assert report.graphs[0].operators > 0
    found = report.graphs[0].stored
    assert found >= left
    if left:
        with pytest.raises(AssertionError, match=f"full-vocabulary values stored, got {found}"):
            report.assert_fused()
        assert report.graphs[0].rejections, "what is left has a reason"
    else:
        report.assert_fused()
        assert report.graphs[0].rejections == (), "nothing is left as it was"


def sum_of_squares(logits: Tensor, target: Tensor) -> Tensor:
    return log_probs(logits, target).mean() + 1e-4 * logits.square().sum()


def gradient_in_forward(logits: Tensor, target: Tensor) -> Tensor:
    """What `grad_and_value` makes is read by arithmetic alone."""
    own = torch.func.grad_and_value(lambda x: log_probs(x, target).mean())
    gradient, value = own(logits)
    return value + (gradient * logits).square().sum()


@pytest.mark.parametrize("loss", [sum_of_squares, gradient_in_forward])
def test_what_is_part_of_a_kernel_is_not_left(loss: Callable[..., Tensor]) -> None:
    """The program still makes values as wide as the logits; none of them is in memory."""
    report = explain(loss, strict=True)(*data())
    assert report.graphs[0].wide_after > 0
    assert report.graphs[0].stored == 0
    assert "(0 stored)" in str(report)
    report.assert_fused()


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def own_gradient(
    logits: Tensor, target: Tensor, loss: Callable[..., Tensor] = log_probs
) -> tuple[Tensor, Tensor]:
    return torch.func.grad_and_value(lambda x: loss(x, target).mean())(logits)


def made_of_gradient(change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def program(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = own_gradient(logits, target)
        return change(gradient), value

    return program


RETURNED: dict[str, Callable[..., Any]] = {
    "a gradient": own_gradient,
    "an entropy's": functools.partial(own_gradient, loss=entropy),
    "in another shape": made_of_gradient(lambda x: x.view(2, -1, VOCAB)),
    "scaled": made_of_gradient(lambda x: x * 2),
    "two of them": lambda x, t: (own_gradient(x, t), own_gradient(2 * x, t)),
    "log-probs": lambda x, t: (x.log_softmax(-1), log_probs(x, t)),
}
"""Results as wide as the logits."""


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("loss", RETURNED.values(), ids=RETURNED)
def test_a_result_is_not_left(loss: Callable[..., Any], grad: bool) -> None:
    logits, target = data()
    explain(loss, strict=True)(logits.detach().requires_grad_(grad), target).assert_fused()


def test_what_a_result_is_made_of_is_left() -> None:
    """A part of what is sorted keeps all of it."""
    whole = made_of_gradient(lambda x: x.sort(-1).values)
    part = made_of_gradient(lambda x: x.sort(-1).values[:, :3])
    for loss, beside in ((whole, 1), (part, 2)):
        report = explain(loss)(torch.randn(ROWS, VOCAB), data()[1])
        assert report.graphs[0].stored == beside


def test_the_gradient_that_the_function_takes_itself_is_not_left() -> None:
    def loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        value = log_probs(logits, target).mean()
        return value.detach(), *torch.autograd.grad(value, logits)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        explain(loss)(*data()).assert_fused()


LARGE = 4096, 4096  # 64 MiB of logits: more than one chunk


def a_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return log_probs(hidden @ weight.t(), target).mean()


def a_head_that_is_returned(
    hidden: Tensor, weight: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    return log_probs(logits, target).mean(), logits.detach()


def test_logits_that_are_whole_are_stored() -> None:
    rows, vocab = LARGE
    with torch._subclasses.FakeTensorMode():
        hidden, weight = torch.randn(rows, 8), torch.randn(vocab, 8, requires_grad=True)
        target = torch.zeros(rows, dtype=torch.long)
    explain(a_head)(hidden, weight, target).assert_fused()
    whole = explain(a_head_that_is_returned)(hidden, weight, target)
    assert whole.graphs[0].wide_after == 0
    with pytest.raises(AssertionError, match="full-vocabulary values stored, got 1"):
        whole.assert_fused()
    explain(a_head_that_is_returned, lm_head=False)(hidden, weight, target).assert_fused()


def test_a_gradient_of_some_rows_beside_that_of_all_is_stored() -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        some = log_probs(logits[torch.tensor([0, 2, 5])] * 2, target[:3])
        return log_probs(logits, target).mean() + some.exp().mean()

    report = explain(loss)(*data())
    assert report.graphs[0].wide_after == 0
    assert report.graphs[0].stored == 1
    with pytest.raises(AssertionError, match="full-vocabulary values stored, got 1"):
        report.assert_fused()


def test_what_logits_are_made_of_and_what_becomes_of_their_gradient_is_not_left() -> None:
    def loss(given: Tensor, target: Tensor) -> Tensor:
        return log_probs(given.cos().tanh(), target)  # backward reads the logits: 1 - tanh ** 2

    report = explain(loss)(*data())
    assert report.graphs[0].wide_after == 0
    report.assert_fused()


def test_a_graph_break_is_no_fused_loss() -> None:
    report = explain(broken)(*data())
    with pytest.raises(AssertionError, match="at most 0 graph breaks, got 1"):
        report.assert_fused()
    report.assert_fused(4, graph_breaks=1)


def test_what_was_refused_counts_as_left() -> None:
    report = explain(refused)(*data())
    with pytest.raises(AssertionError, match=r"at least 1 fused .* full-vocabulary values stored"):
        report.assert_fused(graph_breaks=1)


def test_where_the_gradient_has_to_be() -> None:
    beside = explain(log_probs, consume_logits=False)(*data())
    assert "not in place: the logits are an input of the compiled function" in str(beside)
    beside.assert_fused(in_place=False)
    with pytest.raises(AssertionError, match="in the logits' buffer, got 0 of 1"):
        beside.assert_fused(in_place=True)
    over = explain(log_probs, consume_logits=True)(*data())
    over.assert_fused(in_place=True)
    with pytest.raises(AssertionError, match="in its own buffer, got 0 of 1"):
        over.assert_fused(in_place=False)
    at_run_time = explain(log_probs)(*data())
    at_run_time.assert_fused()
    for wanted in (True, False):
        with pytest.raises(AssertionError, match=rf"consume_logits={wanted} decides now"):
            at_run_time.assert_fused(in_place=wanted)
    with torch.no_grad():
        inference = explain(log_probs)(*data_without_randomness())
    inference.assert_fused()
    with pytest.raises(AssertionError, match="expected a gradient, got none"):
        inference.assert_fused(in_place=True)


def test_breaks_are_in_the_reports_of_this_process() -> None:
    torch._dynamo.reset()
    known = len(slime_compile.reports())
    torch.compile(broken, backend="slime_fused", options=INTERPRETED)(*data())
    first, second = slime_compile.reports()[known:]
    assert [(b.name, b.source) for b in first.breaks] == [("broken", line_of(broken, 2))]
    assert second.breaks == first.breaks, "what comes after the break is told of it, too"
    assert "graph breaks:" in str(first)
    with pytest.raises(AssertionError, match="at most 0 graph breaks, got 1"):
        second.assert_fused()


def test_breaks_stay_with_their_graph_when_dynamo_numbers_anew() -> None:
    torch._dynamo.reset()
    known = len(slime_compile.reports())
    torch.compile(broken, backend="slime_fused", options=INTERPRETED)(*data())
    torch._dynamo.reset()
    torch.compile(log_probs, backend="slime_fused", options=INTERPRETED)(*data())
    torch._dynamo.reset()
    torch.compile(broken, backend="slime_fused", options=INTERPRETED)(*data())
    breaks = [len(each.breaks) for each in slime_compile.reports()[known:]]
    assert breaks == [1, 1, 0, 1, 1]


class Printed(torch.autograd.Function):
    """A backward that Dynamo cannot trace."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        print(gradient.sum().item())
        return gradient[:, None].expand(ROWS, VOCAB)


@pytest.mark.filterwarnings("ignore:.*Graph break from")
def test_a_break_before_any_operator_is_in_the_reports() -> None:
    """There is no graph that ends with it."""

    def broken_at_once(logits: Tensor) -> Tensor:
        return Printed.apply(logits) + logits.log_softmax(-1)[:, 0]

    torch._dynamo.reset()
    known = len(slime_compile.reports())
    torch.compile(broken_at_once, backend="slime_fused", options=INTERPRETED)(data()[0])
    first, *graphs = slime_compile.reports()[known:]
    assert first.graphs == ()
    assert sum(each.fused for each in graphs) > 0
    assert [b.name for b in first.breaks] == ["broken_at_once"]
    assert "item()" in first.breaks[0].reason
    assert first.breaks[0] in slime_compile.summary().breaks
    assert first.breaks[0] in graphs[-1].breaks, "Dynamo went on after it"


@pytest.mark.filterwarnings("ignore:.*Graph break from")
def test_what_comes_after_two_breaks_is_told_of_both() -> None:
    """Nothing is computed between them: the second is in no graph's end."""

    def loss_at_3(logits: Tensor, target: Tensor) -> Tensor:
        values = log_probs(logits, target)
        torch._dynamo.graph_break()
        return Printed.apply(logits) + values.exp()

    torch._dynamo.reset()
    known = len(slime_compile.reports())
    torch.compile(loss_at_3, backend="slime_fused", options=INTERPRETED)(*data())
    mine = [each.breaks for each in slime_compile.reports()[known:] if each.breaks]
    assert [b.name for b in mine[0]] == ["loss_at_3"], "a name of the user's own"
    assert len(mine) >= 3
    for breaks in mine[1:]:
        assert breaks[0] == mine[0][0]
        assert [b.name for b in breaks] == ["loss_at_3"] * 2
        assert "item()" in breaks[1].reason


@pytest.mark.filterwarnings("ignore:.*Graph break from")
def test_a_break_in_the_rest_of_a_function_is_listed_once() -> None:
    def twice_broken(logits: Tensor, target: Tensor) -> Tensor:
        values = log_probs(logits, target)
        torch._dynamo.graph_break()
        scaled = values * 2
        return Printed.apply(scaled)

    torch._dynamo.reset()
    torch.compile(twice_broken, backend="slime_fused", options=INTERPRETED)(*data())
    found = [each for each in slime_compile.summary().breaks if "twice_broken" in each.name]
    assert [each.name for each in found] == ["twice_broken", "twice_broken"]
    assert "graph_break" in found[0].reason
    assert "item()" in found[1].reason


def test_a_summary_lists_what_is_about_the_vocabulary() -> None:
    torch._dynamo.reset()
    before = slime_compile.summary()
    for function in (torch.nn.functional.silu, torch.sigmoid, torch.cos):
        torch.compile(lambda x, f=function: f(x), backend="slime_fused", options=INTERPRETED)(
            torch.randn(4, 2 * VOCAB)
        )
    torch.compile(log_probs, backend="slime_fused", options=INTERPRETED)(*data())
    after = slime_compile.summary()
    assert len(after.graphs) == len(before.graphs) + 1
    assert after.fused == before.fused + 2
    assert after.other_graphs == before.other_graphs + 3
    assert f"{after.other_graphs} more graphs without a vocabulary" in str(after)


def test_a_small_activation_is_no_small_vocabulary() -> None:
    """SiLU is made of an exponential, a softmax of one that is summed up."""
    small = torch.randn(4, 128, requires_grad=True)
    assert explain(torch.nn.functional.silu)(small).graphs[0].rejections == ()
    (rejection,) = (
        explain(torch.nn.functional.log_softmax, strict=True)(small, -1).graphs[0].rejections
    )
    assert "last dimension 128 is smaller than min_vocab=1024" in rejection.reason


def test_what_is_narrower_than_a_vocabulary_beside_one_is_none() -> None:
    """An attention over few tokens is not why a loss over the vocabulary has no softmax."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        attended = torch.softmax(hidden @ hidden.t(), -1) @ hidden
        return (attended @ weight).sort(-1).values[:, :5].mean()

    report = explain(loss)(torch.randn(9, 16), torch.randn(16, 2 * VOCAB))
    assert report.graphs[0].rejections == ()
    assert "a last dimension of min_vocab=1024 or more" in str(report)
    assert "there is nothing to fuse" in str(report)


def test_frames_of_torchs_own_are_nobodys_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's hooks are compiled and given up by Dynamo, one after another."""

    def record(file: str, number: int) -> SimpleNamespace:
        return SimpleNamespace(
            compile_id=f"{number}/0",
            co_name="hook",
            co_filename=file,
            co_firstlineno=7,
            fail_type="Unsupported",
            fail_reason="a reason",
            fail_user_frame_filename=None,
            fail_user_frame_lineno=None,
            end_time_us=1,
            restart_reasons=None,
        )

    fsdp = str(Path(torch.__file__).parent / "distributed/fsdp/_fully_shard/_fsdp_state.py")
    metrics = [record(fsdp, 900), record("/a/trainer.py", 901)]
    monkeypatch.setattr(torch._dynamo.utils, "get_compilation_metrics", lambda: metrics)
    monkeypatch.setattr(frames, "_seen", {})
    assert [f.source for f, _ in frames.process_frames()] == ["/a/trainer.py:7"]


def test_a_number_that_becomes_a_tensor_is_no_graph_break() -> None:
    """Dynamo traces the frame anew for a CPU tensor of one float64 number."""
    torch._dynamo.reset()

    def loss(logits: Tensor, scale: Tensor) -> Tensor:
        return torch.log_softmax(logits * scale, -1)[:, 0].mean()

    compiled = torch.compile(
        loss, backend="slime_fused", fullgraph=True, options={"inner": "aot_eager", "min_vocab": 32}
    )
    logits = torch.randn(7, 37, dtype=torch.float64, requires_grad=True)
    compiled(logits, torch.full((), 0.5, dtype=torch.float64))
    slime_compile.reports()[-1].assert_fused()


def test_a_failed_pass_is_no_fused_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: object, config: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "fuse", fail)
    report = explain(log_probs)(*data())
    with pytest.raises(AssertionError, match="no failed pass, got 1"):
        report.assert_fused(0)


def chosen_by_a_mask(logits: Tensor, target: Tensor) -> Tensor:
    """A size that depends on data, which the backend's tracing refuses after Dynamo has let it pass (SAPO)."""
    values = log_probs(logits, target)
    loss = torch.zeros_like(values)
    mask = target >= 0
    loss[mask] = values[mask] * 2
    return loss.mean()


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_a_graph_whose_compilation_raised_is_none_from_a_cache() -> None:
    torch._dynamo.reset()
    known = len(slime_compile.reports())
    compiled = torch.compile(chosen_by_a_mask, backend="slime_fused", options=INTERPRETED)
    compiled(*data())
    found = slime_compile.reports()[known:]
    said = [str(each) for each in found]
    raised = [each for report in found for each in report.graphs if each.raised]
    assert raised
    in_python = [frame.name for report in found for frame in report.python_frames]
    assert [re.sub(r"\d+", "N", name) for name in in_python] == ["chosen_by_a_mask from line N on"]
    assert "DynamicOutputShapeException" in raised[0].notes[0]
    assert not any("from torch's compile cache" in each for each in said)
    assert not any("everything runs in Python" in each for each in said)
    assert any("from line" in each and "not compiled" in each for each in said)
    assert any("slime_fused: no graph; 1 frame runs in Python" in each for each in said)
    assert slime_compile.reports()[known].fused == 2


def test_a_graph_that_cannot_be_compiled_is_no_fused_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise ZeroDivisionError("the test's own")

    monkeypatch.setattr("slime_compile.dry_run.explain.prepare", fails)
    report = explain(log_probs)(*data())
    assert report.notes[0].endswith("ZeroDivisionError: the test's own")
    assert "the test's own" in report.graphs[0].notes[0]
    with pytest.raises(AssertionError, match="no uncompiled graph, got 1"):
        report.assert_fused(0)


def test_logits_that_are_changed_in_place_are_not_returned() -> None:
    report = explain(lambda x, t: log_probs(x.div_(0.7), t))(*data())
    assert "the logits are an output" not in str(report)
    assert "the function changes these logits in place and the caller may use them later" in str(
        report
    )


# ---- where reports are printed ------------------------------------------------------------------------------------

PRINTED = """
import torch
def loss(x, t):
    return torch.log_softmax(x, -1).gather(-1, t[:, None]).mean()
x, t = torch.randn(4, 1030, requires_grad=True), torch.randint(0, 1030, (4,))
torch.compile(loss, backend="slime_fused", options={"inner": "aot_eager"})(x, t).backward()
"""


@pytest.mark.thorough
def test_torchs_log_prints_reports_as_they_are_made(tmp_path: Path) -> None:
    written = tmp_path / "torch.log"
    run_python(PRINTED, TORCH_LOGS="slime_compile", TORCH_LOGS_OUT=str(written))
    said = written.read_text()
    assert said.count("slime_fused: 2 fused operators in 1 graph") == 1
    assert "reuses the logits' buffer if nothing else references them" in said
    run_python(PRINTED, TORCH_LOGS="graph_code", TORCH_LOGS_OUT=str(tmp_path / "other.log"))
    assert "fused operators" not in (tmp_path / "other.log").read_text()


@pytest.mark.thorough
def test_torchs_trace_has_the_report_and_the_graphs(tmp_path: Path) -> None:
    run_python(PRINTED, TORCH_TRACE=str(tmp_path))
    (trace,) = tmp_path.glob("*.log")
    text = trace.read_text()
    for name in ("before", "after", "backward", "report"):
        assert text.count(f'"name": "slime_fused_{name}"') == 1, name
    after = text.split('"slime_fused_after"')[1].split("[rank")[0]
    assert "slime_fused.row_stats.default" in after


def test_short_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cell, the number that IPython's compiler gives its file."""
    monkeypatch.chdir(tmp_path)
    assert (
        shortened(f"read at {tmp_path}/a.py:3, x{tmp_path}/a.py")
        == f"read at a.py:3, x{tmp_path}/a.py"
    )
    assert shortened("/env/lib/python3/site-packages/trl/a.py:3") == "trl/a.py:3"
    assert (
        shortened("loss (<ipython-input-12-0a1b>), /elsewhere/b.py")
        == "loss (In [12]), /elsewhere/b.py"
    )
    cell = "/tmp/ipykernel_85/25567.py"
    assert shortened(f"{cell}:3") == f"{cell}:3"
    compiler = SimpleNamespace(format_code_name={cell: ("Cell", "In[3]")}.get)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=compiler))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert (
        shortened(f"at {cell}:3 and /tmp/ipykernel_85/9.py:1")
        == "at In [3]:3 and /tmp/ipykernel_85/9.py:1"
    )


def test_one_operator_is_singular() -> None:
    report = explain(lambda logits: logits.logsumexp(-1))(data()[0].detach())
    assert str(report).startswith("slime_fused: 1 fused operator in 1 graph\n")
    assert "inference, 1 fused operator\n" in str(report)
    with pytest.raises(AssertionError, match="expected at least 2 fused operators, got 1"):
        report.assert_fused(2)


def test_a_report_in_a_notebook() -> None:
    report = explain(lambda logits, target: F.cross_entropy(logits, target))(*data())
    assert (
        repr(report)
        == "<Report: slime_fused: 2 fused operators in 1 graph; print it for the tables>"
    )
    page = report._repr_html_()
    assert page.count("<table>") == 1
    assert "&lt;lambda&gt;" in page
    assert "full-vocabulary values" in page


def test_tables_by_rich_fit_the_terminal() -> None:
    console = pytest.importorskip("rich.console")
    written = io.StringIO()
    report = explain(log_probs)(*data())
    console.Console(file=written, width=60, force_terminal=True).print(report)
    code = r"\x1b\[([\d;]*)m"
    assert set(re.findall(code, written.getvalue())) <= {"0", "1"}  # bold headers, no colour
    shown = re.sub(code, "", written.getvalue())
    assert max(map(len, shown.splitlines())) <= 60
    for part in ("slime_fused: ", "log-prob", "full-vocabulary values"):
        assert part in " ".join(shown.split())


def test_lines_of_torchs_own_functions() -> None:
    """Of the line that calls them, in every part of the report."""
    for loss in (F.cross_entropy, torch.nn.CrossEntropyLoss()):
        report = explain(loss)(*data())
        line = sys._getframe().f_lineno - 1
        places = {value.source for graph in report.graphs for value in graph.values}
        assert places == {f"{__file__}:{line}"}


def test_a_warning_where_nothing_is_fused(caplog: pytest.LogCaptureFixture) -> None:
    """Once for each function; none where something is fused or no value is as wide as a vocabulary."""

    def refused(logits: Tensor) -> Tensor:
        return logits.softmax(-1).cumsum(-1).square().sum()

    def fused(logits: Tensor) -> Tensor:
        return logits.logsumexp(-1).sum()

    options = INTERPRETED | {"by_rows": False}
    logits, _ = data()
    for fn, given in (
        (refused, logits),
        (refused, logits[1:]),
        (fused, logits),
        (refused, logits[:, :9]),
    ):
        torch.compiler.reset()
        torch.compile(fn, backend="slime_fused", options=options)(given)
    (told,) = [r.getMessage() for r in caplog.records if "nothing is fused" in r.getMessage()]
    assert "refused (tests/report/test_report.py)" in told or f"refused ({__file__})" in told
    assert told.endswith("print(slime_compile.summary()) has all reasons")


def test_no_warning_where_all_rows_fit_into_one_chunk(caplog: pytest.LogCaptureFixture) -> None:
    """A loop would save nothing, and the refusals are not why there is none."""

    def squared(logits: Tensor) -> Tensor:
        return logits.softmax(-1).cumsum(-1).square().sum()

    for rows, fit in ((9, True), (900, False)):
        logits = torch.zeros(rows, 2048, requires_grad=True)
        torch.compile(squared, backend="slime_fused", options=INTERPRETED)(logits).backward()
        report = str(slime_compile.reports()[-1])
        assert ("all rows fit into one chunk (option chunk_mib)" in report) is fit
        assert ("runs in 4 chunks of rows" in report) is not fit
    assert not [r for r in caplog.records if "nothing is fused" in r.getMessage()]
