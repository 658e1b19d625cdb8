"""What the process that cells are forked from imports beforehand: it saves each cell seconds and computes nothing."""

import torch._dynamo
import torch._inductor.compile_fx
import torch.profiler

import bench.measure.measure
import slime_compile.backend
from bench.cases.functions import has_megatron, megatron_cross_entropy

__all__ = ["bench", "slime_compile", "torch"]

if has_megatron():
    megatron_cross_entropy()
