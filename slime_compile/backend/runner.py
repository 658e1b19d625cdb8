"""The runner of `fx_passes.pipeline`: it guards, lints, traces and times the passes, and adds up their outcomes.

Entry points: `run`, one stage over a graph; `tell_nothing_fused`; `may_stay_unfused` and `leave_unfused`, for graphs
that the rest of torch cannot compile. A failed pass is logged once and left out: its stage begins anew with the
original graph. With strict=True its exception is raised.
"""

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping

from torch.fx import Graph, GraphModule, Node

from fx_passes import pipeline
from fx_passes.outcome import CannotExchange, Outcome
from fx_passes.pipeline import Config, Stage
from slime_compile.backend.options import Options
from slime_compile.report.places import shortened
from slime_compile.report.record import Record
from slime_compile.torch_private import trace_structured

log = logging.getLogger(__name__)


def run(
    stage: Stage,
    target: GraphModule | Graph,
    config: Config,
    options: Options,
    record: Record,
    finish: Callable[[Graph, Outcome], None] = lambda graph, outcome: None,
    see: Callable[[str, Graph], None] = lambda name, graph: None,
) -> Outcome:
    """Runs a stage's passes over a graph, `see` before each pass of a graph's stage, and `finish` on the result.

    If a pass raises, the graph is restored, and all others run once more.

    Args:
        target: the module in the stage "dynamo", whose nested graphs are restored, too.
    """
    passes = [p for p in pipeline.PASSES if p.stage == stage and p.name not in config.without]
    before = (
        {} if options.strict or _NEEDED.issuperset(p.name for p in passes) else _graphs_of(target)
    )
    failed: set[str] = set()
    while True:
        spent: dict[str, float] = {}
        running, outcome = _REPORT, Outcome()
        try:
            for each in passes:
                silent = each.name in failed or (record.abandoned and not each.needed)
                if not silent and each.applies(config, outcome):
                    running = each.name
                    if isinstance(target, Graph):
                        see(running, target)
                    began = time.perf_counter()
                    outcome = outcome.then(_linted(each, target, config))
                    spent[each.name] = time.perf_counter() - began
            running = _REPORT
            if not record.abandoned:
                finish(target if isinstance(target, Graph) else target.graph, outcome)
        except Exception as error:
            if isinstance(error, CannotExchange) or running in _NEEDED or not before:
                raise
            if running == _REPORT:  # the graph stays as rewritten, as on other ranks
                tell_failure(record, running, error)
                return outcome
            tell_failure(record, f"the pass {running}", error)
            target = _restored(before, target)
            failed.add(running)
        else:
            _trace_times(stage, spent)
            return outcome


_REPORT = "the report"
_NEEDED = {each.name for each in pipeline.PASSES if each.needed}


def _linted(each: pipeline.Pass, target: GraphModule | Graph, config: Config) -> Outcome:
    outcome = each.run(target, config)
    modules = [] if isinstance(target, Graph) else pipeline.modules_of(target)
    for graph in [target] if isinstance(target, Graph) else [module.graph for module in modules]:
        graph.lint()
    return outcome


def tell_failure(record: Record, what: str, error: Exception) -> None:
    cause = f"{type(error).__name__}: {error}"
    record.fail(f"{what} failed: {cause}")
    _log_failure(what, cause, "the graph compiles without it")


def _graphs_of(target: GraphModule | Graph) -> dict[GraphModule, Graph]:
    """Copies of all graphs the passes may edit; of none if no module has the graph."""
    if isinstance(target, Graph):
        module = target.owning_module
        return {} if module is None else {module: copied(target)}
    return {module: copied(module.graph) for module in pipeline.modules_of(target)}


def _restored(before: dict[GraphModule, Graph], target: GraphModule | Graph) -> GraphModule | Graph:
    """The next input of the passes: the modules have their original graphs."""
    for module, graph in before.items():
        module.graph = graph
        before[module] = copied(graph)
    return next(iter(before)).graph if isinstance(target, Graph) else target


def tell_nothing_fused(record: Record) -> None:
    """Logs, once for each function, that a graph with a vocabulary is unchanged, and the first reason.

    Exception: if all rows fit into one chunk there is nothing to save; the report has a note.
    """
    graph = record.result()
    unfused = graph.has_vocabulary and not (graph.operators or graph.failed or record.one_chunk)
    if unfused and graph.rejections and record.name not in _unfused:
        _unfused.add(record.name)
        first = graph.rejections[0]
        log.warning(
            "nothing is fused in %s: %s (%s). print(slime_compile.summary()) has all reasons",
            shortened(record.name),
            shortened(first.reason),
            shortened(first.source) or first.node,
        )


_unfused: set[str] = set()


@functools.cache
def _log_failure(what: str, cause: str, then: str) -> None:
    """Logs each cause once."""
    log.warning("%s failed, %s (strict=True raises): %s", what, then, cause, exc_info=True)


# NOTE [Collectives and a second try]
# If one rank alone compiled a graph unfused, it would wait for all-reduces that the others do not send. A pass fails
# on all ranks or on none, since it depends on the graph alone; the inner compiler may fail on one. So a graph with
# collectives is not tried again.


def may_stay_unfused(options: Options, record: Record) -> bool:
    """Whether a rewritten graph that could not be compiled is compiled again unchanged."""
    return not options.strict and record.operators > 0 and not record.exchanges


def leave_unfused(options: Options, record: Record, error: Exception) -> None:
    """From now on the passes do nothing, and the report has the error of `options.inner`."""
    reason, *_ = str(error).splitlines() or [""]
    cause = f"{type(error).__name__}: {reason}"
    record.abandon(f"{options.inner} failed on the fused graph: {cause}")
    _log_failure(f"{options.inner}, on the fused graph,", cause, "the graph compiles unchanged")


def copied(graph: Graph) -> Graph:
    """Torch's copy, with Dynamo's attributes of nodes outside of their `meta`: the origin of a symbolic size."""
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


def _trace_times(stage: Stage, spent: Mapping[str, float]) -> None:
    """How long each pass took, as an artifact for tlparse."""
    times = {name: f"{1e3 * seconds:.1f} ms" for name, seconds in spent.items()}
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "slime_fused_passes", "encoding": "json"},
        payload_fn=lambda: json.dumps({"stage": stage, "passes": times}),
    )


def trace(name: str, graph: Graph) -> None:
    """The graph as an artifact for tlparse; nothing is printed without TORCH_TRACE."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: graph.python_code("self", verbose=True).src,
    )
