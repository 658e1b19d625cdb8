"""Megatron-core: the example does what it says; `main_grad` is what it is without us."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trainers.checks import check_runs

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

STEPS = 20


def test_the_example(example: Callable[[str], Any]) -> None:
    megatron = example("megatron_gpt")
    runs = megatron.main(["--steps", str(STEPS)])
    assert len(set(runs["as it is"].losses)) == STEPS  # it trains
    # Parameters in bfloat16: one rounding of a gradient moves the steepest losses by 0.002 on some machines.
    check_runs(runs, STEPS, {"loss": 1.25, "deferred": 0.35}, megatron.LOGITS_BYTES, rel=4e-3)
    plain = runs["as it is"].losses
    assert runs["loss"].losses == pytest.approx(plain, rel=1e-3)
    assert runs["deferred"].losses[:5] == pytest.approx(plain[:5], rel=1e-4)
    assert runs["loss"].fused == runs["deferred"].fused == 2
    assert runs["as it is"].peak_bytes > 3 * megatron.LOGITS_BYTES
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("overlap", "fused_accumulation", "tied"),
    [(False, False, False), (False, True, False), (True, False, False), (False, False, True)],
)
def test_main_grad(
    overlap: bool,
    fused_accumulation: bool,
    tied: bool,
    example: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all parameters, after two micro-batches, and again after `zero_grad_buffer`; in float32, where it is exact.

    `tied`: the head's weight is the embedding's, which Megatron hands to the head at each call.

    There Megatron's cross entropy works in the logits themselves, which backward of the compiled loss must not read.

    Under `gradient_accumulation_fusion` Megatron's head would write its weight's gradient into `main_grad` itself, by a
    kernel that is CUDA's; deferred, it hands the gradient to DDP, which adds it.
    """
    megatron = example("megatron_gpt")
    config = megatron.TransformerConfig
    in_float32 = {"bf16": False, "params_dtype": torch.float32}
    monkeypatch.setattr(megatron, "TransformerConfig", lambda **k: config(**k | in_float32))
    made = functools.partial(megatron.GPTModel, share_embeddings_and_output_weights=tied)
    monkeypatch.setattr(megatron, "GPTModel", made)
    size = (2, megatron.BATCH, megatron.LENGTH + 1)
    draws = [torch.randint(256, size, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    found: dict[str, list[torch.Tensor]] = {}
    with megatron.one_rank():
        for way in megatron.WAYS:
            torch._dynamo.reset()
            gpt = megatron.model()
            model = megatron.in_way(way, gpt, overlap_grad_reduce=overlap)
            gpt.output_layer.gradient_accumulation_fusion = fused_accumulation and way == "deferred"
            found[way] = []
            for tokens in draws:
                megatron.forward_backward(model, tokens)
                assert all(p.grad is None for p in gpt.parameters())
                found[way] += [p.main_grad.clone() for p in gpt.parameters()]
    plain = found.pop("as it is")
    for mine, other in zip([*found["loss"], *found["deferred"]], [*plain, *plain], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())
