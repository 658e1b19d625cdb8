"""`native.py`: builds once per machine, only loads after that, and never stands in the way. Needs no accelerator."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_compile import ops
from slime_compile.ops import native, reference

# both operators against the reference, in float32 over rows of 3 segments, and which code did it
PROGRAM = """
import torch
from slime_compile import ops
from slime_compile.ops import native, reference

x = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0))
stats = ops.row_stats(x, None, 1.0, "")
for got, expected in zip(stats, reference.row_stats(x.double(), None, 1.0), strict=True):
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-6)
terms = torch.stack([torch.ones(3, 1), stats[0], stats[1], torch.ones(3, 1), torch.ones(3, 1)], -1)
rest = terms, torch.zeros(3, 3), torch.tensor([[0], [1], [70_000]]), torch.ones(3, 1), False, x.dtype
torch.testing.assert_close(ops.row_grad(x, *rest, ""), reference.row_grad(x, *rest))
print(native.description())
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """As in a process that has not used the operators yet, before and after."""
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


@pytest.fixture
def compiler() -> None:
    if native.functions() is None:
        pytest.skip(native.description())
    native._loaded.cache_clear()


def _start(cache: Path, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: "subprocess.Popen[str]") -> str:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out.strip()


@pytest.mark.thorough
def test_processes_that_start_together_build_once(compiler: None, tmp_path: Path) -> None:
    processes = [_start(tmp_path) for _ in range(3)]
    (said,) = {_finish(process) for process in processes}
    assert said.startswith(f"C++ for {torch.backends.cpu.get_cpu_capability()}: {tmp_path}")
    folder = tmp_path / "slime_compile"
    built = list(folder.glob("*.so"))
    assert len(built) == 1
    assert {path.suffix for path in folder.iterdir()} <= {".so", ".lock"}  # no half-built files
    written = built[0].stat().st_mtime_ns
    assert _finish(_start(tmp_path)) == said
    assert built[0].stat().st_mtime_ns == written


def test_a_later_process_builds_nothing(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.functions() is not None
    native._loaded.cache_clear()

    def fail(*arguments: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(native, "_build_once", fail)
    assert native.functions() is not None


@pytest.mark.thorough
@pytest.mark.skipif(
    not torch.cpu._is_avx2_supported(), reason="these names of instructions are of x86"
)
@pytest.mark.parametrize(("capability", "said"), [("default", "torch calls: no"), ("avx2", "C++")])
def test_obeys_aten_cpu_capability(
    compiler: None, tmp_path: Path, capability: str, said: str
) -> None:
    found = _finish(_start(tmp_path, ATEN_CPU_CAPABILITY=capability))
    assert found.startswith(said)
    assert capability.upper() in found


def test_without_a_compiler_torch_calls_take_over_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*arguments: Any) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_build", missing)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    x = torch.randn(3, 129)
    with caplog.at_level(logging.WARNING, logger=native.__name__):
        for _ in range(2):
            results = ops.row_stats(x, None, 1.0, "")
    for result, expected in zip(results, reference.row_stats(x, None, 1.0), strict=True):
        torch.testing.assert_close(result, expected)
    (record,) = caplog.records
    assert "No working C++ compiler found" in record.getMessage()
    assert native.description().startswith("torch calls: cpu_kernels.cpp could not be built")


def test_a_file_that_cannot_be_loaded_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    path = native._path("AVX2")
    path.parent.mkdir()
    path.write_bytes(b"")
    assert native.functions() is None
    assert str(path) in native.description()


def test_the_name_changes_with_source_torch_and_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {native._path("AVX2"), native._path("AVX512")}
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(native._path("AVX2"))
    monkeypatch.setattr(native, "SOURCE", tmp_path / "other.cpp")
    native.SOURCE.write_text("")
    names.add(native._path("AVX2"))
    assert len(names) == 4
