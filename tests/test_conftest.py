"""What `conftest.py` sets for every test."""

import re
from pathlib import Path

from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent


def test_no_example_has_a_deadline() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_no_test_sets_one() -> None:
    """A limit of its own is one that a busy machine can exceed; `support/` hands its limits on."""
    own = re.compile(r"\bdeadline=(?!None)|\.run\([^()]*timeout=|communicate\(timeout")
    files = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    assert not [path.name for path in files if own.search(path.read_text())]
