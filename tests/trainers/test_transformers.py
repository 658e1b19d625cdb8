"""transformers: the example does what it says; generation, PEFT and what else a model does with deferred logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slime_compile
from slime_compile import DeferredLogits, defer_logits
from tests.trainers.checks import check_runs

VOCAB = 1040  # above `min_vocab`

pytest.importorskip("transformers", reason="transformers is not installed; make test-trainers does")
STEPS = 20


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def compile_loss(model: Any) -> None:
    options = {"inner": "aot_eager", "chunk_mib": 1, "strict": True}
    model.loss_function = torch.compile(
        model.loss_function, backend="slime_fused", fullgraph=True, options=options
    )


def gradients(model: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


# ---- the Trainer --------------------------------------------------------------------------------------------------


def test_the_example(example: Callable[[str], Any]) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    runs = example("transformers_trainer").main(["--steps", str(STEPS)])
    logits = 4 * 256 * 16384 * 4
    bounds = {"as it is": 3.2, "loss": 1.15, "deferred": 0.25, "arguments": 0.25}
    check_runs(runs, STEPS, bounds, logits, rel=1e-5)
    assert runs.keys() == bounds.keys()
    assert runs["as it is"].peak_bytes > 3 * logits  # there was something to save
    assert [run.fused for run in runs.values()] == [0, 2, 1, 1]
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 1, 1]


# ---- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_labels(tied: bool, tokens: Tensor) -> None:
    model = llama(tie_word_embeddings=tied)
    want = gradients(model, tokens)
    defer_logits(model)
    eager = gradients(model, tokens)
    compile_loss(model)
    torch.testing.assert_close(eager, want, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model, tokens), want, rtol=1e-4, atol=1e-6)
    slime_compile.reports()[-1].assert_fused()
    assert isinstance(model(tokens).logits, DeferredLogits)
    assert isinstance(model(tokens, logits_to_keep=3).logits, DeferredLogits)


GENERATION: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.2},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": True, "num_beams": 2, "no_repeat_ngram_size": 2},
    {"do_sample": False, "output_scores": True, "output_logits": True, "return_dict_in_generate": True},
]  # fmt: skip


@pytest.mark.parametrize("options", GENERATION, ids=str)
def test_generation_while_training(options: dict[str, Any], tokens: Tensor) -> None:
    """In training mode, where logits are deferred: the same tokens."""
    model = llama().train()
    given = {"max_new_tokens": 6, "pad_token_id": 0} | options
    torch.manual_seed(2)
    want = model.generate(tokens, **given)
    defer_logits(model)
    torch.manual_seed(2)
    found = model.generate(tokens, **given)
    if "return_dict_in_generate" in options:
        assert torch.equal(found.sequences, want.sequences)
        for mine, other in zip(found.logits, want.logits, strict=True):
            # MKL's last bit depends on where in memory a matrix begins
            torch.testing.assert_close(torch.as_tensor(mine), other, rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(found, want)


def test_saved_and_loaded(tokens: Tensor, tmp_path: Path) -> None:
    model = llama()
    defer_logits(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits.tensor())


def test_gradient_checkpointing(tokens: Tensor) -> None:
    model = llama()
    want = gradients(model, tokens)
    model.gradient_checkpointing_enable()
    defer_logits(model)
    compile_loss(model)
    torch.testing.assert_close(gradients(model, tokens), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adapted", [False, True])
def test_peft(adapted: bool, tokens: Tensor) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed; make test-trainers does")
    targets = ["q_proj", "lm_head"] if adapted else ["q_proj"]
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=targets))
    want = gradients(model, tokens)
    defer_logits(model)
    compile_loss(model.base_model.model)
    torch.testing.assert_close(gradients(model, tokens), want, rtol=1e-4, atol=1e-6)
    assert slime_compile.reports()[-1].graphs[0].wide_after == 0


# ---- accelerate ---------------------------------------------------------------------------------------------------


def test_the_name_of_the_backend(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    utils = pytest.importorskip("accelerate", reason="accelerate is not installed").utils
    from slime_compile.integrations import accelerate

    def taken() -> Any:
        return utils.TorchDynamoPlugin(backend="slime_fused").to_kwargs()["backend"]

    accelerate.disable()
    before = list(utils.DynamoBackend)
    with pytest.raises(ValueError, match="SLIME_FUSED"):
        taken()
    assert accelerate.enable()
    assert accelerate.enable()
    assert taken() == "slime_fused"
    accelerate.disable()
    assert list(utils.DynamoBackend) == before
    monkeypatch.setattr(utils, "DynamoBackend", tuple)
    assert not accelerate.enable()
    assert "nothing was changed" in caplog.text
