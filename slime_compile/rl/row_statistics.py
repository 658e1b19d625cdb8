"""Shared by `log_probs_and_entropy` and `linear_log_probs_and_entropy`: numbers per row.

With y = logits / temperature, p = softmax(y) and H the entropy of p:

    log p_t = (y_t - peak / temperature) - log_sum     d log p_t / dy = onehot(t) - p
    H       = log_sum - mean                           d H / dy       = -p * (log p + H) = -p * (z - mean)

with z = (logits - peak) / temperature. (peak, the largest logit, log_sum, mean: `slime_fused::row_stats`, docs/ops.md.)
No temperature gradient, no double backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_compile.ops.reference import AFFINE

__all__ = [
    "Coefficients",
    "RowStatistics",
    "check_columns",
    "check_rows",
    "check_temperature",
    "columns_of",
    "scale_of",
]


# ---- arguments ----------------------------------------------------------------------------------------------------


def check_rows(rows: Sequence[int], target: Tensor, temperature: float | Tensor) -> None:
    """Checks the values of each row, before the first collective, so that no rank waits for one that raised.

    Raises:
        ValueError: a shape, a dtype or the temperature disagrees with the public functions' docstrings.
    """
    if target.dtype == torch.bool or target.dtype.is_floating_point or target.dtype.is_complex:
        raise ValueError(f"`target` must have an integer dtype, got {target.dtype}")
    if list(target.shape) != list(rows):
        raise ValueError(f"`target` must have shape {list(rows)}, got {list(target.shape)}")
    check_temperature(temperature, target.shape)


def check_temperature(temperature: float | Tensor, rows: Sequence[int]) -> None:
    """Positive, of a shape that expands to `rows`, without a gradient.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}")
        return
    if temperature.requires_grad:
        raise ValueError(
            "`temperature` must not require grad, since no gradient is computed for it; "
            "pass temperature.detach()"
        )
    if not _expands(temperature.shape, rows):
        wanted, given = list(rows), list(temperature.shape)
        raise ValueError(f"`temperature` must be broadcastable to {wanted}, got {given}")
    if temperature.device.type != "cpu" or torch.compiler.is_compiling():
        return  # looking would wait for the device
    wrong = temperature[~(temperature > 0)]
    if wrong.numel():
        raise ValueError(f"`temperature` must be positive, got {wrong[0].item()}")


def _expands(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, want) for size, want in sizes)


def columns_of(
    target: Tensor, vocab: int, group: dist.ProcessGroup | None, vocab_start: int | None
) -> Tensor:
    """[..., 1] int64: the target's column in this shard; outside [0, vocab) if another shard has it."""
    if group is not None and vocab_start is None:
        vocab_start = dist.get_rank(group) * vocab
    return target.to(torch.int64).unsqueeze(-1) - (vocab_start or 0)


def check_columns(column: Tensor, vocab: int, of: str) -> None:
    """On the CPU, because there looking does not wait for a device.

    Raises:
        IndexError: with a column outside [0, vocab); `of` names the tensor with this vocabulary.
    """
    if column.device.type != "cpu" or torch.compiler.is_compiling():
        return
    outside = column[(column < 0) | (column >= vocab)]
    if outside.numel():
        raise IndexError(
            f"`target` must lie in [0, {vocab}): index {outside[0].item()} is out of bounds for the "
            f"{of} with size {vocab}. Replace ignored tokens by any valid "
            "column and give them no weight in the loss."
        )


def scale_of(temperature: float | Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / temperature, [..., 1] in the compute dtype, on target's device."""
    if isinstance(temperature, Tensor):
        scale = temperature.to(target.device, dtype).reciprocal()
    else:
        scale = torch.full((), 1.0 / temperature, dtype=dtype, device=target.device)
    return scale.expand(target.shape).unsqueeze(-1)


# ---- forward ------------------------------------------------------------------------------------------------------


def inside(column: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """A mask of the columns in [0, vocab), and the columns with 0 in place of the others."""
    found = (column >= 0) & (column < vocab)
    return found, column.where(found, 0)


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of the full vocabulary, each [..., 1] in the compute dtype; `scale` is 1 / temperature."""

    scale: Tensor
    peak: Tensor
    log_sum: Tensor
    mean: Tensor
    target_logit: Tensor

    @classmethod
    def of_shard(
        cls,
        scale: Tensor,
        stats: Sequence[Tensor],
        picked: Tensor,
        found: Tensor,
        group: dist.ProcessGroup | None,
    ) -> RowStatistics:
        """From (peak, log_sum, mean) of this shard and the logit at each of its targets (`found`)."""
        absent = torch.nan if group is None else -torch.inf
        of_shard = torch.stack([*stats, picked.to(scale.dtype).where(found, absent)])
        if group is None:
            return cls(scale, *of_shard)
        return cls(scale, *_combine(_all_gather(of_shard, group), scale))

    @property
    def log_probs(self) -> Tensor:
        """[...]"""
        return (self.scale * (self.target_logit - self.peak) - self.log_sum).squeeze(-1)

    @property
    def entropy(self) -> Tensor:
        """[...]"""
        return (self.log_sum - self.mean).squeeze(-1)

    def outputs(
        self, ctx: Any, with_entropy: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A forward's results."""
        if not with_entropy:
            return self.log_probs, None
        entropy = self.entropy
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return self.log_probs, entropy


def _all_gather(stats: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's [4, ...] as [ranks, 4, ...]."""
    ranks = dist.get_world_size(group)
    gathered = stats.new_empty([ranks * stats.shape[0], *stats.shape[1:]])
    dist.all_gather_into_tensor(gathered, stats, group=group)
    return gathered.view(ranks, *stats.shape)


def _combine(shards: Tensor, scale: Tensor) -> Tensor:
    """The full vocabulary's (peak, log_sum, mean, target logit) [4, ...] from the shards' [ranks, 4, ...]."""
    peaks, log_sums, means, target_logits = shards.unbind(1)
    peak = peaks.amax(0)
    offset = scale * (peaks - peak)
    mass = (offset + log_sums).exp()  # of each shard, 0 for a shard of -inf only
    sum_exp = mass.sum(0)
    mean = torch.where(mass == 0, 0.0, mass * (means + offset)).sum(0) / sum_exp
    return torch.stack([peak, sum_exp.log(), mean, target_logits.amax(0)])


# ---- backward -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coefficients:
    """The logits' gradient in row normal form, without its columns: arguments of `row_grad` (docs/ops.md)."""

    terms: Tensor
    affine: Tensor
    weight: Tensor

    @classmethod
    def of(
        cls,
        scale: Tensor,
        statistics: Sequence[Tensor],
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Coefficients:
        """scale * (grad_log_probs * (onehot - p) - grad_entropy * p * (z - mean)) with z = scale * (logits - peak).

        `statistics` are peak, log_sum and mean of the full vocabulary.
        """
        peak, log_sum, mean = statistics
        none = torch.zeros_like(peak)
        weight = none if grad_log_probs is None else scale * grad_log_probs.unsqueeze(-1)
        slope = none if grad_entropy is None else -scale * grad_entropy.unsqueeze(-1)
        # A masked row stays empty even if its mean is NaN.
        offset = torch.where(slope == 0, 0.0, -slope * mean) - weight
        terms = torch.stack([scale, peak, log_sum, offset, slope], -1)
        return cls(terms, none.expand(*none.shape[:-1], AFFINE), weight)
