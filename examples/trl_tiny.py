"""What the examples over TRL share: a tiny random Llama, a tokenizer of words, a trainer whose steps are measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from measured import Run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback

from slime_compile.integrations import trl as integration

VOCAB, HIDDEN = 40960, 32
WAYS = ("trl", "slime_compile")


class Measured:
    """Beside one of TRL's trainers: a look at the memory of a training step."""

    run: Run

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        with self.run.step():
            loss = super().training_step(model, inputs, *rest, **more)  # type: ignore[misc]
        self.run.losses.append(loss.item())
        return loss


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w1", eos_token="w2")


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, pad_token_id=1, eos_token_id=2, bos_token_id=3,
        )
    )  # fmt: skip


def options(steps: int) -> dict[str, Any]:
    """Of the trainer's config."""
    return {
        "max_steps": steps, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant", "report_to": [],
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False,
    }  # fmt: skip


def trained(way: str, trainer_in: Callable[[str], Any]) -> Run:
    """Trains, with our operators in TRL's head or without; `trainer_in` is given a folder."""
    if way == "slime_compile":
        assert integration.enable()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_in(folder)
        trainer.run = Run()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    integration.disable()
    trainer.run.logged = trainer.state.log_history
    run: Run = trainer.run
    return run
