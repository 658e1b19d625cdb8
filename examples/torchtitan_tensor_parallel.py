"""torchtitan's Llama 3 over two tensor-parallel ranks with its own vocabulary-parallel cross entropy; needs torchtitan.

    torchrun --nproc-per-node 2 examples/torchtitan_tensor_parallel.py [--steps 20] [--inner aot_eager]

    as it is     torchtitan compiles nothing; each rank has its half of the vocabulary
    inductor     `--compile.enable --compile.components loss`
    loss         `--compile.backend slime_fused` beside these

On the CPU, in float32, with torchtitan's default `spmd_types` and sequence parallelism. N is one rank's logits. What
comes from the trainer and what does not is as in `torchtitan_fsdp2.py`.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torchtitan_fsdp2 as titan
from measured import Run, compare
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

RANKS = 2
LOGITS_BYTES = titan.LOGITS_BYTES // RANKS
WAYS = ("as it is", "inductor", "loss")


PARALLELISM = ParallelismConfig(tensor_parallel_degree=RANKS)


def train(way: str, steps: int, inner: str, dims: ParallelDims) -> Run:
    loss_fn = titan.loss_of(way, inner, CrossEntropyLoss.Config(global_vocab_size=titan.VOCAB))
    config = titan.model_config()
    set_llama3_sharding_config(config, enable_sp=PARALLELISM.enable_sequence_parallel)
    llama = parallelize_llama(
        config.build(), parallel_dims=dims, parallelism=PARALLELISM, compile_config=CompileConfig(),
        training=TrainingConfig(mixed_precision_param="float32"), ac_config=None, dump_folder="",
    )  # fmt: skip
    torch.manual_seed(0)
    llama.init_weights(buffer_device=torch.device("cpu"))
    return titan.steps_of(llama, loss_fn, steps)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    """On every rank; the first one prints."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dims = ParallelDims.from_config(PARALLELISM, RANKS)
    with (
        mock.patch.object(parallel_dims, "device_type", "cpu"),
        get_spmd_context(parallel_dims=dims)(),
        contextlib.redirect_stdout(io.StringIO() if dist.get_rank() else sys.stdout),
    ):
        return compare(WAYS, partial(train, dims=dims), LOGITS_BYTES, argv)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
