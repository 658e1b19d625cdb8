"""The nodes of backward in a joint graph: one definition, written into torch's own tag, read by `is_backward`.

Entry points: `mark_backward`, by which `fuse` begins; the passes after it keep the tags right. `forward_outputs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

from fx_passes.graph.facts import BACKWARD, TAG, is_backward
from fx_passes.graph.order import ancestors, descendants
from fx_passes.torch_private import GradAOTOutput, InputMutationAOTOutput, TangentAOTInput

# NOTE [What belongs to backward]
# Torch tags traced nodes: `is_forward`, then `is_backward`. Changes of inputs with a fixed place have
# `must_be_in_forward` or `must_be_in_backward`. But the backward of an autograd.Function, as traced by Dynamo, has no
# tag, and the gradients taken by forward itself (torch.func.grad) have backward's. A node belongs to backward if no
# returned or written value of forward needs it, and if it
#
#     is tagged as backward's,
#     or reads a node of backward (a tangent, in the end),
#     or has no tag in a graph whose forward is tagged: it was traced after forward.
#
# Row scalars computed by a pass for backward from forward's values belong to neither: the partitioner decides.


def is_tangent(node: Node) -> bool:
    return isinstance(_described(node), TangentAOTInput)


def is_of_changed_input(tangent: Node) -> bool:
    """The gradient of an input changed by forward, with respect to its new value."""
    return isinstance(getattr(_described(tangent), "output", None), InputMutationAOTOutput)


def _described(node: Node) -> Any:
    desc: Any = node.meta.get("desc")
    while hasattr(desc, "base"):  # a part of a DTensor
        desc = desc.base
    return desc


def is_joint(graph: Graph) -> bool:
    """Has a backward."""
    return any(is_tangent(node) or node.meta.get(TAG) == BACKWARD for node in graph.nodes)


def mark_backward(graph: Graph) -> None:
    """Tags untagged nodes of backward, and those of forward with its tag. No node moves or changes."""
    if not is_joint(graph):
        _mark_forward(graph)
        return
    inputs = graph.find_nodes(op="placeholder")
    traced = any(node.meta.get(TAG) == "is_forward" for node in inputs)
    forward = _needed_by_forward(graph)
    for node in graph.nodes:
        if node in forward:
            if node.meta.get(TAG) == BACKWARD:
                node.meta[TAG] = "is_forward"
        elif node.op == "call_function" and not is_backward(node):
            late = any(is_backward(each) for each in node.all_input_nodes)
            untagged = not node.meta.get(TAG) and not node.meta.get("slime_fused")
            if late or (traced and untagged):
                node.meta[TAG] = BACKWARD
        elif is_tangent(node):
            node.meta[TAG] = BACKWARD


def _mark_forward(graph: Graph) -> None:
    """Torch tags the writes of an inference graph as if it had a backward."""
    for node in graph.nodes:
        if is_backward(node):
            node.meta[TAG] = "must_be_in_forward"


def _needed_by_forward(graph: Graph) -> set[Node]:
    """The returned and written values of forward, and all nodes that they are computed from."""
    tangents, late = (
        descendants([node for node in graph.nodes if begins(node)])
        for begins in (is_tangent, lambda node: is_tangent(node) or is_backward(node))
    )
    needed = {n for n in forward_outputs(graph) if n not in tangents}
    needed |= {n for n in _effects(graph) if n not in late}
    return ancestors(needed) | needed


def forward_outputs(graph: Graph) -> Iterator[Node]:
    """The outputs other than described gradients; any gradient depends on a tangent."""
    output = graph.output_node()
    described = output.meta.get("desc")
    returned = output.args[0]
    flat = returned if isinstance(returned, (list, tuple)) else (returned,)
    if described is None or len(described) != len(flat):
        described = (None,) * len(flat)
    for node, place in zip(flat, described, strict=True):
        if isinstance(node, Node) and not isinstance(place, GradAOTOutput):
            yield node


def _effects(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function" and _is_mutation(n)]


def _is_mutation(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(node.meta.get(TAG))
