"""OpenRLHF's Actor and PolicyLoss on a tiny random Llama, without and with `slime_fused`; needs openrlhf.

    python examples/openrlhf_actor.py [--steps 20] [--inner aot_eager]

    as it is     entropy by torch.compile, log-probs by OpenRLHF's function, of logits that it scales in place
    pair         `slime_compile.integrations.openrlhf.enable()`: both in one compiled function
    deferred     and `defer_logits`

OpenRLHF imports flash_attn, which is built for CUDA only, for packed samples; here they are padded, and what it imports
is stood in for by functions that raise. DeepSpeed is not part of this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from measured import Run, compare
from transformers import LlamaConfig, LlamaForCausalLM

import slime_compile
from slime_compile.integrations import openrlhf as integration

VOCAB, HIDDEN, BATCH, PROMPT, RESPONSE = 16384, 32, 4, 56, 200
LOGITS_BYTES = BATCH * (PROMPT + RESPONSE) * VOCAB * 4
CHUNK_MIB = 8  # an eighth of the logits
WAYS = ("as it is", "pair", "deferred")


@contextmanager
def stand_ins() -> Iterator[None]:
    """For what is not installed."""
    names = {
        "flash_attn": [],
        "flash_attn.bert_padding": ["index_first_axis", "pad_input", "rearrange", "unpad_input"],
        "flash_attn.utils": [],
        "flash_attn.utils.distributed": ["all_gather"],
    }

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("flash_attn is not installed")

    made = {name: ModuleType(name) for name in names if find_spec("flash_attn") is None}
    for name, module in made.items():
        vars(module).update(dict.fromkeys(names[name], absent))
    sys.modules.update(made)
    yield
    for name in made:
        del sys.modules[name]


with stand_ins():
    from openrlhf.models.actor import Actor
    from openrlhf.models.loss import PolicyLoss


def actor() -> Actor:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1,
        )
    )  # fmt: skip
    made = Actor(llama, temperature=0.7).train()
    made.packing_samples = False  # what Actor notes only of models that it loads
    return made


def train(way: str, steps: int, inner: str) -> Run:
    run, policy, loss_fn = Run(), actor(), PolicyLoss()
    if way != "as it is":
        assert integration.enable({"inner": inner, "chunk_mib": CHUNK_MIB})
    if way == "deferred":
        slime_compile.defer_logits(policy.model)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    draw = torch.Generator().manual_seed(0)
    whole, mask = torch.ones(BATCH, PROMPT + RESPONSE), torch.ones(BATCH, RESPONSE)
    for _ in range(steps):
        tokens = torch.randint(VOCAB // 64, (BATCH, PROMPT + RESPONSE), generator=draw)
        old = -9 - torch.rand(BATCH, RESPONSE, generator=draw)
        advantages = torch.randn(BATCH, RESPONSE, generator=draw)
        with run.step():
            log_probs, output = policy(
                tokens, mask, attention_mask=whole, return_output=True, return_entropy=True
            )
            loss = loss_fn(log_probs, old, advantages, action_mask=mask)[0]
            loss = loss - 0.01 * output.entropy[:, -RESPONSE:].mean()
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
