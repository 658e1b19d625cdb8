"""`python -m bench holders`: references to the logits in real trainers during backward.

Entry point: `main`. Each trainer takes a few steps in a process of its own; a cell has the report's counts and names.
A missing trainer is a row with the reason. Sizes are tiny, and no memory or time is measured: 1.0 and 2.0 times the
logits are explained in docs/aliasing.md.
"""

import argparse
import functools
import os
from typing import Any

import torch

from bench.cases.trainers import TRAINERS
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import CellFailed, in_fresh_process
from slime_compile import ops


def main(options: argparse.Namespace) -> None:
    """Every trainer; the next `--resume` runs the missing ones."""
    store = Store(options.out, "holders", resume=options.resume)
    cells: Cells = {name: functools.partial(cell, name) for name in TRAINERS}
    run_cells(store, cells)
    headers = ["where the loss is compiled", "gradients over the logits", "otherwise referenced by"]
    rows = [[name, *_texts(store.cells[name])] for name in TRAINERS]
    write_table(
        store, [("References to the logits during backward, consume_logits='auto'", headers, rows)]
    )


def cell(name: str) -> dict[str, Any]:
    found = in_fresh_process(counted, name)
    if not found["calls"]:
        raise CellFailed("no gradient counted the references to the logits")
    return found


def counted(name: str) -> dict[str, Any]:
    """Calls of the gradients, calls overwriting the logits, and the reasons of the others."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    TRAINERS[name]()
    placed = ops.placements.values()
    return {
        "calls": sum(p.calls for p in placed),
        "over": sum(p.over for p in placed),
        "reasons": [p.last for p in placed if p.last],
    }


def _texts(cell: dict[str, Any]) -> list[str]:
    if "error" in cell:
        return ["not run", cell["error"]]
    return [f"{cell['over']} of {cell['calls']}", "; ".join(cell["reasons"])]
