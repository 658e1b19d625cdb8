"""Every text that the passes give a user as a reason: provoked, and asserted word for word.

`REFUSALS` holds the texts of rules, each with the smallest graph that is refused so; those of the passes around them
are asserted in their own tests. `test_every_text_is_asserted` reads all texts from the source. Long as there are
reasons: a few lines for each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

import fx_passes
from fx_passes.fuse import fuse
from fx_passes.graph.user_lines import _FRAME
from fx_passes.outcome import FuseConfig
from fx_passes.verify import _first_difference
from fx_passes.walk.results import EXPECTED
from slime_compile.backend.passes import FORMULAS
from tests.support.scratch import VOCAB, Scratch

aten = torch.ops.aten
prims = torch.ops.prims

Provoke = Callable[[Scratch, Node], Any]
REFUSALS: list[tuple[str, Provoke]] = []


def refused(text: str) -> Callable[[Provoke], Provoke]:
    """`provoke(scratch, logits [3, V])` makes a graph in which some node is refused with `text`."""

    def enter(provoke: Provoke) -> Provoke:
        REFUSALS.append((text, provoke))
        return provoke

    return enter


def short(text: str, target: Any, *args: Any, **kwargs: Any) -> None:
    """One operator on the logits."""
    REFUSALS.append((text, lambda s, x: s.call(target, x, *args, **kwargs)))


# ---------------------------------------------------------------- values


@refused("a value overwrites one of another shape")
def spread_by_a_copy(s: Scratch, x: Node) -> Any:
    into = s.call(aten.full.default, [2, 3, VOCAB], 0.0, dtype=torch.float32, device="cpu")
    return s.call(aten.copy.default, into, exponential(s, x))


def exponential(s: Scratch, x: Node) -> Node:
    return s.call(aten.exp.default, x)


def weighted(s: Scratch, x: Node) -> Node:
    """x exp(x)"""
    return s.call(aten.mul.Tensor, exponential(s, x), x)


def other(s: Scratch) -> Node:
    return s.input("logits", (3, VOCAB))


def number(s: Scratch, fill: float) -> Node:
    return s.call(aten.full.default, [], fill, dtype=torch.float32, device="cpu")


def zero_mask(s: Scratch, x: Node) -> Node:
    return s.call(aten.eq.Scalar, exponential(s, x), 0.0)


def column_mask(s: Scratch, rows: int = 3) -> Node:
    return s.call(aten.eq.Tensor, s.iota(VOCAB), s.input("hits", (rows, 1), torch.int64))


def hits(s: Scratch, *shape: int) -> Node:
    return s.input("hits", shape, torch.int64)


def rows(s: Scratch, *shape: int) -> Node:
    return s.input("rows", shape)


# ---------------------------------------------------------------- the algebra


@refused("values over two different logits are combined")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, x, other(s))


@refused("the operands keep the vocabulary in different dimensions")
def _(s: Scratch, x: Node) -> None:
    square = s.input("logits", (VOCAB, VOCAB))
    s.call(aten.mul.Tensor, exponential(s, square), s.call(aten.t.default, square))


@refused("more than 6 different softmaxes of the same logits are added")
def _(s: Scratch, x: Node) -> None:
    total = exponential(s, x)
    for k in range(2, 8):
        total = s.call(aten.add.Tensor, total, exponential(s, s.call(aten.mul.Tensor, x, float(k))))


@refused("more than 16 different target columns of the same logits are added")
def _(s: Scratch, x: Node) -> None:
    total = x
    for _ in range(17):
        mask = s.call(prims.convert_element_type.default, column_mask(s), torch.float32)
        total = s.call(aten.add.Tensor, total, mask)


@refused("a square of the logits")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, x, x)


@refused("a softmax times the square of the logits")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, weighted(s, x), x)


@refused("a product of two softmaxes")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, exponential(s, x), exponential(s, x))


@refused("a clamped value may be at its lowest number there instead of -inf")
def _(s: Scratch, x: Node) -> None:
    low = s.call(aten.clamp_min.default, x, torch.finfo(torch.float32).min)
    s.call(aten.amax.default, low, [-1])


@refused("a value valid only where a softmax is non-zero is used elsewhere")
def _(s: Scratch, x: Node) -> None:
    itself = s.call(aten.div.Tensor, weighted(s, x), exponential(s, x))
    s.call(aten.amax.default, itself, [-1])


@refused("isinf of a value other than log-probs")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.isinf.default, x)


# ---------------------------------------------------------------- pointwise

short(
    "a full-vocabulary value is cast to integers", prims.convert_element_type.default, torch.int64
)
short("the logits are rounded to bfloat16", prims.convert_element_type.default, torch.bfloat16)
short("a power of 3 of a full-vocabulary value", aten.pow.Tensor_Scalar, 3)
short("no rule for aten.tanh.default on a full-vocabulary value", aten.tanh.default)


@refused("a full-vocabulary mask is used in arithmetic")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.add.Tensor, zero_mask(s, x), 1.0)


@refused("the logits cancel there, and their NaN and infinities would be lost")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, exponential(s, x), number(s, 0.0))


@refused("the logits cancel there, and their NaN and infinities would be lost")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.sub.Tensor, x, x)


@refused("a constant, or a second number per row, is added to logits and may cancel their offset")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.sub.Tensor, x, 1000.0)


@refused("a constant, or a second number per row, is added to logits and may cancel their offset")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.sub.Tensor, s.call(aten.sub.Tensor, x, rows(s, 3, 1)), rows(s, 3, 1))


@refused("a constant, or a second number per row, is added to logits and may cancel their offset")
def _(s: Scratch, x: Node) -> None:
    shifted = s.call(aten.sub.Tensor, x, rows(s, 3, 1))
    beside = s.call(aten.sub.Tensor, x, s.call(aten.gather.default, x, -1, hits(s, 3, 1)))
    s.call(aten.add.Tensor, s.call(aten.mul.Tensor, shifted, 0.01), beside)


@refused("a part of the maximum is subtracted from logits")
def _(s: Scratch, x: Node) -> None:
    shifted = s.call(aten.sub.Tensor, x, s.call(aten.amax.default, x, [-1], True))
    s.call(aten.add.Tensor, s.call(aten.mul.Tensor, shifted, 0.01), x)


@refused("a number per row cancels there, and its NaN and infinities would be lost")
def _(s: Scratch, x: Node) -> None:
    shift = s.input("rows", (3, 1))
    s.call(aten.sub.Tensor, s.call(aten.add.Tensor, x, shift), shift)


@refused("a division by a softmax that may be masked")
def _(s: Scratch, x: Node) -> None:
    p = exponential(s, x)
    s.call(aten.div.Tensor, p, s.call(aten.mul.Tensor, p, s.input("rows", (3, 1))))


@refused("a division by a full-vocabulary value")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.div.Tensor, exponential(s, x), x)


@refused("a division that rounds, or by a full-vocabulary value")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.div.Tensor, rows(s, 3, 1), x)


@refused("a division by a softmax that may be masked")
def _(s: Scratch, x: Node) -> None:
    masked = s.call(aten.mul.Tensor, exponential(s, x), rows(s, 3, 1))
    s.call(aten.div.Tensor, exponential(s, x), masked)


@refused("a division by zero, infinity or NaN")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.div.Tensor, x, number(s, 0.0))


@refused("exp of a value that is not linear in the logits")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.exp.default, exponential(s, x))


@refused("log of a value that is not one softmax")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.log.default, s.call(aten.add.Scalar, exponential(s, x), 1.0))


@refused("log of a negative multiple of a softmax")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.log.default, s.call(aten.neg.default, exponential(s, x)))


@refused("log of a masked softmax: -inf there for all logits")
def _(s: Scratch, x: Node) -> None:
    kept = s.call(
        aten.where.self, s.input("flags", (3, 1), torch.bool), exponential(s, x), number(s, 0.0)
    )
    s.call(aten.log.default, kept)


@refused("an operand varies over the vocabulary and is not computed from the logits")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, x, s.input("rows", (VOCAB,)))


@refused("an operand varies over the vocabulary and comes from logits by an unsupported operator")
def _(s: Scratch, x: Node) -> None:
    whole = s.call(prims.convert_element_type.default, exponential(s, x), torch.int64)
    s.call(aten.mul.Tensor, x, whole)


@refused("an operand varies over the vocabulary and comes from logits by an unsupported operator")
def _(s: Scratch, x: Node) -> None:
    """What is not known is taken for logits of its own, until it is asked what it is made of."""
    s.call(aten.mul.Tensor, x, s.call(aten.sigmoid.default, exponential(s, x)))


@refused("an operand is neither a number nor a row scalar: complex_number")
def _(s: Scratch, x: Node) -> None:
    made = s.call(aten.full.default, [], 1j, dtype=torch.complex64, device="cpu")
    made.name = "complex_number"
    s.call(aten.mul.Tensor, x, made)


@refused("the logits are broadcast against a larger value")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, x, s.input("logits", (1, VOCAB)))


@refused("the logits are broadcast against a larger value")
def _(s: Scratch, x: Node) -> None:
    ones = s.call(aten.full_like.default, x, 1.0)
    s.call(torch.ops.prims.fma.default, ones, ones, s.input("logits", (1, VOCAB)))


# ---------------------------------------------------------------- guards


@refused("a comparison over the vocabulary that is not a known guard")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.gt.Scalar, x, 1.0)


short("a logical operator on a full-vocabulary value", aten.logical_not.default)


@refused("a logical operator on two masks over the vocabulary")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.logical_and.default, zero_mask(s, x), column_mask(s))


@refused("a mask chooses between two values: the probability is zero")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.where.self, zero_mask(s, x), number(s, torch.inf), exponential(s, x))


@refused("where the probability is zero, another value is set to zero")
def _(s: Scratch, x: Node) -> None:
    twice = exponential(s, s.call(aten.mul.Tensor, x, 2.0))
    s.call(aten.where.self, zero_mask(s, x), number(s, 0.0), twice)


@refused("NaN is written at the NaN of another value")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.where.self, s.call(aten.isnan.default, x), number(s, torch.nan), exponential(s, x))


@refused("a mask is used as a number: the probability is zero")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, zero_mask(s, x), x)


@refused("masked columns are filled with an infinite value")
def _(s: Scratch, x: Node) -> None:
    keep = s.input("flags", (3, 1), torch.bool)
    s.call(aten.where.self, keep, x, number(s, -torch.inf))


@refused("a product with an infinite or NaN constant")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.mul.Tensor, x, number(s, -torch.inf))


@refused("a constant is added, and the logits would be lost in it")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.sub.Tensor, x, number(s, 1e30))


@refused("a sum of a fused and an unfused value meets a third, and may cancel first")
def _(s: Scratch, x: Node) -> None:
    p = exponential(s, x)
    s.call(aten.sub.Tensor, s.call(aten.add.Tensor, s.call(aten.sin.default, x), p), p)


@refused("half precision rounds a fused and an unfused operand before adding them")
def _(s: Scratch, x: Node) -> None:
    half = s.call(aten.sin.default, s.call(prims.convert_element_type.default, x, torch.bfloat16))
    p = s.call(prims.convert_element_type.default, exponential(s, x), torch.bfloat16)
    s.call(aten.add.Tensor, half, p)


@refused("alpha=0 drops a value, and its NaN and infinities with it")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.add.Tensor, x, s.input("rows", (3, 1)), alpha=0)


@refused("a clamp over the vocabulary from above, or to a value per row")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.clamp.default, x, -1.0, 1.0)


short("a clamp over the vocabulary changes values", aten.clamp_min.default, 0.0)


# ---------------------------------------------------------------- reductions

short("rows of full-vocabulary values are summed", aten.sum.dim_IntList, [0])
short("rows of full-vocabulary values are averaged", aten.mean.dim, [0])
short("a maximum over other dimensions than the vocabulary", aten.amax.default, [0, 1])
short("argmax over other dimensions than the vocabulary", aten.argmax.default, 0)


@refused("argmax of logits plus a number per row")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.argmax.default, s.call(aten.add.Tensor, x, s.input("rows", (3, 1))), -1)


@refused("a maximum of a value that is not linear in the logits")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.amax.default, weighted(s, x), [-1])


@refused("argmax of a value other than a positive multiple of the logits")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.argmax.default, s.call(aten.neg.default, x), -1)


short(
    "each element is cut to an integer before it is summed",
    aten.sum.dim_IntList,
    [-1],
    dtype=torch.int64,
)


@refused("it is computed in float64 from float32 values")
def _(s: Scratch, x: Node) -> None:
    s.call(prims.convert_element_type.default, x, torch.float64)


@refused("a reduction of rounded exponentials is added to exact ones")
def _(s: Scratch, x: Node) -> None:
    rounded = s.call(prims.convert_element_type.default, exponential(s, x), torch.bfloat16)
    largest = s.call(aten.amax.default, rounded, [-1], True)
    s.call(aten.sub.Tensor, rounded, largest)


@refused("a matrix product with full-vocabulary values")
def _(s: Scratch, x: Node) -> None:
    batch = s.input("logits", (2, 3, VOCAB))
    s.call(aten.bmm.default, batch, rows(s, 2, VOCAB, 4))


@refused("a column may be removed from the softmaxes, and computing the rest would cancel")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.scatter.value, exponential(s, x), -1, hits(s, 3, 1), 0.0)


@refused("a column may be removed from the logits, and computing the rest would cancel")
def _(s: Scratch, x: Node) -> None:
    others = s.call(aten.where.self, column_mask(s), number(s, 0.0), number(s, 2.0))
    s.call(aten.mul.Tensor, x, others)


@refused("a column may be removed from the logits, and computing the rest would cancel")
def _(s: Scratch, x: Node) -> None:
    """Of -inf half of it is -inf, and not what is left."""
    others = s.call(aten.where.self, column_mask(s), number(s, 0.5), number(s, 1.0))
    s.call(aten.mul.Tensor, x, others)


# ---------------------------------------------------------------- columns


@refused("a gather over another dimension than the vocabulary")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.gather.default, x, 0, s.input("hits", (1, VOCAB), torch.int64))


@refused("the logits are indexed by something else than row number and column")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.index.Tensor, x, [hits(s, 3), hits(s, 3)])


@refused("rows are picked by an index")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.index.Tensor, x, [hits(s, 2)])


@refused("a full-vocabulary value is written by index")
def _(s: Scratch, x: Node) -> None:
    zeros = s.input("rows", (3,))
    s.call(aten.index_put.default, zeros, [s.iota(3)], x)


@refused("a scatter of full-vocabulary values")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.scatter.src, s.input("rows", (3, 4)), 1, hits(s, 3, 4), x)


@refused("a scatter over another dimension than the vocabulary")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.scatter.value, x, 0, s.input("hits", (1, VOCAB), torch.int64), 1.0)


@refused("several columns per row are overwritten")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.scatter.value, x, -1, hits(s, 3, 2), 1.0)


@refused("a scatter of only some of the given values")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.scatter.src, exponential(s, x), -1, hits(s, 3, 1), rows(s, 3, 2))


@refused("a value linear in the logits is overwritten, and may be infinite there")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.scatter.value, x, -1, hits(s, 3, 1), 1.0)


@refused("full-vocabulary values are written at columns")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.scatter_add.default, x, -1, hits(s, 3, VOCAB), exponential(s, x))


@refused("many columns of two index tensors are combined")
def _(s: Scratch, x: Node) -> None:
    hot = s.call(aten.scatter_add.default, x, -1, hits(s, 3, 3), rows(s, 3, 3))
    s.call(aten.gather.default, hot, -1, hits(s, 3, 3))


@refused("a one-hot multiple of a full-vocabulary value is read at other columns")
def _(s: Scratch, x: Node) -> None:
    mask = s.call(prims.convert_element_type.default, column_mask(s), torch.float32)
    masked = s.call(aten.mul.Tensor, mask, exponential(s, x))
    s.call(aten.gather.default, masked, -1, hits(s, 3, 2))


@refused("a softmax times a sum of one-hot columns, rounded if two columns coincide")
def _(s: Scratch, x: Node) -> None:
    zeros = s.call(aten.full.default, [3, VOCAB], 0.0, dtype=torch.bfloat16, device="cpu")
    added = s.call(prims.convert_element_type.default, s.input("rows", (3, 2)), torch.bfloat16)
    columns = s.call(aten.scatter_add.default, zeros, -1, hits(s, 3, 2), added)
    s.call(aten.mul.Tensor, exponential(s, x), columns)


@refused("an index of more rows than the logits")
def _(s: Scratch, x: Node) -> None:
    """Which torch refuses when it runs."""
    s.call(aten.index.Tensor, x, [s.iota(4), hits(s, 4)])


@refused("some of the rows are written by index")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.index_put.default, exponential(s, x), [s.iota(2), hits(s, 2)], number(s, 0.0))


@refused("a number is added to larger ones and would be lost in them")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.where.self, column_mask(s), x, number(s, -1e9))


# ---------------------------------------------------------------- what begins a value


@refused("a constant of another type")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.full_like.default, zero_mask(s, x), 1)


short("the logits are repeated", aten.expand.default, [2, 3, VOCAB])


# ---------------------------------------------------------------- rows

short("a part of the vocabulary is taken", aten.slice.Tensor, 1, 0, 2)
short("one column of the vocabulary is taken", aten.select.int, 1, -1)
short("a reshape splits or joins the vocabulary dimension", aten.view.default, [3 * VOCAB])


@refused("rows of a full-vocabulary mask are moved")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.slice.Tensor, zero_mask(s, x), 0, 0, 1)


@refused("a full-vocabulary mask is reshaped")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.view.default, zero_mask(s, x), [1, 3, VOCAB])


@refused("rows of logits are combined with a value without logits, or an unsupported one")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.cat.default, [x, rows(s, 3, 2)], 1)


@refused("a part of the vocabulary is written")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.slice_scatter.default, x, other(s), 1, 0, VOCAB, 2)


@refused("a row is written at an index unknown at compile time")
def _(s: Scratch, x: Node) -> None:
    many = s.input("logits", (2, 3, VOCAB))
    at = s.call(aten.sym_size.int, s.input("rows", (1, 2)), 0)
    s.call(aten.select_scatter.default, many, exponential(s, x), 0, at)


@refused("parts of the vocabulary are joined")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.cat.default, [x, other(s)], 1)


@refused("the joined values are not the pieces of one value")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.cat.default, [x, other(s)], 0)


def halves(s: Scratch, x: Node) -> list[Node]:
    return [s.call(aten.slice.Tensor, x, 0, *bounds) for bounds in ((0, 1), (1, 3))]


@refused("pieces are joined in another order than they were taken")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.cat.default, halves(s, x)[::-1], 0)


@refused("the joined pieces are only a part of a value")
def _(s: Scratch, x: Node) -> None:
    s.call(aten.cat.default, halves(s, x)[:1], 0)


@refused("rows are written to another place than they came from")
def _(s: Scratch, x: Node) -> None:
    zeros = s.call(aten.full.default, [3, VOCAB], 0.0, dtype=torch.float32, device="cpu")
    s.call(aten.slice_scatter.default, zeros, halves(s, x)[0], 0, 1, 2)


@refused("fewer rows are written than there are in their place")
def _(s: Scratch, x: Node) -> None:
    """As torch's fake kernel does, and no other."""
    zeros = s.call(aten.full.default, [3, VOCAB], 0.0, dtype=torch.float32, device="cpu")
    nothing = s.call(aten.slice.Tensor, x, 0, 0, 0)
    s.call(aten.slice_scatter.default, zeros, nothing, 0, -5, 5)


# ---------------------------------------------------------------- the checks


def test_numbers_beside_what_has_no_offset() -> None:
    """Log-probs have none, what is made of logits is not given, and what fills other rows is added to nothing."""
    s = Scratch(torch.float32)
    x = s.input("logits", (3, VOCAB))
    shifted = s.call(aten.sub.Tensor, x, s.call(aten.amax.default, x, [-1], True))
    beside = s.call(aten.add.Tensor, s.call(aten.sub.Tensor, shifted, 1.0), rows(s, 3, 1))
    scaled = s.call(aten.add.Tensor, s.call(aten.mul.Tensor, shifted, rows(s, 3, 1)), shifted)
    spread = s.call(aten.sub.Tensor, x, s.call(aten.mean.dim, x, [-1], True))
    filled = s.call(aten.where.self, s.input("flags", (3, 1), torch.bool), x, number(s, -1e9))
    cooled = s.call(aten.div.Tensor, x, 0.7)
    cooled = s.call(aten.sub.Tensor, cooled, s.call(aten.amax.default, cooled, [-1], True))
    apart = s.call(aten.sub.Tensor, shifted, cooled)
    walked = s.walk(beside, scaled, filled, spread, apart)
    assert walked.refused.keys().isdisjoint((beside, scaled, filled, spread, apart))
    walked.check()


@pytest.mark.parametrize(("text", "provoke"), REFUSALS, ids=[text for text, _ in REFUSALS])
def test_refused_in_these_words(text: str, provoke: Provoke) -> None:
    s = Scratch(torch.float32)
    provoke(s, s.input("logits", (3, VOCAB)))
    last = list(s.graph.nodes)[-1]
    walked = s.walk(last)
    assert walked.refused.get(last) == text
    walked.check()


@pytest.mark.parametrize(("text", "provoke"), REFUSALS, ids=[text for text, _ in REFUSALS])
def test_graph_stays_as_it_was(text: str, provoke: Provoke) -> None:
    s = Scratch(torch.float32)
    x = s.input("logits", (3, VOCAB))
    provoke(s, x)
    s.graph.output((list(s.graph.nodes)[-1],))
    before = described(s)
    outcome = fuse(s.graph, FuseConfig(FORMULAS, min_vocab=VOCAB))
    assert outcome.fused == ()
    assert described(s) == before


def test_constants_in_float64() -> None:
    s = Scratch(torch.float64)
    x = s.input("logits", (3, VOCAB), torch.float64)
    third = s.call(aten.full.default, [3, VOCAB], 1 / 3, dtype=torch.float64, device="cpu")
    walked = s.walk(s.call(aten.mul.Tensor, third, x))
    assert not walked.refused
    walked.check()


def test_indexed_by_a_mask() -> None:
    """What is picked has as many elements as the mask has hits: a graph for dynamic sizes only."""
    s = Scratch(torch.float32, dynamic=True)
    x = s.input("logits", (3, VOCAB))
    mask = s.call(aten.isnan.default, x)
    picked = s.call(aten.index.Tensor, hits(s, 3, VOCAB), [mask])
    walked = s.walk(picked)
    assert walked.refused[picked] == "a value is indexed with full-vocabulary values"


def test_sizes_that_are_not_fixed() -> None:
    s = Scratch(torch.float32, dynamic=True)
    row = s.call(aten.select.int, s.input("logits", (1, 3, VOCAB)), 0, 0)
    joined = s.call(aten.cat.default, [row], 0)
    walked = s.walk(joined)
    assert walked.refused[joined] == "rows of a dimension of symbolic size are joined"


def test_a_size_that_the_graph_does_not_compute() -> None:
    """An index from the end needs the number of columns."""
    s = Scratch(torch.float32, dynamic=True)
    x = s.input("logits", (3, VOCAB))
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC])
    x.meta["val"] = s.fake_mode.from_tensor(torch.zeros(3, VOCAB), symbolic_context=context)
    columns = s.input("hits", (3,), torch.int64)
    columns.meta["val"] = s.fake_mode.from_tensor(torch.zeros(3, dtype=torch.int64))
    picked = s.call(aten.index.Tensor, x, [s.iota(3), columns])
    walked = s.walk(picked)
    (size,) = [n for n in x.meta["val"].shape if not isinstance(n, int)]
    assert walked.refused[picked] == f"the size {size} is not computed in the graph"


def test_rounds_that_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a value that rules are asked about, and that is no root, a softmax is rewritten after a second walk."""
    s = Scratch(torch.float32)
    x, other = s.input("logits", (3, VOCAB)), s.input("rows", (3, VOCAB))
    total = s.call(aten.sum.dim_IntList, exponential(s, x), [-1])
    s.graph.output((total, s.call(aten.neg.default, other)))
    before = described(s)
    monkeypatch.setitem(fuse.__globals__, "MAX_ROUNDS", 1)
    outcome = fuse(s.graph, FuseConfig(FORMULAS, min_vocab=VOCAB))
    assert outcome.fused == ()
    assert [r.reason for r in outcome.rejections] == ["the logits are not settled after 1 walks"]
    assert described(s) == before
    monkeypatch.undo()
    assert fuse(s.graph, FuseConfig(FORMULAS, min_vocab=VOCAB)).fused


def test_a_maximum_compared_with_values_that_stay() -> None:
    """The user's own maximum would be equal to some of them; one that is rounded otherwise need not be."""
    s = Scratch(torch.float32)
    x = s.input("logits", (3, VOCAB))
    p = exponential(s, x)
    total = s.call(aten.sum.dim_IntList, p, [-1], True)
    peak = s.call(aten.amax.default, s.call(aten.mul.Tensor, x, 0.3), [-1], True)
    s.graph.output((total, s.call(aten.ge.Tensor, s.call(aten.mul.Tensor, x, 0.3), peak)))
    before = described(s)
    outcome = fuse(s.graph, FuseConfig(FORMULAS, min_vocab=VOCAB))
    reasons = [r.reason for r in outcome.rejections]
    assert "a per-row value is compared with unfused full-vocabulary values" in reasons
    assert outcome.fused == ()
    assert described(s) == before


def test_verified_graphs_that_differ() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert _first_difference([one], [one], 0.0) is None
    assert _first_difference([one], [other], 0.0) == (
        "output 0 differs by 2.5e-01 of its row's largest element"
    )
    assert _first_difference([None, one], [None, one.double()], 0.0) == (
        "output 1 was torch.float32 [2], is torch.float64 [2]"
    )


# Texts that no graph can provoke: torch itself refuses what they speak of before the pass is asked.
UNREACHABLE: set[str] = {
    "an index of another rank than the logits",
    "a full-vocabulary value is used as a condition",  # a condition is boolean, a form is not
    "a softmax of a value without logits",
    "a condition that is not a row mask",
    "a size of a value without logits",
    "all rows are equal, and made of one",  # a loop over copies of one row does not pay
    "only backward reads an input, and forward changes it",  # `fuse` reads such logits in forward
}

NO_REASONS = {EXPECTED, _FRAME.pattern}  # a label, and a regular expression


def test_every_text_is_asserted() -> None:
    """A text is asserted where a string of the tests is a part of it, or all of it with its gaps filled."""
    asserted = {literal for path in _TESTS.rglob("*.py") for literal in literals(path)}
    missing = [
        f"{path.relative_to(_SOURCE)}:{line}: {text}"
        for path in sorted(_SOURCE.rglob("*.py"))
        if path.name not in ("torch_private.py", "pipeline.py")  # say nothing of a user's graph
        for line, text in texts(path)
        if text not in UNREACHABLE and not _is_asserted(text, asserted)
    ]
    assert not missing, "\n".join(missing)


_SOURCE = Path(fx_passes.__file__).parent
_TESTS = Path(__file__).parent.parent
_GAP = "\0"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Reasons in a file: strings of three words or more that are no docstring, note of an Enum or assertion."""
    tree = ast.parse(path.read_text())
    skipped = {id(n) for node in ast.walk(tree) for n in _no_reasons(node)}
    for node in ast.walk(tree):
        text = None if id(node) in skipped else _text(node)
        if text and text.count(" ") >= 2 and text not in NO_REASONS:
            yield node.lineno, text  # type: ignore[attr-defined]


def _no_reasons(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Expr):  # docstrings
        yield node.value
    elif (isinstance(node, ast.AnnAssign) and _name(node.annotation) == "TypeAlias") or (
        (isinstance(node, ast.ClassDef) and any(_name(b).endswith("Enum") for b in node.bases))
        or isinstance(node, ast.Assert)
        or (isinstance(node, ast.Raise) and _is_error(node))
    ):
        yield from ast.walk(node)
    elif isinstance(node, ast.JoinedStr):
        yield from node.values


def _is_error(node: ast.Raise) -> bool:
    return isinstance(node.exc, ast.Call) and _name(node.exc.func).endswith("Error")


def _name(node: ast.AST) -> str:
    return ast.unparse(node)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else _GAP for p in node.values)  # type: ignore[misc]
    return None


def literals(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    skipped = {
        id(n) for node in ast.walk(tree) for n in _no_reasons(node) if isinstance(node, ast.Expr)
    }
    for node in ast.walk(tree):
        text = None if id(node) in skipped else _text(node)
        if text and len(text) >= 8 and text not in UNREACHABLE:
            yield text


def _is_asserted(text: str, asserted: set[str]) -> bool:
    parts = text.split(_GAP)
    filled = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(
        (" " in literal and any(literal in part for part in parts)) or filled.search(literal)
        for literal in asserted
    )


def described(s: Scratch) -> list[str]:
    return [node.format_node() or str(node) for node in s.graph.nodes]
