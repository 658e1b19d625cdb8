"""Peaks of 8,192 x 128,256 logits by torch's own CUDA allocator, on the stand-in: nothing here has run on a GPU.

N is the size of the logits. The model's own backward, which needs the gradient and makes the weight's, is in the step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cuda.at_size.losses import ODD_VOCAB, VOCAB, after_a_model, policy, with_the_head

BF16, F32 = torch.bfloat16, torch.float32
NEAR = 0.02


def fused(loss: Any = policy, mode: str | None = None, **options: Any) -> Any:
    how: dict[str, Any] = {"mode": mode} if mode else {"options": options} if options else {}
    return torch.compile(loss, backend="slime_fused", **how)


@pytest.mark.parametrize(
    ("options", "dtype", "n"),
    [
        ({}, BF16, 1.0),
        ({}, F32, 1.0),
        ({"consume_logits": True}, BF16, 1.0),
        ({"consume_logits": False}, BF16, 2.0),
        ({"save": "softmax"}, BF16, 2.0),
        ({"inner": "aot_eager"}, BF16, 1.0),
    ],
)
def test_given_logits(options: dict[str, Any], dtype: torch.dtype, n: float) -> None:
    assert after_a_model(fused(**options), dtype=dtype).peak == pytest.approx(n, abs=NEAR)


def test_sizes_that_change() -> None:
    loss = torch.compile(policy, backend="slime_fused", dynamic=True)
    assert after_a_model(loss).peak == pytest.approx(1.0, abs=NEAR)


def test_in_a_cuda_graph() -> None:
    """The graph's own memory is there before the step."""
    found = after_a_model(fused(mode="reduce-overhead"))
    assert found.peak == pytest.approx(1.0, abs=NEAR)
    assert (found.asked.captures, found.asked.waits) == (0, 0)


def test_inductor_needs_six_times_as_much() -> None:
    """So the measure tells them apart."""
    assert after_a_model(torch.compile(policy, backend="inductor")).peak > 5.5


def test_rows_that_are_cut_before_the_loss() -> None:
    """Their gradient is written over them; then torch's own backward of the slice makes that of all rows: N more."""
    found = after_a_model(fused(), cut=lambda logits: logits[:-1])
    assert found.peak == pytest.approx(2.0, abs=NEAR)
    assert found.large == 3  # the logits, the gradient of all rows, the weight's gradient


def shifted(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """A causal loss over two sequences, which shifts inside: the gradient of all rows is ours to write."""
    both = logits.unflatten(0, (2, -1))[:, :-1].float()
    return F.cross_entropy(both.flatten(0, 1), tokens.unflatten(0, (2, -1))[:, 1:].flatten())


def test_shifted_inside_of_the_loss() -> None:
    assert after_a_model(fused(shifted)).peak == pytest.approx(1.0, abs=NEAR)


def inside_rows(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    return policy(logits[:-1], tokens[:-1], advantages[:-1])


@pytest.mark.parametrize("vocab", [VOCAB, ODD_VOCAB])
def test_rows_that_the_loss_cuts(vocab: int) -> None:
    assert after_a_model(fused(inside_rows), vocab=vocab).peak == pytest.approx(1.0, abs=NEAR)


@pytest.mark.parametrize("option", ["always", "never"])
def test_a_head(option: str) -> None:
    """One chunk, and what is summed over chunks in float32."""

    def head(hidden: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        return policy(hidden @ weight.t(), *rest)

    assert with_the_head(fused(head, grad_in_forward=option), 64).peak < 0.2
