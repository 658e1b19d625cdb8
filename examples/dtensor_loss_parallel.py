"""A transformers Llama whose head PyTorch's own tensor parallelism shards, with `loss_parallel`; needs transformers.

    torchrun --nproc-per-node 2 examples/dtensor_loss_parallel.py [--steps 20] [--inner aot_eager]

    as it is     `parallelize_module` on the head, `F.cross_entropy` of the DTensor under `loss_parallel`
    loss         `F.cross_entropy` compiled by slime_fused

Over gloo on the CPU, in float32. N is one rank's logits: its half of the vocabulary.

There is no run with inductor alone: its compile cache gives a rank the code of another one (torch 2.15), whose columns
are not its own; the loss is wrong then, and nothing says so.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured import Run, compare
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, BATCH, LENGTH, RANKS = 16384, 32, 4, 256, 2
LOGITS_BYTES = BATCH * LENGTH * VOCAB * 4 // RANKS
WAYS = ("as it is", "loss")


def model(mesh: DeviceMesh) -> LlamaForCausalLM:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
        )
    )  # fmt: skip
    sharded = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(llama, mesh, {"lm_head": sharded})
    return llama


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(way: str, steps: int, inner: str, mesh: DeviceMesh) -> Run:
    run, llama, loss_fn = Run(), model(mesh), loss_of
    if way == "loss":
        loss_fn = torch.compile(loss_of, backend="slime_fused", options={"inner": inner})
    optimizer = torch.optim.SGD(llama.parameters(), lr=1.0, foreach=False)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = torch.randint(VOCAB // 64, (BATCH, LENGTH + 1), generator=draw)
        with run.step(), loss_parallel():
            logits = llama(tokens[:, :-1]).logits
            loss = loss_fn(logits, tokens[:, 1:])
            del logits
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    return run


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    """On every rank; the first one prints."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    with contextlib.redirect_stdout(io.StringIO() if dist.get_rank() else sys.stdout):
        return compare(WAYS, partial(train, mesh=mesh), LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
