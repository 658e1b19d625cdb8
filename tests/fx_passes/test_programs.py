"""Programs made up from plain torch, compiled and judged: some in every run, more by CI, thousands by `make fuzz`.

The counts that a run prints at its end are those of `program_judge.Counts`, by how the programs were compiled; a
failure prints its smallest program as a script.
"""

import importlib
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from fx_passes import pipeline, returned_logits, rules
from fx_passes.graph.returned import Returned
from tests.support import harness, ranks
from tests.support.changing_programs import changing
from tests.support.program_inputs import NAMES, Spec
from tests.support.program_judge import Counts, Judge, Verdict, runs_in_eager
from tests.support.program_memory import apart_from, sharing
from tests.support.program_parts import BESIDE, PARTS, TWINS
from tests.support.programs import (
    Program,
    _Drawing,
    draw_spec,
    generate,
    over_a_head,
    programs,
    returning_logits,
    script,
)
from tests.support.reduce import smallest

BATCHES, PER_BATCH = 16, 18  # 0.3 s each: batches that workers can share
QUICK = 12  # of the batches; the others are thorough
MANY = 1_000_000  # where the seeds of `make fuzz` start


INLINED = {"inner": "inductor", "inline_below": 1 << 18}

Record = Callable[[str, object], None]


def _run(
    start: int,
    count: int,
    record: Record,
    make: Callable[[int], Program] = generate,
    **how: Any,
) -> Counts:
    judge, counts = Judge(**how), Counts()
    for seed, program in programs(start, count, make):
        counts.add(seed, program, judge.judge(program))
    record("programs", counts.recorded(**how))
    return counts


def _assert_none(counts: Counts, **how: Any) -> None:
    """Reduce the first few failures; the message has a script for each."""
    if not counts.failures:
        return
    judge, told = Judge(**how), []
    for seed, program, verdict in counts.failures[:3]:
        least = smallest(program, _fails_like(judge, verdict))
        told.append(script(least, f"seed {seed}: {judge.judge(least).detail}", **how))
    seeds = [seed for seed, _, _ in counts.failures]
    pytest.fail("\n".join([f"{counts}; seeds {seeds}", *told]), pytrace=False)


def _fails_like(judge: Judge, verdict: Verdict) -> Any:
    return lambda program: judge.judge(program).kind == verdict.kind


@pytest.mark.parametrize(
    "batch",
    [
        *range(QUICK),
        *(pytest.param(batch, marks=pytest.mark.thorough) for batch in range(QUICK, BATCHES)),
    ],
)
def test_programs(batch: int, record_property: Record) -> None:
    counts = _run(batch * PER_BATCH, PER_BATCH, record_property)
    _assert_none(counts)
    assert counts.kinds["fused"] >= PER_BATCH // 4, f"{counts}: too few are ours to say anything"


@pytest.mark.thorough
def test_inlined_programs(record_property: Record) -> None:
    """Whose operators are inductor's as formulas."""
    counts = _run(0, PER_BATCH, record_property, **INLINED)
    _assert_none(counts, **INLINED)
    assert counts.kinds["fused"] >= PER_BATCH // 4, f"{counts}: too few are ours to say anything"


IN_FORWARD = {"chunk_rows": 1, "grad_in_forward": "always"}
IN_BACKWARD = {"chunk_rows": 2, "grad_in_forward": "never"}
LATE_IN_FORWARD = {"chunk_rows": 2, "grad_in_forward": "always", "late": True}
LATE_IN_BACKWARD = {"chunk_rows": 3, "grad_in_forward": "never", "late": True}
INDUCTOR = {"inner": "inductor", "late": False}
"""Of a chunk of one row nothing is compiled: these have more."""


@pytest.mark.parametrize(
    ("start", "count", "how"),
    [
        (0, 10, IN_FORWARD),
        (10, 10, IN_BACKWARD),
        (20, 10, LATE_IN_FORWARD),
        (30, 10, LATE_IN_BACKWARD),
        pytest.param(100, 30, IN_FORWARD | {"chunk_rows": 4}, marks=pytest.mark.thorough),
        pytest.param(200, 30, IN_BACKWARD | {"dynamic": True}, marks=pytest.mark.thorough),
        pytest.param(300, 60, LATE_IN_FORWARD | {"dynamic": True}, marks=pytest.mark.thorough),
        pytest.param(400, 60, LATE_IN_BACKWARD, marks=pytest.mark.thorough),
        pytest.param(500, 12, LATE_IN_FORWARD | INDUCTOR, marks=pytest.mark.thorough),
        pytest.param(520, 12, LATE_IN_BACKWARD | INDUCTOR, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_programs_over_heads(
    start: int, count: int, how: dict[str, Any], record_property: Record
) -> None:
    """Of logits that are never whole where nothing needs them whole."""
    _assert_none(_run(start, count, record_property, over_a_head, **how), **how)


@pytest.mark.parametrize(
    ("start", "count", "how"),
    [
        (0, 15, {}),
        pytest.param(100, 30, IN_FORWARD, marks=pytest.mark.thorough),
        pytest.param(200, 30, {"dynamic": True}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_programs_that_return_logits(
    start: int,
    count: int,
    how: dict[str, Any],
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose gradient is their own (`fx_passes/returned_logits.py`) in a part of them."""
    ways = 0

    def counted(gm: GraphModule, min_vocab: int) -> returned_logits.Returned:
        nonlocal ways
        returned = returned_logits.detach_returned(gm, min_vocab)
        ways += len(returned.ways)
        return returned

    monkeypatch.setattr(pipeline, "detach_returned", counted)
    _assert_none(_run(start, count, record_property, returning_logits, **how), **how)
    assert ways >= count // 4


@pytest.mark.parametrize(
    ("start", "count", "how"),
    [
        (0, 10, {}),
        pytest.param(100, 60, {}, marks=pytest.mark.thorough),
        pytest.param(200, 30, IN_BACKWARD, marks=pytest.mark.thorough),
        pytest.param(MANY, 10_000, {}, marks=pytest.mark.slow),
        pytest.param(2 * MANY, 500, {"dynamic": True}, marks=pytest.mark.slow),
        pytest.param(3 * MANY, 100, {"inner": "inductor"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_programs_that_change_memory(
    start: int, count: int, how: dict[str, Any], record_property: Record
) -> None:
    """Around heads, rows that are taken of their logits, and logits that are returned."""
    _assert_none(_run(start, count, record_property, changing, **how), **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "count", "how"),
    [
        (0, 500, {}),
        (1, 500, IN_BACKWARD),
        (2, 500, {"dynamic": True}),
        (3, 50, {"inner": "inductor"}),
    ],
    ids=str,
)
def test_thousands_of_programs_that_return_logits(
    batch: int, count: int, how: dict[str, Any], record_property: Record
) -> None:
    counts = _run(MANY + 1000 * batch, count, record_property, returning_logits, **how)
    _assert_none(counts, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "count", "how"),
    [
        (0, 1000, IN_FORWARD),
        (1, 1000, IN_BACKWARD),
        (2, 500, IN_FORWARD | {"chunk_rows": 2, "dynamic": True}),
        (3, 500, IN_BACKWARD | {"chunk_rows": 4, "dynamic": True}),
        (4, 50, LATE_IN_FORWARD | INDUCTOR),
        (5, 50, LATE_IN_BACKWARD | INDUCTOR),
        (6, 1000, LATE_IN_FORWARD),
        (7, 1000, LATE_IN_BACKWARD),
    ],
    ids=str,
)
def test_thousands_of_programs_over_heads(
    batch: int, count: int, how: dict[str, Any], record_property: Record
) -> None:
    counts = _run(MANY + 1000 * batch, count, record_property, over_a_head, **how)
    _assert_none(counts, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "count", "how"),
    [
        *((batch, 500, {}) for batch in range(20)),
        *((20 + batch, 50, {"inner": "inductor"}) for batch in range(6)),
        (26, 500, {"dynamic": True}),
        (27, 500, {"consume_logits": True}),
        (28, 500, {"save": "softmax"}),
        *((29 + batch, 50, INLINED) for batch in range(6)),
    ],
    ids=str,
)
def test_thousands_of_programs(
    batch: int, count: int, how: dict[str, Any], record_property: Record
) -> None:
    _assert_none(_run(MANY + 1000 * batch, count, record_property, **how), **how)


def _on_rank(rank: int, some: list[tuple[int, Program]]) -> list[Verdict]:
    judge = Judge(ranks=2, shard=rank)
    return [judge.judge(program) for _, program in some]


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(20))
def test_programs_over_two_ranks(batch: int, record_property: Record) -> None:
    """Each rank has its own logits; the ranks reduce values of the rows."""
    harness.world()
    some, seed = [], MANY + 100 * batch
    while len(some) < 5:
        program = generate(seed := seed + 1, collectives=True)
        if all(runs_in_eager(Judge(shard=shard), program) for shard in range(2)):
            some.append((seed, program))
    counts = Counts()
    for found in ranks.on_ranks(2, _on_rank, some):
        assert not isinstance(found, Exception), f"{[seed for seed, _ in some]}: {found}"
        for (seed, program), verdict in zip(some, found, strict=True):
            counts.add(seed, program, verdict)
    record_property("programs", counts.recorded(ranks=2))
    told = [
        f"{seed}: {verdict.detail}\n{p.spec}\n{p.source}" for seed, p, verdict in counts.failures
    ]
    assert not told, "\n".join(told)


def test_a_seed_is_a_program() -> None:
    assert generate(7) == generate(7)
    assert generate(7) != generate(8)


def test_every_text_can_be_drawn() -> None:
    """A text that never works on any tensors says nothing."""
    drawings = [
        _Drawing(random.Random(seed), draw_spec(random.Random(seed)), True) for seed in range(40)
    ]
    harness.world()
    for drawing in drawings:
        for _ in range(6):
            drawing.statement()
    texts = [
        (kind, text)
        for kind, families in (*PARTS.items(), *BESIDE.items())
        for family in families.values()
        for text in family
    ]
    texts += [("any", text) for twins in TWINS for text in twins]
    never = {
        text
        for kind, text in texts
        if not any(_works(drawing, kind, text) for drawing in drawings for _ in range(3))
    }
    assert not never


def _works(drawing: _Drawing, kind: str, text: str) -> bool:
    filled = drawing.filled(text)
    if filled is None:
        return False
    made = (
        filled.strip().replace("{out}", "made") if filled.startswith("\n") else f"made = {filled}"
    )
    return drawing.run(made, {} if kind == "w" else {"made": "r" if kind == "d" else kind})


PREDICTIONS = Program(("return (x.argmax(-1), (2 * x).argmax(-1), x.logsumexp(-1))",), Spec())
SHIFTED = Program(
    (
        "v0 = (x + state[:, None]).exp().sum(-1)",
        "with torch.no_grad():\n    state.zero_()",
        "return (v0,)",
    ),
    Spec(),
)

ROUNDED = Program(
    (
        "v0 = y.to(torch.bfloat16)",
        "v1 = F.kl_div(v0.log_softmax(-1), v0.log_softmax(-1), log_target=True, reduction='none')",
        "return (v1.sum(-1), x.logsumexp(-1))",
    ),
    Spec(dtype="float64", row_dtype="float64", grads=("leaf", "leaf")),
)


def test_what_comes_of_rounded_numbers_is_no_float64() -> None:
    """Eager code's errors do not tell: a KL of a distribution and itself has none."""
    eager = Judge().eager(ROUNDED.function(), ROUNDED)
    assert eager.coarse == {"outputs 0", "gradients 1"}
    assert max(each["gradients 1"] for each in eager.errors) == 0
    assert Judge().judge(ROUNDED).kind == "equal"


def test_results_of_one_memory_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Judge().judge(PREDICTIONS).kind == "equal"
    monkeypatch.setattr(Returned, "keep_apart", lambda *_: None)
    verdict = Judge().judge(PREDICTIONS)
    assert verdict.kind == "mismatch"
    assert "result 0 and result 1 have elements in common" in verdict.detail


def test_rows_that_backward_finds_changed_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Judge().judge(SHIFTED).kind == "equal"
    fuse = importlib.import_module("fx_passes.fuse")  # the package has the function by that name
    monkeypatch.setattr(fuse, "keep_out_of_backward", lambda _: None)
    verdict = Judge().judge(SHIFTED)
    assert verdict.kind == "mismatch"
    assert "gradients" in verdict.detail


def test_who_shares_memory_with_whom() -> None:
    base = torch.zeros(4, 3)
    eager = sharing([base[0], base[1], base[:2]], [base, torch.zeros(4, 3)])
    assert eager == [[2, 1, 2, 2, 0], [1, 2, 2, 2, 0], [2, 2, 2, 2, 0]]
    copied = sharing([base[0].clone(), base[1], base[:2]], [base, torch.zeros(4, 3)])
    assert set(apart_from(eager, copied, ("x", "y"))) == {
        ("result 0", "result 2", "less"),
        ("result 0", "x", "less"),
        ("result 2", "result 0", "less"),
    }


@pytest.mark.thorough
def test_a_fault_is_found_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that forgets a sign is found within some programs, and two operators are left of the program."""

    def forgets(w: object, node: Node, form: object) -> object:
        return form

    monkeypatch.setitem(rules.RULES, torch.ops.aten.neg.default, forgets)
    judge = Judge()
    for _, program in programs(0, 60):
        if "-(" not in program.source and "entropy" not in program.source:
            continue
        if judge.judge(program).kind == "mismatch":
            break
    else:
        pytest.fail("the fault was not found")
    least = smallest(program, lambda p: judge.judge(p).kind == "mismatch", seconds=200)
    assert len(least.statements) <= 2
    assert len(least.source) < len(program.source)
    assert set(re.findall(r"\b[a-z]+\b", least.source)) & set(NAMES)
