"""Runs several ways of the same computation in turn, for `bench speed`. Prints nothing and knows no table."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COPIES = 2  # of the logits in turn, each larger than the caches
Run = Callable[[int], tuple[float, float]]
"""The number of the round to the seconds of forward and of backward."""

_LEAST, _MOST = 3, 30  # rounds
_MOST_SHORT = 1000  # of runs that take microseconds


class _Computed(torch.autograd.Function):
    """A non-leaf over the same memory, as logits are after a model; its gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


def computed(leaf: Tensor) -> Tensor:
    found: Tensor = _Computed.apply(leaf)
    return found


def copy_of(copies: list[list[Tensor]], clock: Callable[[], float]) -> Run:
    """A copy of the logits, the measure of every limit."""
    into = torch.empty_like(copies[0][0])

    def run(number: int) -> tuple[float, float]:
        start = clock()
        into.copy_(copies[number % COPIES][0])
        return clock() - start, 0.0

    return run


def in_turn(runs: dict[str, Run], seconds: float, *, short: bool = False) -> dict[str, list[float]]:
    """Median milliseconds of forward and backward, after one round to warm up.

    Args:
        short: each takes less than a millisecond, and other work on the machine disturbs it: many rounds.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    for number in range(1 + (_MOST_SHORT if short else _MOST)):
        if number > _LEAST and time.perf_counter() > end:
            break
        for name, run in runs.items():
            pair = run(number)
            if number:
                found[name].append(pair)
    return {
        name: [1e3 * statistics.median(t) for t in zip(*pairs, strict=True)]
        for name, pairs in found.items()
    }
