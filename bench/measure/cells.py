"""Cells of a table: each is run once, its numbers go to a JSON file at once, and an interrupted run can go on.

Entry points: `Store`, `run_cells`, `write_table`, `finished`, `stamp`. This module knows nothing about losses.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from bench.measure.measure import CellFailed

RESULTS = Path(__file__).parents[1] / "results"
_ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "torch", "triton", "megatron-core", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "flash-attn"
)  # fmt: skip

Cells = dict[str, Callable[[], dict[str, Any]]]
"""What makes the numbers of each cell, by the cell's name in the file."""


_SAME = ("device", "driver", "threads", "python", "torch")
"""Parts of a stamp that cells of one table have in common."""


class Store:
    """Finished cells, by name, in `<folder>/<name>.json`; a failed cell has its message as "error".

    `resume` takes over cells of the same machine and torch; others are measured anew, and a line says so. The stamp
    stays the file's until a cell is added, and lists the commits of all its cells.
    """

    def __init__(self, folder: Path, name: str, *, resume: bool = False):
        self.path = folder / f"{name}.json"
        self.stamp = self._now = stamp()
        self.cells: dict[str, dict[str, Any]] = {}
        if resume and self.path.exists():
            self._take_over(json.loads(self.path.read_text()))

    def _take_over(self, saved: dict[str, Any]) -> None:
        theirs = saved["stamp"]
        other = [key for key in _SAME if theirs.get(key) != self._now.get(key)]
        if other:
            print(
                f"{len(saved['cells'])} cells of {self.path} are not taken over: they have another {', '.join(other)}"
            )
            return
        self.cells, self.stamp = saved["cells"], theirs
        commits = [*theirs["commit"].split(", "), self._now["commit"]]
        self._now["commit"] = ", ".join(dict.fromkeys(commits))

    def put(self, name: str, numbers: dict[str, Any]) -> None:
        self.cells[name], self.stamp = numbers, self._now
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_suffix(".partial")
        made.write_text(json.dumps({"stamp": self.stamp, "cells": self.cells}, indent=1) + "\n")
        made.replace(self.path)


def finished(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """The cells of a file, wherever they were measured; none if there is no file."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["cells"] if path.exists() else {}


def run_cells(store: Store, cells: Cells, *, jobs: int = 1, until: float = math.inf) -> None:
    """Runs the cells missing from the store, at most `jobs` at a time; one line for each.

    Args:
        until: of `time.monotonic()`; no cell starts later.
    """
    waiting = {name: call for name, call in cells.items() if name not in store.cells}
    already = done = len(cells) - len(waiting)
    start = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_run, name, call, until) for name, call in waiting.items()]
        try:
            for future in as_completed(futures):
                name, numbers, seconds = future.result()
                if numbers is None:
                    continue
                store.put(name, numbers)
                done += 1
                failed = f"  {numbers['error']}" if "error" in numbers else ""
                pace = (time.perf_counter() - start) / (done - already)
                remaining = _duration(pace * (len(cells) - done))
                print(
                    f"[{done}/{len(cells)}] {name} ({seconds:.0f} s){failed}{remaining}", flush=True
                )
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print(
                f"\n{done} of {len(cells)} cells are in {store.path}; --resume goes on from there"
            )
            sys.exit(130)
    if done < len(cells):
        print(
            f"{len(cells) - done} cells are not measured: the time is up; --resume goes on from there"
        )


def _duration(seconds: float) -> str:
    """The remaining time, roughly; empty at the end."""
    if not seconds:
        return ""
    text = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return f", about {text} to go"


def _run(
    name: str, call: Callable[[], dict[str, Any]], until: float
) -> tuple[str, dict[str, Any] | None, float]:
    start = time.perf_counter()
    if time.monotonic() > until:
        return name, None, 0.0
    try:
        numbers = call()
    except CellFailed as failed:
        numbers = {"error": str(failed)}
    return name, numbers, time.perf_counter() - start


def write_table(store: Store, parts: Iterable[tuple[str, Sequence[str], list[list[str]]]]) -> None:
    """Prints titled tables and writes them as Markdown beside the JSON, with the command and the machine.

    Args:
        parts: title, headers and rows of each table.
    """
    import tabulate

    pages = [stamp_line(store.stamp)]
    for title, headers, rows in parts:
        print(f"\n{title}\n{tabulate.tabulate(rows, headers, tablefmt='simple', **_PLAIN)}")
        pages.append(
            f"**{title}**\n\n{tabulate.tabulate(rows, headers, tablefmt='github', **_PLAIN)}"
        )
    print(f"\n{pages[0]}")
    store.path.with_suffix(".md").write_text("\n\n".join([*pages[1:], pages[0]]) + "\n")


def gib(size: int, digits: int = 2) -> str:
    return f"{size / 2**30:.{digits}f}"


_PLAIN: dict[str, Any] = {"disable_numparse": True}


# ---- what it ran on -----------------------------------------------------------------------------------------------


def stamp() -> dict[str, Any]:
    """Command, device, driver, versions, commit and day."""
    cuda = torch.cuda.is_available()
    return {
        "command": f"python -m bench {' '.join(sys.argv[1:])}".strip(),
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else "",
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def stamp_line(known: dict[str, Any]) -> str:
    """A stamp as a sentence."""
    on = f"{known['device']}" + (f", driver {known['driver']}" if known["driver"] else "")
    versions = ", ".join(
        f"{name} {known[name]}" for name in ("python", *_PACKAGES) if name in known
    )
    return (
        f"`{known['command']}`, {on}, {known['threads']} threads, load {known['load']} at the start, "
        f"{versions}, commit {known['commit']}, {known['date']}."
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    sources = ("bench/*.py", "fx_passes", "slime_compile")
    changed = _output("git", "status", "--porcelain", "--", *sources)
    return _output("git", "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
