"""GRPO of a TRL that makes logits, its functions as they are and compiled by `slime_fused`; needs trl (1.10; not 1.16).

    python examples/trl_grpo_logits.py [--steps 20] [--inner aot_eager]

    as it is     logits [B, L, V], `selective_log_softmax`, and with an entropy bonus `entropy_from_logits`
    functions    these two are compiled
    deferred     the two functions, and `defer_logits`

The trainer, its reward and its data are those of `trl_grpo.py`. The method that calls the model and both functions is
not compiled: at every generation TRL's gradient checkpointing adds a hook to the model, which torch compiles it again
for, eight times and then no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from unittest import mock

import torch
from measured import Run, compare
from trl.trainer import grpo_trainer
from trl_grpo import BATCH, COMPLETION, Trainer, trainer_in
from trl_tiny import VOCAB, trained

import slime_compile

LOGITS_BYTES = BATCH * (COMPLETION + 1) * VOCAB * 4
CHUNK_MIB = 8
WAYS = ("as it is", "functions", "deferred")
FUNCTIONS = ("selective_log_softmax", "entropy_from_logits")


def train(way: str, steps: int, inner: str) -> Run:
    compiled = partial(
        torch.compile, backend="slime_fused", options={"inner": inner, "chunk_mib": CHUNK_MIB}
    )

    def trainer(folder: str) -> Trainer:
        made = trainer_in(folder, steps)
        if way == "deferred":
            slime_compile.defer_logits(made.model)
        return made

    functions = {name: getattr(grpo_trainer, name) for name in FUNCTIONS}
    if way in ("functions", "deferred"):
        functions = {name: compiled(theirs) for name, theirs in functions.items()}
    with mock.patch.multiple(grpo_trainer, **functions):
        return trained("trl", trainer)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
