"""`python -m bench`: slime's policy loss before and after, peak memory, time and error; in short, or the whole table.

Entry points: `short`, `main`. Memory in a process per cell, over logits of 262 MB: buffers for chunks of them
hardly count; time of all ways in one process per case. See README.md for the protocol.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
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
Finished = Mapping[str, dict[str, Any]]
"""Cells by their names."""

_TITLES = {
    "given": "Logits passed in, forward and backward",
    "inside": "lm_head inside (hidden @ weight.t()), forward and backward",
    "no_grad": "Logits passed in, no gradient",
}


@dataclasses.dataclass(frozen=True)
class Selection:
    """A part of the table, and the name of its files."""

    name: str
    variants: tuple[str, ...] = VARIANTS
    dtypes: tuple[str, ...] = DTYPES
    ways: tuple[str, ...] = tuple(WAYS)

    def ways_of(self, variant: str) -> list[str]:
        """`consume_logits` is for given logits; without a gradient nothing is saved."""
        left_out = {"given": (), "inside": ("consume",), "no_grad": ("consume", "save=")}[variant]
        return [way for way in self.ways if not any(word in way for word in left_out)]


WHOLE = Selection("loss")
SHORT = Selection("short", ("given", "inside"), ("float32",), ("eager", "inductor", "slime_fused"))


def short(options: argparse.Namespace) -> None:
    """A first table in two minutes: float32, this backend beside eager and inductor."""
    options.seconds = min(options.seconds, 4)
    _measure(options, SHORT)
    print("\nThe whole table: `make bench-all` (python -m bench table)")


def main(options: argparse.Namespace) -> None:
    _measure(options, WHOLE)


def _measure(options: argparse.Namespace, selection: Selection) -> None:
    store = Store(options.out, selection.name, resume=options.resume)
    cases = [
        Case(variant, options.spelling, dtype, hidden=_HIDDEN)
        for variant in selection.variants
        for dtype in selection.dtypes
    ]
    run_cells(store, _memory_cells(cases, selection), jobs=options.jobs)
    # alone: the machine is theirs
    run_cells(store, _time_cells(cases, selection, options.seconds))
    tables = [
        _table(store.cells, selection, variant, options.spelling) for variant in selection.variants
    ]
    write_table(store, tables)
    plot(store.cells, selection, options.spelling, store.path.with_suffix(".png"))


def _memory_cells(cases: list[Case], selection: Selection) -> Cells:
    cells: Cells = {}
    for case in cases:
        sized = dataclasses.replace(case, rows=_MEMORY_ROWS[case.dtype])
        for way in selection.ways_of(case.variant):
            cells[_name("peak", case, way)] = functools.partial(_peak, sized, way)
    return cells


def _peak(case: Case, way: str) -> dict[str, Any]:
    found = measure.in_fresh_process(measure.peak, case, way)
    return {
        **dataclasses.asdict(case),
        **dataclasses.asdict(found),
        "logits_bytes": case.logits_bytes,
    }


def _time_cells(cases: list[Case], selection: Selection, seconds: float) -> Cells:
    cells: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in cases:
        sized = dataclasses.replace(case, rows=_TIME_ROWS)
        cells[_name("time", case)] = functools.partial(
            _times, sized, selection.ways_of(case.variant), seconds
        )
    return cells


def _times(case: Case, ways: list[str], seconds: float) -> dict[str, Any]:
    found = measure.in_fresh_process(measure.times, case, ways, seconds)
    timed = {way: {**dataclasses.asdict(t), "time_ms": t.time_ms} for way, t in found.items()}
    return {**dataclasses.asdict(case), "ways": timed}


def _name(*parts: Any) -> str:
    return " | ".join(
        f"{p.variant} {p.spelling} {p.dtype}" if isinstance(p, Case) else p for p in parts
    )


# ---- table and plot -----------------------------------------------------------------------------------------------


def _table(
    found: Finished, selection: Selection, variant: str, spelling: str
) -> tuple[str, list[str], list[list[str]]]:
    names = [_SHORT_NAMES[dtype] for dtype in selection.dtypes]
    headers = ["", *(f"{name} {what}" for name in names for what in _COLUMNS)]
    rows = [
        [
            way,
            *(
                text
                for dtype in selection.dtypes
                for text in _texts(found, Case(variant, spelling, dtype), way)
            ),
        ]
        for way in selection.ways_of(variant)
    ]
    return _TITLES[variant], headers, rows


_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
_COLUMNS = ("peak", "RSS", "time", "error")


def texts_of(cells: Finished, variant: str, spelling: str, dtype: str, way: str) -> list[str]:
    """Peak, RSS, time and error of one way, as the table has them."""
    return _texts(cells, Case(variant, spelling, dtype), way)


def _texts(cells: Finished, case: Case, way: str) -> list[str]:
    found, timed = cells[_name("peak", case, way)], cells[_name("time", case)]
    texts = [found["error"]] * 2 if "error" in found else [
        f"{found[key] / found['logits_bytes']:.2f}" for key in ("allocated_bytes", "resident_bytes")
    ]  # fmt: skip
    if "error" in timed:
        return [*texts, *[timed["error"]] * 2]
    mine = timed["ways"][way]
    ratio = mine["time_ms"] / timed["ways"]["inductor"]["time_ms"]
    error = mine["output_error" if case.variant == "no_grad" else "gradient_error"]
    return [*texts, f"{ratio:.2f} ({mine['time_ms']:.0f} ms)", f"{error:.1e}"]


def plot(cells: Finished, selection: Selection, spelling: str, path: Path) -> None:
    """Bars of the peaks, above bars of the times."""
    from bench.measure import plots

    bars: dict[str, dict[str, dict[str, list[float | None]]]] = {
        "peak / logits": {},
        "time / inductor's": {},
    }
    for variant in selection.variants:
        ways = selection.ways_of(variant)
        for what, column in (("peak / logits", 0), ("time / inductor's", 2)):
            bars[what][_TITLES[variant]] = {
                dtype: [
                    _number(_texts(cells, Case(variant, spelling, dtype), way)[column])
                    for way in ways
                ]
                for dtype in selection.dtypes
            }
    labels = {_TITLES[variant]: selection.ways_of(variant) for variant in selection.variants}
    plots.bars(bars, labels, path)


def _number(text: str) -> float | None:
    try:
        return float(text.split()[0])
    except ValueError:
        return None
