"""Which regions have run: an operator's `region` argument, counted when it is called.

A region's text is part of the generated code, so it also comes out of a warm compile cache, where no pass runs: see
NOTE [How a report survives the compile cache].
"""

import contextlib
import threading
from collections.abc import Iterator

seen_regions: dict[str, int] = {}
"""Calls of each named region in this process."""


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
    """The regions that this thread calls in a `with` block."""
    called: list[str] = []
    _watches.open.append(called)
    try:
        yield called
    finally:
        _watches.open.pop()
