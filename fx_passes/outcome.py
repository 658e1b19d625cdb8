"""The configuration of the fusing pass and the answer of every pass: plain frozen values.

Entry points: `FuseConfig` goes into `fuse`; each pass answers an `Outcome`, and `Outcome.then` adds those up.
Symbolic sizes are kept as their text, so that a report can be made of it after the graph is gone.
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
        formulas: what the fused operators compute.
        min_vocab: smallest last dimension that is taken for a vocabulary.
        save: what backward reads, "logits" (recompute the exponentials) or "softmax" (keep and reuse the buffer).
        verify: run the region before and after on random data and refuse on a mismatch.
        merge_collectives: exchange the row values of a vocabulary-parallel loss by one all-gather.
    """

    formulas: Formulas
    min_vocab: int = 1024
    save: Save = "logits"
    verify: bool = False
    merge_collectives: bool = True


class CannotExchange(RuntimeError):
    """This rank alone cannot exchange what the others do: going on would hang all of them."""


@dataclasses.dataclass(frozen=True)
class Fused:
    """One fused value: what it is ("statistics", "gradient", "log-prob", "entropy or expected value", ...), where the
    user wrote it, its shape (symbolic sizes as text) and dtype.
    """

    kind: str
    source: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Something that was left as it was: why, at which node, at which line of the user's (`file:line` or "")."""

    reason: str
    node: str = ""
    source: str = ""

    @classmethod
    def at(cls, reason: str, node: Node | None) -> Rejection:
        return cls(reason) if node is None else cls(reason, str(node.target), source_of(node))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a pass did to one graph; of `fuse`, `fused` is empty exactly if the graph is unchanged.

    `wide_before` and `wide_after` count the full-vocabulary values apart from the roots and the gradients that leave;
    `stored` those that are in memory when the compiled graph runs (`stored.py`), and logits of a matmul that are whole;
    `saved_bytes_*` are the bytes of full-vocabulary values of forward that backward reads, which the compiler may save
    or compute again; `collectives_*` count the functional collectives of the graph; `chunked_heads` the matmuls whose
    logits are never whole; `rounded_to` is the narrowest dtype that the program rounds full-vocabulary values to and
    the rewrite does not (the notes tell where). `changed` counts a pass's edits; `gone` are targets and lines of nodes
    that an earlier pass may have refused and this one has removed; `decisions` are about gradients in place,
    `returned` about logits among the outputs. `early`: a loop over rows takes gradients in forward. `added_to` adds
    this to what came before, where that is no sum.
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
    gone: frozenset[tuple[str, str]] = frozenset()
    decisions: tuple[Decision, ...] = ()
    returned: Returned | None = None
    early: bool = False
    added_to: Callable[[Outcome], Outcome] | None = None

    def then(self, later: Outcome) -> Outcome:
        """What both have done, one pass after the other, to the same graph."""
        if later.added_to is not None:
            added, changed = later.added_to(self), self.changed + later.changed
            return dataclasses.replace(added, changed=changed, early=self.early or later.early)
        kept = [each for each in self.rejections if (each.node, each.source) not in later.gone]
        sums = {name: getattr(self, name) + getattr(later, name) for name in _SUMS}
        return Outcome(
            **{**sums, "saved_bytes_after": max(sums["saved_bytes_after"], 0)},
            rejections=(*kept, *later.rejections),
            gone=self.gone | later.gone,
            rounded_to=later.rounded_to or self.rounded_to,
            returned=later.returned or self.returned,
            early=self.early or later.early,
        )


_SUMS = (
    "fused", "wide_before", "wide_after", "stored", "saved_bytes_before", "saved_bytes_after", "collectives_before",
    "collectives_after", "chunked_heads", "notes", "changed", "decisions",
)  # fmt: skip
