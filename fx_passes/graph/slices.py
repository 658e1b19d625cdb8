"""The extent of a slice, for every way to write its bounds: `bounds` and `takes_all`."""

from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.facts import Size, same

END = 9223372036854775807
"""Torch's spelling of a slice without an upper bound."""

Bound = int | Node | torch.SymInt | None


def bounds(size: Size, start: Bound, stop: Bound) -> tuple[Any, Any]:
    """Slice bounds in one spelling: numbers within the size if the size is a number, END for no upper bound."""
    start = 0 if start is None else start
    stop = END if stop is None else stop
    if not isinstance(size, int):
        return start, END if same(stop, size) else stop
    if isinstance(start, int):
        start = min(max(start + size if start < 0 else start, 0), size)
    if isinstance(stop, int):
        stop = min(max(stop + size if stop < 0 else stop, 0), size)
    return start, stop


def takes_all(size: Size, start: Bound, stop: Bound, step: object) -> bool:
    start, stop = bounds(size, start, stop)
    return bool(step == 1 and start == 0 and (stop == END or same(stop, size)))
