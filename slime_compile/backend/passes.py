"""The passes of `fx_passes` over the graphs that torch hands out, guarded and reported; both inners call them.

    prepare        Dynamo's graph                    before AOTAutograd: collectives, rows that are read
    run_fuse       joint graph, or inference graph   before partitioning
    run_inline     forward or inference graph        after partitioning: few elements are inductor's
    run_inplace    backward graph                    after partitioning: the same, and who writes over the logits

An exception in a pass leaves the graph as it was and is logged once; with strict=True it is raised. So does one of who
compiles a graph that was rewritten: it is compiled again, unfused. This file holds no rule about losses.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

import fx_passes
from fx_passes import inlined, inplace
from fx_passes.collective_gradients import keep_eager_gradients
from fx_passes.collectives.widths import least_before_autograd, least_vocabulary
from fx_passes.equal_heads import share_heads
from fx_passes.function_outputs import drop_unread_outputs
from fx_passes.graph.backward import is_joint
from fx_passes.graph.user_lines import source_of
from fx_passes.linear import linear
from fx_passes.outcome import CannotExchange, Outcome
from fx_passes.picked_rows import sum_first
from fx_passes.returned_logits import Returned, detach_returned
from fx_passes.row_demand import demand_rows
from fx_passes.rows import RowsOutcome, by_rows
from fx_passes.sliced_gradients import compute_all_rows
from fx_passes.stacks import unstack
from fx_passes.stored import stored_values
from fx_passes.whole_logits import use_whole_logits
from fx_passes.writable import give_writable
from slime_compile import ops
from slime_compile.backend import check_ranks
from slime_compile.backend.options import Options
from slime_compile.deferred.changed import check_changes
from slime_compile.ops import native, reference
from slime_compile.report.record import Record, describe
from slime_compile.report.values import Placement
from slime_compile.torch_private import (
    TracingContext,
    inductor_config,
    select_decomp_table,
    trace_structured,
)

log = logging.getLogger(__name__)

# NOTE [Backward is compiled with the forward]
# Torch compiles a static backward at its first run, and donates nothing if that run has retain_graph=True. The
# compile cache does not hold which came first, so a later process would get other code by accident. Compiled with the
# forward, the code depends on the graph and the configuration alone.
#
# NOTE [No donated inputs]
# What is donated may be overwritten by any kernel, so torch refuses retain_graph=True wherever it has donated
# something, be it a number per row; it donates nothing to a backward that it compiles at a first run which retains the
# graph, and ours are compiled before any run. So nothing is donated: the logits, which matter most, are overwritten by
# an operator that sees when it runs whether the graph is retained, and what else is large is handed over by another
# (`fx_passes/writable.py`). Not where inductor records CUDA graphs, in which no operator is asked a second time; nor
# where the gradient of an lm_head was taken in forward: there what is saved is as large as the weight, and backward
# scales it in place.
BACKWARD_WITH_FORWARD = {"force_non_lazy_backward_lowering": True}


def prepare(gm: GraphModule, options: Options, record: Record) -> Returned:
    """What is done to Dynamo's graph before AOTAutograd differentiates it.

    Returns:
        Which of its outputs get their gradient from who calls it.

    Raises:
        RuntimeError: it changes deferred logits in a way that no other reader of them would see.
    """
    check_changes(gm)
    drop_unread_outputs(gm)
    for node in keep_eager_gradients(gm):
        where = source_of(node) or node.name
        record.note(
            f"the collective in place at {where} has the gradient of eager code: none of its own"
        )
    if options.lm_head:
        _prepare_heads(gm, options, record)
    returned = Returned()

    def detach() -> None:
        nonlocal returned
        returned = detach_returned(gm, options.min_vocab)

    _guarded("detaching returned logits", gm.graph, options, record, detach)
    return returned


def _prepare_heads(gm: GraphModule, options: Options, record: Record) -> None:
    min_vocab = least_before_autograd(gm, options.min_vocab)
    for module in [each for each in gm.modules() if isinstance(each, GraphModule)]:

        def edit(module: GraphModule = module) -> None:
            shared = share_heads(module.graph, min_vocab)
            demands = demand_rows(module.graph, min_vocab)
            for demand in demands:
                record.note(str(demand))
            if shared or demands:
                module.recompile()

        _guarded("sharing heads and moving selections of rows", module.graph, options, record, edit)


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
    what: str, graph: Graph, options: Options, record: Record, edit: Callable[[], None]
) -> bool:
    """Runs `edit`; if it raises, `graph`'s module gets the graph as it was, unless strict=True.

    Not a second time, where the graph is compiled again.

    Returns:
        Whether `edit` ran to its end.
    """
    if record.abandoned:
        return False
    module = graph.owning_module
    before = None if module is None or options.strict else copied(graph)
    try:
        edit()
        graph.lint()
    except Exception as error:
        if options.strict or isinstance(error, CannotExchange):
            raise
        if module is not None and before is not None:
            module.graph = before
        cause = f"{type(error).__name__}: {error}"
        record.fail(f"{what} failed: {cause}")
        _log_failure(what, cause)
        return False
    return True


# NOTE [Collectives and a second try]
# A rank that alone compiles unfused what all have fused waits for all-reduces that the others do not send. A pass fails
# on all ranks or on none, since it asks the graph alone; what compiles the rest may fail on one. So a graph with
# collectives is not tried again.


def may_stay_unfused(options: Options, record: Record) -> bool:
    """Whether a graph that could not be compiled is compiled again as it was, if it was rewritten."""
    return not options.strict and record.operators > 0 and not record.exchanges


def leave_unfused(options: Options, record: Record, error: Exception) -> None:
    """From now on the passes do nothing, and the report says what `options.inner` could not compile."""
    reason, *_ = str(error).splitlines() or [""]
    cause = f"{type(error).__name__}: {reason}"
    record.abandon(f"{options.inner} failed on the fused graph: {cause}")
    _log_failure(f"{options.inner}, on the fused graph,", cause)


def copied(graph: Graph) -> Graph:
    """As torch copies it, and with what Dynamo writes on nodes beside their `meta`: where a symbolic size is from."""
    made = Graph()
    copies: dict[Node, Node] = {}
    output = made.graph_copy(graph, val_map=copies, return_output_node=True)
    assert isinstance(output, tuple), graph
    made.output(output[0]).meta = dict(output[1].meta)
    for node, copy in copies.items():
        for name in vars(node).keys() - vars(copy).keys():
            setattr(copy, name, getattr(node, name))
    made.set_codegen(graph._codegen)
    return made


def run_fuse(graph: Graph, options: Options, record: Record) -> None:
    """The fusing pass over a joint or inference graph; its report goes into the first fused operator.

    Raises:
        CannotExchange: only this rank cannot do what all have to.
        check_ranks.RanksDisagree: with check_ranks=True, on all ranks of a group that would exchange different things.
    """

    found, min_vocab = Outcome(), options.min_vocab

    def edit() -> None:
        nonlocal found, min_vocab
        _trace("slime_fused_before", graph)
        if options.merge_collectives:
            min_vocab = least_vocabulary(graph, options.min_vocab)
        unstack(graph, min_vocab)
        sum_first(graph, min_vocab)
        found = fx_passes.fuse(graph, options.fuse_config(min_vocab))

    record.training |= is_joint(graph)
    if _guarded("the fusing pass", graph, options, record, edit):
        # apart, since this may fail on one rank alone: what ranks exchange is settled
        finish = functools.partial(_after_fusing, graph, options, record)
        _guarded("a pass after fusing", graph, options, record, lambda: finish(found, min_vocab))
    if options.check_ranks:
        module = graph.owning_module
        missing = check_ranks.check(graph if module is None else module.graph, record.name)
        if missing:
            record.note(missing)


def _after_fusing(
    graph: Graph, options: Options, record: Record, found: Outcome, min_vocab: int
) -> None:
    """Heads, gradients of slices, loops, and the report: nothing of it changes what ranks exchange."""
    if options.lm_head:
        found = linear(graph, options.linear_config()).added_to(found)
    if found.fused:
        compute_all_rows(graph, min_vocab)
    rows = by_rows(graph, options.rows_config(min_vocab)) if options.by_rows else RowsOutcome()
    found = rows.added_to(found)
    nodes = fused_nodes(graph)
    early = any(each.early for each in rows.loops)
    record.grad_in_forward |= early or any(n.target is ops.linear_row_both for n in nodes)
    if nodes:
        found = dataclasses.replace(found, stored=found.stored + stored_values(graph))
    part = describe(graph, found, len(nodes), min_vocab)
    carrying = [n for n in nodes if not _is_inlined(n, options)]
    if carrying:
        set_region(carrying, record.graph_region(part))
    else:
        record.keep_aside(record.graph_region(part))
    if options.consume_logits:
        use_whole_logits(graph)
    inplace.mark_inputs(graph, record.held)
    record.add(part)
    if nodes:
        _trace("slime_fused_after", graph)


_FORMULAS: inlined.Formulas = {ops.row_stats: reference.row_stats, ops.row_grad: reference.row_grad}
_SMALL = "they have few elements, and inductor compiles the formula (option inline_below)"


def run_inline(graph: Graph, options: Options, record: Record) -> None:
    """Operators of few elements in a forward or inference graph become formulas, for inductor to compile."""
    nodes = [node for node in fused_nodes(graph) if _is_inlined(node, options)]
    if nodes:
        _guarded("inlining", graph, options, record, lambda: _inline(graph, nodes))


def _inline(graph: Graph, nodes: Sequence[Node]) -> None:
    if nodes:
        inlined.inline(graph, nodes, _FORMULAS, select_decomp_table())


def _is_inlined(node: Node, options: Options) -> bool:
    """Not without vector instructions: inductor then adds a row element by element, which loses digits."""
    small = node.target in _FORMULAS and inlined.is_small(node, options.inlined_below)
    return small and native.has_vectors()


def run_inplace(
    graph: Graph, donated: set[Node], options: Options, record: Record, *, inline: bool
) -> None:
    """The in-place pass over a backward graph.

    Args:
        inline: whether inductor will compile it; in a dry run the operators stand for what it would make of them.
    """

    def edit() -> None:
        small = [node for node in fused_nodes(graph) if _is_inlined(node, options)]
        gradients = [node for node in small if node.target is ops.row_grad]
        placements = [Placement(source_of(node), False, _SMALL) for node in gradients]
        if inline:  # first: the formulas read the logits as any operator of torch does
            _inline(graph, small)
            small = []
        decisions = inplace.inplace(
            graph, donated, options.consume_logits, recorded(options), small
        )
        placements += [Placement(d.source, d.in_place, d.reason, d.owner) for d in decisions]
        record.place(placements)
        nodes = fused_nodes(graph)
        if nodes and placements:
            set_region(nodes, record.placements_region())
        elif placements:
            record.keep_aside(record.placements_region())
        if decisions:
            _set_places(graph, record)
        if placements:
            _trace("slime_fused_backward", graph)

    _guarded("the in-place pass", graph, options, record, edit)


def _set_places(graph: Graph, record: Record) -> None:
    """Each gradient that decides at run time counts its calls under a name that the report knows."""
    targets = (ops.row_grad_over, ops.row_loop_over)
    deciding = [number for number, p in enumerate(record.placements) if p.owner]
    nodes = [node for node in graph.nodes if node.target in targets]
    for number, node in zip(deciding, nodes, strict=True):
        node.kwargs = {**node.kwargs, "place": record.place_of(number)}


def _trace(name: str, graph: Graph) -> None:
    """The graph as an artifact for tlparse; nothing is printed where TORCH_TRACE is not set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: graph.python_code("self", verbose=True).src,
    )


_STATISTICS = (ops.row_stats, ops.linear_row_stats, ops.linear_row_both)


def fused_nodes(graph: Graph) -> list[Node]:
    packets = (
        *_STATISTICS, ops.row_grad, ops.row_grad_, ops.row_grad_over, ops.linear_row_grad, ops.row_loop, ops.row_loop_over
    )  # fmt: skip
    return [n for n in graph.nodes if n.op == "call_function" and n.target in packets]


def set_region(nodes: Sequence[Node], region: str) -> None:
    """The report's text as the region of the first node, preferably of one with statistics; "" of the others."""
    first = next((n for n in nodes if n.target in _STATISTICS), nodes[0])
    for node in nodes:
        node.args = (*node.args[:-1], region if node is first else "")


def donated_inputs(graph: Graph) -> set[Node]:
    """The placeholders of a backward graph that nobody but it can see."""
    metadata = _metadata()
    indices = metadata.bw_donated_idxs if metadata is not None else None
    placeholders = graph.find_nodes(op="placeholder")
    return {placeholders[i] for i in indices or ()}


def recorded(options: Options) -> bool:
    """Inductor records CUDA graphs of what it compiles now."""
    return options.inner == "inductor" and bool(inductor_config.triton.cudagraphs)


def keep_saved(options: Options, record: Record, graph: Graph | None = None) -> None:
    """Takes back what torch has donated to the backward graph that is compiled: see NOTE [No donated inputs].

    Args:
        graph: given to a compiler that may write over what was donated, if the graph says how.
    """
    metadata = _metadata()
    if metadata is None or record.grad_in_forward or recorded(options):
        return
    if graph is not None:

        def edit() -> None:
            give_writable(graph, donated_inputs(graph))

        _guarded("handing over saved values", graph, options, record, edit)
    metadata.bw_donated_idxs = []


def _metadata() -> Any:
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None
