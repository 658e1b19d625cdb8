"""What is one number everywhere but at a column: functions of it, and what is not so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from tests.support.scratch import VOCAB, Scratch

aten = torch.ops.aten
prims = torch.ops.prims
SHAPE = (5, VOCAB)

Target = Callable[[Scratch, Node], Node]


def written(filled: float, number: float) -> Target:
    """A target as label smoothing writes it."""

    def target(s: Scratch, x: Node) -> Node:
        full = s.call(aten.full_like.default, x, filled)
        return s.call(aten.scatter.value, full, -1, hits(s), number)

    return target


def compared(scale: float, offset: float) -> Target:
    """`[v == index] * scale + offset`, of an index that may miss."""

    def target(s: Scratch, x: Node) -> Node:
        scaled = s.call(aten.mul.Tensor, one_hot(s, x), scale)
        return s.call(aten.add.Tensor, scaled, offset)

    return target


def times_rows(s: Scratch, x: Node) -> Node:
    scaled = s.call(aten.mul.Tensor, one_hot(s, x), s.input("positive", (SHAPE[0], 1)))
    return s.call(aten.add.Tensor, scaled, 0.1)


def one_hot(s: Scratch, x: Node) -> Node:
    index = s.input("index", (SHAPE[0], 1), torch.int64)
    equal = s.call(aten.eq.Tensor, s.iota(VOCAB), index)
    return s.call(prims.convert_element_type.default, equal, value_dtype(x))


def weighted_by_rows(s: Scratch, x: Node) -> Node:
    full = s.call(aten.full_like.default, x, 0.1)
    return s.call(aten.scatter.src, full, -1, hits(s), s.input("rows", (SHAPE[0], 1)))


def several_columns(s: Scratch, x: Node) -> Node:
    index = s.input("hits", (SHAPE[0], 3), torch.int64)
    ones = s.call(aten.full.default, [SHAPE[0], 3], 1.0, dtype=value_dtype(x), device="cpu")
    return s.call(aten.scatter_add.default, s.call(aten.full_like.default, x, 0.5), -1, index, ones)


def hits(s: Scratch) -> Node:
    return s.input("hits", (SHAPE[0], 1), torch.int64)


def value_dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def log(s: Scratch, value: Node) -> Node:
    return s.call(aten.log.default, value)


def chosen(target: object, number: float = 0) -> Callable[[Scratch, Node], Node]:
    """2 where a comparison holds, else the value."""

    def made(s: Scratch, value: Node) -> Node:
        two = s.call(aten.full.default, [], 2.0, dtype=value_dtype(value), device="cpu")
        return s.call(aten.where.self, s.call(target, value, number), two, value)

    return made


def not_a_number(s: Scratch, value: Node) -> Node:
    two = s.call(aten.full.default, [], 2.0, dtype=value_dtype(value), device="cpu")
    return s.call(aten.where.self, s.call(aten.isnan.default, value), two, value)


def reads(
    target: Target, function: Callable[[Scratch, Node], Node], dtype: torch.dtype = torch.float32
) -> str:
    """What is said of the function, which is checked against what torch computes."""
    s = Scratch(dtype)
    node = function(s, target(s, s.input("logits", SHAPE, dtype)))
    walked = s.walk(node)
    assert walked.check()
    return walked.answer(node)


ABOVE = [written(0.1, 0.9), written(2.0, 2.0), compared(0.9, 1e-4), compared(-0.9, 1.0)]
COMPARISONS = [aten.eq, aten.ne, aten.gt, aten.ge, aten.le]


@pytest.mark.parametrize("target", ABOVE)
def test_a_logarithm(target: Target) -> None:
    assert reads(target, log) == "form"


@pytest.mark.parametrize("comparison", COMPARISONS, ids=str)
@pytest.mark.parametrize(
    "target",
    [*ABOVE, written(0.0, 1.0), compared(1.0, 0.0), compared(-1.0, 0.5)],
)
def test_a_choice(target: Target, comparison: object) -> None:
    assert reads(target, chosen(comparison.Scalar)) == "form"  # type: ignore[attr-defined]


def test_what_is_written_beside_a_larger_number_may_be_zero_or_not() -> None:
    assert reads(written(0.5, 0.0), chosen(aten.eq.Scalar)) != "form"
    assert reads(written(0.5, 1e-20), chosen(aten.eq.Scalar)) != "form"


@pytest.mark.parametrize("comparison", [aten.gt.Scalar, aten.le.Scalar])
def test_a_comparison_with_another_number(comparison: object) -> None:
    """Whether 0.9 is above 0.9 is a question of its rounding."""
    assert reads(written(0.1, 0.9), chosen(comparison, 0.9)) != "form"


def test_none_is_nan() -> None:
    assert reads(written(0.1, 0.9), not_a_number) == "form"


@pytest.mark.parametrize(
    "target",
    [
        written(0.1, 0.0),  # its logarithm is no number
        written(-0.1, 0.9),
        written(1.0, 1e-12),  # of which little is left beside 1
        weighted_by_rows,
        times_rows,
        several_columns,
    ],
)
def test_what_has_no_such_logarithm(target: Target) -> None:
    assert reads(target, log) != "form"


def test_a_number_that_half_precision_does_not_have() -> None:
    assert reads(written(1e-9, 0.9), log, torch.float16) != "form"
    assert reads(written(1e-9, 0.9), chosen(aten.eq.Scalar), torch.float16) != "form"
