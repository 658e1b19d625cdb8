"""The table of rules: one row per ATen operator, its rule on forms, and the algebraic identity as a comment."""

from __future__ import annotations

import operator

import torch

from fx_passes.graph.operators import CASTS, Target
from fx_passes.rules import columns, constants, guards, pointwise, reductions, row_moves, row_writes
from fx_passes.rules import row_scalars as numbers
from fx_passes.walk.results import Rule, Starts
from fx_passes.walk.row_scalars import RowRule
from fx_passes.walk.walk import Tables

aten = torch.ops.aten
prims = torch.ops.prims

# W, U: full-vocabulary values in row normal form (docs/design.md); x logits, y = s x; r a number (per row); v a column.
# A rule takes (context, node, *arguments) and returns a form, a mask, a replacement of the node, or None for a value
# without logits. It raises Refused with the reason for the report. It never edits the graph.
# `Starts`: also runs without a full-vocabulary operand, because the value may be the first one.

RULES: dict[Target, Rule] = {
    # the same value: this is how clones vanish
    aten.clone.default: pointwise.same_value,  # W
    aten.alias.default: pointwise.same_value,  # W
    aten.detach.default: pointwise.same_value,  # W
    aten.lift_fresh_copy.default: pointwise.same_value,  # W
    prims.convert_element_type.default: pointwise.cast,  # W; [v == i] as a number is a one-hot
    aten._to_copy.default: pointwise.cast,  # W
    aten.copy.default: pointwise.copy,  # W, written over all of another value
    # arithmetic: coefficient by coefficient
    aten.neg.default: pointwise.neg,  # -W
    aten.add.Tensor: pointwise.plus(1.0),  # W + k U: equal exponentials, equal columns are joined
    aten.add.Scalar: pointwise.plus(1.0),  # W + k r
    aten.sub.Tensor: pointwise.plus(-1.0),  # W - k U
    aten.sub.Scalar: pointwise.plus(-1.0),  # W - k r
    aten.rsub.Scalar: pointwise.rsub,  # r - k W
    aten.rsub.Tensor: pointwise.rsub,  # U - k W
    aten.mul.Tensor: pointwise.mul,  # r W; exp(y - c) (e + f x); [v == i] W = [v == i] W[i]
    aten.mul.Scalar: pointwise.mul,  # r W
    aten.div.Tensor: pointwise.div,  # W / r; W / (exp(y - c) a) = W exp(c - y) / a, or without either exponential
    aten.div.Scalar: pointwise.div,  # W / r
    prims.fma.default: pointwise.fma,  # W U + Z
    aten.pow.Tensor_Scalar: pointwise.power,  # W^1, W^2 = W W
    aten.exp.default: pointwise.exp,  # exp(f x + e) = one exponential term: s = f, c = -e, a = 1
    aten.log.default: Starts(
        pointwise.log
    ),  # log(exp(y - c) a) = y - c + log a; log(mass) = its exponent
    # guards: the form already has the value that they set
    aten.eq.Scalar: guards.compare(guards.is_zero),  # p == 0; x == -inf
    aten.ne.Scalar: guards.compare(guards.is_not_zero),
    aten.gt.Scalar: guards.compare(guards.above),  # p > 0; x > finfo.min
    aten.ge.Scalar: guards.compare(guards.at_least),  # x >= finfo.min
    aten.le.Scalar: guards.compare(guards.at_most),  # p <= 0
    aten.eq.Tensor: Starts(guards.equals),  # [v == index]
    aten.ne.Tensor: Starts(guards.differs),
    aten.isnan.default: guards.isnan,
    aten.isinf.default: guards.isinf,  # log p == -inf
    aten.bitwise_and.Tensor: guards.both,  # p == 0 and p <= 0
    aten.logical_and.default: guards.both,
    aten.bitwise_or.Tensor: guards.logical,  # of row masks
    aten.logical_or.default: guards.logical,
    aten.logical_not.default: guards.invert,
    aten.bitwise_not.default: guards.invert,
    aten.where.self: guards.where,  # m W + (1 - m) U over rows; W + [v == i] (U[i] - W[i]); the guarded limit
    aten.clamp_min.default: guards.clamp_min,  # W, if all smaller elements are -inf
    aten.clamp.default: guards.clamp_min,
    # over the vocabulary: row statistics (max, log_sum, mean, total of y)
    aten.amax.default: reductions.amax,  # max(e + f x) = e + max(f x)
    aten.max.dim: reductions.max_dim,  # the same; argmax(f x) = argmax(x) for f > 0
    aten.argmax.default: reductions.argmax,
    aten.sum.dim_IntList: reductions.sum_,  # sum exp(y - c)(a + b y) = exp(max + log_sum - c)(a + b (mean + max))
    aten.sum.default: reductions.sum_,
    aten.mean.dim: reductions.mean,  # sum / V
    aten.mean.default: reductions.mean,
    aten.bmm.default: reductions.bmm,  # [1, V] @ [V, 1] = sum_v W U
    operator.getitem: Starts(reductions.getitem),
    # one column per row
    aten.gather.default: columns.gather,  # W[i]: x[i] and arithmetic
    aten.index.Tensor: columns.index,  # the same for [iota, ..., i]
    aten.scatter.value: columns.scatter,  # W + [v == i] (r - W[i])
    aten.scatter.src: columns.scatter,
    aten.scatter_add.default: columns.scatter_add,  # W + [v == i] r
    aten.index_put.default: columns.index_put,  # as scatter and scatter_add, for [iota, ..., i]
    # operators that start a full-vocabulary value
    aten.full.default: Starts(constants.filled),  # e
    aten.full_like.default: constants.full_like,  # e
    aten.zeros_like.default: constants.zeros_like,  # 0
    aten.ones_like.default: constants.ones_like,  # 1
    aten.expand.default: Starts(constants.expand),  # r over the vocabulary: e = r
    # rows moved: coefficients are moved alike
    aten.slice.Tensor: row_moves.slice_,
    aten.select.int: row_moves.select,  # of the vocabulary: a column
    aten.split.Tensor: row_moves.split,
    aten.split_with_sizes.default: row_moves.split,
    aten.unbind.int: row_moves.unbind,
    aten.view.default: row_moves.view,
    aten._unsafe_view.default: row_moves.view,
    aten.reshape.default: row_moves.view,
    aten.unsqueeze.default: row_moves.unsqueeze,
    aten.squeeze.default: row_moves.squeeze,
    aten.squeeze.dim: row_moves.squeeze,
    aten.squeeze.dims: row_moves.squeeze,
    aten.permute.default: row_moves.permute,
    aten.transpose.int: row_moves.transpose,
    aten.t.default: row_moves.t,
    aten.sym_size.int: row_moves.sym_size,
    # rows written home: coefficients are zero in the other rows
    aten.slice_scatter.default: row_writes.slice_scatter,
    aten.select_scatter.default: row_writes.select_scatter,
    aten.cat.default: row_writes.cat,  # all the pieces of one value, in order
}

ROW_SCALARS: dict[Target, RowRule] = {
    # numbers per row, as polynomials in others
    **dict.fromkeys(CASTS, numbers.row_cast),  # r
    aten.view.default: numbers.row_reshape,  # r, every atom reshaped alike
    aten._unsafe_view.default: numbers.row_reshape,
    aten.reshape.default: numbers.row_reshape,
    aten.unsqueeze.default: numbers.row_reshape,
    aten.squeeze.default: numbers.row_reshape,
    aten.squeeze.dim: numbers.row_reshape,
    aten.squeeze.dims: numbers.row_reshape,
    aten.select.int: numbers.row_select,  # r, all there is in the dimension
    aten.cat.default: numbers.row_cat,  # r, cut in pieces along the first dimension
    aten.neg.default: numbers.row_neg,  # -r
    aten.add.Tensor: numbers.row_sum(1.0),  # r + q
    aten.sub.Tensor: numbers.row_sum(-1.0),  # r - q
    aten.mul.Tensor: numbers.row_product(divided=False),  # r q
    aten.div.Tensor: numbers.row_product(divided=True),  # r / q for a single term q
    aten.log.default: numbers.row_log,  # log(exp(r)) = r
}

TABLES = Tables(RULES, ROW_SCALARS)
