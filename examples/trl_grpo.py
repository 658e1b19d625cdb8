"""TRL's GRPO on a tiny random Llama, with TRL's own fused head and with ours; needs trl (1.16).

    python examples/trl_grpo.py [--steps 20]

The trainer generates, scores with a reward that counts tokens, and takes log-probs and entropies of the completions.
`slime_compile.integrations.trl.enable()` is the one line. Prints for each the peak of what `compute_loss` and its
backward allocate, in MiB and as a multiple of the logits that neither of them has, and the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from measured import Run, compare
from trl import GRPOConfig, GRPOTrainer
from trl_tiny import VOCAB, WAYS, Measured, model, options, tokenizer, trained

BATCH, PROMPT, COMPLETION = 8, 8, 56
LOGITS_BYTES = BATCH * (PROMPT + COMPLETION - 1) * VOCAB * 4


class Trainer(Measured, GRPOTrainer):
    """TRL's; generation is no part of a step."""

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        prepare, self._prepare_inputs = self._prepare_inputs, lambda given: given
        loss = super().training_step(model, inputs, *rest, **more)
        self._prepare_inputs = prepare
        return loss


def reward(completion_ids: Any, **kwargs: Any) -> list[float]:
    return [sum(token % 2 for token in row) / len(row) for row in completion_ids]


def trainer_in(folder: str, steps: int) -> Trainer:
    config = GRPOConfig(
        folder, per_device_train_batch_size=BATCH, num_generations=4, max_completion_length=COMPLETION,
        num_iterations=2, entropy_coef=0.01, **options(steps),
    )  # fmt: skip
    prompts = [" ".join(f"w{8 * n + k + 4}" for k in range(PROMPT)) for n in range(64)]
    data = Dataset.from_dict({"prompt": prompts})
    return Trainer(model(), reward, config, data, processing_class=tokenizer())


def train(way: str, steps: int, inner: str) -> Run:
    return trained(way, partial(trainer_in, steps=steps))


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
