"""What the tests of several trainers ask alike: of the runs of an example, and of an integration's two functions."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_compile.integrations import known

EXAMPLES = Path(__file__).parents[2] / "examples"
Names = Callable[[], list[Any]]
"""What an integration puts functions in the place of, as it is now."""


def check_runs(
    runs: Mapping[str, Any],
    steps: int,
    bounds: Mapping[str, float],
    logits_bytes: int,
    **near: float,
) -> None:
    """The losses are those of the trainer `near` enough (as `pytest.approx`), peaks are below `bounds` N."""
    plain = runs["as it is"]
    assert len(plain.losses) == steps
    for way, bound in bounds.items():
        assert runs[way].losses == pytest.approx(plain.losses, **near), way
        assert runs[way].peak_bytes < bound * logits_bytes, way


def on_one_of_the_ranks(rank: int, name: str, steps: int) -> Any:
    """An example's runs, and what the graphs of each became: reports stay in their process."""
    sys.path.insert(0, str(EXAMPLES))
    runs = importlib.import_module(name).main(["--steps", str(steps)])
    told = {way: [r.to_dict() for r in run.reports if r.fused] for way, run in runs.items()}
    for run in runs.values():
        run.reports = []
    return runs, told


def check_on_and_off(integration: Any, names: Names) -> None:
    before = names()
    assert integration.enable()
    ours = names()
    assert integration.enable()
    assert names() == ours
    assert not any(mine is other for mine, other in zip(ours, before, strict=True))
    integration.disable()
    assert names() == before


def check_not_known(integration: Any, names: Names, caplog: pytest.LogCaptureFixture) -> None:
    """Of a package that is another one by now."""
    known._tell.cache_clear()
    before = names()
    assert not integration.enable()
    assert names() == before
    assert "is not known here" in caplog.text
    assert "nothing was changed" in caplog.text


def check_another_release(
    integration: Any,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whose functions are the same."""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "99.0.0")
    check_not_known(integration, names, caplog)
    assert " 99.0.0 is not known here" in caplog.text
