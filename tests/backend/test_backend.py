"""The backend: registration, hooks, failures, caches, threads. Code generation takes seconds and is avoided."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

import slime_compile
from fx_passes import pipeline
from fx_passes.outcome import Outcome
from slime_compile.backend import inductor, runner
from slime_compile.backend.options import Options
from slime_compile.report import Report
from slime_compile.report.process import keep
from slime_compile.report.record import Record
from slime_compile.report.values import GraphReport
from tests.support import harness
from tests.support.processes import run_python, runs_while_compiling

ROWS, VOCAB = 6, 1030  # just above the default min_vocab, no multiple of anything
INTERPRETED = {"inner": "aot_eager"}


def log_probs(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]


def data() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, requires_grad=True)
    return logits, torch.randint(0, VOCAB, (ROWS,)), torch.randn(ROWS)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="slime_fused", options={**INTERPRETED, **options})


def last_report() -> Report:
    return slime_compile.reports()[-1]


def check_against_eager(fn: Callable[..., Any]) -> None:
    logits, target, grad = data()
    out = fn(logits, target)
    expected = log_probs(logits, target)
    torch.testing.assert_close(out, expected)
    (got,) = torch.autograd.grad(out, logits, grad)
    torch.testing.assert_close(got, torch.autograd.grad(expected, logits, grad)[0])


# ---- registration -------------------------------------------------------------------------------------------------


def test_registered_without_an_import_of_ours() -> None:
    code = """
import sys, torch
assert not any(name.startswith(("slime_compile", "fx_passes")) for name in sys.modules)
assert "slime_fused" in torch._dynamo.list_backends()
def loss(x, t):
    return torch.log_softmax(x, -1).gather(-1, t[:, None]).mean()
x, t = torch.randn(4, 1030, requires_grad=True), torch.randint(0, 1030, (4,))
torch.compile(loss, backend="slime_fused")(x, t).backward()
import slime_compile
print(slime_compile.reports()[0].fused)
"""
    assert run_python(code, SLIME_FUSED_INNER="aot_eager").strip() == "2"


def test_unknown_option_reaches_the_user() -> None:
    with pytest.raises(Exception, match="Unexpected option bogus, known options are"):
        compiled(log_probs, bogus=1)(*data()[:2])


# ---- where the pass runs ------------------------------------------------------------------------------------------


def test_training_graph() -> None:
    check_against_eager(compiled(log_probs))
    assert last_report().fused == 2
    assert last_report().graphs[0].training


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "no requires_grad"])
def test_inference_graphs(how: str) -> None:
    logits, target, _ = data()
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    given = logits if how in modes else logits.detach()
    with modes.get(how, torch.enable_grad)():
        out = compiled(log_probs)(given, target)
    torch.testing.assert_close(out, log_probs(given, target), check_stride=False)
    assert last_report().fused == 1
    assert not last_report().graphs[0].training


def test_as_many_rows_as_a_vocabulary_has() -> None:
    """The gradient of a sum over them is one number, spread over what looks like a vocabulary."""

    def fn(logits: Tensor, target: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, target[:, None]).sum()

    logits, target = torch.randn(40, 24, requires_grad=True), torch.arange(40) % 24
    compiled = torch.compile(
        fn, backend="slime_fused", options={"inner": "aot_eager", "min_vocab": 16}
    )
    torch.testing.assert_close(
        torch.autograd.grad(compiled(logits, target), logits),
        torch.autograd.grad(fn(logits, target), logits),
    )
    found = last_report().to_dict()
    assert (found["fused"], found["wide_after"]) == (2, 0)


def test_different_options_have_different_code() -> None:
    torch._dynamo.reset()
    before = len(slime_compile.reports())
    for min_vocab in (1024, 4096):
        options = {**INTERPRETED, "min_vocab": min_vocab}
        check_against_eager(torch.compile(log_probs, backend="slime_fused", options=options))
    assert [r.fused for r in slime_compile.reports()[before:]] == [2, 0]


@runs_while_compiling
def test_six_threads() -> None:
    torch._dynamo.reset()
    before = len(slime_compile.reports())
    failures: list[BaseException] = []

    def work(min_vocab: int) -> None:
        try:
            options = {**INTERPRETED, "min_vocab": min_vocab}
            check_against_eager(torch.compile(log_probs, backend="slime_fused", options=options))
        except BaseException as error:
            failures.append(error)

    sizes = [64, 128, 256, 2048, 4096, 8192]
    threads = [threading.Thread(target=work, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert sorted(r.fused for r in slime_compile.reports()[before:]) == [0, 0, 0, 2, 2, 2]


# ---- a pass that fails --------------------------------------------------------------------------------------------


@pytest.fixture
def failing_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pass that breaks the graph before it raises."""

    def fuse(graph: Graph, config: object) -> None:
        output = graph.output_node()
        first = next(n for n in graph.nodes if n.op == "call_function")
        output.replace_input_with(output.all_input_nodes[0], first)
        raise ZeroDivisionError("the test's own")

    monkeypatch.setattr(pipeline, "fuse", fuse)
    runner._log_failure.cache_clear()
    yield
    runner._log_failure.cache_clear()


@pytest.mark.usefixtures("failing_pass")
def test_a_failing_pass_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="slime_compile"):
        check_against_eager(compiled(log_probs))
        assert last_report().graphs[0].training
        with torch.no_grad():
            logits, target, _ = data()
            torch.testing.assert_close(
                compiled(log_probs)(logits, target), log_probs(logits, target)
            )
    told = [r for r in caplog.records if r.name == "slime_compile.backend.runner"]
    assert len(told) == 1
    assert "ZeroDivisionError: the test's own" in told[0].getMessage()
    assert told[0].exc_info is not None
    assert "the pass fuse failed: ZeroDivisionError" in str(last_report())
    assert not last_report().graphs[0].training


def test_a_pass_that_fails_on_dynamos_graph_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any sizes: Dynamo writes on a node of a symbolic size where it comes from, and asks for it."""

    def fails(gm: GraphModule, config: pipeline.Config) -> Outcome:
        raise ZeroDivisionError("the test's own")

    passes = [
        dataclasses.replace(each, run=fails) if each.name == "returned_logits" else each
        for each in pipeline.PASSES
    ]
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    torch._dynamo.reset()
    fn = torch.compile(log_probs, backend="slime_fused", dynamic=True, options=INTERPRETED)
    check_against_eager(fn)
    assert "the pass returned_logits failed: ZeroDivisionError" in str(last_report())
    assert last_report().fused == 2


def test_the_other_passes_run_without_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def sum_first(graph: Graph, min_vocab: int) -> int:
        ran.append(graph)
        raise ZeroDivisionError("the test's own")

    monkeypatch.setattr(pipeline, "sum_first", sum_first)
    check_against_eager(compiled(log_probs))
    assert len(ran) == 1
    assert last_report().fused == 2
    (graph,) = last_report().graphs
    assert graph.failed
    assert "the pass picked_rows failed: ZeroDivisionError: the test's own" in graph.notes


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_a_pass_is_left_out_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    spies = [
        dataclasses.replace(p, run=lambda t, c, p=p: (ran.append(p.name), p.run(t, c))[1])
        for p in pipeline.PASSES
    ]
    monkeypatch.setattr(pipeline, "PASSES", tuple(spies))
    check_against_eager(compiled(log_probs, without=f" {name} ,"))
    assert name not in ran
    assert "fuse" in ran or name == "fuse"
    assert last_report().fused == (0 if name == "fuse" else 2)


@pytest.mark.usefixtures("failing_pass")
def test_a_failing_pass_raises_under_strict() -> None:
    with pytest.raises(Exception, match="the test's own"):
        compiled(log_probs, strict=True)(*data()[:2])


# ---- a fused graph that cannot be compiled --------------------------------------------------------------------------


class FailsOnFused(CustomGraphPass):
    """A pass of the user's, after ours, that cannot go on with our operators; or with nothing at all."""

    def __init__(self, always: bool = False) -> None:
        self.always = always

    def __call__(self, graph: Graph) -> None:
        if self.always or any("slime_fused" in str(node.target) for node in graph.nodes):
            raise ZeroDivisionError("the test's own\nand more")

    def uuid(self) -> Any:
        return None


def with_a_failing_inductor(always: bool = False, **options: Any) -> Callable[..., Any]:
    runner._log_failure.cache_clear()
    how = {"inner": "inductor", "inductor.post_grad_custom_pre_pass": FailsOnFused(always)}
    return compiled(log_probs, **how, **options)


def test_what_inductor_cannot_compile_fused_is_compiled_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="slime_compile"):
        check_against_eager(with_a_failing_inductor())
    told = [r for r in caplog.records if r.name == "slime_compile.backend.runner"]
    assert len(told) == 1
    assert "inductor, on the fused graph, failed" in told[0].getMessage()
    report = last_report()
    assert report.fused == 0
    (graph,) = report.graphs
    assert graph.failed
    assert graph.training
    assert (graph.rejections, graph.placements) == ((), ())
    (note,) = graph.notes
    assert note.startswith("inductor failed on the fused graph: ")
    assert note.endswith("ZeroDivisionError: the test's own")


def test_it_raises_under_strict() -> None:
    with pytest.raises(Exception, match="the test's own"):
        with_a_failing_inductor(strict=True)(*data()[:2])


def test_what_fails_without_us_too_is_raised() -> None:
    with pytest.raises(Exception, match="the test's own"):
        with_a_failing_inductor(always=True)(*data()[:2])


def test_one_rank_alone_does_not_go_on_unfused() -> None:
    assert runner.may_stay_unfused(Options.parse(), _record_of(collectives=0))
    assert not runner.may_stay_unfused(Options.parse(), _record_of(collectives=5))


def _record_of(collectives: int) -> Record:
    record = Record("loss", "id", {})
    record.add(GraphReport("", operators=2, collectives_before=collectives))
    return record


# ---- retain_graph -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consume", [True, False, "auto"])
@pytest.mark.parametrize("donated", [True, False])
def test_retain_graph(consume: Any, donated: bool) -> None:
    """Whatever torch's setting is; tests/cases/aliasing.py has the order of backwards."""
    logits, target, grad = data()
    with functorch_config.patch(donated_buffer=donated):
        out = compiled(log_probs, consume_logits=consume)(logits * 1, target)
        first = torch.autograd.grad(out, logits, grad, retain_graph=True)
        second = torch.autograd.grad(out, logits, grad)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = torch.autograd.grad(log_probs(logits, target), logits, grad)
    torch.testing.assert_close(second, expected)


def softmaxes_of_two_rows(logits: Tensor) -> Tensor:
    probs = logits.softmax(-1)
    return (probs * probs.roll(1, 0)).sum()  # which is not fused


def one_value_per_row(logits: Tensor) -> Tensor:
    return (torch.tanh(logits).logsumexp(-1) + logits.sigmoid().sum(-1)).sum()


@harness.each_inner
@pytest.mark.parametrize("loss", [softmaxes_of_two_rows, one_value_per_row])
def test_retain_graph_without_a_gradient_of_ours(
    loss: Callable[[Tensor], Tensor], inner: str
) -> None:
    logits = data()[0]
    out = torch.compile(loss, backend="slime_fused", options={"inner": inner})(logits)
    first = torch.autograd.grad(out, logits, retain_graph=True)
    second = torch.autograd.grad(out, logits)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(second, torch.autograd.grad(loss(logits), logits))


# ---- mode, and the user's own passes ------------------------------------------------------------------------------


class Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any | None:
        return "a pass of the user's"


def test_the_users_passes_keep_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    joint, end, post = Counting(), Counting(), Counting()
    torch._dynamo.reset()
    with torch._inductor.config.patch(joint_custom_pre_pass=joint, joint_custom_post_pass=end):
        options = {"inductor.post_grad_custom_post_pass": post}
        check_against_eager(torch.compile(log_probs, backend="slime_fused", options=options))
    assert (joint.calls, end.calls) == (1, 1)
    assert post.calls == 2  # forward and backward
    assert last_report().fused == 2


def inductor_patches(monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> dict[str, Any]:
    """What the backend hands to inductor, which is not run."""
    from torch._inductor import compile_fx

    found: dict[str, Any] = {}

    def capture(gm: Any, inputs: Any, *, inner_compile: Any, config_patches: Any) -> Any:
        found.update(config_patches)
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", capture)
    torch._dynamo.reset()
    torch.compile(log_probs, backend="slime_fused", **kwargs)(*data()[:2])
    return found


def test_mode_is_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = inductor_patches(monkeypatch, mode="max-autotune-no-cudagraphs")
    assert patches["max_autotune"] is True


def test_mode_needs_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_FUSED_INNER", "aot_eager")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mode='max-autotune' is inductor's and needs inner="):
        torch.compile(log_probs, backend="slime_fused", mode="max-autotune")(*data()[:2])


def joint_pass(user: Sequence[Any], **options: Any) -> inductor._JointPass:
    record = keep(Record("", "", {}))
    return inductor._JointPass(Options.parse(options, {}), record.number, tuple(user))


def test_uuid_has_options_and_the_users_passes() -> None:
    uuids = [
        joint_pass([]).uuid(),
        joint_pass([], min_vocab=64).uuid(),
        joint_pass([], consume_logits=True).uuid(),
        joint_pass([Counting()]).uuid(),
    ]
    assert None not in uuids
    assert len(set(uuids)) == len(uuids)


def test_a_pass_without_identity_switches_the_cache_off() -> None:
    assert joint_pass([lambda graph: None]).uuid() is None
