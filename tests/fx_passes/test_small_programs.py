"""The small programs of `tests/cases/programs.py`, judged as generated ones are."""

import pytest

from tests.cases import programs
from tests.support.program_judge import Judge


def _id(name: str) -> str:
    return name.replace(" ", "_")  # as `-k` can name it


@pytest.mark.parametrize("name", programs.RIGHT, ids=_id)
def test_right(name: str) -> None:
    program = programs.RIGHT[name]
    verdict = Judge().judge(program)
    assert verdict.kind == "equal", f"{verdict}\n{program.source}"


NAN = [name for name in programs.RIGHT if "NaN" in name]


@pytest.mark.parametrize(
    "name",
    [NAN[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in NAN[1:])],
    ids=_id,
)
def test_not_a_number_stays_under_inductor(name: str) -> None:
    program = programs.RIGHT[name]
    verdict = Judge(inner="inductor").judge(program)
    assert verdict.kind == "equal", f"{verdict}\n{program.source}"
