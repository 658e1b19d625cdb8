"""Megatron-core's GPTModel, its own loss and its own data parallelism, without and with `slime_fused`.

    python examples/megatron_gpt.py [--steps 20] [--inner aot_eager]

    as it is     `GPTModel(..., labels=labels)`: vocab_parallel_cross_entropy of logits [s, b, v]
    loss         `compute_language_model_loss` is compiled
    deferred     and `defer_logits`

In bfloat16; every step adds the gradients of two micro-batches to `main_grad`, in float32. One process on the CPU;
needs megatron-core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measured import Run, compare
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

import slime_compile

VOCAB, HIDDEN, BATCH, LENGTH, MICRO_BATCHES = 16384, 32, 4, 256, 2
LOGITS_BYTES = BATCH * LENGTH * VOCAB * 2
CHUNK_MIB = 4  # an eighth of the logits
WAYS = ("as it is", "loss", "deferred")


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Megatron without CUDA: its buffers are on the CPU, and there is no dropout that would need CUDA's generators."""
    on_cpu = mock.patch.object(torch.cuda, "current_device", return_value="cpu")
    no_generators = mock.patch.object(CudaRNGStatesTracker, "fork", contextlib.nullcontext)
    with on_cpu, no_generators:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def model() -> GPTModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=True, bf16=True, params_dtype=torch.bfloat16,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    return GPTModel(config, layer, VOCAB, LENGTH, position_embedding_type="rope")


def in_way(way: str, gpt: Any, inner: str = "aot_eager", **settings: bool) -> Any:
    """The model in Megatron's DDP, after the lines that are ours."""
    if way in ("loss", "deferred"):
        gpt.compute_language_model_loss = torch.compile(
            slime_compile.with_tensors(gpt.compute_language_model_loss),
            backend="slime_fused", options={"chunk_mib": CHUNK_MIB, "inner": inner},
        )  # fmt: skip
    if way == "deferred":
        slime_compile.defer_logits(gpt)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    return DistributedDataParallel(gpt.config, config, gpt)


def forward_backward(model: Any, tokens: torch.Tensor) -> float:
    """The loss of micro-batches [micro-batch, batch, length + 1]; their gradients are in `main_grad` then."""
    places = torch.arange(LENGTH).expand(BATCH, -1)
    hidden_from = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    model.zero_grad_buffer()
    total = 0.0
    for number, part in enumerate(tokens, 1):
        with model.no_sync() if number < len(tokens) else contextlib.nullcontext():
            losses = model(part[:, :-1], places, hidden_from, labels=part[:, 1:])
            loss = losses.mean() / len(tokens)
            loss.backward()
        total += loss.item()
    model.finish_grad_sync()
    return total


def train(way: str, steps: int, inner: str) -> Run:
    with one_rank():
        run, gpt = Run(), model()
        parallel = in_way(way, gpt, inner)
        draw = torch.Generator().manual_seed(0)
        for _ in range(steps):
            size = (MICRO_BATCHES, BATCH, LENGTH + 1)
            tokens = torch.randint(VOCAB // 64, size, generator=draw)
            with run.step():
                loss = forward_backward(parallel, tokens)
            run.losses.append(loss)
            with torch.no_grad():
                for parameter in gpt.parameters():
                    parameter -= parameter.main_grad
    return run


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    return compare(WAYS, train, LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
