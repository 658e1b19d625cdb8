"""The walk's results for the user's graph: replacements and refusals.

Only the walk writes it. `fuse.py` acts on it once all is accepted; `verdict.py` judges by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from fx_passes.walk.gradient import Leaving


@dataclass(frozen=True)
class Refusal:
    """A rule's refusal at a node of the user; `roots` are the roots of its operands."""

    node: Node
    reason: str
    roots: frozenset[Node]


@dataclass
class Account:
    """One walk's findings.

    Attributes:
        replacements: for a node of the user, its new node.
        row_values: the user's nodes with one number per row: the report's label, and the root.
        asked: roots seen by at least one non-view rule; the rest can be ignored.
        softmax_roots: roots with a softmax.
        gradients: every emitted `row_grad`, and its root.
        leaving: new nodes for full-vocabulary values leaving the algebra, each with its form.
        kept: the user's nodes whose values are needed unchanged.
        returned: full-vocabulary values linear in the logits and returned by the graph (`logits / t`).
        unchanged: copies over logits of the values already there.
        doubtful: roots whose per-row values are compared with unfused full-vocabulary values. Numbers equal in the
            user's program would be rounded differently.
        refusals: refusals by rules, in the order of the graph.
        notes: roundings omitted by the rewrite: the root, and the text for the report.
    """

    replacements: dict[Node, Node] = field(default_factory=dict)
    row_values: dict[Node, tuple[str, Node]] = field(default_factory=dict)
    asked: set[Node] = field(default_factory=set)
    softmax_roots: set[Node] = field(default_factory=set)
    gradients: dict[Node, Node] = field(default_factory=dict)
    leaving: dict[Node, Leaving] = field(default_factory=dict)
    kept: set[Node] = field(default_factory=set)
    returned: set[Node] = field(default_factory=set)
    unchanged: list[Node] = field(default_factory=list)
    doubtful: set[Node] = field(default_factory=set)
    refusals: list[Refusal] = field(default_factory=list)
    notes: dict[Node, tuple[Node, str]] = field(default_factory=dict)
