"""Losses for the device: functions, data, and `LOSSES`, the table of what `test_losses.py` runs.

A row names a loss, how it is compiled and in which dtypes. Sizes are small, since kernels may be interpreted: an odd
vocabulary and one that ends with a whole group of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS, VOCAB, HIDDEN = 16, 1027, 24
DTYPES = (F32, BF16, F16)

Loss = Callable[..., Tensor]


# ---- given logits: (logits, tokens, advantages) -------------------------------------------------------------------


def policy(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.float(), -1)
    chosen = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -(advantages * chosen).mean() - 0.01 * entropy.mean()


def log_softmax_with_dtype(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    return -(log_p.gather(-1, tokens[:, None])[:, 0] * advantages).mean()


def entropy_with_dtype(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    p = torch.softmax(logits, -1, dtype=torch.float32)
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    return -((p * log_p).sum(-1) * advantages).mean()


def log_softmax_in_half(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    return -(torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0] * advantages).mean()


def autocast(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return (F.cross_entropy(logits, tokens, reduction="none") * advantages).mean()


def cross_entropies(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    ignored = torch.where(advantages > 0.5, -100, tokens)
    hard = F.cross_entropy(logits.float(), ignored, ignore_index=-100)
    return hard + F.cross_entropy(logits.float(), ignored, label_smoothing=0.1)


def shifted(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """The logits of every token but the last, as of a causal model."""
    both = logits.view(2, ROWS // 2, -1)[:, :-1].float()
    return F.cross_entropy(both.flatten(0, 1), tokens.view(2, -1)[:, 1:].flatten())


def of_a_column_slice(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """Rows of an odd stride, whose gradient is aligned otherwise."""
    return policy(logits[:, :-1], tokens.clamp(max=logits.shape[1] - 2), advantages)


def checkpointed(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    loss: Tensor = checkpoint(policy, logits, tokens, advantages, use_reentrant=False)
    return loss


def classes_first(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """[2, V, 8], as of a segmentation; not fused, and Triton's kernels of inductor's reduce over another axis."""
    moved = logits.view(2, 8, -1).transpose(1, 2).contiguous()
    losses = F.cross_entropy(moved.float(), tokens.view(2, 8), reduction="none")
    return (losses * advantages.view(2, 8)).mean()


# ---- a head inside: (hidden, weight, tokens, advantages) ----------------------------------------------------------


def head(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    return policy(hidden @ weight.t(), tokens, advantages)


def capped_head(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return policy(30 * torch.tanh(logits / 30), tokens, advantages)


def autocast_head(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = F.linear(hidden, weight)
        return (F.cross_entropy(logits.float(), tokens, reduction="none") * advantages).mean()


# ---- two policies: (logits, reference, tokens, advantages) --------------------------------------------------------


def distillation(logits: Tensor, reference: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    log_p, log_r = torch.log_softmax(logits.float(), -1), torch.log_softmax(reference.float(), -1)
    return ((log_p.exp() * (log_p - log_r)).sum(-1) * advantages).mean()


# ---- data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What a loss is called with: leaves that require grad, then numbers per row."""

    leaves: list[Tensor]
    rest: list[Tensor]


def per_row(seed: int, rows: int, vocab: int, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (rows,), generator=draw)
    return [tokens.to(device), torch.randn(rows, generator=draw).to(device)]


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def given(dtype: torch.dtype, seed: int = 0, vocab: int = VOCAB, device: str = "cuda") -> Data:
    logits = (3 * _random(seed + 1, ROWS, vocab)).to(dtype).to(device)
    return Data([logits], per_row(seed, ROWS, vocab, device))


def two_given(dtype: torch.dtype, seed: int = 0, vocab: int = VOCAB, device: str = "cuda") -> Data:
    first, second = given(dtype, seed, vocab, device), given(dtype, seed + 10, vocab, device)
    return Data([*first.leaves, *second.leaves], first.rest)


def inside(dtype: torch.dtype, seed: int = 0, vocab: int = VOCAB, device: str = "cuda") -> Data:
    hidden = _random(seed + 1, ROWS, HIDDEN).to(dtype).to(device)
    weight = (_random(seed + 2, vocab, HIDDEN) / 2).to(dtype).to(device)
    return Data([hidden, weight], per_row(seed, ROWS, vocab, device))


# ---- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One loss, as `test_losses.py` compiles it.

    Attributes:
        fused: at least so many fused operators.
        options: of the backend; `chunk_rows` are the rows of a chunk of a head.
        how: more arguments of `torch.compile`.
        handed_over: the logits are no leaf, and nothing else holds them.
    """

    name: str
    loss: Loss
    dtypes: tuple[torch.dtype, ...] = DTYPES
    data: Callable[..., Data] = given
    fused: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    handed_over: bool = False
    chunk_rows: int = 0


HALVES = (BF16, F16)
IN_CHUNKS: dict[str, Any] = {"data": inside, "chunk_rows": 5}

LOSSES = [
    Row("policy", policy),
    Row("policy handed over", policy, handed_over=True),
    Row("policy consumed", policy, handed_over=True, options={"consume_logits": True}),
    Row("policy aot_eager", policy, handed_over=True, options={"inner": "aot_eager"}),
    Row("policy softmax kept", policy, options={"save": "softmax"}),
    Row("policy dynamic", policy, (BF16,), how={"dynamic": True}),
    Row("policy verified", policy, (BF16,), options={"verify": True}),
    Row("log_softmax with dtype", log_softmax_with_dtype, HALVES),
    Row("entropy with dtype", entropy_with_dtype, HALVES),
    Row("log_softmax in half", log_softmax_in_half, HALVES),
    Row("autocast", autocast, HALVES),
    Row("cross entropies", cross_entropies),
    Row("shifted", shifted, (F32, BF16)),
    Row("shifted handed over", shifted, (BF16,), handed_over=True),
    Row("column slice", of_a_column_slice, (BF16,)),
    Row("checkpointed", checkpointed, (F32,)),
    Row("classes first", classes_first, (F32,), fused=0),
    Row("distillation", distillation, (BF16,), data=two_given, fused=0),
    Row("head autocast", autocast_head, (F32,), data=inside),
    Row("head", head, (F32, BF16), fused=1, **IN_CHUNKS),
    Row("head aot_eager", head, (BF16,), options={"inner": "aot_eager"}, **IN_CHUNKS),
    Row("head capped", capped_head, (BF16,), **IN_CHUNKS),
    Row("head in forward", head, (F32, BF16), fused=1, options={"grad_in_forward": "always"}, **IN_CHUNKS),
    Row("head in backward", head, (F32, BF16), options={"grad_in_forward": "never"}, **IN_CHUNKS),
]  # fmt: skip
"""Each in its dtypes: forty cases."""
