"""Steps at production size, of which nothing is computed: what torch's allocator gives out, and what is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.cuda.standin import counts

ROWS, VOCAB, ODD_VOCAB, HIDDEN = 8192, 128_256, 50_257, 64
WARM = 2


@dataclass(frozen=True)
class Step:
    """What a warm step took.

    Attributes:
        peak: most bytes above what there was before it, as a multiple of all logits (N).
        large: how often torch's allocator was asked for more than a mebibyte.
        asked: counts of the runtime and the driver.
    """

    peak: float
    large: int
    asked: counts.Counts


def policy(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.float(), -1)
    chosen = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -(advantages * chosen).mean() - 0.01 * entropy.mean()


def measured(step: Callable[[], object], logits_bytes: int) -> Step:
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, asked_before = torch.cuda.memory_allocated(), _large()
    counts.reset()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    return Step(peak / logits_bytes, _large() - asked_before, counts.counts())


def _large() -> int:
    found: int = torch.cuda.memory_stats()["allocation.large_pool.allocated"]
    return found


def matrices(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden = torch.empty(ROWS, HIDDEN, device="cuda", dtype=dtype)
    return hidden, torch.empty(vocab, HIDDEN, device="cuda", dtype=dtype).requires_grad_()


def per_row(rows: int) -> list[Tensor]:
    tokens = torch.zeros(rows, device="cuda", dtype=torch.int64)
    return [tokens, torch.zeros(rows, device="cuda")]


def after_a_model(
    loss: Any, vocab: int = VOCAB, dtype: torch.dtype = torch.bfloat16, cut: Any = None
) -> Step:
    """A model makes the logits, `cut` takes a view of them, the loss is given that: forward and backward."""
    hidden, weight = matrices(vocab, dtype)
    shape = torch.empty(ROWS, vocab, device="meta")
    rest = per_row(len(shape if cut is None else cut(shape)))

    def model() -> Tensor:
        logits = hidden @ weight.t()
        return logits if cut is None else cut(logits)

    def step() -> None:
        weight.grad = None
        loss(model(), *rest).backward()

    return measured(step, ROWS * vocab * dtype.itemsize)


def with_the_head(loss: Any, width: int, dtype: torch.dtype = torch.bfloat16) -> Step:
    """The loss makes its logits: beside the gradients of hidden and weight."""
    hidden = torch.empty(ROWS, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.empty(VOCAB, width, device="cuda", dtype=dtype, requires_grad=True)
    rest = per_row(ROWS)
    own = (hidden.nbytes + weight.nbytes) / (ROWS * VOCAB * dtype.itemsize)

    def step() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, *rest).backward()

    found = measured(step, ROWS * VOCAB * dtype.itemsize)
    return Step(found.peak - own, found.large, found.asked)
