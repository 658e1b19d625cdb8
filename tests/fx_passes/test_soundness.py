"""Right or refused: programs whose preconditions cannot be seen in the graph, each class by several examples.

Values and gradients are compared with eager code in the same dtype and with float64. Where eager code raises, so does
the compiled function. Whether a program is fused is not asked here: `test_spellings.py` and `test_refusals.py` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from tests.support import harness

ROWS, VOCAB = 6, 37
NEARBY = 4  # draws beside the one that is judged
LOWEST = torch.finfo(torch.float32).min
Made = tuple[Tensor, ...]


@dataclass(frozen=True)
class Program:
    """`make()` gives the arguments; floating ones that require grad get gradients."""

    fn: Callable[..., Tensor]
    make: Callable[[], Made]
    options: tuple[dict[str, Any], ...]


PROGRAMS: list[Any] = []


def program(
    about: str, make: Callable[[], Made], *options: dict[str, Any]
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def enter(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        for each in options or ({},):
            shown = "-".join(f"{key}={value}" for key, value in each.items())
            name = f"{about}: {fn.__name__}" + (f" {shown}" if shown else "")
            PROGRAMS.append(pytest.param(Program(fn, make, (each,)), id=name.replace(" ", "_")))
        return fn

    return enter


def logits(*shape: int, seed: int = 0, offset: float = 0.0, grad: bool = True) -> Tensor:
    values = torch.randn(*(shape or (ROWS, VOCAB)), generator=torch.Generator().manual_seed(seed))
    return (3 * values + offset).requires_grad_(grad)


def tokens(*shape: int, seed: int = 1, high: int = VOCAB) -> Tensor:
    return torch.randint(high, shape or (ROWS,), generator=torch.Generator().manual_seed(seed))


def some(*flags: int) -> Tensor:
    return torch.tensor(flags or (1, 0, 1, 1, 0, 1), dtype=torch.bool)


def with_values(x: Tensor, **values: float) -> Tensor:
    """`x` with special values: `r2=nan` a whole row, `r2c5=-inf` an element."""
    filled = x.detach().clone()
    for place, special in values.items():
        row, _, at = place.removeprefix("r").partition("c")
        filled[int(row)] = special if not at else filled[int(row)]
        if at:
            filled[int(row), int(at)] = special
    return filled.requires_grad_(x.requires_grad)


def entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


# ---------------------------------------------------------------- rows with a zero coefficient


@program("zero factor", lambda: (logits(), tokens(), some().float()))
def smoothing_and_a_square(x: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    smooth = F.cross_entropy(x, target, label_smoothing=0.1, reduction="none")
    return smooth + keep * x.square().mean(-1)


@program("zero factor", lambda: (logits(offset=100), some().float(), tokens()))
def mean_log_prob_of_some_rows(x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return keep * log_p.mean(-1) + x.mean(-1) - F.nll_loss(log_p, target, reduction="none")


@program("zero factor", lambda: (logits(), torch.tensor([0.0, 1, 0, -2, 0.5, 0])))
def a_factor_per_row_that_is_zero(x: Tensor, factor: Tensor) -> Tensor:
    return (factor[:, None] * x).log_softmax(-1)[:, 3] + (factor[:, None] * x).logsumexp(-1)


@program("NaN", lambda: (with_values(logits(), r1c3=math.nan, r4=-math.inf),))
def mean_of_all_probabilities(x: Tensor) -> Tensor:
    return x.softmax(-1).mean() + x.softmax(-1).sum((0, 1), keepdim=True)


@program("zero factor", lambda: (logits(), some()))
def squares_of_rows_that_are_masked_whole(x: Tensor, keep: Tensor) -> Tensor:
    """The masked rows' softmax is NaN, and so are its sums; no gradient comes from there."""
    log_p = (x - x.logsumexp(-1, keepdim=True)).masked_fill(~keep[:, None], -math.inf)
    log_q = F.log_softmax(log_p, -1)
    return F.cosine_similarity(log_q, log_q, -1)[keep]


@program("zero factor", lambda: (logits(), some()))
def probabilities_of_rows_that_are_masked_whole(x: Tensor, keep: Tensor) -> Tensor:
    """The masked rows' softmax is NaN; their sum is 0, since nothing of it is taken."""
    probs = x.masked_fill(~keep[:, None], -math.inf).softmax(-1)
    return torch.where(keep[:, None], probs, 0.0).sum(-1)


# ---------------------------------------------------------------- operands that are broadcast


@program("broadcast", lambda: (logits(), logits(4, seed=5).detach().abs()))
def one_temperature_of_joined_rows(x: Tensor, temperature: Tensor) -> Tensor:
    return torch.cat((x * temperature[:1]).chunk(2)).logsumexp(1)


@program("broadcast", lambda: (logits(2, 5, VOCAB), tokens(2)))
def one_hot_of_a_batch(x: Tensor, eos: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return (F.one_hot(eos, VOCAB)[:, None] * log_p).sum(-1)


@program("broadcast", lambda: (logits(), tokens(1)))
def one_hot_of_one_row(x: Tensor, eos: Tensor) -> Tensor:
    return (F.one_hot(eos, VOCAB) * x.log_softmax(-1)).sum(-1)


@program("broadcast", lambda: (logits(2, 3, VOCAB), logits(2, seed=5).detach().abs() + 0.5))
def one_temperature_of_flat_rows(x: Tensor, temperature: Tensor) -> Tensor:
    return (x / temperature[:1, None, None]).flatten(0, 1).log_softmax(-1)[:, 3]


@program("broadcast", lambda: (logits(), tokens(1)))
def probability_of_one_token(x: Tensor, eos: Tensor) -> Tensor:
    return ((torch.arange(VOCAB) == eos[:, None]) * x.softmax(-1)).sum(-1)


@program("broadcast", lambda: (logits(2, 5, VOCAB), tokens(5)))
def one_hot_of_positions(x: Tensor, eos: Tensor) -> Tensor:
    mask = torch.arange(VOCAB) == eos[:, None]
    return torch.where(mask, x.log_softmax(-1), 0.0).sum(-1)


@program("broadcast", lambda: (logits(2, 5, VOCAB), logits(2, 1, VOCAB, seed=3)))
def a_row_per_sample(x: Tensor, y: Tensor) -> Tensor:
    return (x.softmax(-1) * y.log_softmax(-1)).sum(-1)


@program("broadcast", lambda: (logits(2, 5, VOCAB), tokens(2, 1, 1)))
def gather_of_the_first_row(x: Tensor, index: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, index).sum(1)


@program("indices", lambda: (logits(), torch.tensor([0, -1, VOCAB, 3, -VOCAB, 2])))
def zero_at_columns_that_are_not_there(x: Tensor, target: Tensor) -> Tensor:
    hot = torch.arange(VOCAB) == target[:, None]
    return torch.where(hot, 0.0, x.softmax(-1))[:, 0]


@program("indices", lambda: (logits(), torch.tensor([0, -1, VOCAB, 3, -VOCAB, 2])))
def labels_at_columns_that_are_not_there(x: Tensor, target: Tensor) -> Tensor:
    hot = torch.arange(VOCAB) == target[:, None]
    return (torch.where(hot, 0.9, 0.01) * x.log_softmax(-1)).sum(-1)


# ---------------------------------------------------------------- masks of another value


@program(
    "another mask", lambda: (logits(), with_values(logits(seed=2, grad=False), r1c4=-math.inf))
)
def guarded_by_the_reference(x: Tensor, reference: Tensor) -> Tensor:
    log_p, other = x.log_softmax(-1), reference.log_softmax(-1)
    return torch.where(other == -math.inf, 0.0, log_p.exp() * log_p).sum(-1)


@program("another mask", lambda: (logits(), torch.tensor([1.0, -1, 0, 2, -2, 0.5])))
def guarded_by_a_weighted_probability(x: Tensor, advantage: Tensor) -> Tensor:
    weighted = x.softmax(-1) * advantage[:, None]
    return torch.where(weighted > 0, weighted, 0.0).sum(-1)


@program("another mask", lambda: (logits(), torch.tensor([1.0, -1, 0, 2, -2, 0.0])))
def guarded_by_a_zero_weight(x: Tensor, weight: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    p = log_p.exp()
    return torch.where(p * weight[:, None] == 0, 0.0, p * log_p).sum(-1)


def filled_rows() -> Made:
    return (with_values(logits(), r2=LOWEST, r4c3=LOWEST, r5c1=-math.inf),)


@program("another mask", filled_rows)
def the_lowest_number_is_not_minus_inf(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    return torch.where(x > LOWEST, p, 0.0).sum(-1)


@program("another mask", filled_rows)
def at_least_the_lowest_number(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    return torch.where(x >= LOWEST, p * p, 0.0).sum(-1)


@program("another mask", lambda: (logits(), torch.tensor([0, -math.inf, 0, 0, -math.inf, 1])))
def guarded_by_a_bonus(x: Tensor, bonus: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return torch.where(log_p + bonus[:, None] == -math.inf, 0.0, log_p.exp() * log_p).sum(-1)


@program("another mask", lambda: (logits(), torch.tensor([1.0, 0.0, -1.0, 2.0, 1.0, 1.0])))
def guarded_at_another_scale(x: Tensor, scale: Tensor) -> Tensor:
    y = with_minus_inf(x)
    q = (scale[:, None] * x).softmax(-1)
    return torch.where(y == -math.inf, 0.0, q).sum(-1)


def with_minus_inf(x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(VOCAB) < 2, -math.inf)


# ---------------------------------------------------------------- numbers that count rows, or columns


@program("counting", lambda: (logits(2, VOCAB, VOCAB), tokens(2)))
def rows_counted_not_columns(x: Tensor, last: Tensor) -> Tensor:
    mask = torch.arange(VOCAB)[None, :, None].expand(2, VOCAB, VOCAB) == last[:, None, None]
    return (mask * x.log_softmax(-1)).sum(-1)


@program("counting", lambda: (logits(), tokens()))
def always_the_first_row(x: Tensor, target: Tensor) -> Tensor:
    return x.log_softmax(-1)[torch.arange(1).expand(ROWS), target]


@program("counting", lambda: (logits(VOCAB, VOCAB), tokens(VOCAB)))
def as_many_rows_as_columns(x: Tensor, target: Tensor) -> Tensor:
    mask = torch.arange(VOCAB)[:, None] == target[None, :]
    return (mask * x.log_softmax(-1)).sum(-1)


@program("counting", lambda: (logits(), tokens()))
def every_other_number(x: Tensor, target: Tensor) -> Tensor:
    columns = torch.arange(2 * VOCAB)[::2]
    return ((columns == target[:, None]) * x.log_softmax(-1)).sum(-1)


@program("counting", lambda: (logits(), tokens()))
def counted_from_the_end(x: Tensor, target: Tensor) -> Tensor:
    return ((torch.arange(VOCAB).flip(0) == target[:, None]) * x.log_softmax(-1)).sum(-1)


@program("counting", lambda: (logits(3, 4, VOCAB), tokens(3, 4)))
def rows_in_a_square(x: Tensor, target: Tensor) -> Tensor:
    rows = torch.arange(3)[:, None]
    return x.log_softmax(-1)[rows, torch.arange(4)[None], target]


# ---------------------------------------------------------------- columns that miss


def misses() -> Made:
    target = tokens()
    target[1], target[4] = -100, VOCAB + 3
    return logits(), target


@program("miss", misses)
def how_many_columns_hit(x: Tensor, target: Tensor) -> Tensor:
    hits = (torch.arange(VOCAB) == target[:, None]).float().sum(-1)
    return hits * x.logsumexp(-1)


@program("miss", misses)
def log_prob_or_nothing(x: Tensor, target: Tensor) -> Tensor:
    return ((torch.arange(VOCAB) == target[:, None]) * x.log_softmax(-1)).sum(-1)


@program("miss", misses)
def chosen_where_there_is_one(x: Tensor, target: Tensor) -> Tensor:
    mask = torch.arange(VOCAB) == target[:, None]
    return torch.where(mask, x.log_softmax(-1), 0.0).sum(-1)


@program("miss", lambda: (logits(), tokens().float() + torch.tensor([0, 0.5, 0, 0.5, 0, 0])))
def half_a_column(x: Tensor, target: Tensor) -> Tensor:
    return ((torch.arange(VOCAB) == target[:, None]) * x.log_softmax(-1)).sum(-1)


@program("miss", lambda: (logits(), tokens().to(torch.uint8)))
def small_unsigned_columns(x: Tensor, target: Tensor) -> Tensor:
    return ((torch.arange(VOCAB) == target[:, None]) * x.log_softmax(-1)).sum(-1)


@program("miss", misses)
def smoothed_or_nothing(x: Tensor, target: Tensor) -> Tensor:
    soft = (torch.arange(VOCAB) == target[:, None]).float() * 0.9 + 0.1 / VOCAB
    return -(soft * x.log_softmax(-1)).sum(-1)


# ---------------------------------------------------------------- columns that repeat


def repeated() -> Made:
    columns = tokens(ROWS, 4)
    columns[:, 2] = columns[:, 0]
    columns[3] = 5
    return logits(), columns, torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(2))


@program("repeat", repeated)
def added_twice_then_read(x: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    soft = torch.zeros_like(x).scatter_add(-1, columns, weights)
    return (soft + x.log_softmax(-1)).gather(-1, columns).sum(-1)


@program("repeat", repeated)
def added_twice_then_squared(x: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    soft = torch.zeros_like(x).scatter_add(-1, columns, weights)
    return (soft * soft).sum(-1) * x.logsumexp(-1)


@program("repeat", repeated)
def soft_targets_at_columns(x: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    soft = torch.zeros_like(x).scatter_add(-1, columns, weights)
    return -(soft * x.log_softmax(-1)).sum(-1)


@program("repeat", repeated)
def read_twice(x: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    return (x.log_softmax(-1).gather(-1, columns) * weights).sum(-1)


@program("repeat", repeated)
def overwritten_twice(x: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    return x.scatter(-1, columns[:, :1], 0.0).scatter(-1, columns[:, 2:3], 1.0).logsumexp(-1)


# ---------------------------------------------------------------- rows taken in steps, rolled, repeated


@program("row order", lambda: (logits(),))
def every_other_row_then_the_rest(x: Tensor) -> Tensor:
    return torch.cat([x[0:4:2], x[4:6]]).log_softmax(-1)[:, 2]


@program("row order", lambda: (logits(),))
def entropies_of_every_other_row(x: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return entropy(torch.cat([log_p[::2], log_p[1::2]]))


@program("row order", lambda: (logits(),))
def half_a_roll(x: Tensor) -> Tensor:
    return x[torch.fmod(torch.arange(3) + 2, ROWS)].log_softmax(-1)[:, 2]


@program("row order", lambda: (logits(),))
def a_roll_and_more(x: Tensor) -> Tensor:
    return x[torch.fmod(torch.arange(2 * ROWS) + 2, ROWS)].log_softmax(-1)[:, 2]


@program("row order", lambda: (logits(),))
def the_same_rows_twice(x: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return entropy(torch.cat([log_p[:3], log_p[:3]]))


@program("row order", lambda: (logits(),))
def last_rows_first(x: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return entropy(torch.cat([log_p[-3:], log_p[:-3]]))


# ---------------------------------------------------------------- garbage in rows that are masked


def garbage() -> Made:
    return with_values(logits(), r1=math.nan, r4=math.inf), some(), tokens()


@program("garbage", garbage)
def masked_before_the_softmax(x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    log_p = x.masked_fill(~keep[:, None], 0).log_softmax(-1)
    return log_p.gather(-1, target[:, None]).squeeze(-1)


@program("garbage", garbage)
def masked_and_the_entropy(x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    return entropy(torch.where(keep[:, None], x, torch.zeros_like(x)).log_softmax(-1))


@program("garbage", garbage)
def masked_after_the_loss(x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    log_p = x.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    return torch.where(keep, log_p, 0.0)


@program("garbage", garbage)
def masked_log_probs(x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    log_p = x.log_softmax(-1).masked_fill(~keep[:, None], 0)
    return log_p.gather(-1, target[:, None]).squeeze(-1) + log_p.sum(-1)


@program("garbage", lambda: (with_values(logits(), r1c3=-math.inf, r2c0=-math.inf), some()))
def the_lowest_number_times_nothing(x: Tensor, keep: Tensor) -> Tensor:
    log_p = x.log_softmax(-1).clamp(min=LOWEST)
    return (log_p * torch.zeros(ROWS, 1)).sum(-1) + x.logsumexp(-1)


@program(
    "garbage", lambda: (with_values(logits(), r1c3=-math.inf), torch.tensor([0, 3, 0, 1, 2, 4]))
)
def the_lowest_number_is_read(x: Tensor, target: Tensor) -> Tensor:
    log_p = x.log_softmax(-1).clamp(min=LOWEST)
    return log_p.gather(-1, target[:, None]).squeeze(-1)


@program("garbage", lambda: (with_values(logits(), r1c3=-math.inf, r3c2=-math.inf),))
def entropy_as_torch_distributions_write_it(x: Tensor) -> Tensor:
    log_p = x - x.logsumexp(-1, keepdim=True)
    return -(log_p.clamp(min=LOWEST) * x.softmax(-1)).sum(-1)


# ---------------------------------------------------------------- offsets, cancellation, dtypes


def far() -> Made:
    return logits(offset=1000), tokens()


@program("precision", far)
def collision_probability(x: Tensor, target: Tensor) -> Tensor:
    p = x.softmax(-1)
    return (p * p).sum(-1)


@program("precision", far)
def two_temperatures(x: Tensor, target: Tensor) -> Tensor:
    p, q = x.log_softmax(-1), (x / 2).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@program("precision", lambda: (*far(), torch.linspace(0.5, 1.5, VOCAB)))
def rows_beside_those_of_a_softmax(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    mixed = x.softmax(-1).clone()
    mixed[::2] = x[::2]
    return F.cross_entropy(mixed, target, weight, reduction="none") + 0 * x.sum(-1)  # a statistic


@program("precision", far)
def tempered_and_not(x: Tensor, target: Tensor) -> Tensor:
    p, q = x.softmax(-1), (x / 0.7).softmax(-1)
    return (p * q).sum(-1)


@program(
    "precision",
    lambda: (with_values(logits(), r0c3=40.0, r2c1=60.0), torch.tensor([3, 1, 1, 0, 5, 6])),
)
def what_is_left_without_the_target(x: Tensor, target: Tensor) -> Tensor:
    return x.softmax(-1).scatter(-1, target[:, None], 0.0).sum(-1).log()


@program(
    "precision",
    lambda: (with_values(logits(), r0c3=40.0, r2c1=60.0), torch.tensor([3, 1, 1, 0, 5, 6])),
)
def without_the_target_by_where(x: Tensor, target: Tensor) -> Tensor:
    mask = torch.arange(VOCAB) == target[:, None]
    return torch.where(mask, 0.0, x.softmax(-1)).sum(-1).log()


def near_one() -> Made:
    x = with_values(logits(), r0c3=40.0, r2c1=60.0)
    return x, torch.tensor([3, 1, 1, 0, 5, 6]), torch.linspace(0.5, 2.0, ROWS)


@program("precision", near_one)
def all_but_the_target(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """`1 - p` of a probability near one is not the sum of the others."""
    return (x.softmax(-1) * (1 - F.one_hot(target, VOCAB))).sum(-1).log()


@program("precision", near_one)
def all_but_the_target_by_a_weight(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    mask = torch.arange(VOCAB) == target[:, None]
    return (x.softmax(-1) * torch.where(mask, 0.0, weight[:, None])).sum(-1).log()


@program("precision", near_one)
def a_softmax_less_its_target(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    p = x.softmax(-1)
    return (p - p * F.one_hot(target, VOCAB)).sum(-1).log()


def near_one_and_ones() -> Made:
    """Numbers per row that are one where the target's probability is near it."""
    return (*near_one()[:2], torch.tensor([1.0, 0.3, 1.0, 0.0, 1.0, 0.7]))


@program("precision", near_one_and_ones)
def all_but_a_part_of_the_target(x: Tensor, target: Tensor, part: Tensor) -> Tensor:
    """A number per row, which the graph does not show, may be one."""
    return (x.softmax(-1) * (1 - part[:, None] * F.one_hot(target, VOCAB))).sum(-1).log()


@program("precision", near_one_and_ones)
def a_part_of_all_but_the_target(x: Tensor, target: Tensor, part: Tensor) -> Tensor:
    part = part.clamp(min=0.1)[:, None]
    return (x.softmax(-1) * (part - part.square() * F.one_hot(target, VOCAB))).sum(-1).log()


@program("precision", near_one)
def all_but_two_targets_that_are_one(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    other = target.flip(0)[[5, 1, 3, 0, 4, 2]]
    halves = 0.5 * F.one_hot(target, VOCAB) + 0.5 * F.one_hot(other, VOCAB)
    return (x.softmax(-1) * (1 - halves)).sum(-1).log()


@program("precision", near_one)
def without_the_target_beside_a_normaliser(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Its gradient takes the target out of a softmax, too."""
    rest = x.softmax(-1).scatter(-1, target[:, None], 0.0).sum(-1).log()
    return rest + 0.5 * x.logsumexp(-1)


@program("precision", near_one)
def all_but_the_target_of_some_rows(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Half of the target's is taken out, which is all of it in some rows."""
    p = x.softmax(-1)
    halves = torch.where((weight > 1.5)[:, None], p, 0.5 * p)
    return (halves - 0.5 * p * F.one_hot(target, VOCAB)).sum(-1).log()


def large_exponentials() -> Made:
    return ((logits().detach() + 5).bfloat16().requires_grad_(),)


@program("precision", large_exponentials)
def exponentials_less_the_largest(x: Tensor) -> Tensor:
    """The largest of the rounded ones: one that is not rounded may be far above it."""
    y = x.exp()
    return (y - y.amax(-1, keepdim=True)).exp().sum(-1) + x.logsumexp(-1)


def far_apart() -> Made:
    x = with_values(logits(), r0c3=-1e4, r2c1=-1e4)
    return x, torch.tensor([3, 1, 1, 0, 5, 6]), torch.linspace(0.5, 1.5, ROWS)


@program("precision", far_apart)
def a_number_per_row_less_half_the_logits(x: Tensor, target: Tensor, shift: Tensor) -> Tensor:
    """The maximum is rounded as the values that it is taken away from."""
    y = shift[:, None] - 0.5 * x
    return (y - y.logsumexp(-1, keepdim=True)).gather(-1, target[:, None])


def near_one_as_given() -> Made:
    x, target, weight = near_one()
    return x.detach(), target, weight.requires_grad_()


@program("precision", near_one_as_given)
def expected_logit_less_the_targets(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The same product of a softmax and logits, once for all columns, once at the column."""
    p, hot = x.softmax(-1), F.one_hot(target, VOCAB)
    return (p * x - (p * hot) * x).sum(-1).abs().log() * weight


def far_below() -> Made:
    x = with_values(logits(), r0c3=-1e6, r2c1=-1e5)
    return x, torch.tensor([3, 1, 1, 0, 5, 6]), torch.linspace(0.5, 2.0, ROWS)


@program("precision", near_one)
def all_but_a_target_that_is_named_twice(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    twice = target[:, None].expand(-1, 2)
    halves = torch.zeros_like(x).scatter_add(-1, twice, torch.full((ROWS, 2), 0.5))
    return (x.softmax(-1) * (1 - halves)).sum(-1).log()


@program("precision", far_below)
def log_probs_of_all_but_the_target(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The target's own would take the others' digits away before it is taken away."""
    return (x.log_softmax(-1) * (1 - F.one_hot(target, VOCAB))).sum(-1)


@program("precision", far_below)
def log_probs_of_all_but_the_target_by_a_weight(
    x: Tensor, target: Tensor, weight: Tensor
) -> Tensor:
    mask = torch.arange(VOCAB) == target[:, None]
    return (x.log_softmax(-1) * torch.where(mask, 0.0, weight[:, None])).sum(-1)


@program("precision", far_below)
def weighted_log_probs_less_the_targets(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted once for all columns, once at the column."""
    log_p, hot = x.log_softmax(-1), F.one_hot(target, VOCAB)
    return (log_p * weight[:, None] - (log_p * hot) * weight[:, None]).sum(-1)


@program("precision", lambda: (*far_below()[:2], near_one_and_ones()[2]))
def log_probs_of_all_but_a_part_of_the_target(x: Tensor, target: Tensor, part: Tensor) -> Tensor:
    return (x.log_softmax(-1) * (1 - part[:, None] * F.one_hot(target, VOCAB))).sum(-1)


@program("precision", far_below)
def log_probs_less_the_targets_that_is_read(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    chosen = log_p.gather(-1, target[:, None])
    return log_p.scatter_add(-1, target[:, None], -chosen).sum(-1)


@program("precision", far_below)
def logits_less_the_targets_in_some_rows(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    hot = F.one_hot(target, VOCAB).where((weight > 0.2)[:, None], 0)
    return (x * (1 - hot)).mean(-1) + x.logsumexp(-1)


@program(
    "precision", lambda: (torch.full((ROWS, 1), 1 / 3, dtype=torch.float64, requires_grad=True),)
)
def constants_in_float64(row: Tensor) -> Tensor:
    return (torch.ones(ROWS, VOCAB, dtype=torch.float64) * row + row).sum(-1)


@program(
    "precision",
    lambda: (logits().detach().double().requires_grad_(), some().double().sin().requires_grad_()),
)
def exponentials_of_rows_in_float64(x: Tensor, row: Tensor) -> Tensor:
    """Computed where no logits are in the value that says how exactly."""
    return (x + row[:, None].expand_as(x).exp()).logsumexp(-1)


@program("precision", lambda: (logits().detach().double().requires_grad_(), tokens(ROWS, 2)))
def constants_at_columns_in_float64(x: Tensor, target: Tensor) -> Tensor:
    counted = torch.zeros_like(x).scatter_add(-1, target, torch.full_like(x[:, :2], 2.0)) / 3
    return counted.sum(-1) + x.logsumexp(-1)


@program("precision", lambda: (logits().detach().double().requires_grad_(), tokens()))
def everything_in_float64(x: Tensor, target: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return log_p.gather(-1, target[:, None]).squeeze(-1) * entropy(log_p)


# ---------------------------------------------------------------- save="softmax"


@program("saved softmax", lambda: (logits(offset=8),), {"save": "softmax"})
def not_normalised(x: Tensor) -> Tensor:
    return x.float().exp().sum(-1).sqrt()


@program(
    "saved softmax",
    lambda: (logits(offset=8).detach().half().requires_grad_(),),
    {"save": "softmax"},
)
def in_half_precision(x: Tensor) -> Tensor:
    return x.float().exp().sum(-1).sqrt()


@program(
    "saved softmax", lambda: (logits().detach().half().requires_grad_(),), {"save": "softmax"}, {}
)
def entropy_in_half_precision(x: Tensor) -> Tensor:
    return entropy(x.float().log_softmax(-1))


# ---------------------------------------------------------------- layouts


def strange_strides() -> Made:
    wide = torch.empty_strided((2, 1, 3, VOCAB), (1, 6, 2, 6))
    return wide.copy_(logits(2, 1, 3, VOCAB, grad=False)).requires_grad_(), tokens(2, 1, 3)


@program("layout", strange_strides)
def views_that_torch_believes(x: Tensor, target: Tensor) -> Tensor:
    flat = x.reshape(-1, VOCAB)
    return F.cross_entropy(flat, target.reshape(-1), reduction="none")


@program("layout", strange_strides)
def classes_in_the_middle(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.movedim(-1, 1), target, reduction="none")


@program("layout", lambda: (logits(1, VOCAB), tokens(ROWS)))
def rows_that_are_one_row(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.expand(ROWS, VOCAB), target, reduction="none")


# ---------------------------------------------------------------- indices of other kinds


@program("indices", lambda: (logits(), tokens(ROWS)))
def some_rows_are_overwritten(x: Tensor, target: Tensor) -> Tensor:
    z = x.clone()
    z[torch.arange(3), target[:3]] = 0
    return z.log_softmax(-1)[:, 2]


@program("indices", lambda: (logits(), tokens().to(torch.int32)))
def short_integers(x: Tensor, target: Tensor) -> Tensor:
    return x.log_softmax(-1)[torch.arange(ROWS), target]


@program("indices", lambda: (logits(), -tokens() - 1))
def from_the_end(x: Tensor, target: Tensor) -> Tensor:
    return x.log_softmax(-1)[torch.arange(ROWS), target]


@program("indices", lambda: (logits(), tokens()))
def rows_written_down_in_another_order(x: Tensor, target: Tensor) -> Tensor:
    rows = [1, 0, *range(2, ROWS)]
    return x.log_softmax(-1)[rows, target]


@program("indices", lambda: (logits(), tokens()))
def numbers_written_down_and_changed(x: Tensor, target: Tensor) -> Tensor:
    rows = torch.tensor([*range(ROWS)])
    rows[0] = 1
    return x.log_softmax(-1)[rows, target]


@program("indices", lambda: (logits(), tokens()))
def best_columns_of_which_some_are_the_target(x: Tensor, target: Tensor) -> Tensor:
    """Several columns of a row may be the same then: the last one is written."""
    best = x.detach().topk(3, -1).indices.clone()
    best[:, 1] = target
    best[:, 2] = target
    written = torch.arange(3.0).expand(ROWS, 3) + 1
    return (torch.zeros_like(x).scatter(-1, best, written) * x.softmax(-1)).sum(-1)


@program("indices", lambda: (logits(), tokens()))
def best_tokens_over_a_loss(x: Tensor, target: Tensor) -> Tensor:
    best = x.topk(3, -1)
    loss = x.logsumexp(-1) - x.gather(-1, target[:, None])[:, 0]
    return loss + (best.values - x.logsumexp(-1, keepdim=True)).exp().sum(-1)


@program("indices", lambda: (logits(), some()))
def rows_by_a_mask(x: Tensor, keep: Tensor) -> Tensor:
    return x.log_softmax(-1)[keep][:, 3]


@program("counting", lambda: (logits(VOCAB, VOCAB), tokens(VOCAB)))
def mean_over_as_many_rows(x: Tensor, target: Tensor) -> Tensor:
    """Its gradient is a value per column, which looks like one per row."""
    return x.log_softmax(-1).exp().mean(0) + x.gather(-1, target[:, None])[:, 0]


@program("zero factor", lambda: (logits(), some().float()))
def divergence_from_masked_logits(x: Tensor, keep: Tensor) -> Tensor:
    old = (x.detach() * keep[:, None]).log_softmax(-1)
    return F.kl_div(x.log_softmax(-1), old, log_target=True, reduction="none").sum(-1)


@program("zero factor", lambda: (logits(), some().float()))
def sum_beside_a_masked_softmax(x: Tensor, keep: Tensor) -> Tensor:
    return (x * keep[:, None]).logsumexp(-1) + (x - x.detach().amax(-1, True)).mean(-1)


@program("garbage", lambda: (logits(), some()))
def fully_masked_rows_in_another_order(x: Tensor, keep: Tensor) -> Tensor:
    """A softmax of nothing but -inf is NaN, of which the gradient of the mask makes zero."""
    joined = torch.cat([x[2:], x[:2]])
    joined.detach().zero_()
    masked = joined.masked_fill(~torch.cat([keep[2:], keep[:2]])[:, None], -math.inf)
    p = masked.softmax(-1)
    return p.gather(-1, p.argmax(-1, keepdim=True))


@program("precision", lambda: (logits(offset=1e4), some().float() - 0.7))
def log_sum_of_scaled_log_probs(x: Tensor, scale: Tensor) -> Tensor:
    """The maxima cancel before they are scaled."""
    return (x.log_softmax(-1) * scale[:, None]).logsumexp(-1)


@program("precision", lambda: (logits(offset=30), logits(seed=4, grad=False)))
def exponentials_over_their_sum(x: Tensor, weight: Tensor) -> Tensor:
    return (x.exp() / x.exp().sum(-1, keepdim=True) * weight).sum(-1)


@program("garbage", lambda: (logits(), some()))
def masked_rows_with_another_use(x: Tensor, keep: Tensor) -> Tensor:
    """Where a row is taken out, what else comes in as a gradient of it is too, be it NaN."""
    masked = x.masked_fill(~keep[:, None], -math.inf)
    other = (masked - masked.amax(-1, True)).sin().sum(-1)
    return torch.where(keep, masked.logsumexp(-1) + other, 0.0)


@program("precision", lambda: (logits(offset=-1e4),))
def normaliser_of_normalised_pieces(x: Tensor) -> Tensor:
    """Each piece has a maximum of its own. Its gradient is 0, no scale to measure by; that of a log-prob is."""
    normalised = torch.cat([piece.log_softmax(-1) for piece in x.split(2)])
    return normalised.logsumexp(-1) + x.log_softmax(-1)[:, 0]


def not_numbers() -> Made:
    return (with_values(logits(), r1c3=math.nan, r3c2=-math.inf, r4=math.nan),)


@program("not a number", not_numbers)
def difference_of_equals(x: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return (log_p - x.log_softmax(-1)).sum(-1)


@program("not a number", not_numbers)
def divergence_from_itself(x: Tensor) -> Tensor:
    log_p, old = x.log_softmax(-1), x.detach().log_softmax(-1)
    return F.kl_div(log_p, old, log_target=True, reduction="none").sum(-1)


@program("not a number", lambda: (with_values(logits(), r1c3=math.nan, r4=math.nan),))
def probabilities_without_themselves(x: Tensor) -> Tensor:
    return (x.softmax(-1) - x.detach().softmax(-1)).sum(-1) + x[:, 3]


@program("not a number", not_numbers)
def normaliser_as_a_difference(x: Tensor) -> Tensor:
    return (x - x.log_softmax(-1))[:, 2]


@program("not a number", lambda: (with_values(logits(), r1c3=math.nan, r4=math.nan),))
def probabilities_times_zero(x: Tensor) -> Tensor:
    return (x.softmax(-1) * 0.0).sum(-1) + x[:, 3]


@program("precision", lambda: (logits(offset=1000),))
def squares_of_log_probs(x: Tensor) -> Tensor:
    """The gradient is a number per row times the log-prob, plus softmaxes."""
    return x.log_softmax(-1).square().mean(-1)


@program("precision", lambda: (logits(offset=1000), some().float() + 0.3, tokens()))
def log_probs_over_a_temperature(x: Tensor, temperature: Tensor, target: Tensor) -> Tensor:
    log_p = x.log_softmax(-1) / temperature[:, None]
    return log_p.gather(-1, target[:, None])[:, 0] + log_p.softmax(-1)[:, 0]


def far_and_weight() -> Made:
    """A gradient of the weight is a column of what it is multiplied with."""
    return logits(offset=1000), (some().float() * 0.37 + 0.3).requires_grad_(), tokens()


@program("precision", far_and_weight)
def log_probs_by_soft_labels(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The maximum is taken away before a column is weighted; so it is in the next."""
    labels = F.one_hot(target, VOCAB) * weight[:, None] + 0.1 / VOCAB
    return -(labels * x.log_softmax(-1)).sum(-1)


@program("precision", far_and_weight)
def log_probs_by_smooth_labels(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The maximum is taken away from the logit, not from what else is added."""
    labels = torch.zeros_like(x).scatter(-1, target[:, None], 2.0)
    return (2 / VOCAB * weight[:, None] + labels * x.log_softmax(-1)).sum(-1)


@program("precision", far_and_weight)
def log_probs_of_two_mixed_labels(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Shares of one maximum, with numbers and with numbers per row."""
    log_p, one, other = x.log_softmax(-1), F.one_hot(target, VOCAB), F.one_hot(target - 1, VOCAB)
    mixed = (0.7 * one + 0.3 * other) * log_p
    return (mixed + (weight[:, None] * one + (1 - weight[:, None]) * other) * log_p).sum(-1)


@program("precision", far_and_weight)
def weighted_columns_at_two_temperatures(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_p = 0.3 * x.log_softmax(-1) + 0.7 * (x / 0.7).log_softmax(-1)
    return (F.one_hot(target, VOCAB) * weight[:, None] * log_p).sum(-1)


@program("precision", lambda: (*far(), logits(seed=5)[:, 0].detach() + 1000))
def columns_beside_a_given_number(x: Tensor, target: Tensor, bound: Tensor) -> Tensor:
    scaled = (x - bound[:, None]) * bound[:, None].cos()
    return scaled.gather(-1, target[:, None])[:, 0] * bound.sin() + x.softmax(-1)[:, 0]


@program("precision", lambda: (logits(offset=1000), logits(seed=5)[:, 0].detach() + 1000))
def sums_beside_a_given_number(x: Tensor, bound: Tensor) -> Tensor:
    """The number may be near to the logits, of which the maximum takes away one of two."""
    return (x.log_softmax(-1) + (x - bound[:, None])).mean(-1)


@program("precision", lambda: (logits(offset=1000), logits(seed=5)[:, 0].detach() + 1000))
def sums_of_distances(x: Tensor, bound: Tensor) -> Tensor:
    """The number is near to the logits, which the graph does not show: summed as the program sums it."""
    return (x - bound[:, None]).sum(-1) + x.logsumexp(-1).cos()


@program("precision", lambda: (logits(), logits().detach().mean(-1) + 0.01))
def sums_of_distances_from_the_mean(x: Tensor, bound: Tensor) -> Tensor:
    """Nearer to the mean than the maximum is."""
    return ((x - bound[:, None]) * bound[:, None].cos()).sum(-1) + x.logsumexp(-1) * 1e-6


@program("precision", lambda: (logits(6, 4000) / 3, torch.zeros(ROWS, 1, dtype=torch.bool)))
def sums_of_log_probs_in_some_rows(x: Tensor, keep: Tensor) -> Tensor:
    """From these rows no maximum is taken away: beside it their sum would lose digits."""
    shifted = x - x.logsumexp(-1, keepdim=True) * keep
    return shifted.sum(-1) + torch.where(keep, x.log_softmax(-1), x).sum(-1)


@program("precision", lambda: (logits(offset=1000), logits(seed=5)[:, 0].detach() + 1000))
def sums_of_distances_from_two_numbers(x: Tensor, bound: Tensor) -> Tensor:
    wide = x * 0.7 - bound[:, None] * 0.5 - bound[:, None].cos() - 0.2 * bound[:, None]
    return wide.mean(-1) + x.softmax(-1)[:, 0]


@program("masked", lambda: (with_values(logits(), r1=-math.inf, r2c3=-math.inf), some().float()))
def sums_beside_a_given_number_of_nothing(x: Tensor, bound: Tensor) -> Tensor:
    return x.logsumexp(-1).clamp(min=-1.0) + (x - bound[:, None]).sum(-1)


@program("precision", lambda: (logits(offset=1000), tokens()))
def a_constant_near_the_logits(x: Tensor, target: Tensor) -> Tensor:
    z = x - 1000
    entropy_of_z = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    return (z * 0.3).sum(-1) + z.gather(-1, target[:, None])[:, 0] * 0.3 + entropy_of_z


@program("precision", lambda: (logits(offset=1000), torch.ones(ROWS, 1, dtype=torch.bool)))
def a_constant_in_some_rows(x: Tensor, keep: Tensor) -> Tensor:
    return ((x - keep.float() * 1000) * 0.3).sum(-1) + x.softmax(-1)[:, 0]


@program("precision", lambda: (logits(offset=1000), some().float() * 0.37 + 0.3))
def two_given_numbers_near_the_logits(x: Tensor, weight: Tensor) -> Tensor:
    half = torch.full_like(weight, 500.0)
    z = x - half[:, None] - (half - weight)[:, None]
    return (z * weight[:, None]).sum(-1) + x.softmax(-1)[:, 0]


@program("precision", lambda: (logits(offset=1000), logits(seed=5)[:, 0].detach() + 1000))
def a_maximum_beside_a_given_number(x: Tensor, bound: Tensor) -> Tensor:
    """What is near to the maximum is the number, not the logarithm of the sum."""
    p = x.softmax(-1)
    value = (p * x.log_softmax(-1) + p * (x - bound[:, None])).sum(-1)
    return value.detach() + x.log_softmax(-1)[:, 0]


@program("precision", lambda: (logits(6, 700), torch.rand(ROWS)))
def a_part_of_the_maximum_is_left(x: Tensor, weight: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return ((log_p * 0.01 + x) * weight[:, None]).sum(-1) + log_p[:, 1] * 0.1


@program("precision", lambda: (logits(6, 4000), logits(6, 4000).detach().mean(-1)))
def a_given_number_beside_a_part_of_the_maximum(x: Tensor, bound: Tensor) -> Tensor:
    return (x.log_softmax(-1) * 0.01 + (x - bound[:, None])).mean(-1)


# ---------------------------------------------------------------- rows that are given


@program("given rows", lambda: (logits(), 1e5 + some().float(), 1e5 + some().float().sin()))
def entropy_times_a_difference(x: Tensor, reward: Tensor, baseline: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return (log_p.exp() * log_p).sum(-1) * (reward - baseline) * (reward - baseline)


@program(
    "given rows", lambda: (logits(), 1e5 + some().float(), 1e5 + some().float().sin(), tokens())
)
def column_times_a_difference(x: Tensor, reward: Tensor, baseline: Tensor, at: Tensor) -> Tensor:
    weighted = x.log_softmax(-1) * (reward - baseline)[:, None]
    return weighted.gather(-1, at[:, None])


@program(
    "given rows", lambda: (logits(), 1e6 + some().double().sin(), 1e6 - some().double(), tokens())
)
def difference_in_float64(x: Tensor, left: Tensor, right: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x * (left - right).float()[:, None], target, reduction="none")


@program("given rows", lambda: (logits(), 1e200 * (2 + some().double().sin()), tokens()))
def product_in_float64(x: Tensor, left: Tensor, target: Tensor) -> Tensor:
    scale = (left * left.reciprocal().detach()).float()
    return F.cross_entropy(x * scale[:, None], target, reduction="none")


@program(
    "given rows", lambda: (with_values(logits(), r1c3=math.nan, r4=-math.inf), some().float() + 1)
)
def softmax_of_a_weight(x: Tensor, weight: Tensor) -> Tensor:
    """It sums to the weight, and to NaN where there is no softmax."""
    return (x.softmax(-1) * weight[:, None]).sum(-1)


@program("given rows", lambda: (logits(), some().float().sin() - 0.2))
def log_of_a_negative_number(x: Tensor, weight: Tensor) -> Tensor:
    return (x + weight.log()[:, None]).exp().sum(-1)


def rows_not_finite() -> Made:
    row = with_values(1 + some().float()[:, None], r1=math.nan, r2=math.inf, r3=-math.inf, r4=0.0)
    return logits(), row[:, 0], tokens()


@program("given rows", rows_not_finite)
def cross_entropy_of_a_shift(x: Tensor, shift: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x + shift[:, None], target, reduction="none")


@program("given rows", rows_not_finite)
def softmax_of_a_shift_spelled_out(x: Tensor, shift: Tensor, target: Tensor) -> Tensor:
    exps = (x - shift[:, None]).exp()
    return (exps / exps.sum(-1, keepdim=True)).gather(-1, target[:, None])


@program("given rows", rows_not_finite)
def log_prob_of_a_quotient(x: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    same = x * scale[:, None] / scale[:, None]
    return same.log_softmax(-1).gather(-1, target[:, None])


@program("given rows", rows_not_finite)
def shift_of_a_row_value(x: Tensor, shift: Tensor, target: Tensor) -> Tensor:
    log_sum = x.logsumexp(-1) + shift - shift
    return (x - log_sum[:, None]).gather(-1, target[:, None])


@program("given rows", lambda: (with_values(logits(), r1c3=-math.inf), torch.tensor([3] * ROWS)))
def softmax_beside_a_column(x: Tensor, target: Tensor) -> Tensor:
    """A column of -inf that is taken away."""
    return (x - x.gather(-1, target[:, None])).softmax(-1)[:, 1]


@program("given rows", lambda: (logits(offset=1e4), tokens()))
def expectation_beside_a_column(x: Tensor, target: Tensor) -> Tensor:
    y = (x - x.gather(-1, target[:, None])).detach()
    expected = (y.softmax(-1) * y).sum(-1)
    return torch.stack([expected, F.cross_entropy(x, target, reduction="none")])


def rows_without_a_softmax() -> Made:
    return (with_values(logits(), r1=-math.inf, r2c5=math.nan, r3c7=math.inf),)


@program("maxima", rows_without_a_softmax)
def greedy_log_prob(x: Tensor) -> Tensor:
    values, places = x.log_softmax(-1).max(-1)
    return torch.stack([values, places.float()])


@program("maxima", rows_without_a_softmax)
def likeliest_token(x: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return log_p[:, 0] + log_p.argmax(-1)


def empty_rows() -> Made:
    return (with_values(logits(), r1=-math.inf, r3c2=-math.inf),)


@program("empty rows", empty_rows)
def entropy_where_there_are_logits(x: Tensor) -> Tensor:
    """Of a row of nothing but -inf the mask leaves zero, where the softmax is NaN."""
    terms = x.softmax(-1) * x.log_softmax(-1)
    return -torch.where(x == -math.inf, 0.0, terms).sum(-1)


@program(
    "empty rows", lambda: (with_values(logits(), r1=-math.inf, r3c2=-math.inf, r4c1=math.nan),)
)
def entropy_where_positive(x: Tensor) -> Tensor:
    """NaN is not greater than zero, either."""
    p = x.softmax(-1)
    return -torch.where(p > 0, p * x.log_softmax(-1), 0.0).sum(-1)


@program("empty rows", lambda: (with_values(logits(), r1=math.nan, r3c2=-math.inf),))
def entropy_where_not_zero(x: Tensor) -> Tensor:
    """NaN is not zero."""
    p = x.softmax(-1)
    return -torch.where(p != 0, p * x.log_softmax(-1), 0.0).sum(-1)


def some_columns() -> Made:
    weight = (torch.arange(VOCAB) > 4).float().expand(6, VOCAB).contiguous()
    values = with_values(logits(), **{f"r{r}c{c}": -math.inf for r in range(6) for c in range(5)})
    return values, weight


@program("clamped", some_columns)
def clamped_log_probs_by_weights(x: Tensor, weight: Tensor) -> Tensor:
    """As torch's Categorical clamps them: zero where the weight is, not NaN."""
    log_p = x - x.logsumexp(-1, keepdim=True)
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return (log_p * weight).sum(-1) - (log_p * log_p.exp()).sum(-1)


@program("precision", lambda: (logits(offset=1000), some().float() * 0.37 + 0.3, logits(seed=3)))
def shards_over_a_temperature(x: Tensor, temperature: Tensor, weight: Tensor) -> Tensor:
    """The maximum of all shards is no statistic of this one's."""
    y = x / temperature[:, None]
    top = torch.maximum(y.amax(-1), y.detach()[:, 0].sin() + 1010 / temperature)
    exponentials = (y - top[:, None]).exp()
    return (exponentials / (exponentials.sum(-1) + 0.5)[:, None] * weight).sum(-1)


@program("masked", lambda: (with_values(logits(), r2=-math.inf), 0.3 + some(), logits(seed=3)))
def a_shard_with_nothing_in_a_row(x: Tensor, temperature: Tensor, weight: Tensor) -> Tensor:
    y = x / temperature[:, None]
    top = torch.maximum(y.amax(-1), 1 / temperature)
    exponentials = (y - top[:, None]).exp()
    return (exponentials / (exponentials.sum(-1) + 0.5)[:, None] * weight).sum(-1)


@program("zero factor", lambda: (logits(), some().float(), tokens(), logits(seed=3)))
def log_probs_of_shards_times_zero(x: Tensor, scale: Tensor, target: Tensor, w: Tensor) -> Tensor:
    y = x * scale[:, None]
    top = torch.maximum(y.amax(-1), scale + 3)
    log_p = y - top[:, None] - (y - top[:, None]).exp().sum(-1, keepdim=True).log()
    return (log_p.exp() * w).sum(-1) + log_p.gather(-1, target[:, None])[:, 0]


@program("precision", lambda: (logits(seed=7), 0.01 + 0.1 * some().float(), tokens()))
def probabilities_of_large_logits(x: Tensor, temperature: Tensor, target: Tensor) -> Tensor:
    return (x.expm1() / temperature[:, None]).softmax(-1).gather(-1, target[:, None])[:, 0]


@program("precision", lambda: (logits(offset=1000),))
def log_probs_without_their_mean(x: Tensor) -> Tensor:
    """What is reduced from a rounded value cancels its rounding."""
    log_p = x - x.logsumexp(-1, keepdim=True)
    return (log_p - log_p.mean(-1, keepdim=True))[:, -1:]


@program("precision", lambda: (with_values(logits(), r0c3=LOWEST, r3c0=LOWEST), some()))
def divergence_of_shifted_logits(x: Tensor, keep: Tensor) -> Tensor:
    """Far below, the shift swallows the logits in eager code."""
    kept = x * keep[:, None]
    shifted = (x - x.mean(-1, True)).log_softmax(-1).log_softmax(-1)
    return (kept.softmax(-1) * (kept.log_softmax(-1) - shifted)).sum(-1)


@program("precision", lambda: (logits(),), {"save": "logits"}, {"save": "softmax"})
def entropy_in_float64(x: Tensor) -> Tensor:
    """Its gradient is rounded to float32 last."""
    return torch.special.entr(x.double().softmax(-1)).sum(-1)


@program("empty rows", lambda: (with_values(logits(), r0=-math.inf, r2c5=-math.inf), tokens()))
def one_hot_of_exponentials(x: Tensor, target: Tensor) -> Tensor:
    """0, and not NaN, where there is nothing to take the exponential of."""
    hot = (torch.arange(VOCAB) == target[:, None]).float()
    return (x.exp() * hot).sum(-1) + x.logsumexp(-1)


@program("not a number", lambda: (with_values(logits(), r1c3=math.nan), some(), tokens()))
def one_hot_of_masked_rows(x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    hot = (torch.arange(VOCAB) == target[:, None]).float()
    kept = torch.where(keep[:, None], x.softmax(-1), 0.0)
    return (kept * hot).sum(-1) + x[0].logsumexp(-1)


@program("empty rows", lambda: (logits(), tokens()))
def all_but_the_target_is_minus_infinity(x: Tensor, target: Tensor) -> Tensor:
    hot = torch.arange(VOCAB) == target[:, None]
    only = torch.where(hot, x.log_softmax(-1), -math.inf)
    return only.sum(-1).exp() + x.logsumexp(-1)


@program("not a number", lambda: (logits(), some()))
def masked_rows_times_nan(x: Tensor, keep: Tensor) -> Tensor:
    kept = torch.where(keep[:, None], x, 0.0)
    return (kept * torch.full((), math.nan)).sum(-1) + x.logsumexp(-1)


@program("not a number", lambda: (logits(), some()))
def masked_rows_over_nan(x: Tensor, keep: Tensor) -> Tensor:
    kept = torch.where(keep[:, None], x, 0.0)
    return (kept / torch.full((), math.nan)).sum(-1) + x.logsumexp(-1)


@program("not a number", lambda: (with_values(logits(), r0c3=math.nan, r5c3=math.nan), tokens()))
def pieces_of_which_one_is_shifted(x: Tensor, target: Tensor) -> Tensor:
    """In the other, what is picked does not depend on the rest of its row."""
    rows = torch.cat([x[:3], x[3:] - x[3:].amax(-1, True).detach()])
    return rows.gather(-1, target[:, None])[:, 0] + x[1].logsumexp(-1)


@program("not a number", lambda: (with_values(logits(), r1c3=math.nan), some(), tokens()))
def rows_of_which_some_are_shifted(x: Tensor, keep: Tensor, target: Tensor) -> Tensor:
    rows = torch.where(keep[:, None], x - x.amax(-1, True).detach(), x)
    return rows.gather(-1, target[:, None])[:, 0] + x[1].logsumexp(-1).nan_to_num()


@program("not a number", lambda: (with_values(logits(), r1=-math.inf), some()))
def log_of_rows_that_are_masked(x: Tensor, keep: Tensor) -> Tensor:
    """-inf in rows that are taken out, whatever they hold."""
    kept = torch.where(keep[:, None], x.softmax(-1), 0.0).detach()
    return kept.log().amax(-1).clamp(min=-5.0) + x[0].logsumexp(-1)


@program("not a number", lambda: (with_values(logits(), r0c3=math.nan, r5c3=math.nan),))
def exponentials_of_a_column(x: Tensor) -> Tensor:
    """A number beside NaN."""
    return x.exp()[:, 1] + x[1].logsumexp(-1)


def peaked() -> Made:
    target = tokens()
    return (F.one_hot(target, VOCAB) * 30.0 + logits(grad=False)).requires_grad_(), target


@program("written", peaked)
def small_number_over_a_large_one(x: Tensor, target: Tensor) -> Tensor:
    floor = x.softmax(-1).scatter(-1, target[:, None], 1e-10)
    return floor.log()[torch.arange(ROWS), target] + x.logsumexp(-1)


@program("written", lambda: (logits(), tokens()))
def log_prob_beside_a_low_number(x: Tensor, target: Tensor) -> Tensor:
    hot = torch.arange(VOCAB) == target[:, None]
    only = torch.where(hot, x.log_softmax(-1), -1e9)
    return only.gather(-1, target[:, None])[:, 0]


def peaked_apart() -> Made:
    """The target is likely, and the other logits have it at e^-30000."""
    x, other, target = logits(), logits(seed=2, grad=False), tokens()
    rows = torch.arange(ROWS)
    with torch.no_grad():
        x[rows, target] = 30.0
        other[rows, target] = -3e4
    return x, other, target


@program("precision", peaked_apart)
def a_column_beside_a_divergence(x: Tensor, other: Tensor, target: Tensor) -> Tensor:
    """The two parts of the divergence's gradient are 30000 times what they come to."""
    log_p, log_q = x.log_softmax(-1), other.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1) + x.gather(-1, target[:, None])[:, 0]


@program("precision", peaked_apart)
def a_cross_entropy_beside_a_divergence(x: Tensor, other: Tensor, target: Tensor) -> Tensor:
    log_p, log_q = x.log_softmax(-1), other.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1) + F.cross_entropy(x, target, reduction="none")


@program("precision", peaked_apart)
def a_function_beside_a_divergence(x: Tensor, other: Tensor, target: Tensor) -> Tensor:
    log_p, log_q = x.log_softmax(-1), other.log_softmax(-1)
    return x.sin().sum(-1) + (log_p.exp() * (log_p - log_q)).sum(-1)


def confident() -> Made:
    """One token is likely in all rows, of both."""
    x, other, target = logits(), logits(seed=2, grad=False), tokens()
    with torch.no_grad():
        for each in (x, other):
            each[torch.arange(ROWS), target] = each.amax(-1) + 17
    return x, other


@program("precision", confident)
def a_gradient_far_below_what_they_come_to(x: Tensor, other: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return log_p.exp().sin().sum(-1) - log_p.exp().sum(-1) * math.cos(1)


@program("precision", confident)
def mixtures_far_below_what_they_come_to(x: Tensor, other: Tensor) -> Tensor:
    """The gradient alone: whether a value's roundings cancel is decided by how the sum of exponentials is rounded."""
    log_p, log_q = x.log_softmax(-1), other.log_softmax(-1)
    mixed = (0.5 * log_p.exp() + 0.5 * log_q.exp()).log()
    one, two = log_p.exp() * (log_p - mixed), log_q.exp() * (log_q - mixed)
    divergence = (one + two).sum(-1)
    return divergence - divergence.detach()


def confident_in_half() -> Made:
    x, other = (each.detach().bfloat16() for each in confident())
    return x.requires_grad_(), other


@program("precision", confident_in_half)
def distances_to_the_maximum(x: Tensor, other: Tensor) -> Tensor:
    return (x.softmax(-1) * (x - x.amax(-1, keepdim=True))).sum(-1) * 0.01


def unlikely() -> Made:
    """Probabilities near the smallest numbers of float32."""
    x = logits()
    with torch.no_grad():
        x[torch.arange(ROWS), tokens()] = x.amax(-1) + torch.linspace(80, 95, ROWS)
    return (x,)


@program("denormal numbers", unlikely)
def logarithms_of_probabilities(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    kept = p.topk(3)[0].sum(-1) + (p * x.log_softmax(-1)).sum(-1)
    return p.detach().log().mean(-1) + kept


def a_column_twice() -> Made:
    """Of three, and likely."""
    x, columns = logits(), tokens(ROWS, 3)
    columns[:, 1] = columns[:, 0]
    with torch.no_grad():
        x.scatter_(-1, columns[:, :1], 50.0)
    weights = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(5))
    return x.detach().bfloat16().requires_grad_(), columns, weights.bfloat16()


@program("repeat", a_column_twice)
def probabilities_of_columns(x: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    return (x.softmax(-1).gather(-1, columns) * weights).sum(-1)


@program("repeat", a_column_twice)
def probabilities_by_index(x: Tensor, columns: Tensor, weights: Tensor) -> Tensor:
    return (x.softmax(-1)[torch.arange(ROWS)[:, None], columns] * weights).sum(-1)


@program("signs", lambda: (logits(),))
def log_of_what_may_be_negative(x: Tensor) -> Tensor:
    """NaN where it is."""
    return (x - (x.logsumexp(-1, keepdim=True) - 50).log()).exp().sum(-1)


@program(
    "not a number",
    lambda: (with_values(logits(), r1c2=math.inf), tokens()),
    {},
    {"inner": "inductor"},
)
def cross_entropy_of_logits_over_their_norm(x: Tensor, target: Tensor) -> Tensor:
    """LogitNorm; inf / inf is NaN, and 1 / inf takes no row out."""
    return F.cross_entropy(x / (x.norm(dim=-1, keepdim=True) + 1e-7), target, reduction="none")


@program("not a number", lambda: (logits(),))
def infinity_taken_away(x: Tensor) -> Tensor:
    return (x - math.inf).softmax(-1).sum(-1) + x.logsumexp(-1)


@program("not a number", lambda: (logits(), tokens()))
def log_probs_lost_in_a_number(x: Tensor, target: Tensor) -> Tensor:
    lost = x.log_softmax(-1) - 1e30
    return lost.log_softmax(-1).gather(-1, target[:, None])[:, 0]


@program("empty rows", lambda: (logits(),))
def mean_of_no_rows(x: Tensor) -> Tensor:
    """NaN, not 0."""
    return x.logsumexp(-1).sum() + x.log_softmax(-1)[:0].mean()


@program("empty rows", lambda: (logits(),))
def roll_of_no_rows(x: Tensor) -> Tensor:
    turned = (torch.arange(0) + 1).fmod(0)
    return x.logsumexp(-1) + x[:0][turned].logsumexp(-1).sum()


@program("overflow", lambda: (logits(offset=1000),))
def exponentials_times_their_logits(x: Tensor) -> Tensor:
    return (x.exp() * x).sum(-1)


@program("long", lambda: (logits(),))
def a_long_chain_of_row_operations(x: Tensor) -> Tensor:
    row = x.logsumexp(-1)
    for _ in range(600):  # twice that in a row: more than Python's stack is deep
        row = row + 1.0
        row = -row
    return row


# ---------------------------------------------------------------- the judge


def _run(fn: Callable[..., Tensor], args: Made) -> list[Tensor]:
    copies = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    value = fn(*copies)
    weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
    leaves = [copy for copy in copies if copy.requires_grad]
    grads = torch.autograd.grad((value * weights).sum(), leaves)
    return [value.detach(), *grads]


@pytest.mark.parametrize("case", PROGRAMS)
def test_right_or_refused(case: Program) -> None:
    torch._dynamo.reset()
    args = case.make()
    (options,) = case.options
    compiled = torch.compile(case.fn, backend="slime_fused", options={**harness.OPTIONS, **options})
    eager = _run(case.fn, args)
    got = _run(compiled, args)
    with harness.in_float64():
        true = _run(case.fn, tuple(harness.to_float64(args)))
    usual = _errors_nearby(case.fn, args)
    for at, (a, e, t) in enumerate(zip(got, eager, true, strict=True)):
        assert a.dtype == e.dtype
        if at == 0:
            assert a[t.isnan()].isnan().all(), "NaN is lost"
        if e.dtype is torch.float64:  # which is eager and truth in one
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
            continue
        what = "value" if at == 0 else "gradient"
        harness.no_worse_than_eager(a, e, t, e.dtype, what, usual[at])


def _errors_nearby(fn: Callable[..., Tensor], args: Made) -> list[Tensor]:
    """Eager's errors at leaves that are up to 1 % nearer to zero, so that no budget is that of one lucky draw."""
    found: list[list[Tensor]] = []
    for seed in range(NEARBY):
        draw = torch.Generator().manual_seed(seed)
        near = tuple(_shrunk(arg, draw) for arg in args)
        eager = _run(fn, near)
        with harness.in_float64():
            true = _run(fn, tuple(harness.to_float64(near)))
        found.append([harness.finite_errors(e, t) for e, t in zip(eager, true, strict=True)])
    return [torch.cat(each) for each in zip(*found, strict=True)]


def _shrunk(arg: Any, draw: torch.Generator) -> Any:
    if not isinstance(arg, Tensor) or not arg.requires_grad:
        return arg
    factor = 1 - torch.rand(arg.shape, generator=draw) / 100
    return (arg.detach() * factor.to(arg.dtype)).requires_grad_()


def test_verify_would_have_seen_a_row_without_its_center(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose factor is zero are among the data of verify=True: the fault of the first class, put back."""
    from fx_passes.algebra.poly import Poly
    from fx_passes.walk import gradient
    from fx_passes.walk.near import Near
    from slime_compile import reports

    def center_of_every_row(c: Any, form: Any) -> Near:
        e, f = (c.rows.emit_node(poly, torch.float32, form.x) for poly in (-form.e, form.f))
        return Near(Poly.atom(c.emitter.call(torch.ops.aten.div.Tensor, e, f)), -form.e)

    monkeypatch.setattr(gradient, "affine_center", center_of_every_row)
    torch._dynamo.reset()
    x, target, keep = logits(), tokens(), some().float()
    options = {**harness.OPTIONS, "verify": True}
    compiled = torch.compile(smoothing_and_a_square, backend="slime_fused", options=options)
    compiled(x, target, keep).sum().backward()
    assert "verify=True: output" in str(reports()[-1])


def test_views_of_a_softmax_of_rows_in_another_order() -> None:
    """Arithmetic keeps the strides of the logits; the user views what torch lays out otherwise."""
    torch._dynamo.reset()

    def fn(x: Tensor, target: Tensor) -> Tensor:
        y = x.log()
        p = (y - y.max(-1, keepdim=True).values.detach()).softmax(-1)
        smoothed = F.cross_entropy(
            p.reshape(-1, VOCAB), target, reduction="none", label_smoothing=0.1
        )
        return smoothed + y[..., 0].reshape(-1)

    options = harness.OPTIONS | {"inner": "aot_eager"}
    compiled = torch.compile(fn, backend="slime_fused", options=options)
    x = logits(2, 3, VOCAB).detach().exp().transpose(0, 1).requires_grad_()
    for got, want in zip(_run(compiled, (x, tokens())), _run(fn, (x, tokens())), strict=True):
        torch.testing.assert_close(got, want)


def test_a_mean_over_any_vocabulary() -> None:
    """The number of columns is symbolic, and nothing else is left of a softmax's mean."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: x.softmax(-1).mean(-1),
        backend="slime_fused",
        options=harness.OPTIONS,
        dynamic=True,
    )
    for vocab in (VOCAB, VOCAB + 2):
        x = torch.randn(ROWS, vocab)
        torch.testing.assert_close(compiled(x), x.softmax(-1).mean(-1))


def test_a_weight_of_fewer_dimensions_than_the_logits() -> None:
    """The upstream gradient of a sum comes as [1]."""
    torch._dynamo.reset()

    def fn(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        both = torch.stack([x, x]).sum(0)
        chosen = both[torch.arange(both.shape[0]), target]
        return chosen.sum() + F.cross_entropy(both, target, weight, reduction="none")[1:].sum()

    options = harness.OPTIONS | {"min_vocab": 5, "inner": "aot_eager"}
    compiled = torch.compile(fn, backend="slime_fused", options=options, dynamic=True)
    args = logits(6, 7), tokens(6, high=7), torch.rand(7)
    for got, want in zip(_run(compiled, args), _run(fn, args), strict=True):
        torch.testing.assert_close(got, want)


def test_a_factor_of_several_parts() -> None:
    """The gradient is linear in large logits, and some parts of its factor have the maximum taken away."""

    def similarity(x: Tensor) -> Tensor:
        return F.cosine_similarity(x, x.log_softmax(-1), -1)

    assert _gradient_error(similarity, 1000) < 4


def test_log_probs_at_a_temperature_that_leave() -> None:
    """The maximum is scaled as the logits are: taken away from them before, not rounded by itself."""

    def waves(x: Tensor) -> Tensor:
        return (x / 0.7).log_softmax(-1).sin().sum(-1)

    torch._dynamo.reset()
    compiled = torch.compile(waves, backend="slime_fused", options={"min_vocab": 100})
    x = logits(64, 200, offset=1000)
    true = waves(x.double())
    error, plain = ((fn(x) - true).square().mean() for fn in (compiled, waves))
    assert error < 0.1 * plain


def _gradient_error(fn: Callable[[Tensor], Tensor], offset: float) -> float:
    """The square of the gradient's error, over 40 draws, in units of plain eager code's."""
    torch._dynamo.reset()

    def gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(fn(leaf).sum(), leaf)[0]

    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    ours = plain = 0.0
    for seed in range(40):
        x = logits(offset=offset, seed=seed, grad=False)
        true = gradient(fn, x.double())
        ours += float((gradient(compiled, x) - true).square().sum())
        plain += float((gradient(fn, x) - true).square().sum())
    return ours / plain


@harness.each_inner
def test_half_logits_over_their_norm_fuse(inner: str) -> None:
    """Their divisor is limited by operators that inductor still compiles after its decompositions."""
    torch._dynamo.reset()
    earlier = len(slime_compile.reports())
    fn = cross_entropy_of_logits_over_their_norm
    options = harness.OPTIONS | {"inner": inner}
    compiled = torch.compile(fn, backend="slime_fused", options=options)
    args = logits(grad=False).half().requires_grad_(), tokens()
    for got, want in zip(_run(compiled, args), _run(fn, args), strict=True):
        torch.testing.assert_close(got, want, rtol=4e-3, atol=2e-4)
    assert harness.merged(slime_compile.reports()[earlier:])["fused"] == 2


@pytest.mark.parametrize("offset", [100.0, 1000.0])
def test_similarity_to_cooler_log_probs(offset: float) -> None:
    """Large logits over their norm, and scaled ones with their maximum taken away, cancel in the gradient."""

    def similarity(x: Tensor) -> Tensor:
        return F.cosine_similarity(x, (x / 2).log_softmax(-1), -1)

    assert _gradient_error(similarity, offset) < 4


@pytest.mark.parametrize("rounded", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [False, True])
def test_given_rows_that_are_rounded_stay_rounded(rounded: torch.dtype, spread: bool) -> None:
    torch._dynamo.reset()

    def fn(x: Tensor, tau: Tensor, target: Tensor) -> Tensor:
        rows = tau[:, None].expand_as(x).to(rounded) if spread else tau.to(rounded)[:, None]
        return F.cross_entropy(x * rows, target, reduction="none")

    args = logits(), torch.linspace(1.0001, 1.3, ROWS), tokens()
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    for got, want in zip(_run(compiled, args), _run(fn, args), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


HALF_ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "less": lambda x, tau: x - tau,
    "plus": lambda x, tau: tau + x,
    "times": lambda x, tau: x * tau,
    "over": lambda x, tau: x / tau,
    "over, less": lambda x, tau: x / tau - 2 * tau,
    "over, rounded": lambda x, tau: (x.float() / tau).to(x.dtype),
    "less, rounded": lambda x, tau: (x.float() - tau).to(x.dtype),
    "less, of some rows": lambda x, tau: (x - tau).clone()[1:],
    "log-probs, plus": lambda x, tau: x.log_softmax(-1) + 300 * tau,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", HALF_ARITHMETIC.values(), ids=HALF_ARITHMETIC)
def test_rounded_logits_meet_their_own_logsumexp(
    change: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    """At an offset the rounding of `x / tau` is larger than its log-probs."""
    torch._dynamo.reset()

    def log_probs(x: Tensor, tau: Tensor) -> Tensor:
        logits = change(x, tau[:, None]).float()
        return logits - logits.logsumexp(-1, True)

    compiled = torch.compile(log_probs, backend="slime_fused", options=harness.OPTIONS)
    args = logits(offset=-1e4, grad=False).to(dtype), torch.linspace(1.01, 1.4, ROWS).to(dtype)
    torch.testing.assert_close(compiled(*args), log_probs(*args), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tau", [1.0, 1.3])
def test_log_probs_that_are_rounded_are_no_logits(tau: float) -> None:
    """The policy's own log-prob fuses beside a divergence that does not."""
    torch._dynamo.reset()

    def loss(x: Tensor, reference: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, others = (x / tau).log_softmax(-1), reference.log_softmax(-1)
        divergence = (log_probs.exp() * (log_probs - others)).sum(-1)
        return divergence, log_probs.gather(-1, target[:, None])

    compiled = torch.compile(loss, backend="slime_fused", options=harness.OPTIONS)
    given = [logits(seed=seed, offset=1e3, grad=False).bfloat16() for seed in (0, 1)]
    found = compiled(given[0].requires_grad_(), given[1], tokens())
    assert "log-prob" in {value.kind for value in slime_compile.reports()[-1].graphs[0].values}
    true = loss(*(each.double() for each in given), tokens())
    plain = loss(*given, tokens())
    for got, eager, wanted in zip(found, plain, true, strict=True):
        mine, theirs = ((each - wanted).abs().max() for each in (got, eager))
        assert mine <= 2 * theirs


def test_products_that_overflow_are_no_mask() -> None:
    """-10 * 1e38 is -inf in float32; exp(-10) is a number."""
    torch._dynamo.reset()

    def fn(x: Tensor) -> Tensor:
        return torch.where(x * 1e38 == -torch.inf, 0.0, x.exp()).sum(-1)

    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    args = (logits() - 5,)
    for got, want in zip(_run(compiled, args), _run(fn, args), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("given", "between", "tolerance"),
    [("float16", "bfloat16", 1e-5), ("bfloat16", "float16", 1e-5), ("float64", "float32", 1e-12)],
)
def test_logits_that_are_rounded_stay_rounded(given: str, between: str, tolerance: float) -> None:
    """Of the halves, neither is narrower than the other."""
    torch._dynamo.reset()
    wide = torch.float64 if given == "float64" else torch.float32

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x.to(getattr(torch, between)).to(wide), target, reduction="none")

    x, target = logits(grad=False).to(getattr(torch, given)), tokens()
    if given == "float64":
        x /= 3
    compiled = torch.compile(loss, backend="slime_fused", options=harness.OPTIONS)
    torch.testing.assert_close(compiled(x, target), loss(x, target), rtol=tolerance, atol=tolerance)
