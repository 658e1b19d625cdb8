"""The graphs this process has compiled or loaded from torch's compile cache: one record per graph of Dynamo.

Entry points: `reports`, one by one; `summary`, in one.
"""

import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from slime_compile.dynamo.frames import (
    Frame,
    breaks_before,
    breaks_without_graph,
    function_of,
    harvest,
    process_frames,
)
from slime_compile.ops import eager_calls
from slime_compile.report.record import Record
from slime_compile.report.values import Report

_records: list[Record] = []
_lock = threading.Lock()


def keep(new: Record) -> Record:
    """Adds this graph to `reports`; it gets its number, the key of `record`."""
    harvest()
    with _lock:
        new.number = len(_records)
        new.time = time.time()
        _records.append(new)
    return new


def record(number: int) -> Record:
    return _records[number]


class Reports(list[Report]):
    """A list whose error explains why it is empty."""

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int) and not self:
            raise IndexError(
                "there is no report: this process has called no function compiled "
                'with torch.compile(backend="slime_fused")'
            )
        return super().__getitem__(at)


def reports() -> list[Report]:
    """The reports of all functions compiled by this process or loaded from torch's compile cache, oldest first.

    One report per graph, with its graph breaks. One report without graphs per frame running in Python (an exception
    while tracing, too many recompiles), and per graph break before a frame's first operator.
    """
    harvest()
    every = [
        *((each.time, each.name, _report(each)) for each in list(_records)),
        *((when, "", Report(python_frames=(f,))) for f, when in process_frames()),
        *(
            (when, f"{code} ({f.source.rpartition(':')[0]})", Report(breaks=(f,)))
            for f, (when, code) in breaks_without_graph().items()
        ),
    ]
    every.sort(key=lambda timed: timed[0])
    return Reports(_with_earlier_breaks((name, report) for _, name, report in every))


def _with_earlier_breaks(ordered: Iterable[tuple[str, Report]]) -> Iterator[Report]:
    """The parts of a function after a graph break have that break in their reports, too.

    Args:
        ordered: reports, each with Dynamo's name of its frame, "name (file)".
    """
    latest: dict[str, tuple[Frame, ...]] = {}
    for name, report in ordered:
        function = function_of(name)
        if function != name:
            breaks = tuple(dict.fromkeys((*latest.get(function, ()), *report.breaks)))
            report = dataclasses.replace(report, breaks=breaks)
        latest[function] = report.breaks
        yield report


def _report(each: Record) -> Report:
    return Report((each.result(),), breaks_before(each.compile_id, each.time, each.ended_by))


def summary() -> Report:
    """All of this process in one report: for a trainer's log, and `summary().assert_fused()` for its CI.

    Graphs without a vocabulary are counted and not listed.
    """
    every = reports()
    graphs = [graph for report in every for graph in report.graphs]
    shown = tuple(graph for graph in graphs if graph.about_a_vocabulary)
    return Report(
        graphs=shown,
        breaks=tuple(dict.fromkeys(frame for report in every for frame in report.breaks)),
        python_frames=tuple(
            dict.fromkeys(frame for report in every for frame in report.python_frames)
        ),
        other_graphs=len(graphs) - len(shown),
        eager_calls=tuple(eager_calls.items()),
    )
