"""`python -m bench lm_head`: losses whose logits a matmul makes, forward and backward, beside every peer that is there.

Entry point: `main`. Each peak is taken in a process of its own, the times of all ways in one:

    peak     most bytes beyond inputs and their gradients, in N, the bytes of all logits
    time     median of a step; the ratio to inductor's in the same run is what counts
    error    largest of the gradients against float64, relative to the largest gradient
"""

import argparse
import dataclasses
import functools
import statistics
import time
from typing import Any

import torch

from bench.cases.heads import LOSSES, WAYS, Function, Head, truth
from bench.measure import measure
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import CellFailed, profiled_peak

_SIZES = [(t, v, d) for v in (32_000, 128_256) for t in (2_048, 8_192) for d in (256, 1_024)]
_MOST_BYTES = 2 << 30  # of logits in float32: a machine without a GPU holds three times that
_LEAST, _MOST = 3, 15  # rounds


def heads() -> list[Head]:
    """The cells that fit here."""
    every = [
        Head(loss, dtype, *size)
        for size in _SIZES
        for dtype in ("float32", "bfloat16")
        for loss in LOSSES
    ]
    return [head for head in every if head.rows * head.vocab * 4 <= _MOST_BYTES]


def main(options: argparse.Namespace) -> None:
    store = Store(options.out, "lm_head", resume=options.resume)
    until = time.monotonic() + 60 * options.minutes
    cells: Cells = {_name(h): functools.partial(cell, h, options.seconds) for h in heads()}
    run_cells(store, cells, until=until)
    write_table(store, [_table(store, h) for h in heads() if _name(h) in store.cells])


def _name(head: Head) -> str:
    sizes = f"N = {head.rows}, V = {head.vocab}, D = {head.hidden}"
    return f"{head.loss}, {head.dtype}, {sizes}"


def cell(head: Head, seconds: float) -> dict[str, Any]:
    """Peaks, times and errors of every way; why the others have none."""
    peaks: dict[str, int] = {}
    missing: dict[str, str] = {}
    for way in WAYS:
        try:
            peaks[way] = measure.in_fresh_process(peak_bytes, head, way)
        except CellFailed as failed:
            missing[way] = str(failed)
    found = measure.in_fresh_process(times_and_errors, head, list(peaks), seconds)
    return {**dataclasses.asdict(head), "peaks_bytes": peaks, **found, "missing": missing}


# ---- in the fresh process -----------------------------------------------------------------------------------------


def _step(function: Function, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = function(*arguments)
    return list(torch.autograd.grad(loss, arguments[:2]))


def peak_bytes(head: Head, way: str) -> int:
    """Most bytes of the second step, beyond the gradients that it returns."""
    torch.set_num_threads(1)  # the profiler sees the thread that it was started in and no other
    function, arguments = WAYS[way](head), head.arguments()
    _step(function, arguments)
    own = sum(leaf.nbytes for leaf in arguments[:2])
    return profiled_peak(lambda: _step(function, arguments)) - own


def times_and_errors(head: Head, ways: list[str], seconds: float) -> dict[str, Any]:
    """Medians of all ways in turn over the same data, and errors of a first step."""
    arguments, true = head.arguments(), truth(head)
    functions = {way: WAYS[way](head) for way in ways}
    errors, rounds = {}, {way: [] for way in ways}  # type: dict[str, float], dict[str, list[float]]
    for way, function in functions.items():
        found = zip(_step(function, arguments), true, strict=True)
        errors[way] = max(((f - t).abs().max() / t.abs().max()).item() for f, t in found)
    end = time.perf_counter() + seconds
    for number in range(1 + _MOST):
        if number > _LEAST and time.perf_counter() > end:
            break
        for way, function in functions.items():
            start = time.perf_counter()
            _step(function, arguments)
            if number:  # the first round warms up
                rounds[way].append(1e3 * (time.perf_counter() - start))
    return {"times_ms": {w: statistics.median(r) for w, r in rounds.items()}, "errors": errors}


# ---- the table ----------------------------------------------------------------------------------------------------


def _table(store: Store, head: Head) -> tuple[str, list[str], list[list[str]]]:
    found = store.cells[_name(head)]
    columns = ["way", "peak beyond inputs and gradients / N", "time / inductor", "error"]
    if "error" in found:
        return _name(head), columns, [[found["error"], "", "", ""]]
    base = found["times_ms"].get("inductor", float("nan"))
    rows = [
        [
            way,
            f"{peak / head.logits_bytes:.2f}",
            f"{found['times_ms'][way] / base:.2f} ({found['times_ms'][way]:.0f} ms)",
            f"{found['errors'][way]:.1e}",
        ]
        for way, peak in found["peaks_bytes"].items()
    ]
    rows += [[way, why, "", ""] for way, why in found["missing"].items()]
    return _name(head), columns, rows
