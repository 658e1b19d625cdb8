"""Every row of the rule tables: what the rule says is what the operator computes, or it refuses.

Each case applies the operator to operands made by the others, walks over the graph and compares (`support/scratch.py`)
on adversarial data. No compile, so thousands of cases take seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from fx_passes.rules import ROW_SCALARS, RULES
from tests.cases.operators import CASES, RECIPES, ROW_CASES, Case, Making, programs
from tests.support.dense import Values
from tests.support.scratch import KINDS, Draw, Impossible, make

aten = torch.ops.aten

EXAMPLES = 45  # graphs for each row, each with eight kinds of data, each of some rows of logits
BOUNDED = settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate, Phase.shrink],
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
THOUSANDS = settings(BOUNDED, max_examples=3_200, derandomize=False)  # 10^5 rows of logits


def check_case(target: Any, made: tuple[Making, int], seed: int, answers: Counter[str]) -> None:
    m, first = made
    assume(not m.failed)
    nodes = [n for n in list(m.s.graph.nodes)[first:] if n.op == "call_function"]
    returned = [n for n in nodes if isinstance(n.meta["val"], torch.Tensor)]
    roots = None if seed % 4 else [m.wides[0]]
    walked = m.s.walk(*returned, roots=roots)
    done = walked.check([Draw(kind, seed) for kind in KINDS], nodes)
    for node in nodes:
        if node.target is target:
            answers["polynomial" if walked.reads(node) else walked.answer(node)] += done


def check_row(target: Any, case: Case, bounds: Any) -> Counter[str]:
    answers: Counter[str] = Counter()

    @bounds
    @given(programs(case), st.integers(0, 10_000))
    def run(made: tuple[Making, int], seed: int) -> None:
        check_case(target, made, seed, answers)

    run()
    return answers


def rows(cases: dict[Any, Case]) -> Callable[[Any], Any]:
    named = [pytest.param(target, case, id=f"{target}") for target, case in cases.items()]
    return pytest.mark.parametrize(("target", "case"), named)


def test_every_row_has_a_case() -> None:
    assert set(CASES) == set(RULES)
    assert set(ROW_CASES) == set(ROW_SCALARS)


@rows(CASES)
def test_rule_says_what_the_operator_computes(target: Any, case: Case) -> None:
    answers = check_row(target, case, BOUNDED)
    assert answers.keys() - {"none", "refused"}, f"nothing is ever said of {target}: {answers}"


@rows(ROW_CASES)
def test_polynomial_is_what_the_operator_computes(target: Any, case: Case) -> None:
    assert check_row(target, case, BOUNDED)["polynomial"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize("used", [aten.gather.default, aten.sum.dim_IntList, aten.exp.default])
def test_a_row_with_nan_is_nan(recipe: Case, used: Any) -> None:
    """Beside what a rule may mend, a loss that eager code makes NaN is NaN here too."""

    @settings(BOUNDED, max_examples=20)
    @given(programs(recipe, before=0), st.integers(0, 100))
    def run(made: tuple[Making, int], seed: int) -> None:
        m, _ = made
        assume(not m.failed)
        # a one-hot does not look at the other columns
        assume(not any(node.target is aten.eq.Tensor for node in m.s.graph.nodes))
        x = m.wides[-1]
        args = {
            aten.gather.default: (-1, m.s.input("hits", (*m.lead, 1), torch.int64)),
            aten.sum.dim_IntList: ([-1],),
            aten.exp.default: (),
        }
        try:
            value = m.s.call(used, x, *args[used])
        except Impossible:
            assume(False)
        walked = m.s.walk(value)
        new = walked.walk.account.replacements.get(value)
        if new is None:
            return
        found, clean = (
            Values(
                {n: make(each, draw, torch.float64) for n, each in m.s.inputs.items()},
                torch.float64,
            )
            for draw in (Draw("poisoned", seed), Draw("poisoned", seed, instead=3.0))
        )
        spoilt = found[value].isnan() & clean[value].isfinite()
        assert found[new][spoilt].isnan().all(), m.s.script()

    run()


@pytest.mark.slow
@rows(CASES)
def test_rule_on_a_hundred_thousand_cases(target: Any, case: Case) -> None:
    check_row(target, case, THOUSANDS)


@pytest.mark.slow
@rows(ROW_CASES)
def test_polynomial_on_a_hundred_thousand_cases(target: Any, case: Case) -> None:
    check_row(target, case, THOUSANDS)
