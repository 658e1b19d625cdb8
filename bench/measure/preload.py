"""What the process that cells are forked from imports beforehand: it saves each cell seconds and computes nothing.

Not where there is a CUDA device: megatron-core and inductor of torch 2.11 ask for it when they are imported, and torch
allows no CUDA in a process that is forked after that.
"""

import torch._dynamo
import torch._inductor.compile_fx
import torch.profiler

import bench.measure.measure
import slime_compile.backend
from bench.cases.functions import has_megatron, megatron_cross_entropy

__all__ = ["bench", "slime_compile", "torch"]

if has_megatron():
    megatron_cross_entropy()
