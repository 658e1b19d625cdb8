"""consume_logits="auto": logits that somebody can still see stay as they are, whoever it is; nobody's are overwritten.

Each holder keeps the logits in its way, reads them after backward, and finds what it was given; the gradient is
eager's in all cases, bit for bit that of a gradient in a buffer of its own. Functions are compiled once for all cases.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import set_eval_frame

import slime_compile
from slime_compile.ops import held_by, holders, operators
from slime_compile.ops.held_by import variables
from tests.support.held import (
    ROWS,
    UPSTREAM,
    VOCAB,
    Loss,
    Read,
    check_held,
    compiled,
    leaf,
    log_probs,
    overwritten,
    right,
    step,
)

# ---- nobody -------------------------------------------------------------------------------------------------------


def test_nobody(fn: Loss) -> None:
    before = overwritten()
    for _ in range(5):
        step(fn)
    assert overwritten() == before + 5


def test_the_report_counts(fn: Loss) -> None:
    """Last of the reports is `right`'s, or that of `fn`."""
    step(fn)
    said = "\n".join(str(report) for report in slime_compile.reports())
    assert "reuses the logits' buffer" in said


def test_a_holder_that_lets_go_is_none(fn: Loss) -> None:
    before = overwritten()

    def for_a_while(logits: Tensor) -> Read:
        kept = [
            logits,
            logits.view(-1),
            logits.detach(),
            logits.untyped_storage(),
            weakref.ref(logits),
        ]
        kept.clear()
        return lambda: None

    step(fn, for_a_while)
    assert overwritten() == before + 1


# ---- Python -------------------------------------------------------------------------------------------------------


class Box:
    logits: Tensor


def variable(logits: Tensor) -> Read:
    return lambda: logits  # a cell


def attribute(logits: Tensor) -> Read:
    box = Box()
    box.logits = logits
    return lambda: box.logits


def in_a_list(logits: Tensor) -> Read:
    return functools.partial([logits].__getitem__, 0)


def in_a_dict(logits: Tensor) -> Read:
    return functools.partial({"logits": logits}.get, "logits")


def default_argument(logits: Tensor) -> Read:
    def read(kept: Tensor = logits) -> Tensor:
        return kept

    return read


def generator(logits: Tensor) -> Read:
    def waiting() -> Iterator[Tensor]:
        kept = logits * 0 + logits  # runs at the first next
        yield kept
        yield logits

    made = waiting()
    next(made)
    return lambda: next(made)


def exception(logits: Tensor) -> Read:
    def fails(kept: Tensor) -> None:
        raise ValueError(kept.shape)

    try:
        fails(logits)
    except ValueError as error:
        caught = error
    assert caught.__traceback__ is not None
    return lambda: caught.__traceback__.tb_next.tb_frame.f_locals["kept"]  # type: ignore[union-attr]


def another_thread(logits: Tensor) -> Read:
    go, found = threading.Event(), []

    def work(kept: Tensor) -> None:
        go.wait()
        found.append(kept)

    thread = threading.Thread(target=work, args=(logits,))
    thread.start()

    def read() -> Tensor:
        go.set()
        thread.join()
        return found[0]

    return read


def cycle(logits: Tensor) -> Read:
    """Unreachable but not collected; `__del__` sees it."""
    seen: list[Tensor] = []

    class Dying:
        def __del__(self) -> None:
            seen.append(self.logits)  # type: ignore[attr-defined]

    gc.disable()
    dying = Dying()
    dying.logits, dying.itself = logits, dying  # type: ignore[attr-defined]
    del dying

    def read() -> Tensor:
        gc.enable()
        gc.collect()
        return seen[0]

    return read


def hook(logits: Tensor) -> Read:
    seen: list[Tensor] = []
    logits.register_hook(lambda grad: seen.append(logits.detach().clone()))
    return lambda: seen[0]


def waiting_on_the_stack(logits: Tensor) -> Read:
    """A generator in the middle of an expression: its frame has no name for them."""

    def waiting(kept: list[Tensor]) -> Iterator[Any]:
        yield (kept.pop(), (yield))

    made = waiting([logits])
    next(made)
    return lambda: next(made)[0]


def future(logits: Tensor) -> Read:
    kept: torch.futures.Future[Tensor] = torch.futures.Future()
    kept.set_result(logits)
    return kept.value


def list_of_cpps(logits: Tensor) -> Read:
    kept = torch._C.ScriptList([logits])
    return lambda: kept[0]


def own_attribute(logits: Tensor) -> Read:
    """A cycle through the tensor itself."""
    logits.itself = logits  # type: ignore[attr-defined]
    seen = weakref.ref(logits)
    return lambda: seen()


PYTHON = [
    variable, attribute, in_a_list, in_a_dict, default_argument, generator, exception, another_thread, cycle, hook,
    own_attribute, waiting_on_the_stack, future, list_of_cpps,
]  # fmt: skip


@pytest.mark.parametrize("hold", PYTHON, ids=lambda hold: hold.__name__)
def test_held(fn: Loss, hold: Callable[[Tensor], Read]) -> None:
    check_held(fn, hold)


# ---- what the report says -----------------------------------------------------------------------------------------


class Outputs:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_the_remedy_names_the_variable() -> None:
    torch._dynamo.reset()
    fn = compiled(lambda logits: log_probs(logits) * 0.5, inner="aot_eager")
    outputs = Outputs(leaf() * 1)
    fn(outputs.logits).backward(UPSTREAM)
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    said = placement.reason
    assert said.startswith(
        "Python references the logits (`outputs.logits` in test_the_remedy_names_the_variable ("
    )
    line = str(slime_compile.reports()[-1]).splitlines()[-1]
    assert f"not in place, 0 of 1 call: {said}" in line

    kept = [(leaf() * 1).view(-1, VOCAB)]
    alias = kept[0].detach()
    fn(kept.pop()).backward(UPSTREAM)
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    assert "`alias` in test_the_remedy" in placement.reason
    assert alias.shape == (ROWS, VOCAB)


def reason_of(fn: Callable[[Tensor], Tensor], logits: list[Any]) -> str:
    """After one more call, on the only one of `logits`, which it takes out."""
    fn(logits.pop()).backward(UPSTREAM)
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    return placement.reason


def test_the_variable_is_of_the_latest_call_or_none_is_named() -> None:
    torch._dynamo.reset()
    fn = compiled(lambda logits: log_probs(logits) * 0.25, inner="aot_eager")
    said = []
    for _ in range(4):
        first = leaf() * 1
        said.append(reason_of(fn, [first]))
    assert ["`first`" in each for each in said] == [True, True, False, True]
    assert said[2] == "Python references the logits"
    del first
    beside = leaf() * 1
    assert reason_of(fn, [beside]) == "Python references the logits", "not the variable of call 4"
    assert beside.shape == (ROWS, VOCAB)


DEEP: dict[str, Callable[[Tensor], Any]] = {
    "`kept.logits` in": lambda logits: SimpleNamespace(logits=logits),
    "`kept.last['logits']` in": lambda logits: SimpleNamespace(last={"logits": logits}),
    "`kept[0]['logits']` in": lambda logits: [{"logits": logits}],
    "": lambda logits: [[[{"logits": logits}]]],
}


@pytest.mark.parametrize("name", DEEP)
def test_what_contains_the_logits(name: str) -> None:
    """Two levels deep; what is deeper has no name, and is not called a closure for a cell of the backend's."""
    logits = leaf() * 1
    kept = DEEP[name](logits)
    given = [logits]
    del logits
    torch._dynamo.reset()
    scale = 2.0 + len(name)  # a graph of its own, whose first call this is
    said = reason_of(compiled(lambda x: log_probs(x) * scale, inner="aot_eager"), given)
    assert said.startswith(
        f"Python references the logits ({name}" if name else "Python references the logits"
    )
    assert "closure" not in said
    assert kept is not None


def test_a_closure_of_the_users_is_named() -> None:
    logits = leaf() * 1

    def read() -> Tensor:
        return logits

    (said,) = held_by._suspended(logits)
    line = read.__code__.co_firstlineno
    assert said == f"`logits` in the closure read (test_who_holds_logits.py:{line})"


def test_a_hook_that_closes_over_the_logits() -> None:
    torch._dynamo.reset()
    fn = compiled(lambda x: log_probs(x) * 3, inner="aot_eager")
    logits = leaf() * 1
    out = fn(logits)
    out.register_hook(lambda grad: grad * logits.isfinite().all())
    out.backward(UPSTREAM)
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    assert placement.reason.startswith("Python references the logits (`logits` in test_a_hook")


def test_looking_for_a_name_never_fails_a_step(fn: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Tensor) -> list[str]:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    monkeypatch.setattr(operators, "variables", fails)
    torch._dynamo.reset()
    again = compiled(lambda x: log_probs(x) * 4, inner="aot_eager")
    assert reason_of(again, [kept := leaf() * 1]) == "Python references the logits"
    assert kept.shape == (ROWS, VOCAB)


def test_a_models_output_is_a_dictionary() -> None:
    """transformers' ModelOutput is one."""

    class ModelOutput(OrderedDict[str, Tensor]):
        pass

    outputs = ModelOutput(logits=leaf() * 1)
    (said,) = variables(outputs["logits"])
    assert said.startswith("`outputs['logits']` in test_a_models_output_is_a_dictionary (")


def test_looking_for_variables_leaves_no_trace() -> None:
    """Before Python 3.13 a frame keeps a picture of its variables once somebody has asked for them."""
    logits = leaf() * 1
    dead = weakref.ref(logits)
    (said,) = variables(logits)
    assert said.startswith("`logits` in test_looking_for_variables_leaves_no_trace (")
    mine = locals()
    assert mine["logits"] is logits
    variables(logits)
    assert mine["logits"] is logits
    del logits
    mine.clear()
    assert dead() is None


# ---- where counting is at fault -----------------------------------------------------------------------------------


def test_no_clear_answer(fn: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is overwritten, and one note says so."""
    for path in (holders._generated, *holders._paths.values()):
        unclear = dict.fromkeys((False, True), "counts of an unreferenced tensor differ")
        monkeypatch.setattr(path, "_least", unclear)
    torch._dynamo.reset()
    again = compiled(log_probs, inner="aot_eager")
    before = overwritten()
    step(again)
    assert overwritten() == before
    (note,) = slime_compile.reports()[-1].graphs[0].notes
    assert note.startswith(
        "consume_logits='auto' overwrites nothing here: references to the logits cannot be counted"
    )


@pytest.mark.parametrize("names", range(8))
def test_a_shorter_way_to_the_operator(names: int) -> None:
    """Who calls without the frame that was there when counts were measured owns less than nobody's tensor had."""
    row_grad_over = torch.ops.slime_fused.row_grad_over.default
    for call in (row_grad_over, row_grad_over._op):
        x = leaf()
        logits = x * 1
        kept = [logits] * names
        out = Direct.apply(logits, call)
        del logits
        before = overwritten("direct")
        torch.autograd.grad(out, x)
        assert overwritten("direct") == before + (call is row_grad_over and not names)
        assert all(torch.equal(each, right()[0]) for each in kept)


@pytest.mark.parametrize(
    "hold",
    [lambda x: None, lambda x: x, lambda x: x.sin(), lambda x: x[:1], weakref.ref],
    ids=["nobody", "a_variable", "autograd", "another_view", "a_weak_reference"],
)
def test_a_view_is_saved(hold: Callable[[Tensor], Any]) -> None:
    """And owns what it is a view of, which somebody may have: from torch 2.15 on, in compiled functions too."""
    x = leaf()
    whole = x * 1
    kept, logits = hold(whole), whole.view(2, -1).view(ROWS, VOCAB)
    out = Direct.apply(logits, torch.ops.slime_fused.row_grad_over.default)
    del logits, whole
    before = overwritten("direct")
    torch.autograd.grad(out, x)
    assert overwritten("direct") == before + (kept is None)


@pytest.mark.parametrize("of_view", [False, True])
def test_counts_while_dynamo_evaluates_frames(of_view: bool) -> None:
    """With its evaluation installed, which is one for all threads, Python's own calls own other references."""
    before = holders._measured(holders._generated.call, of_view)
    assert isinstance(before, holders.Counts)
    installed = set_eval_frame(False)  # as for code that is not to be compiled
    try:
        assert holders._measured(holders._generated.call, of_view) == before
    finally:
        set_eval_frame(installed)


class Direct(torch.autograd.Function):
    """Calls the operator as generated code does, from one local name."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: Callable[..., Tensor]) -> Tensor:
        ctx.kept, ctx.call = [logits], call
        return logits.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        terms, affine = torch.zeros(ROWS, 1, 5), torch.ones(ROWS, 3)
        index, weight = torch.zeros(ROWS, 0, dtype=torch.int64), torch.zeros(ROWS, 0)
        call, x = ctx.call, ctx.kept.pop()
        made = call(x, terms, affine, index, weight, False, "anyone", "", place="direct")
        del x
        return made, None
