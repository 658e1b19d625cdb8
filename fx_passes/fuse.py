"""`fuse`: walks the joint graph, judges every root, and rewrites the graph or leaves it as it was.

A walk only adds unused nodes, so a refusal removes them again. All decisions depend on the graph and the configuration
alone, never on time, memory or rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from fx_passes.algebra.forms import Form, Mask
from fx_passes.collectives import Merged, merge
from fx_passes.describe import (
    describe,
    gradients_that_come_in,
    rejections_of,
    saved_bytes,
    without_a_softmax,
)
from fx_passes.graph.aliases import Aliases
from fx_passes.graph.backward import mark_backward
from fx_passes.graph.changes import Changes, changes_of, keep_out_of_backward
from fx_passes.graph.facts import is_backward, value
from fx_passes.graph.operators import EXACT, is_elementwise
from fx_passes.graph.order import computed, descendants, tidy
from fx_passes.graph.per_row import exchanges, numbers_per_row
from fx_passes.graph.recompute import recompute_elements
from fx_passes.graph.returned import Returned
from fx_passes.outcome import CannotExchange, FuseConfig, Outcome, Rejection
from fx_passes.rules import TABLES
from fx_passes.torch_private import FakeTensorMode, detect_fake_mode
from fx_passes.verify import mismatch, trial_of
from fx_passes.walk.verdict import judge, leaving_gradients, looks_wide, unknown_values, wide_values
from fx_passes.walk.walk import Walk

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

MAX_ROUNDS = 8


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
    mark_backward(graph)
    attempt = _fuse_verified if config.verify else _fuse
    outcome = attempt(graph, config, fake_mode)
    keep_out_of_backward(graph)
    if outcome.fused:
        recompute_elements(graph)
    return outcome


def _fuse_verified(graph: Graph, config: FuseConfig, fake_mode: FakeTensorMode) -> Outcome:
    """Rewrite a copy first; the graph itself only if both compute the same on random data."""
    trial = trial_of(graph)
    outcome = _fuse(trial, config, fake_mode)
    if not outcome.fused:
        return outcome
    module = graph.owning_module or torch.nn.Module()
    reason = mismatch(graph, trial, module, outcome.rounded_to)
    if reason is None:
        return _fuse(graph, config, fake_mode)
    if outcome.collectives_before != outcome.collectives_after:
        raise CannotExchange(
            f"verify=True: {reason}; other ranks may not see it: give merge_collectives=False on all ranks"
        )
    return Outcome(rejections=(Rejection(f"verify=True: {reason}"),))


# -- rounds -------------------------------------------------------------------------------------------

# NOTE [Why the graph is walked several times]
# In the first walk every wide floating value of unknown origin is a root, since only later values show the real roots
# and the savings. `judge` then accepts some roots, and the next walk has these only. A value over a refused root
# becomes an ordinary node: possibly a root itself, or an operand refused by a rule. That may change other verdicts, so
# walking goes on until every root seen by a rule is accepted. Another walk would then be equal, so the rewrite is the
# judged one. Roots only leave, with two exceptions: a changed value that the graph returns (`logits / t`) becomes a
# barrier, read as it is; or backward turns out to read logits changed by forward, and these are no root. Then walking
# begins anew, with one barrier more or one root less, finitely often. The programs of the tests need one to three
# rounds. After `MAX_ROUNDS` the graph stays as it was.


@dataclass
class _Rounds:
    """The state between two walks."""

    changes: Changes
    only: frozenset[Node] | None = None
    barriers: frozenset[Node] = frozenset()
    rejections: dict[Node, Rejection] = field(default_factory=dict)

    def settled(self, walk: Walk) -> bool:
        """Judges a walk; False if another one is needed."""
        verdict = judge(walk)
        self.rejections.update(rejections_of(walk, verdict))
        read = walk.account.returned | _rounded_and_read(walk)
        own = {n for n in read if walk.root(n) in verdict.accepted}
        if own - self.barriers:
            self.barriers |= own
            self.only = None
            return False
        self.only = verdict.accepted
        if walk.account.asked <= verdict.accepted:
            read = _read_in_backward(walk) & verdict.accepted
            if read:
                self.changes = self.changes.without(read)
                self.only = None
            return not read
        return not self.only


def _fuse(graph: Graph, config: FuseConfig, fake_mode: FakeTensorMode) -> Outcome:
    rounds = _Rounds(changes_of(graph))
    for _ in range(MAX_ROUNDS):
        walk = Walk(graph, config, fake_mode, TABLES, rounds.only, rounds.barriers, rounds.changes)
        walk.run()
        if rounds.settled(walk):
            break
        walk.context.emitter.discard()
    else:
        reason = f"the logits are not settled after {MAX_ROUNDS} walks"
        return Outcome(rejections=(*rounds.rejections.values(), Rejection(reason)))
    if rounds.only:
        return _commit(walk, rounds.rejections)
    walk.context.emitter.discard()
    if rounds.rejections:
        return Outcome(rejections=tuple(rounds.rejections.values()))
    return without_a_softmax(graph, config)


def _read_in_backward(walk: Walk) -> set[Node]:
    """Logits changed by forward with a reader that forward does not need."""
    left = walk.context.changes.left
    if not left or any(map(exchanges, walk.graph.nodes)):
        return set()  # a rank without a gradient cannot know: there backward reads a copy
    replacements = walk.account.replacements
    live = computed(walk.graph, replacements)
    late = live - computed(walk.graph, replacements, forward=True)
    read = {replacements.get(arg, arg) for node in late for arg in _read_by(node)}
    aliases = Aliases(walk.graph)  # also of the views added by the walk
    return {root for root in left if not read.isdisjoint(aliases.of(root))}


def _read_by(node: Node) -> list[Node]:
    """The inputs with a meaning for the result. Exception: `copy_` overwrites its first."""
    return node.all_input_nodes[1:] if node.target is aten.copy_.default else node.all_input_nodes


# -- committing ---------------------------------------------------------------------------------------


def _commit(walk: Walk, rejections: dict[Node, Rejection]) -> Outcome:
    graph, account = walk.graph, walk.account
    wide = wide_values(walk) | unknown_values(walk)
    counted = wide - leaving_gradients(walk)
    before = [node for node in computed(graph, {}) if node in counted]
    saved_before = saved_bytes(graph, wide)
    live = computed(graph, account.replacements)
    fused = tuple(describe(walk, live))
    merged = _rewrite(walk, wide)
    wide |= {n for n in graph.nodes if n in account.gradients or _is_wide_copy(walk, n)}
    gradients = {n for n in account.gradients if is_backward(n)}
    after = [node for node in graph.nodes if node in wide - gradients]
    # If no value of these logits remains, the refused nodes read the logits themselves (their `topk`), or their
    # gradient outside the rewritten part.
    kept = set() if after else {refusal.node for refusal in account.refusals}
    noted = {n: text for n, (root, text) in account.notes.items() if root in account.softmax_roots}
    rounded = [value(node).dtype for node in (*noted, *_rounded(walk))]
    return Outcome(
        fused=fused,
        # a refused node may be unused in the rewritten graph
        rejections=tuple(each for n, each in rejections.items() if n in live and n not in kept),
        wide_before=len(before),
        wide_after=len(after),
        saved_bytes_before=saved_before,
        saved_bytes_after=saved_bytes(graph, wide),
        collectives_before=merged.before,
        collectives_after=merged.after,
        notes=tuple(dict.fromkeys([*noted.values(), *gradients_that_come_in(walk)])) + merged.notes,
        rounded_to=min(rounded, key=lambda dtype: torch.finfo(dtype).bits, default=None),
    )


def _rounded(walk: Walk) -> list[Node]:
    """Multiples of logits, computed and rounded by the program in half precision; the rewrite computes in float32."""
    values = walk.context.values.items()
    linear = [
        n for n, form in values if isinstance(form, Form) and form.is_affine and not form.is_row
    ]
    return [n for n in linear if n.op == "call_function" and value(n).dtype.itemsize < 4]


def _rounded_and_read(walk: Walk) -> set[Node]:
    """Values rounded element by element and read by the user's own nodes: statistics must be of the rounded values."""
    rounded = {node for node in _rounded(walk) if _rounds(walk, node)}
    return rounded & computed(walk.graph, walk.account.replacements) if rounded else set()


def _rounds(walk: Walk, node: Node) -> bool:
    """Whether it rounds other values than log-probs. The statistics of log-probs are as exact as rounded log-probs."""
    form = walk.context.values[node]
    assert isinstance(form, Form)
    small = form.is_identity or walk.context.rows.without_offset(form.f, form.e)
    return is_elementwise(node) and node.target not in EXACT and not small


def _rewrite(walk: Walk, wide: set[Node]) -> Merged:
    """The only edits of the user's graph: replacements, then fewer collectives."""
    graph, roots = walk.graph, walk.account.softmax_roots
    returned = Returned(graph)
    views = returned.views()
    for old, new in walk.account.replacements.items():
        kept = {new, graph.output_node(), *views} if old in views else {new}
        for user in [user for user in old.users if user not in kept]:
            user.replace_input_with(old, new)
    for copy in walk.account.unchanged:
        graph.erase_node(copy)
    tidy(graph)
    _erase_exchanged(graph, walk.account.replacements)

    def is_wide(node: Node) -> bool:
        return node in wide or looks_wide(node, roots)

    emitter, config = walk.context.emitter, walk.context.config
    columns = _with_columns(walk)
    merged = merge(
        graph,
        emitter.fake_mode,
        lambda node: node in columns and is_wide(node),
        config.merge_collectives,
    )
    if merged.before:
        tidy(graph)
    _leave_out_unread_statistics(graph)
    returned.keep_apart(emitter.fake_mode, lambda node: node in roots or is_wide(node))
    graph.lint()
    return merged


def _with_columns(walk: Walk) -> set[Node]:
    """Full-vocabulary values by origin, not by size: there may be as many rows as columns."""
    masks = {node for node, meaning in walk.context.values.items() if isinstance(meaning, Mask)}
    made = descendants(walk.account.softmax_roots)
    return (made | masks) - numbers_per_row(walk.graph)


def _erase_exchanged(graph: Graph, replacements: Iterable[Node]) -> None:
    """Replaced all-reduces: a collective runs even if its result is unread."""
    waits = [node for node in replacements if node.target is c10d.wait_tensor.default]
    unread = [wait for wait in waits if not wait.users]
    for wait in unread:
        (reduce,) = wait.all_input_nodes
        graph.erase_node(wait)
        graph.erase_node(reduce)
    if unread:
        graph.eliminate_dead_code()


def _leave_out_unread_statistics(graph: Graph) -> None:
    """Unread statistics are not computed. They take half of the time of a plain cross entropy's statistics."""
    operators = graph.find_nodes(op="call_function", target=torch.ops.slime_fused.row_stats.default)
    for node in operators:
        read = {user.args[1] for user in node.users}
        node.kwargs = {name: False for name, at in (("mean", 2), ("total", 3)) if at not in read}


def _is_wide_copy(walk: Walk, node: Node) -> bool:
    """A copy of the logits for a row move (a reshape of rows that is no view)."""
    if node not in walk.context.emitter.packed:
        return False
    copies = any(step.copies for step in walk.context.roots.steps.values())
    return copies and looks_wide(node, walk.account.softmax_roots)
