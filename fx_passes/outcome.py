"""The configuration of the fusing pass and the result of every pass: plain frozen values.

Entry points: `FuseConfig` goes into `fuse`; each pass returns an `Outcome`, and `Outcome.then` adds those up.
Symbolic sizes are kept as text, because a report outlives its graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch.fx import Node

from fx_passes.graph.formulas import Formulas
from fx_passes.graph.user_lines import source_of

if TYPE_CHECKING:  # both import this file
    from fx_passes.inplace import Decision
    from fx_passes.returned_logits import Returned

Save = Literal["logits", "softmax"]


@dataclasses.dataclass(frozen=True)
class FuseConfig:
    """What the pass may assume and must keep.

    Attributes:
        formulas: the formulas of the fused operators.
        min_vocab: smallest last dimension treated as a vocabulary.
        save: the tensor read by backward, "logits" (recompute the exponentials) or "softmax" (keep and reuse the
            buffer).
        verify: run the region before and after on random data and refuse on a mismatch.
        merge_collectives: exchange the row values of a vocabulary-parallel loss by one all-gather.
    """

    formulas: Formulas
    min_vocab: int = 1024
    save: Save = "logits"
    verify: bool = False
    merge_collectives: bool = True


class CannotExchange(RuntimeError):
    """This rank alone cannot exchange the values that the others exchange: going on would hang all of them."""


@dataclasses.dataclass(frozen=True)
class Fused:
    """One fused value: its kind ("statistics", "gradient", "log-prob", "entropy or expected value", ...), its line of
    the user's code, its shape (symbolic sizes as text) and dtype.
    """

    kind: str
    source: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A refusal: the reason, the node, and the line of the user's code (`file:line` or "")."""

    reason: str
    node: str = ""
    source: str = ""

    @classmethod
    def at(cls, reason: str, node: Node | None) -> Rejection:
        return cls(reason) if node is None else cls(reason, str(node.target), source_of(node))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The effect of a pass on one graph. For `fuse`, `fused` is empty if and only if the graph is unchanged.

    Attributes:
        wide_before: full-vocabulary values apart from roots and gradients leaving the graph; `wide_after` likewise.
        stored: those in memory when the compiled graph runs (`stored.py`), and full logits of a matmul.
        saved_bytes_before: bytes of forward's full-vocabulary values read by backward; the compiler may save or
            recompute them. `saved_bytes_after` likewise.
        collectives_before: functional collectives of the graph; `collectives_after` likewise.
        chunked_heads: matmuls without full logits.
        rounded_to: the narrowest dtype to which the program, but not the rewrite, rounds full-vocabulary values; the
            notes give the lines.
        changed: number of the pass's edits.
        decisions: about gradients in place.
        returned: logits among the outputs.
        early: a loop over rows takes gradients in forward.
        one_chunk: no loop over rows was made because it would have one chunk.
        added_to: adds this to the outcome of the passes before, if that is no sum.
    """

    fused: tuple[Fused, ...] = ()
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
    rounded_to: torch.dtype | None = None
    changed: int = 0
    decisions: tuple[Decision, ...] = ()
    returned: Returned | None = None
    early: bool = False
    one_chunk: bool = False
    added_to: Callable[[Outcome], Outcome] | None = None

    def then(self, later: Outcome) -> Outcome:
        """The outcome of both passes, one after the other, on the same graph."""
        if later.added_to is not None:
            added, changed = later.added_to(self), self.changed + later.changed
            return dataclasses.replace(added, changed=changed, early=self.early or later.early)
        sums = {name: getattr(self, name) + getattr(later, name) for name in _SUMS}
        return Outcome(
            **{**sums, "saved_bytes_after": max(sums["saved_bytes_after"], 0)},
            rejections=self.rejections + later.rejections,
            rounded_to=later.rounded_to or self.rounded_to,
            returned=later.returned or self.returned,
            early=self.early or later.early,
            one_chunk=self.one_chunk or later.one_chunk,
        )


_SUMS = (
    "fused", "wide_before", "wide_after", "stored", "saved_bytes_before", "saved_bytes_after", "collectives_before",
    "collectives_after", "chunked_heads", "notes", "changed", "decisions",
)  # fmt: skip
