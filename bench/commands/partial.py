"""`python -m bench partial`: losses that are fused in part, beside inductor: never a higher peak, never slower.

Entry point: `main`. Peak memory in a process per cell; time of both ways in turn in one process.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cases.partial import PROGRAMS, inputs_of
from bench.measure import measure
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import WAYS
from bench.measure.turns import Run, computed, in_turn

COMPARED = ("inductor", "slime_fused")
DTYPES = (torch.float32, torch.bfloat16)
ROWS, VOCAB = 512, 32_000


def main(options: argparse.Namespace) -> None:
    store = Store(options.out, "partial", resume=options.resume)
    cells: Cells = {}
    for name in PROGRAMS:
        for dtype in DTYPES:
            for way in COMPARED:
                cells[_cell("peak", name, dtype, way)] = functools.partial(_peak, name, dtype, way)
    run_cells(store, cells, jobs=options.jobs)
    times: Cells = {
        _cell("time", name, dtype): functools.partial(_times, name, dtype, options.seconds)
        for name in PROGRAMS
        for dtype in DTYPES
    }
    run_cells(store, times)  # alone: the machine is theirs
    write_table(store, [_table(store, dtype) for dtype in DTYPES])


def _cell(what: str, name: str, dtype: torch.dtype, way: str = "") -> str:
    return " | ".join(part for part in (what, name, _short(dtype), way) if part)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- measuring ----------------------------------------------------------------------------------------------------


class _Step:
    """Forward and backward over given logits, as after a model."""

    def __init__(self, name: str, dtype: torch.dtype, way: str) -> None:
        how = WAYS[way]
        assert how is not None
        program = PROGRAMS[name]
        self.function = torch.compile(program, dynamic=False, **how)
        self.given = inputs_of(program, ROWS, VOCAB, dtype)
        self.given["logits"].requires_grad_()

    def __call__(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        given = {**self.given, "logits": computed(self.given["logits"])}
        start = clock()
        outputs = self.function(**given)
        middle = clock()
        loss: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        loss.backward()  # type: ignore[no-untyped-call]
        return middle - start, clock() - middle


def _peak(name: str, dtype: torch.dtype, way: str) -> dict[str, Any]:
    bytes_ = measure.in_fresh_process(peak, name, dtype, way)
    return {"allocated_bytes": bytes_, "logits_bytes": ROWS * VOCAB * dtype.itemsize}


def peak(name: str, dtype: torch.dtype, way: str) -> int:
    """Bytes that a warm step allocates at one time, beyond what it is given."""
    torch.set_num_threads(1)  # the profiler sees the thread that it was started in and no other
    step = _Step(name, dtype, way)
    step()
    return measure.profiled_peak(step)


def _times(name: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    return {"times_ms": measure.in_fresh_process(times, name, dtype, seconds)}


def times(name: str, dtype: torch.dtype, seconds: float) -> dict[str, list[float]]:
    """Median milliseconds of forward and of backward, by way."""
    clock = measure.clock_of("cpu")

    def run_of(way: str) -> Run:
        step = _Step(name, dtype, way)
        return lambda number: step(clock)

    return in_turn({way: run_of(way) for way in COMPARED}, seconds)


# ---- table --------------------------------------------------------------------------------------------------------


def _table(store: Store, dtype: torch.dtype) -> tuple[str, list[str], list[list[str]]]:
    headers = ["", "inductor peak", "slime_fused peak", "inductor ms", "slime_fused ms", "ratio"]
    rows = [[name, *_peaks(store, name, dtype), *_texts(store, name, dtype)] for name in PROGRAMS]
    title = f"Fused in part, {ROWS} x {VOCAB:,} {_short(dtype)}: peak beyond what is given / logits"
    return title, headers, rows


def _peaks(store: Store, name: str, dtype: torch.dtype) -> list[str]:
    found = [store.cells[_cell("peak", name, dtype, way)] for way in COMPARED]
    return [
        str(each.get("error") or f"{each['allocated_bytes'] / each['logits_bytes']:.2f}")
        for each in found
    ]


def _texts(store: Store, name: str, dtype: torch.dtype) -> list[str]:
    found = store.cells[_cell("time", name, dtype)]
    if "error" in found:
        return [found["error"]] * 3
    theirs, ours = (sum(found["times_ms"][way]) for way in COMPARED)
    return [f"{theirs:.0f}", f"{ours:.0f}", f"{ours / theirs:.2f}"]
