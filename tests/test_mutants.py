"""The list of mutants fits the source: each can be applied, and what comes out can be compiled."""

from pathlib import Path

import pytest

import fx_passes
from tests.mutants import MUTANTS, Mutant

PACKAGE = Path(fx_passes.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    changed = mutant.applied(text)
    assert changed != text
    compile(changed, mutant.file, "exec")


def test_there_are_many_and_each_has_a_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


def test_a_text_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must stand once in fuse\.py, stands 0 times"):
        Mutant("none", "fuse.py", "test_spellings.py", "no such text", "").applied("another")
