"""In-place changes by a compiled function of tensors computed from deferred logits: refused if they would be lost.

Entry point: `check_changes`, on Dynamo's graph. Each reader of deferred logits computes them again in the graph. A
change in place of one such tensor (`logits.permute(1, 0, 2).mul_(2)`) is in that tensor alone; in eager code all
readers see it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from fx_passes.graph.order import following
from fx_passes.graph.user_lines import frames, source_of
from fx_passes.graph.writes import Writes

__all__ = ["check_changes"]

_FOLDER = str(Path(__file__).parent)
_EXPRESSIONS = str(Path(__file__).with_name("expressions.py"))
_ASKED_FOR = ("tensor", "call")
"""A program's methods for getting the tensor: `logits.tensor()` and `with_tensors`."""


def check_changes(gm: GraphModule) -> None:
    """Checks `gm` and the graphs nested in it.

    Raises:
        RuntimeError: a change would be lost. A tensor from `logits.tensor()` may change if nothing reads the deferred
            logits afterwards.
    """
    for module in gm.modules():
        if isinstance(module, GraphModule):
            _check(module)


def _check(gm: GraphModule) -> None:
    computed = [node for node in gm.graph.nodes if _is_computed(node)]
    if not computed:
        return
    writes, own = Writes(gm.graph), set(computed)
    for each in computed:
        memory = writes.memory([each])
        for node in following(each):
            written = node not in own and not memory.isdisjoint(writes.written(node))
            if written and (not _is_asked_for(each) or _is_read_again(each, node, computed)):
                raise RuntimeError(
                    "in a compiled function deferred logits must not be changed in place through another tensor computed from "
                    f"them, got {node.name} at {source_of(node)}, because other readers would miss the change. Call "
                    "logits.tensor() once, change that tensor and read nothing else"
                )


def _is_read_again(first: Node, change: Node, computed: list[Node]) -> bool:
    return any(change < node and _is_same(node, first) for node in computed)


def _is_same(left: Any, right: Any) -> bool:
    """Computed in the same way of the same values."""
    if not (isinstance(left, Node) and isinstance(right, Node) and _is_computed(left)):
        return bool(left is right or (type(left) is type(right) and left == right))
    operands = zip(
        (*left.args, *left.kwargs.values()), (*right.args, *right.kwargs.values()), strict=False
    )
    return left.target == right.target and all(_is_same(one, other) for one, other in operands)


def _is_computed(node: Node) -> bool:
    every = frames(node.meta.get("stack_trace") or "")
    return bool(every) and node.op != "placeholder" and every[-1][0] == _EXPRESSIONS


def _is_asked_for(node: Node) -> bool:
    every = frames(node.meta.get("stack_trace") or "")
    return next(name for file, _, name in every if file.startswith(_FOLDER)) in _ASKED_FOR
