"""Losses made up from the algebra, compared with eager: a few by `make test-thorough`, thousands by `make fuzz`."""

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from tests.support import fuzz

BOUNDED = settings(
    max_examples=30,  # 1 to 2 s each
    phases=[Phase.generate],  # shrinking takes minutes: `make fuzz` does it
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def check(program: fuzz.Program) -> None:
    note(fuzz.script(program))
    fuzz.check(program)


@pytest.mark.thorough
@BOUNDED
@given(fuzz.programs())
def test_losses(program: fuzz.Program) -> None:
    check(program)


@pytest.mark.slow
@settings(BOUNDED, max_examples=5000, derandomize=False, phases=tuple(Phase))
@given(fuzz.programs())
def test_thousands_of_losses(program: fuzz.Program) -> None:
    check(program)
