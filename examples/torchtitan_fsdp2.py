"""torchtitan's Llama 3 under its FSDP2, with its cross entropy, without and with `slime_fused`; needs torchtitan.

    python examples/torchtitan_fsdp2.py [--steps 20] [--inner aot_eager]

    as it is     torchtitan compiles nothing
    inductor     `--compile.enable --compile.components loss`
    loss         `--compile.backend slime_fused` beside these
    deferred     and `defer_logits`

One gloo rank on the CPU, in float32. The trainer's own pieces are here (model, `apply_fsdp_to_decoder`,
`CrossEntropyLoss`, its order of calls), its Trainer is not: that reads data and a tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from measured import Run, compare
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention

import slime_compile

VOCAB, HIDDEN, BATCH, LENGTH = 16384, 32, 4, 256
LOGITS_BYTES = BATCH * LENGTH * VOCAB * 4
CHUNK_MIB = 8  # an eighth of the logits
WAYS = ("as it is", "inductor", "loss", "deferred")


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_config() -> Any:
    """One layer, put together as torchtitan puts its own together."""
    layers = llama3._build_llama3_layers(
        n_layers=1, dim=HIDDEN, n_heads=2, hidden_dim=2 * HIDDEN, attn_backend="flex",
        rope=llama3.ComplexRoPE.Config(dim=HIDDEN // 2, max_seq_len=LENGTH),
    )  # fmt: skip
    layers[0].attention.inner_attention = ScaledDotProductAttention.Config()  # flex is for GPUs
    return llama3.Llama3Model.Config(
        dim=HIDDEN, vocab_size=VOCAB, layers=layers,
        norm=llama3.RMSNorm.Config(normalized_shape=HIDDEN, param_init=llama3._NORM_INIT),
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=llama3._EMBEDDING_INIT
        ),
        lm_head=llama3.Linear.Config(
            in_features=HIDDEN, out_features=VOCAB, param_init=llama3._output_linear_init(HIDDEN)
        ),
    )  # fmt: skip


def model() -> Any:
    torch.manual_seed(0)
    llama = model_config().build()
    llama.init_weights(buffer_device=torch.device("cpu"))
    return llama


def loss_of(way: str, inner: str, config: CrossEntropyLoss.Config) -> CrossEntropyLoss:
    backend = "inductor" if way == "inductor" else "slime_fused"
    if backend == "slime_fused":  # torchtitan gives a backend no options
        os.environ.update(SLIME_FUSED_CHUNK_MIB=str(CHUNK_MIB), SLIME_FUSED_INNER=inner)
    compile_config = CompileConfig(enable=way != "as it is", components=["loss"], backend=backend)
    return CrossEntropyLoss(config, compile_config=compile_config)


def steps_of(llama: Any, loss_fn: CrossEntropyLoss, steps: int) -> Run:
    run = Run()
    optimizer = torch.optim.SGD(llama.parameters(), lr=1.0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(VOCAB // 64, (BATCH, LENGTH + 1), generator=draw)
        with run.step():
            prediction = llama(tokens[:, :-1])
            loss, _ = loss_fn(prediction, tokens[:, 1:], torch.tensor(BATCH * LENGTH))
            del prediction  # as torchtitan does
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    return run


def train(way: str, steps: int, inner: str) -> Run:
    with one_rank():
        llama, loss_fn = model(), loss_of(way, inner, CrossEntropyLoss.Config())
        apply_fsdp_to_decoder(
            llama, init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)),
            param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False,
        )  # fmt: skip
        if way == "deferred":
            slime_compile.defer_logits(llama)
        return steps_of(llama, loss_fn, steps)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
