"""The walk's results for the user's graph: replacements and refusals.

Only the walk writes it. `fuse.py` acts on it once all is accepted; `verdict.py` judges by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from fx_passes.walk.gradient import Leaving


@dataclass(frozen=True)
class Refusal:
    """A rule's refusal at the user's node, whose operands are over `roots`."""

    node: Node
    reason: str
    roots: frozenset[Node]


@dataclass
class Account:
    """One walk's findings.

    Attributes:
        replacements: the new node that takes the place of a node of the user's.
        row_values: nodes of the user's that are a number per row: the report's label, and the root.
        asked: roots that at least one non-view rule has seen; the rest can be ignored.
        softmax_roots: roots over which a softmax is taken.
        gradients: every `row_grad` that was emitted, and its root.
        leaving: new nodes that are a full-vocabulary value where it leaves, and what it is.
        kept: nodes of the user's whose values are needed as they are.
        returned: full-vocabulary values linear in the logits that the graph returns (`logits / t`).
        unchanged: copies over logits of what they hold already.
        doubtful: roots whose values per row are compared with full-vocabulary values that stay: numbers that are equal
            in the user's program would be rounded differently.
        refusals: what rules refused, in the order of the graph.
        notes: roundings that the rewrite leaves out: the root, and the text for the report.
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
