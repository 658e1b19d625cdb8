"""Logits that somebody holds while their gradient is taken: for the tests of consume_logits="auto"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime_compile import ops

ROWS, VOCAB = 6, 64
TARGET = torch.arange(ROWS) * 7
UPSTREAM = torch.linspace(-1.0, 2.0, ROWS)
OPTIONS = {"min_vocab": 32, "strict": True}

Loss = Callable[[Tensor], Tensor]
Read = Callable[[], Any]
"""What a holder still sees."""


def log_probs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, TARGET[:, None])[:, 0]


def compiled(fn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return torch.compile(fn, backend="slime_fused", options={**OPTIONS, **options})


def warm(inner: str) -> Loss:
    """`log_probs`, compiled and called once."""
    torch._dynamo.reset()
    made = compiled(log_probs, inner=inner)
    step(made)
    return made


def leaf() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, VOCAB, generator=draw).requires_grad_()


@functools.cache
def right() -> tuple[Tensor, Tensor]:
    """The logits, and their gradient from a buffer of its own."""
    x = leaf()
    beside = compiled(log_probs, inner="aot_eager", consume_logits=False)
    (gradient,) = torch.autograd.grad(beside(x * 1), x, UPSTREAM)
    torch.testing.assert_close(gradient, torch.autograd.grad(log_probs(x * 1), x, UPSTREAM)[0])
    return x.detach(), gradient


def overwritten(at: str = "") -> int:
    """Gradients of this process that were written over logits so far, of all places or one."""
    return sum(p.over for place, p in [*ops.placements.items()] if at in ("", place))


def step(fn: Loss, hold: Callable[[Tensor], Read] | None = None) -> Read | None:
    """One step in which nobody holds the logits but `hold`; the gradient is right."""
    x = leaf()
    logits = x * 1
    read = hold(logits) if hold is not None else None
    out = fn(logits)
    del logits
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM)
    assert torch.equal(gradient, right()[1])
    return read


def check_held(fn: Loss, hold: Callable[[Tensor], Read]) -> None:
    before = overwritten()
    read = step(fn, hold)
    assert read is not None
    assert overwritten() == before
    torch.testing.assert_close(torch.as_tensor(read()), right()[0], rtol=0, atol=0)
