"""Which results of a program are whose memory: two may be one tensor, two parts of one, or each its own.

Entry points: `sharing` of what a call returned, `apart_from` for two calls of the same program. A result that is
changed in place changes those that have elements in common with it; those in one storage alone keep it alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Sharing = list[list[int]]
"""[results][results and inputs] -> 0: memory of their own; 1: one storage; 2: elements in common."""

APART, STORAGE, ELEMENTS = range(3)
WORDS = ("memory of their own", "one storage", "elements in common")


def sharing(results: Sequence[Tensor], given: Sequence[Tensor]) -> Sharing:
    return [[_shared(one, other) for other in (*results, *given)] for one in results]


def apart_from(eager: Sharing, got: Sharing, names: Sequence[str]) -> dict[tuple[str, ...], str]:
    """The pairs that share more, or less, than in eager code, and what to tell of them.

    Two results that are parts of one tensor there, and have no element in common, may be tensors of their own.
    """
    if len(eager) != len(got):
        return {}
    named = [*(f"result {at}" for at in range(len(eager))), *names]
    found: dict[tuple[str, ...], str] = {}
    for at, (right, ours) in enumerate(zip(eager, got, strict=True)):
        for to, (name, want, have) in enumerate(zip(named, right, ours, strict=True)):
            parts = to < len(eager) and (want, have) == (STORAGE, APART)
            if want != have and to != at and not parts:
                told = f"{named[at]} and {name} have {WORDS[have]}, in eager code {WORDS[want]}"
                found[named[at], name, "more" if have > want else "less"] = told
    return found


def _shared(one: Tensor, other: Tensor) -> int:
    memory = one.untyped_storage().data_ptr()
    if not memory or memory != other.untyped_storage().data_ptr():
        return APART
    return STORAGE if _places(one).isdisjoint(_places(other)) else ELEMENTS


def _places(tensor: Tensor) -> set[int]:
    """The addresses of its elements; two dtypes of one memory are not told apart."""
    at = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + torch.arange(size) * stride * tensor.element_size()
    return set(at.flatten().tolist())
