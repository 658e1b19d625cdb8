"""What this process has compiled or loaded from torch's compile cache: one record per graph that Dynamo asked for."""

import threading
import time

from slime_compile.dynamo.frames import process_frames
from slime_compile.report.record import Record
from slime_compile.report.values import Report

_records: list[Record] = []
_lock = threading.Lock()


def keep(new: Record) -> Record:
    """From now on `reports` tells of this graph; it gets the number by which `record` finds it."""
    with _lock:
        new.number = len(_records)
        new.time = time.time()
        _records.append(new)
    return new


def record(number: int) -> Record:
    return _records[number]


def reports() -> list[Report]:
    """What this process has compiled or loaded from torch's compile cache, oldest first.

    One report per graph, and one without graphs per frame that Dynamo left to Python (an exception while tracing, too
    many recompiles), which runs as plain eager code.
    """
    graphs = [(each.time, Report((each.result(),))) for each in _records]
    lost = [(when, Report(python_frames=(frame,))) for frame, when in process_frames().items()]
    return [report for _, report in sorted([*graphs, *lost], key=lambda timed: timed[0])]
