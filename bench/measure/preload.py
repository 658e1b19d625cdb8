"""Imports of the process all cells are forked from: each cell saves seconds. Nothing is computed.

Exception: with a CUDA device. Megatron-core and inductor of torch 2.11 query it when imported, and torch allows no CUDA
in a process forked afterwards.
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
