"""The first losses of a user with logits to pass in, one function each, written as without this package.

Entry point: `LOSSES`: a name -> `logits [N, V], target [N], old log-probs [N], advantages [N]` to a scalar or to [N].
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from bench.cases.losses import policy_loss, values

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def cross_entropy_mean(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def cross_entropy_none(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="none")


def log_prob(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def entropy(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def log_prob_and_entropy(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    log_probs, entropies = values("plain")(logits, target)
    return log_probs + 0.01 * entropies


def ppo(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return policy_loss(*values("plain")(logits, target), old, advantages)


LOSSES: dict[str, Loss] = {
    "cross entropy, mean": cross_entropy_mean,
    "cross entropy, none": cross_entropy_none,
    "log-prob": log_prob,
    "entropy": entropy,
    "log-prob + entropy": log_prob_and_entropy,
    "PPO": ppo,
}
