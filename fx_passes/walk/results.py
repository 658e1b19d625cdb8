"""Inputs and answers of rules: plain values. Rules answer, the walk records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, Union

import torch
from torch.fx import Node

from fx_passes.algebra.forms import Form, Mask
from fx_passes.refused import Refused

Operand: TypeAlias = Union[
    Form, Mask, Node, float, int, bool, str, torch.dtype, "Sequence[Operand]", None
]
"""An argument as seen by a rule: a form or mask if it is full-vocabulary, otherwise the user's node or number."""

NORMALISER = "normaliser"
EXPECTED = "entropy or expected value"
SOFTMAX_LABELS = {NORMALISER, EXPECTED}
"""Row values of a softmax: a root without one of them is not rewritten."""


@dataclass(frozen=True)
class RowValue:
    """One number per row for the user's node: `node`, still in the compute dtype.

    `label` names it in the report; `form` is the value it was computed from.
    """

    node: Node
    label: str
    form: Form


@dataclass(frozen=True)
class Instead:
    """`node` in the user's node's place.

    Attributes:
        meaning: what the user's node is to the rules that read it; `node` itself where None.
        keeps: nodes of the user's whose values are needed as they are.
    """

    node: Node
    meaning: Form | Mask | None = None
    keeps: tuple[Node, ...] = ()


Item: TypeAlias = Form | Mask | Node | RowValue | Instead | None
Result: TypeAlias = Item | tuple[Item, ...]
"""A rule's answer; None: the value is no affair of the pass."""

Rule: TypeAlias = Callable[..., Result]
"""(context, node, *arguments, **keywords) -> the node's meaning. Raises Refused with the reason for the report."""


@dataclass(frozen=True)
class Starts:
    """A rule that also runs without a full-vocabulary operand: the value may be the first one."""

    rule: Rule

    def __call__(self, *args: object, **kwargs: object) -> Result:
        return self.rule(*args, **kwargs)


def full_vocabulary(operands: object) -> list[Form | Mask]:
    """All forms and masks among the operands, however nested."""
    if isinstance(operands, (Form, Mask)):
        return [operands]
    if isinstance(operands, Mapping):
        operands = tuple(operands.values())
    if isinstance(operands, (list, tuple)):
        return [each for item in operands for each in full_vocabulary(item)]
    return []


def logits_of(meaning: Form | Mask) -> Node | None:
    """The logits (the root, moved) of a form or mask."""
    return meaning.form.x if isinstance(meaning, Mask) else meaning.x


def as_form(operand: Operand) -> Form:
    """The operand as a form; refuses anything else."""
    if isinstance(operand, Form):
        return operand
    if isinstance(operand, Mask):
        raise Refused("a full-vocabulary mask is used in arithmetic")
    raise Refused("rows of logits are combined with a value without logits, or an unsupported one")


def as_number(operand: Operand) -> float | None:
    if isinstance(operand, (int, float)) and not isinstance(operand, bool):
        return float(operand)
    return None
