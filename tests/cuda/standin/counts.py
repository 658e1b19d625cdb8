"""What the runtime and the driver were asked for: `counts`, since the last `reset`."""

import ctypes
import os
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Counts:
    """The fields of `Counters` in driver/device.h, in their order.

    Attributes:
        mallocs, frees, bytes, peak: of the device's memory, by the driver; torch's caching allocator asks rarely.
        stream_syncs, device_syncs, event_syncs: waits of the host for the device.
        h2d, d2h, d2d: copies by the runtime.
        runtime_launches: torch's own kernels. None of them runs, so there should be none.
        driver_launches: Triton's kernels, where they are not interpreted.
        captures, graph_launches: CUDA graphs.
        illegal: calls that a capture or a launch forbids.
        memsets: by the runtime.
    """

    mallocs: int
    frees: int
    bytes: int
    peak: int
    stream_syncs: int
    device_syncs: int
    event_syncs: int
    h2d: int
    d2h: int
    d2d: int
    runtime_launches: int
    driver_launches: int
    captures: int
    graph_launches: int
    illegal: int
    memsets: int

    @property
    def waits(self) -> int:
        return self.stream_syncs + self.device_syncs + self.event_syncs

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value)


class _Counters(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_longlong) for field in fields(Counts)]


def library() -> ctypes.CDLL:
    """The library that this process runs on."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def counts() -> Counts:
    found = _Counters()
    library().standin_counters(ctypes.byref(found))
    return Counts(*(getattr(found, field.name) for field in fields(Counts)))


def reset() -> None:
    """The bytes that are held stay, and are the peak."""
    library().standin_reset()


ran: dict[str, int] = {}
"""How often each ATen operator and each interpreted kernel was called in this process."""

not_run: dict[str, int] = {}
"""Kernels of torch's own that were launched; nothing computed their values."""


def count(name: str) -> None:
    ran[name] = ran.get(name, 0) + 1
