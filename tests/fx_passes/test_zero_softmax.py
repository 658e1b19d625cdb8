"""Values that are another where a softmax is zero: NaN of `p / p`, the number that `where(p > 0, ..., number)` puts.

Compared with eager code in the same dtype: in float64 other elements are zero. What a product with that very softmax
leaves of them is what the spellings of entropies fuse; everything else has to see the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import harness

ROWS, VOCAB = 6, 37

Loss = Callable[[Tensor, Tensor], Tensor]
Made = Callable[[], Tensor]
PROGRAMS: list[tuple[Loss, Made]] = []


def program(*made: Made) -> Callable[[Loss], Loss]:
    """`fn(x [N, V], w [N])` gives numbers per row; x is each of those that are `made`."""

    def enter(fn: Loss) -> Loss:
        PROGRAMS.extend((fn, make) for make in made or (spread, masked))
        return fn

    return enter


def plain() -> Tensor:
    return spread() / 60


def spread() -> Tensor:
    """Logits of which a part is too far below the maximum for a probability in float32."""
    return 60 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))


def masked() -> Tensor:
    return spread().div(20).masked_fill(spread().roll(1, 0) > 40, -math.inf)


def infinite() -> Tensor:
    x = spread() / 20
    x[1, 3] = math.inf
    return x


def poisoned() -> Tensor:
    x = spread() / 20
    x[1, 3] = math.nan
    return x


def put(x: Tensor, value: Tensor) -> Tensor:
    return torch.where(x.softmax(-1) > 0, value, 3.0)


# ---------------------------------------------------------------- beside something else


@program()
def the_softmax_of_another_scale(x: Tensor, w: Tensor) -> Tensor:
    return (put(x, w[:, None]) * (x / 60).softmax(-1)).sum(-1)


@program()
def an_exponential_with_another_shift(x: Tensor, w: Tensor) -> Tensor:
    larger = (x - x.amax(-1, keepdim=True) + 60).exp()
    return ((put(x, w[:, None]) * larger + 1e-6).log() * larger).log1p().sum(-1)


@program()
def a_column_beside_another_shift(x: Tensor, w: Tensor) -> Tensor:
    larger = (x - x.amax(-1, keepdim=True) + 60).exp()
    column = x.detach().topk(12).indices[:, -1:]
    return (put(x, w[:, None]) * larger).gather(-1, column).log().squeeze(-1)


@program()
def two_softmaxes(x: Tensor, w: Tensor) -> Tensor:
    both = put(x / 30, x) + put(x, w[:, None])
    return (both * (x / 30).softmax(-1)).sum(-1) + (both * x.softmax(-1)).sum(-1)


@program()
def another_mask(x: Tensor, w: Tensor) -> Tensor:
    rest = put(x, torch.zeros_like(x)) + x.softmax(-1)
    return (rest * torch.where(x.softmax(-1) > 0, x, 5.0)).sum(-1) + w


@program()
def the_place_of_another(x: Tensor, w: Tensor) -> Tensor:
    p, q = x.softmax(-1), (x * 1.5).softmax(-1)
    return torch.where(q > 0, q, torch.where(p > 0, torch.zeros_like(p), 5.0)).sum(-1)


@program()
def other_rows(x: Tensor, w: Tensor) -> Tensor:
    value, p = put(x, w[:, None]), x.softmax(-1)
    return (value[:2] * (p[2:4] + 1)).sum(-1) + (value[1:3] * p[1:3]).sum(-1)


# ---------------------------------------------------------------- read


@program()
def its_maximum(x: Tensor, w: Tensor) -> Tensor:
    return put(x, x.log_softmax(-1)).amax(-1) + x.logsumexp(-1)


@program()
def the_place_of_its_maximum(x: Tensor, w: Tensor) -> Tensor:
    return put(x, x.log_softmax(-1)).argmax(-1) + x.logsumexp(-1)


@program()
def its_exponential(x: Tensor, w: Tensor) -> Tensor:
    return put(x, x.log_softmax(-1)).exp().sum(-1) + x.logsumexp(-1)


@program()
def its_column(x: Tensor, w: Tensor) -> Tensor:
    lowest = x.detach().argmin(-1, keepdim=True)
    return put(x, x.log_softmax(-1)).gather(-1, lowest).squeeze(-1) + x.logsumexp(-1)


@program()
def its_sum(x: Tensor, w: Tensor) -> Tensor:
    return put(x, w[:, None]).sum(-1) + x.logsumexp(-1)


@program()
def its_sum_beside_a_softmax(x: Tensor, w: Tensor) -> Tensor:
    return (put(x, w[:, None]) + x.softmax(-1)).sin().sum(-1)


@program()
def its_product_with_logits(x: Tensor, w: Tensor) -> Tensor:
    return (put(x, w[:, None]) * x.clamp(min=-1e4)).sum(-1) + x.logsumexp(-1)


@program()
def its_comparison(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(put(x, x.log_softmax(-1)) == -math.inf, 1.0, x.softmax(-1)).sum(-1)


@program()
def log_probs_at_a_temperature(x: Tensor, w: Tensor) -> Tensor:
    cooler = (x - x.logsumexp(-1, keepdim=True)) / (w.abs() + 1)[:, None]
    return put(x, cooler).sin().sum(-1) + x.logsumexp(-1)


# ---------------------------------------------------------------- NaN


def over_itself(x: Tensor, factor: Tensor) -> Tensor:
    return x.softmax(-1) * factor / x.softmax(-1)


@program()
def a_quotient_that_is_asked_for_nan(x: Tensor, w: Tensor) -> Tensor:
    quotient = over_itself(x.detach(), x.detach())
    return torch.where(quotient.isnan(), 1.0, x.softmax(-1)).sum(-1)


@program()
def the_place_of_a_quotients_nan(x: Tensor, w: Tensor) -> Tensor:
    return over_itself(x, x).argmax(-1) + x.logsumexp(-1)


@program(plain)
def a_quotient_by_some_rows(x: Tensor, w: Tensor) -> Tensor:
    some = x.softmax(-1) * (w > 0)[:, None]
    return (some * x / some * x.softmax(-1)).sum(-1).nan_to_num(7.0)


@program(poisoned)
def both_factors_are_masked(x: Tensor, w: Tensor) -> Tensor:
    p = x.softmax(-1)
    return (torch.where(p > 0, p, 0.0) * torch.where(p > 0, x.log_softmax(-1), 0.0)).sum(-1)


@program(poisoned)
def the_log_probs_are_masked(x: Tensor, w: Tensor) -> Tensor:
    p = x.softmax(-1)
    return (p * torch.where(p > 0, x.log_softmax(-1), 0.0)).sum(-1).nan_to_num(7.0)


# ---------------------------------------------------------------- infinities


@program(spread, masked)
def infinite_numbers_per_row(x: Tensor, w: Tensor) -> Tensor:
    total = x.log_softmax(-1) + torch.where(w > 1, math.inf, w)[:, None]
    return torch.where(total.isinf(), 0.0, total.exp()).sum(-1)


@program(spread, masked, infinite)
def infinite_log_probs(x: Tensor, w: Tensor) -> Tensor:
    log_p = x.log_softmax(-1)
    return torch.where(log_p.isinf(), 0.0, log_p.exp() * log_p).sum(-1)


@program(spread, masked, infinite)
def other_infinite_log_probs(x: Tensor, w: Tensor) -> Tensor:
    log_p = (x / 30).log_softmax(-1)
    return torch.where(log_p.isinf(), 0.5, x.softmax(-1)).sum(-1)


@pytest.mark.parametrize(("fn", "make"), PROGRAMS)
def test_what_eager_code_computes(fn: Loss, make: Made) -> None:
    torch._dynamo.reset()
    w = torch.linspace(-1.0, 2.0, ROWS)
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    want, got = (_run(each, make(), w) for each in (fn, compiled))
    for expected, found in zip(want, got, strict=True):
        known = (
            ~expected.isnan()
        )  # where a logit is -inf, eager code may have NaN where the limit is 0
        torch.testing.assert_close(found[known], expected[known], rtol=1e-4, atol=1e-4)


def _run(fn: Loss, x: Tensor, w: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    value = fn(x, w)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    return [value.detach(), gradient]
