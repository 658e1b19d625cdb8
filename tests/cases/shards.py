"""Vocabulary-parallel losses as trainers write them; `Shard` says which columns a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

Outputs = tuple[Tensor, ...]
Loss = Callable[["Shard", Tensor, Tensor], Outputs]
CHUNK = 24
LOSSES: dict[str, Loss] = {}


@dataclass(frozen=True)
class Shard:
    """Columns `start` to `stop` of the vocabulary, and the ranks that hold the others."""

    start: int
    stop: int
    group: Any


def loss(fn: Loss) -> Loss:
    LOSSES[fn.__name__] = fn
    return fn


def local_target(shard: Shard, target: Tensor) -> tuple[Tensor, Tensor]:
    """The target's column in the shard, 0 where another rank has it, and where that is so."""
    foreign = (target < shard.start) | (target >= shard.stop)
    return torch.where(foreign, 0, target - shard.start), foreign


class CrossEntropy(torch.autograd.Function):
    """Megatron's fused kind: two collectives, everything in one buffer."""

    @staticmethod
    def forward(ctx, logits, target, shard):  # type: ignore[no-untyped-def]
        work = logits.float().clone()
        peak = work.max(-1)[0]
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
        work -= peak.unsqueeze(-1)
        local, foreign = local_target(shard, target)
        picked = work.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        picked[foreign] = 0.0
        work.exp_()
        sums = torch.stack([picked, work.sum(-1)])
        dist.all_reduce(sums, group=shard.group)
        picked, total = sums.unbind()
        work.div_(total.unsqueeze(-1))
        ctx.save_for_backward(work, foreign, local)
        return total.log() - picked

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        softmax, foreign, local = ctx.saved_tensors
        rows = torch.arange(softmax.shape[0])
        softmax[rows, local] -= 1.0 - foreign.float()
        return softmax.mul_(grad.unsqueeze(-1)), None, None


class Entropy(torch.autograd.Function):
    """slime's and verl's: three collectives."""

    @staticmethod
    def forward(ctx, logits, shard):  # type: ignore[no-untyped-def]
        peak = logits.max(-1, keepdim=True).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
        probs = (logits - peak).exp_()
        total = probs.sum(-1, keepdim=True)
        dist.all_reduce(total, group=shard.group)
        probs.div_(total)
        expected = (probs * logits).sum(-1, keepdim=True)
        dist.all_reduce(expected, group=shard.group)
        ctx.save_for_backward(logits, probs, expected)
        return (peak + total.log() - expected).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, probs, expected = ctx.saved_tensors
        return grad.unsqueeze(-1) * probs * (expected - logits), None


@loss
def log_probs_and_entropy(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """Five collectives."""
    return -CrossEntropy.apply(logits.clone(), target, shard), Entropy.apply(logits.clone(), shard)


@loss
def entropy_only(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    return (Entropy.apply(logits / 0.7, shard),)


@loss
def chunked(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """Five collectives for each chunk of rows."""
    parts = [
        log_probs_and_entropy(shard, rows / 0.7, tokens)
        for rows, tokens in zip(logits.split(CHUNK), target.split(CHUNK), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


@loss
def logged_entropy(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    log_probs, entropy = log_probs_and_entropy(shard, logits, target)
    return log_probs, entropy.detach()


class Combined(torch.autograd.Function):
    """The logsumexp of all shards from every shard's own."""

    @staticmethod
    def forward(ctx, own, shard):  # type: ignore[no-untyped-def]
        peak = own.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
        total = (own - peak).exp()
        dist.all_reduce(total, group=shard.group)
        norm = peak + total.log()
        ctx.save_for_backward(own, norm)
        return norm

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        own, norm = ctx.saved_tensors
        return grad * (own - norm).exp(), None


class Summed(torch.autograd.Function):
    """all_reduce forward, nothing backward, as Megatron's regions do it."""

    @staticmethod
    def forward(ctx, value, shard):  # type: ignore[no-untyped-def]
        value = value.clone()
        dist.all_reduce(value, group=shard.group)
        return value

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


@loss
def combined_norms(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    wide = logits.float()
    local, foreign = local_target(shard, target)
    picked = wide.gather(-1, local[:, None])[:, 0].masked_fill(foreign, 0.0)
    return (Summed.apply(picked, shard) - Combined.apply(wide.logsumexp(-1), shard),)


@loss
def differentiable_all_reduce(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """Plain autograd through `dist.all_reduce`, which eager autograd does not see."""
    peak = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
    shifted = logits - peak
    total = shifted.exp().sum(-1)
    dist.all_reduce(total, group=shard.group)
    local, foreign = local_target(shard, target)
    picked = shifted.gather(-1, local[:, None])[:, 0].masked_fill(foreign, 0.0)
    dist.all_reduce(picked, group=shard.group)
    return (picked - total.log(),)


@loss
def functional_collectives(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    with torch.no_grad():
        peak = funcol.all_reduce(logits.amax(-1, keepdim=True), "max", shard.group)
    shifted = logits - peak
    total = Summed.apply(shifted.exp().sum(-1), shard)
    local, foreign = local_target(shard, target)
    picked = shifted.gather(-1, local[:, None])[:, 0].masked_fill(foreign, 0.0)
    return (Summed.apply(picked, shard) - total.log(),)


class OneHotInBackward(torch.autograd.Function):
    """torchtitan's kind: log-probs are saved, backward writes a one-hot that is 0 for other ranks' targets."""

    @staticmethod
    def forward(ctx, logits, target, shard):  # type: ignore[no-untyped-def]
        wide = logits.float()
        peak = funcol.all_reduce(wide.amax(-1, keepdim=True), "max", shard.group)
        shifted = wide - peak
        total = funcol.all_reduce(shifted.exp().sum(-1, keepdim=True), "sum", shard.group)
        log_probs = shifted - total.log()
        foreign = (target < shard.start) | (target >= shard.stop)
        local = target - shard.start
        local[foreign] = 0
        picked = log_probs.gather(-1, local[:, None])
        picked[foreign[:, None]] = 0
        ctx.save_for_backward(log_probs, local, foreign)
        ctx.dtype = logits.dtype
        return -funcol.all_reduce(picked, "sum", shard.group)[:, 0]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        log_probs, local, foreign = ctx.saved_tensors
        one_hot = torch.zeros_like(log_probs)
        rows = torch.arange(len(local), device=local.device)
        one_hot[rows, local] = foreign.to(one_hot.dtype) - 1.0
        return ((one_hot + log_probs.exp()) * grad[:, None]).to(ctx.dtype), None, None


@loss
def one_hot_in_backward(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    return (-OneHotInBackward.apply(logits, target, shard),)


def whole(logits: Tensor, target: Tensor) -> dict[str, Outputs]:
    """What every loss is, without shards."""
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(-1, target[:, None])[:, 0]
    tempered = (logits / 0.7).log_softmax(-1)
    cool = tempered.gather(-1, target[:, None])[:, 0]

    def entropy(values: Tensor) -> Tensor:
        return torch.special.entr(values.exp()).sum(-1)

    return {
        "log_probs_and_entropy": (log_probs, entropy(log_softmax)),
        "entropy_only": (entropy(tempered),),
        "chunked": (cool, entropy(tempered)),
        "logged_entropy": (log_probs, entropy(log_softmax).detach()),
        "combined_norms": (log_probs,),
        "differentiable_all_reduce": (log_probs,),
        "functional_collectives": (log_probs,),
        "one_hot_in_backward": (log_probs,),
    }
