"""What the examples over trainers share: the same steps in several ways, their losses, a step's peak or time."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar
from unittest import mock

import torch

import slime_compile
from slime_compile import Report


@dataclass
class Run:
    """One way of training.

    Attributes:
        losses: of every step.
        peak_bytes: most that a step allocated at one time, of those after the first, which compiles.
        seconds: of every step; with `probes` their allocations are recorded meanwhile, which takes time.
        reports: of the graphs that the backend compiled meanwhile.
        logged: metrics that the trainer logs.
    """

    probes: ClassVar[bool] = True
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        warm, started = bool(self.losses), time.perf_counter()
        with slime_compile.memory_probe(
            "step", enabled=warm and self.probes, device="cpu", log=len
        ) as probe:
            yield
        self.seconds.append(time.perf_counter() - started)
        if probe.record is not None:
            self.peak_bytes = max(self.peak_bytes, probe.record.peak_allocated or 0)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds[len(self.seconds) // 2 :])

    @property
    def fused(self) -> int:
        return sum(report.fused for report in self.reports)

    @property
    def chunked_heads(self) -> int:
        return sum(report.to_dict()["chunked_heads"] for report in self.reports)


def compare(
    ways: Sequence[str],
    train: Callable[[str, int, str], Run],
    logits_bytes: int,
    argv: Sequence[str] | None = None,
) -> dict[str, Run]:
    """Trains in each way and prints the peak of a step, also as a multiple of the logits, and the last loss.

    With `--time` the median time of a step in the peak's place, also as a multiple of the first way's: of the second
    half of the steps, when everything is compiled.

    Args:
        ways: their names.
        train: takes one of them, how many steps, and the backend's option `inner`.
        logits_bytes: what N stands for.
        argv: the command line.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--inner", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--time", action="store_true", help="of a step, in the peak's place")
    given = parser.parse_args(argv)
    torch.set_num_threads(
        1
    )  # the models are so small that threads would mostly wait for each other
    runs: dict[str, Run] = {}
    for way in ways:
        torch._dynamo.reset()
        known = len(slime_compile.reports())
        # a way may set options there
        with mock.patch.dict(os.environ), mock.patch.object(Run, "probes", not given.time):
            runs[way] = run = train(way, given.steps, given.inner)
        run.reports = slime_compile.reports()[known:]
        told = f"peak {run.peak_bytes / 2**20:6.1f} MiB, {run.peak_bytes / logits_bytes:.2f} N"
        if given.time:
            first = next(iter(runs.values())).median_seconds
            told = f"{1e3 * run.median_seconds:6.0f} ms a step, {run.median_seconds / first:.2f}"
        print(f"{way:{max(map(len, ways))}}  {told}, last loss {run.losses[-1]:.6f}")
    fused = [report for run in runs.values() for report in run.reports if report.fused]
    print(fused[-1] if fused else "slime_fused compiled nothing here: its operators are called")
    return runs
