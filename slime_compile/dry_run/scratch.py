"""What the operators over chunks of logits hold while they run, made visible to a memory tracker.

Entry point: `Scratch`. On fake tensors an operator makes its results and nothing else; under this mode the buffers that
its kernel would have are alive beside them.
"""

from typing import Any

from torch import Tensor

from slime_compile.ops import linear
from slime_compile.ops.linear_chunks import Head, both_scratch, grad_scratch, stats_scratch
from slime_compile.torch_private import TorchDispatchMode


class Scratch(TorchDispatchMode):
    """Inside the tracker's mode: `with tracker, Scratch(): ...`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        held = _held(func, args)
        found = func(*args, **(kwargs or {}))
        del held
        return found


def _held(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    if func is linear.linear_row_stats:
        *_, limit, _ = args
        return stats_scratch(Head(*args[:3]), limit)
    if func is linear.linear_row_grad:
        *_, wanted, _, limit, _ = args
        return grad_scratch(Head(*args[:3]), wanted, limit)
    if func is linear.linear_row_both:
        *_, wanted, _, limit, _ = args
        return both_scratch(Head(*args[:3]), wanted, limit)
    return []
