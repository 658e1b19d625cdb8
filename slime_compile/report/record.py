"""One graph's report during compilation: from the passes, or from torch's compile cache.

Entry points: `Record`, written by the backend and read by `process.reports`; `describe`, for a graph after `fuse`.

NOTE [How a report survives the compile cache]
On a hit in torch's compile cache no pass runs. So the report of a graph, as compact JSON, is the `region` argument of
its first fused operator. It is thereby part of the generated code, and the operator's first call delivers it. If
forward has no fused operator (backward recomputes all), the `identity` of Dynamo's graph is the link; if no operator
carries the report, a file does (`aside.py`). Quotes are written as in a URL, because inductor's C++ wrapper does not
escape text between quotes (torch 2.13). Lines belong to this process: a region stores, for each line, its node of
Dynamo's graph.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.fx import Graph

from fx_passes.graph.backward import is_joint
from fx_passes.graph.facts import hint, is_float_tensor, rank_of, shape_of
from fx_passes.graph.user_lines import frames
from fx_passes.outcome import Outcome, Rejection
from slime_compile import ops
from slime_compile.dynamo.frames import Frame
from slime_compile.ops.holders import UNCLEAR
from slime_compile.report import aside
from slime_compile.report.values import SUMS, GraphReport, Placement, Report, Value
from slime_compile.torch_private import trace_structured

log = logging.getLogger(__name__)


class Record:
    """The facts so far about one graph from Dynamo; written by the backend, read by `reports`.

    Attributes:
        name: the user's function and its file.
        identity: equal for the same graph and options in every process.
        held: inputs that must not be overwritten, and the reason.
        unkeyed: facts in the compiled code, but not in the key of torch's cache.
        lines: the user's line of each node of Dynamo's graph, or "".
        ended_by: the graph break after this graph.
        compile_id: torch's number of this compilation.
        has_vocabulary: a value of Dynamo's graph is as wide as one.
        grad_in_forward: forward takes a gradient with respect to an lm_head's operands.
        one_chunk: all rows of a loop over rows fit into one chunk, so there is none.
        training: a graph of it has a backward part.
        abandoned: the fused graph could not be compiled; the passes leave it alone.
        raised: the error that ended the compilation, or "".
        cached_as: the identities under which its code counts its calls.
    """

    def __init__(
        self,
        name: str,
        identity: str,
        held: dict[int, str],
        lines: Sequence[str] = (),
        ended_by: Frame | None = None,
        compile_id: str = "",
        has_vocabulary: bool = True,
        unkeyed: object = None,
    ):
        self.number = -1
        self.time = 0.0
        self.name = name
        self.identity = identity
        self.held = held
        self.unkeyed = unkeyed
        self.lines = tuple(lines)
        self.ended_by = ended_by
        self.compile_id = compile_id
        self.has_vocabulary = has_vocabulary
        self.grad_in_forward = False
        self.one_chunk = False
        self.training = False
        self.abandoned = False
        self.raised = ""
        self.called = False
        self.cached_as = {identity}
        self._parts: list[GraphReport] = []
        self._aside: dict[str, None] = {}
        self.placements: list[Placement] = []
        self._failures: list[str] = []
        self._notes: list[str] = []
        self._earlier = {
            place: ops.Placed(p.over, p.beside.copy()) for place, p in [*ops.placements.items()]
        }

    @property
    def traced(self) -> bool:
        """A pass saw the graph: it did not come from torch's compile cache."""
        return bool(self._parts or self._failures)

    @property
    def operators(self) -> int:
        return sum(part.operators for part in self._parts)

    @property
    def exchanges(self) -> bool:
        """Its graphs have collectives."""
        return any(part.collectives_before for part in self._parts)

    def abandon(self, cause: str) -> None:
        """The graph will be compiled unchanged; the passes' reports do not describe the running code."""
        self.abandoned = True
        self._parts, self.placements, self._aside = [], [], {}
        self.grad_in_forward = False
        self.fail(cause)

    def add(self, part: GraphReport) -> None:
        self._parts.append(part)

    def place(self, placements: Iterable[Placement]) -> None:
        self.placements = list(placements)

    def place_of(self, number: int) -> str:
        """The name under which gradient `number` counts its calls."""
        return _place(self.identity, number)

    def fail(self, cause: str) -> None:
        self._failures.append(cause)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def loaded(self, regions: Iterable[str]) -> None:
        """Code from torch's compile cache has run for the first time, and has called these regions."""
        self.cached_as.update(region["id"] for region in _parsed(regions))
        self._aside = dict.fromkeys(aside.kept(self.identity) if self.has_vocabulary else ())
        self.called = True

    def graph_region(self, part: GraphReport) -> str:
        """A graph's report as text in the generated code."""
        used = {v.source for v in part.values} | {r.source for r in part.rejections}
        at = {line: self.lines.index(line) for line in sorted(used) if line in self.lines}
        return self._region({"graph": dataclasses.asdict(part), "at": at})

    def keep_aside(self, region: str) -> None:
        """Keeps a region that no operator carries through torch's compile cache."""
        self._aside[region] = None

    def write_aside(self) -> None:
        """Writes the regions kept aside, for later processes."""
        if self._aside and self.has_vocabulary:
            aside.keep(self.identity, list(self._aside))

    def placements_region(self) -> str:
        """The same for gradients in place."""
        at = {
            p.source: self.lines.index(p.source) for p in self.placements if p.source in self.lines
        }
        return self._region({"in_place": [_compiled(p) for p in self.placements], "at": at})

    def _region(self, fields: dict[str, Any]) -> str:
        text = json.dumps({"id": self.identity, **fields}, separators=(",", ":"), sort_keys=True)
        return urllib.parse.quote(text, safe="{}[]:,/ ")

    def result(self) -> GraphReport:
        if self.raised:
            wide = self.has_vocabulary
            note = f"the compilation of this graph raised, and nothing of it runs: {self.raised}"
            return GraphReport(self.name, notes=(note,), has_vocabulary=wide, raised=True)
        if self.traced:
            parts = list(self._parts)
            if self._failures:
                wide = self.has_vocabulary
                parts.append(
                    GraphReport("", training=self.training, has_vocabulary=wide, failed=True)
                )
            placements = self._run(self.identity, self.placements)
            notes = [*self._notes, *self._failures, *_uncounted(placements)]
            return _merged(self.name, parts, placements, notes, cached=False)
        return self._from_cache()

    def _from_cache(self) -> GraphReport:
        seen = _parsed([*ops.seen_regions, *self._aside])
        mine = [self._moved(each) for each in seen if each["id"] in self.cached_as]
        parts = [_graph_from(each["graph"]) for each in mine if "graph" in each]
        placements = [
            p
            for each in mine
            for p in self._run(each["id"], [Placement(**p) for p in each.get("in_place", ())])
        ]
        if not self.called:
            note = "loaded from torch's compile cache and not called yet"
            return self._unknown(note)
        if not parts and self.has_vocabulary:
            note = "loaded from torch's compile cache, and the fused operators are unknown; slime_compile.explain shows them"
            return self._unknown(*self._notes, note)
        notes = list(self._notes)
        if not placements and any(_waits_for_placements(part) for part in parts):
            notes.append(
                "from torch's compile cache: in place or not is known after the first backward"
            )
        notes += _uncounted(placements)
        return _merged(self.name, parts, placements, notes, cached=True)

    def _unknown(self, *notes: str) -> GraphReport:
        wide = self.has_vocabulary
        return GraphReport(self.name, notes=notes, has_vocabulary=wide, cached=True, unknown=wide)

    def _run(self, identity: str, placements: Sequence[Placement]) -> list[Placement]:
        """With the decisions at run time since this record was made."""
        return [
            p.run(_since(ops.placements.get(place), self._earlier.get(place)))
            for place, p in ((_place(identity, i), p) for i, p in enumerate(placements))
        ]

    def _moved(self, region: dict[str, Any]) -> dict[str, Any]:
        """A region with the lines of this process."""
        here = {
            line: self.lines[number]
            for line, number in region["at"].items()
            if number < len(self.lines) and self.lines[number]
        }

        def moved(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
            return [
                {**each, "source": here.get(each["source"], each["source"])} for each in entries
            ]

        if "in_place" in region:
            return {**region, "in_place": moved(region["in_place"])}
        graph = region["graph"]
        lists = {name: moved(graph[name]) for name in ("values", "rejections")}
        return {**region, "graph": {**graph, **lists}}

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Notes an error of the compilation; it goes on to Dynamo."""
        try:
            yield
        except Exception as error:
            reason, *_ = str(error).strip().splitlines() or [""]
            self.raised = f"{type(error).__name__}: {reason}"
            self.publish()
            raise

    def publish(self) -> None:
        """To the log (TORCH_LOGS="slime_compile"), and as an artifact for tlparse; once code from a cache has run."""
        if not (self.traced or self.called or self.raised):
            return
        result = Report((self.result(),), breaks=tuple(filter(None, [self.ended_by])))
        log.info("%s", result)
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": "slime_fused_report", "encoding": "json"},
            payload_fn=lambda: json.dumps(result.to_dict()),
            expect_trace_id=False,  # loaded code reports at its first call
        )


def _place(identity: str, number: int) -> str:
    return f"{identity}/{number}"


def _compiled(placement: Placement) -> dict[str, Any]:
    """The facts about a gradient at compile time."""
    names = ("source", "in_place", "reason", "owner")
    return {name: getattr(placement, name) for name in names}


def _since(now: ops.Placed | None, earlier: ops.Placed | None) -> ops.Placed | None:
    """An equal graph compiled earlier counts under the same name, too."""
    if now is None or earlier is None:
        return now
    return ops.Placed(now.over - earlier.over, now.beside - earlier.beside, now.last)


def _uncounted(placements: Iterable[Placement]) -> list[str]:
    """One note, if counting gave no clear answer."""
    reasons = [p.reason for p in placements if UNCLEAR in p.reason]
    return [f"consume_logits='auto' overwrites nothing here: {reasons[0]}"] if reasons else []


def _parsed(regions: Iterable[str]) -> list[dict[str, Any]]:
    """Our regions. A caller of an operator by hand may choose any region."""
    return [_fields(region) for region in regions if region.startswith("{%22")]


@functools.cache
def _fields(region: str) -> dict[str, Any]:
    """Read-only: each report of a process reads all its regions again."""
    fields: dict[str, Any] = json.loads(urllib.parse.unquote(region))
    return fields


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
        failed=any(p.failed for p in parts),
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


def _waits_for_placements(part: GraphReport) -> bool:
    """A gradient of logits outside of chunks may overwrite them; backward's code tells."""
    return sum(v.kind == "gradient" for v in part.values) > part.chunked_heads


def describe(graph: Graph, outcome: Outcome, operators: int, min_vocab: int) -> GraphReport:
    """The report of a graph after `fuse`, with `operators` fused operators."""
    values = collections.Counter(
        (f.kind, f.source, f"[{', '.join(map(str, f.shape))}]", str(f.dtype).removeprefix("torch."))
        for f in outcome.fused
    )
    sums: dict[str, Any] = {name: int(getattr(outcome, name)) for name in SUMS}
    return GraphReport(
        **sums,
        name="",
        training=is_joint(graph),
        operators=operators,
        values=tuple(Value(*key, count) for key, count in values.items()),
        rejections=outcome.rejections,
        notes=outcome.notes,
        # without full logits, no value may be as wide
        has_vocabulary=outcome.chunked_heads > 0
        or any(is_wide(n.meta.get("val"), min_vocab) for n in graph.nodes),
    )


def is_wide(value: object, min_vocab: int) -> bool:
    """Floating, and its last dimension may be a vocabulary."""
    return is_float_tensor(value) and rank_of(value) > 0 and hint(shape_of(value)[-1]) >= min_vocab


def outermost_frame(stack_trace: str) -> str:
    """The compiled function and its file, or ""; without a line, because every edit above would move it."""
    found = frames(stack_trace)
    return f"{found[0][2]} ({found[0][0]})" if found else ""
