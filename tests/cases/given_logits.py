"""In-place losses over a vocabulary shard: megatron-core's own functions; slime's, verl's, ROLL's as they write them.

Each takes `(logits [N, V/tp], target [N], group)` and gives `[N]`; `meant` is the same over the whole vocabulary.
`HANDED` says what a program hands to a loss: the given logits themselves, logits that it makes, or a clone; `OF_HEADS`
those of a head, whose values it takes as they are, or sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases.functions import VocabParallelEntropy

Loss = Callable[[Tensor, Tensor, Any], Tensor]


def megatron(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    loss: Tensor = vocab_parallel_cross_entropy(logits.unsqueeze(1), target.unsqueeze(1))
    return loss.squeeze(1)


def megatron_fused(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """Its gradient is rounded to bfloat16."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    loss: Tensor = fused_vocab_parallel_cross_entropy(
        logits.unsqueeze(1), target.unsqueeze(1), group
    )
    return loss.squeeze(1)


class SlimeEntropy(VocabParallelEntropy):
    """slime's: backward subtracts in the logits that forward was given, and does not put them back."""

    @staticmethod
    def backward(ctx: Any, grad_entropy: Tensor) -> Tensor:  # type: ignore[override]
        logits, softmax, expected = ctx.saved_tensors
        logits.sub_(expected)
        return softmax.mul_(logits).mul_(grad_entropy.unsqueeze(-1)).neg_()


def slime_entropy(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    return SlimeEntropy.apply(logits)


def verl_entropy(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """Backward subtracts in the logits, and adds again."""
    return VocabParallelEntropy.apply(logits)


class ExponentialsKept(torch.autograd.Function):
    """ROLL's log-prob: the exponentials are left in the logits, and divided by their sum in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        logits = logits.float()
        peak = logits.max(dim=-1)[0]
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        logits -= peak.unsqueeze(-1)
        own = target - dist.get_rank(group) * logits.shape[-1]
        missed = (own < 0) | (own >= logits.shape[-1])
        own[missed] = 0
        rows = torch.arange(logits.shape[0])
        chosen = logits[rows, own].clone()
        chosen[missed] = 0.0
        torch.exp(logits, out=logits)
        total = logits.sum(dim=-1)
        dist.all_reduce(total, group=group)
        dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(logits, missed, total, own)
        return chosen - total.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        exponentials, missed, total, own = ctx.saved_tensors
        gradient = exponentials.div_(total.unsqueeze(-1)).neg_()
        gradient[torch.arange(len(own)), own] += 1 - missed.float()
        return gradient.mul_(grad.unsqueeze(-1)), None, None


def roll_log_prob(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    return ExponentialsKept.apply(logits, target, group)


def verl_both(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    """verl's engine: the log-prob from a copy where the entropy keeps the logits."""
    copied = logits.clone()
    return VocabParallelEntropy.apply(logits) - megatron(copied, target, group)


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (megatron, megatron_fused, slime_entropy, verl_entropy, verl_both, roll_log_prob)
}


def given(loss: Loss, logits: Tensor, target: Tensor, group: Any) -> Tensor:
    return loss(logits, target, group)


def made(loss: Loss, logits: Tensor, target: Tensor, group: Any) -> Tensor:
    return loss(logits * 1.25, target, group)


def cloned(loss: Loss, logits: Tensor, target: Tensor, group: Any) -> Tensor:
    return loss(logits.clone(), target, group)


def head(loss: Loss, hidden: Tensor, target: Tensor, group: Any, weight: Tensor) -> Tensor:
    return loss(hidden @ weight.t(), target, group)


def summed_head(loss: Loss, hidden: Tensor, target: Tensor, group: Any, weight: Tensor) -> Tensor:
    return head(loss, hidden, target, group, weight).sum()


HANDED = {handed.__name__: handed for handed in (given, made, cloned)}
OF_HEADS = {handed.__name__: handed for handed in (head, summed_head)}


def meant(name: str, handed: str, logits: Tensor, target: Tensor) -> Tensor:
    """Over the whole vocabulary, in any dtype; the weight of a head is the identity."""
    log_probs = (logits * 1.25 if handed == "made" else logits).log_softmax(-1)
    loss = -log_probs.gather(-1, target[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    values = {
        "megatron": loss,
        "megatron_fused": loss,
        "slime_entropy": entropy,
        "verl_entropy": entropy,
        "verl_both": entropy - loss,
        "roll_log_prob": -loss,
    }
    return values[name].sum() if handed == "summed_head" else values[name]
