"""The fused operators.

    slime_fused::row_stats   statistics of each row of scaled logits        one read of x
    slime_fused::row_grad    a full-vocabulary value in row normal form     one read of x, one write
    slime_fused::row_grad_   the same, overwriting x
    slime_fused::row_grad_over   the same, overwriting x if nothing else references it, decided at run time
    slime_fused::writable    x, a tensor saved by autograd, in memory that the compiler may overwrite

    slime_fused::linear_row_stats   row_stats of hidden @ weight.t() + bias, and columns of it    one chunk of logits
    slime_fused::linear_row_grad    gradients of hidden, weight, bias from row_grad of it         one chunk of logits

    slime_fused::row_loop    a row-by-row computation, over one chunk of rows after the other
    slime_fused::row_loop_over   the same, one result overwriting its operand, decided at run time

docs/ops.md has the formulas, `reference` has them in plain torch; `cpu` and `cuda` (with `triton_kernels`) are fast.
`operators` has schema, fake kernels and dispatch, `checks` the requirements on arguments, `holders` counts references
to a tensor, `held_by` finds the variables, `regions` counts calls. `linear` has schema, fake kernels and dispatch of
the operators over chunks of logits, `linear_chunks` their kernel for every device, `linear_reference` their contract.
`row_loop` has the loop over chunks of rows, `row_body` its body, compiled or step by step. Importing needs neither
Triton nor a GPU. No file of this folder imports the names below.
"""

from slime_compile.ops.linear import linear_row_grad, linear_row_stats
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
