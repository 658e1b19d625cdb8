"""The smoke set names tests that there are: pytest runs none of a set with a name that it does not find."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
NAMES = (TESTS / "smoke.txt").read_text().splitlines()


def _collected(*arguments: str) -> "subprocess.CompletedProcess[str]":
    collect = ("-o", "addopts=", "--collect-only", "--quiet", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *collect, *arguments]
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)


def test_each_name_is_a_test_s() -> None:
    collected = _collected(*NAMES)
    assert collected.returncode == 0, collected.stdout + collected.stderr


def test_a_name_that_is_no_test_s_is_an_error() -> None:
    collected = _collected(f"{NAMES[0]}::no_such_test")
    assert collected.returncode != 0
    assert "not found" in collected.stdout + collected.stderr
