"""The doctor: what it finds here, and what it must find where something is broken."""

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from fx_passes.torch_private import Interface
from slime_compile import doctor as module
from slime_compile import ops, torch_private
from slime_compile.doctor import Finding


def found(check: Callable[[], object]) -> list[Finding]:
    return list(check())  # type: ignore[call-overload, no-any-return]


def failures(check: Callable[[], object]) -> str:
    return "\n".join(str(each) for each in found(check) if each.status == "FAIL")


def test_this_machine_is_ready() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slime_compile", "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nready\n")
    assert importlib.metadata.version("torch") in done.stdout
    for line in ("entry point", "C++ compiler", "cpu operators", "a loss"):
        assert f"ok   {line}" in done.stdout


def test_what_fails_is_in_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise ZeroDivisionError("the test's own")

    monkeypatch.setattr(module, "CHECKS", {"one": broken, "two": module._options})
    written: list[str] = []
    assert module.doctor(written.append) == 1
    assert written[0] == "FAIL one             ZeroDivisionError: the test's own"
    assert "options" in written[1], "the others are made all the same"
    assert written[-1].endswith("1 to fix")


@pytest.mark.skipif(torch.cuda.is_available(), reason="inductor needs it on the CPU alone")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch_private.cpp_builder, "get_cpp_compiler", none)
    assert "inductor needs one on the CPU" in failures(module._compiler)


def test_a_wrong_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*arguments: object) -> object:
        return torch.ops.slime_fused.row_grad.default(*arguments) * 2

    monkeypatch.setattr(ops, "row_grad", doubled)
    assert failures(lambda: module._operators("cpu")).count("largest relative error") == 3


def test_no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert "install the package" in failures(module._entry_point)


def test_torch_lacks_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Interface("torch:_no_such_name", "the test", "nothing")
    monkeypatch.setitem(torch_private.INTERFACES, "gone", gone)
    assert "torch:_no_such_name (the test; instead: nothing)" in failures(
        module._private_interfaces
    )


@pytest.mark.parametrize(
    ("package", "version", "text", "status"),
    [
        ("torch", "2.10.1", "must be at least 2.11", "FAIL"),
        ("torch", "2.11.0+cu130", "lose the gradient", "note"),
        ("torch", "2.99.0+cu130", "is newer than the tested versions", "note"),
        ("torch", "2.110.0", "is newer than the tested versions", "note"),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, text: str, status: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert [status] == [f.status for f in module._version(package) if text in f.detail]


def test_no_space_for_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    assert "1 MiB in " in failures(module._caches)
    assert "compiling needs 256 MiB" in failures(module._caches)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+slime_fused")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("SLIME_FUSED_MIN_VOCAB", "64")
    said = "\n".join(map(str, found(module._environment)))
    assert 'FAIL TORCH_LOGS      the log is called TORCH_LOGS="slime_compile"' in said
    assert "FAIL TORCHDYNAMO_DISABLE" in said
    assert "SLIME_FUSED_MIN_VOCAB=64" in said
    assert "min_vocab=64, by the environment" in str(found(module._options)[0])


def test_instructions_without_a_cache_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a/folder/of/its/own")
    assert not [each for each in found(module._environment) if each.what == "cpu capability"]
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (told,) = (each for each in found(module._environment) if each.what == "cpu capability")
    assert told.status == "note"
    assert "avx2" in told.detail
    assert "set TORCHINDUCTOR_CACHE_DIR" in told.detail
