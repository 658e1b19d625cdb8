"""The passes in their order, as data: `PASSES`.

Entry points: `PASSES`, read by the backend's runner, `doctor` and the documents; `Config`, the input of a pass. A
pass is `(graph, config) -> Outcome`: it edits the graph or leaves it exactly as it was. In the stage "dynamo" it gets
the module, since Dynamo's graphs have graphs nested in them; in all others, the graph. A new pass is one line of
`PASSES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.fx import Graph, GraphModule, Node

from fx_passes.collective_gradients import keep_eager_gradients
from fx_passes.equal_heads import share_heads
from fx_passes.function_outputs import drop_unread_outputs
from fx_passes.fuse import fuse
from fx_passes.graph.formulas import Formulas
from fx_passes.graph.recompute import keep_given
from fx_passes.graph.user_lines import source_of
from fx_passes.inlined import inline, is_small
from fx_passes.inplace import Consume, inplace, mark_inputs
from fx_passes.one_matrix import multiply_once
from fx_passes.outcome import FuseConfig, Outcome
from fx_passes.picked_rows import sum_first
from fx_passes.returned_logits import detach_returned
from fx_passes.rows import RowsConfig, by_rows
from fx_passes.rows.apart import compute_apart
from fx_passes.rows.fewer import takes_of_heads, work_on_parts
from fx_passes.verify import trial_of
from fx_passes.whole_logits import use_whole_logits
from fx_passes.writable import give_writable

Stage = Literal["dynamo", "joint", "joint end", "saved", "forward", "backward"]

STAGES: dict[Stage, str] = {
    "dynamo": "Dynamo's graph, before AOTAutograd",
    "joint": "joint or inference graph, before partitioning",
    "joint end": "the same, after inductor's own passes",
    "forward": "forward or inference graph, after partitioning",
    "saved": "backward graph, before inductor compiles it",
    "backward": "backward graph, after inductor's own passes",
}


@dataclasses.dataclass(frozen=True)
class Inline:
    """Fused operators of fewer than `fewer_than` elements become `formulas`, see `inlined.inline`."""

    formulas: Formulas
    fewer_than: int


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of the passes: from the user, and from the graph at hand.

    Attributes:
        by_rows: whether row-by-row work runs over chunks of rows.
        lm_head: whether a head's matmul runs in the loop reading its logits.
        small: the operators compiled as formulas; None if there are none.
        inlines: whether the formulas are inserted here; in a dry run the operators stand for them.
        held: inputs that must not be overwritten, by position, and the reason.
        donated: positions of the placeholders referenced by the graph alone.
        recorded: the graph is recorded and replayed without calling its operators (CUDA graphs).
        without: names of passes switched off.
    """

    fuse: FuseConfig
    rows: RowsConfig = dataclasses.field(default_factory=lambda: RowsConfig(1024))
    lm_head: bool = True
    by_rows: bool = True
    consume_logits: Consume = "auto"
    small: Inline | None = None
    inlines: bool = True
    held: Mapping[int, str] = dataclasses.field(default_factory=dict)
    donated: tuple[int, ...] = ()
    recorded: bool = False
    without: frozenset[str] = frozenset()

    @property
    def min_vocab(self) -> int:
        return self.fuse.min_vocab


def _always(config: Config, before: Outcome) -> bool:
    return True


def _heads(config: Config, before: Outcome) -> bool:
    return config.lm_head


def _rows(config: Config, before: Outcome) -> bool:
    return config.by_rows


def _inlines(config: Config, before: Outcome) -> bool:
    return config.small is not None and config.inlines


def _consumes(config: Config, before: Outcome) -> bool:
    return config.consume_logits is not False


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: by which it is switched off.
        does: for the documents.
        run: of a `GraphModule` in the stage "dynamo", of a `Graph` in the others.
        applies: whether it runs, by the configuration and what the passes before it in its stage have done.
        needed: without it torch fails, or gradients are not those of eager code. Its exception is raised.
    """

    name: str
    stage: Stage
    does: str
    run: Callable[[Any, Config], Outcome]
    applies: Callable[[Config, Outcome], bool] = _always
    needed: bool = False


_MOST_TAKEN = 7 / 8
"""Of a matmul's rows: if more are read, a copy of hidden costs more memory than unread rows. Exception: other values of
full width stay.
"""


def _counted(count: int) -> Outcome:
    return Outcome(changed=count)


def modules_of(gm: GraphModule) -> list[GraphModule]:
    return [module for module in gm.modules() if isinstance(module, GraphModule)]


def _keep_eager_gradients(gm: GraphModule, config: Config) -> Outcome:
    places = [source_of(node) or node.name for node in keep_eager_gradients(gm)]
    note = "the collective in place at {} has the gradient of eager code: none of its own"
    return Outcome(changed=len(places), notes=tuple(map(note.format, places)))


def _detach_returned(gm: GraphModule, config: Config) -> Outcome:
    returned = detach_returned(gm, config.min_vocab)
    return Outcome(changed=len(returned.ways), returned=returned)


def _work_on_parts(graph: Graph, config: Config) -> Outcome:
    outcome = _counted(compute_apart(graph, config.min_vocab))
    for share in (_MOST_TAKEN, 1.0):
        if not takes_of_heads(graph, config.min_vocab):
            break
        if share == 1 and not fuse(trial_of(graph), config.fuse).wide_after:
            break
        # the graph stays as it was if no matmul can compute fewer rows
        if _work_on_rows_taken(trial_of(graph), config, share).notes:
            outcome = outcome.then(_work_on_rows_taken(graph, config, share))
    return outcome.then(_counted(compute_apart(graph, config.min_vocab)))  # of rows that are left


def _work_on_rows_taken(graph: Graph, config: Config, share: float) -> Outcome:
    moved, notes = work_on_parts(graph, config.min_vocab, of_heads=True, share=share)
    return Outcome(changed=moved, notes=notes)


def _fuse(graph: Graph, config: Config) -> Outcome:
    outcome = fuse(graph, config.fuse)
    return dataclasses.replace(outcome, changed=len(outcome.fused))


def _by_rows(graph: Graph, config: Config) -> Outcome:
    made = by_rows(graph, config.rows)
    return Outcome(changed=len(made.loops), early=made.early, added_to=made.added_to)


def _mark_inputs(graph: Graph, config: Config) -> Outcome:
    mark_inputs(graph, dict(config.held))
    return Outcome()


def _keep_given(graph: Graph, config: Config) -> Outcome:
    keep_given(graph)
    return Outcome()


def _inline(graph: Graph, config: Config) -> Outcome:
    assert config.small is not None
    nodes = small_nodes(graph, config.small)
    if nodes:
        inline(graph, nodes, config.small.formulas)
    return _counted(len(nodes))


def small_nodes(graph: Graph, small: Inline) -> list[Node]:
    """Fused operators compiled as formulas."""
    nodes = (node for node in graph.nodes if node.target in small.formulas.of)
    return [node for node in nodes if is_small(node, small.fewer_than)]


def _inplace(graph: Graph, config: Config) -> Outcome:
    donated = set(_placeholders(graph, config.donated))
    beside = small_nodes(graph, config.small) if config.small else ()
    decisions = inplace(graph, donated, config.consume_logits, config.recorded, beside)
    return Outcome(changed=len(decisions), decisions=tuple(decisions))


def _give_writable(graph: Graph, config: Config) -> Outcome:
    return _counted(give_writable(graph, set(_placeholders(graph, config.donated))))


def _placeholders(graph: Graph, places: tuple[int, ...]) -> list[Node]:
    placeholders = graph.find_nodes(op="placeholder")
    return [placeholders[place] for place in places]


# fmt: off
PASSES: tuple[Pass, ...] = (
    Pass("function_outputs", "dynamo", "unread outputs of autograd.Functions are dropped (torch 2.11)",
         lambda gm, c: _counted(drop_unread_outputs(gm)), needed=True),
    Pass("collective_gradients", "dynamo", "in-place collectives keep the gradient of eager code",
         _keep_eager_gradients, needed=True),
    Pass("returned_logits", "dynamo", "logits returned next to a loss get their own gradient", _detach_returned),
    Pass("one_matrix", "joint", "a batch of matrices times one matrix is one matmul",
         lambda graph, c: _counted(multiply_once(graph, c.min_vocab)), _heads),
    Pass("equal_heads", "joint", "equal matmuls of heads become one",
         lambda graph, c: _counted(share_heads(graph, c.min_vocab))),
    Pass("parts", "joint", "a head's matmul computes only the rows read by the loss",
         _work_on_parts, _heads),
    Pass("picked_rows", "joint", "rows picked and then summed are summed first",
         lambda graph, c: _counted(sum_first(graph, c.min_vocab))),
    Pass("fuse", "joint", "softmax statistics and gradients become fused operators; collectives are merged", _fuse),
    Pass("rows", "joint", "row-by-row work, heads included, runs over chunks of rows", _by_rows, _rows),
    Pass("whole_logits", "joint", "gradients of reshaped logits get the shape of the input",
         lambda graph, c: _counted(use_whole_logits(graph)), _consumes),
    Pass("mark_inputs", "joint", "inputs backward must not overwrite are marked", _mark_inputs),
    Pass("keep_given", "joint end", "inputs of the graph are not recomputed", _keep_given, needed=True),
    Pass("inlined", "forward", "operators on few elements become formulas for inductor", _inline, _inlines),
    Pass("writable", "saved", "large saved values become memory inductor may reuse", _give_writable),
    Pass("inlined", "backward", "the same", _inline, _inlines),
    Pass("inplace", "backward", "gradients overwrite the logits", _inplace),
)
# fmt: on

NAMES = tuple(dict.fromkeys(each.name for each in PASSES))


def listed() -> str:
    """The passes by stages, as text."""
    width = max(map(len, NAMES)) + 2
    lines = []
    for stage, graph in STAGES.items():
        lines.append(f"{graph}:")
        lines += [f"    {p.name:{width}}{p.does}" for p in PASSES if p.stage == stage]
    return "\n".join(lines)
