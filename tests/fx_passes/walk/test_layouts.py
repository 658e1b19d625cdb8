"""Programs that read turned values by their strides: what takes such a value's place is laid out as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
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


def exponents_of_row_values(x: Tensor, target: Tensor) -> Tensor:
    scale = target.t()[..., None] + 0.1
    log_p = F.log_softmax(x.transpose(0, 1) * scale, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return entropy + torch.as_strided(entropy.detach().view(torch.int32) >> 23, (3, 2), (1, 3))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "fn",
    [
        changed_and_flattened, turned_back_and_viewed, row_values_by_strides, exponents_of_row_values,
    ],
)  # fmt: skip
def test_strides_that_are_read(fn: Callable[[Tensor, Tensor], Tensor], inner: str) -> None:
    x = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    target = torch.arange(6).reshape(2, 3)
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS | {"inner": inner})
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = compiled(ours, target), fn(plain, target)
    assert slime_compile.reports()[-1].fused
    torch.testing.assert_close(got, want)
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
