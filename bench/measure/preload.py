"""What the process that cells are forked from imports beforehand: it saves each cell seconds and computes nothing."""

import torch._dynamo
import torch._inductor.compile_fx
import torch.profiler

import bench.measure.measure
import slime_compile.backend

__all__ = ["bench", "slime_compile", "torch"]
