"""The formula of a loss's peak against what is measured, and the longest micro-batch that it allows."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_compile.rl.memory_model import max_tokens_for, peak_bytes
from slime_compile.rl.memory_probe import memory_probe


@given(
    st.integers(1000, 200_000),
    st.integers(1, 8192),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from(
        [
            {},
            {"consume_logits": True},
            {"save": "softmax"},
            {"lm_head": False},
            {"grad_in_forward": "never"},
            {"grad_in_forward": "always", "chunk_mib": 64},
        ]
    ),
    st.sampled_from(["given", "inside"]),
    st.booleans(),
    st.integers(2**34, 2**37),
)
def test_max_tokens_is_the_most_that_fits(
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    logits: Any,
    training: bool,
    memory: int,
) -> None:
    tokens = max_tokens_for(memory, vocab, hidden, dtype, options, logits=logits, training=training)
    for more, fits in ((0, True), (1, False)):
        peak = peak_bytes(
            tokens + more, vocab, hidden, dtype, options, logits=logits, training=training
        )
        assert (peak <= memory) == fits


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = (logits.float() / 0.7).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return (log_probs.gather(-1, target[:, None])[:, 0] + 0.1 * entropy).mean()


def token_loss_of_states(states: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return token_loss(states @ weight.T, target)


class Computed(torch.autograd.Function):
    """A tensor that is no leaf and whose gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.new_zeros(())


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("logits", ["given", "inside"])
@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({"consume_logits": False}, True),
        ({}, False),
        ({"consume_logits": True}, True),
        ({"save": "softmax"}, True),
        ({"chunk_mib": 2}, False),  # 128 rows of bf16 at a time
        ({"consume_logits": False, "chunk_mib": 2, "grad_in_forward": "always"}, True),
        ({"consume_logits": False, "chunk_mib": 2, "grad_in_forward": "never"}, True),
    ],
)
def test_the_peak_is_the_measured_one(
    options: dict[str, Any], training: bool, logits: Any, dtype: torch.dtype
) -> None:
    rows, vocab, hidden = 1024, 8192, 64  # 16 MiB of bf16 logits, in chunks of 8 MiB
    scratch = 4 * 2**20  # of the operators on the CPU
    torch._dynamo.reset()
    function: Any = token_loss if logits == "given" else token_loss_of_states
    compiled = torch.compile(
        function, backend="slime_fused", options={"inner": "aot_eager", "strict": True, **options}
    )
    target = torch.zeros(rows, dtype=torch.int64)
    values = torch.randn(rows, vocab, dtype=dtype)
    for _ in range(2):  # the first call compiles
        states, weight, leaf = (
            torch.randn(shape, dtype=dtype, requires_grad=training)
            for shape in ((rows, hidden), (vocab, hidden), ())
        )
        with (
            torch.set_grad_enabled(training),
            memory_probe("loss", enabled=True, device="cpu", log=lambda line: None) as probe,
        ):
            wide = [Computed.apply(values, leaf)] if logits == "given" else [states, weight]
            loss = compiled(*wide, target)
            del wide
            if training:
                loss.backward()
    assert probe.record is not None
    assert probe.record.peak_allocated is not None
    expected = peak_bytes(rows, vocab, hidden, dtype, options, logits=logits, training=training)
    if logits == "inside":
        expected -= rows * hidden * dtype.itemsize  # the states were there before
    numbers = rows * 256  # of each row; beside a chunk it shows that not all of them are there
    assert 0.98 * expected - numbers <= probe.record.peak_allocated <= expected + scratch


def test_a_head_takes_a_chunk_where_given_logits_take_all_twice() -> None:
    """205,280 tokens of half a vocabulary in bf16: 29 GiB of logits."""
    sizes = (76_032, 4096, torch.bfloat16)
    chunk, states, gradients = 512 * 2**20, 205_280 * 4096 * 2, (205_280 + 76_032) * 4096 * 2
    inside = peak_bytes(205_280, *sizes, logits="inside")
    assert inside - states <= chunk + 2 * gradients + 2**30
    assert peak_bytes(205_280, *sizes) > 6 * (inside - states)
    most = [max_tokens_for(20 * 2**30, *sizes, logits=kind) for kind in ("given", "inside")]
    assert most[1] > 8 * most[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"memory_bytes": 1000}, ValueError, "must be at least 8256 for one token"),
        ({"vocab_local": 0}, ValueError, "`vocab_local` must be at least 1, got 0"),
        ({"hidden": 0}, ValueError, "`hidden` must be at least 1, got 0"),
        ({"dtype": torch.int64}, ValueError, "`dtype` must be floating, got torch.int64"),
        ({"logits": "made"}, ValueError, "`logits` must be 'given' or 'inside', got 'made'"),
        ({"options": {"save": "both"}}, RuntimeError, "save"),
    ],
)
def test_cap_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    valid: dict[str, Any] = {
        "memory_bytes": 10**9,
        "vocab_local": 1000,
        "hidden": 16,
        "dtype": torch.float32,
    }
    with pytest.raises(error, match=message):
        max_tokens_for(**{**valid, **arguments})
