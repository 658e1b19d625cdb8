"""A report as plain frozen values: a `Report` has `GraphReport`s with fused values, placements and refusals.

A person reads `str(report)` or `report.save("report.html")`, a program `report.to_dict()`; all are made from the dict.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fx_passes.outcome import Rejection
from slime_compile.dynamo.frames import Frame
from slime_compile.ops.regions import Placed
from slime_compile.report import page, terminal, text


@dataclasses.dataclass(frozen=True)
class Value:
    """Values of one kind, fused at one line: `count` of them."""

    kind: str
    source: str
    shape: str
    dtype: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """One gradient: does it reuse the logits' buffer?

    Attributes:
        in_place: True or False if known. None if each call decides: before the first call, or after mixed results.
        reason: the latest reason against it.
        owner: "" if the compiler decides. Otherwise the owner of the logits: "graph" and "caller" reuse the buffer
            unless the graph is retained, "anyone" if nothing else references the logits.
        calls: calls of the gradient in this process, if calls decide.
        over: calls with a reused buffer.
    """

    source: str
    in_place: bool | None
    reason: str
    owner: str = ""
    calls: int = 0
    over: int = 0

    def run(self, placed: Placed | None) -> "Placement":
        """With the decisions of its calls."""
        if not self.owner:
            return self
        if placed is None or not placed.calls:
            return dataclasses.replace(self, in_place=None if self.owner == "anyone" else True)
        mixed = True if self.owner != "anyone" else None
        return dataclasses.replace(
            self,
            in_place={placed.calls: True, 0: False}.get(placed.over, mixed),
            reason=placed.last if placed.over < placed.calls else "",
            calls=placed.calls,
            over=placed.over,
        )


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One graph. Bytes and shapes may be symbolic; `saved_bytes_*` are then those of the sizes during tracing.

    `unknown`: from torch's compile cache, without any report. `raised`: its compilation ended with an error, and Dynamo
    runs the code in Python, or in other graphs.
    """

    name: str
    training: bool = False
    operators: int = 0
    values: tuple[Value, ...] = ()
    placements: tuple[Placement, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    wide_before: int = 0
    wide_after: int = 0
    stored: int = 0
    saved_bytes_before: int = 0
    saved_bytes_after: int = 0
    collectives_before: int = 0
    collectives_after: int = 0
    chunked_heads: int = 0
    notes: tuple[str, ...] = ()
    has_vocabulary: bool = True
    cached: bool = False
    failed: bool = False
    unknown: bool = False
    raised: bool = False

    @property
    def about_a_vocabulary(self) -> bool:
        """Something was fused, refused, or not even tried; many graphs are wide without a softmax over a vocabulary."""
        refused = self.has_vocabulary and self.rejections
        raised = self.has_vocabulary and self.raised
        return bool(self.operators or self.failed or refused or self.unknown or raised)

    @property
    def full_vocabulary_left(self) -> int:
        """Full-vocabulary values stored by the graph; without any fused operator, the number of refusals."""
        if self.operators:
            return self.stored
        return len(self.rejections) if self.has_vocabulary else 0


SUMS = (
    "wide_before",
    "wide_after",
    "stored",
    "saved_bytes_before",
    "saved_bytes_after",
    "collectives_before",
    "collectives_after",
    "chunked_heads",
)


@dataclasses.dataclass(frozen=True)
class Report:
    """One function under the backend: its graphs, graph breaks, and frames running in Python.

    Attributes:
        graphs: one entry per graph, in the order of compilation.
        breaks: graph breaks, with line and reason.
        python_frames: frames Dynamo did not compile, with the reason.
        notes: remarks.
        other_graphs: number of graphs without a vocabulary, left out of `graphs` by a summary.
        eager_calls: calls of our eager functions (`log_probs_and_entropy`, ...), by name; only in a summary.
    """

    graphs: tuple[GraphReport, ...] = ()
    breaks: tuple[Frame, ...] = ()
    python_frames: tuple[Frame, ...] = ()
    notes: tuple[str, ...] = ()
    other_graphs: int = 0
    eager_calls: tuple[tuple[str, int], ...] = ()

    @property
    def fused(self) -> int:
        """Number of fused operators in all graphs."""
        return sum(g.operators for g in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are stable, sums are over all graphs."""
        return {
            "fused": self.fused,
            **{name: sum(getattr(g, name) for g in self.graphs) for name in SUMS},
            "rejections": [dataclasses.asdict(r) for g in self.graphs for r in g.rejections],
            "in_place": [dataclasses.asdict(p) for g in self.graphs for p in g.placements],
            "breaks": [dataclasses.asdict(f) for f in self.breaks],
            "python_frames": [dataclasses.asdict(f) for f in self.python_frames],
            "notes": list(self.notes),
            "other_graphs": self.other_graphs,
            "eager_calls": dict(self.eager_calls),
            "graphs": [dataclasses.asdict(g) for g in self.graphs],
        }

    def assert_fused(
        self,
        min_fused: int = 1,
        *,
        max_full_vocabulary: int = 0,
        in_place: bool | None = None,
        graph_breaks: int = 0,
    ) -> None:
        """For CI: fails unless the loss is fused, in one graph, and stores no vocabulary-sized tensor beside results.

        Args:
            min_fused: fewest fused operators in all graphs; a function called by eager code counts as one.
            max_full_vocabulary: most stored full-vocabulary values. The logits, one gradient of them and the
                function's results do not count. Exception: materialised logits of a matmul count if they are larger
                than one chunk. A refused graph counts its refusals.
            in_place: must every gradient reuse the logits' buffer, in every call so far? None: not checked.
            graph_breaks: most graph breaks.

        Raises:
            AssertionError: a requirement is not met; the message has the whole report. A frame running in Python and
                a failed pass always raise.

        Examples:
            >>> slime_compile.explain(loss_fn)(hidden, weight, tokens).assert_fused(in_place=True)
        """
        problems = list(self._problems(min_fused, max_full_vocabulary, in_place, graph_breaks))
        if problems:
            raise AssertionError(f"expected {'; '.join(problems)}\n\n{self}")

    def _problems(
        self, min_fused: int, max_full_vocabulary: int, in_place: bool | None, graph_breaks: int
    ) -> Iterator[str]:
        if self.fused + len(self.eager_calls) < min_fused:
            yield f"at least {text.counted(min_fused, 'fused operator')}, got {self.fused}"
        left = sum(g.full_vocabulary_left for g in self.graphs)
        if left > max_full_vocabulary:
            yield f"at most {text.counted(max_full_vocabulary, 'full-vocabulary value')} stored, got {left}"
        if unknown := sum(g.unknown for g in self.graphs):
            yield f"no unknown graph from torch's compile cache, got {unknown}"
        if len(self.breaks) > graph_breaks:
            yield f"at most {text.counted(graph_breaks, 'graph break')}, got {len(self.breaks)}"
        if self.python_frames:
            yield f"no frame running in Python, got {len(self.python_frames)}"
        yield from self._failures()
        if in_place is not None:
            placed = [p.in_place for g in self.graphs for p in g.placements]
            if not placed and not any(g.chunked_heads for g in self.graphs):
                yield "a gradient, got none" + (
                    " before the first backward" if any(g.cached for g in self.graphs) else ""
                )
            elif any(each is not in_place for each in placed):
                where = "the logits'" if in_place else "its own"
                open_ = placed.count(None)
                yield (
                    f"every gradient in {where} buffer, got {placed.count(in_place)} of {len(placed)}"
                    + (
                        f" ({open_} decided at each call, consume_logits={in_place} decides now)"
                        if open_
                        else ""
                    )
                )

    def _failures(self) -> Iterator[str]:
        if failed := sum(g.failed for g in self.graphs):
            yield f"no failed pass, got {failed}"
        if raised := sum(g.raised and g.has_vocabulary for g in self.graphs):
            yield f"no uncompiled graph, got {raised}"

    def save(self, path: str | Path) -> None:
        """Writes the report as one HTML file, which loads nothing from elsewhere.

        Examples:
            >>> slime_compile.summary().save("report.html")
        """
        Path(path).write_text(page.document(self.to_dict()), encoding="utf-8")

    def __str__(self) -> str:
        return text.render(self.to_dict())

    def __repr__(self) -> str:
        return f"<Report: {text.headline(self.to_dict())}; print it for the tables>"

    def __rich__(self) -> Any:
        return terminal.renderable(self.to_dict())

    def _repr_html_(self) -> str:
        """The report at the end of a notebook's cell."""
        return page.fragment(self.to_dict())
