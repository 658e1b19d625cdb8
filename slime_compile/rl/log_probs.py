"""Per-token log-probs and entropies for eager callers, over the two fused operators.

Entry point: `log_probs_and_entropy`. It holds the logits and nothing else of their size; the backward makes one such
tensor, the gradient. `linear_log_probs.py` does without the logits. A loss under `torch.compile(...,
backend="slime_fused")` needs none of this: write it as you like. `row_statistics.py` has the formulas.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_compile.ops import row_grad, row_stats
from slime_compile.ops.reference import compute_dtype
from slime_compile.ops.regions import called_eagerly
from slime_compile.rl.row_statistics import (
    Coefficients,
    RowStatistics,
    check_columns,
    check_rows,
    columns_of,
    inside,
    scale_of,
)

__all__ = ["log_probs_and_entropy"]


def log_probs_and_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    vocab_start: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the target tokens, and the entropies, under softmax(logits / temperature).

    A logit of -inf is a token without probability: it adds nothing to the entropy and gets no gradient (plain torch
    gives NaN for both). A row with NaN or +inf, or with nothing but -inf, gives NaN. A row with incoming gradients
    of 0 gets a gradient of 0, even with NaN in it.

    With a `group`, the vocabulary is sharded over its ranks and every rank gets the results of the whole
    vocabulary. The forward does one all_gather of four numbers a row and the backward does no collective; neither
    depends on `requires_grad`, on the number of rows, or on the other options. The incoming gradients must be equal
    on all ranks.

    Args:
        logits: [..., V] any floating dtype, any strides; with a group this rank's [..., V_local].
        target: [...] integer, columns of the whole vocabulary.
        group: the process group of the last dimension's shards, or None for a whole vocabulary.
        temperature: a positive number, or a tensor broadcastable to target's shape. No gradient is computed for it.
        with_entropy: whether to return the entropies.
        entropy_grad: whether the entropies carry a gradient.
        vocab_start: the first column of this rank's shard. By default the shards are equal and in the ranks' order.

    Returns:
        `log_probs` [...] and `entropy` [...] or None, float32 (float64 for float64 logits). The gradient of the
        logits has the logits' dtype.

    Raises:
        ValueError: an unsupported shape, dtype or temperature (see above).
        IndexError: on the CPU without a group, a target lies outside [0, V). On a GPU, and in compiled code, its
            log-prob is NaN; with a group, a target in no shard has log-prob -inf.

    Examples:
        >>> log_probs, entropy = log_probs_and_entropy(logits, tokens, temperature=0.7)
        >>> loss = -(advantages * log_probs + 0.01 * entropy).mean()
    """
    _check_logits(logits)
    check_rows(logits.shape[:-1], target, temperature)
    column = columns_of(target, logits.shape[-1], group, vocab_start)
    if group is None:
        check_columns(column, logits.shape[-1], "last dimension of `logits`")
    scale = scale_of(temperature, column.squeeze(-1), compute_dtype(logits.dtype))
    called_eagerly("log_probs_and_entropy")
    function = cast(Any, _LogProbsAndEntropy)
    log_probs, entropy = function.apply(logits, column, scale, group, with_entropy, entropy_grad)
    return log_probs, entropy


def _check_logits(logits: Tensor) -> None:
    if not logits.dtype.is_floating_point:
        raise ValueError(f"`logits` must have a floating dtype, got {logits.dtype}")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"`logits` must have shape [..., V], V > 0, got {list(logits.shape)}")


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [..., V_local]
        column: Tensor,  # [..., 1] int64, of this shard; outside [0, V_local): in another one
        scale: Tensor,  # [..., 1] compute dtype
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        found, at = inside(column, logits.shape[-1])
        *stats, _ = row_stats(logits, scale, 1.0, "", total=False)
        picked = logits.gather(-1, at)
        whole = RowStatistics.of_shard(scale, stats, picked, found, group)
        ctx.save_for_backward(logits, column, scale, whole.peak, whole.log_sum, whole.mean)
        ctx.set_materialize_grads(False)
        return whole.outputs(ctx, with_entropy, entropy_grad)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, column, scale, *statistics = ctx.saved_tensors
        of = Coefficients.of(scale, statistics, grad_log_probs, grad_entropy)
        grad = row_grad(logits, of.terms, of.affine, column, of.weight, False, logits.dtype, "")
        return grad, None, None, None, None, None
