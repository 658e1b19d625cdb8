"""Opt-in remedies for losses Dynamo runs in Python before asking any backend.

Entry points: `inline_nested_compile`, `trace_distributed_nn` and `trace_async_all_reduce`. Each is called once, before
the loss is compiled. It holds for the process; calling it again is harmless. A report names the remedy at a graph break
that it removes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fx_passes.graph.user_lines import skip_folder

skip_folder(str(Path(__file__).parent))  # a report names the line of the collective's call


def inline_nested_compile() -> None:
    """Lets Dynamo trace through a nested `torch.compile`.

    slime's and verl's entropy define a function under `@torch.compile(dynamic=True)` in their `forward`. Dynamo breaks
    the graph there, and the softmax is materialised between two graphs. From now on, `torch.compile` under tracing
    returns the function itself; elsewhere it is torch's own.
    """
    if not getattr(torch.compile, "_slime_fused_inlines", False):
        from slime_compile.torch_private import get_torch_obj_rule_map

        get_torch_obj_rule_map()  # defined at import, because later the name would refer to the replacement
        torch.compile = _inlining(torch.compile)


def _inlining(compile_: Callable[..., Any]) -> Any:
    @functools.wraps(compile_)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return compile_(model, **kwargs)
        return _itself if model is None else model

    compile._slime_fused_inlines = True  # type: ignore[attr-defined]
    return compile


def _itself(function: Any) -> Any:
    return function


def trace_distributed_nn() -> None:
    """Lets Dynamo trace `torch.distributed.nn.functional.all_reduce`, with the gradient of eager code.

    Since torch 2.12 Dynamo raises there and runs the whole frame, the loss included, in Python. From now on it traces
    the functional collective with the same gradient: summed over the ranks. On torch 2.11 Dynamo traces the original,
    and this call changes nothing.
    """
    global _traces_distributed_nn
    if _traces_distributed_nn or torch.__version__ < "2.12":
        return
    import torch.distributed.nn.functional as nn_functional

    from slime_compile.torch_private import functional_all_reduce

    # for a reduction, Dynamo of torch 2.12 knows the name only, without defaults
    @torch.compiler.substitute_in_graph(nn_functional.all_reduce, skip_signature_check=True)
    def traced(tensor: Any, op: Any = None, group: Any = dist.group.WORLD) -> Any:
        return functional_all_reduce(tensor, _name_of(op), group)

    _traces_distributed_nn = True


_traces_distributed_nn = False


def trace_async_all_reduce() -> None:
    """Lets Dynamo trace `torch.distributed.all_reduce(..., async_op=True)`, as a synchronous all-reduce.

    ColossalAI's cross entropy and log-probs start the maximum this way and compute a mask meanwhile; Dynamo breaks the
    graph there. From now on Dynamo traces the functional collective, as for `async_op=False`, and returns finished
    work: `wait()` and `is_completed()` are True at once. Eager code does not change.
    """
    global _traces_async_all_reduce
    if _traces_async_all_reduce:
        return
    from slime_compile.torch_private import functional_all_reduce

    @torch.compiler.substitute_in_graph(dist.all_reduce, skip_signature_check=True)
    def traced(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        whole: Any = dist.group.WORLD if group is None else group
        tensor.copy_(functional_all_reduce(tensor, _name_of(op), whole))
        return _Ended() if async_op else None

    _traces_async_all_reduce = True


_traces_async_all_reduce = False


def _name_of(op: Any) -> Any:
    """Of a reduction, as the functional collectives have it."""
    return "sum" if op is None else op.name.lower()


class _Ended:
    """The methods of `torch.distributed.Work` that a finished collective still has."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_REMEDIES = {
    r"torch\.compile call|compile\.<locals>\.fn": "slime_compile.inline_nested_compile() removes this break",
    r"distributed[/.]nn[/.]functional": "slime_compile.trace_distributed_nn() brings it into the graph",
    r"async_op=True for distributed collectives": (
        "slime_compile.trace_async_all_reduce() brings it into the graph if it is an all_reduce"
    ),
    r"Dynamic shape operator": (
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True brings it into the graph"
    ),
    r"capture_scalar_outputs=False|_local_scalar_dense": (
        "torch._dynamo.config.capture_scalar_outputs = True brings it into the graph"
    ),
}


def remedy(reason: str) -> str:
    """The remedy of a graph break, from Dynamo's reason for it and its place, or ""."""
    return next((text for pattern, text in _REMEDIES.items() if re.search(pattern, reason)), "")
