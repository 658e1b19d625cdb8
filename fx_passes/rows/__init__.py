"""`by_rows`, after `fuse` and `linear`: other row-by-row work runs over one chunk of rows at a time.

    by_rows    looks for regions, decides whether loops pay, and puts one operator in the place of each loop
    region     the part of a graph that works row by row (`graph/rows.py` says what each operator does to rows)
    loops      which loops it becomes, and what each of them makes
    program    a loop as text, which the operator is given

No rule about what is computed is needed for its memory: of a divergence, a sort or a square of a softmax a loop holds a
chunk at a time. What it hands out are numbers per row, sums over rows, and what the program itself wants whole: the
gradient of given logits. Longer than other files: the plan and the edits that follow from it stand together.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from fx_passes.graph.changes import changes_of
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import (
    BACKWARD,
    TAG,
    hint,
    is_backward,
    is_float_tensor,
    is_wide,
    rank_of,
    shape_of,
    value,
)
from fx_passes.graph.operators import MATMULS, SHOWN
from fx_passes.graph.order import ancestors, descendants, tidy
from fx_passes.graph.returned import Returned
from fx_passes.graph.rows import in_front, normal
from fx_passes.graph.user_lines import source_of
from fx_passes.linear import InForward
from fx_passes.linear.chunks import SHARE, Sizes
from fx_passes.linear.degrees import Units
from fx_passes.outcome import Outcome, Rejection
from fx_passes.refused import Refused
from fx_passes.rows.early import kept_bytes, tangent_of
from fx_passes.rows.fewer import work_on_parts
from fx_passes.rows.loops import Loop, loops_of
from fx_passes.rows.parts import Part, put
from fx_passes.rows.program import Program
from fx_passes.rows.region import Region, in_place_of, regions_of
from fx_passes.torch_private import FakeTensorMode, detect_fake_mode
from fx_passes.verify import mismatch, trial_of

__all__ = ["Looped", "RowsConfig", "RowsOutcome", "by_rows"]

aten = torch.ops.aten
fused = torch.ops.slime_fused

_SHARE_GIVEN, _MIN_GIVEN = 32, 2 << 20
"""Of a loop without a matmul: a chunk's share, and its least bytes. Nothing is read again for each chunk."""


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """What the pass is told.

    Attributes:
        min_vocab: smallest last dimension that is taken for a vocabulary.
        chunk_bytes: of the widest value of a chunk; 0 for a share of it (`linear/chunks.py`).
        in_forward: make the gradients of a scalar loss in forward where that saves a matmul as large as the logits.
        verify: rewrite a copy first, and the graph only if both compute the same on random data.
        compiled: inductor compiles the body of a loop; else its operators run one after the other.
    """

    min_vocab: int
    chunk_bytes: int = 0
    in_forward: InForward = "auto"
    verify: bool = False
    compiled: bool = True


@dataclasses.dataclass(frozen=True)
class Looped:
    """One loop over chunks of rows.

    Attributes:
        source: the user's line of the first wide value.
        chunks: their number for the sizes that the graph was traced with.
        values: wide values of which there is a chunk at a time.
        backward: the loop runs in backward.
        waits: why forward does not make what this loop makes in backward, or nothing.
        early: it makes gradients in forward, which are kept until backward.
        nodes: targets and lines of the user's nodes that the loop computes.
        whole: results of a loop of forward that are as large as all chunks.
    """

    source: str
    chunks: int
    values: int
    backward: bool
    waits: str
    early: bool
    nodes: tuple[tuple[str, str], ...]
    whole: int

    def __str__(self) -> str:
        where = f" from {self.source}" if self.source else ""
        when = "backward" if self.backward else "forward"
        return (
            f"{when} runs in {self.chunks} chunks of rows{where}: "
            f"of {self.values} full-vocabulary values one chunk exists at a time"
            f"{f'; the gradient is computed in backward: {self.waits}' if self.waits else ''}"
        )


@dataclasses.dataclass(frozen=True)
class RowsOutcome:
    """What `by_rows` did; with `loops == ()` no loop was made, and arithmetic may work on fewer rows.

    Attributes:
        left: full-vocabulary values that the graph still computes as a whole, results of loops not counted.
        one_chunk: a loop would have one chunk only, so none was made.
    """

    loops: tuple[Looped, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    left: int = 0
    one_chunk: bool = False

    def added_to(self, outcome: Outcome) -> Outcome:
        """`outcome` of the passes before, with this one's."""
        gone = {node for each in self.loops for node in each.nodes}
        kept = tuple(r for r in outcome.rejections if (r.node, r.source) not in gone)
        if self.loops:
            before = max(outcome.wide_before, self.left + sum(each.values for each in self.loops))
            after = min(outcome.wide_after, self.left) if outcome.wide_before else self.left
            outcome = dataclasses.replace(outcome, wide_before=before, wide_after=after)
        one_chunk = self.one_chunk and bool(kept)
        said = [*(str(each) for each in self.loops), *([_ONE_CHUNK] if one_chunk else [])]
        return dataclasses.replace(
            outcome,
            rejections=(*kept, *self.rejections),
            stored=min(outcome.stored, len(kept) + sum(each.whole for each in self.loops)),
            notes=(*outcome.notes, *dict.fromkeys(said)),
            one_chunk=one_chunk,
        )


_ONE_CHUNK = "all rows fit into one chunk (option chunk_mib): no loop is needed at this size"


def by_rows(graph: Graph, config: RowsConfig) -> RowsOutcome:
    """Replace what works row by row on values as wide as a vocabulary by loops over chunks of rows.

    Args:
        graph: a joint or inference graph, decomposed, after `fuse` and `linear`.
        config: what counts as a vocabulary, and how large a chunk is.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None:
        return RowsOutcome()
    if not config.verify:
        return _by_rows(graph, config, fake_mode)
    trial = trial_of(graph)
    outcome = _by_rows(trial, config, fake_mode)
    if not outcome.loops:
        return outcome
    narrow = min(_dtypes(graph), key=lambda dtype: dtype.itemsize)
    reason = mismatch(graph, trial, graph.owning_module or torch.nn.Module(), narrow)
    if reason is None:
        return _by_rows(graph, config, fake_mode)
    return RowsOutcome(rejections=(Rejection(f"verify=True: {reason}"),))


def _dtypes(graph: Graph) -> list[torch.dtype]:
    """Of the floating values."""
    return [value(node).dtype for node in graph.nodes if is_float_tensor(node)]


def _by_rows(graph: Graph, config: RowsConfig, fake_mode: FakeTensorMode) -> RowsOutcome:
    looped: list[Looped] = []
    rejections: list[Rejection] = []
    one_chunk = False
    work_on_parts(graph, config.min_vocab)
    for forward in (False, True):
        for region in regions_of(graph, config.min_vocab):
            emit = Emitter(graph, fake_mode)
            try:
                made = _rewritten(graph, region, emit, config, forward and bool(looped))
                one_chunk |= made is None
                looped += made or []
            except Refused as refused:
                emit.discard()
                rejections.append(
                    Rejection.at(refused.reason, refused.node or next(iter(region.steps)))
                )
    left = sum(_is_left(node, config.min_vocab) for node in graph.nodes) if looped else 0
    return RowsOutcome(tuple(looped), tuple(rejections), left, one_chunk)


def _is_left(node: Node, min_vocab: int) -> bool:
    """A full-vocabulary value that is computed as a whole."""
    computed = node.op == "call_function" and node.target not in SHOWN | {operator.getitem}
    return computed and is_wide(node, min_vocab)


def _rewritten(
    graph: Graph, region: Region, emit: Emitter, config: RowsConfig, beside: bool
) -> list[Looped] | None:
    """Puts loops in the place of `region`, `beside` others or alone; None if all rows fit into one chunk."""
    plan = _planned(graph, region, config)
    sizes = [_sizes_of(loop, region, config) for loop in plan.loops]
    if not plan.loops or not _pays(plan, region, beside):
        return []
    if all(each.whole for each in sizes):
        return None
    _check_unchanged(graph, plan.loops, region)
    spared = [len(loop.spared(region)) for loop in plan.loops]
    for node in graph.nodes:
        emit.adopt(node)
    returned = Returned(graph)
    with graph.inserting_before(graph.output_node()):
        emission = _Emission(plan, region, emit, config)
    emission.commit()
    tidy(graph)
    returned.keep_apart(emit.fake_mode, region.is_wide)
    graph.lint()
    told = zip(plan.loops, sizes, spared, strict=True)
    return [_told(loop, each, region, plan, values) for loop, each, values in told]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What becomes of a region.

    Attributes:
        tangent: given as 1 to the loops, if they make in forward what backward would.
        puts: of results that the graph puts among other rows: where.
        waits: why forward does not make the gradients.
    """

    loops: list[Loop]
    tangent: Node | None
    puts: dict[Node, Part]
    waits: str = ""


def _planned(graph: Graph, region: Region, config: RowsConfig) -> _Plan:
    loops = loops_of(graph, region)
    late = [loop for loop in loops if loop.backward]
    again = any(region.made_wide(n) and n.target in MATMULS for loop in late for n in loop.body)
    if not late or not again or config.in_forward == "never":
        return _Plan(loops, None, _puts_of(loops, region))
    try:
        tangent = tangent_of(graph, region, late)
        early = loops_of(graph, region, early=True)
        if len(early) >= len(loops):
            raise Refused("it needs sums over all rows of the loss")
        limit = _sizes_of(late[0], region, config).bytes // SHARE
        if config.in_forward == "auto" and kept_bytes(region, late) > limit:
            raise Refused("its sums would be larger than a chunk may")
    except Refused as reason:
        return _Plan(loops, None, _puts_of(loops, region), str(reason))
    return _Plan(early, tangent, _puts_of(early, region))


def _puts_of(loops: Sequence[Loop], region: Region) -> dict[Node, Part]:
    """What is put among other rows, where all of a loop's results that are put have the same row numbers."""
    found: dict[Node, Part] = {}
    for loop in loops:
        wide = [node for node in loop.results if region.is_wide(node) and _is_flat(node, region)]
        parts = {node: part for node in wide if (part := put(node)) is not None}
        if len({part.key for part in parts.values()}) == 1:
            found |= parts
    return found


def _is_flat(node: Node, region: Region) -> bool:
    """[rows..., V]"""
    block = region.blocks.get(node)
    return block is not None and block == normal(in_front(rank_of(node) - 1), shape_of(node))


def _sizes_of(loop: Loop, region: Region, config: RowsConfig) -> Sizes:
    columns, item = region.widest(loop.body)
    whole = Sizes(hint(region.rows), columns, item, config.chunk_bytes)
    if config.chunk_bytes or any(node.target in MATMULS for node in loop.body):
        return whole
    return dataclasses.replace(whole, limit=max(whole.bytes // _SHARE_GIVEN, _MIN_GIVEN))


def _pays(plan: _Plan, region: Region, beside: bool) -> bool:
    """Whether a loop makes something wide beside what it hands out, other than by showing what it is given.

    Logits that a matmul makes are always such. Of given ones not where the graph goes on with what a loop hands out: it
    would be in memory beside what is made of it. A loop itself puts the gradient of a slice among the other rows.
    """
    loops = plan.loops
    spared = [node for loop in loops for node in loop.spared(region)]
    inside = [node for node in spared if node.target not in SHOWN and _is_computed(node)]
    if any(node.target in MATMULS for node in inside):
        return True
    # of given values without a gradient of theirs inductor stores little, but where it is cut off from the gradient's
    handed_out = [n for loop in loops for n in loop.results if region.is_wide(n)]
    whole = [plan.puts[node].every if node in plan.puts else node for node in handed_out]
    goes_on = any(_goes_on(node, region) for node in whole)
    return bool(inside and (handed_out or beside)) and not goes_on


def _is_computed(node: Node) -> bool:
    """From tensors: what is not is a constant, such as the zeros that a gradient is written into."""
    return any(isinstance(value(each), torch.Tensor) for each in node.all_input_nodes)


def _goes_on(node: Node, region: Region) -> bool:
    """Whether an operator outside the region reads `node`, or a view of it."""
    for user in node.users:
        stays = user in region.steps or user in region.sums
        if stays or user.op == "output" or user.target is aten.copy_.default:
            continue
        if user.target not in SHOWN or _goes_on(user, region):
            return True
    return False


def _check_unchanged(graph: Graph, loops: Sequence[Loop], region: Region) -> None:
    """Backward reads again what forward is given, after what forward has written over its inputs."""
    changed = changes_of(graph).in_forward
    if not changed:
        return
    for loop in loops:
        for node in loop.body:
            if loop.backward and not changed.isdisjoint(node.all_input_nodes):
                raise Refused("the function changes in place a value a loop would read again", node)


class _Emission:
    """The new nodes: an operator for each loop, and what stands in the place of its results."""

    def __init__(self, plan: _Plan, region: Region, emit: Emitter, config: RowsConfig) -> None:
        self.plan, self.region, self.emit, self.config = plan, region, emit, config
        self.made: dict[Node, Node] = {}
        self.replacements: dict[Node, Node] = {}
        self.into_forward: list[Node] = []
        self.units: Units | None = None
        if plan.tangent is not None:
            self.units = Units(plan.tangent, descendants([plan.tangent]), emit)
        for loop in plan.loops:
            self._loop(loop)

    def _loop(self, loop: Loop) -> None:
        given = self.units.of if self.units is not None else lambda node: node
        program = Program(loop, self.region, self.emit, self.plan.puts, self.made, given)
        if not program.rows:
            raise Refused("all rows are equal, and made of one", next(iter(loop.body)))
        self.emit.origin = next(iter(loop.results))
        node = self.emit.call(
            fused.row_loop.default,
            [each for each, *_ in program.rows],
            list(program.whole),
            list(program.sizes),
            program.text(),
            self.config.compiled,
            _sizes_of(loop, self.region, self.config).limit,
            "",
        )
        self._tag(node, loop)
        for at, old in enumerate(loop.results):
            self.emit.origin = old
            found = self.emit.call(operator.getitem, node, at)
            self._tag(found, loop)
            self._put(old, found)

    def _put(self, old: Node, found: Node) -> None:
        part = self.plan.puts.get(old)
        if part is not None:  # a later loop reads what the graph has of it
            old, new = part.every, self.emit.reshape(found, self.emit.sizes(part.every))
        else:
            new = in_place_of(old, found, self.region, self.emit)
            self.made[old] = new if old in self.region.sums else found
        units = self.units
        if units is not None and old in units.moving:
            units.known(old, new)
            new = self.emit.call(aten.mul.Tensor, new, units.tangent)
            new.meta[TAG] = BACKWARD
        self.replacements[old] = self.emit.laid_out_as(new, old)

    def _tag(self, node: Node, loop: Loop) -> None:
        if loop.backward:
            node.meta[TAG] = BACKWARD
        else:
            node.meta.pop(TAG, None)
            self.into_forward.append(node)

    def commit(self) -> None:
        """The edits; nothing here can refuse."""
        if self.units is not None:
            for node in ancestors(self.into_forward):
                if is_backward(node):
                    del node.meta[TAG]
        for old, new in self.replacements.items():
            old.replace_all_uses_with(new)


def _told(loop: Loop, sizes: Sizes, region: Region, plan: _Plan, values: int) -> Looped:
    wide = [node for node in loop.body if region.made_wide(node)]
    chunks = -(-sizes.rows // sizes.row_chunk)
    source = next(filter(None, map(source_of, wide)), "")
    nodes = tuple((str(node.target), source_of(node)) for node in loop.body)
    waits = plan.waits if loop.backward else ""
    early = plan.tangent is not None
    whole = 0 if loop.backward else sum(map(region.is_wide, loop.results))
    return Looped(source, chunks, values, loop.backward, waits, early, nodes, whole)
