"""What the fusing pass is told and what it answers: plain frozen values, no graph objects.

Entry points: `FuseConfig` goes into `fuse`, `Outcome` comes out. Nothing here knows torch's graphs, so an
`Outcome` can be kept, compared and written as JSON after the graph is gone. Symbolic sizes are kept as their text.
"""

import dataclasses
from typing import Literal

import torch

Save = Literal["logits", "softmax"]


@dataclasses.dataclass(frozen=True)
class FuseConfig:
    """What the pass may assume and must keep.

    Attributes:
        min_vocab: smallest last dimension that is taken for a vocabulary.
        save: what backward reads, "logits" (recompute the exponentials) or "softmax" (keep and reuse the buffer).
        verify: run the region before and after on random data and refuse on a mismatch.
        merge_collectives: exchange the row values of a vocabulary-parallel loss by one all-gather.
    """

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
    node: str
    source: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What `fuse` did to one graph; `fused` is empty exactly if the graph is unchanged.

    `wide_before` and `wide_after` count the full-vocabulary values apart from the roots and the gradients that leave;
    `stored` those that are in memory when the compiled graph runs (`stored.py`), and logits of a matmul that are whole;
    `saved_bytes_*` are the bytes of full-vocabulary values of forward that backward reads, which the compiler may save
    or compute again; `collectives_*` count the functional collectives of the graph; `chunked_heads` the matmuls whose
    logits are never whole; `rounded_to` is the narrowest dtype that the program rounds full-vocabulary values to and
    the rewrite does not (the notes tell where).
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
