"""Gradients of slices of two logits are computed for all rows, and are zero where the slice does not reach."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes import pipeline
from fx_passes.sliced_gradients import compute_all_rows
from tests.support.harness import OPTIONS, each_inner, no_worse_than_eager

BATCH, LENGTH, VOCAB = 3, 11, 40
Loss = Callable[..., Tensor]
"""Of student's and teacher's logits `[B, S, V]` and targets `[B, S]`, one number per row that it keeps."""

GARBAGE = (math.nan, math.inf, -math.inf)


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many gradients each graph had that were rewritten."""
    counts: list[int] = []

    def counting(*args: Any) -> int:
        counts.append(compute_all_rows(*args))
        return counts[-1]

    monkeypatch.setattr(pipeline, "compute_all_rows", counting)
    return counts


def forward_kl(x: Tensor, z: Tensor) -> Tensor:
    kept = (z.softmax(-1) * x.log_softmax(-1)).masked_fill(x.isinf(), 0)
    return -kept.sum(-1)


def reverse_kl(x: Tensor, z: Tensor) -> Tensor:
    return (x.softmax(-1) * (x.log_softmax(-1) - z.log_softmax(-1))).sum(-1)


def jensen_shannon(x: Tensor, z: Tensor) -> Tensor:
    p, q = x.log_softmax(-1), z.log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([p, q]), 0) - math.log(2)
    to_p, to_q = (F.kl_div(mixture, each, reduction="none", log_target=True) for each in (p, q))
    return (to_p + to_q).sum(-1) / 2


def with_target(x: Tensor, z: Tensor, target: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return reverse_kl(x, z) + F.cross_entropy(flat, target.flatten(), reduction="none").view_as(
        target
    )


REWRITTEN: dict[str, Loss] = {
    "shifted": lambda x, z, t: reverse_kl(x[:, :-1], z[:, :-1]),
    "shifted, forward": lambda x, z, t: forward_kl(x[:, :-1], z[:, :-1]),
    "shifted, mixture": lambda x, z, t: jensen_shannon(x[..., :-1, :], z[..., :-1, :]),
    "shifted, temperature": lambda x, z, t: reverse_kl(x[:, :-1] / 2, z[:, :-1] / 2),
    "without the first": lambda x, z, t: reverse_kl(x[:, 1:], z[:, 1:]),
    "in the middle": lambda x, z, t: reverse_kl(x[:, 2:-1], z[:, 2:-1]),
    "bounds of two kinds": lambda x, z, t: reverse_kl(x[:, 1:-1], z[:, 1 : z.shape[1] - 1]),
    "a slice of a slice": lambda x, z, t: reverse_kl(x[:, :-1][:, 2:], z[:, :-1][:, 2:]),
    "some samples": lambda x, z, t: reverse_kl(x[1:], z[1:]),
    "rows of a matrix": lambda x, z, t: reverse_kl(x.flatten(0, 1)[:-2], z.flatten(0, 1)[:-2]),
    "flattened": lambda x, z, t: reverse_kl(
        x[:, :-1].reshape(-1, x.shape[-1]), z[:, :-1].contiguous().view(-1, z.shape[-1])
    ),
    "weights per row": lambda x, z, t: reverse_kl(x[:, :-1], z[:, :-1]) * (t[:, 1:] + 0.5),
    "weights before the sum": lambda x, z, t: reverse_kl(
        x[:, :-1] * (t[:, 1:, None] + 0.5), z[:, :-1]
    ),
    "weights per sample": lambda x, z, t: reverse_kl(x[:, :-1] * (t[:, :1, None] + 0.5), z[:, :-1]),
    "weights per place": lambda x, z, t: reverse_kl(x[:, :-1] * (t[:1, 1:, None] + 0.5), z[:, :-1]),
    "weights per column": lambda x, z, t: (
        (x[:, :-1].log_softmax(-1) - z[:, :-1].log_softmax(-1)).square()
        * torch.linspace(0, 1, x.shape[-1])
    ).sum(-1),
    "a weight of each element": lambda x, z, t: (
        (x[:, :-1].log_softmax(-1) - z[:, :-1].log_softmax(-1)).square() * z.sigmoid()[:, :-1]
    ).sum(-1),
    "numbers divided by those of the rows kept": lambda x, z, t: (
        (x[:, :-1].log_softmax(-1) - z[:, :-1].log_softmax(-1)).square()
        * (torch.arange(x.shape[-1]) % (t[:, 1:, None] + 0.5))
    ).sum(-1),
    "padding left out": lambda x, z, t: reverse_kl(x[:, :-1], z[:, :-1]).masked_fill(
        t[:, 1:] < 9, 0
    ),
    "a sum of many terms": lambda x, z, t: (
        F.kl_div((x[:, :-1] / 2).log_softmax(-1), (z[:, :-1] / 2).softmax(-1), reduction="none")
        .sum(-1)
        .sub(x[:, :-1].log_softmax(-1).gather(-1, t[:, 1:, None])[..., 0])
    ),
    "and a cross entropy": lambda x, z, t: with_target(x[:, :-1], z[:, :-1], t[:, 1:]),
}

STAYS: dict[str, Loss] = {
    "all rows": lambda x, z, t: reverse_kl(x, z),
    "few rows": lambda x, z, t: reverse_kl(x[:, -4:], z[:, -4:]),
    "every second row": lambda x, z, t: reverse_kl(x[:, ::2], z[:, ::2]),
    "a teacher of as many rows": lambda x, z, t: reverse_kl(x[:, :-1], z.roll(1, 2)[:, 1:]),
    "nothing but log-probs": lambda x, z, t: (
        x[:, :-1].log_softmax(-1).gather(-1, t[:, 1:, None])[..., 0]
    ),
    "nothing is reduced": lambda x, z, t: (
        x[:, :-1].log_softmax(-1)[..., 0] + (x.sin() * z)[:, :-1].sum(-1)
    ),
    "columns": lambda x, z, t: reverse_kl(x[..., :-1], z[..., :-1]),
    "integers divided by those of the rows kept": lambda x, z, t: (
        (x[:, :-1].log_softmax(-1) - z[:, :-1].log_softmax(-1)).square()
        * (torch.arange(x.shape[-1]) % (t[:, 1:, None] + 1))
    ).sum(-1),
    "integers divided, rounded": lambda x, z, t: (
        (x[:, :-1].log_softmax(-1) - z[:, :-1].log_softmax(-1)).square()
        * torch.div(torch.arange(x.shape[-1]), t[:, 1:, None] + 1, rounding_mode="floor")
    ).sum(-1),
    "running sums over rows": lambda x, z, t: reverse_kl(x[:, :-1], z[:, :-1].cumsum(1) / 9),
}


def draw(seed: int, vocab: int = VOCAB, batch: int = BATCH, length: int = LENGTH) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x, z = (3 * torch.randn(batch, length, vocab, generator=drawn) for _ in range(2))
    return [x, z, torch.randint(vocab, (batch, length), generator=drawn)]


def run(loss: Loss, given: list[Tensor], both: bool = False) -> list[Tensor]:
    x, z, target = given
    x, z = x.detach().requires_grad_(), z.detach().requires_grad_(both)
    value = loss(x, z, target)
    weight = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value)
    leaves = [x, z] if both else [x]
    return [value.detach(), *torch.autograd.grad((value * weight).sum(), leaves)]


def check(loss: Loss, given: list[list[Tensor]], both: bool = False, **how: Any) -> None:
    """As near to the truth as eager code is in any of the draws; NaN where eager code has some."""
    torch._dynamo.reset()
    fused = torch.compile(loss, backend="slime_fused", options=OPTIONS, **how)
    eager = [run(loss, each, both) for each in given]
    truth = [run(loss, [each[0].double(), each[1].double(), each[2]], both) for each in given]
    for number, each in enumerate(given):
        for at, actual in enumerate(run(fused, each, both)):
            errors = [(e[at] - t[at]).flatten() for e, t in zip(eager, truth, strict=True)]
            usual = torch.cat(errors)
            plain, true = eager[number][at], truth[number][at]
            assert actual.dtype == plain.dtype
            no_worse_than_eager(
                actual, plain, true, plain.dtype, more_errors=usual[usual.isfinite()].abs()
            )


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name: str, rewritten: list[int]) -> None:
    check(REWRITTEN[name], [draw(seed) for seed in range(6)])
    assert rewritten[0] > 0


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str, rewritten: list[int]) -> None:
    check(STAYS[name], [draw(seed) for seed in range(6)])
    assert not any(rewritten)


LEFT_OUT = {
    "shifted": (-1,),
    "shifted, mixture": (-1,),
    "without the first": (0,),
    "in the middle": (0, 1, -1),
    "flattened": (-1,),
}


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_left_out_may_be_anything(name: str, garbage: float, rewritten: list[int]) -> None:
    given = [draw(seed) for seed in range(4)]
    for x, z, _ in given:
        for row in LEFT_OUT[name]:
            x[:, row] = garbage
            z[1, row, 3] = garbage
    check(REWRITTEN[name], given)
    assert rewritten[0] > 0


Given = dict[str, Tensor]

CHANGED = ("student", "teacher", "columns", "places")


def of_what_changes(name: str, given: Given) -> Tensor:
    """Backward reads all of it as it was before."""
    x, z = given["student"][:, :-1] / 0.7, given["teacher"][:, :-1]
    value = forward_kl(x, z) + reverse_kl(x + given["columns"], z + given["places"])
    given[name].mul_(0.5)
    return value


def part_of_what_changes(name: str, given: Given) -> Tensor:
    x, z = given["student"][:, :-1], given["teacher"][:, :-1]
    value = reverse_kl(x, z)
    {"student": x, "teacher": z}[name].zero_()
    return value


@each_inner
@pytest.mark.parametrize(
    ("loss", "name"),
    [(of_what_changes, name) for name in CHANGED]
    + [(part_of_what_changes, name) for name in CHANGED[:2]],
)
def test_what_forward_changes(loss: Callable[[str, Given], Tensor], name: str, inner: str) -> None:
    def outcome(fn: Callable[[str, Given], Tensor]) -> list[Tensor]:
        x, z, target = draw(0)
        leaf = x.requires_grad_()
        given = {
            "student": leaf * 1,
            "teacher": z,
            "columns": torch.linspace(-1, 1, VOCAB),
            "places": (target[:, 1:, None] + 9) * torch.linspace(0, 1, VOCAB),
        }
        value = fn(name, given)
        weight = torch.linspace(0.5, 1.5, value.numel()).view_as(value)
        return [value.detach(), *torch.autograd.grad((value * weight).sum(), leaf), given[name]]

    torch._dynamo.reset()
    options = OPTIONS | {"inner": inner}
    fused = torch.compile(loss, backend="slime_fused", options=options)
    for got, plain in zip(outcome(fused), outcome(loss), strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["shifted", "shifted, mixture", "shifted, forward"])
def test_both_logits_have_gradients(name: str, rewritten: list[int]) -> None:
    check(REWRITTEN[name], [draw(seed) for seed in range(6)], both=True)
    assert rewritten[0] == 2


@pytest.mark.parametrize("name", REWRITTEN)
def test_as_many_rows_as_columns(name: str) -> None:
    """Nothing is told by its size alone: 2 x 4 rows of 8 columns, and a sample of 8."""
    options = OPTIONS | {"min_vocab": 8}
    for batch, length in ((2, 5), (1, 9), (3, 3)):
        given = [draw(seed, 8, batch, length) for seed in range(2)]
        torch._dynamo.reset()
        fused = torch.compile(REWRITTEN[name], backend="slime_fused", options=options)
        for each in given:
            for got, plain in zip(run(fused, each), run(REWRITTEN[name], each), strict=True):
                torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["shifted", "in the middle", "flattened", "weights per row"])
def test_dynamic_sizes(name: str, rewritten: list[int]) -> None:
    given = [draw(seed, VOCAB + seed % 2, BATCH + seed % 3, LENGTH + seed) for seed in range(4)]
    torch._dynamo.reset()
    loss = REWRITTEN[name]
    fused = torch.compile(loss, backend="slime_fused", options=OPTIONS, dynamic=True)
    for each in given:
        for got, plain in zip(run(fused, each), run(loss, each), strict=True):
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)
    assert rewritten == [1]


@pytest.mark.parametrize("name", ["shifted", "shifted, forward", "shifted, mixture"])
def test_half_precision(name: str, rewritten: list[int]) -> None:
    check(REWRITTEN[name], [[x.bfloat16(), z.bfloat16(), t] for x, z, t in map(draw, range(6))])
    assert rewritten[0] > 0


@pytest.mark.parametrize("name", ["shifted", "shifted, forward", "shifted, mixture"])
def test_float64(name: str, rewritten: list[int]) -> None:
    x, z, target = draw(0)
    given = [x.double(), z.double(), target]
    torch._dynamo.reset()
    fused = torch.compile(REWRITTEN[name], backend="slime_fused", options=OPTIONS)
    for got, plain in zip(run(fused, given), run(REWRITTEN[name], given), strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-12, atol=1e-13)
    assert rewritten[0] > 0
