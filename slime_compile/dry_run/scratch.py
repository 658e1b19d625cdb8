"""The scratch memory of the operators, made visible to a memory tracker.

Entry point: `Scratch`. On fake tensors an operator allocates its results only. Under this mode it also allocates the
buffers of its kernels over chunks of logits, and a gradient overwrites the logits if it may.
"""

from typing import Any

from torch import Tensor

from slime_compile.ops import linear, row_grad_over, row_loop, row_loop_over
from slime_compile.ops.linear_chunks import Head, grad_scratch, stats_scratch
from slime_compile.ops.row_loop import run_loop
from slime_compile.torch_private import TorchDispatchMode

_OPERATORS = (linear.linear_row_stats, linear.linear_row_grad)


class Scratch(TorchDispatchMode):
    """Inside the tracker's mode: `with tracker, Scratch(): ...`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is row_grad_over and _over(*args):
            return args[0].detach()
        if func in (row_loop, row_loop_over):
            return _looped(func, args)
        held = _held(func, args)
        found = func(*args, **(kwargs or {}))
        del held
        return found


def _over(x: Tensor, *arguments: Any) -> bool:
    """As if the call had the only references to its arguments, and the graph were not retained."""
    *_, owner, _ = arguments
    return owner != "anyone" or not (x.is_leaf and x.requires_grad)


def _looped(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """The loop itself, step by step on fake tensors: inductor fuses steps and takes no more memory."""
    if func is row_loop:
        rows, whole, sizes, program, _, limit, _ = args
        return run_loop(rows, whole, sizes, program, False, limit, None)
    x, rows, whole, sizes, program, _, limit, over, *_ = args
    at, result = over
    every = [*rows[:at], x, *rows[at:]]
    return run_loop(
        every, whole, sizes, program, False, limit, (at, result) if _over(x, *args[1:]) else None
    )


def _held(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    if func not in _OPERATORS:
        return []
    head = Head(*args[:3])
    if func is linear.linear_row_stats:
        *_, limit, _ = args
        return stats_scratch(head, limit)
    *_, wanted, _, limit, _ = args
    return grad_scratch(head, wanted, limit)
