"""TRL's GRPO on a tiny random Llama, with TRL's own fused head and with ours; needs trl (1.16).

    python examples/trl_grpo.py [--steps 20]

The trainer generates, scores with a reward that counts tokens, and takes log-probs and entropies of the completions.
`slime_compile.integrations.trl.enable()` is the one line. Prints for each the peak of what `compute_loss` and its
backward allocate, in MiB and as a multiple of the logits that neither of them has, and the losses.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from datasets import Dataset
from measured import Run, compare
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from slime_compile.integrations import trl as integration

VOCAB, HIDDEN, BATCH, PROMPT, COMPLETION = 40960, 32, 8, 8, 56
LOGITS_BYTES = BATCH * (PROMPT + COMPLETION - 1) * VOCAB * 4
WAYS = ("trl", "slime_compile")


class Trainer(GRPOTrainer):
    """TRL's, and a look at the memory of a training step without its generation."""

    run: Run

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if self.run.losses:  # generation is over, and what it drew is used
            inputs = self._prepare_inputs(inputs)
            prepare, self._prepare_inputs = self._prepare_inputs, lambda given: given
        with self.run.step():
            loss = super().training_step(model, inputs, *rest, **more)
        if self.run.losses:
            self._prepare_inputs = prepare
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


def reward(completion_ids: Any, **kwargs: Any) -> list[float]:
    return [sum(token % 2 for token in row) / len(row) for row in completion_ids]


def train(way: str, steps: int, inner: str) -> Run:
    if way == "slime_compile":
        assert integration.enable()
    prompts = [" ".join(f"w{8 * n + k + 4}" for k in range(PROMPT)) for n in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, per_device_train_batch_size=BATCH, num_generations=4, max_completion_length=COMPLETION,
            max_steps=steps, learning_rate=1e-2, optim="sgd", report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, bf16=False, num_iterations=2, entropy_coef=0.01,
        )  # fmt: skip
        trainer = Trainer(
            model(), reward, config, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer()
        )  # fmt: skip
        trainer.run = Run()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    integration.disable()
    return trainer.run


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
