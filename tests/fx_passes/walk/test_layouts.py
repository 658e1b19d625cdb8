"""Programs that read turned values by their strides: what takes such a value's place is laid out as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from fx_passes.walk import layouts
from tests.support import harness

VOCAB = 37


def changed_and_flattened(x: Tensor, target: Tensor) -> Tensor:
    p = F.softmin(x, -1) * 1.0
    p.transpose(0, 1).mul_(2)
    return F.cross_entropy(p.flatten(0, -2), target.flatten())


def turned_back_and_viewed(x: Tensor, target: Tensor) -> Tensor:
    p = F.softmax(x, -1).transpose(0, 1).mul(2)
    wide = p.transpose(0, 1).view(-1, VOCAB).cumsum(-1)
    return wide[:, ::5].sin() + F.cross_entropy(x.view(-1, VOCAB), target.view(-1))


def row_values_by_strides(x: Tensor, target: Tensor) -> Tensor:
    log_p = F.log_softmax(x.transpose(0, 1), -1)
    return torch.as_strided(log_p.exp().mul(log_p).sum(-1), (target.numel(),), (1,)).sin()


def _entropy(x: Tensor) -> Tensor:
    log_p = F.log_softmax(x.transpose(0, 1), -1)
    return -log_p.exp().mul(log_p).sum(-1)


def exponents_of_row_values(x: Tensor, target: Tensor) -> Tensor:
    entropy = _entropy(x)
    return entropy + torch.as_strided(entropy.detach().view(torch.int32) >> 23, (3, 2), (2, 1))


def halves_of_row_values(x: Tensor, target: Tensor) -> Tensor:
    entropy = _entropy(x)
    return entropy + entropy.detach().view(torch.int16)[:, 1::2]


def element_wise_between(x: Tensor, target: Tensor) -> Tensor:
    entropy = _entropy(x)
    wave = torch.special.bessel_j0(entropy.detach())
    return wave.view(-1) + torch.as_strided(wave.neg(), (6,), (1,)) + entropy.reshape(-1)


def two_values_and_two_readers(x: Tensor, target: Tensor) -> Tensor:
    wave = torch.lgamma(_entropy(x)) + _entropy(x * 2)[:, :1]
    return wave.expand(4, 3, 2).reshape(4, -1).sum(0) + wave.view(-1)


def returned(x: Tensor, target: Tensor) -> Tensor:
    return _entropy(x)


@torch.library.custom_op("slime_tests::in_order_of_memory", mutates_args=())
def in_order_of_memory(rows: Tensor) -> Tensor:
    return torch.as_strided(rows, (rows.numel(),), (1,)).clone()


@in_order_of_memory.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.numel())


def an_operator_that_is_not_torchs(x: Tensor, target: Tensor) -> Tensor:
    entropy = _entropy(x)
    return entropy.sum() + in_order_of_memory(entropy.detach())


FUNCTIONS = (
    changed_and_flattened, turned_back_and_viewed, row_values_by_strides, exponents_of_row_values,
    halves_of_row_values, element_wise_between, two_values_and_two_readers, returned,
    an_operator_that_is_not_torchs,
)  # fmt: skip


def under_both_inners() -> list[Any]:
    """Those that inductor compiles, 2 to 6 s each, are thorough."""
    return [
        pytest.param(
            fn,
            inner,
            id=f"{fn.__name__}-{inner}",
            marks=pytest.mark.thorough if inner == "inductor" else (),
        )
        for inner in ("aot_eager", "inductor")
        for fn in FUNCTIONS
    ]


@pytest.mark.parametrize(("fn", "inner"), under_both_inners())
def test_strides_that_are_read(fn: Callable[[Tensor, Tensor], Tensor], inner: str) -> None:
    x = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    target = torch.arange(6).reshape(2, 3)
    refused = torch.__version__ < "2.13" and fn is halves_of_row_values
    options = harness.OPTIONS | {"inner": inner, "strict": not refused}
    compiled = torch.compile(fn, backend="slime_fused", options=options)
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = compiled(ours, target), fn(plain, target)
    assert bool(slime_compile.reports()[-1].fused) is not refused
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_gaps_cannot_be_kept() -> None:
    def fn(x: Tensor) -> Tensor:
        lse = torch.logsumexp(x.transpose(0, 1), -1)
        probe = (x.transpose(0, 1) - lse[..., None]).exp() * 1.5
        return torch.as_strided(probe[:, ::2], (3, VOCAB), (VOCAB, 1), 0).sin()

    x = torch.randn(4, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    with pytest.raises(Exception, match=r"as_strided\.default of a value with gaps in its memory"):
        compiled(x)
    lenient = harness.OPTIONS | {"strict": False}
    torch.testing.assert_close(torch.compile(fn, backend="slime_fused", options=lenient)(x), fn(x))


def test_bytes_of_a_turned_copy_before_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_COPIES_STAY_AS_THEY_ARE", False)
    x, target = torch.randn(2, 3, VOCAB), torch.arange(6).reshape(2, 3)
    compiled = torch.compile(halves_of_row_values, backend="slime_fused", options=harness.OPTIONS)
    with pytest.raises(Exception, match="cannot view the bytes of a transposed copy"):
        compiled(x, target)
