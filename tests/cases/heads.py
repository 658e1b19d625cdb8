"""Losses whose logits are made inside the compiled function: one function per way of writing the head.

A row is a function with `@head(...)`: its parameters name its inputs (`harness.py` makes them), it returns a tuple of
tensors. `fused` counts the loops over rows (`row_loop`) in training.

Entry point: `HEADS`. The logits of all of them are never whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.cases.spellings import IGNORE, NV, Outputs, Spelling, pick

BSV = "[B,S,V]"
HEADS: list[Spelling] = []


def head(
    shape: str = NV, fused: int = 2, dtypes: tuple[torch.dtype, ...] = ()
) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
    """Enter the decorated function into the table."""

    def enter(fn: Callable[..., Outputs]) -> Callable[..., Outputs]:
        HEADS.append(
            Spelling(
                name=fn.__name__,
                classes=(),
                fn=fn,
                shape=shape,
                fused=fused,
                inputs=tuple(inspect.signature(fn).parameters),
                dtypes=dtypes or (torch.float32, torch.bfloat16),
                data=("plain",),
            )
        )
        return fn

    return enter


def values_of(logits: Tensor, target: Tensor) -> Outputs:
    """Log-probs and entropies."""
    log_probs = logits.log_softmax(-1)
    return pick(log_probs, target), -(log_probs.exp() * log_probs).sum(-1)


# ---- the matmul ---------------------------------------------------------------------------------------------------


@head(dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64))
def matmul(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(hidden @ weight.t(), target)


@head(BSV)
def linear_of_sequences(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(F.linear(hidden, weight), target)


@head(dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64))
def linear_with_bias(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
    return values_of(F.linear(hidden, weight, bias), target)


@head(BSV)
def bias_of_sequences(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
    return values_of(F.linear(hidden, weight, bias), target)


@head(BSV)
def bias_added_afterwards(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
    return values_of(bias + hidden @ weight.t(), target)


@head()
def weight_kept_as_columns(hidden: Tensor, turned_weight: Tensor, target: Tensor) -> Outputs:
    return values_of(hidden @ turned_weight, target)


@head(BSV)
def einsum(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(torch.einsum("bsd,vd->bsv", hidden, weight), target)


@head(BSV)
def tied_to_the_embedding(weight: Tensor, target: Tensor) -> Outputs:
    hidden = F.embedding(target, weight).tanh()
    return values_of(hidden @ weight.t(), target)


@head()
def hidden_made_in_the_graph(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(F.rms_norm(hidden, hidden.shape[-1:]) @ weight.t(), target)


@head()
def hidden_used_again(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return *values_of(hidden @ weight.t(), target), hidden.square().sum(-1)


@head()
def frozen_weight(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(hidden @ weight.detach().t(), target)


@head()
def hidden_without_gradient(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(hidden.detach() @ weight.t(), target)


@head()
def only_the_bias_learns(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
    return values_of(F.linear(hidden.detach(), weight.detach(), bias), target)


# ---- dtypes -------------------------------------------------------------------------------------------------------


@head(dtypes=(torch.bfloat16, torch.float16))
def logits_in_float32(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of((hidden @ weight.t()).float(), target)


@head(dtypes=(torch.bfloat16,))
def head_in_float32(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(hidden.float() @ weight.float().t(), target)


# ---- scales -------------------------------------------------------------------------------------------------------


@head(BSV)
def temperature(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of((hidden @ weight.t()).float() / 0.7, target)


@head(BSV)
def temperature_of_each_sequence(
    hidden: Tensor, weight: Tensor, target: Tensor, batch_temperature: Tensor
) -> Outputs:
    return values_of(F.linear(hidden, weight) / batch_temperature, target)


@head()
def temperature_of_each_row(
    hidden: Tensor, weight: Tensor, target: Tensor, row_temperature: Tensor
) -> Outputs:
    return values_of(F.linear(hidden, weight) / row_temperature[:, None], target)


@head()
def two_temperatures(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(logits, target), *values_of(logits / 0.5, target)


# ---- softcaps -----------------------------------------------------------------------------------------------------


@head(dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64))
def softcap(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(2 * torch.tanh(hidden @ weight.t() / 2), target)


@head(BSV)
def softcap_of_sequences(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
    logits = F.linear(hidden, weight, bias)
    logits = torch.tanh(logits * 0.5)
    return values_of((logits * 2).float() / 0.7, target)


@head(BSV, dtypes=(torch.bfloat16, torch.float16))
def softcap_in_float32(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(2 * torch.tanh(F.linear(hidden, weight).float() / 2), target)


@head()
def softcap_and_policy(
    hidden: Tensor, weight: Tensor, target: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    logits = 3 * torch.tanh(hidden @ weight.t() / 3)
    log_probs, entropy = values_of(logits, target)
    ratio = (log_probs - log_probs.detach() - drift).exp()
    return (-(ratio * advantages).mean() - 0.01 * entropy.mean(),)


# ---- losses -------------------------------------------------------------------------------------------------------


@head()
def cross_entropy(hidden: Tensor, weight: Tensor, ignored_target: Tensor) -> Outputs:
    return (F.cross_entropy(hidden @ weight.t(), ignored_target, ignore_index=IGNORE),)


@head()
def label_smoothing(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return (F.cross_entropy(hidden @ weight.t(), target, label_smoothing=0.1),)


@head()
def z_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    lse = logits.logsumexp(-1)
    return (pick(logits, target) - lse).mean(), lse.square().mean()


@head()
def several_losses(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    other = (target + 1) % logits.shape[-1]
    return (F.cross_entropy(logits, target), *values_of(logits, other))


@head()
def columns_of_each_row(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    columns = torch.stack([target, (target + 3) % weight.shape[0]], -1)
    return ((hidden @ weight.t()).log_softmax(-1).gather(-1, columns),)


@head()
def policy(
    hidden: Tensor, weight: Tensor, target: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    log_probs, entropy = values_of(hidden @ weight.t(), target)
    ratio = (log_probs - log_probs.detach() - drift).exp()
    clipped = ratio.clamp(0.8, 1.2)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    return (-surrogate.mean() - 0.01 * entropy.mean(),)


# ---- rows ---------------------------------------------------------------------------------------------------------


@head(BSV)
def shifted(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of((hidden @ weight.t())[:, :-1], target[:, 1:])


@head(BSV)
def response_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = (hidden @ weight.t())[:, 1:3].reshape(-1, weight.shape[0])
    return (F.cross_entropy(logits, target[:, 2:4].reshape(-1)),)


@head(BSV)
def one_sequence(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of((hidden @ weight.t())[1], target[1])


@head(BSV, fused=4)
def two_heads(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    first = values_of(hidden @ weight.t(), target)
    return *first, *values_of(hidden.tanh() @ weight.t(), target)


@head(BSV)
def checkpointed(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    def loss(hidden: Tensor, weight: Tensor) -> Outputs:
        return values_of(hidden @ weight.t(), target)

    return checkpoint(loss, hidden, weight, use_reentrant=False)  # type: ignore[no-any-return]
