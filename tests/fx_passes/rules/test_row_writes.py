"""Pieces of the logits that are written home: whether their rows meet, and which they are."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form
from tests.support.scratch import DRAWS, Draw, Scratch

aten = torch.ops.aten
ROWS, VOCAB = 4, 5
Rows = tuple[int, int, int]


def home(s: Scratch, x: Node, rows: Rows) -> Node:
    """exp(x - r) of some rows in zeros, each time another r."""
    piece = s.call(aten.slice.Tensor, x, 0, *rows)
    shift = s.input("rows", (len(range(*rows)), 1))
    value = s.call(aten.exp.default, s.call(aten.sub.Tensor, piece, shift))
    zeros = s.call(aten.full.default, [ROWS, VOCAB], 0.0, dtype=s.dtype, device="cpu")
    return s.call(aten.slice_scatter.default, zeros, value, 0, *rows)


@pytest.mark.parametrize(
    ("left", "right", "terms"),
    [
        pytest.param((0, 2, 1), (2, 4, 1), 1, id="apart"),
        pytest.param((0, 3, 1), (1, 4, 1), 2, id="overlapping"),
        pytest.param((0, 4, 1), (1, 2, 1), 2, id="one within the other"),
        pytest.param((0, 4, 2), (1, 4, 2), 2, id="in steps, which may meet"),
        pytest.param((0, 2, 2), (2, 4, 2), 1, id="in steps, apart"),
    ],
)
def test_sum_of_pieces(left: Rows, right: Rows, terms: int) -> None:
    """One exponential where the pieces share no row, else one each; and it is their sum."""
    s = Scratch(torch.float64)
    x = s.input("logits", (ROWS, VOCAB))
    total = s.call(aten.add.Tensor, home(s, x, left), home(s, x, right))
    walked = s.walk(total, roots=[x])
    assert walked.check()
    form = walked.said(total)
    assert isinstance(form, Form)
    assert len(form.exps) == terms


def test_a_maximum_of_masked_rows_that_are_joined() -> None:
    """A row of nothing but -inf, of either piece, is -inf where the mask leaves it, and 0 elsewhere."""
    s = Scratch()
    x = s.input("logits", (2, 3, VOCAB))
    joined = s.call(
        aten.cat.default, [s.call(aten.slice.Tensor, x, 0, at, at + 1, 1) for at in range(2)], 0
    )
    zero = s.call(aten.full.default, [], 0.0, dtype=s.dtype, device="cpu")
    masked = s.call(aten.where.self, s.input("flags", (2, 3, 1), torch.bool), joined, zero)
    peak = s.call(aten.amax.default, masked, [-1], True)
    walked = s.walk(peak)
    assert peak in walked.walk.account.replacements
    assert walked.check([*DRAWS, *(Draw("absent", seed) for seed in range(8))], [peak])
