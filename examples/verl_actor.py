"""verl's FSDP engine and PPO loss on packed samples of a tiny random Llama, without and with `slime_fused`; needs verl.

    python examples/verl_actor.py [--steps 20] [--inner aot_eager]

    as it is     entropy by torch.compile, log-probs by verl's functions, of logits that are scaled by a temperature
    pair         `slime_compile.integrations.verl.enable()`: both in one compiled function
    deferred     and `defer_logits`

verl's are `prepare_model_inputs`, `prepare_model_outputs` and `ppo_loss`. The engine is given a model: building one,
verl would ask for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from measured import Run, compare
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import tensordict_utils
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

import slime_compile
from slime_compile.integrations import verl as integration

VOCAB, HIDDEN, PROMPT, RESPONSES = 16384, 32, 56, (240, 220, 180, 160)
LOGITS_BYTES = sum(PROMPT + response for response in RESPONSES) * VOCAB * 4
CHUNK_MIB = 8  # an eighth of the logits
WAYS = ("as it is", "pair", "deferred")


class Engine(FSDPEngineWithLMHead):
    """verl's, around a model that is there already."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.engine_config = FSDPEngineConfig(entropy_checkpointing=False)
        self.compute_entropy_from_logits = torch.compile(entropy_from_logits, dynamic=True)
        self.use_ulysses_sp, self.pad_to_length = False, False

    def loss(self, data: TensorDict, config: FSDPActorConfig) -> torch.Tensor:
        """What `forward_step` does, without its device and its groups."""
        inputs, more = self.prepare_model_inputs(data)
        output = self.module(**inputs, use_cache=False)
        model_output = self.prepare_model_outputs(output, more, data, None)
        del output
        loss, _ = ppo_loss(config, model_output, data)
        return loss


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1,
        )
    )  # fmt: skip


def micro_batch(draw: torch.Generator) -> TensorDict:
    """Samples of several lengths, packed; old log-probs and advantages are random."""
    prompts = [torch.randint(VOCAB // 64, (PROMPT,), generator=draw) for _ in RESPONSES]
    responses = [torch.randint(VOCAB // 64, (n,), generator=draw) for n in RESPONSES]

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    data = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
            "position_ids": nested([torch.arange(PROMPT + n) for n in RESPONSES]),
            "response_mask": nested([torch.ones(n, dtype=torch.int64) for n in RESPONSES]),
            "old_log_probs": nested([-9 - torch.rand(n, generator=draw) for n in RESPONSES]),
            "advantages": nested([torch.randn(n, generator=draw) for n in RESPONSES]),
        },
        batch_size=[len(RESPONSES)],
    )
    return tensordict_utils.assign_non_tensor(
        data, temperature=0.7, calculate_entropy=True, use_remove_padding=True, dp_size=1, batch_num_tokens=None,
        global_batch_size=None,
    )  # fmt: skip


def train(way: str, steps: int, inner: str) -> Run:
    run, engine = Run(), Engine(model().train())
    config = FSDPActorConfig(entropy_coeff=0.01, rollout_n=1, ppo_micro_batch_size_per_gpu=4)
    if way != "as it is":
        assert integration.enable({"inner": inner, "chunk_mib": CHUNK_MIB})
    if way == "deferred":
        slime_compile.defer_logits(engine.module)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        data = micro_batch(draw)
        with run.step():
            loss = engine.loss(data, config)
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
