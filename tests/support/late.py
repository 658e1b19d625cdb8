"""Compiled code without a compiler, where inductor has most freedom: what is element-wise is computed at its latest.

Entry point: `late()`, around whatever compiles with `inner="aot_eager"`. Inductor computes an element-wise value, a
view and a gather in the kernel that needs it, each time anew, and it does not see that one of our operators overwrites
what the value is computed from: NOTE [Readers of the logits] in fx_passes/inplace.py. Here the graphs of the program
and the bodies of its loops run in that way. It takes no longer than the interpreter, so that many programs can.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from fx_passes.graph.operators import MATMULS, SHOWN
from slime_compile.backend import interpreted
from slime_compile.backend.options import Options
from slime_compile.ops import operators, row_body

row_loop = importlib.import_module(
    "slime_compile.ops.row_loop"
)  # the package has an operator by that name

aten = torch.ops.aten
_INLINED = SHOWN | {
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.embedding.default,
    aten.cat.default,
    aten.flip.default,
    aten.repeat.default,
    aten.constant_pad_nd.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.as_strided.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.iota.default,
}
"""Beside what is element-wise: no kernels of their own in inductor."""


@contextlib.contextmanager
def late(owners: Collection[str] = ("graph",)) -> Iterator[None]:
    """Graphs and loops that are compiled in this block run late.

    Args:
        owners: of logits that are overwritten, leaves and retained graphs excepted. The references of a run here are
            others than those that our operators expect, and cannot be counted.
    """
    loops, decided = Options.rows_config, operators.why_beside

    def why_beside(
        x: Tensor, seen: Any, owner: str, others: Sequence[Tensor], strided: bool
    ) -> str:
        of_caller = x.is_leaf and x.requires_grad
        if owner in owners and not of_caller and not operators.holders.keeps_graph():
            return operators._other_layout(x, strided)
        return decided(x, seen, owner, others, strided)

    def compiled(options: Options, min_vocab: int) -> Any:
        return dataclasses.replace(loops(options, min_vocab), compiled=True)

    with (
        mock.patch.object(interpreted, "_interpreted", _graph),
        mock.patch.object(row_body._Compiled, "_compiled", _body),
        mock.patch.object(row_body, "_kept", {}),
        mock.patch.object(Options, "rows_config", compiled),
        mock.patch.object(operators, "why_beside", why_beside),
        mock.patch.object(row_loop, "why_beside", why_beside),
    ):
        yield


def _graph(gm: GraphModule) -> Callable[..., Any]:
    def run(args: list[Any]) -> Any:
        given = [*args]
        args.clear()
        return _run(gm, given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _body(body: Any, chunk: row_body.Chunk) -> row_body._Code:
    gm = body._module(chunk)
    return row_body._Code(lambda *given: _run(gm, given))


# ---- a run --------------------------------------------------------------------------------------------------------


@dataclass
class _Late:
    """A value that is computed each time that it is needed, until it is stored."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    stored: list[Any] = field(default_factory=list)

    def now(self, store: bool = False, deep: bool = False) -> Any:
        """With `deep`, what it is computed of is stored, too."""
        if self.stored:
            return self.stored[0]
        found = self.function(*_now(self.args, deep, deep), **_now(self.kwargs, deep, deep))
        if store:
            self.stored.append(found)
        return found


def _now(values: Any, store: bool = False, deep: bool = False) -> Any:
    return tree_map(lambda v: v.now(store, deep) if isinstance(v, _Late) else v, values)


def _run(gm: GraphModule, given: Sequence[Any]) -> Any:
    values: dict[Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), given, strict=True))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return _now(
                args[0], store=True, deep=True
            )  # results share memory as they do in eager code
        function = interpreted._function(gm, node)
        if _is_inlined(node):
            values[node] = _Late(function, args, kwargs)
            continue
        if node.target is aten.copy_.default:  # inductor sees what it overwrites
            _now([*values.values()], store=True)
        store = _has_own_kernel(node)
        values[node] = function(*_now(args, store), **_now(kwargs, store))
    raise AssertionError("no output")


def _is_inlined(node: Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or target is aten.copy_.default or target is operator.getitem:
        return False
    return target in _INLINED or torch.Tag.pointwise in getattr(target, "tags", ())


def _has_own_kernel(node: Node) -> bool:
    """Whether its arguments are in memory."""
    own = getattr(node.target, "namespace", "") == "slime_fused"
    return own or node.target in MATMULS
