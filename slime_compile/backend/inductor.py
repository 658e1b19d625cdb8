"""`inner="inductor"`: our passes as inductor's custom passes, safe in its compile cache.

Entry point: `compile_inductor`. The joint graph is fused in `joint_custom_pre_pass`, and finished after inductor's own
passes in `joint_custom_post_pass`; `post_grad_custom_post_pass` lets gradients of the backward graph overwrite logits.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch.fx import Graph, GraphModule

from slime_compile import ops
from slime_compile.backend import check_ranks
from slime_compile.backend.identity import SOURCES
from slime_compile.backend.options import Options
from slime_compile.backend.passes import (
    donated_inputs,
    fused_nodes,
    keep_saved,
    run_end,
    run_fuse,
    run_inline,
    run_inplace,
    set_region,
)
from slime_compile.backend.runner import copied
from slime_compile.report import process
from slime_compile.report.record import Record
from slime_compile.torch_private import CustomGraphPass, inductor_config, list_mode_options
from slime_compile.version import __version__

Compiled = Callable[..., Any]


class _Backward(NamedTuple):
    """The backward graph being compiled, and the positions of the inputs without other references."""

    module: GraphModule
    donated: tuple[int, ...]


_backward: contextvars.ContextVar[_Backward | None] = contextvars.ContextVar(
    "slime_fused_backward", default=None
)


class _Pass(CustomGraphPass):
    """The user's own passes, then ours.

    Inductor has taken lists of passes only since torch 2.13, so composing them is done here.
    """

    def __init__(self, options: Options, number: int, user: tuple[Callable[[Graph], None], ...]):
        self.options = options
        self.number = number
        self.user = user

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.user:
            user_pass(graph)
        module = graph.owning_module
        self.run(graph if module is None else module.graph)

    def run(self, graph: Graph) -> None:
        raise NotImplementedError

    def uuid(self) -> Any | None:
        """None, which switches torch's caches off, if a pass of the user's has no identity, or ranks are compared."""
        user = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.user]
        if not all(user) or self.options.check_ranks:
            return None
        record = process.record(self.number)
        if record.abandoned:
            return ("slime_fused", "unfused", record.unkeyed, tuple(user))
        held = record.held if self.options.consume_logits is True else {}
        own = ("slime_fused", type(self).__name__, __version__, SOURCES, check_ranks.group_sizes())
        return (*own, self.options.key(), tuple(held.items()), record.unkeyed, tuple(user))


class _JointPass(_Pass):
    def run(self, graph: Graph) -> None:
        run_fuse(graph, self.options, process.record(self.number))


class _JointEndPass(_Pass):
    def run(self, graph: Graph) -> None:
        run_end(graph, self.options, process.record(self.number))


class _EndPass(_Pass):
    def run(self, graph: Graph) -> None:
        record = process.record(self.number)
        # Donated indices count the backward graph's own inputs, not those of a graph nested in it.
        backward = _backward.get()
        if backward is not None and graph.owning_module is backward.module:
            run_inplace(graph, backward.donated, self.options, record, inline=True)
        else:
            run_inline(graph, self.options, record)


@contextlib.contextmanager
def _compiling_backward(backward: _Backward | None) -> Iterator[None]:
    token = _backward.set(backward)
    try:
        yield
    finally:
        _backward.reset(token)


def compile_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    mode: str | None,
    record: Record,
) -> Compiled:
    from slime_compile.torch_private import compile_fx, compile_fx_inner  # slow to import

    def inner_compile(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        backward = _plan_inplace(gm, options, record) if kwargs.get("is_backward") else None
        with _compiling_backward(backward):
            return compile_fx_inner(gm, inputs, **kwargs)

    patches = {**(list_mode_options(mode) if mode else {}), **options.inductor}
    for name, kind in _HOOKS.items():
        patches[name] = kind(options, record.number, _user_passes(name, patches))
    compiled: Any = compile_fx(
        gm, example_inputs, inner_compile=inner_compile, config_patches=patches
    )
    record.write_aside()
    return cast(Compiled, compiled)


# NOTE [What is in place must be in the graph's text]
# Inductor's cache keys a backward graph by its text. The text does not show whether the saved logits are also returned
# to the caller, or are donated: a graph compiled in place for one forward would be reused for another one with logits
# in the user's hands. So the decisions are made before the key is computed, and written into the operators' region
# argument. The rewrite itself must wait for the end of inductor's passes, because they move nodes regardless of a
# mutation.


def _plan_inplace(gm: GraphModule, options: Options, record: Record) -> _Backward:
    donated = donated_inputs()
    nodes = fused_nodes(gm.graph)
    if nodes:
        planned = copied(gm.graph)
        run_inplace(planned, donated, options, record, inline=True)
        set_region(nodes, record.placements_region())
    keep_saved(options, record, gm.graph)
    gm.recompile()
    return _Backward(gm, donated)


_HOOKS: dict[str, type[_Pass]] = {
    "joint_custom_pre_pass": _JointPass,
    "joint_custom_post_pass": _JointEndPass,
    "post_grad_custom_post_pass": _EndPass,
}


def _user_passes(name: str, patches: dict[str, Any]) -> tuple[Callable[[Graph], None], ...]:
    given = patches.get(name, getattr(inductor_config, name))
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def noting_first_call(compiled: Compiled, record: Record) -> Compiled:
    """Code from torch's compile cache: no pass has seen it, so its first call reveals its fused operators."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        if record.called:
            return compiled(*args)
        with ops.watched() as regions:
            outputs = compiled(*args)
        record.loaded(regions)
        record.publish()
        return outputs

    return call
