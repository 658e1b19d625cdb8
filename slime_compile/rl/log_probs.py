"""Per-token log-probs and entropies for eager callers, over the two fused operators.

Entry point: `log_probs_and_entropy`. It holds the logits and nothing else of their size; the backward makes one such
tensor, the gradient. A loss under `torch.compile(..., backend="slime_fused")` needs none of this: write it as you like.

With y = logits / temperature, p = softmax(y) and H the entropy of p:

    log p_t = (y_t - max) - log_sum         d log p_t / dy = onehot(t) - p
    H       = log_sum - mean                d H / dy       = -p * (log p + H) = -p * ((y - max) - mean)

(max, log_sum, mean: `slime_fused::row_stats`, docs/ops.md.) No temperature gradient, no double backward.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_compile.ops import row_grad, row_stats
from slime_compile.ops.reference import compute_dtype

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
    gives NaN for both). A row with NaN or +inf, or with nothing but -inf, gives NaN. A row whose incoming gradients
    are 0 gets a gradient of 0, whatever it holds.

    With a `group`, the vocabulary is sharded over its ranks and every rank gets the results of the whole
    vocabulary. The forward does one all_gather of four numbers a row and the backward does no collective; neither
    depends on `requires_grad`, on the number of rows, or on the other options. The incoming gradients must be equal
    on all ranks.

    Args:
        logits: [..., V] any floating dtype, any strides; with a group this rank's [..., V_local].
        target: [...] integer, columns of the whole vocabulary.
        group: the process group over which the last dimension is sharded, or None if it is not.
        temperature: a positive number, or a tensor broadcastable to target's shape. No gradient is computed for it.
        with_entropy: whether to return the entropies.
        entropy_grad: whether the entropies carry a gradient.
        vocab_start: the first column of this rank's shard. By default the shards are equal and in the ranks' order.

    Returns:
        `log_probs` [...] and `entropy` [...] or None, float32 (float64 for float64 logits). The gradient of the
        logits has the logits' dtype.

    Raises:
        ValueError: a shape, a dtype or the temperature is not as said above.
        IndexError: on the CPU without a group, a target lies outside [0, V). On a GPU, and in compiled code, its
            log-prob is NaN; with a group, a target that no shard holds has log-prob -inf.

    Example:
        >>> log_probs, entropy = log_probs_and_entropy(logits, tokens, temperature=0.7)
        >>> loss = -(advantages * log_probs + 0.01 * entropy).mean()
    """
    _check_arguments(logits, target, temperature)
    if group is not None and vocab_start is None:
        vocab_start = dist.get_rank(group) * logits.shape[-1]
    column = target.to(torch.int64).unsqueeze(-1) - (vocab_start or 0)
    if group is None and logits.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_columns(column, logits.shape[-1])
    scale = _scale(logits, target, temperature)
    function = cast(Any, _LogProbsAndEntropy)
    log_probs, entropy = function.apply(logits, column, scale, group, with_entropy, entropy_grad)
    return log_probs, entropy


def _check_arguments(logits: Tensor, target: Tensor, temperature: float | Tensor) -> None:
    # All before the first collective: a rank that raises must not leave the others waiting.
    if not logits.dtype.is_floating_point:
        raise ValueError(f"`logits` must have a floating dtype, got {logits.dtype}")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"`logits` must have shape [..., V], V > 0, got {list(logits.shape)}")
    if target.dtype == torch.bool or target.dtype.is_floating_point or target.dtype.is_complex:
        raise ValueError(f"`target` must have an integer dtype, got {target.dtype}")
    if target.shape != logits.shape[:-1]:
        wanted, given = list(logits.shape[:-1]), list(target.shape)
        raise ValueError(f"`target` must have shape {wanted}, got {given}")
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}")
        return
    if temperature.requires_grad:
        raise ValueError(
            "`temperature` must not require grad, since no gradient is computed for it; "
            "pass temperature.detach()"
        )
    if not _expands(temperature.shape, target.shape):
        wanted, given = list(target.shape), list(temperature.shape)
        raise ValueError(f"`temperature` must be broadcastable to {wanted}, got {given}")


def _expands(shape: torch.Size, wanted: torch.Size) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


def _check_columns(column: Tensor, vocab: int) -> None:
    outside = column[(column < 0) | (column >= vocab)]
    if outside.numel():
        raise IndexError(
            f"`target` must lie in [0, {vocab}): index {outside[0].item()} is out of bounds for the "
            f"last dimension of `logits` with size {vocab}. Replace ignored tokens by any valid "
            "column and give them no weight in the loss."
        )


def _scale(logits: Tensor, target: Tensor, temperature: float | Tensor) -> Tensor:
    """1 / temperature, [..., 1] in the compute dtype."""
    compute = compute_dtype(logits.dtype)
    if isinstance(temperature, Tensor):
        scale = temperature.to(logits.device, compute).reciprocal()
    else:
        scale = torch.full((), 1.0 / temperature, dtype=compute, device=logits.device)
    return scale.expand(target.shape).unsqueeze(-1)


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
        absent = torch.nan if group is None else -torch.inf
        stats = _local_stats(logits, column, scale, absent)
        if group is not None:
            stats = _combine(_all_gather(stats, group))
        top, log_sum, mean, target_logit = stats
        ctx.save_for_backward(logits, column, scale, top, log_sum, mean)
        ctx.set_materialize_grads(False)
        log_probs = ((target_logit - top) - log_sum).squeeze(-1)
        if not with_entropy:
            return log_probs, None
        entropy = (log_sum - mean).squeeze(-1)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, column, scale, top, log_sum, mean = ctx.saved_tensors
        # scale * (grad_log_probs * (onehot - p) - grad_entropy * p * (z - mean)), z = scale * logits - max
        none = torch.zeros_like(top)
        weight = none if grad_log_probs is None else scale * grad_log_probs.unsqueeze(-1)
        slope = none if grad_entropy is None else -scale * grad_entropy.unsqueeze(-1)
        # A masked row stays empty even if its mean is NaN.
        offset = torch.where(slope == 0, 0.0, -slope * mean) - weight
        terms = torch.stack([scale, top, log_sum, offset, slope], -1)
        affine = none.expand(*none.shape[:-1], 3)
        grad = row_grad(logits, terms, affine, column, weight, False, logits.dtype, "")
        return grad, None, None, None, None, None


def _local_stats(logits: Tensor, column: Tensor, scale: Tensor, absent: float) -> Tensor:
    """(max, log_sum, mean, target logit) of this shard as [4, ..., 1]; `absent` for a target outside it."""
    top, log_sum, mean, _ = row_stats(logits, scale, 1.0, "", total=False)
    inside = (column >= 0) & (column < logits.shape[-1])
    target_logit = logits.gather(-1, column.where(inside, 0)).to(scale.dtype) * scale
    return torch.stack([top, log_sum, mean, target_logit.where(inside, absent)])


def _all_gather(stats: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's [4, ...] as [ranks, 4, ...]."""
    ranks = dist.get_world_size(group)
    gathered = stats.new_empty([ranks * stats.shape[0], *stats.shape[1:]])
    dist.all_gather_into_tensor(gathered, stats, group=group)
    return gathered.view(ranks, *stats.shape)


def _combine(shards: Tensor) -> Tensor:
    """The whole vocabulary's (max, log_sum, mean, target logit) [4, ...] from the shards' [ranks, 4, ...]."""
    tops, log_sums, means, target_logits = shards.unbind(1)
    top = tops.amax(0)
    offset = tops - top
    mass = (offset + log_sums).exp()  # of each shard, 0 where it holds nothing but -inf
    sum_exp = mass.sum(0)
    mean = torch.where(mass == 0, 0.0, mass * (means + offset)).sum(0) / sum_exp
    return torch.stack([top, sum_exp.log(), mean, target_logits.amax(0)])
