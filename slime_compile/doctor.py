"""`python -m slime_compile doctor`: checks this machine. Include the text in a bug report.

Entry points: `doctor` prints and returns an exit status, `examine` yields the findings. Each check is a function
yielding findings; if it raises, that is a finding itself. Imports happen inside the checks, so that a broken
torch is a finding too. The operators are compared with their reference on small tensors, on the CPU and on CUDA.
"""

import dataclasses
import importlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from slime_compile.version import __version__

Status = Literal["ok", "note", "FAIL"]

OLDEST = (2, 11)
"""The oldest torch of pyproject.toml's."""

NEWEST = (2, 15)
"""The newest torch with a passed smoke set."""

INCOMPATIBLE: dict[tuple[str, tuple[int, ...]], str] = {
    (
        "torch",
        (2, 11),
    ): "its other backends (inductor too) lose the gradient of an autograd.Function that works "
    "in place, and crash if several threads compile at once",
    (
        "torch",
        (2, 12),
    ): "its backends (inductor too) may raise in a thread that runs compiled code while another compiles",
}
"""Releases with known faults that users of this backend meet."""

_ENVIRONMENT = ("SLIME_", "TORCH_LOGS", "TORCH_TRACE", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_")
_SWITCHED_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
_LEAST_FREE_MIB = 256
_ROWS, _VOCAB = 5, 2051  # no multiple of a vector, more than one tile


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: "FAIL" must be mended, "note" should be known."""

    status: Status
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.status:5}{self.what:16}{self.detail}"


def doctor(write: Callable[[str], None] = print) -> int:
    """Prints the findings; the exit status is 1 if something must be mended."""
    findings = []
    for finding in examine():
        findings.append(finding)
        write(str(finding))
    failed = sum(each.status == "FAIL" for each in findings)
    write(f"\n{failed} to fix" if failed else "\nready")
    return int(failed > 0)


def examine() -> Iterator[Finding]:
    """All findings, in the order for acting on them."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:  # any error is information for the user
            yield Finding("FAIL", name, f"{type(error).__name__}: {error}")


# ---- what is installed --------------------------------------------------------------------------------------------


def _environment() -> Iterator[Finding]:
    """Before torch is imported: the import might raise an error of its own."""
    if "slime_fused" in os.environ.get("TORCH_LOGS", ""):
        yield Finding("FAIL", "TORCH_LOGS", 'the log is called TORCH_LOGS="slime_compile"')
        os.environ.pop("TORCH_LOGS")
    for name in _SWITCHED_OFF:
        if os.environ.get(name, "0") not in ("", "0"):
            yield Finding("FAIL", name, f"is {os.environ[name]}: torch.compile does nothing")
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    if capability and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        told = "inductor's cache ignores a kernel's instruction set, and a kernel of another set may crash"
        remedy = "set TORCHINDUCTOR_CACHE_DIR to a folder of its own"
        yield Finding("note", "cpu capability", f"{capability}: {told}; {remedy}")
    shown = [n for n in sorted(os.environ) if n.startswith(_ENVIRONMENT)]
    for name in shown:
        yield Finding("note", "environment", f"{name}={os.environ[name]}")


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "slime_compile", f"{__version__} in {os.path.dirname(__file__)}")
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for package in ("torch", "triton", "megatron-core", "tabulate"):
        yield from _version(package)


def _version(package: str) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        yield Finding("FAIL" if package == "torch" else "note", package, "is not installed")
        return
    yield Finding("ok", package, version)
    numbers = tuple(map(int, version.split(".")[:2]))
    fault = INCOMPATIBLE.get((package, numbers))
    if fault:
        yield Finding("note", package, fault)
    if package == "torch":
        if numbers < OLDEST:
            yield Finding("FAIL", package, f"must be at least {'.'.join(map(str, OLDEST))}")
        elif numbers > NEWEST:
            newest = ".".join(map(str, NEWEST))
            yield Finding("note", package, f"is newer than the tested versions ({newest})")


def _entry_point() -> Iterator[Finding]:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="slime_fused")
    if not found:
        yield Finding(
            "FAIL",
            "entry point",
            'torch.compile does not know "slime_fused": install the package (`pip install .`), or pass '
            "slime_compile.backend.slime_fused as the backend",
        )
        return
    for each in found:
        function = each.load()
        yield Finding("ok", "entry point", f"{each.name} = {each.value} ({function.__name__})")


def _private_interfaces() -> Iterator[Finding]:
    from slime_compile import torch_private

    missing = torch_private.missing()
    for problem in missing:
        yield Finding("FAIL", "torch's own", f"this torch lacks {problem}")
    if not missing:
        yield Finding(
            "ok", "torch's own", f"all {len(torch_private.INTERFACES)} interfaces are there"
        )


def _options() -> Iterator[Finding]:
    from slime_compile.backend.options import Options

    chosen, plain = Options.parse(), Options()
    changed = [
        f.name
        for f in dataclasses.fields(chosen)
        if getattr(chosen, f.name) != getattr(plain, f.name)
    ]
    for name in changed:
        yield Finding("note", "options", f"{name}={getattr(chosen, name)!r}, by the environment")
    if not changed:
        yield Finding("ok", "options", "the defaults")


def _passes() -> Iterator[Finding]:
    from fx_passes.pipeline import NAMES
    from slime_compile.backend.options import Options

    off = Options.parse().left_out
    yield Finding("ok", "passes", ", ".join(name for name in NAMES if name not in off))
    if off:
        yield Finding("note", "passes", f"{', '.join(sorted(off))}: off, by the environment")


# ---- what compiles ------------------------------------------------------------------------------------------------


def _compiler() -> Iterator[Finding]:
    import torch

    from slime_compile.torch_private import cpp_builder

    try:
        yield Finding("ok", "C++ compiler", cpp_builder.get_cpp_compiler())
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        needed = not torch.cuda.is_available()
        found = f"none, inductor needs one on the CPU: {first}"
        yield Finding("FAIL" if needed else "note", "C++ compiler", found)


def _caches() -> Iterator[Finding]:
    from slime_compile.torch_private import cache_dir, functorch_config, inductor_config

    folder = cache_dir()
    writable = os.access(folder, os.W_OK)
    yield Finding(
        "ok" if writable else "FAIL", "cache", folder + ("" if writable else " is not writable")
    )
    for place in dict.fromkeys((folder, tempfile.gettempdir())):
        yield from _space(place)
    for name, config in (
        ("fx_graph_cache", inductor_config),
        ("enable_autograd_cache", functorch_config),
    ):
        if not getattr(config, name, True):
            yield Finding("note", "cache", f"{name} is off: each process compiles anew")
    if not functorch_config.donated_buffer:
        yield Finding(
            "note", "in place", "donated_buffer is off: gradients are not written over the logits"
        )


def _space(folder: str) -> Iterator[Finding]:
    """Without space, inductor fails with "No space left on device" in the middle of a compilation."""
    free = shutil.disk_usage(folder).free / 2**20
    status: Status = "ok" if free >= _LEAST_FREE_MIB else "FAIL"
    needed = "" if status == "ok" else f"; compiling needs {_LEAST_FREE_MIB} MiB"
    yield Finding(status, "free space", f"{free:,.0f} MiB in {folder}{needed}")


# ---- what computes ------------------------------------------------------------------------------------------------


def _cpu() -> Iterator[Finding]:
    from slime_compile.ops import native

    yield Finding("ok" if native.functions() else "note", "CPU operators", native.description())
    yield from _operators("cpu")


def _cuda() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("note", "CUDA", "torch finds no device")
        return
    for number in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
        yield Finding(
            "ok", "CUDA", f"{number}: {torch.cuda.get_device_name(number)}, sm {capability}"
        )
    if importlib.util.find_spec("triton") is None:
        yield Finding("note", "CUDA", "triton is not installed: the operators run in plain torch")
    yield from _operators("cuda")


def _operators(device: str) -> Iterator[Finding]:
    """Both operators against the reference in float64."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        error = max(_errors(device, dtype))
        short = str(dtype).removeprefix("torch.")
        # sums are in float32 whatever the dtype; a gradient is rounded to it once
        limit = 1e-5 + torch.finfo(dtype).eps
        status: Status = "ok" if error <= limit else "FAIL"
        text = f"{short}: largest relative error {error:.1e} (limit {limit:.1e})"
        yield Finding(status, f"{device} operators", text)


def _errors(device: str, dtype: Any) -> Iterator[float]:
    import torch

    from slime_compile.ops import reference, row_grad, row_grad_, row_stats

    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(_ROWS, _VOCAB, generator=draw)).to(dtype)
    logits[0, 7] = -torch.inf
    x, true = logits.to(device), logits.double()
    scale = torch.rand(_ROWS, 1, generator=draw) + 0.5
    stats = row_stats(x, scale.to(device), 1.25, "")
    exact = reference.row_stats(true, scale.double(), 1.25)
    for got, want in zip(stats[:3], exact[:3], strict=True):
        yield _error(got, want)
    peak, log_sum, *_ = exact
    ones = torch.ones(_ROWS, 1, dtype=torch.float64)
    rate = 1.25 * scale.double()
    terms = torch.stack([rate, peak, log_sum, -0.5 * ones, 0.25 * ones], -1)
    affine = torch.zeros(_ROWS, reference.AFFINE, dtype=torch.float64)
    index = torch.randint(_VOCAB, (_ROWS, 1), generator=draw)
    rest = terms, affine, index, ones
    want = reference.row_grad(true, *rest, False, torch.float64)
    given = [
        value.to(device) if value is index else value.to(device, torch.float32) for value in rest
    ]
    yield _error(row_grad(x, *given, False, dtype, ""), want)
    over = x.clone()
    row_grad_(over, *given, False, "")
    yield _error(over, want)


def _error(got: Any, want: Any) -> float:
    """Relative to the largest value."""
    return float((got.cpu().double() - want).abs().max() / want.abs().max())


def _whole_loss() -> Iterator[Finding]:
    """A loss through the backend, without code generation: fused, and with eager's gradient."""
    import torch

    from slime_compile.backend import slime_fused
    from slime_compile.dry_run.explain import explain

    def loss(logits: Any, target: Any) -> Any:
        log_probs = torch.log_softmax(logits, -1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return (log_probs.gather(-1, target[:, None])[:, 0] + entropy).sum()

    logits, target = torch.randn(_ROWS, _VOCAB, requires_grad=True), torch.arange(_ROWS)
    explain(loss)(logits, target).assert_fused(2)
    compiled = torch.compile(loss, backend=slime_fused, options={"inner": "aot_eager"})
    (got,) = torch.autograd.grad(compiled(logits, target), logits)
    (want,) = torch.autograd.grad(loss(logits, target), logits)
    error = _error(got, want.double())
    status: Status = "ok" if error < 1e-4 else "FAIL"
    yield Finding(status, "a loss", f"fused; its gradient differs from eager code's by {error:.1e}")


CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "environment": _environment,
    "versions": _versions,
    "entry point": _entry_point,
    "torch's own": _private_interfaces,
    "options": _options,
    "passes": _passes,
    "C++ compiler": _compiler,
    "caches": _caches,
    "CPU operators": _cpu,
    "CUDA": _cuda,
    "a loss": _whole_loss,
}
"""In this order; later ones need the earlier ones."""
