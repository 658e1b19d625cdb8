"""`linear`, the pass after `fuse`: a matmul and fused operators over its result run in chunks, without full logits.

    linear       looks at every matmul whose result has statistics, rewrites or says why not
    head         the matmul: hidden, weight, bias
    readers      who reads the logits, through which moves of rows
    gradients    where the gradient of the logits goes
    softcap      logits that tanh bounds
    pieces       programs that cut the rows themselves
    rewrite      the new operators in the place of the old nodes
    in_forward   whether the gradient can be taken in forward; `degrees`, of what it must be a multiple, and `samples`,
                 rows that a loop takes apart and puts together
    chunks       how large a chunk is

A graph with none of it stays as it was, and so does a head with a reader that needs the logits, with that reader's
line. Decisions depend on the graph and the configuration alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from fx_passes.graph.aliases import changed_inputs
from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import byte_count, shape_of
from fx_passes.graph.order import descendants, tidy
from fx_passes.graph.user_lines import source_of
from fx_passes.linear.chunks import SHARE, Sizes
from fx_passes.linear.gradients import Products, products_of
from fx_passes.linear.head import Head, head_of, is_head, made_of
from fx_passes.linear.pieces import pieces_of, sizes_of
from fx_passes.linear.readers import (
    Readers,
    has_statistics,
    origin_of,
    readers_of,
    rows_of,
)
from fx_passes.linear.rewrite import Rewrite
from fx_passes.outcome import Outcome, Rejection
from fx_passes.refused import Refused
from fx_passes.torch_private import detect_fake_mode
from fx_passes.verify import mismatch, trial_of

__all__ = ["Chunked", "LinearOutcome", "linear"]

fused = torch.ops.slime_fused

InForward = Literal["auto", "always", "never"]


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Logits that are never whole.

    Attributes:
        source: the user's line of the matmul.
        shape: of all logits, symbolic sizes as text.
        dtype: of the logits.
        forward, backward: [rows, columns] of a chunk for the sizes that the graph was traced with; backward is None
            where no gradient is made.
        waits: why the gradient waits for backward; nothing where it is taken in forward, or not made.
        softcap: what bounds them, if anything does.
        piece: the program cuts the rows itself; this is one chunk of them.
        saved_bytes: of logits that backward would have read.
        nodes: targets and lines of the user's nodes that are gone.
    """

    source: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    forward: tuple[int, int]
    backward: tuple[int, int] | None
    waits: str
    softcap: float | None
    piece: bool
    saved_bytes: int
    nodes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        shape = f"[{', '.join(map(str, self.shape))}]"
        where = f" at {self.source}" if self.source else ""
        capped = "" if self.softcap is None else f", with a softcap of {self.softcap:g},"
        if self.piece:
            return f"the logits {shape}{where}{capped} are a piece of all rows: recomputed in backward, not saved"
        said = f"the logits {shape}{where}{capped} are never materialised in full: chunks of {_by(self.forward)}"
        if self.backward is None:
            return said
        if not self.waits:
            return f"{said}, with the gradient computed in forward"
        again = f" and {_by(self.backward)} in backward" if self.backward != self.forward else ""
        return f"{said}{again}; the gradient is computed in backward: {self.waits}"


@dataclasses.dataclass(frozen=True)
class LinearOutcome:
    """What `linear` did; with `chunked == ()` the graph is exactly as it was."""

    chunked: tuple[Chunked, ...] = ()
    rejections: tuple[Rejection, ...] = ()

    def outcome(self) -> Outcome:
        """As it is added to that of `fuse` on the same graph: fewer bytes are saved, some refusals have gone."""
        return Outcome(
            rejections=self.rejections,
            saved_bytes_after=-sum(each.saved_bytes for each in self.chunked),
            chunked_heads=len(self.chunked),
            stored=len(self.rejections),
            notes=tuple(dict.fromkeys(map(str, self.chunked))),
            changed=len(self.chunked),
            gone=frozenset(node for each in self.chunked for node in each.nodes),
        )


def _by(chunk: tuple[int, int]) -> str:
    return " x ".join(f"{size:,}" for size in chunk)


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """What the pass is told.

    Attributes:
        chunk_bytes: of a chunk of logits; 0 for a share of all logits (`chunks.py`).
        verify: rewrite a copy first, and the graph only if both compute the same on random data.
        in_forward: take the gradient in forward where the graph shows that it may be; "auto": and where the sum over
            chunks that this needs is no larger than a share of the logits.
    """

    chunk_bytes: int = 0
    verify: bool = False
    in_forward: InForward = "auto"


def linear(graph: Graph, config: LinearConfig) -> LinearOutcome:
    """Replace matmuls and the fused operators over their results by operators over chunks.

    Args:
        graph: a joint or inference graph that `fuse` has rewritten.
        config: how large a chunk is, and when the gradient is taken.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None or not graph.find_nodes(
        op="call_function", target=fused.row_stats.default
    ):
        return LinearOutcome()
    if not config.verify:
        return _linear(graph, config, fake_mode)
    trial = trial_of(graph)
    outcome = _linear(trial, config, fake_mode)
    if not outcome.chunked:
        return outcome
    narrow = min((each.dtype for each in outcome.chunked), key=lambda dtype: dtype.itemsize)
    reason = mismatch(graph, trial, graph.owning_module or torch.nn.Module(), narrow)
    if reason is None:
        return _linear(graph, config, fake_mode)
    return LinearOutcome(rejections=(Rejection(f"verify=True: {reason}"),))


def _linear(graph: Graph, config: LinearConfig, fake_mode: Any) -> LinearOutcome:
    chunked: list[Chunked] = []
    products = [n for n in graph.nodes if is_head(n)]
    rejections = _made_otherwise(graph, products, config.chunk_bytes)
    heads = [n for n in products if has_statistics(n)]
    pieces = pieces_of(heads, config.chunk_bytes)
    rejections += pieces.left
    changed = changed_inputs(graph) if heads else set()
    for node in heads:
        emit = Emitter(graph, fake_mode)
        with graph.inserting_before(graph.output_node()):
            try:
                told = _rewritten(node, emit, config, node in pieces.kept, changed)
            except Refused as refused:
                emit.discard()
                rejections.append(Rejection.at(refused.reason, node))
                continue
        if told is not None:
            chunked.append(told)
            tidy(graph)
    graph.lint()
    return LinearOutcome(tuple(chunked), tuple(rejections))


def _rewritten(
    node: Node, emit: Emitter, config: LinearConfig, piece: bool, changed: set[Node]
) -> Chunked | None:
    """The rewrite of one matmul, done; None where its logits are no more than a chunk, and no `piece` of more.

    Args:
        changed: values that share memory with inputs that the function changes.

    Raises:
        Refused: before anything is edited.
    """
    sizes = sizes_of(node, config.chunk_bytes)
    if sizes.whole and not piece:
        return None
    softcap = made_of(node)[1]
    readers = readers_of(node, capped=softcap is not None)
    tainted = descendants(readers.sizes)
    for each in node.graph.nodes:
        if each not in tainted:
            emit.adopt(each)
    head = head_of(node, emit)
    _check_unchanged(head, changed)
    products = {grad: _products(grad, head, readers.derivative, emit) for grad in readers.grads}
    rewrite = Rewrite(emit, head, config.chunk_bytes)
    waits = _emit(rewrite, readers, products, sizes, config, piece)
    rewrite.sizes(readers.sizes)
    told = _told(head, [*readers.derivative], products, sizes, waits, piece)
    rewrite.commit()
    return told


def _emit(
    rewrite: Rewrite,
    readers: Readers,
    products: dict[Node, Products],
    sizes: Sizes,
    config: LinearConfig,
    piece: bool,
) -> str:
    """Makes the new nodes; why the gradient waits for backward, or nothing if none does."""
    if not products:
        rewrite.forward(readers)
        return ""
    try:
        if piece:
            raise Refused("each piece would keep a gradient of the weight")
        grad, found = _single(products)
        rewrite.both(readers, grad, found)
        _check_pays(rewrite.head, found, sizes, config)
    except Refused as reason:
        rewrite.restart()
        rewrite.forward(readers)
        for grad, found in products.items():
            rewrite.backward(grad, found)
        return str(reason)
    return ""


def _single(products: dict[Node, Products]) -> tuple[Node, Products]:
    if len(products) != 1:
        raise Refused("the function computes several gradients of these logits")
    return next(iter(products.items()))


def _check_pays(head: Head, products: Products, sizes: Sizes, config: LinearConfig) -> None:
    """Chunks of rows need a sum for the weight, which half precision keeps in float32 beside the gradient."""
    if config.in_forward == "never":
        raise Refused("option grad_in_forward is never")
    if head.dtype == torch.float16:
        raise Refused("float16 has no room for a gradient before the loss is scaled")
    if "recompute" in head.root.meta:
        raise Refused("a checkpoint recomputes it in backward")
    total = byte_count(head.weight.base) * 2 if sizes.itemsize == 2 and products.wanted[1] else 0
    if config.in_forward == "auto" and total > sizes.bytes // SHARE:
        mib = total / 2**20
        raise Refused(f"its sum would take {mib:,.0f} MiB, more than a chunk may")


def _check_unchanged(head: Head, changed: set[Node]) -> None:
    """Backward makes the logits again, after what forward has written over inputs; so may forward, which is moved."""
    if changed.intersection((head.hidden.base, head.weight.base, head.bias)):
        reason = "the function changes an input of the logits in place, and they may be read after the change"
        raise Refused(reason, head.root)


def _products(grad: Node, head: Head, derivative: set[Node], emit: Emitter) -> Products:
    if origin_of(grad.args[0]) is not head.root:  # type: ignore[arg-type]
        raise Refused("the gradient of some rows of the logits is computed separately", grad)
    return products_of(grad, head, derivative, emit)


def _made_otherwise(graph: Graph, products: list[Node], chunk_bytes: int) -> list[Rejection]:
    """Logits that the graph makes from a matmul's result, by something that no chunk can do alone."""
    made = descendants(products).difference(products)
    found: dict[Node, Rejection] = {}
    for node in graph.find_nodes(op="call_function", target=fused.row_stats.default):
        origin = rows_of(node.args[0])
        if origin not in made or sizes_of(origin, chunk_bytes).whole:
            continue
        reason = f"the logits come from {origin.target}, not from a matmul, so they are materialised in full"
        found[origin] = Rejection.at(reason, origin)
    return list(found.values())


def _told(
    head: Head,
    derivative: list[Node],
    products: dict[Node, Products],
    sizes: Sizes,
    waits: str,
    piece: bool,
) -> Chunked:
    backward, node = None, head.root
    gone = [node, head.made, *derivative]
    if products:
        found = next(iter(products.values()))
        columns = bool(waits) and sizes.by_columns(found.wanted)
        backward = (sizes.rows, sizes.column_chunk) if columns else (sizes.row_chunk, sizes.vocab)
        gone += [each for every in products.values() for each in every.nodes]
        if head.softcap is not None:
            gone += [user for grad in products for user in grad.users]
    shape = tuple(s if isinstance(s, int) else str(s) for s in shape_of(node))
    return Chunked(
        source_of(node),
        shape,
        head.dtype,
        (sizes.row_chunk, sizes.vocab),
        backward,
        waits,
        head.softcap.value if head.softcap is not None else None,
        piece,
        byte_count(node) if products else 0,
        tuple((str(each.target), source_of(each)) for each in gone),
    )
