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
from tests.cases.operators import CASES, ROW_CASES, Case, Making, programs
from tests.support.scratch import KINDS, Draw

EXAMPLES = 60  # graphs for each row, each with four draws of several rows
BOUNDED = settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate, Phase.shrink],
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
THOUSANDS = settings(BOUNDED, max_examples=25_000, derandomize=False)


def draws(seed: int) -> list[Draw]:
    """Plain data, and three other kinds in turn."""
    others = KINDS[1:]
    return [Draw("plain", seed), *(Draw(others[(seed + k) % len(others)], seed) for k in range(3))]


def check_case(target: Any, made: tuple[Making, int], seed: int, answers: Counter[str]) -> None:
    m, first = made
    assume(not m.failed)
    nodes = [n for n in list(m.s.graph.nodes)[first:] if n.op == "call_function"]
    returned = [n for n in nodes if isinstance(n.meta["val"], torch.Tensor)]
    roots = None if seed % 4 else [m.wides[0]]
    walked = m.s.walk(*returned, roots=roots)
    done = walked.check(draws(seed), nodes)
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
    check_row(target, case, BOUNDED)


@rows(ROW_CASES)
def test_polynomial_is_what_the_operator_computes(target: Any, case: Case) -> None:
    check_row(target, case, BOUNDED)


@pytest.mark.slow
@rows(CASES)
def test_rule_on_a_hundred_thousand_cases(target: Any, case: Case) -> None:
    check_row(target, case, THOUSANDS)


@pytest.mark.slow
@rows(ROW_CASES)
def test_polynomial_on_a_hundred_thousand_cases(target: Any, case: Case) -> None:
    check_row(target, case, THOUSANDS)
