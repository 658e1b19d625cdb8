"""`python -m bench partial`: partly fused losses, beside inductor: never a higher peak, never slower.
`python -m bench rows`: the same for every loss of `cases/rows.py` and `cases/public.py`, over logits and over heads.

Entry points: `main`, `rows`. Peak memory in a process per cell; time of both ways in turn in one process.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cases import partial, public
from bench.cases import rows as row_cases
from bench.cases.partial import PROGRAMS
from bench.cases.rows import TRAINED, over_heads
from bench.measure import measure
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import WAYS
from bench.measure.turns import Run, computed, in_turn

COMPARED = ("inductor", "slime_fused")
DTYPES = (torch.float32, torch.bfloat16)
ROWS, VOCAB = 512, 32_000
HEAD_ROWS, HIDDEN = 1024, 256
FROZEN = ("hidden_2", "weight_2")
"""A teacher's."""

OVER_LOGITS = row_cases.LOSSES | public.LOSSES
OVER_HEADS = {f"head: {name}": over_heads(loss) for name, loss in OVER_LOGITS.items()}
OWN_HEADS = {f"own: {name}": loss for name, loss in (row_cases.HEADS | public.HEADS).items()}
LOSSES = OVER_LOGITS | OVER_HEADS | OWN_HEADS


def main(options: argparse.Namespace) -> None:
    _measured(options, "partial", list(PROGRAMS), DTYPES)


def rows(options: argparse.Namespace) -> None:
    """Of the losses with `--match` in their names."""
    names = [name for name in LOSSES if name not in PROGRAMS and options.match in name]
    _measured(options, "rows", names, DTYPES[:1])


def _measured(
    options: argparse.Namespace, file: str, names: list[str], dtypes: tuple[torch.dtype, ...]
) -> None:
    store = Store(options.out, file, resume=options.resume)
    peaks: Cells = {
        _cell("peak", name, dtype, way): functools.partial(_peak, name, dtype, way)
        for name in names
        for dtype in dtypes
        for way in COMPARED
    }
    run_cells(store, peaks, jobs=options.jobs)
    times: Cells = {
        _cell("time", name, dtype): functools.partial(_times, name, dtype, options.seconds)
        for name in names
        for dtype in dtypes
    }
    run_cells(store, times)  # alone: the machine is theirs
    write_table(store, [_table(store, names, dtype) for dtype in dtypes])


def _cell(what: str, name: str, dtype: torch.dtype, way: str = "") -> str:
    return " | ".join(part for part in (what, name, _short(dtype), way) if part)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- measuring ----------------------------------------------------------------------------------------------------


class _Step:
    """Forward and backward over given logits, as after a model, or over hidden states and the weights of heads."""

    def __init__(self, name: str, dtype: torch.dtype, way: str) -> None:
        how = WAYS[way]
        assert how is not None
        program = PROGRAMS.get(name) or LOSSES[name]
        self.function = torch.compile(program, dynamic=False, **how)
        if name in PROGRAMS:
            self.given = partial.inputs_of(PROGRAMS[name], ROWS, VOCAB, dtype)
        else:
            self.given = row_cases.inputs_of(program, _rows(name), VOCAB, dtype, HIDDEN)
        frozen = FROZEN if name in OVER_HEADS else ()
        self.leaves = [n for n in self.given if n in TRAINED and n not in frozen]
        for leaf in self.leaves:
            self.given[leaf].requires_grad_()

    @property
    def outside_bytes(self) -> int:
        """Of the returned gradients of hidden states and weights."""
        return sum(self.given[leaf].nbytes for leaf in self.leaves if leaf != "logits")

    def __call__(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        for leaf in self.leaves:
            self.given[leaf].grad = None
        given = dict(self.given)
        if "logits" in given:
            given["logits"] = computed(given["logits"])
        start = clock()
        outputs = self.function(*given.values())
        middle = clock()
        del given
        loss: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        loss.backward()  # type: ignore[no-untyped-call]
        return middle - start, clock() - middle


def _rows(name: str) -> int:
    return HEAD_ROWS if name in OVER_HEADS | OWN_HEADS else ROWS


def _peak(name: str, dtype: torch.dtype, way: str) -> dict[str, Any]:
    bytes_ = measure.in_fresh_process(peak, name, dtype, way)
    return {"allocated_bytes": bytes_, "logits_bytes": _rows(name) * VOCAB * dtype.itemsize}


def peak(name: str, dtype: torch.dtype, way: str) -> int:
    """Most live bytes of a warm step, beyond its inputs and results."""
    torch.set_num_threads(1)  # the profiler sees the thread that it was started in and no other
    step = _Step(name, dtype, way)
    step()
    return measure.profiled_peak(step) - step.outside_bytes


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


def _table(
    store: Store, names: list[str], dtype: torch.dtype
) -> tuple[str, list[str], list[list[str]]]:
    headers = ["", "inductor peak", "slime_fused peak", "inductor ms", "slime_fused ms", "ratio"]
    rows = [[name, *_peaks(store, name, dtype), *_texts(store, name, dtype)] for name in names]
    in_part = all(name in PROGRAMS for name in names)
    what = "Partly fused" if in_part else f"Row by row, heads {HEAD_ROWS:,} x {VOCAB:,} x {HIDDEN}"
    title = f"{what}, {ROWS} x {VOCAB:,} {_short(dtype)}: peak beyond the inputs / logits"
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
