"""`python -m bench lm_head`: losses over a head's matmul, forward and backward, beside every installed peer.

Entry point: `main`. Each peak is taken in a process of its own, the times of all ways in one:

    peak     most bytes beyond inputs and their gradients, in N, the bytes of all logits
    time     median of a step; compare by the ratio to inductor's in the same run
    error    largest of the gradients against float64, relative to the largest gradient

An interrupted run goes on with `--resume`; every finished cell is in the file. Pictures: one per size.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.cases.heads import LOSSES, WAYS, Function, Head, truth
from bench.measure import measure
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import CellFailed, profiled_peak
from bench.measure.plots import bars

_SIZES = [(t, v, d) for v in (32_000, 128_256) for t in (2_048, 8_192) for d in (256, 1_024)]
_MOST_BYTES = 2 << 30  # of logits in float32: a machine without a GPU holds three times that
_LEAST, _MOST = 3, 15  # rounds
_PEAKS_AT_ONCE = 2  # each is of one thread


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
    finished = [head for head in heads() if _name(head) in store.cells]
    write_table(store, [*(_table(store, h) for h in finished), _bars(store, finished)])
    for size in dict.fromkeys((h.rows, h.vocab, h.hidden) for h in finished):
        _picture(store, [h for h in finished if (h.rows, h.vocab, h.hidden) == size], options.out)


def _name(head: Head) -> str:
    sizes = f"N = {head.rows}, V = {head.vocab}, D = {head.hidden}"
    return f"{head.loss}, {head.dtype}, {sizes}"


def cell(head: Head, seconds: float) -> dict[str, Any]:
    """Peaks, times and errors of every way; why the others have none."""
    with ThreadPoolExecutor(_PEAKS_AT_ONCE) as pool:
        measured = dict(
            zip(WAYS, pool.map(functools.partial(_peak_or_why, head), WAYS), strict=True)
        )
    peaks = {way: peak for way, peak in measured.items() if isinstance(peak, int)}
    missing = {way: why for way, why in measured.items() if isinstance(why, str)}
    found = measure.in_fresh_process(times_and_errors, head, list(peaks), seconds)
    return {**dataclasses.asdict(head), "peaks_bytes": peaks, **found, "missing": missing}


def _peak_or_why(head: Head, way: str) -> int | str:
    """Bytes, or why there are none."""
    try:
        return measure.in_fresh_process(peak_bytes, head, way)
    except CellFailed as failed:
        return str(failed)


# ---- in the fresh process -----------------------------------------------------------------------------------------


def _step(function: Function, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = function(*arguments)
    return list(torch.autograd.grad(loss, arguments[:2]))


def peak_bytes(head: Head, way: str) -> int:
    """Most bytes of the second step, beyond the returned gradients."""
    torch.set_num_threads(1)  # the profiler sees the thread that it was started in and no other
    function, arguments = WAYS[way](head), head.arguments()
    _step(function, arguments)
    own = sum(leaf.nbytes for leaf in arguments[:2])
    return profiled_peak(lambda: _step(function, arguments)) - own


def times_and_errors(head: Head, ways: list[str], seconds: float) -> dict[str, Any]:
    """Medians of all ways in turn over the same data, and errors of the first step, the warm-up."""
    arguments, true = head.arguments(), truth(head)
    functions = {way: WAYS[way](head) for way in ways}
    errors, rounds = {}, {way: [] for way in ways}  # type: dict[str, float], dict[str, list[float]]
    for way, function in functions.items():
        found = zip(_step(function, arguments), true, strict=True)
        errors[way] = max(((f - t).abs().max() / t.abs().max()).item() for f, t in found)
    end = time.perf_counter() + seconds
    for number in range(_MOST):
        if number >= _LEAST and time.perf_counter() > end:
            break
        for way, function in functions.items():
            start = time.perf_counter()
            _step(function, arguments)
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


# ---- bars ---------------------------------------------------------------------------------------------------------

_OURS = "slime_fused"
_IN_FORWARD = f"{_OURS} grad_in_forward=always"  # three matmuls of each logit
_IN_BACKWARD = f"{_OURS} grad_in_forward=never"  # four
_MOST_N = 0.30  # of 8,192 rows
_MOST_OF_PEER = 1.05
_MOST_OF_INDUCTOR = 1.35


def _bars(store: Store, finished: list[Head]) -> tuple[str, list[str], list[list[str]]]:
    """The targets of this package, cell by cell.

    A chunk of memory; in forward the time of the fastest equal computation, in backward the time of its fourth matmul.
    """
    rows = []
    for head in finished:
        found = store.cells[_name(head)]
        times = found.get("times_ms", {})
        if not {_OURS, _IN_FORWARD, _IN_BACKWARD, "inductor"} <= times.keys():
            continue
        peak = found["peaks_bytes"][_OURS] / head.logits_bytes
        peers = {way: t for way, t in times.items() if not way.startswith(_OURS)}
        fastest = min(peers, key=lambda way: peers[way])
        in_forward = times[_IN_FORWARD] / peers[fastest]
        in_backward = times[_IN_BACKWARD] / times["inductor"]
        row = [_name(head), f"{times[_OURS] / times['inductor']:.2f}"]
        row += [f"{peak:.2f}", _yes(head.rows < 8_192 or peak <= _MOST_N)]
        row += [f"{in_forward:.2f} x {fastest}", _yes(in_forward <= _MOST_OF_PEER)]
        row += [f"{in_backward:.2f} x inductor", _yes(in_backward <= _MOST_OF_INDUCTOR)]
        rows.append(row)
    header = ["cell", "time / inductor", "peak / N", f"<= {_MOST_N:.2f}"]
    header += ["gradient in forward", f"<= {_MOST_OF_PEER:.2f}"]
    header += ["in backward", f"<= {_MOST_OF_INDUCTOR:.2f}"]
    return f"{_OURS}: what is asked of it", header, rows


def _yes(held: bool) -> str:
    return "yes" if held else "no"


# ---- pictures -----------------------------------------------------------------------------------------------------


def _picture(store: Store, cells: list[Head], out: Path) -> None:
    """Of one size: peaks and times, a panel per loss, a bar per way, a colour per dtype."""
    labels: dict[str, list[str]] = {}
    panels: dict[str, dict[str, dict[str, list[float | None]]]] = {"peak / N": {}, "ms": {}}
    for head in cells:
        found = store.cells[_name(head)]
        if "error" in found:
            continue
        ways = labels.setdefault(head.loss, list(WAYS))
        peaks = {way: peak / head.logits_bytes for way, peak in found["peaks_bytes"].items()}
        for quantity, numbers in (("peak / N", peaks), ("ms", found["times_ms"])):
            panel = panels[quantity].setdefault(head.loss, {})
            panel[head.dtype] = [numbers.get(way) for way in ways]
    if labels:
        first = cells[0]
        bars(panels, labels, out / f"lm_head_{first.rows}_{first.vocab}_{first.hidden}.png")
