"""`python -m bench speed`: forward, backward and both, beside every installed peer; then loss by loss.

Entry point: `main`. All ways over given logits run in turn in one process over copies of the logits; all ways from
hidden states and a weight, in another. `speed_losses.py` has the plain losses beside inductor. Least traffic over given
logits of N*V*size bytes:

    forward    one read                N*V*size
    backward   one read, one write     2*N*V*size

A share of the limit is the time of these bytes at the speed of a copy, from the same run, over the measured time.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cases.losses import Case, Problem
from bench.cases.peers import PEERS, Peer
from bench.commands import speed_losses
from bench.measure import measure, plots
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import clock_of
from bench.measure.turns import COPIES, Run, computed, copy_of, in_turn

_SIZES = {
    # rows, vocabulary, hidden, of given logits and of linear losses
    "cpu": [(1024, 32_000, 512)],
    "cuda": [(9_216, 76_032, 4096), (8_192, 151_936, 4096)],
}


def main(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    store = Store(options.out, "speed", resume=options.resume)
    until = time.monotonic() + 60 * options.minutes
    cases = [
        Case("inside" if linear else "given", "plain", dtype, *size, device=device)
        for linear in (False, True)
        for size in _SIZES[device]
        for dtype in (("float32",) if linear and device == "cpu" else ("float32", "bfloat16"))
    ]
    cells: Cells = {_name(c): functools.partial(_cell, c, options.seconds) for c in cases}
    rows, vocab, _ = _SIZES[device][0]
    cells |= speed_losses.cells(rows, vocab, device, options.seconds)
    run_cells(store, cells, until=until)
    found = [case for case in cases if _name(case) in store.cells]
    tables = [_table(store, case) for case in found]
    write_table(store, tables + speed_losses.tables(store, rows, vocab, device))
    _plot(store, found)


def _name(case: Case) -> str:
    what = "hidden states and weight" if case.variant == "inside" else "given logits"
    return f"{what}, {case.dtype}, N = {case.rows}, V = {case.vocab}" + (
        f", D = {case.hidden}" if case.variant == "inside" else ""
    )


def _cell(case: Case, seconds: float) -> dict[str, Any]:
    return {
        **dataclasses.asdict(case),
        **measure.in_fresh_process(speeds, case, seconds),
        "logits_bytes": case.logits_bytes,
    }


# ---- in the fresh process -----------------------------------------------------------------------------------------


def speeds(case: Case, seconds: float) -> dict[str, Any]:
    """Median times of every peer, of a copy of the logits, and why the others have none."""
    problem = Problem(case, with_truth=False)
    copies = [[value.clone() for value in problem.wide] for _ in range(COPIES)]
    peers = {name: p for name, p in PEERS.items() if p.linear == (case.variant == "inside")}
    runs: dict[str, Run] = {}
    missing: dict[str, str] = {}
    clock = clock_of(case.device)
    for name, peer in peers.items():
        try:
            runs[name] = _run(peer, problem, copies, clock)
            runs[name](0)
        except Exception as error:
            runs.pop(name, None)
            missing[name] = _why(peer, case, error)
    if case.variant == "given":
        runs["copy"] = copy_of(copies, clock)
    return {"times_ms": in_turn(runs, seconds), "missing": missing}


def _why(peer: Peer, case: Case, error: Exception) -> str:
    if isinstance(error, ImportError | AttributeError):
        return "not installed"
    if peer.cuda_only and case.device == "cpu":
        return "needs CUDA"
    return f"failed: {type(error).__name__}"


def _run(
    peer: Peer, problem: Problem, copies: list[list[Tensor]], clock: Callable[[], float]
) -> Run:
    function, target = peer.make(), problem.rows[0]
    grads = [torch.randn(target.shape, device=target.device) for _ in range(2)]

    def run(number: int) -> tuple[float, float]:
        leaves = [value.detach().requires_grad_() for value in copies[number % COPIES]]
        inputs = [leaf if peer.linear else computed(leaf) for leaf in leaves]
        start = clock()
        found = function(*inputs, target)
        middle = clock()
        outputs = found if isinstance(found, tuple) else (found,)
        pairs = [(o, g if o.dim() else g[0]) for o, g in zip(outputs, grads, strict=False)]
        torch.autograd.backward([o for o, _ in pairs], [g.to(o.dtype) for o, g in pairs])
        end = clock()
        if peer.overwrites:
            copies[number % COPIES][0].copy_(problem.wide[0])
        return middle - start, end - middle

    return run


# ---- table and plot -----------------------------------------------------------------------------------------------


def _table(store: Store, case: Case) -> tuple[str, list[str], list[list[str]]]:
    found = store.cells[_name(case)]
    headers = ["", "computes", "forward ms", "backward ms", "both ms", "of inductor's"]
    given = case.variant == "given"
    headers += ["GB/s of 3 N*V", "forward's limit", "backward's limit"] if given else []
    if "error" in found:
        return _name(case), headers, [[found["error"]]]
    times, rows = found["times_ms"], []
    prefix = "" if given else "linear: "
    for name, peer in PEERS.items():
        if name in found["missing"]:
            rows.append([name, peer.computes, found["missing"][name]])
        if name in times:
            forward, backward = times[name]
            both = forward + backward
            ratio = both / sum(times[f"{prefix}inductor"])
            rows.append(
                [
                    name,
                    peer.computes,
                    *(f"{t:.2f}" for t in (forward, backward, both)),
                    f"{ratio:.2f}",
                ]
            )
            rows[-1] += _shares(found, forward, backward) if given else []
    if given:
        copy = times["copy"][0]
        speed = f"{2 * found['logits_bytes'] / copy * 1e-6:.1f}"
        rows.append(["copy", "", f"{copy:.2f}", "", "", "", speed, "", ""])
    return _name(case), headers, rows


def _shares(found: dict[str, Any], forward: float, backward: float) -> list[str]:
    """Bytes a second; then the copy's time for one read, and for a read and a write, over the measured time."""
    copy = found["times_ms"]["copy"][0]
    speed = 3 * found["logits_bytes"] / (forward + backward) * 1e-6
    return [f"{speed:.1f}", f"{copy / 2 / forward:.0%}", f"{copy / backward:.0%}"]


def _plot(store: Store, cases: list[Case]) -> None:
    bars: dict[str, dict[str, list[float | None]]] = {}
    labels: dict[str, list[str]] = {}
    for case in cases:
        title, _, rows = _table(store, case)
        timed = [row for row in rows if len(row) > 5 and row[5]]
        if timed:
            labels[title] = [f"{row[0]} ({row[1]})" for row in timed]
            bars[title] = {"": [float(row[5]) for row in timed]}
    if bars:
        plots.bars({"time / inductor's": bars}, labels, store.path.with_suffix(".png"))
