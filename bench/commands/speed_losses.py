"""The part of `python -m bench speed` about plain losses: slime_fused beside inductor, and beside a copy of the logits.

Entry points: `cells` and `tables`. One cell is a dtype, on the CPU also a number of threads and torch's vector
instructions; all losses and both ways run in turn in one process. The limit is explained in speed.py. Logits of up to
a million elements, on the CPU, have cells of their own: there microseconds count, not bytes.
"""

import ctypes
import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from bench.cases.losses import Case, Problem
from bench.cases.row_losses import LOSSES
from bench.measure import measure
from bench.measure.cells import Cells, Store
from bench.measure.measure import WAYS, clock_of
from bench.measure.turns import COPIES, Run, computed, copy_of, in_turn

COMPARED = ("inductor", "slime_fused")


_SMALL = [(4, 4_000), (64, 4_000), (250, 4_000)]  # rows, vocabulary


@dataclass(frozen=True)
class Setting:
    """The subject of a cell; threads and instructions on a CPU only."""

    case: Case
    threads: int | None = None
    instructions: str | None = None

    @property
    def small(self) -> bool:
        return (self.case.rows, self.case.vocab) in _SMALL

    @property
    def name(self) -> str:
        where = [f"{self.threads} threads", str(self.instructions)] if self.threads else []
        case = self.case
        return ", ".join(
            ["losses", case.dtype, f"N = {case.rows}", f"V = {case.vocab}", *where]
        ).replace("1 threads", "1 thread")


def _settings(rows: int, vocab: int, device: str) -> list[Setting]:
    cases = [Case("given", "plain", d, rows, vocab, device=device) for d in ("float32", "bfloat16")]
    if device != "cpu":
        return [Setting(case) for case in cases]
    wider = torch.cpu._is_avx512_supported()
    instructions = ["avx2", "avx512"] if wider else ["avx2"]
    threads = sorted({1, min(2, torch.get_num_threads())})
    small = [Case("given", "plain", "float32", *size, device=device) for size in _SMALL]
    return [
        *(Setting(c, t, i) for i in instructions for t in threads for c in cases),
        *(Setting(c, t, instructions[-1]) for t in threads for c in small),
    ]


def cells(rows: int, vocab: int, device: str, seconds: float) -> Cells:
    return {
        setting.name: functools.partial(_cell, setting, seconds)
        for setting in _settings(rows, vocab, device)
    }


def _cell(setting: Setting, seconds: float) -> dict[str, Any]:
    return {
        **dataclasses.asdict(setting),
        "times_ms": measure.in_fresh_process(times, setting, seconds),
        "logits_bytes": setting.case.logits_bytes,
    }


# ---- in the fresh process -----------------------------------------------------------------------------------------


def times(setting: Setting, seconds: float) -> dict[str, list[float]]:
    """Median milliseconds of forward and backward of "loss: way", and of a copy of the logits."""
    if setting.threads:
        os.environ["ATEN_CPU_CAPABILITY"] = str(setting.instructions)
        # Inductor's cache does not ask for which instructions a kernel was written: one of another cell's crashes.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{default_cache_dir()}_{setting.instructions}"
        torch.set_num_threads(setting.threads)
        used = torch.backends.cpu.get_cpu_capability().lower()
        if used != setting.instructions:
            raise RuntimeError(f"torch uses {used} where {setting.instructions} was asked for")
    if setting.small:
        _keep_freed_memory()
    problem = Problem(setting.case, with_truth=False)
    copies = [[value.clone() for value in problem.wide] for _ in range(COPIES)]
    clock = clock_of(setting.case.device)
    runs = {
        f"{name}: {way}": _run(loss, way, problem, copies, clock)
        for name, loss in LOSSES.items()
        for way in COMPARED
    }
    every = {**runs, "copy": copy_of(copies, clock)}
    return in_turn(every, seconds * len(LOSSES), short=setting.small)


def _keep_freed_memory() -> None:
    """glibc gives a few MB back to the system at every other step: page faults at the next allocation."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(parameter, 1 << 30)


def _run(
    loss: Callable[..., Tensor],
    way: str,
    problem: Problem,
    copies: list[list[Tensor]],
    clock: Callable[[], float],
) -> Run:
    how = WAYS[way]
    assert how is not None
    function = torch.compile(loss, dynamic=False, **how)
    grad = torch.ones([problem.case.rows], device=problem.case.device)

    def run(number: int) -> tuple[float, float]:
        logits = computed(copies[number % COPIES][0].detach().requires_grad_())
        start = clock()
        output = function(logits, *problem.rows)
        middle = clock()
        output.backward(grad if output.dim() else None)
        return middle - start, clock() - middle

    return run


# ---- table --------------------------------------------------------------------------------------------------------


def tables(
    store: Store, rows: int, vocab: int, device: str
) -> list[tuple[str, list[str], list[list[str]]]]:
    """One table for each finished cell."""
    settings = [s for s in _settings(rows, vocab, device) if s.name in store.cells]
    return [
        (_small_table if setting.small else _table)(setting.name, store.cells[setting.name])
        for setting in settings
    ]


def _table(name: str, found: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    headers = ["", "inductor ms", "slime_fused ms", "of inductor's"]
    headers += ["forward ms", "of the limit", "backward ms", "of the limit"]
    if "error" in found:
        return name, headers, [[found["error"]]]
    times_ms = found["times_ms"]
    copy, rows = times_ms["copy"][0], []
    for loss in LOSSES:
        theirs, (forward, backward) = (
            sum(times_ms[f"{loss}: inductor"]),
            times_ms[f"{loss}: slime_fused"],
        )
        ours = forward + backward
        ours_ms = [f"{forward:.1f}", f"{copy / 2 / forward:.0%}", f"{backward:.1f}"]
        both_ms = [f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"]
        rows.append([loss, *both_ms, *ours_ms, f"{copy / backward:.0%}"])
    speed = 2e-6 * found["logits_bytes"] / copy
    rows.append([f"copy: {copy:.1f} ms, {speed:.1f} GB/s"])
    return name, headers, rows


def _small_table(name: str, found: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    headers = ["", "inductor us", "slime_fused us", "difference us"]
    if "error" in found:
        return name, headers, [[found["error"]]]
    rows = []
    for loss in LOSSES:
        theirs, ours = (1e3 * sum(found["times_ms"][f"{loss}: {way}"]) for way in COMPARED)
        rows.append([loss, f"{theirs:.0f}", f"{ours:.0f}", f"{ours - theirs:+.0f}"])
    return name, headers, rows
