"""Functions with a backward of their own that generated programs call, in the ways people write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class StraightThrough(Function):
    """Forward a softmax, backward as if it were the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ClippedGradient(Function):
    """The identity; its gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class RowScaledGradient(Function):
    """The identity; its gradient is multiplied by a number per row, which itself gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale, None


class SoftmaxKept(Function):
    """A log-softmax that keeps its softmax and forgets the sum over the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        log_probs = x.log_softmax(-1)
        ctx.save_for_backward(log_probs.exp())
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (probs,) = ctx.saved_tensors
        return grad - probs


class LogSoftmaxInPlace(Function):
    """A log-softmax computed in a copy, whose backward writes over what it kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        out -= out.amax(-1, keepdim=True)
        out -= out.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(out)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return grad - kept.exp().mul_(grad.sum(-1, keepdim=True))


class InPlaceCrossEntropy(Function):
    """As Megatron writes it: the softmax is computed in the memory of the logits and kept there for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float()
        logits -= logits.max(-1, keepdim=True).values
        chosen = logits.gather(-1, target[..., None]).clone()
        total = torch.exp(logits, out=logits).sum(-1, keepdim=True)
        loss = (total.log() - chosen).squeeze(-1)
        ctx.save_for_backward(logits.div_(total), target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, target = ctx.saved_tensors
        softmax.scatter_add_(-1, target[..., None], -torch.ones_like(softmax[..., :1]))
        return softmax.mul_(grad[..., None]), None


class EntropyOwnBackward(Function):
    """The entropy, whose backward is written out: p (entropy - x + (p x)) ..., as Megatron-style trainers have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x - x.amax(-1, keepdim=True)
        probs = x.exp()
        total = probs.sum(-1, keepdim=True)
        probs = probs.div_(total)
        expected = (probs * x).sum(-1, keepdim=True)
        ctx.save_for_backward(x, probs, expected)
        return (total.log() - expected).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, probs, expected = ctx.saved_tensors
        return (expected - x).mul(probs).mul(grad.unsqueeze(-1))


class AllReduced(Function):
    """A sum over the ranks; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class AllReducedBothWays(Function):
    """A sum over the ranks, of the gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad
