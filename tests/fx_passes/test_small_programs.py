"""The small programs of `tests/cases/programs.py`, judged as generated ones are."""

import pytest

from tests.cases import programs
from tests.support.program_judge import Judge
from tests.support.programs import Program


def _id(name: str) -> str:
    return name.replace(" ", "_")  # as `-k` can name it


@pytest.mark.parametrize("name", programs.RIGHT, ids=_id)
def test_right(name: str) -> None:
    _check(programs.RIGHT[name])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=reason), id=_id(name))
        for name, (reason, _) in programs.OPEN.items()
    ],
)
def test_open(name: str) -> None:
    _check(programs.OPEN[name][1])


def _check(program: Program) -> None:
    verdict = Judge().judge(program)
    assert verdict.kind == "equal", f"{verdict}\n{program.source}"
