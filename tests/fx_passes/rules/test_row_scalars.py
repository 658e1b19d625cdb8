"""Numbers per row that are cut in pieces and joined again: the whole, if it is all the pieces, in order, made alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from tests.support.scratch import VOCAB, Scratch

aten = torch.ops.aten
ROWS = 4

Pieces = Callable[[Scratch, Node], list[Node]]


def rows(s: Scratch, x: Node) -> list[Node]:
    taken = [s.call(aten.select.int, x, 0, k) for k in range(ROWS)]
    return [s.call(aten.amax.default, row, [-1], True) for row in taken]


def chunks(s: Scratch, x: Node) -> list[Node]:
    taken = [s.call(aten.slice.Tensor, x, 0, k, k + 3) for k in range(0, ROWS, 3)]
    return [s.call(aten.amax.default, chunk, [-1], True) for chunk in taken]


def negative(pieces: Pieces) -> Pieces:
    return lambda s, x: [s.call(aten.neg.default, piece) for piece in pieces(s, x)]


def first_negative(s: Scratch, x: Node) -> list[Node]:
    first, *others = rows(s, x)
    return [s.call(aten.neg.default, first), *others]


def one_shifted(s: Scratch, x: Node) -> list[Node]:
    first, *others = chunks(s, x)
    return [s.call(aten.add.Tensor, first, 1.0), *others]


def every_other(s: Scratch, x: Node) -> list[Node]:
    taken = s.call(aten.slice.Tensor, x, 0, 0, ROWS, 2)
    return [s.call(aten.amax.default, taken, [-1], True)]


def joined(pieces: Pieces, dim: int = 0) -> tuple[Scratch, Node, Node]:
    s = Scratch()
    x = s.input("logits", (ROWS, VOCAB))
    return s, x, s.call(aten.cat.default, pieces(s, x), dim)


def polynomial_is_known(pieces: Pieces, dim: int = 0) -> bool:
    """Whether it is read, which is then checked against what torch computes."""
    s, x, node = joined(pieces, dim)
    value = s.call(aten.add.Tensor, node, 1.0)
    walked = s.walk(value, roots=[x])
    assert walked.check(nodes=[node, value])
    meaning = walked.walk.context.rows.meaning(node)
    return node not in meaning.atoms()


@pytest.mark.parametrize("pieces", [rows, chunks, negative(rows), negative(chunks)])
def test_the_whole(pieces: Pieces) -> None:
    assert polynomial_is_known(pieces)


@pytest.mark.parametrize(
    "pieces",
    [
        lambda s, x: rows(s, x)[::-1],
        lambda s, x: rows(s, x)[1:],
        lambda s, x: rows(s, x)[:-1],
        lambda s, x: [*rows(s, x), rows(s, x)[0]],
        lambda s, x: chunks(s, x)[::-1],
        first_negative,
        one_shifted,
        every_other,
    ],
)
def test_what_is_not_the_whole(pieces: Pieces) -> None:
    assert not polynomial_is_known(pieces)


def test_along_another_dimension() -> None:
    assert not polynomial_is_known(
        lambda s, x: [s.call(aten.unsqueeze.default, row, 0) for row in rows(s, x)], dim=1
    )
