"""A report as plain frozen values: `Report` holds `GraphReport`s, these hold what was fused, placed and refused.

A person reads `str(report)`, a program `report.to_dict()`; the text is made from the dict.
"""

import dataclasses
from typing import Any

from fx_passes.outcome import Rejection
from slime_compile.dynamo.frames import Frame
from slime_compile.report import text


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
    """One gradient: written over the logits, or the reason why not."""

    source: str
    in_place: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One graph. Bytes and shapes may be symbolic; `saved_bytes_*` are then those of the sizes it was traced with."""

    name: str
    training: bool = False
    operators: int = 0
    values: tuple[Value, ...] = ()
    placements: tuple[Placement, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    wide_before: int = 0
    wide_after: int = 0
    saved_bytes_before: int = 0
    saved_bytes_after: int = 0
    collectives_before: int = 0
    collectives_after: int = 0
    notes: tuple[str, ...] = ()
    has_vocabulary: bool = True
    cached: bool = False


SUMS = (
    "wide_before",
    "wide_after",
    "saved_bytes_before",
    "saved_bytes_after",
    "collectives_before",
    "collectives_after",
)


@dataclasses.dataclass(frozen=True)
class Report:
    """What the backend did to one function: its graphs, and what never became one.

    Attributes:
        graphs: one entry per graph, in the order of compilation.
        breaks: where Dynamo split the function.
        python_frames: frames that Dynamo left to Python, with the cause; none of their work is in a graph.
        notes: what a reader should know beyond that.
    """

    graphs: tuple[GraphReport, ...] = ()
    breaks: tuple[Frame, ...] = ()
    python_frames: tuple[Frame, ...] = ()
    notes: tuple[str, ...] = ()

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
            "graphs": [dataclasses.asdict(g) for g in self.graphs],
        }

    def assert_fused(self, min_fused: int = 1) -> None:
        """Raises AssertionError with the whole report if fewer operators were fused, or a frame ran in Python."""
        if self.fused < min_fused or self.python_frames:
            wanted = f"at least {min_fused} fused operators and no frame left to Python"
            raise AssertionError(f"expected {wanted}, got {self.fused}\n\n{self}")

    def __str__(self) -> str:
        return text.render(self.to_dict())
