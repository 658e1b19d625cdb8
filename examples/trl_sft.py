"""TRL's SFT on a tiny random Llama, with TRL's own fused head and with ours; needs trl (1.16).

    python examples/trl_sft.py [--steps 20]

Prompts and completions; the loss and the metrics that TRL logs (entropy, accuracy) are of completions only.
`slime_compile.integrations.trl.enable()` is the one line. Prints for each the peak of a training step, in MiB and as a
multiple of the logits that neither of them has, and the last loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import Dataset
from measured import Run, compare
from trl import SFTConfig, SFTTrainer
from trl_tiny import VOCAB, WAYS, Measured, model, options, tokenizer, trained

BATCH, PROMPT, COMPLETION = 8, 8, 56
LOGITS_BYTES = BATCH * (PROMPT + COMPLETION - 1) * VOCAB * 4


class Trainer(Measured, SFTTrainer):
    """TRL's."""


def train(way: str, steps: int, inner: str) -> Run:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(4, 500, (steps * BATCH, PROMPT + COMPLETION), generator=draw).tolist()
    mask = [[0] * PROMPT + [1] * COMPLETION] * len(rows)

    def trainer(folder: str) -> Trainer:
        config = SFTConfig(
            folder, per_device_train_batch_size=BATCH, max_length=None, completion_only_loss=True,
            gradient_checkpointing=False, logging_steps=1, **options(steps),
        )  # fmt: skip
        data = Dataset.from_dict({"input_ids": rows, "completion_mask": mask})
        return Trainer(model(), config, train_dataset=data, processing_class=tokenizer())

    return trained(way, trainer)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
