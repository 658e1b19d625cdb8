"""`python -m bench memory --device stand-in`: slime#2011's tables at full size on a stand-in for a CUDA device, no GPU.

Entry point: `main`. The memory comes from torch's own caching allocator. Inductor's CUDA code and our operators request
it; their kernels do nothing (tests/cuda/standin). Each cell is one step in a fresh process, as on a GPU. Memory of
libraries is not included: cuBLAS' workspaces, the context.
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

from bench.cases.losses import Case
from bench.commands.estimate import estimated_bytes
from bench.commands.memory import PUBLISHED, VOCAB, lines
from bench.measure import measure
from bench.measure.cells import Cells, Store, gib, run_cells, write_table

HIDDEN = 4096
WAYS = {
    # title: spelling, way, dtype, variant
    "slime_fused": ("megatron", "slime_fused", "float32", "given"),
    "before, eager": ("megatron", "eager", "float32", "given"),
    "softmax reused, eager": ("reuse", "eager", "float32", "given"),
    "before, inductor": ("megatron", "inductor", "float32", "given"),
    "bf16 slime_fused": ("megatron", "slime_fused", "bfloat16", "given"),
    "bf16 slime_fused, head inside": ("megatron", "slime_fused", "bfloat16", "inside"),
}
ALLOWED = 0.01  # of the allocator's peak, for `estimate_peak`


def main(options: argparse.Namespace) -> None:
    store = Store(options.out, "memory_stand_in", resume=options.resume)
    run_cells(store, _cells(), until=time.monotonic() + 60 * options.minutes)
    tables = [
        _table(store, f"GiB by torch's allocator (times the logits), V = {VOCAB}", _allocated),
        _table(store, "GiB reserved from the device by torch's allocator", _reserved),
        _table(store, "`estimate_peak` beside the allocator's peak", _estimated),
    ]  # fmt: skip
    write_table(store, tables)


def _case(line: str, title: str) -> tuple[Case, str]:
    (rows, chunk), (spelling, way, dtype, variant) = lines()[line], WAYS[title]
    chunk = chunk if way == "eager" else -1  # a compiled loss needs no chunks
    return Case(variant, spelling, dtype, rows, VOCAB, HIDDEN, chunk, "cuda"), way


def _cells() -> Cells:
    cells: Cells = {}
    for title in WAYS:
        for line in lines():
            case, way = _case(line, title)
            cells.setdefault(_key(case, way), functools.partial(_cell, case, way))
    return cells


def _key(case: Case, way: str) -> str:
    return f"{case.variant} | {case.spelling} | {way} | {case.dtype} | {case.rows} | {case.chunk}"


def _cell(case: Case, way: str) -> dict[str, Any]:
    """The peak, and for our backend its estimate; a CPU is enough for that."""
    found = measure.in_fresh_process(measure.peak, case, way)
    estimate = 0
    if way.startswith("slime_fused"):
        plain = dataclasses.replace(case, device="cpu")
        estimate = measure.in_fresh_process(estimated_bytes, plain, way)
    numbers = {**dataclasses.asdict(found), "estimated_bytes": estimate}
    return {**dataclasses.asdict(case), **numbers, "logits_bytes": case.logits_bytes}


# ---- tables -------------------------------------------------------------------------------------------------------


def _table(store: Store, title: str, text: Any) -> tuple[str, list[str], list[list[str]]]:
    titles = [t for t in WAYS if text is not _estimated or WAYS[t][1] == "slime_fused"]
    rows = []
    for line in lines():
        cells = [store.cells.get(_key(*_case(line, title))) for title in titles]
        size = gib(_case(line, "slime_fused")[0].logits_bytes)
        published = PUBLISHED[line] if text is _allocated else ()
        rows.append([line, size, *(_text(cell, text) for cell in cells), *published])
    last = ["published: before", "published: patch"] if text is _allocated else []
    return title, ["", "fp32 logits", *titles, *last], rows


def _text(cell: dict[str, Any] | None, text: Any) -> str:
    if cell is None:
        return "not run"
    return str(cell["error"])[:40] if "error" in cell else str(text(cell))


def _allocated(cell: dict[str, Any]) -> str:
    return f"{gib(cell['allocated_bytes'])} ({cell['allocated_bytes'] / cell['logits_bytes']:.2f})"


def _reserved(cell: dict[str, Any]) -> str:
    return gib(cell["reserved_bytes"])


def _estimated(cell: dict[str, Any]) -> str:
    off = cell["estimated_bytes"] / cell["allocated_bytes"] - 1
    return (
        f"{gib(cell['estimated_bytes'])} ({off:+.1%}{'' if abs(off) <= ALLOWED else ', TOO FAR'})"
    )
