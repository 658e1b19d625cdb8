"""The nodes of backward in a joint graph: one definition, written into torch's own tag, read by `is_backward`.

Entry point: `mark_backward`, by which `fuse` begins; the passes after it keep the tags right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

from fx_passes.graph.facts import BACKWARD, TAG, is_backward
from fx_passes.graph.order import ancestors
from fx_passes.torch_private import GradAOTOutput, InputMutationAOTOutput, TangentAOTInput

# NOTE [What belongs to backward]
# Torch tags what it traces: `is_forward`, then `is_backward`, and where a change of an input has to stay
# `must_be_in_forward` or `must_be_in_backward`. But what Dynamo traced as the backward of an autograd.Function comes
# without a tag. A node belongs to backward if nothing that forward returns or writes needs it, and if it
#
#     is tagged as backward's,
#     or reads what belongs to backward (a tangent, in the end),
#     or has no tag in a graph whose forward is tagged: it was traced after forward.
#
# Row scalars that a pass makes for backward from forward's values alone belong to neither: the partitioner decides.


def is_tangent(node: Node) -> bool:
    return isinstance(_described(node), TangentAOTInput)


def is_of_changed_input(tangent: Node) -> bool:
    """The gradient of an input that forward has changed, with respect to what it is then."""
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
    """Tags what belongs to backward and has no tag; the nodes stay what and where they are."""
    if not is_joint(graph):
        _mark_forward(graph)
        return
    inputs = graph.find_nodes(op="placeholder")
    traced = any(node.meta.get(TAG) == "is_forward" for node in inputs)
    forward = _needed_by_forward(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node not in forward and not is_backward(node):
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
    """What forward returns or writes, and all that this is computed from."""
    late: set[Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or is_backward(node) or late.intersection(node.all_input_nodes):
            late.add(node)
    needed = [n for n in (*_returned(graph), *_effects(graph)) if n not in late]
    return ancestors(needed) | set(needed)


def _returned(graph: Graph) -> Iterator[Node]:
    """What forward returns, as far as the outputs are described; other gradients depend on tangents."""
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
