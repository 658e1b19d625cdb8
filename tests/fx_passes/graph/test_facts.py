"""Sizes that data alone says, as the numbers that decide whether a view shows them."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fx_passes.graph.emit import viewable
from fx_passes.graph.facts import numbers


def test_an_unknown_size_is_the_same_number_everywhere() -> None:
    environment = ShapeEnv()
    unknown, other = (environment.create_unbacked_symint() for _ in range(2))
    size, six, both, again, fixed = numbers([unknown, 6 * unknown, unknown * other, other, 4])
    assert six == 6 * size
    assert both == size * again
    assert size != again
    assert min(size, again) > 1 << 30
    assert fixed == 4


def test_rows_of_which_data_says_how_many() -> None:
    environment = ShapeEnv()
    rows = environment.create_unbacked_symint()
    with FakeTensorMode(shape_env=environment):
        given = torch.empty(rows, 6, 32)
    assert viewable(given, [6 * rows, 32])
    assert viewable(given, [rows, 2, 3, 32])
    assert not viewable(given[:, 1:], [5 * rows, 32])
    assert not viewable(given.transpose(0, 1), [6 * rows, 32])
    assert viewable(given.transpose(0, 1), [6, rows, 4, 8])
