"""The memory changed by nodes of Dynamo's graph: their arguments, or a gradient by a hook.

Entry points: `example` and `Writes`. Dynamo's graph has the program's own calls, before functionalisation, and names do
not show what a call changes: `F.relu(x, True)`, `torch._foreach_mul_`, an operator registered by a library. So each
node runs again on fake tensors, and the schemas of the ATen operators it calls declare the written arguments. A node
that cannot run so, such as a higher-order operator or an unknown function, may change all of its arguments.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Set
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from fx_passes.torch_private import FakeTensor, TorchDispatchMode, is_traceable_wrapper_subclass

Memory = frozenset[int]
"""Storages, each by a number."""

_RUN_THEIR_BODIES = {"autograd_function_apply", "tag_activation_checkpoint", "wrap"}
"""Higher-order operators without effects beyond their bodies'; others are hooks, kernels, control flow."""

_IN_PYTHON = {"torch.nn.functional", "torch.functional", "torch._jit_internal", "torch._tensor"}
"""Torch's modules of Python functions that only call operators."""

_UNKNOWN = object()


def example(node: object) -> Any:
    """The fake value of a node of Dynamo's graph; other things are their own value."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


@dataclass(frozen=True)
class _Run:
    """The result of running a node.

    Attributes:
        value: its own, or `_UNKNOWN`.
        memory: the certain or possible memory of the value.
        written: memory possibly changed by the node.
        repeatable: it changes nothing and draws no random numbers.
    """

    value: Any
    memory: Memory
    written: Memory = frozenset()
    repeatable: bool = False


class _Unknowable(Exception):
    """The fake values do not show shared memory: storages were exchanged, or a tensor has several, or shows none as
    inside `torch.func.grad`.
    """


class Writes:
    """The memory changed by the nodes of one of Dynamo's graphs. Nothing runs before the first query.

    A node added later runs at its first query.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._runs: dict[Node, _Run] = {}
        self._unknowable = False

    def change(self, nodes: Iterable[Node], memory: Set[int]) -> bool:
        """Whether one of `nodes` may write to `memory`, or hook a gradient there."""
        self._run_all()
        return self._unknowable or any(self.written(each) & memory for each in nodes)

    def written(self, node: Node) -> Memory:
        """Memory possibly written by `node`, if the graph's fake values show shared memory."""
        return self._of(node).written

    def memory(self, nodes: Iterable[object]) -> Memory:
        """The memory of the values of `nodes`, certain or possible."""
        given = (each for each in nodes if isinstance(each, Node))
        return frozenset().union(*(self._of(each).memory for each in given))

    def returned(self) -> Memory:
        """The memory returned to the graph's caller, who may change it."""
        return self.memory(self._graph.output_node().all_input_nodes)

    def repeatable(self, node: Node) -> bool:
        """Whether it gives the same again for the same operands, and does nothing else."""
        return self._of(node).repeatable

    def _run_all(self) -> None:
        """One node anywhere may make everything unknown."""
        if not self._runs:
            for each in self._graph.nodes:
                self._try(each)

    def _of(self, node: Node) -> _Run:
        self._run_all()
        if node not in self._runs:
            self._try(node)
        return self._runs[node]

    def _try(self, node: Node) -> None:
        try:
            self._runs[node] = self._run(node)
        except _Unknowable:
            self._unknowable = True
            self._runs[node] = _Run(_UNKNOWN, frozenset())

    def _run(self, node: Node) -> _Run:
        operands = [self._of(each) for each in node.all_input_nodes]
        reached: Memory = frozenset().union(*(each.memory for each in operands))
        known = "example_value" in node.meta
        value, written, random = example(node) if known else _UNKNOWN, reached, True
        if node.op in ("placeholder", "get_attr", "output"):
            written = frozenset()
            value = _attribute(node) if node.op == "get_attr" else value
            if value is _UNKNOWN and node.op == "placeholder":
                raise _Unknowable
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            written = reached if _may_change(node) else frozenset()
        elif not reached:
            pass
        elif all(each.value is not _UNKNOWN for each in operands) and _may_run(node):
            args, kwargs = map_arg((node.args, node.kwargs), lambda each: self._of(each).value)
            found = _on_aliases(node, args, kwargs)
            if found is not None:
                made, written, random = found
                value = value if known else made
        memory = reached if value is _UNKNOWN else _storages(value)
        return _Run(value, memory, written, not written and not random)


def _storages(value: Any) -> Memory:
    try:
        return frozenset(each.untyped_storage()._cdata for each in _tensors(value))
    except NotImplementedError:
        raise _Unknowable from None


def _tensors(value: Any) -> list[Tensor]:
    found = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    if any(
        each.layout is not torch.strided or is_traceable_wrapper_subclass(each) for each in found
    ):
        raise _Unknowable
    return found


def _attribute(node: Node) -> Any:
    module: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        module = getattr(module, name, _UNKNOWN)
    return module


def _may_change(node: Node) -> bool:
    """Whether a higher-order operator changes its arguments: a node of one of its bodies does."""
    target: Any = node.target
    if target.name() not in _RUN_THEIR_BODIES:
        return True
    attributes = [_attribute(each) for each in node.all_input_nodes if each.op == "get_attr"]
    return any(_changes_given(each.graph) for each in attributes if isinstance(each, GraphModule))


def _changes_given(graph: Graph) -> bool:
    writes = Writes(graph)
    return writes.change(graph.nodes, writes.memory(graph.find_nodes(op="placeholder")))


def _may_run(node: Node) -> bool:
    """Whether it is torch's own, and does nothing but call operators."""
    target: Any = node.target
    if node.op == "call_method" or isinstance(
        target, torch._ops.OpOverload | torch._ops.OpOverloadPacket
    ):
        return True
    module = getattr(target, "__module__", None) or ""
    if isinstance(target, types.FunctionType):
        return module in _IN_PYTHON
    written_in_c = (
        types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType
    )
    return isinstance(target, written_in_c) and "functorch" not in module


def _on_aliases(node: Node, args: Any, kwargs: Any) -> tuple[Any, Memory, bool] | None:
    """Runs `node`: its value, the written memory, whether it is random; None if it cannot run."""
    tensors = _tensors((args, kwargs))
    if not all(isinstance(each, FakeTensor) for each in tensors):
        return None
    mode: Any = tensors[0].fake_mode  # type: ignore[attr-defined]
    writing = _Writing()
    with ExitStack() as stack:
        for each in (mode, torch.no_grad(), *_without_traces(mode.shape_env), writing):
            stack.enter_context(each)
        args, kwargs = tree_map(_alias, (args, kwargs))
        target: Any = node.target
        if node.op == "call_method":
            target, args = getattr(args[0], target), args[1:]
        try:
            made = target(*args, **kwargs)
            return made, frozenset(writing.written), writing.random
        except _Unknowable:
            raise
        except Exception:  # whatever refuses fake tensors without their context
            return None


def _alias(value: Any) -> Any:
    """Another tensor over the same memory: changes of the new tensor and its version do not touch `value`."""
    return value.data if isinstance(value, Tensor) else value


def _without_traces(shapes: Any) -> list[Any]:
    """Keeps symbols of the run out of torch's table of symbolic sizes."""
    return (
        [] if shapes is None else [shapes.ignore_fresh_unbacked_symbols(), shapes.suppress_guards()]
    )


class _Writing(TorchDispatchMode):
    """Operators write to copies; the would-be written memory is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise _Unknowable
        written = _written(func, args, kwargs)
        self.written |= _storages(written)
        copies = [each.clone() for each in written]
        args, kwargs = _replaced((args, kwargs), written, copies)
        return _replaced(func(*args, **kwargs), copies, written)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments declared as written by the schema."""
    schema = func._schema.arguments
    given = {s.name: each for s, each in zip(schema, args, strict=False)} | kwargs
    names = [s.name for s in schema if s.alias_info is not None and s.alias_info.is_write]
    return _tensors([given.get(name) for name in names])


def _replaced(values: Any, old: list[Tensor], new: list[Tensor]) -> Any:
    instead = {id(each): other for each, other in zip(old, new, strict=True)}
    return tree_map(lambda each: instead.get(id(each), each), values)
