"""Strides the user's own code relies on.

Entry point: `keep_layouts`, once a walk is over and all readers are known.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fx_passes.graph.emit import Emitter, viewable
from fx_passes.graph.facts import is_backward, same_layout, shape_of, value
from fx_passes.graph.fakes import result_of
from fx_passes.graph.operators import Target
from fx_passes.graph.order import computed
from fx_passes.refused import Refused
from fx_passes.walk.account import Account

aten = torch.ops.aten

_CUT_ANEW: set[Target] = {aten.view.default, aten._unsafe_view.default}
_READ_MEMORY: set[Target] = {aten.as_strided.default, aten.as_strided_scatter.default}
_COPIES_STAY_AS_THEY_ARE = torch.__version__ >= "2.13"
"""Before, inductor gives a copy the layout of its source, and then cannot view its bytes."""

_KNOWN = {"aten", "prims", "_c10d_functional", "slime_fused"}
"""Namespaces of operators that accept any strides, except those above."""
_OF_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

# NOTE [Strides of what takes a value's place]
# In eager code an operator on a transposed tensor returns a transposed tensor, and so do later element-wise operators.
# The program may transpose it back and view it, read its memory by strides, or return it. A replacement has the strides
# of the rewrite. Most readers do not depend on strides. If one does, however many operators later, the value is copied
# into the old order. A copy cannot have gaps and repeats: if a reader in the graph still needs them, the pass fails,
# and the graph stays as it was.


def keep_layouts(emitter: Emitter, account: Account) -> None:
    """Copies of the new values, in the old strides, if a reader depends on them."""
    turned = {old: new for old, new in account.replacements.items() if _is_turned(old, new)}
    live = computed(emitter.graph, account.replacements) if turned else set()
    copied: set[Node] = set()
    while asked := _asked(emitter, turned, live):
        for reader, values in asked.items():
            if reader.target is aten.view.dtype and not _COPIES_STAY_AS_THEY_ARE:
                raise Refused("torch before 2.13 cannot view the bytes of a transposed copy")
            if values <= copied and reader.op != "output":
                raise Refused(f"{reader.target} of a value with gaps in its memory")
        fresh = set().union(*asked.values()) - copied
        if not fresh:
            return
        copied |= fresh
        for old in sorted(fresh):
            emitter.origin, new = old, turned.pop(old)
            copy = account.replacements[old] = emitter.laid_out_as(new, old)
            if new in account.leaving:
                account.leaving[copy] = account.leaving.pop(new)
            if _is_turned(old, copy):
                turned[old] = copy


def _is_turned(old: Node, new: Node) -> bool:
    return not _alike(value(old), value(new))


def _alike(left: Any, right: Any) -> bool:
    """The same strides, tensor by tensor."""
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(same_layout(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _asked(emitter: Emitter, turned: dict[Node, Node], live: set[Node]) -> dict[Node, set[Node]]:
    """Readers that need the old strides, each with the transposed values it reads."""
    fakes: dict[Node, Any] = {old: value(new) for old, new in turned.items()}
    behind = {old: {old} for old in turned}
    found: dict[Node, set[Node]] = {}
    for node in emitter.graph.nodes if turned else ():
        read = [arg for arg in node.all_input_nodes if arg in fakes]
        if node.op == "output":
            read = [arg for arg in read if not is_backward(arg)]
        if not read or node not in live:
            continue
        values = set().union(*(behind[arg] for arg in read))
        if _asks(node, fakes):
            found[node] = values
            continue
        try:
            made = _computed(emitter, node, fakes)
        except (RuntimeError, Refused):  # torch refuses the strides
            found[node] = values
            continue
        if not _alike(value(node), made):
            fakes[node], behind[node] = made, values
    return found


def _asks(node: Node, fakes: dict[Node, Any]) -> bool:
    if node.op == "output" or node.target in _READ_MEMORY:
        return True
    if node.target in _CUT_ANEW:
        return not viewable(fakes[node.args[0]], shape_of(node))  # type: ignore[index]
    if node.target is operator.getitem:
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in _KNOWN


def _computed(emitter: Emitter, node: Node, fakes: dict[Node, Any]) -> Any:
    """The value of `node` on the new values."""
    if isinstance(node.target, torch._ops.OpOverload) and (
        node.target._schema.is_mutable or _OF_DATA.intersection(node.target.tags)
    ):
        return value(node)  # the strides of a changed tensor, or of a new one
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: fakes.get(n, value(n)))
    return result_of(emitter.fake_mode, node.target, args, kwargs)
