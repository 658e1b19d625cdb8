"""Trainers' cross entropies and entropies as `autograd.Function`s, the parts of the losses.

Megatron's own if installed (`megatron_cross_entropy`), otherwise its steps; slime's entropy, also with a compiled
function inside; slime#2011's, with one softmax kept.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def has_megatron() -> bool:
    return importlib.util.find_spec("megatron") is not None


@functools.cache
def megatron_cross_entropy() -> Callable[..., Tensor]:
    """Megatron's fused cross entropy, without its warnings about optional imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.fusions import fused_cross_entropy
    found: Callable[..., Tensor] = fused_cross_entropy.fused_vocab_parallel_cross_entropy
    return found


class CrossEntropyLikeMegatron(torch.autograd.Function):
    """Without megatron-core: its steps, buffers and two collectives; the gradient is rounded to bf16."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        softmax = logits.float()  # the same tensor where it is float32 already
        peak = softmax.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        softmax.sub_(peak.unsqueeze(-1))
        start = dist.get_rank(group) * logits.shape[-1]
        foreign = (target < start) | (target >= start + logits.shape[-1])
        local = (target - start).masked_fill(foreign, 0).unsqueeze(-1)
        of_target = softmax.gather(-1, local).squeeze(-1).masked_fill(foreign, 0.0)
        sums = torch.stack([of_target, softmax.exp_().sum(-1)])
        dist.all_reduce(sums, group=group)
        of_target, total = sums.unbind()
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, foreign, local)
        return total.log() - of_target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        softmax, foreign, local = ctx.saved_tensors
        softmax.scatter_add_(-1, local, (foreign.float() - 1.0).unsqueeze(-1))
        return softmax.mul_(grad.unsqueeze(-1)).bfloat16(), None, None


class VocabParallelEntropy(torch.autograd.Function):
    """Entropy over a sharded vocabulary: exp and div in place, backward from values kept in forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        logits = logits.float()
        peak = logits.max(dim=-1, keepdim=True).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        softmax = (logits - peak).exp_()
        total = softmax.sum(dim=-1, keepdim=True)
        dist.all_reduce(total)
        softmax.div_(total)
        expected = (softmax * logits).sum(dim=-1, keepdim=True)
        dist.all_reduce(expected)
        ctx.save_for_backward(logits, softmax, expected)
        return (peak + total.log() - expected).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad_entropy: Tensor) -> Tensor:  # type: ignore[override]
        logits, softmax, expected = ctx.saved_tensors
        logits.sub_(expected)
        softmax.mul_(logits).mul_(grad_entropy.unsqueeze(-1))
        logits.add_(expected)
        return softmax.neg_()


class NestedEntropy(VocabParallelEntropy):
    """The same with its product and sum in a function compiled at its definition."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        @torch.compile(dynamic=True)
        def mul_reduce(a: Tensor, b: Tensor) -> Tensor:
            return (a * b).sum(dim=-1, keepdim=True)

        peak = logits.max(dim=-1, keepdim=True).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        softmax = (logits - peak).exp_()
        total = softmax.sum(dim=-1, keepdim=True)
        dist.all_reduce(total)
        softmax.div_(total)
        expected = mul_reduce(softmax, logits)
        dist.all_reduce(expected)
        ctx.save_for_backward(logits, softmax, expected)
        return (peak + total.log() - expected).squeeze(-1)


class ReusedSoftmax(torch.autograd.Function):
    """Log-prob and entropy over one softmax buffer. It becomes the gradient, with one more `[N, V]` meanwhile.

    With p the softmax, H the entropy, g and h the gradients of log-prob and entropy:
    grad = g * ([v == target] - p) - h * p * (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        softmax = logits.float() if logits.dtype != torch.float32 else logits.clone()
        peak = softmax.amax(-1, keepdim=True)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        softmax.sub_(peak)
        of_target = softmax.gather(-1, target.unsqueeze(-1))
        dist.all_reduce(of_target)
        total = softmax.exp_().sum(-1, keepdim=True)
        dist.all_reduce(total)
        softmax.div_(total)
        expected = (softmax * _log(softmax)).sum(-1, keepdim=True)
        dist.all_reduce(expected)
        ctx.save_for_backward(softmax, target, expected)
        ctx.dtype = logits.dtype
        return (of_target - total.log()).squeeze(-1), -expected.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        softmax, target, expected = ctx.saved_tensors
        g, h = grad_log_prob.unsqueeze(-1), grad_entropy.unsqueeze(-1)
        softmax.mul_(_log(softmax).sub_(expected).mul_(-h).sub_(g))
        softmax.scatter_add_(-1, target.unsqueeze(-1), g)
        return softmax.to(ctx.dtype), None


def _log(softmax: Tensor) -> Tensor:
    """A probability of 0 has a finite logarithm here and contributes 0."""
    return softmax.clamp_min(torch.finfo(torch.float32).tiny).log_()
