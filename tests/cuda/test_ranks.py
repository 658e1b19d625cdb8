"""DistributedDataParallel over two devices: a compiled loss behind it, over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import slime_compile
from tests.cuda.judge import relative_error
from tests.cuda.losses import HIDDEN, per_row, policy
from tests.support.ranks import on_ranks

ROWS, VOCAB = 6, 257
OPTIONS: dict[str, Any] = {"min_vocab": 8, "strict": True, "inner": "aot_eager"}

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")


def _batch(rank: int, device: str) -> list[Tensor]:
    hidden = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank))
    return [hidden.to(device), *per_row(rank, ROWS, VOCAB, device)]


def _weight() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7)) / 2


def _rank(rank: int) -> tuple[Tensor, int]:
    device = f"cuda:{rank}"
    torch.cuda.set_device(rank)
    model = nn.Linear(HIDDEN, VOCAB, bias=False).to(device)
    with torch.no_grad():
        model.weight.copy_(_weight())
    wrapped = DistributedDataParallel(model, device_ids=[rank])
    loss = torch.compile(policy, backend="slime_fused", options=OPTIONS)
    hidden, *rest = _batch(rank, device)
    loss(wrapped(hidden), *rest).backward()
    assert model.weight.grad is not None
    return model.weight.grad.cpu(), slime_compile.reports()[-1].fused


def test_data_parallel() -> None:
    found = on_ranks(2, _rank)
    weight = _weight().double().requires_grad_()
    for rank in range(2):
        hidden, tokens, advantages = _batch(rank, "cpu")
        (policy(hidden.double() @ weight.t(), tokens, advantages.double()) / 2).backward()
    assert weight.grad is not None
    for result in found:
        assert not isinstance(result, Exception), result
        gradient, fused = result
        assert relative_error([gradient], [weight.grad]) < 1e-5
        assert fused == 2
