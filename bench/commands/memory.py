"""`python -m bench memory`: the two tables of slime#2011, measured again, with this backend on the same loss.

Entry point: `main`. On CUDA at the sizes of the pull request, measured with the allocator in a fresh process per cell;
out of memory is a cell "OOM". On a stand-in for a CUDA device: `stand_in.py`. On the CPU at 1/64 of the rows, measured
with the profiler's events, and the full size estimated for slime_fused. Published figures are marked.
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

import torch

from bench.cases.losses import Case
from bench.commands.estimate import SLIME_WAYS, estimated_bytes
from bench.measure import measure, plots
from bench.measure.cells import Cells, Store, gib, run_cells, write_table

VOCAB = 76_032  # half of Qwen3's, as of two tensor-parallel ranks
ROWS = (9_216, 51_200, 103_756, 205_280)
CHUNKS = (-1, 1024, 512)
CHUNKED_ROWS = (
    32_768  # 51.06 GiB published at 5.5 times the logits, as in the other table: 9.28 GiB of logits
)
_ON_CPU = 64  # times fewer rows, and rows in a chunk

PUBLISHED = {
    # slime#2011, one H200 (GiB): before, after its patch
    "rows 9216": ("14.42", "7.84"),
    "rows 51200": ("79.82", "43.56"),
    "rows 103756": ("OOM", "88.24"),
    "rows 205280": ("OOM", "OOM"),
    "chunk -1": ("51.06", "32.46"),
    "chunk 1024": ("38.05", "27.83"),
    "chunk 512": ("37.59", "27.82"),
}
COLUMNS = {
    # title: spelling, way, dtype
    "before, eager": ("megatron", "eager", "float32"),
    "softmax reused, eager": ("reuse", "eager", "float32"),
    "slime_fused": ("megatron", "slime_fused", "float32"),
    "slime_fused consume_logits=True": ("megatron", "slime_fused consume_logits=True", "float32"),
    "before, inductor": ("megatron", "inductor", "float32"),
    "bf16 before, eager": ("megatron", "eager", "bfloat16"),
    "bf16 slime_fused": ("megatron", "slime_fused", "bfloat16"),
    "bf16 slime_fused consume_logits=True": (
        "megatron", "slime_fused consume_logits=True", "bfloat16",
    ),
    "slime_fused save=softmax": ("megatron", "slime_fused save=softmax", "float32"),
}  # fmt: skip


def lines() -> dict[str, tuple[int, int]]:
    """Rows and chunk of each line of both tables. The backend needs no chunks in the loss."""
    swept = {f"rows {rows}": (rows, 1024) for rows in ROWS}
    return {**swept, **{f"chunk {chunk}": (CHUNKED_ROWS, chunk) for chunk in CHUNKS}}


def main(options: argparse.Namespace) -> None:
    if options.device == "stand-in":
        from bench.commands import stand_in

        stand_in.main(options)
        return
    cuda = torch.cuda.is_available()
    until = time.monotonic() + 60 * options.minutes
    store = Store(options.out, "memory", resume=options.resume)
    if not cuda:
        run_cells(store, _cells("estimated", 1, cuda), until=until)
    run_cells(store, _cells("measured", 1 if cuda else _ON_CPU, cuda), until=until)
    tables = [_table(store, kind, cuda) for kind in _KINDS if kind == "measured" or not cuda]
    write_table(store, [table for both in tables for table in both])
    plot(store, "measured" if cuda else "estimated")


def _estimate(case: Case, way: str) -> measure.Peak:
    return measure.Peak(estimated_bytes(case, way), None, 0)


_KINDS = {"measured": measure.peak, "estimated": _estimate}


def _cells(name: str, smaller: int, cuda: bool) -> Cells:
    kind = _KINDS[name]
    cells: Cells = {}
    for column, (
        spelling,
        way,
        dtype,
    ) in COLUMNS.items():  # the first are complete if time runs out
        for line, (rows, chunk) in lines().items():
            if name == "estimated" and way not in SLIME_WAYS:
                continue
            device = "cuda" if cuda else "cpu"
            case = Case("given", spelling, dtype, rows // smaller, VOCAB, device=device)
            if _in_chunks(way) and chunk > 0:
                case = dataclasses.replace(case, chunk=chunk // smaller)
            cells.setdefault(_key(name, line, column), functools.partial(_cell, kind, case, way))
    return cells


def _in_chunks(way: str) -> bool:
    """Chunks of a compiled loss would be unrolled, and slime_fused needs none."""
    return way == "eager"


def _key(kind: str, line: str, column: str) -> str:
    """The same for lines with the same case."""
    if line.startswith("chunk") and not _in_chunks(COLUMNS[column][1]):
        line = f"chunk {CHUNKS[0]}"
    return f"{kind} | {line} | {column}"


def _cell(kind: Any, case: Case, way: str) -> dict[str, Any]:
    found = measure.in_fresh_process(kind, case, way)
    return {
        **dataclasses.asdict(case),
        **dataclasses.asdict(found),
        "logits_bytes": case.logits_bytes,
    }


# ---- tables and plot ----------------------------------------------------------------------------------------------


def _table(store: Store, kind: str, cuda: bool) -> list[tuple[str, list[str], list[list[str]]]]:
    begun = {name.split(" | ")[2] for name in store.cells if name.startswith(kind)}
    columns = [column for column in COLUMNS if column in begun]
    smaller = "" if cuda or kind == "estimated" else f", at 1/{_ON_CPU} of the rows"
    headers = ["", "logits", *columns, "published: before", "published: patch"]
    tables = []
    for what, title in (("chunk", f"{CHUNKED_ROWS} rows"), ("rows", "chunk 1024")):
        rows = [_line(store, kind, line, columns) for line in lines() if line.startswith(what)]
        tables.append(
            (f"GiB (times the logits), {kind}{smaller}: V = {VOCAB}, {title}", headers, rows)
        )
    return tables


def _line(store: Store, kind: str, line: str, columns: list[str]) -> list[str]:
    cells = [store.cells.get(_key(kind, line, column)) for column in columns]
    size = next((gib(c["logits_bytes"]) for c in cells if c and "logits_bytes" in c), "")
    return [line, size, *map(_text, cells), *PUBLISHED[line]]


def _text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    if "error" in cell:
        return str(cell["error"])[:40]
    return f"{gib(cell['allocated_bytes'])} ({cell['allocated_bytes'] / cell['logits_bytes']:.2f})"


def plot(store: Store, kind: str) -> None:
    """Peak over N, log-log, with a card's memory as a line."""
    series: dict[str, list[tuple[float, float]]] = {}
    for column in COLUMNS:
        cells = {rows: store.cells.get(f"{kind} | rows {rows} | {column}") for rows in ROWS}
        points = [
            (float(rows), c["allocated_bytes"] / 2**30)
            for rows, c in cells.items()
            if c and "allocated_bytes" in c
        ]
        if points:
            series[column] = points
    for column, at in (("published: before", 0), ("published: patch", 1)):
        found = {rows: PUBLISHED[f"rows {rows}"][at] for rows in ROWS}
        series[column] = [(float(n), float(size)) for n, size in found.items() if size != "OOM"]
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 139.8 * 2**30
    plots.lines(
        series,
        ("rows", f"peak GiB, {kind}"),
        (total / 2**30, "the card's memory" if torch.cuda.is_available() else "an H200's memory"),
        store.path.with_suffix(".png"),
    )
