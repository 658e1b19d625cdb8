"""transformers' Trainer on a tiny random Llama, as it is and in three ways with `slime_fused`; needs transformers.

    python examples/transformers_trainer.py [--steps 20] [--inner aot_eager]

    as it is     the model makes logits, and a loss of them
    loss         the loss is compiled: the logits and nothing else of their size
    deferred     and `defer_logits`: one chunk of logits
    arguments    `TrainingArguments(torch_compile_backend="slime_fused")` and `defer_logits`: the model is compiled

Prints for each the peak of a step beyond parameters and optimizer, in MiB and as a multiple of the logits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
from measured import Run, compare
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import slime_compile
from slime_compile.integrations import accelerate

VOCAB, HIDDEN, BATCH, LENGTH = 16384, 32, 4, 256
LOGITS_BYTES = BATCH * LENGTH * VOCAB * 4
CHUNK_MIB = 8  # an eighth of the logits
WAYS = ("as it is", "loss", "deferred", "arguments")


class Steps(TrainerCallback):
    """Measures each step of a Trainer."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = self.run.step()
        self.step.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step.__exit__(None, None, None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.run.losses.append(float(logs["loss"]))


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def data(steps: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCAB // 64, (steps * BATCH, LENGTH), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(way: str, steps: int, inner: str) -> Run:
    run, llama = Run(), model()
    options = {"chunk_mib": CHUNK_MIB, "inner": inner}
    if way in ("loss", "deferred"):
        llama.loss_function = torch.compile(
            llama.loss_function, backend="slime_fused", options=options
        )
    if way in ("deferred", "arguments"):
        slime_compile.defer_logits(llama)
    more: dict[str, Any] = {}
    if way == "arguments":
        accelerate.enable()  # which takes no options of a backend
        os.environ.update({f"SLIME_FUSED_{k.upper()}": str(v) for k, v in options.items()})
        more = {"torch_compile": True, "torch_compile_backend": "slime_fused"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, max_steps=steps, logging_steps=1, report_to=[],
            learning_rate=1e-2, optim="sgd", save_strategy="no", disable_tqdm=True, use_cpu=True, **more,
        )  # fmt: skip
        trainer = Trainer(llama, arguments, train_dataset=data(steps), callbacks=[Steps(run)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return run


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
