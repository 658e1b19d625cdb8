"""Builds `cpu_kernels.cpp` once per machine and loads it: `functions`, `description`.

The shared object is in inductor's cache directory. Its name has a hash of the source, torch's version and torch's
vector instructions in this process (ATEN_CPU_CAPABILITY is obeyed). Every process but the first finds it there
and only loads it. It is built under a lock by torch's own builder, about three seconds, and then put in its place:
processes starting together build once, and an interrupted build leaves nothing to load.

Without a compiler, or without vector instructions, `functions` is None and `cpu.py` uses plain torch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "Functions", "description", "functions"]

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""`Type` of cpu_kernels.cpp."""

# Possible errors of torch's private builder, the compiler and the loader. Plain torch computes the same in any case, so
# the builder is not in `torch_private`, whose interfaces are indispensable for this package.
_FAILURES = (ImportError, AttributeError, TypeError, RuntimeError, OSError)
_LOCK_SECONDS = 600

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Functions:
    """The two functions of cpu_kernels.cpp, which release the interpreter's lock."""

    row_stats: Any
    row_grad: Any


def functions() -> Functions | None:
    """The loaded functions, built first if needed; None if that is impossible."""
    return _loaded()[0]


def description() -> str:
    """One line for people: the code of the operators on the CPU, and the reason."""
    return _loaded()[1]


def has_vectors() -> bool:
    """Whether torch, and so inductor, uses vector instructions."""
    plain = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX")
    return not (plain and platform.machine() in ("x86_64", "AMD64"))


@cache
def _loaded() -> tuple[Functions | None, str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if not has_vectors():
        return None, f"torch calls: no vector instructions (torch's CPU capability is {capability})"
    try:
        path = _path(capability)
        if not path.exists():
            _build_once(path, capability)
        return _load(path), f"C++ for {capability}: {path}"
    except _FAILURES as error:
        reason = f"torch calls: cpu_kernels.cpp could not be built or loaded: {error}"
        _log.warning("%s (the losses are the same, and slower)", reason)
        return None, reason


def _path(capability: str) -> Path:
    from slime_compile.torch_private import cache_dir

    identity = (SOURCE.read_text(), torch.__version__, capability, platform.machine())
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    return Path(cache_dir()) / "slime_compile" / f"cpu_kernels_{key}.so"


def _build_once(path: Path, capability: str) -> None:
    from slime_compile.torch_private import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
        if not path.exists():
            _build(path, capability)


def _build(path: Path, capability: str) -> None:
    from slime_compile.torch_private import cpp_builder, cpu_vec_isa

    known = {"AVX2": cpu_vec_isa.VecAVX2, "AVX512": cpu_vec_isa.VecAVX512}
    flags: tuple[str, ...] = ()
    if capability in known:
        isa = known[capability]()
        # other machines may share the directory: of this one's instructions, only those of the name
        flags = ("-march=x86-64",)
    else:
        isa = cpu_vec_isa.pick_vec_isa()
    options = cpp_builder.CppTorchOptions(vec_isa=isa, warning_all=False, extra_flags=flags)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        builder = cpp_builder.CppBuilder(path.stem, str(SOURCE), options, output_dir=folder)
        builder.build()
        os.replace(builder.get_target_file_path(), path)


def _load(path: Path) -> Functions:
    library = ctypes.CDLL(str(path))
    address, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    stats, grad = library.slime_row_stats, library.slime_row_grad
    stats.argtypes = [
        address,
        number,
        number,
        address,
        address,
        real,
        *[address] * 4,
        number,
        number,
    ]
    grad.argtypes = [
        address, number, address, number, number, address,
        address, number, address, address, address, number, number,
    ]  # fmt: skip
    stats.restype = grad.restype = None
    return Functions(stats, grad)


def layout(*tensors: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """The sizes of the first of them, then everyone's strides."""
    numbers = [*tensors[0].shape]
    for tensor in tensors:
        numbers += tensor.stride()
    return (ctypes.c_int64 * len(numbers))(*numbers)
