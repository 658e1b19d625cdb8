"""Pieces of the logits that are written home: whether their rows meet, and which they are."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form
from tests.support.scratch import Scratch

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
