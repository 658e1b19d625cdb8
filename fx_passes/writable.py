"""Saved values without other references: the compiler of the backward graph may overwrite them.

Entry point: `give_writable`, on the backward graph before it is compiled.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_float_tensor, numbers, shape_of, value
from fx_passes.graph.operators import VIEWS, is_elementwise
from fx_passes.torch_private import detect_fake_mode

LEAST_BYTES = 1 << 20
"""Of smaller inputs, the call of an operator takes longer than their memory is worth."""

# NOTE [Saved values that a compiler may write over]
# Inductor computes an element-wise result in the memory of a donated input. Our backward graphs have none (NOTE [No
# donated inputs] in `slime_compile/backend/passes.py`); that costs a buffer wherever the program's own arithmetic
# continues from a saved value. So an operator passes such an input on: its memory, or a copy if the graph is retained.
# To the compiler it is a function with a new result. Hence no other node of the graph may read that input. Nor may one
# of our operators, because they look for other references themselves.


def give_writable(graph: Graph, donated: set[Node]) -> int:
    """Lets the compiler overwrite each large input with an element-wise reader and none among our operators.

    Args:
        donated: placeholders referenced by this graph alone.

    Returns:
        Their number.
    """
    taken = [node for node in graph.nodes if node in donated and _pays(node)]
    fake_mode = detect_fake_mode([value(node) for node in taken])
    if fake_mode is None:
        return 0
    emitter = Emitter(graph, fake_mode)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for node in taken:
            emitter.origin = node
            own = emitter.call(torch.ops.slime_fused.writable.default, node)
            node.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)
    return len(taken)


def _pays(node: Node) -> bool:
    if not is_float_tensor(node):
        return False
    count = value(node).dtype.itemsize * math.prod(numbers(shape_of(node)))
    if count < LEAST_BYTES:
        return False
    readers = _readers(node)
    ours = any(getattr(user.target, "namespace", "") == "slime_fused" for user in readers)
    return not ours and any(map(is_elementwise, readers))


def _readers(node: Node) -> list[Node]:
    """Seen through views."""
    found: list[Node] = []
    waiting = [node]
    while waiting:
        users = waiting.pop().users
        found += users
        waiting += [user for user in users if user.target in VIEWS]
    return found
