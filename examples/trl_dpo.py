"""TRL's DPO with a reference model, on tiny random Llamas, with TRL's own fused head and with ours; needs trl (1.16).

    python examples/trl_dpo.py [--steps 20]

`slime_compile.integrations.trl.enable()` is the one line; the reference's log-probs go through it, too. Prints for each
the peak of a training step, in MiB and as a multiple of the logits that neither of them has, and the last loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset
from measured import Run, compare
from trl import DPOConfig, DPOTrainer
from trl_tiny import VOCAB, WAYS, Measured, model, options, tokenizer, trained

PAIRS, PROMPT, COMPLETION = 4, 8, 56
LOGITS_BYTES = 2 * PAIRS * (PROMPT + COMPLETION) * VOCAB * 4


class Trainer(Measured, DPOTrainer):
    """TRL's."""


def words(count: int, first: int) -> str:
    return "".join(f" w{4 + (first * 7 + k * k) % 500}" for k in range(count))


def train(way: str, steps: int, inner: str) -> Run:
    rows = [
        {"prompt": words(PROMPT, n), "chosen": words(COMPLETION, n + 1), "rejected": words(COMPLETION, 3 * n)}
        for n in range(steps * PAIRS)
    ]  # fmt: skip

    def trainer(folder: str) -> Trainer:
        config = DPOConfig(
            folder, per_device_train_batch_size=PAIRS, max_length=None, gradient_checkpointing=False, logging_steps=1,
            **options(steps),
        )  # fmt: skip
        data = Dataset.from_list(rows)
        return Trainer(model(), model(), config, train_dataset=data, processing_class=tokenizer())

    return trained(way, trainer)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
