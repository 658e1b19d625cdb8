"""How an integration knows the package that it changes; tests/trainers has the packages themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_compile.integrations import known as module
from slime_compile.integrations.known import known

Install = Callable[..., None]
ARGUMENTS = {"Loss.of": ["self", "logits"], "helper": ["labels"]}
HOME = """
class Loss:
    def of(self, logits): ...
def helper(labels): ...
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A trainer of a version, with one module of this text."""
    monkeypatch.syspath_prepend(tmp_path)
    module._tell.cache_clear()

    def installed(version: str, text: str = HOME) -> None:
        info = tmp_path / f"trainer-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: trainer\nVersion: {version}\n"
        )
        (tmp_path / "trainer_losses.py").write_text(text)
        importlib.invalidate_caches()

    yield installed
    sys.modules.pop("trainer_losses", None)


def asked(home: str = "trainer_losses", release: str | None = "1.2.") -> object:
    return known("trainer", release, home, ARGUMENTS, "Compile it yourself")


def test_what_it_was_written_for(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("1.2.7")
    assert asked() is sys.modules["trainer_losses"]
    assert not caplog.records


@pytest.mark.parametrize("home", ["trainer_losses", "a_module_that_moved"])
def test_another_release(install: Install, home: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the same functions, or without the module they were in; told once."""
    install("1.20.0")
    assert asked(home) is None
    assert asked(home) is None
    (told,) = caplog.messages
    assert told == (
        "trainer 1.20.0 is not known here: its version must be 1.2.*; nothing was changed. Compile it yourself"
    )
    assert "trainer_losses" not in sys.modules


@pytest.mark.parametrize("release", ["1.2.", None])
def test_other_functions(
    install: Install, release: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    install("1.2.7", "def helper(labels, logits): ...")
    assert asked(release=release) is None
    (told,) = caplog.messages
    assert told.startswith("trainer 1.2.7 is not" if release else "this trainer is not")
    assert "got {'Loss.of': [], 'helper': ['labels', 'logits']}; nothing was changed" in told


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(ImportError, match="trainer"):
        asked()
    with pytest.raises(ImportError, match="trainer_losses"):
        asked(release=None)
