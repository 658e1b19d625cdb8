"""Tests over other people's packages: marked `trainers`, and their warnings are let be."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.checks import EXAMPLES

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.trainers)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports one of examples/ by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module
