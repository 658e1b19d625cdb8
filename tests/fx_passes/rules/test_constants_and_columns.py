"""Constants that are no numbers or of another dtype, columns of other logits: what a program hardly comes to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.scratch import DRAWS, VOCAB, Scratch

aten = torch.ops.aten
SHAPE = (3, VOCAB)


def test_multiples_of_nan_stay() -> None:
    s = Scratch()
    x = s.input("logits", SHAPE)
    spread = s.call(aten.full_like.default, x, math.nan)
    spread = s.call(aten.div.Tensor, spread, s.input("positive", (3, 1)))
    shifted = s.call(aten.sub.Tensor, spread, s.call(aten.amax.default, spread, [-1], True))
    e = s.call(aten.exp.default, shifted)
    softmax = s.call(aten.div.Tensor, e, s.call(aten.sum.dim_IntList, e, [-1], True))
    assert s.walk(softmax, roots=[x]).check()


def test_a_column_of_other_logits() -> None:
    """What is written over may be -inf, and does not cancel."""
    s = Scratch()
    x, z = s.input("logits", SHAPE), s.input("logits", SHAPE)
    hot = s.call(aten.eq.Tensor, s.iota(VOCAB), s.input("index", (3, 1), torch.int64))
    shifted = s.call(aten.sub.Tensor, z, s.call(aten.amax.default, z, [-1], True))
    mixed = s.call(aten.where.self, hot, shifted, x)
    assert s.walk(mixed, roots=[x, z]).check(DRAWS)


@pytest.mark.parametrize("rows", ["flags", "rows"])
def test_exponentials_of_constants_are_of_their_dtype(rows: str) -> None:
    """float64 where the mask, or the number per row, beside them is narrower."""
    s = Scratch(torch.float64)
    x = s.input("logits", SHAPE)
    wide = s.call(aten.full.default, [*SHAPE], 2.1, dtype=torch.float64, device="cpu")
    if rows == "flags":
        zero = s.call(aten.full.default, [], 0.0, dtype=torch.float64, device="cpu")
        wide = s.call(aten.where.self, s.input(rows, (3, 1), torch.bool), wide, zero)
    else:
        wide = s.call(aten.mul.Tensor, wide, s.input(rows, (3, 1), torch.float32))
    assert s.walk(s.call(aten.exp.default, wide), roots=[x]).check()


@pytest.mark.parametrize("asked", [(aten.gt.Scalar, 0.0), (aten.log.default,)], ids=str)
def test_negative_multiples_of_a_softmax(asked: Any) -> None:
    s = Scratch()
    x = s.input("logits", SHAPE)
    shifted = s.call(aten.sub.Tensor, x, s.call(aten.amax.default, x, [-1], True))
    negative = s.call(aten.neg.default, s.call(aten.exp.default, shifted))
    target, *args = asked
    assert s.walk(s.call(target, negative, *args), roots=[x]).check()
