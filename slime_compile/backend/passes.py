"""The graphs of each stage go through the passes of `fx_passes.pipeline`, and into the report.

    prepare        Dynamo's graph                    before AOTAutograd: collectives, returned logits
    run_fuse       joint graph, or inference graph   before partitioning
    run_end        the same                          after inductor's own passes
    run_inline     forward or inference graph        after partitioning: small operators become formulas
    keep_saved     backward graph                    before inductor compiles it
    run_inplace    backward graph                    after partitioning: the same, and gradients in place

`runner` guards them. This file holds no rule about losses.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fx_passes import pipeline
from fx_passes.collectives.widths import least_vocabulary
from fx_passes.graph.backward import is_joint
from fx_passes.graph.formulas import Formulas
from fx_passes.graph.user_lines import source_of
from fx_passes.outcome import CannotExchange, Outcome
from fx_passes.pipeline import Config, Inline
from fx_passes.returned_logits import Returned
from fx_passes.stored import stored_values
from slime_compile import ops
from slime_compile.backend import check_ranks
from slime_compile.backend.options import Options
from slime_compile.backend.runner import copied, run, tell_failure, trace
from slime_compile.deferred.changed import check_changes
from slime_compile.ops import native, reference
from slime_compile.report.record import Record, describe
from slime_compile.report.values import Placement
from slime_compile.torch_private import (
    TracingContext,
    inductor_config,
    select_decomp_table,
)

# NOTE [Backward is compiled with the forward]
# Torch compiles a static backward at its first run, and donates nothing if that run has retain_graph=True. The
# compile cache does not record the kind of first run, so a later process would get other code by accident. Compiled
# with the forward, the code depends on the graph and the configuration alone.
#
# NOTE [No donated inputs]
# Any kernel may overwrite a donated input. So with any donated input, even one number per row, torch refuses
# retain_graph=True. It donates nothing to a backward whose first run retains the graph; but ours is compiled before any
# run. So nothing is donated. The logits matter most: their operator checks at run time whether the graph is retained,
# and overwrites them if not. Other large inputs go through another operator (`fx_passes/writable.py`). Exceptions:
# inductor recording CUDA graphs, which never call an operator again; and a head's gradient computed in forward, because
# the saved tensors are then as large as the weight, and backward scales them in place.
BACKWARD_WITH_FORWARD = {"force_non_lazy_backward_lowering": True}


def prepare(gm: GraphModule, options: Options, record: Record) -> Returned:
    """The passes over Dynamo's graph, before AOTAutograd differentiates it.

    Returns:
        The outputs whose gradient the caller provides.

    Raises:
        RuntimeError: it changes deferred logits, and other readers of them would not see the change.
    """
    check_changes(gm)
    outcome = run("dynamo", gm, _config(options, record), options, record)
    for note in outcome.notes:
        record.note(note)
    return outcome.returned or Returned()


def _config(
    options: Options, record: Record, min_vocab: int | None = None, **of_the_graph: Any
) -> Config:
    min_vocab = options.min_vocab if min_vocab is None else min_vocab
    below = options.inlined_below if native.has_vectors() else 0
    return Config(
        fuse=options.fuse_config(min_vocab, FORMULAS),
        rows=options.rows_config(min_vocab),
        by_rows=options.by_rows,
        lm_head=options.lm_head,
        consume_logits=options.consume_logits,
        held=record.held,
        recorded=recorded(options),
        without=options.left_out,
        small=Inline(FORMULAS, below),
        **of_the_graph,
    )


# ---- the stages ---------------------------------------------------------------------------------------------------


def run_fuse(graph: Graph, options: Options, record: Record) -> None:
    """The passes over a joint or inference graph; their report goes into the first fused operator.

    Raises:
        CannotExchange: only this rank cannot do what all have to.
        check_ranks.RanksDisagree: with check_ranks=True, on all ranks of a group that would exchange different things.
    """
    config = _config(options, record, _least_vocabulary(graph, options, record))
    trace("slime_fused_before", graph)
    record.training |= is_joint(graph)
    module = graph.owning_module
    planned: list[Graph] = []

    def see(name: str, graph: Graph) -> None:
        """A rank has loops where it has many rows; they exchange nothing, and hide what is exchanged."""
        if options.check_ranks and name == "rows":
            planned.append(copied(graph))

    run("joint", graph, config, options, record, lambda g, o: _report(g, o, config, record), see)
    if options.check_ranks:
        planned.append(graph if module is None else module.graph)
        missing = check_ranks.check(planned[0], record.name)
        if missing:
            record.note(missing)


def _least_vocabulary(graph: Graph, options: Options, record: Record) -> int:
    """The smallest last dimension treated as a vocabulary in this graph."""
    if not options.merge_collectives:
        return options.min_vocab
    try:
        return least_vocabulary(graph, options.min_vocab)
    except CannotExchange:
        raise
    except Exception as error:
        if options.strict:
            raise
        tell_failure(record, "the search for shards", error)
        return options.min_vocab


def _report(graph: Graph, outcome: Outcome, config: Config, record: Record) -> None:
    nodes = fused_nodes(graph)
    record.grad_in_forward |= outcome.early
    if nodes:
        outcome = dataclasses.replace(outcome, stored=outcome.stored + stored_values(graph))
    record.one_chunk |= outcome.one_chunk
    part = describe(graph, outcome, len(nodes), config.min_vocab)
    small = _small(graph, config)
    carrying = [n for n in nodes if n not in small]
    if carrying:
        set_region(carrying, record.graph_region(part))
    else:
        record.keep_aside(record.graph_region(part))
    record.add(part)
    if nodes:
        trace("slime_fused_after", graph)


def run_end(graph: Graph, options: Options, record: Record) -> None:
    """The same graph, after inductor's own passes."""
    run("joint end", graph, _config(options, record), options, record)


FORMULAS = Formulas(
    {ops.row_stats: reference.row_stats, ops.row_grad: reference.row_grad},
    lambda: select_decomp_table(),
)
_SMALL = "the logits have few elements, and inductor compiles the formula (option inline_below)"


def run_inline(graph: Graph, options: Options, record: Record) -> None:
    """Operators of few elements in a forward or inference graph become formulas, for inductor to compile."""
    run("forward", graph, _config(options, record), options, record)


def _small(graph: Graph, config: Config) -> list[Node]:
    """Fused operators that become formulas.

    None without vector instructions: inductor then adds a row element by element, which loses digits.
    """
    return pipeline.small_nodes(graph, config.small) if config.small else []


def run_inplace(
    graph: Graph, donated: Sequence[int], options: Options, record: Record, *, inline: bool
) -> None:
    """The passes over a backward graph.

    Args:
        donated: positions of the placeholders without other references.
        inline: whether inductor will compile it; in a dry run the operators stand for its code.
    """
    config = _config(options, record, donated=tuple(donated), inlines=inline)
    gradients = [node for node in _small(graph, config) if node.target is ops.row_grad]
    small = [Placement(source_of(node), False, _SMALL) for node in gradients]
    run("backward", graph, config, options, record, lambda g, o: _place(g, o, small, record))


def _place(graph: Graph, outcome: Outcome, small: list[Placement], record: Record) -> None:
    decisions = outcome.decisions
    placements = [*small, *(Placement(d.source, d.in_place, d.reason, d.owner) for d in decisions)]
    record.place(placements)
    nodes = fused_nodes(graph)
    if nodes and placements:
        set_region(nodes, record.placements_region())
    elif placements:
        record.keep_aside(record.placements_region())
    if decisions:
        _set_places(graph, record)
    if placements:
        trace("slime_fused_backward", graph)


def _set_places(graph: Graph, record: Record) -> None:
    """Each gradient with a decision at run time counts its calls under a name known to the report."""
    targets = (ops.row_grad_over, ops.row_loop_over)
    deciding = [number for number, p in enumerate(record.placements) if p.owner]
    nodes = [node for node in graph.nodes if node.target in targets]
    for number, node in zip(deciding, nodes, strict=True):
        node.kwargs = {**node.kwargs, "place": record.place_of(number)}


_STATISTICS = (ops.row_stats, ops.linear_row_stats)


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


def donated_inputs() -> tuple[int, ...]:
    """Positions of the placeholders referenced by this backward graph alone."""
    metadata = _metadata()
    return tuple((metadata.bw_donated_idxs if metadata is not None else None) or ())


def recorded(options: Options) -> bool:
    """Whether inductor records CUDA graphs of the code compiled now."""
    return options.inner == "inductor" and bool(inductor_config.triton.cudagraphs)


def keep_saved(options: Options, record: Record, graph: Graph | None = None) -> None:
    """Takes back torch's donations to the backward graph being compiled: see NOTE [No donated inputs].

    Args:
        graph: given if the compiler may overwrite donated inputs, as told by operators in the graph.
    """
    metadata = _metadata()
    if metadata is None or record.grad_in_forward or recorded(options):
        return
    if graph is not None:
        run("saved", graph, _config(options, record, donated=donated_inputs()), options, record)
    metadata.bw_donated_idxs = []


def _metadata() -> Any:
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None
