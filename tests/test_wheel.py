"""The sdist and its wheel: their contents, and an installation without a network, in an empty environment."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from slime_compile.version import __version__
from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
SOURCES = (
    "slime_compile", "fx_passes", "tests", "bench", "docs", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE",
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "constraints.txt", "Makefile",
)  # fmt: skip
IGNORED = shutil.ignore_patterns("__pycache__", "build", "*.so")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside the sources."""
    copy, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("sdist")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=IGNORED)
        else:
            shutil.copy(source, copy / name)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(built)!r})"
    run(sys.executable, "-c", build, cwd=copy)
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer without a wheel does."""
    built = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(built), str(sdist))
    (found,) = built.glob("*.whl")
    return found


def pip(command: str, *arguments: str, python: str = sys.executable) -> None:
    run(python, "-m", "pip", command, "--no-deps", "--no-index", "--quiet", *arguments)


def run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr


def test_what_is_in_the_sdist(sdist: Path) -> None:
    top = f"slime_compile-{__version__}"
    assert sdist.name == f"{top}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    documents = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in SOURCES if "." in name} | documents <= names
    assert not any(name.startswith("tests/") or "__pycache__" in name for name in names)


def test_the_release_is_told_alike() -> None:
    """Version and day, in the change log and for citations; the licence, in the file and in the metadata."""
    (day,) = re.findall(
        rf"^## \[{re.escape(__version__)}\] - (\d{{4}}-\d\d-\d\d)$",
        (ROOT / "CHANGELOG.md").read_text(), re.M,
    )  # fmt: skip
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\ndate-released: {day}\nlicense: Apache-2.0\n" in citation
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "Version 2.0" in licence


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


@pytest.mark.thorough
def test_it_installs_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Without torch: the version is told, and the doctor says what is missing."""
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv/bin/python")
    pip("install", str(wheel), python=python)
    told = [
        subprocess.run(
            [python, "-I", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for command in (
            ["-c", "import slime_compile; print(slime_compile.__version__)"],
            ["-m", "slime_compile", "--version"],
            ["-m", "slime_compile", "doctor"],
        )
    ]
    imported, version, doctor = told
    assert imported.stdout == f"{__version__}\n", imported.stderr
    assert version.stdout == f"slime_compile {__version__}\n", version.stderr
    assert doctor.returncode == 1
    assert re.search(r"^FAIL *torch *is not installed$", doctor.stdout, re.M), doctor
