"""The fused operators.

    slime_fused::row_stats   statistics of each row of scaled logits        one read of x
    slime_fused::row_grad    a full-vocabulary value in row normal form     one read of x, one write
    slime_fused::row_grad_   the same, written over x
    slime_fused::row_grad_over   the same, over x where that may be, which it decides when it runs
    slime_fused::writable    x, which autograd saved, in memory that the compiler may write over

    slime_fused::linear_row_stats   row_stats of hidden @ weight.t() + bias, and columns of it    one chunk of logits
    slime_fused::linear_row_grad    gradients of hidden, weight, bias from row_grad of it         one chunk of logits
    slime_fused::linear_row_both    the two in one                                                one chunk of logits

    slime_fused::row_loop_over   the same, one result over what it was made from, which it decides when it runs
    slime_fused::row_loop    what works row by row, over one chunk of rows after the other

docs/ops.md says what they compute; `reference` says it in plain torch; `cpu` and `cuda` (with
`triton_kernels`) do it fast. `operators` holds schema, fake kernels and dispatch, `checks` what must hold for the
arguments, `holders` who else can see a tensor, `held_by` in which variable, `regions` which calls have been made.
`linear` has schema, fake kernels and dispatch of the operators over chunks, `linear_chunks` does them on every device,
`linear_reference` is their contract, `row_program` the arithmetic of `linear_row_both`. `row_loop` has the loop over
chunks of rows, `row_body` what it computes for one of them, compiled or step by step. Importing needs neither Triton
nor a GPU. No file of this folder imports the names below.
"""

from slime_compile.ops.linear import linear_row_both, linear_row_grad, linear_row_stats
from slime_compile.ops.operators import row_grad, row_grad_, row_grad_over, row_stats
from slime_compile.ops.regions import (
    Placed,
    called_eagerly,
    eager_calls,
    on_call,
    placements,
    seen_regions,
    under_hooks,
    watched,
)
from slime_compile.ops.row_loop import row_loop, row_loop_over

__all__ = [
    "Placed",
    "called_eagerly",
    "eager_calls",
    "linear_row_both",
    "linear_row_grad",
    "linear_row_stats",
    "on_call",
    "placements",
    "row_grad",
    "row_grad_",
    "row_grad_over",
    "row_loop",
    "row_loop_over",
    "row_stats",
    "seen_regions",
    "under_hooks",
    "watched",
]
