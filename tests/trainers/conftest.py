"""Tests over other people's packages: marked `trainers`, and their warnings are let be."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.trainers)
            item.add_marker(pytest.mark.filterwarnings("default"))
