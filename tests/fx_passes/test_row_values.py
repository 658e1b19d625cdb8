"""Numbers per row that the program adds itself: no less accurate than eager code at an offset of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from tests.support import harness

ROWS, VOCAB = 24, 37
OFFSET = 2.0**10
TARGET = torch.arange(ROWS)

Value = Callable[[Tensor, Tensor], Tensor]


def taken(z: Tensor, target: Tensor) -> Tensor:
    return z.gather(-1, target[:, None])


def expected(z: Tensor, of: Tensor) -> Tensor:
    return (z.softmax(-1) * of).sum(-1)


def entropy(x: Tensor, target: Tensor) -> Tensor:
    return x.logsumexp(-1) - expected(x, x)


def tempered_entropy(x: Tensor, target: Tensor) -> Tensor:
    return entropy(x / 0.7, target)


def log_prob(x: Tensor, target: Tensor) -> Tensor:
    return taken(x, target).squeeze(-1) - x.logsumexp(-1)


def selected_log_prob(x: Tensor, target: Tensor) -> Tensor:
    return taken(x, target)[:, 0] - x.logsumexp(-1)


def negative_log_prob(x: Tensor, target: Tensor) -> Tensor:
    return (x * 1.25).logsumexp(-1, keepdim=True) - taken(x * 1.25, target)


def advantage(x: Tensor, target: Tensor) -> Tensor:
    return taken(x, target)[:, 0] - expected(x, x)


def log_of_the_sum_of_squares(x: Tensor, target: Tensor) -> Tensor:
    return (2 * x).logsumexp(-1) - 2 * x.logsumexp(-1)


def two_steps(x: Tensor, target: Tensor) -> Tensor:
    return x.logsumexp(-1) - taken(x, target)[:, 0] + expected(x, x.log_softmax(-1))


def row_by_row(x: Tensor, target: Tensor) -> Tensor:
    """TRL's `selective_log_softmax`."""
    return taken(x, target)[:, 0] - torch.stack([row.logsumexp(-1) for row in x])


def chunk_by_chunk(x: Tensor, target: Tensor) -> Tensor:
    sums = [chunk.logsumexp(-1, keepdim=True) for chunk in x.split(7)]
    return torch.cat(sums) - taken(x, target)


def one_hot_log_prob(x: Tensor, target: Tensor) -> Tensor:
    return (F.one_hot(target, VOCAB).to(x.dtype) * x).sum(-1) - x.logsumexp(-1)


def smoothed(x: Tensor, target: Tensor) -> Tensor:
    return x.logsumexp(-1) - 0.9 * taken(x, target)[:, 0] - 0.1 * x.mean(-1)


def from_the_mean(x: Tensor, target: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True) - x.logsumexp(-1, keepdim=True)


def temperatures(x: Tensor, target: Tensor) -> Tensor:
    """One for each row."""
    return (0.7 + 0.1 * (target % 5)).to(x.dtype)


def log_prob_by_row(x: Tensor, target: Tensor) -> Tensor:
    return log_prob(x / temperatures(x, target)[:, None], target)


def entropy_by_row(x: Tensor, target: Tensor) -> Tensor:
    return entropy(x / temperatures(x, target)[:, None], target)


def smoothed_by_row(x: Tensor, target: Tensor) -> Tensor:
    return smoothed(x / temperatures(x, target)[:, None], target)


def one_hot_by_row(x: Tensor, target: Tensor) -> Tensor:
    return one_hot_log_prob(x / temperatures(x, target)[:, None], target)


def log_prob_times_a_tensor(x: Tensor, target: Tensor) -> Tensor:
    return log_prob(x * temperatures(x, target)[3], target)


def smoothed_times_a_row(x: Tensor, target: Tensor) -> Tensor:
    return smoothed(x * temperatures(x, target)[:, None], target)


def log_prob_over_a_tensor(x: Tensor, target: Tensor) -> Tensor:
    return log_prob(x / temperatures(x, target)[3], target)


def of_parts(fn: Value) -> Value:
    """Of all but the last token of four sequences, flattened: rows that are copied. The last is the first again."""

    def parts(x: Tensor, target: Tensor) -> Tensor:
        some = x.view(4, 6, VOCAB)[:, :-1].reshape(-1, VOCAB)
        found = fn(some, target.view(4, 6)[:, :-1].reshape(-1)).view(4, 5)
        return torch.cat([found, found[:, :1]], 1).flatten()

    parts.__name__ = f"{fn.__name__}_of_parts"
    return parts


def turned(fn: Value) -> Value:
    """Of sequences by batches, as Megatron has them."""

    def of_turned(x: Tensor, target: Tensor) -> Tensor:
        rows = x.view(4, 6, VOCAB).transpose(0, 1).reshape(-1, VOCAB)
        return fn(rows, target.view(4, 6).t().reshape(-1)).view(6, 4).t().reshape(-1)

    of_turned.__name__ = f"{fn.__name__}_turned"
    return of_turned


def divergence(x: Tensor, target: Tensor) -> Tensor:
    """From itself at another temperature."""
    return expected(x, x.log_softmax(-1) - (x / 2).log_softmax(-1))


MOVED = [entropy, log_prob, one_hot_log_prob, smoothed, entropy_by_row, log_prob_by_row, divergence]

VALUES: list[Value] = [
    entropy, tempered_entropy, log_prob, selected_log_prob, negative_log_prob, advantage,
    log_of_the_sum_of_squares, two_steps, row_by_row, chunk_by_chunk, one_hot_log_prob, smoothed,
    from_the_mean, log_prob_by_row, entropy_by_row, smoothed_by_row, one_hot_by_row,
    log_prob_times_a_tensor, smoothed_times_a_row, log_prob_over_a_tensor, divergence,
    *(move(fn) for move in (of_parts, turned) for fn in MOVED),
]  # fmt: skip


def logits(dtype: torch.dtype) -> Tensor:
    """Such that an offset is added without a rounding."""
    x = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    return (x * 2**10).round().div(2**10).to(dtype)


@pytest.mark.parametrize("offset", [0.0, OFFSET])
@pytest.mark.parametrize("fn", VALUES)
def test_no_less_accurate_than_eager(fn: Value, offset: float) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    x, target = logits(torch.float32) + offset, torch.arange(ROWS)
    got = compiled(x.clone().requires_grad_(), target)
    assert slime_compile.reports()[-1].fused
    harness.no_worse_than_eager(got.detach(), fn(x, target), fn(x.double(), target), torch.float32)


@pytest.mark.parametrize("fn", VALUES)
@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite(fn: Value, spoilt: float) -> None:
    """A row of nothing but -inf too: NaN wherever eager code has it; a row with +inf may be NaN."""
    torch._dynamo.reset()
    x = logits(torch.float32)
    x[3, 5], x[7] = spoilt, -math.inf
    target = torch.arange(ROWS)
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    with torch.no_grad():
        want, got = fn(x, target).flatten(), compiled(x, target).flatten()
    clean = torch.ones(ROWS, dtype=torch.bool)
    clean[[3, 7]] = False
    torch.testing.assert_close(got[clean], want[clean], rtol=1e-5, atol=1e-5)
    assert got[7].isnan()
    if spoilt == -math.inf and want[3].isinf():  # a mean of all logits
        assert got[3] == want[3]
    elif spoilt == -math.inf:  # absent: its probability is 0, and so is what it is multiplied with
        assert got[3].isfinite()
    else:
        assert got[3].isnan()


def test_what_would_hide_an_empty_row_stays() -> None:
    """`logsumexp - max` is `log_sum`, which is -inf where eager code has NaN."""
    torch._dynamo.reset()

    def mass(x: Tensor) -> Tensor:
        return x.logsumexp(-1) - x.amax(-1)

    x = logits(torch.float32)
    x[3] = -math.inf
    with torch.no_grad():
        got = torch.compile(mass, backend="slime_fused", options=harness.OPTIONS)(x)
    assert got[3].isnan()


def mass(x: Tensor, z: Tensor) -> Tensor:
    return x.logsumexp(-1) - (x.amax(-1) + z.amax(-1)) + 0 * z.logsumexp(-1)


def mass_and_entropy(x: Tensor, z: Tensor) -> Tensor:
    return (x.logsumexp(-1) + z.logsumexp(-1)) - (x.amax(-1) + expected(z, z))


@pytest.mark.parametrize("fn", [mass, mass_and_entropy])
def test_other_logits_do_not_show_an_empty_row(fn: Value) -> None:
    torch._dynamo.reset()
    x, z = logits(torch.float32), logits(torch.float32).flip(0)
    x[3] = -math.inf
    with torch.no_grad():
        got = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)(x, z)
        want = fn(x, z)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_a_factor_of_zero_takes_out_its_row() -> None:
    """The logits are not looked at there: all classes have the same probability."""
    torch._dynamo.reset()

    def weighed(x: Tensor, factor: Tensor) -> Tensor:
        return log_prob(x * factor[:, None], torch.arange(ROWS)) + 1 / (1 + factor)

    x, factor = logits(torch.float32) + OFFSET, torch.linspace(0.5, 1.5, ROWS)
    factor[3], factor[5], x[3, 3] = 0.0, -0.5, -math.inf
    with torch.no_grad():
        got = torch.compile(weighed, backend="slime_fused", options=harness.OPTIONS)(x, factor)
        want = weighed(x.double(), factor.double())
    want[3] = 1 - math.log(VOCAB)
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=OFFSET * 2**-22)


def test_two_factors_of_which_one_is_zero() -> None:
    """What is multiplied with the other alone stays."""
    torch._dynamo.reset()

    def weighed(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        z = x * one[:, None] * two[:, None]
        kept = one * -log_prob(x, TARGET)
        return (one * (two * x.logsumexp(-1)) + kept) - taken(z, TARGET)[:, 0]

    x, one, two = logits(torch.float32), torch.linspace(0.5, 1.5, ROWS), torch.ones(ROWS)
    two[4] = 0.0
    with torch.no_grad():
        compiled = torch.compile(weighed, backend="slime_fused", options=harness.OPTIONS)
        torch.testing.assert_close(compiled(x, one, two), weighed(x, one, two))


def given_temperature(x: Tensor, temperature: Tensor) -> Tensor:
    return entropy(x / temperature[:, None], TARGET)


@pytest.mark.parametrize("spoilt", [0.0, math.nan])
def test_a_temperature_that_cancels_is_shown(spoilt: float) -> None:
    torch._dynamo.reset()
    temperature = torch.linspace(0.5, 1.5, ROWS)
    temperature[3] = spoilt
    with torch.no_grad():
        compiled = torch.compile(given_temperature, backend="slime_fused", options=harness.OPTIONS)
        got = compiled(logits(torch.float32), temperature)
    assert got.isnan().nonzero().tolist() == [[3]]


def test_a_given_number_that_nothing_would_show_stays() -> None:
    torch._dynamo.reset()

    def shifted(x: Tensor, given: Tensor) -> Tensor:
        return (x.logsumexp(-1) + given) - (expected(x, x) + given)

    given = torch.ones(ROWS)
    given[3] = math.nan
    with torch.no_grad():
        compiled = torch.compile(shifted, backend="slime_fused", options=harness.OPTIONS)
        assert compiled(logits(torch.float32), given)[3].isnan()


def test_a_column_that_misses() -> None:
    """The row has no logit, and the whole logsumexp."""
    torch._dynamo.reset()
    target = TARGET.masked_fill(TARGET % 3 == 0, -1)

    def missed(x: Tensor) -> Tensor:
        column = (target[:, None] == torch.arange(VOCAB)).to(x.dtype)
        return x.logsumexp(-1) - (column * x).sum(-1)

    x = (logits(torch.float32) + OFFSET).requires_grad_()
    got = torch.compile(missed, backend="slime_fused", options=harness.OPTIONS)(x)
    want = missed(x.double())
    hit = target >= 0
    torch.testing.assert_close(got.double()[~hit], want[~hit], rtol=1e-6, atol=0)
    torch.testing.assert_close(got.double()[hit], want[hit], rtol=1e-6, atol=OFFSET * 2**-22)
