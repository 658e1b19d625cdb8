"""slime's policy loss over Megatron's GPTModel, on packed samples, without and with `slime_fused`; needs slime.

    PYTHONPATH=/path/to/slime python examples/slime_actor.py [--steps 20] [--inner aot_eager]

    as it is     bfloat16 in `Float16Module`, logits [1, T, V] in float32, a temperature, an entropy bonus
    loss         `slime_compile.integrations.slime.enable()`
    deferred     and `defer_logits`

slime is in no package registry (what is called so there is another one): it is taken from a checkout. Of what it asks
for, its losses import megatron-core, ray and httpx. One process on the CPU.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

if find_spec("slime") is None or find_spec("slime.backends") is None:
    sys.exit(
        "slime (github.com/THUDM/slime) is not on PYTHONPATH; it is not in the package registry"
    )

from measured import Run, compare
from megatron.core.transformer.module import Float16Module
from megatron_gpt import VOCAB, model, one_rank
from slime.backends.megatron_utils import loss as slime_loss

import slime_compile
from slime_compile.integrations import slime as integration

PROMPT, RESPONSES = 56, (240, 220, 180, 160)
TOKENS = sum(PROMPT + response for response in RESPONSES)
LOGITS_BYTES = TOKENS * VOCAB * 4
CHUNK_MIB = 4  # an eighth of the logits as the head makes them
WAYS = ("as it is", "loss", "deferred")
ARGS = Namespace(
    advantage_estimator="grpo", allgather_cp=False, calculate_per_token_loss=False, entropy_coef=0.01, eps_clip=0.2,
    eps_clip_high=0.2, eps_clip_c=None, get_mismatch_metrics=False, log_probs_chunk_size=-1, loss_type="policy_loss",
    recompute_loss_function=False, rollout_temperature=0.7, use_kl_loss=False, use_opsm=False,
    use_rollout_logprobs=False, use_tis=False, rollout_top_p=1.0, use_unbiased_kl=False,
)  # fmt: skip


def batch(draw: torch.Generator) -> dict[str, Any]:
    samples = [torch.randint(VOCAB // 64, (PROMPT + n,), generator=draw) for n in RESPONSES]
    masks = [torch.ones(n) for n in RESPONSES]
    return {
        "unconcat_tokens": samples,
        "total_lengths": [len(sample) for sample in samples],
        "response_lengths": list(RESPONSES),
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "advantages": [torch.randn(n, generator=draw) for n in RESPONSES],
        "log_probs": [-9 - torch.rand(n, generator=draw) for n in RESPONSES],
    }


def train(way: str, steps: int, inner: str) -> Run:
    with one_rank():
        run, gpt = Run(), model()
        if way != "as it is":
            assert integration.enable({"inner": inner, "chunk_mib": CHUNK_MIB})
        if way == "deferred":
            slime_compile.defer_logits(gpt)
        module = Float16Module(gpt.config, gpt).train()
        optimizer = torch.optim.SGD(gpt.parameters(), lr=1.0)
        draw = torch.Generator().manual_seed(0)
        for _ in range(steps):
            data = batch(draw)
            tokens = torch.cat(data["unconcat_tokens"])[None]
            sample = torch.repeat_interleave(
                torch.arange(len(RESPONSES)), torch.tensor(data["total_lengths"])
            )
            hidden_from = (sample[:, None] != sample) | torch.ones(
                TOKENS, TOKENS, dtype=torch.bool
            ).triu(1)
            places = torch.cat([torch.arange(len(each)) for each in data["unconcat_tokens"]])[None]
            with run.step():
                logits = module(tokens, places, hidden_from[None, None])
                loss, *_ = slime_loss.loss_function(ARGS, data, 1, len(RESPONSES), logits)
                del logits
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
        integration.disable()
    return run


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
