"""`python -m bench`: the seeds' loss before and after, peak memory, time and error.

Entry point: `main`. Memory in a process per cell, over logits of 262 MB, so large that buffers for chunks of them
hardly count; time of all ways in one process per case. See README.md for the protocol.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cases.losses import VARIANTS, Case
from bench.measure import measure
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import WAYS

DTYPES = ("float32", "bfloat16")
_MEMORY_ROWS = {"float32": 2048, "bfloat16": 4096}  # the same bytes
_TIME_ROWS = 1024
_HIDDEN = 16  # CPUs without bfloat16 units take seconds for its matmuls
_TITLES = {
    "given": "Logits given, forward and backward",
    "inside": "Logits made inside the function (hidden @ weight.t()), forward and backward",
    "no_grad": "Logits given, no gradient",
}


def ways_of(variant: str) -> list[str]:
    """`consume_logits` is for logits that are given; without gradient nothing is saved."""
    left_out = {"given": (), "inside": ("consume",), "no_grad": ("consume", "save=")}[variant]
    return [way for way in WAYS if not any(word in way for word in left_out)]


def main(options: argparse.Namespace) -> None:
    store = Store(options.out, "loss", resume=options.resume)
    cases = [
        Case(variant, options.spelling, dtype, hidden=_HIDDEN)
        for variant in VARIANTS
        for dtype in DTYPES
    ]
    run_cells(store, _memory_cells(cases), jobs=options.jobs)
    run_cells(store, _time_cells(cases, options.seconds))  # alone: the machine is theirs
    write_table(store, [_table(store, variant, options.spelling) for variant in VARIANTS])
    plot(store, options.spelling, store.path.with_suffix(".png"))


def _memory_cells(cases: list[Case]) -> Cells:
    cells: Cells = {}
    for case in cases:
        sized = dataclasses.replace(case, rows=_MEMORY_ROWS[case.dtype])
        for way in ways_of(case.variant):
            cells[_name("peak", case, way)] = functools.partial(_peak, sized, way)
    return cells


def _peak(case: Case, way: str) -> dict[str, Any]:
    found = measure.in_fresh_process(measure.peak, case, way)
    return {
        **dataclasses.asdict(case),
        **dataclasses.asdict(found),
        "logits_bytes": case.logits_bytes,
    }


def _time_cells(cases: list[Case], seconds: float) -> Cells:
    cells: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in cases:
        sized = dataclasses.replace(case, rows=_TIME_ROWS)
        cells[_name("time", case)] = functools.partial(_times, sized, seconds)
    return cells


def _times(case: Case, seconds: float) -> dict[str, Any]:
    found = measure.in_fresh_process(measure.times, case, ways_of(case.variant), seconds)
    ways = {way: {**dataclasses.asdict(t), "time_ms": t.time_ms} for way, t in found.items()}
    return {**dataclasses.asdict(case), "ways": ways}


def _name(*parts: Any) -> str:
    return " | ".join(
        f"{p.variant} {p.spelling} {p.dtype}" if isinstance(p, Case) else p for p in parts
    )


# ---- table and plot -----------------------------------------------------------------------------------------------


def _table(store: Store, variant: str, spelling: str) -> tuple[str, list[str], list[list[str]]]:
    headers = ["", *(f"{short} {what}" for short in ("fp32", "bf16") for what in _COLUMNS)]
    rows = [
        [
            way,
            *(
                text
                for dtype in DTYPES
                for text in _texts(store, Case(variant, spelling, dtype), way)
            ),
        ]
        for way in ways_of(variant)
    ]
    return _TITLES[variant], headers, rows


_COLUMNS = ("peak", "RSS", "time", "error")


def texts_of(store: Store, variant: str, spelling: str, dtype: str, way: str) -> list[str]:
    """Peak, RSS, time and error of one way, as the table has them."""
    return _texts(store, Case(variant, spelling, dtype), way)


def _texts(store: Store, case: Case, way: str) -> list[str]:
    found, timed = store.cells[_name("peak", case, way)], store.cells[_name("time", case)]
    texts = [found["error"]] * 2 if "error" in found else [
        f"{found[key] / found['logits_bytes']:.2f}" for key in ("allocated_bytes", "resident_bytes")
    ]  # fmt: skip
    if "error" in timed:
        return [*texts, *[timed["error"]] * 2]
    mine = timed["ways"][way]
    ratio = mine["time_ms"] / timed["ways"]["inductor"]["time_ms"]
    error = mine["output_error" if case.variant == "no_grad" else "gradient_error"]
    return [*texts, f"{ratio:.2f} ({mine['time_ms']:.0f} ms)", f"{error:.1e}"]


def plot(store: Store, spelling: str, path: Path) -> None:
    """Bars of the peaks, above bars of the times."""
    from bench.measure import plots

    bars: dict[str, dict[str, dict[str, list[float | None]]]] = {
        "peak / logits": {},
        "time / inductor's": {},
    }
    for variant in VARIANTS:
        ways = ways_of(variant)
        for what, column in (("peak / logits", 0), ("time / inductor's", 2)):
            bars[what][_TITLES[variant]] = {
                dtype: [
                    _number(_texts(store, Case(variant, spelling, dtype), way)[column])
                    for way in ways
                ]
                for dtype in DTYPES
            }
    plots.bars(bars, {_TITLES[v]: ways_of(v) for v in VARIANTS}, path)


def _number(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except ValueError:
        return None
