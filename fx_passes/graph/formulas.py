"""The formula of a fused operator, as nodes of the graph.

Entry point: `Formulas.emit`. The package with the operators gives their formulas as torch calls; the calls are
recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map, tree_map_only

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import SizeArg, rank_of, same, shape_of, value
from fx_passes.graph.operators import Target
from fx_passes.torch_private import TorchDispatchMode

aten = torch.ops.aten

_CHANGES_NOTHING: dict[Target, int] = {
    aten.add.Tensor: 0,
    aten.sub.Tensor: 0,
    aten.mul.Tensor: 1,
}
"""The neutral number of each operator: as second operand it does not change a floating tensor."""


@dataclass(frozen=True)
class Formulas:
    """The formulas of operators.

    Attributes:
        of: by operator, a function of its arguments except the last, its region. A list of columns, each a tensor
            `[..., 1]` or one number for all rows, may replace their concatenation.
        decompositions: from the operators in the formulas to operators known to the compiler.
    """

    of: Mapping[Target, Callable[..., Any]]
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]]] = dict

    def emit(self, emitter: Emitter, target: Target, *args: Any, **kwargs: Any) -> Any:
        """Nodes for the formula of `target`."""
        recorder = _Recorder(emitter, self.decompositions())
        given = map_arg(args, recorder.known)
        with torch.no_grad(), emitter.fake_mode, recorder:
            results = self.of[target](*given, **kwargs)
        return tree_map_only(torch.Tensor, recorder.node, results)


class _Recorder(TorchDispatchMode):
    """Emits a node for each operator called by torch."""

    def __init__(self, emitter: Emitter, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.emitter, self.decompositions = emitter, decompositions
        self._nodes: dict[int, Node] = {}  # by the identity of their fake values

    def known(self, node: Node) -> Any:
        """The fake value of `node`; later calls with it read `node`."""
        self._nodes[id(value(node))] = node
        return value(node)

    def node(self, fake: torch.Tensor) -> Node:
        return self._nodes[id(fake)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # the device of a tensor
        if _changes_nothing(func, args):
            return args[0]
        with self:
            decomposed = self.decompositions.get(func, func.decompose)(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        args, kwargs = tree_map(self._argument, (args, kwargs))
        made = self.emitter.call(func, *args, **kwargs)
        if isinstance(value(made), torch.Tensor):
            return self.known(made)
        count = range(len(value(made)))
        return [self.known(self.emitter.call(operator.getitem, made, at)) for at in count]

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self.node(arg)
        return self._size(arg) if isinstance(arg, torch.SymInt) else arg

    def _size(self, size: torch.SymInt) -> SizeArg:
        dims = ((node, dim) for node in self._nodes.values() for dim in range(rank_of(node)))
        return next(self.emitter.size(n, dim) for n, dim in dims if same(shape_of(n)[dim], size))


def _changes_nothing(target: Target, args: tuple[Any, ...]) -> bool:
    """Arithmetic of a floating tensor with its neutral number."""
    if target not in _CHANGES_NOTHING or not isinstance(args[0], torch.Tensor):
        return False
    number = args[1]
    plain = isinstance(number, int | float) and number == _CHANGES_NOTHING[target]
    return plain and args[0].is_floating_point()
