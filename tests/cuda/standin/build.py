"""Builds the library in place of CUDA's runtime and driver: `library`, for the torch of this interpreter.

Needs g++, binutils and the headers of torch's CUDA wheels. The library lies in `build/`, under a name made of the
sources and torch's version. What torch, NVSHMEM or Triton ask for and `driver/` lacks says "not supported".
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "driver").iterdir())
TOOLS = ("g++", "nm", "strings")
OF_TORCH = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc")
NOT_SUPPORTED = 801
_DRIVER_NAME = re.compile(r"^cu[A-Z][A-Za-z0-9]+(_v2)?$", re.MULTILINE)
_LINKED_NAME = re.compile(
    r"\b((?:__)?(?:cuda|cu)[A-Z][A-Za-z0-9_]+)(?:@\S*libcudart\S*)?$", re.MULTILINE
)


class NotHere(Exception):
    """Why there can be no stand-in on this machine."""


def library() -> Path:
    """The library, built first where it is not there.

    Raises:
        NotHere: a tool or torch's CUDA build is missing.
    """
    site = _site_packages()
    key = hashlib.sha256(b"".join(path.read_bytes() for path in [*SOURCES, Path(__file__)]))
    name = f"{importlib.metadata.version('torch')}-{key.hexdigest()[:12]}"
    folder = HERE / "build" / name
    if not folder.exists():
        _build(site, folder)
    return folder / "libcuda.so.1"


def _site_packages() -> Path:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NotHere(f"{' and '.join(missing)} must be installed, to build the stand-in")
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise NotHere("torch must be installed")
    site = Path(found.origin).parents[1]
    for needed in (site / "torch/lib/libtorch_cuda.so", *_includes(site)):
        if not needed.exists():
            raise NotHere(f"torch must be a build for CUDA 13, with Triton: {needed} is missing")
    return site


def headers() -> list[Path]:
    """Folders with CUDA's headers."""
    return _includes(_site_packages())


def _includes(site: Path) -> list[Path]:
    return [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]


def _build(site: Path, folder: Path) -> None:
    """In a folder beside, and then put in its place: an interrupted build leaves nothing that could be loaded."""
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        into = Path(made) / "library"
        into.mkdir()
        objects = [_compiled(source, into, site) for source in SOURCES if source.suffix == ".cpp"]
        have = set(re.findall(r" T (\S+)$", _run("nm", "--defined-only", *objects), re.MULTILINE))
        rest = into / "rest.cpp"
        rest.write_text(_not_supported(sorted(_wanted(site) - have)))
        objects.append(_compiled(rest, into, site))
        shared = into / "libcuda.so.1"
        _run(
            "g++",
            "-shared",
            "-o",
            shared,
            *objects,
            "-Wl,-soname,libcuda.so.1",
            "-ldl",
            "-lpthread",
        )
        (into / "libcuda.so").symlink_to(shared.name)
        for each in [*objects, rest]:
            each.unlink()
        try:
            os.rename(into, folder)
        except OSError:
            if not folder.exists():  # another process was as fast
                raise


def _compiled(source: Path, into: Path, site: Path) -> Path:
    made = into / f"{source.stem}.o"
    headers = [f"-I{path}" for path in _includes(site)]
    _run("g++", "-O1", "-fPIC", "-std=c++17", *headers, "-c", source, "-o", made)
    return made


def _wanted(site: Path) -> set[str]:
    """Names of the runtime and the driver that torch and Triton look for."""
    found: set[str] = set()
    libraries = [site / f"torch/lib/lib{name}.so" for name in OF_TORCH]
    for path in [*libraries, site / "nvidia/nvshmem/lib/libnvshmem_host.so.3"]:
        if path.exists():
            found |= set(_LINKED_NAME.findall(_run("nm", "-D", "--undefined-only", path)))
    by_name = _run("strings", "-a", site / "torch/lib/libc10_cuda.so")
    found |= {match[0] for match in _DRIVER_NAME.finditer(by_name)}
    driver = (site / "triton/backends/nvidia/driver.c").read_text()
    found |= set(re.findall(r"\b(cu[A-Z][A-Za-z0-9]+)\(", driver))
    return {name for name in found if not name.startswith("cuFile")}


def _not_supported(names: list[str]) -> str:
    lines = [
        f'long {name}() {{ standin_missing("{name}"); return {NOT_SUPPORTED}; }}' for name in names
    ]
    return "\n".join(['extern "C" {', "void standin_missing(const char*);", *lines, "}", ""])


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[:2000]}")
    return done.stdout
