"""Reshapes of given logits, made inside the function, count as the logits: their gradient may take their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from slime_compile.report.values import Placement
from tests.support import harness

BATCH, LENGTH, VOCAB = 2, 5, 64

Loss = Callable[[Tensor, Tensor], Tensor]


def log_probs(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, target[..., None]).squeeze(-1)


def view(logits: Tensor, target: Tensor) -> Tensor:
    return log_probs(logits.view(-1, VOCAB), target.view(-1)).square().sum()


def reshape(logits: Tensor, target: Tensor) -> Tensor:
    return log_probs(logits.reshape(-1, VOCAB), target.reshape(-1)).square().sum()


def flatten(logits: Tensor, target: Tensor) -> Tensor:
    return log_probs(logits.flatten(0, 1), target.flatten()).square().sum()


def squeeze(logits: Tensor, target: Tensor) -> Tensor:
    """slime's packed sequences."""
    return log_probs(logits.squeeze(0) / 0.7, target[0]).square().sum()


def unsqueeze(logits: Tensor, target: Tensor) -> Tensor:
    return log_probs(logits[None], target[None]).square().sum()


def next_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """transformers' causal loss: float32, labels shifted, rows flattened."""
    shifted = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, VOCAB), shifted.view(-1), ignore_index=-100)


def log_probs_and_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Two readers, each with a view of its own."""
    log_p = torch.log_softmax(logits.view(-1, VOCAB), -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy.mean() + log_probs(logits.flatten(0, 1), target.flatten()).sum()


FUNCTIONS: list[Loss] = [
    view,
    reshape,
    flatten,
    unsqueeze,
    next_tokens,
    log_probs_and_entropy,
]


def leaf(batch: int = BATCH) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(batch, LENGTH, VOCAB, generator=draw).requires_grad_()


def target(batch: int = BATCH) -> Tensor:
    return torch.arange(batch * LENGTH).view(batch, LENGTH) * 3


def gradient(fn: Loss, batch: int, dtype: torch.dtype) -> Tensor:
    x = leaf(batch)
    out = fn((x * 1).to(dtype), target(batch))
    return torch.autograd.grad(out, x)[0]


def check(fn: Loss, inner: str, batch: int = BATCH, dtype: torch.dtype = torch.float32) -> None:
    wanted = gradient(fn, batch, dtype)
    first: Tensor | None = None
    for consume in ("auto", True, False):
        torch._dynamo.reset()
        options = {**harness.OPTIONS, "inner": inner, "consume_logits": consume}
        compiled = torch.compile(fn, backend="slime_fused", options=options)
        # weak references of Dynamo's may lead to the logits that it was compiled with
        gradient(compiled, batch, dtype)
        once = _placement().over
        found = gradient(compiled, batch, dtype)
        torch.testing.assert_close(found, wanted)
        first = found if first is None else first
        assert torch.equal(found, first), "not the same bits over the logits and beside them"
        assert _placement().over - once == (consume is not False), _placement().reason


def _placement() -> Placement:
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    return placement


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_reshaped(fn: Loss) -> None:
    check(fn, "aot_eager")


def test_reshaped_in_half_precision() -> None:
    check(next_tokens, "aot_eager", dtype=torch.bfloat16)


def test_one_sequence() -> None:
    check(squeeze, "aot_eager", batch=1)


@pytest.mark.thorough
def test_inductor() -> None:
    check(log_probs_and_entropy, "inductor")


def test_sizes_that_change() -> None:
    torch._dynamo.reset()
    options = {**harness.OPTIONS, "inner": "aot_eager"}
    compiled = torch.compile(view, backend="slime_fused", options=options, dynamic=True)
    for batch in (2, 3, 4):
        found = gradient(compiled, batch, torch.float32)
        torch.testing.assert_close(found, gradient(view, batch, torch.float32))
    placement = _placement()
    assert (placement.calls, placement.over) == (3, 3), placement


@pytest.mark.parametrize("consume", ["auto", True])
def test_whoever_saved_the_logits_is_not_given_the_gradient(consume: Any) -> None:
    """The saved tensor is the caller's own, so that autograd, or the count, knows of other readers."""
    torch._dynamo.reset()
    options = {**harness.OPTIONS, "inner": "aot_eager", "consume_logits": consume}
    compiled = torch.compile(view, backend="slime_fused", options=options)

    def run(fn: Loss) -> Tensor:
        x = leaf()
        return torch.autograd.grad(fn(x.tanh(), target()), x)[
            0
        ]  # tanh reads its result in backward

    if consume == "auto":
        torch.testing.assert_close(run(compiled), run(view))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(compiled)


def part(logits: Tensor, target: Tensor) -> Tensor:
    return log_probs(logits[:, :-1].reshape(-1, VOCAB), target[:, :-1].reshape(-1)).sum()


def other_order(logits: Tensor, target: Tensor) -> Tensor:
    rows = logits.transpose(0, 1).reshape(-1, VOCAB)
    return log_probs(rows, target.t().reshape(-1)).sum()


@pytest.mark.parametrize("fn", [part, other_order], ids=lambda fn: fn.__name__)
def test_what_is_no_reshape_stays_right(fn: Loss) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        fn, backend="slime_fused", options={**harness.OPTIONS, "inner": "aot_eager"}
    )
    x = leaf()
    logits = x * 1
    found = torch.autograd.grad(compiled(logits, target()), x)[0]
    torch.testing.assert_close(found, gradient(fn, BATCH, torch.float32))
    assert torch.equal(logits, x)
