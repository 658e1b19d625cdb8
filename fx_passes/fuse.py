"""`fuse`: the pass. Walks the joint graph, judges every root, and rewrites the graph or leaves it as it was.

Rules and rewriting are apart: the walk only adds nodes that nothing uses yet, so a refusal takes them away again. All
decisions depend on the graph and the configuration alone, never on time, memory or rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from fx_passes.algebra.forms import Form, Mask
from fx_passes.builder import (
    VIEWS,
    is_backward,
    is_float_tensor,
    same,
    shape_of,
    value,
)
from fx_passes.collectives import is_collective, merge
from fx_passes.graph.user_lines import source_of
from fx_passes.inplace import changed_inputs
from fx_passes.outcome import FuseConfig, Fused, Outcome, Rejection
from fx_passes.rules import RULES
from fx_passes.verify import mismatch
from fx_passes.walk import Walk

aten = torch.ops.aten

MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
MAX_ROUNDS = 8


@dataclass(frozen=True)
class _Verdict:
    accepted: frozenset[Node]
    refused: dict[Node, str]


def fuse(graph: Graph, config: FuseConfig) -> Outcome:
    """Rewrite the softmax statistics and gradients in `graph` to `slime_fused` operators.

    Args:
        graph: a functional ATen graph with fake values (`meta["val"]`), joint or inference, decomposed.
        config: what counts as a vocabulary, and what backward keeps.

    Returns:
        What was done; with `fused == ()` the graph is exactly as it was.
    """
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    if fake_mode is None:
        return Outcome()
    if config.verify:
        return _fuse_verified(graph, config, fake_mode)
    return _fuse(graph, config, fake_mode)


def _fuse_verified(graph: Graph, config: FuseConfig, fake_mode: Any) -> Outcome:
    """Rewrite a copy first; the graph itself only if both compute the same on random data."""
    trial = Graph()
    output = trial.graph_copy(graph, val_map={})
    trial.output(output)
    outcome = _fuse(trial, config, fake_mode)
    if not outcome.fused:
        return outcome
    reason = mismatch(graph, trial, graph.owning_module or torch.nn.Module())
    if reason is None:
        return _fuse(graph, config, fake_mode)
    return Outcome(rejections=(Rejection(f"verify=True: {reason}", "", ""),))


def _fuse(graph: Graph, config: FuseConfig, fake_mode: Any) -> Outcome:
    roots: frozenset[Node] | None = None
    barriers: frozenset[Node] = frozenset()
    refused: dict[Node, str] = {}
    rejections: dict[Node, Rejection] = {}
    changed_inputs = _changed_before_backward(graph)
    for _ in range(MAX_ROUNDS):
        walk = _walked(graph, config, fake_mode, roots, barriers, changed_inputs)
        verdict = _judge(walk)
        refused.update(verdict.refused)
        rejections.update(_rejections(walk, verdict))
        changed = frozenset(n for n in walk.changed_logits if _root(walk, n) in verdict.accepted)
        if changed - barriers:
            barriers |= changed
            walk.builder.discard()
            roots = None
            continue
        if roots is not None and verdict.accepted == roots:
            break
        walk.builder.discard()
        roots = verdict.accepted
        if not roots:
            break
    if not roots:
        return Outcome(rejections=tuple([*rejections.values()] or _too_small(graph, config)))
    return _commit(walk, rejections)


# NOTE [Logits that the graph changes]
# A joint graph is functional: a change of an input in place is a new value, and one more output that is copied over the
# input when forward ends. Backward runs after that copy. What reads the input there, as every gradient over it would,
# gets what forward has written. So such an input, and whatever shares its memory, is no root of a training graph; the
# first value that is made from it is, and that one is nobody else's. Forward alone reads its inputs before the copy.


def _changed_before_backward(graph: Graph) -> frozenset[Node]:
    """The inputs that may not be read in backward, and their aliases; none where there is no backward."""
    return frozenset(changed_inputs(graph) if any(map(is_backward, graph.nodes)) else ())


def _walked(
    graph: Graph,
    config: FuseConfig,
    fake_mode: Any,
    roots: Any,
    barriers: frozenset[Node],
    changed: frozenset[Node],
) -> Walk:
    walk = Walk(graph, config, fake_mode, roots, barriers, changed)
    nodes = list(graph.nodes)
    with graph.inserting_before(nodes[-1]):
        for node in nodes:
            walk.visit(node, RULES)
    return walk


def _root(walk: Walk, node: Node) -> Node | None:
    found = walk.env.get(node)
    form = found.form if isinstance(found, Mask) else found
    return (
        walk.root_of.get(form.source)
        if isinstance(form, Form) and form.source is not None
        else None
    )


# -- judging ------------------------------------------------------------------------------------------


def _judge(walk: Walk) -> _Verdict:
    """Which roots pay: a row value leaves, and fewer full-vocabulary values are left than were found.

    In a graph with collectives forward alone decides: a rank that needs no gradient has no more than that, and all
    ranks must exchange the same.
    """
    forward = any(map(is_collective, walk.graph.nodes))
    found, live = (_live(walk.graph, r, forward) for r in ({}, walk.replacements))
    accepted, refused = set(), {}
    for root in sorted(walk.softmax_roots):
        leaves = any(
            _used_by_user(walk, node, live)
            for node, (_, of) in walk.row_values.items()
            if of is root
        )
        before, after = _wide_of(walk, root, found if forward else None, live)
        if not leaves:
            refused[root] = "no value per row leaves: its softmax is used in full"
        elif after >= before:
            refused[root] = f"{after} full-vocabulary values would be left of {before}"
        else:
            accepted.add(root)
            accepted.update(ally for of, ally in walk.allies.items() if of is root)
    return _Verdict(frozenset(accepted), refused)


def _live(graph: Graph, replacements: dict[Node, Node], forward: bool = False) -> set[Node]:
    """What is computed once the replacements are in place; `forward`: for what forward returns only."""
    output = next(iter(reversed(graph.nodes)))
    stack = [n for n in output.all_input_nodes if not is_backward(n)] if forward else [output]
    stack = [replacements.get(node, node) for node in stack]
    live = {output, *stack}
    effects = [
        n
        for n in graph.nodes
        if n.op == "call_function" and n.is_impure() and not (forward and is_backward(n))
    ]
    stack += effects
    live.update(effects)
    while stack:
        for arg in stack.pop().all_input_nodes:
            arg = replacements.get(arg, arg)
            if arg not in live:
                live.add(arg)
                stack.append(arg)
    return live


def _used_by_user(walk: Walk, node: Node, live: set[Node]) -> bool:
    return any(user in live and not walk.builder.made(user) for user in node.users)


def _wide_of(walk: Walk, root: Node, found: set[Node] | None, live: set[Node]) -> tuple[int, int]:
    """Full-vocabulary values of one root before (in `found`) and after; gradients that leave are not counted."""
    region = [
        n
        for n in _region(walk)
        if (_root(walk, n) is root or n in _refused_over(walk, {root}))
        and (found is None or n in found)
    ]
    leaving = _leaving(walk)
    made = [
        n for n, of in walk.grad_nodes.items() if of is root and n in live and not is_backward(n)
    ]
    left = [n for n in region if n in live and n not in walk.replacements]
    return len([n for n in region if n not in leaving]), len(made) + len(left)


def _region(walk: Walk) -> set[Node]:
    """The user's full-vocabulary values: forms, masks, and in forward what refused rules made of them."""
    roots = walk.softmax_roots
    refused = _refused_over(walk, roots)
    return {
        node
        for node, meaning in walk.env.items()
        if node not in roots
        and _is_wide_value(node)
        and (_is_known(meaning) or (node in refused and _looks_wide(node, roots)))
    }


def _is_known(meaning: Any) -> bool:
    """A form or mask, constants and spread row scalars aside: those are never stored."""
    spread = isinstance(meaning, Form) and meaning.is_row and meaning.source is None
    return isinstance(meaning, (Form, Mask)) and not spread


def _refused_over(walk: Walk, roots: Iterable[Node]) -> set[Node]:
    """Nodes that a rule refused, before the gradient left: what the user does to the gradient then is not ours."""
    wanted = set(roots)
    return {r.node for r in walk.refusals if r.roots & wanted and not is_backward(r.node)}


def _leaving(walk: Walk) -> set[Node]:
    """The user's nodes in whose place a gradient leaves the region."""
    return {
        old for old, new in walk.replacements.items() if new in walk.leaves and is_backward(old)
    }


def _is_wide_value(node: Node) -> bool:
    found = value(node)
    return (
        node.op == "call_function" and isinstance(found, torch.Tensor) and node.target not in VIEWS
    )


def _rejections(walk: Walk, verdict: _Verdict) -> dict[Node, Rejection]:
    """The first refusal at each node whose operands a softmax root is in, and the verdict on each refused root."""
    found: dict[Node, Rejection] = {}
    for refusal in walk.refusals:
        if refusal.roots & walk.softmax_roots:
            found.setdefault(refusal.node, _rejection(refusal.reason, refusal.node))
    for root, reason in verdict.refused.items():
        found.setdefault(root, _rejection(reason, root))
    for node in walk.changed:
        for user in node.users:
            if (
                walk.softmax_roots
                and user not in walk.changed
                and _looks_wide(node, walk.softmax_roots)
            ):
                reason = "the function changes these logits in place, and backward would read them changed"
                found.setdefault(user, _rejection(reason, user))
    return found


def _rejection(reason: str, node: Node) -> Rejection:
    return Rejection(reason, str(node.target), source_of(node))


def _too_small(graph: Graph, config: FuseConfig) -> list[Rejection]:
    """Softmaxes over a last dimension that is not taken for a vocabulary."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.exp.default and is_float_tensor(node):
            shape = shape_of(node)
            if len(shape) >= 2 and isinstance(shape[-1], int) and 1 < shape[-1] < config.min_vocab:
                reason = (
                    f"the last dimension {shape[-1]} is smaller than min_vocab={config.min_vocab}"
                )
                found.append(_rejection(reason, node))
    return found[:1]


# -- committing ---------------------------------------------------------------------------------------


def _commit(walk: Walk, rejections: dict[Node, Rejection]) -> Outcome:
    graph, roots = walk.graph, walk.softmax_roots
    wide = _region(walk)
    counted = wide - _leaving(walk)
    before = [n for n in _live(graph, {}) if n in counted]
    saved_before = _saved_bytes(graph, wide)
    live = _live(graph, walk.replacements)
    fused = tuple(_fused(walk, live))
    for old, new in walk.replacements.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)  # noqa: B023
    _tidy(graph)
    merged = merge(
        graph,
        walk.builder.fake_mode,
        lambda node: node in wide or _looks_wide(node, roots),
        walk.config.merge_collectives,
    )
    _tidy(graph)
    graph.lint()
    wide |= {n for n in graph.nodes if n in walk.grad_nodes or _is_wide_copy(walk, n)}
    after = [n for n in graph.nodes if n in wide and not (n in walk.grad_nodes and is_backward(n))]
    notes = [text for root, text in walk.notes.values() if root in roots]
    return Outcome(
        fused=fused,
        # what a refused rule would have computed may not be needed in the end
        rejections=tuple(each for node, each in rejections.items() if node in live),
        wide_before=len(before),
        wide_after=len(after),
        saved_bytes_before=saved_before,
        saved_bytes_after=_saved_bytes(graph, wide),
        collectives_before=merged.before,
        collectives_after=merged.after,
        notes=tuple(dict.fromkeys(notes)) + merged.notes,
    )


def _looks_wide(node: Node, roots: Iterable[Node]) -> bool:
    if node.target in MATMULS or not isinstance(value(node), torch.Tensor):
        return False
    shape = shape_of(node)
    return len(shape) >= 2 and any(same(shape[-1], shape_of(root)[-1]) for root in roots)


def _is_wide_copy(walk: Walk, node: Node) -> bool:
    """A copy of the logits that a source needs (a reshape of rows that are no view)."""
    return (
        node in walk.builder.packed
        and any(step.copies for step in walk.steps.values())
        and _looks_wide(node, walk.softmax_roots)
    )


def _saved_bytes(graph: Graph, wide: set[Node]) -> int:
    """Bytes of full-vocabulary values (the logits too) that forward makes or is given and backward reads."""
    kept: dict[Node, int] = {}
    for node in graph.nodes:
        if not is_backward(node):
            continue
        for arg in node.all_input_nodes:
            base = _base(arg)
            if not is_backward(base) and (base in wide or _is_large(base, wide)):
                kept[base] = _bytes(base)
    return sum(kept.values())


def _is_large(node: Node, wide: set[Node]) -> bool:
    sizes = {str(shape_of(n)[-1]) for n in wide if shape_of(n)}
    return is_float_tensor(node) and len(shape_of(node)) >= 2 and str(shape_of(node)[-1]) in sizes


def _base(node: Node) -> Node:
    while node.op == "call_function" and node.target in VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _bytes(node: Node) -> int:
    found = value(node)
    total = found.element_size()
    for size in found.shape:
        total *= int(size) if isinstance(size, int) else int(size.node.hint or 0)
    return int(total)


def _fused(walk: Walk, live: set[Node]) -> Iterable[Fused]:
    for node, (label, _) in walk.row_values.items():
        if _used_by_user(walk, node, live):
            yield _describe(label, node, walk.replacements[node])
    for node in (*walk.stats_nodes, *walk.grad_nodes):
        if node in live:
            kind = (
                "statistics"
                if node in walk.stats_nodes
                else "gradient"
                if is_backward(node)
                else "softmax"
            )
            yield _describe(kind, node, node)


def _describe(kind: str, origin: Node, node: Node) -> Fused:
    found = value(node)
    tensor = found[0] if isinstance(found, (tuple, list)) else found
    shape = tuple(s if isinstance(s, int) else str(s) for s in tensor.shape)
    return Fused(kind, source_of(origin), shape, tensor.dtype)


def _tidy(graph: Graph) -> None:
    _sort(graph)
    graph.eliminate_dead_code()


def _sort(graph: Graph) -> None:
    """Put every node after its inputs and otherwise keep the order."""
    placed: set[Node] = set()
    last = None
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            top = stack[-1]
            waiting = [arg for arg in top.all_input_nodes if arg not in placed]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if top in placed:
                continue
            if last is not None and last.next is not top:
                last.append(top)
            placed.add(top)
            last = top
