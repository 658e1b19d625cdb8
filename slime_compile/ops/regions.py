"""Regions with at least one run: an operator's `region` argument, counted at each call.

A region's text is part of the generated code, so it also comes out of a warm compile cache, when no pass runs: see
NOTE [How a report survives the compile cache].
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import torch

seen_regions: dict[str, int] = {}
"""Calls of each named region in this process."""


eager_calls: dict[str, int] = {}
"""Calls of this package's functions for eager code in this process; in compiled code they are part of a graph."""


def called_eagerly(name: str) -> None:
    if not torch.compiler.is_compiling():
        eager_calls[name] = eager_calls.get(name, 0) + 1


@dataclasses.dataclass
class Placed:
    """The decisions of one gradient's calls.

    Attributes:
        over: calls that overwrote the logits.
        beside: the others, by their reason.
        last: the reason of the latest of those calls; with a variable only if that call looked for one.
    """

    over: int = 0
    beside: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    last: str = ""

    @property
    def calls(self) -> int:
        return self.over + self.beside.total()


placements: dict[str, Placed] = {}
"""Decisions at run time, by the gradient's place: its report's id and its number there."""


under_hooks: set[str] = set()
"""Reports' ids of graphs with consume_logits=True that have run under hooks for autograd's saved tensors."""


def was_under_hooks(place: str) -> bool:
    return place.partition("/")[0] in under_hooks


def placed(place: str, reason: str, worded: Callable[[], str]) -> None:
    """One decision of a gradient: it overwrites the logits, or the reason against it.

    Args:
        worded: returns the reason for the report; called at calls 1, 2, 4, 8, ... with that reason.
    """
    if not place:
        return
    here = placements.setdefault(place, Placed())
    if not reason:
        here.over += 1
        return
    here.beside[reason] += 1
    looks = here.beside[reason].bit_count() == 1  # seldom: it takes long
    here.last = worded() if looks else reason  # another call's variable may reference other logits


class _Watches(threading.local):
    def __init__(self) -> None:
        self.open: list[list[str]] = []


_watches = _Watches()


def on_call(region: str) -> None:
    """Counts one call of `region`; the empty string is no region."""
    if region:
        seen_regions[region] = seen_regions.get(region, 0) + 1
        for watch in _watches.open:
            watch.append(region)


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """The regions called by this thread in a `with` block."""
    called: list[str] = []
    _watches.open.append(called)
    try:
        yield called
    finally:
        _watches.open.pop()
