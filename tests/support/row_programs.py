"""Random scalar losses of log-probs, entropies and columns per row: what stands between statistics and coefficients.

Entry point: `row_program`. It knows nothing of how a gradient is taken in forward; some of its programs cannot have
theirs taken there, since a row depends on others. Everything is smooth but where two random numbers meet, so that in
float64 two ways of computing a gradient agree to its last digits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = (3, 9)

Values = list[Tensor]


@dataclass(frozen=True)
class Given:
    """What the logits have no part in: [B, S], [B, S], [B, 1]."""

    drift: Tensor
    mask: Tensor
    of_sequence: Tensor


Step = Callable[[Values, Tensor, Given], Tensor]
"""All values so far [B, S], columns [B, S, 3], what is given -> another value [B, S]."""


def row_program(seed: int) -> Callable[..., Tensor]:
    """A loss of (hidden [B, S, D], weight [V, D], target, drift, advantages, mask [B, S])."""
    draw = random.Random(seed)
    steps = [_step(draw, 2 + at) for at in range(draw.randint(*STEPS))]
    end = draw.choice(_ENDS)
    entropies = draw.random() < 0.5

    def loss(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        drift: Tensor,
        advantages: Tensor,
        mask: Tensor,
    ) -> Tensor:
        log_p = (hidden @ weight.t()).log_softmax(-1)
        size = weight.shape[0]
        picked = torch.stack([target, (target + 5) % size, target // 2], -1)
        columns = log_p.gather(-1, picked)
        beside = -(log_p.exp() * log_p).sum(-1) if entropies else columns[..., 1]
        values = [columns[..., 0], beside]
        given = Given(drift, mask, advantages[:, :1])
        for step in steps:
            values.append(step(values, columns, given))
        return end(values[-1] + values[0] * mask, given)

    return loss


def _step(draw: random.Random, known: int) -> Step:
    make = draw.choice(_KINDS)
    return make(draw, known)


def _unary(draw: random.Random, known: int) -> Step:
    at, function = draw.randrange(known), draw.choice(_UNARY)
    return lambda values, columns, given: function(values[at])


def _binary(draw: random.Random, known: int) -> Step:
    left, right, function = draw.randrange(known), draw.randrange(known), draw.choice(_BINARY)
    return lambda values, columns, given: function(values[left], values[right])


def _with_given(draw: random.Random, known: int) -> Step:
    at, function = draw.randrange(known), draw.choice(_WITH_GIVEN)
    return lambda values, columns, given: function(values[at], given)


def _of_columns(draw: random.Random, known: int) -> Step:
    at, function = draw.randrange(known), draw.choice(_OF_COLUMNS)

    def step(values: Values, columns: Tensor, given: Given) -> Tensor:
        beside = torch.stack([values[at], values[0]], -1)
        return function(columns) + function(beside)

    return step


def _of_samples(draw: random.Random, known: int) -> Step:
    """Sample by sample, as trainers do it to save memory; some put them together otherwise than they were."""
    left, right, function = draw.randrange(known), draw.randrange(known), draw.choice(_BINARY)
    around, together = draw.choice(_UNARY_OF_SAMPLES), draw.choice(_TOGETHER)

    def step(values: Values, columns: Tensor, given: Given) -> Tensor:
        samples = zip(values[left], values[right], given.drift, strict=True)
        return together([around(function(a, b)) - drift for a, b, drift in samples])

    return step


def _of_other_rows(draw: random.Random, known: int) -> Step:
    at, function = draw.randrange(known), draw.choice(_OF_OTHER_ROWS)
    return lambda values, columns, given: function(values[at])


_KINDS = [
    *[_unary] * 4,
    *[_binary] * 3,
    *[_with_given] * 4,
    *[_of_columns] * 3,
    *[_of_samples] * 3,
    _of_other_rows,
]

_UNARY: Sequence[Callable[[Tensor], Tensor]] = (
    lambda a: a.clamp(-9, 1).exp(),
    lambda a: a.detach(),
    lambda a: -a,
    lambda a: a.clamp(-6, -1),
    lambda a: a.sigmoid(),
    lambda a: a.tanh() * 0.5,
    lambda a: a * a.detach().tanh(),
    lambda a: 1 - a,
    lambda a: a.unsqueeze(-1).expand(-1, -1, 2)[..., 1],
)
_BINARY: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    torch.add,
    torch.sub,
    lambda a, b: a.tanh() * b.tanh(),
    torch.minimum,
    torch.maximum,
    lambda a, b: torch.where(a > b.detach(), a, 2 * b),
    lambda a, b: a / (1 + b.square()),
)
_WITH_GIVEN: Sequence[Callable[[Tensor, Given], Tensor]] = (
    lambda a, g: a * g.mask,
    lambda a, g: a - g.drift,
    lambda a, g: a * g.of_sequence,
    lambda a, g: (a.detach() + g.drift - a).exp(),
    lambda a, g: torch.where(g.of_sequence < 0, a, a.clamp(-3, 3)),
    lambda a, g: torch.where(g.mask > 0, a, 0.0),
    lambda a, g: a.masked_fill(g.mask == 0, 1.5),
    lambda a, g: a / g.mask.sum(-1, keepdim=True).clamp(min=1),
    lambda a, g: a * torch.tensor(0.3, dtype=a.dtype),
)
_UNARY_OF_SAMPLES: Sequence[Callable[[Tensor], Tensor]] = (
    lambda a: a,
    lambda a: a.tanh(),
    lambda a: a.unsqueeze(-1).expand(-1, 3).sum(-1),
    lambda a: a.view(1, -1).squeeze(0),
    lambda a: a.clamp(-3, 3),
)
_TOGETHER: Sequence[Callable[[list[Tensor]], Tensor]] = (
    torch.stack,
    torch.stack,
    lambda rows: torch.cat([row.unsqueeze(0) for row in rows]),
    lambda rows: torch.cat(rows).view(len(rows), -1),
    lambda rows: torch.stack([*rows[:-1], rows[-1].exp()]),
    lambda rows: torch.stack(rows[::-1]),
    lambda rows: torch.stack([*rows[1:], rows[0]]),
    lambda rows: torch.stack([rows[0]] * len(rows)),
    lambda rows: torch.stack(rows) + rows[0],
    lambda rows: torch.cat([torch.stack(rows[:2]), torch.stack(rows[2:])]),
    lambda rows: sum((_home(row, at, rows) for at, row in enumerate(rows)), rows[0].exp() * 0),
    lambda rows: sum((0.5 * _home(rows[at], at, rows) for at in (2, 1, 0)), torch.stack(rows)),
)


def _home(row: Tensor, at: int, rows: Sequence[Tensor]) -> Tensor:
    return torch.zeros_like(torch.stack(list(rows))).select_scatter(row, 0, at)


_OF_COLUMNS: Sequence[Callable[[Tensor], Tensor]] = (
    lambda c: c.sum(-1),
    lambda c: c[..., 1:].exp().sum(-1),
    lambda c: c[:, :, 0] * c[..., -1].detach().tanh(),
    lambda c: (c * torch.arange(1, c.shape[-1] + 1)).sum(-1),
    lambda c: c[..., :1].squeeze(-1),
    lambda c: torch.cat([c[..., :1].exp(), c[..., 1:].tanh()], -1).sum(-1),
    lambda c: c.tanh().sum(2, keepdim=True)[:, :, 0],
)
_OF_OTHER_ROWS: Sequence[Callable[[Tensor], Tensor]] = (
    lambda a: a - a.mean(-1, keepdim=True),
    lambda a: a.tanh() * a.detach().sum().tanh(),
    lambda a: a[:, :1] + a,
    lambda a: a.cumsum(-1).tanh(),
    lambda a: a * _ranks(a.detach().flatten()).view_as(a),
    lambda a: torch.cat([a[:1].tanh(), a[1:]]) + torch.cat([a[:2], a[2:]]),
    lambda a: torch.cat([a[1:], a[:1]]),
    lambda a: a + torch.zeros_like(a).select_scatter(a[0].tanh(), 0, 1),
)


def _ranks(a: Tensor) -> Tensor:
    return (a.unsqueeze(0).expand(len(a), len(a)) < a.unsqueeze(1)).sum(-1) / len(a)


_ENDS: Sequence[Callable[[Tensor, Given], Tensor]] = (
    lambda a, g: a.mean(),
    lambda a, g: (a * g.mask).sum() / g.mask.sum(),
    lambda a, g: ((a * g.mask).sum(-1) / g.mask.sum(-1).clamp(min=1)).mean(),
    lambda a, g: -a.sum() / 7,
    lambda a, g: (a * g.of_sequence).sum(1).mean(0),
)
