"""A walk as report entries: fused values, refusals with reasons, and the bytes saved for backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fx_passes.graph.backward import is_of_changed_input
from fx_passes.graph.facts import byte_count, is_backward, is_float_tensor, is_wide, shape_of, value
from fx_passes.graph.operators import MATMULS, VIEWS, under
from fx_passes.graph.user_lines import source_of
from fx_passes.outcome import FuseConfig, Fused, Outcome, Rejection
from fx_passes.walk.gradient import what_comes_in
from fx_passes.walk.verdict import Verdict, looks_wide, used_by_user
from fx_passes.walk.walk import Walk

aten = torch.ops.aten

_SUMMED = {aten.sum.dim_IntList, aten.sum.default}


def describe(walk: Walk, live: set[Node]) -> Iterator[Fused]:
    """The fused values among the nodes computed in the end."""
    account = walk.account
    for node, (label, _) in account.row_values.items():
        if used_by_user(walk, node, live):
            yield _fused(label, node, account.replacements[node])
    for node in walk.context.statistics.operators:
        if node in live:
            yield _fused("statistics", node, node)
    for node in account.gradients:
        if node in live:
            yield _fused(_kind(node), node, node)
    for node, leaving in account.leaving.items():
        if node in live and not leaving.operators:
            yield _fused(f"{_kind(node)}, as arithmetic", node, node)


def _kind(node: Node) -> str:
    return "gradient" if is_backward(node) else "softmax"


def _fused(kind: str, origin: Node, node: Node) -> Fused:
    fake = value(node)
    tensor = fake[0] if isinstance(fake, (tuple, list)) else fake
    shape = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    return Fused(kind, source_of(origin), shape, tensor.dtype)


def gradients_that_come_in(walk: Walk) -> Iterator[str]:
    """Logits read by the caller's own code get a gradient from there, as large as they are."""
    for leaving in walk.account.leaving.values():
        tangents = what_comes_in(leaving.form)
        if any(is_of_changed_input(each) for each in tangents):
            yield (
                "the function changes these logits in place and the caller may use them later, so backward may get "
                "a gradient of their size; compute new ones (`logits / t`, not `logits.div_(t)`) to avoid it"
            )
        elif tangents:
            yield (
                "the logits are an output of the compiled function, so backward may get a gradient of "
                "their size; return them detached, or not at all, to avoid it"
            )


def rejections_of(walk: Walk, verdict: Verdict) -> dict[Node, Rejection]:
    """The first refusal at each node with a softmax root among its operands, and the verdict on each refused root."""
    roots = walk.account.softmax_roots
    result: dict[Node, Rejection] = {}
    for refusal in walk.account.refusals:
        if refusal.roots & roots and not _reads_gradient(refusal.node):
            result.setdefault(refusal.node, Rejection.at(refusal.reason, refusal.node))
    for root, reason in verdict.refused.items():
        result.setdefault(root, Rejection.at(reason, root))
    never = walk.context.changes.never
    for user in (u for n in never if roots and looks_wide(n, roots) for u in n.users):
        if user not in never:
            reason = (
                "the function changes these logits in place, and backward would read the new values"
            )
            result.setdefault(user, Rejection.at(reason, user))
    return result


def _reads_gradient(node: Node) -> bool:
    """A matmul of backward reads the gradient of the logits, so the gradient must be in memory."""
    return node.target in MATMULS and is_backward(node)


def without_a_softmax(graph: Graph, config: FuseConfig) -> Outcome:
    """The reason if no rewrite was tried: no softmax over a value as wide as a vocabulary, or no such value."""
    if not any(is_wide(node, config.min_vocab) for node in graph.nodes):
        return Outcome(rejections=_too_small(graph, config))
    wide = f"a last dimension of min_vocab={config.min_vocab} or more"
    note = f"no softmax, log-softmax or logsumexp over {wide}: there is nothing to fuse"
    return Outcome(notes=(note,))


def _too_small(graph: Graph, config: FuseConfig) -> tuple[Rejection, ...]:
    """The first softmax over a last dimension below `min_vocab`. SiLU and sigmoid do not count."""
    exponentials = graph.find_nodes(op="call_function", target=aten.exp.default)
    softmaxes = {source_of(n) for n in exponentials if any(u.target in _SUMMED for u in n.users)}
    for node in exponentials:
        if source_of(node) not in softmaxes:
            continue
        last = shape_of(node)[-1] if len(shape_of(node)) >= 2 else None
        if is_float_tensor(node) and isinstance(last, int) and 1 < last < config.min_vocab:
            reason = f"the last dimension {last} is smaller than min_vocab={config.min_vocab}"
            return (Rejection.at(reason, node),)
    return ()


def saved_bytes(graph: Graph, wide: set[Node]) -> int:
    """Bytes of full-vocabulary values, logits included, given to or computed in forward and read by backward."""
    vocabularies = {str(shape_of(node)[-1]) for node in wide if shape_of(node)}
    kept: dict[Node, int] = {}
    for node in filter(is_backward, graph.nodes):
        for memory in (under(each, VIEWS) for each in node.all_input_nodes):
            if is_backward(memory):
                continue
            if memory in wide or _is_large(memory, vocabularies):
                kept[memory] = byte_count(memory)
    return sum(kept.values())


def _is_large(node: Node, vocabularies: set[str]) -> bool:
    shape = shape_of(node) if is_float_tensor(node) else ()
    return len(shape) >= 2 and str(shape[-1]) in vocabularies
