"""Drops unread outputs of an `autograd.Function` from Dynamo's graph.

Entry point: `drop_unread_outputs`, before AOTAutograd. In torch 2.11 the forward of an `autograd_function_apply` may
return every value inside it as well. If an in-place operator or a wait passes one of them on, the same tensor is
returned twice. Autograd assigns its gradient to the later place, which backward ignores: the gradient is silently zero,
with any backend. Newer releases return the function's own outputs only, and this pass finds nothing.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

_APPLY = "autograd_function_apply"


def drop_unread_outputs(gm: GraphModule) -> int:
    """Drops them in `gm` and the graphs nested in it, each with its gradient's argument of the backward.

    Returns:
        How many were dropped.
    """
    dropped = 0
    for module in list(gm.modules()):
        if isinstance(module, GraphModule):
            for node in list(module.graph.nodes):
                if node.op == "call_function" and getattr(node.target, "_name", "") == _APPLY:
                    dropped += _drop(module, node)
    return dropped


def _drop(module: GraphModule, call: Node) -> int:
    forward, backward = (_body(module, argument) for argument in call.args[:2])
    if forward is None or backward is None or call.kwargs.get("dirty_idx"):
        return 0
    if "non_differentiable_idx" not in call.kwargs:
        return 0
    if not all(user.target is operator.getitem for user in call.users):
        return 0
    output = forward.graph.output_node()
    returned: Any = output.args[0]
    outputs, saved = returned
    gradients = backward.graph.find_nodes(op="placeholder")[: len(outputs)]
    read = {user.args[1] for user in call.users}
    kept = [at for at, gradient in enumerate(gradients) if at in read or gradient.users]
    if len(kept) == len(gradients):
        return 0
    output.args = ((tuple(outputs[at] for at in kept), saved),)
    for at in set(range(len(gradients))) - set(kept):
        backward.graph.erase_node(gradients[at])
    _renumber(call, kept)
    for body in (forward, backward, module):
        body.recompile()
    return len(gradients) - len(kept)


def _body(module: GraphModule, argument: object) -> GraphModule | None:
    """The forward or backward graph used by one call and no other."""
    if not isinstance(argument, Node) or argument.op != "get_attr":
        return None
    same = module.graph.find_nodes(op="get_attr")
    if sum(len(node.users) for node in same if node.target == argument.target) != 1:
        return None
    body = module.get_submodule(str(argument.target))
    return body if isinstance(body, GraphModule) else None


def _renumber(call: Node, kept: list[int]) -> None:
    """Renumbers the outputs in the call's arguments and in its readers: the kept ones only."""
    place = {old: new for new, old in enumerate(kept)}
    for user in list(call.users):
        user.args = (call, place[user.args[1]])  # type: ignore[index]
    marked: Any = call.kwargs["non_differentiable_idx"]
    numbers = [place[at] for at in marked if at in place]
    call.kwargs = call.kwargs | {"non_differentiable_idx": numbers}
    example = call.meta.get("example_value")
    if isinstance(example, tuple | list) and len(example) > max(kept, default=-1):
        call.meta["example_value"] = type(example)(example[at] for at in kept)
