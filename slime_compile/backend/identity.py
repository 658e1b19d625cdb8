"""Facts about a graph before its compilation: its name, its identity, the inputs to preserve.

Entry points: `new_record` for a graph of Dynamo's; `SOURCES`, a part of our passes' identity in torch's caches.
"""

import contextlib
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

import fx_passes
from fx_passes.graph.user_lines import frames, source_of
from slime_compile.backend.options import Options
from slime_compile.dynamo.frames import compile_id, graph_break
from slime_compile.ops import native
from slime_compile.ops.held_by import is_users
from slime_compile.report.record import Record, is_wide, outermost_frame

_TORCH = str(Path(torch.__file__).parent)


def new_record(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Record:
    """The facts about a graph before its compilation."""
    held = {i: reason for i, t in enumerate(example_inputs) if (reason := _held(t))}
    unkeyed = (_rank(gm), _shared(example_inputs), native.has_vectors())
    name = _name(gm)
    _name_caller(gm)
    return Record(
        name,
        _identity(gm, options, held, unkeyed),
        held,
        unkeyed=unkeyed,
        lines=_lines(gm),
        ended_by=graph_break(gm),
        compile_id=compile_id(),
        has_vocabulary=any(
            is_wide(node.meta.get("example_value"), options.min_vocab) for node in gm.graph.nodes
        ),
    )


def _lines(gm: GraphModule) -> list[str]:
    """The user's line of each node; nodes of one line have one trace."""
    lines: dict[str, str] = {}
    traces = [node.meta.get("stack_trace") or "" for node in gm.graph.nodes]
    for node, trace in zip(gm.graph.nodes, traces, strict=True):
        if trace not in lines:
            lines[trace] = source_of(node)
    return [lines[trace] for trace in traces]


def _rank(gm: GraphModule) -> int | None:
    """This process's rank, if a value of the graph is a DTensor.

    AOTAutograd makes a shard's first column a number in the code, and its cache's key has no rank (torch 2.15).
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import
    if tensors is None or not dist.is_initialized():
        return None
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return dist.get_rank() if any(isinstance(v, tensors.DTensor) for v in values) else None


def _shared(inputs: Sequence[Any]) -> tuple[tuple[int, int, str], ...]:
    """Inputs sharing memory: for each, the first input with that memory, and the distance to its start.

    If one of them is changed in place, AOTAutograd generates other code, and its cache's key has only separate inputs
    (torch 2.15).
    """
    first: dict[int, int] = {}
    shared = []
    for at, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            continue
        with contextlib.suppress(NotImplementedError):  # some subclasses have no storage
            before = first.setdefault(tensor.untyped_storage()._cdata, at)
            if before != at:
                behind = tensor.storage_offset() - inputs[before].storage_offset()
                shared.append((at, before, str(behind)))
    return tuple(shared)


def _held(tensor: Any) -> str:
    """Why autograd forbids writing over an input of the graph, or nothing."""
    if not isinstance(tensor, torch.Tensor):
        return ""
    owner = tensor if tensor._base is None else tensor._base
    if owner.requires_grad and owner.is_leaf:
        return f"they are {'' if owner is tensor else 'a view of '}a leaf that requires grad"
    return ""


def _source_hash() -> str:
    """Of all sources of both packages: any change of ours invalidates torch's caches."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(fx_passes.__file__).parent):
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".cpp"):
                digest.update(str(path.relative_to(package)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _source_hash()


def _identity(gm: GraphModule, options: Options, held: dict[int, str], unkeyed: object) -> str:
    """Equal for the same graph and options in every process, so that a cached graph finds its report."""
    inputs = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    layouts = [
        (str(t.shape), str(t.stride()), str(t.dtype), str(t.device), t.requires_grad)
        for t in inputs
        if isinstance(t, torch.Tensor) and t.layout is torch.strided
    ]
    # the owner of a buffer is in our passes' identity only if something may be overwritten
    kept = sorted(held.items()) if options.consume_logits is True else ()
    text = repr((gm.code, layouts, kept, unkeyed, torch.is_grad_enabled(), options.key(), SOURCES))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(gm: GraphModule) -> str:
    """The user's function, from the outermost frame of the first node with one; or the caller of torch's function."""
    traces = (n.meta.get("stack_trace") for n in gm.graph.nodes)
    name = outermost_frame(next((t for t in traces if t), ""))
    if name and not name.partition(" (")[2].startswith(_TORCH):
        return name
    caller = _caller()
    if caller is None:
        return name or "a graph without user code"
    called = name.partition(" (")[0] or "a function of torch's"
    return f"{called} (called at {caller.f_code.co_filename}:{caller.f_lineno})"


def _name_caller(gm: GraphModule) -> None:
    """Operators of a function of torch's own (`torch.compile(F.cross_entropy)`) get the line of the call."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call")]
    traces = [node.meta.get("stack_trace") or "" for node in nodes]
    if not all(file.startswith(_TORCH) for trace in traces for file, *_ in frames(trace)):
        return
    caller = _caller()
    if caller is None:
        return
    code = caller.f_code
    line = f'  File "{code.co_filename}", line {caller.f_lineno}, in {code.co_name}\n'
    for node, trace in zip(nodes, traces, strict=True):
        node.meta["stack_trace"] = line + trace


def _caller() -> FrameType | None:
    """The user's innermost frame: the caller of compiled code."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return frame
