"""The backend `slime_fused`: AOTAutograd's joint graph through the fusing pass, then inductor or plain interpretation.

Entry point: `slime_fused`, found by torch through the entry-point group `torch_dynamo_backends`; users never import it.
What is compiled is reported to `report.py`. This module holds no rule about losses: `fx_passes` does.

    joint graph          fx_passes.fuse        before partitioning, training and inference
    backward graph       fx_passes.inplace     after partitioning, nothing else is ever made in place

An exception in a pass leaves the graph as it was and is logged once; with strict=True it is raised.
"""

import contextlib
import contextvars
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

import fx_passes
from fx_passes import inplace
from fx_passes.collective_gradients import keep_eager_gradients
from fx_passes.graph.user_lines import source_of
from slime_compile import ops, report
from slime_compile.backend import check_ranks
from slime_compile.backend.options import Options
from slime_compile.version import __version__

log = logging.getLogger(__name__)

_Compiled = Callable[..., Any]


def slime_fused(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> _Compiled:
    """Compiles a graph of Dynamo's: `torch.compile(fn, backend="slime_fused", options={...})`.

    Args:
        options: see `slime_compile.backend.options.Options`; not together with `mode`.
        mode: inductor's, as in `torch.compile(mode=...)`; needs inner="inductor".

    Raises:
        RuntimeError: an unknown option, a wrong type, an unknown mode.
    """
    chosen = Options.parse(options)
    if chosen.inner == "aot_eager" and mode not in (None, "default"):
        raise RuntimeError(
            f"mode={mode!r} is inductor's and needs inner='inductor', got inner='aot_eager'"
        )
    record = report.keep(new_record(gm, example_inputs, chosen))
    prepare(gm, record)
    with functorch_config.patch(_FUNCTORCH):
        if chosen.inner == "aot_eager":
            return compile_eager(gm, example_inputs, chosen, record)
        compiled = _compile_inductor(gm, example_inputs, chosen, mode, record)
    return compiled if record.traced else _noting_first_call(compiled, record)


# NOTE [Backward is compiled with the forward]
# Torch compiles a static backward at its first run, and donates nothing if that run has retain_graph=True. The
# compile cache does not hold which came first, so a later process would get code that is not in place, or code that
# refuses retain_graph=True, by accident (facts/faults.md 3.4 item 11). Compiled with the forward, the code depends
# on the graph and the configuration alone: retain_graph=True is refused by torch, whose message names
# torch._functorch.config.donated_buffer; with that set to False nothing that was saved is overwritten, and backward
# may run as often as the user likes.
_FUNCTORCH = {"force_non_lazy_backward_lowering": True}


def new_record(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> report.Record:
    """What is known about a graph from the start: name, identity, and the inputs that may not be overwritten."""
    held = {i: reason for i, t in enumerate(example_inputs) if (reason := _held(t))}
    return report.Record(_name(gm), _identity(gm, options, held), held)


def prepare(gm: GraphModule, record: report.Record) -> None:
    """What Dynamo's graph needs before AOTAutograd differentiates it."""
    for node in keep_eager_gradients(gm):
        where = source_of(node) or node.name
        record.note(
            f"the collective in place at {where} has the gradient of eager code: none of its own"
        )


def _held(tensor: Any) -> str:
    """Why autograd forbids writing over an input of the graph, or nothing."""
    if not isinstance(tensor, torch.Tensor):
        return ""
    owner = tensor if tensor._base is None else tensor._base
    if owner.requires_grad and owner.is_leaf:
        return f"they are {'' if owner is tensor else 'a view of '}a leaf that requires grad"
    return ""


# ---- identity -----------------------------------------------------------------------------------------------------


def _source_hash() -> str:
    """Of all sources of both packages: any change of ours invalidates what torch has cached."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(fx_passes.__file__).parent):
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".cu"):
                digest.update(str(path.relative_to(package)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _source_hash()


def _identity(gm: GraphModule, options: Options, held: dict[int, str]) -> str:
    """The same for the same graph and options in every process, so that a cached graph finds its report."""
    inputs = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    layouts = [
        (str(t.shape), str(t.stride()), str(t.dtype), str(t.device), t.requires_grad)
        for t in inputs
        if isinstance(t, torch.Tensor) and t.layout is torch.strided
    ]
    text = repr((gm.code, layouts, sorted(held.items()), torch.is_grad_enabled(), options.key()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(gm: GraphModule) -> str:
    """The user's function, from the outermost frame of the first node that has one."""
    traces = (n.meta.get("stack_trace") for n in gm.graph.nodes)
    return report.outermost_frame(next((t for t in traces if t), ""))


# ---- the passes, guarded ------------------------------------------------------------------------------------------


@functools.cache
def _log_failure(what: str, cause: str) -> None:
    """Logs each cause once."""
    log.warning(
        "%s failed, the graph compiles unchanged (strict=True raises): %s",
        what,
        cause,
        exc_info=True,
    )


def _guarded(
    what: str, graph: Graph, options: Options, record: report.Record, edit: Callable[[], None]
) -> None:
    """Runs `edit`; if it raises, `graph`'s module gets the graph as it was, unless strict=True."""
    before = _copied(graph)
    try:
        edit()
        graph.lint()
    except Exception as error:
        if options.strict:
            raise
        if graph.owning_module is not None:
            graph.owning_module.graph = before
        cause = f"{type(error).__name__}: {error}"
        record.fail(f"{what} failed: {cause}")
        _log_failure(what, cause)


def _copied(graph: Graph) -> Graph:
    made = Graph()
    copied = made.graph_copy(graph, val_map={}, return_output_node=True)
    assert isinstance(copied, tuple), graph
    made.output(copied[0]).meta = dict(copied[1].meta)
    made.set_codegen(graph._codegen)
    return made


def run_fuse(graph: Graph, options: Options, record: report.Record) -> None:
    """The fusing pass over a joint or inference graph; its report goes into the first fused operator.

    Raises:
        check_ranks.RanksDisagree: with check_ranks=True, on all ranks of a group that would exchange different things.
    """

    def edit() -> None:
        found = fx_passes.fuse(graph, options.fuse_config())
        nodes = _fused_nodes(graph)
        part = report.describe(graph, found, len(nodes), options.min_vocab)
        if nodes:
            _set_region(nodes, record.graph_region(part))
        inplace.mark_inputs(graph, record.held)
        record.add(part)

    _guarded("the fusing pass", graph, options, record, edit)
    if options.check_ranks:
        module = graph.owning_module
        missing = check_ranks.check(graph if module is None else module.graph, record.name)
        if missing:
            record.note(missing)


def run_inplace(graph: Graph, donated: set[Node], options: Options, record: report.Record) -> None:
    """The in-place pass over a backward graph."""

    def edit() -> None:
        consume = options.consume_logits and functorch_config.donated_buffer
        decisions = inplace.inplace(graph, donated, consume)
        record.place([report.Placement(d.source, d.in_place, d.reason) for d in decisions])
        if decisions:
            _set_region(_fused_nodes(graph), record.placements_region())

    _guarded("the in-place pass", graph, options, record, edit)


def _fused_nodes(graph: Graph) -> list[Node]:
    packets = (ops.row_stats, ops.row_grad, ops.row_grad_)
    return [n for n in graph.nodes if n.op == "call_function" and n.target in packets]


def _set_region(nodes: Sequence[Node], region: str) -> None:
    """The report's text as the region of the first node, preferably of one with statistics; "" of the others."""
    first = next((n for n in nodes if n.target is ops.row_stats), nodes[0])
    for node in nodes:
        node.args = (*node.args[:-1], region if node is first else "")


def _donated(graph: Graph) -> set[Node]:
    """The placeholders of a backward graph that nobody but it can see."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    indices = metadata.bw_donated_idxs if metadata is not None else None
    placeholders = graph.find_nodes(op="placeholder")
    return {placeholders[i] for i in indices or ()}


# ---- inner="inductor" ---------------------------------------------------------------------------------------------

_backward: contextvars.ContextVar[GraphModule | None] = contextvars.ContextVar(
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
        held = report.record(self.number).held if self.options.consume_logits else {}
        own = ("slime_fused", type(self).__name__, __version__, _SOURCES, check_ranks.group_sizes())
        return (*own, self.options.key(), tuple(held.items()), tuple(user))


class _JointPass(_Pass):
    def run(self, graph: Graph) -> None:
        run_fuse(graph, self.options, report.record(self.number))


class _BackwardPass(_Pass):
    def run(self, graph: Graph) -> None:
        # Donated indices count the backward graph's own inputs, not those of a graph nested in it.
        module = _backward.get()
        if module is not None and graph.owning_module is module:
            run_inplace(graph, _donated(graph), self.options, report.record(self.number))


@contextlib.contextmanager
def _compiling_backward(gm: GraphModule | None) -> Iterator[None]:
    token = _backward.set(gm)
    try:
        yield
    finally:
        _backward.reset(token)


def _compile_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    mode: str | None,
    record: report.Record,
) -> _Compiled:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        backward = gm if kwargs.get("is_backward") else None
        if backward is not None:
            _plan_inplace(backward, options, record)
        with _compiling_backward(backward):
            return compile_fx_inner(gm, inputs, **kwargs)

    patches = {**(list_mode_options(mode) if mode else {}), **options.inductor}
    for name, kind in _HOOKS.items():
        patches[name] = kind(options, record.number, _user_passes(name, patches))
    compiled: Any = compile_fx(
        gm, example_inputs, inner_compile=inner_compile, config_patches=patches
    )
    return cast(_Compiled, compiled)


# NOTE [What is in place must be in the graph's text]
# Inductor's cache keys a backward graph by its text. Whether the saved logits are also returned to the caller, or are
# donated, is not in it: a graph compiled in place for one forward would be taken for another, whose logits the user
# holds. So the decisions are made once before the key is computed and written into the operators' region argument. The
# rewrite itself must wait until inductor's passes are done: they move nodes about without regard to a mutation.


def _plan_inplace(gm: GraphModule, options: Options, record: report.Record) -> None:
    planned = _copied(gm.graph)
    run_inplace(planned, _donated(planned), options, record)
    nodes = _fused_nodes(gm.graph)
    if nodes:
        _set_region(nodes, record.placements_region())
        gm.recompile()


_HOOKS: dict[str, type[_Pass]] = {
    "joint_custom_pre_pass": _JointPass,
    "post_grad_custom_post_pass": _BackwardPass,
}


def _user_passes(name: str, patches: dict[str, Any]) -> tuple[Callable[[Graph], None], ...]:
    from torch._inductor import config

    given = patches.get(name, getattr(config, name))
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _noting_first_call(compiled: _Compiled, record: report.Record) -> _Compiled:
    """Code from torch's compile cache: without a pass to ask, a call tells whether it has fused operators."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        record.called = True
        return compiled(*args)

    return call


# ---- inner="aot_eager" --------------------------------------------------------------------------------------------


def compile_eager(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, record: report.Record
) -> _Compiled:
    """AOTAutograd with inductor's decompositions and our passes; the graphs are interpreted as they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def partition(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        run_fuse(gm.graph, options, record)
        gm.recompile()
        return min_cut_rematerialization_partition(gm, inputs, compiler="inductor", **kwargs)

    def inference(gm: GraphModule, inputs: Sequence[Any]) -> _Compiled:
        run_fuse(gm.graph, options, record)
        return _interpreted(gm)

    def backward(gm: GraphModule, inputs: Sequence[Any]) -> _Compiled:
        run_inplace(gm.graph, _donated(gm.graph), options, record)
        return _interpreted(gm)

    compile_graph = aot_autograd(
        fw_compiler=lambda gm, inputs: _interpreted(gm),
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compile_graph(gm, example_inputs)


def _interpreted(gm: GraphModule) -> _Compiled:
    """Runs the graph node by node; each value is dropped after its last use, the inputs too."""
    gm.recompile()

    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(gm).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
