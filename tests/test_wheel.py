"""The wheel: what is in it, and that it works in an empty directory, installed without a network."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from slime_compile.version import __version__
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
SOURCES = ("slime_compile", "fx_passes", "tests", "bench", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside the sources."""
    copy, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(built), str(copy))
    (found,) = built.glob("*.whl")
    return found


def pip(command: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, "--no-deps", "--no-index", "--quiet", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"slime_compile", "fx_passes", f"slime_compile-{__version__}.dist-info"}
    packed = {Path(n) for n in names if n.split("/")[0] in ("slime_compile", "fx_passes")}
    here = {
        path.relative_to(ROOT)
        for package in ("slime_compile", "fx_passes")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".cpp") or path.name == "py.typed"
    }
    assert packed == here
    assert f"\nVersion: {__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "\nLicense-File: LICENSE\n" in text
    for extra in ("tables", "triton", "megatron", "bench", "test", "dev"):
        assert f"\nProvides-Extra: {extra}\n" in text


PROGRAM = """
import os, sys
os.chdir(sys.argv[1])
import torch
def loss(x, t):
    return torch.log_softmax(x, -1).gather(-1, t[:, None]).mean()
x, t = torch.randn(4, 1030, requires_grad=True), torch.randint(0, 1030, (4,))
torch.compile(loss, backend="slime_fused", options={"inner": "aot_eager"})(x, t).backward()
import slime_compile
print(slime_compile.__file__, slime_compile.summary().fused)
"""


@pytest.mark.thorough
def test_it_works_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip("install", "--target", str(site), str(wheel))
    said = run_python(
        PROGRAM, str(empty), PYTHONPATH=str(site), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)
    )
    assert said.split() == [str(site / "slime_compile/__init__.py"), "2"]
