"""Per-token log-probs and entropies of `hidden @ weight.t() + bias` for eager callers: the logits are never whole.

Entry point: `linear_log_probs_and_entropy`. Forward and backward hold one chunk of logits at a time
(`slime_fused::linear_row_stats` and `linear_row_grad`, docs/ops.md); backward makes them again, so that the matmuls are
8 products of N x V x D where a program that keeps its logits has 6. `row_statistics.py` has the formulas.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_compile.ops import linear_row_grad, linear_row_stats
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

__all__ = [
    "as_autocast",
    "check_head",
    "linear_log_probs_and_entropy",
    "log_probs_entropy_and_hits",
]

_DEFAULT_CHUNK = 0  # bytes: `fx_passes/rows/chunks.py` chooses


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    vocab_start: int | None = None,
    sum_hidden_grad: bool = True,
    ignore_index: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_probs_and_entropy(F.linear(hidden, weight, bias), target)`, with one chunk of the logits at a time.

    Special rows, targets and temperatures behave the same. Under autocast, hidden, weight and bias are cast like in
    `F.linear`; the logits are rounded to that dtype.

    With a `group`, the vocabulary is sharded over its ranks, hidden is the same on all of them, and every rank gets
    the results of the whole vocabulary. Forward does one all_gather of four numbers a row. Backward does one
    all_reduce, of hidden's gradient, unless `sum_hidden_grad` is False; so hidden must require grad on all ranks or
    on none. The incoming gradients must be equal on all ranks.

    Args:
        hidden: [..., D], any floating dtype.
        weight: [V, D] of hidden's dtype, any strides; with a group this rank's [V_local, D].
        target: [...] integer, columns of the whole vocabulary.
        bias: [V] of hidden's dtype, with a group this rank's [V_local], or None.
        group: the process group of the vocabulary's shards, or None for a whole vocabulary.
        temperature: a positive number, or a tensor broadcastable to target's shape. No gradient is computed for it.
        with_entropy: whether to return the entropies.
        entropy_grad: whether the entropies carry a gradient.
        vocab_start: the first column of this rank's shard. By default the shards are equal and in the ranks' order.
        sum_hidden_grad: with a group, sum hidden's gradient over the ranks? False if the function returning hidden
            does so itself (Megatron's copy_to_tensor_model_parallel_region and
            gather_from_sequence_parallel_region).
        ignore_index: tokens with this target, like -100, have log-prob 0 without a gradient; their entropies stay.

    Returns:
        `log_probs` [...] and `entropy` [...] or None, float32 (float64 for float64 logits). The gradients of hidden,
        weight and bias have their dtypes.

    Raises:
        ValueError: an unsupported shape, dtype, device or temperature (see above).
        RuntimeError: hidden, weight or bias has no memory (a parameter resharded by FSDP).
        IndexError: on the CPU without a group, a target lies outside [0, V).

    Examples:
        >>> log_probs, entropy = linear_log_probs_and_entropy(hidden, lm_head.weight, tokens, temperature=0.7)
        >>> loss = -(advantages * log_probs + 0.01 * entropy).mean()
    """
    log_probs, entropy, _ = log_probs_entropy_and_hits(
        hidden, weight, target, bias, group, temperature,
        with_entropy=with_entropy, entropy_grad=entropy_grad, vocab_start=vocab_start, sum_hidden_grad=sum_hidden_grad,
        ignore_index=ignore_index,
    )  # fmt: skip
    return log_probs, entropy


def log_probs_entropy_and_hits(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    *,
    with_entropy: bool = True,
    entropy_grad: bool = True,
    vocab_start: int | None = None,
    sum_hidden_grad: bool = True,
    ignore_index: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The same, and [...] bool: whether the target's logit is the largest of its row, or as large as it.

    False where the target is ignored.
    """
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    check_head(hidden, weight, bias)
    check_rows(hidden.shape[:-1], target, temperature)
    ignored = None if ignore_index is None else target == ignore_index
    if ignored is not None:
        target = target.masked_fill(ignored, 0)
    column = columns_of(target, weight.shape[0], group, vocab_start)
    if group is None:
        check_columns(column, weight.shape[0], "first dimension of `weight`")
    scale = scale_of(temperature, target, compute_dtype(hidden.dtype))
    rows = hidden.reshape(-1, hidden.shape[-1])
    called_eagerly("linear_log_probs_and_entropy")
    function = cast(Any, _LinearLogProbsAndEntropy)
    log_probs, entropy, hits = function.apply(
        rows,
        weight,
        bias,
        column.reshape(-1, 1),
        scale.reshape(-1, 1),
        group,
        with_entropy,
        entropy_grad,
        sum_hidden_grad,
    )
    shape = target.shape
    log_probs, hits = log_probs.view(shape), hits.view(shape)
    if ignored is not None:
        log_probs, hits = log_probs.masked_fill(ignored, 0), hits & ~ignored
    return log_probs, None if entropy is None else entropy.view(shape), hits


def as_autocast(*tensors: Tensor | None) -> list[Any]:
    """What `F.linear` would compute with: autocast's dtype, but for float64."""
    device = next(each.device.type for each in tensors if each is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [
        each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in tensors
    ]


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, model: str = "") -> None:
    """`model` is the prefix of the arguments' names."""
    if not hidden.dtype.is_floating_point:
        raise ValueError(f"`{model}hidden` must have a floating dtype, got {hidden.dtype}")
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(
            f"`{model}hidden` must have shape [..., D], D > 0, got {list(hidden.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        wanted, given = f"[V, {hidden.shape[-1]}], V > 0", list(weight.shape)
        raise ValueError(f"`{model}weight` must have shape {wanted}, got {given}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` must have shape [{weight.shape[0]}], got {list(bias.shape)}")
    for name, other in ((f"{model}weight", weight), ("bias", bias)):
        if other is None:
            continue
        if (other.dtype, other.device) != (hidden.dtype, hidden.device):
            raise ValueError(
                f"`{name}` must have the dtype and device of `{model}hidden`, {hidden.dtype} on {hidden.device}, "
                f"got {other.dtype} on {other.device}; cast one of them, or call under torch.autocast"
            )


class _LinearLogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, D]
        weight: Tensor,  # [V_local, D]
        bias: Tensor | None,  # [V_local]
        column: Tensor,  # [N, 1] int64, of this shard; outside [0, V_local): in another one
        scale: Tensor,  # [N, 1] compute dtype
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        entropy_grad: bool,
        sum_hidden_grad: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        found, at = inside(column, weight.shape[0])
        stats, picked = linear_row_stats(
            hidden, weight, bias, [scale], [1.0], [True], [False], at, _DEFAULT_CHUNK, ""
        )
        whole = RowStatistics.of_shard(scale, stats[0, :3].unbind(0), picked, found, group)
        ctx.save_for_backward(
            hidden, weight, bias, column, scale, whole.peak, whole.log_sum, whole.mean
        )
        ctx.set_materialize_grads(False)
        ctx.group = group if sum_hidden_grad else None
        hits = (whole.target_logit >= whole.peak).squeeze(-1)
        return *whole.outputs(ctx, with_entropy, entropy_grad), hits

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, column, scale, *statistics = ctx.saved_tensors
        of = Coefficients.of(scale, statistics, grad_log_probs, grad_entropy)
        wanted = list(ctx.needs_input_grad[:3])
        grads = linear_row_grad(
            hidden,
            weight,
            bias,
            of.terms,
            of.affine,
            column,
            of.weight,
            wanted,
            False,
            _DEFAULT_CHUNK,
            "",
        )
        if wanted[0] and ctx.group is not None:
            dist.all_reduce(grads[0], group=ctx.group)
        made = [grad if asked else None for grad, asked in zip(grads, wanted, strict=True)]
        return *made, *[None] * 6
