"""Numbers per row in which an offset of the logits cancels have no digit of it, whoever subtracts them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import slime_compile
from tests.support import harness

ROWS, VOCAB = 24, 37
OFFSET = 2.0**10

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


VALUES: list[Value] = [
    entropy, tempered_entropy, log_prob, selected_log_prob, negative_log_prob, advantage,
    log_of_the_sum_of_squares, two_steps, row_by_row, chunk_by_chunk,
]  # fmt: skip


def logits(dtype: torch.dtype) -> Tensor:
    """Such that an offset is added without a rounding."""
    x = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    return (x * 2**10).round().div(2**10).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fn", VALUES)
def test_an_offset_changes_no_digit(fn: Value, dtype: torch.dtype) -> None:
    """And all of them are those of numbers as large as the logits are without it."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    target = torch.arange(ROWS)
    near, far = (
        compiled((logits(dtype) + offset).requires_grad_(), target) for offset in (0.0, OFFSET)
    )
    assert torch.equal(near, far)
    assert slime_compile.reports()[-1].fused
    truth = fn(logits(torch.float64), target)
    limit = 4 * torch.finfo(dtype).eps * logits(dtype).abs().max()
    assert (near.double() - truth).abs().max() <= limit


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
    if spoilt == -math.inf:  # absent: its probability is 0, and so is what it is multiplied with
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
