"""Megatron-core's head, `ColumnParallelLinear`: a linear map of this rank's vocabulary, between two collectives.

Its `forward` stays; the replacement of its final matmul (`_forward_impl`) is deferred. That matmul also sums hidden's
gradient over the ranks, or scatters the sum over the sequence. Here Megatron's own functions do this before the logits
are returned. The weight's gradient arrives in `weight.grad`, and Megatron's DDP adds it to `main_grad`, as without
`gradient_accumulation_fusion`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["METHOD", "gathered", "is_column_parallel", "replaceable"]

METHOD = "_forward_impl"
_HOME = "megatron.core.tensor_parallel.layers"


def is_column_parallel(module: nn.Module) -> bool:
    """Whether it computes the same as Megatron's class; Transformer Engine's class of this name does not."""
    for kind in type(module).__mro__:
        if (kind.__module__, kind.__name__) == (_HOME, "ColumnParallelLinear"):
            ours: Any = kind
            return type(module).forward is ours.forward and hasattr(ours, METHOD)
    return False


def replaceable(module: Any, grad_output_buffer: Any) -> bool:
    """False with gathered logits, and if Megatron computes the weight's gradient later."""
    return not module.gather_output and grad_output_buffer is None


def gathered(
    hidden: Tensor, allreduce_dgrad: bool, sequence_parallel: bool, group: Any, **rest: Any
) -> Tensor:
    """Hidden of the complete sequence, with the gradient exchange of `_forward_impl`."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    if sequence_parallel:
        hidden = mappings.gather_from_sequence_parallel_region(hidden, True, group)
    elif allreduce_dgrad:
        hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group)
    packed: Tensor = _Packed.apply(hidden)
    return packed


class _Packed(torch.autograd.Function):
    """The same values with a contiguous gradient: of any other Megatron sums a copy, and returns the original."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()
