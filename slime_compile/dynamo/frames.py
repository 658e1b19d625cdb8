"""Dynamo's frames: graph breaks, and frames running in Python.

Entry points: `process_frames` and `breaks_without_graph` (this process so far), `Watch` (during one call),
`graph_break` and `breaks_before` (one graph), `function_of`. A frame abandoned by Dynamo has no graph, no graph break
and only a log line; torch's own record per compiled frame still has it, for the last 64 frames. Frames of torch's own
files (a hook of FSDP's) do not count.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from slime_compile.dynamo.remedies import remedy
from slime_compile.torch_private import CompileContext, dynamo_utils


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place where Dynamo stopped tracing: a graph break, or a complete frame running in Python."""

    name: str
    source: str
    reason: str

    @classmethod
    def found(cls, name: str, source: str, reason: str) -> "Frame":
        """With its remedy, if there is one."""
        return cls(name, source, "; ".join(filter(None, (reason, remedy(f"{reason} {source}")))))


_SOFT_FAILURES = ("Unsupported", "UserError", "SkipFrame", "RecompileLimitExceeded")
"""Failures after which Dynamo runs the frame as plain Python; the others are raised."""

_REPEATED = re.compile(
    r"^<class '.*\.(Tensorify|Unspecialize|CompileCollective)\w*RestartAnalysis'>$"
)
"""Reasons for tracing a frame anew other than graph breaks: numbers that become tensors, sizes that vary."""

_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_(\d+)(?=$| \()")
_TORCH = str(Path(torch.__file__).parent)

_seen: dict[tuple[Frame, float], None] = {}
_without_graph: dict[Frame, tuple[float, str]] = {}
_restarts_of: dict[str, dict[tuple[float, float], tuple[Frame, ...]]] = {}
"""By compilation, then its beginning and its end: after `torch._dynamo.reset` their numbers begin anew."""


def harvest() -> None:
    """Copies torch's records, before torch drops them."""
    metrics = dynamo_utils.get_compilation_metrics()
    _seen.update(dict.fromkeys(_left_to_python(metrics)))
    for each in metrics:
        if each.compile_id and each.restart_reasons:
            during = ((each.start_time_us or 0) / 1e6, _ended(each))
            restarts = tuple(_restarts(each))
            _restarts_of.setdefault(each.compile_id, {})[during] = restarts
            if not each.graph_op_count and not each.fail_type and not _is_torchs(each.co_filename):
                for frame in restarts:
                    _without_graph.setdefault(frame, (_ended(each), each.co_name or "a frame"))


def process_frames() -> list[tuple[Frame, float]]:
    """Frames of this process running in Python, for any backend, and the time (`time.time()`).

    A frame abandoned again after `torch._dynamo.reset` is listed again.
    """
    harvest()
    return list(_seen)


def breaks_without_graph() -> dict[Frame, tuple[float, str]]:
    """Graph breaks before a frame's first operator, whatever backend they were meant for, when (`time.time()`), and
    Dynamo's name of the frame.
    """
    harvest()
    return dict(_without_graph)


def compile_id() -> str:
    """The current compilation of this thread, by its name in torch's records, or ""."""
    found = CompileContext.current_compile_id()
    return "" if found is None else str(found)


def graph_break(gm: GraphModule) -> Frame | None:
    """The graph break at the end of a graph of Dynamo's; None at the end of its function."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    place = reason.user_stack[-1] if reason.user_stack else None
    return Frame.found(
        function_of(place.name) if place else "a frame",
        f"{place.filename}:{place.lineno}" if place else "",
        summary(str(reason.reason)),
    )


def breaks_before(compilation: str, during: float, at_end: Frame | None) -> tuple[Frame, ...]:
    """The graph breaks of the compilation running at a time (`time.time()`): that of its graph, and its restarts."""
    found = (
        restarts
        for (began, ended), restarts in list(_restarts_of.get(compilation, {}).items())
        if began <= during <= ended
    )
    return with_restarts([at_end] if at_end else [], next(found, ()))


def with_restarts(breaks: Sequence[Frame], restarts: Sequence[Frame]) -> tuple[Frame, ...]:
    """Graph breaks at the end of a graph, with their line, and those for which Dynamo only started anew."""
    told = {(f.name, f.reason) for f in breaks}
    return tuple(dict.fromkeys([*breaks, *(f for f in restarts if (f.name, f.reason) not in told)]))


class Watch:
    """Frames and graph breaks during a `with` block; torch's counters are then as they were before."""

    def __enter__(self) -> "Watch":
        process_frames()
        self._before = {id(m) for m in dynamo_utils.get_compilation_metrics()}
        self._kept = list(dynamo_utils.get_compilation_metrics())
        self._counters = {name: counter.copy() for name, counter in dynamo_utils.counters.items()}
        self.python_frames: tuple[Frame, ...] = ()
        self.breaks: tuple[Frame, ...] = ()
        return self

    def __exit__(self, *_: object) -> None:
        new = [m for m in dynamo_utils.get_compilation_metrics() if id(m) not in self._before]
        self.python_frames = tuple(dict.fromkeys(frame for frame, _ in _left_to_python(new)))
        self.breaks = tuple(f for m in new for f in _restarts(m))
        dynamo_utils.counters.clear()
        dynamo_utils.counters.update(self._counters)
        dynamo_utils.clear_compilation_metrics()
        dynamo_utils._compilation_metrics.extend(self._kept)


def function_of(frame: str) -> str:
    """The user's function, if Dynamo named the frame after its rest behind a graph break.

    Args:
        frame: "name", or "name (file)".
    """
    return _RESUMED.sub(r"\1", frame)


def summary(reason: str) -> str:
    """One of Dynamo's long explanations in a line: the event, and its explanation if there is one."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines if "Explanation: " in line]
    return ": ".join([*lines[:1], *explained[:1]]) or "no reason given"


def _left_to_python(metrics: Iterable[Any]) -> list[tuple[Frame, float]]:
    found: list[tuple[Frame, float]] = []
    names: dict[str, tuple[str, str]] = {}
    for each in metrics:
        code = _frame_number(each.compile_id)
        if each.co_name:
            start = _place(each.co_filename, each.co_firstlineno)
            names[code] = (_RESUMED.sub(r"\1 from line \2 on", each.co_name), start)
        if each.fail_type in _SOFT_FAILURES:
            name, start = names.get(code, ("a frame", "unknown place"))
            if _is_torchs(start):
                continue
            failed = _place(each.fail_user_frame_filename, each.fail_user_frame_lineno)
            reason = _why(each.fail_reason or each.fail_type)
            frame = Frame.found(name, failed or start, reason)
            found.append((frame, _ended(each)))
    return found


def _is_torchs(place: str | None) -> bool:
    return (place or "").startswith(_TORCH)


def _why(reason: str) -> str:
    """Too many recompiles is the only failure after which earlier graphs stay in use."""
    limit = re.search(r"exceeding the (\w+)", reason)
    if limit is None:
        return summary(reason)
    return f"too many recompiles ({limit[1]}): sizes beyond those compiled run as eager code"


def _restarts(metrics: Any) -> list[Frame]:
    """Graph breaks for which Dynamo traced a frame anew; torch keeps their reason, not their line."""
    place = _place(metrics.co_filename, metrics.co_firstlineno)
    name = function_of(metrics.co_name or "a frame")
    reasons = [each for each in metrics.restart_reasons or () if not _REPEATED.match(each)]
    return [Frame.found(name, place, summary(each)) for each in reasons]


def _ended(metrics: Any) -> float:
    return (metrics.end_time_us or 0) / 1e6


def _frame_number(compile_id: str | None) -> str:
    """`12/3` is the fourth compilation of frame 12."""
    return (compile_id or "").split("/")[0]


def _place(file: str | None, line: int | None) -> str:
    return f"{file}:{line}" if file else ""
