"""One graph's report while it is compiled: what the passes tell, and what comes back from torch's compile cache.

Entry points: `Record`, written by the backend and read by `process.reports`; `describe`, a graph that `fuse` has seen.

NOTE [How a report survives the compile cache]
On a hit in torch's compile cache no pass runs. So the report of a graph, as compact JSON, is the `region` argument of
its first fused operator, is thereby part of the generated code, and comes back in `ops.seen_regions` when the operator
is first called. `identity` ties it to the graph that Dynamo asked us to compile. Lines are those of the day of
compiling.
"""

import collections
import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.user_lines import frames
from fx_passes.outcome import Outcome, Rejection
from slime_compile import ops
from slime_compile.report.values import SUMS, GraphReport, Placement, Report, Value
from slime_compile.torch_private import TangentAOTInput, trace_structured

log = logging.getLogger(__name__)


class Record:
    """What is known so far about one graph that Dynamo asked for; written by the backend, read by `reports`."""

    def __init__(self, name: str, identity: str, held: dict[int, str]):
        self.number = -1
        self.time = 0.0
        self.name = name
        self.identity = identity
        self.held = held
        self.called = False
        self._parts: list[GraphReport] = []
        self._placements: list[Placement] = []
        self._failures: list[str] = []
        self._notes: list[str] = []

    @property
    def traced(self) -> bool:
        """A pass saw the graph: it did not come from torch's compile cache."""
        return bool(self._parts or self._failures)

    def add(self, part: GraphReport) -> None:
        self._parts.append(part)
        self._publish()

    def place(self, placements: Iterable[Placement]) -> None:
        self._placements = list(placements)

    def fail(self, cause: str) -> None:
        self._failures.append(cause)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def graph_region(self, part: GraphReport) -> str:
        """A graph's report as the text that travels in the generated code."""
        return self._region({"graph": dataclasses.asdict(part)})

    def placements_region(self) -> str:
        """The same for what is in place."""
        return self._region({"in_place": [dataclasses.asdict(p) for p in self._placements]})

    def _region(self, fields: dict[str, Any]) -> str:
        return json.dumps({"id": self.identity, **fields}, separators=(",", ":"), sort_keys=True)

    def result(self) -> GraphReport:
        if self.traced:
            parts = self._parts or [GraphReport("")]
            notes = [*self._notes, *self._failures]
            return _merged(self.name, parts, self._placements, notes, cached=False)
        return self._from_cache()

    def _from_cache(self) -> GraphReport:
        seen = [json.loads(region) for region in list(ops.seen_regions)]
        mine = [each for each in seen if each["id"] == self.identity]
        parts = [_graph_from(each["graph"]) for each in mine if "graph" in each]
        placements = [Placement(**p) for each in mine for p in each.get("in_place", ())]
        if parts:
            return _merged(self.name, parts, placements, (), cached=True)
        note = (
            "loaded from torch's compile cache with nothing fused; slime_compile.explain says why"
            if self.called
            else "loaded from torch's compile cache and not called yet"
        )
        return GraphReport(self.name, notes=(note,), cached=True)

    def _publish(self) -> None:
        result = self.result()
        log.info("%s", Report((result,)))
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "slime_fused_report", "encoding": "json"},
            payload_fn=lambda: json.dumps(Report((result,)).to_dict()),
        )


def _merged(
    name: str,
    parts: Sequence[GraphReport],
    placements: Sequence[Placement],
    notes: Sequence[str],
    cached: bool,
) -> GraphReport:
    """One report of a graph and those nested in it."""
    sums: dict[str, Any] = {name: sum(getattr(p, name) for p in parts) for name in SUMS}
    return GraphReport(
        **sums,
        name=name,
        training=any(p.training for p in parts),
        operators=sum(p.operators for p in parts),
        values=tuple(v for p in parts for v in p.values),
        placements=tuple(placements),
        rejections=tuple(r for p in parts for r in p.rejections),
        notes=(*(n for p in parts for n in p.notes), *notes),
        has_vocabulary=any(p.has_vocabulary for p in parts),
        cached=cached,
    )


def _graph_from(fields: dict[str, Any]) -> GraphReport:
    return GraphReport(
        **{
            **fields,
            "values": tuple(Value(**v) for v in fields["values"]),
            "placements": (),
            "rejections": tuple(Rejection(**r) for r in fields["rejections"]),
            "notes": tuple(fields["notes"]),
        }
    )


def describe(graph: Graph, outcome: Outcome, operators: int, min_vocab: int) -> GraphReport:
    """The report of a graph that `fuse` has seen; `operators` fused operators are in it now."""
    values = collections.Counter(
        (f.kind, f.source, f"[{', '.join(map(str, f.shape))}]", str(f.dtype).removeprefix("torch."))
        for f in outcome.fused
    )
    sums: dict[str, Any] = {name: int(getattr(outcome, name)) for name in SUMS}
    return GraphReport(
        **sums,
        name="",
        training=any(_is_tangent(n) for n in graph.find_nodes(op="placeholder")),
        operators=operators,
        values=tuple(Value(*key, count) for key, count in values.items()),
        rejections=outcome.rejections,
        notes=outcome.notes,
        has_vocabulary=any(_is_wide(n, min_vocab) for n in graph.nodes),
    )


def _is_tangent(node: Node) -> bool:
    desc: Any = node.meta.get("desc")
    while hasattr(desc, "base"):  # a part of a DTensor
        desc = desc.base
    return isinstance(desc, TangentAOTInput)


def _is_wide(node: Node, min_vocab: int) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or not value.dim():
        return False
    width: Any = value.shape[-1]
    if isinstance(width, torch.SymInt):  # by its hint, as `fuse` does
        width = width.node.hint if width.node.has_hint() else 0
    return int(width) >= min_vocab


def outermost_frame(stack_trace: str) -> str:
    """The compiled function and its file, without a line, which would move with every edit above it."""
    found = frames(stack_trace)
    return f"{found[0][2]} ({found[0][0]})" if found else "a graph without user code"
