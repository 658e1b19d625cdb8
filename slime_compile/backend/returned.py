"""Returned logits as autograd sees them, after `fx_passes/returned_logits.py` has detached them.

Entry point: `with_own_gradient`. If the caller differentiates the logits, backward recomputes them from the inputs
of their matmul, and their gradient continues there. Otherwise nothing is computed.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fx_passes.returned_logits import Returned, Way

_Autocast = dict[str, tuple[bool, torch.dtype]]
"""For each device, autocast at the function's call: on or off, and the dtype."""


def with_own_gradient(compiled: Callable[..., Any], returned: Returned) -> Callable[..., Any]:
    """`compiled`, with the outputs of the user's function."""
    if not returned.ways:
        return compiled
    autocast = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    }

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        outputs = list(compiled(*args))
        values = [*args, *outputs]
        for way in returned.ways:
            operands = [values[place] for place in way.operands]
            outputs[way.output] = _Again.apply(way, autocast, outputs[way.output], *operands)
        return without_added(outputs, returned)

    return call


def without_added(outputs: Sequence[Any], returned: Returned) -> tuple[Any, ...]:
    """Those of the user's function."""
    return tuple(outputs[: len(outputs) - returned.added])


class _Again(torch.autograd.Function):
    """Logits computed from the operands, with existing values."""

    @staticmethod
    def forward(
        ctx: Any, way: Way, autocast: _Autocast, logits: Tensor, *operands: Tensor
    ) -> Tensor:
        ctx.way, ctx.autocast = way, autocast
        ctx.save_for_backward(*operands)
        # otherwise one of its arguments would be a view, and could not be changed in place
        return logits.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]
        operands = [
            each.detach().requires_grad_(needs)
            for each, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad(), contextlib.ExitStack() as modes:
            for device, (enabled, dtype) in ctx.autocast.items():
                modes.enter_context(torch.autocast(device, dtype, enabled))
            logits = ctx.way.replay(*operands)
        inputs = [each for each in operands if each.requires_grad]
        found = iter(torch.autograd.grad(logits, inputs, grad, allow_unused=True))
        return None, None, None, *(next(found) if needs else None for needs in needed)
