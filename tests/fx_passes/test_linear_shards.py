"""A head whose vocabulary is sharded: each rank makes its columns in chunks, and what is exchanged stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slime_compile
from slime_compile.backend import options
from tests.cases.shards import LOSSES, Shard, whole
from tests.cases.spellings import Outputs
from tests.fx_passes.test_vocabulary_parallel import OPTIONS, ROWS, WIDTHS, shard_of
from tests.support.harness import no_worse_than_eager
from tests.support.ranks import on_threads, own_copy

HIDDEN = 6
LOSS = "log_probs_and_entropy"


class Copied(torch.autograd.Function):
    """Megatron's copy to the tensor-parallel region: each rank's share of hidden's gradient is summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total)
        return total


def data(ranks: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(ranks)
    vocabulary = sum(WIDTHS[ranks])
    hidden = torch.randn(ROWS, HIDDEN, generator=draw)
    weight = torch.randn(vocabulary, HIDDEN, generator=draw)
    target = torch.randint(0, vocabulary, (ROWS,), generator=draw)
    return hidden, weight, target, [torch.randn(ROWS, generator=draw) for _ in range(2)]


def of_shard(shard: Shard, hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return LOSSES[LOSS](shard, Copied.apply(hidden) @ weight.t(), target)


def values_and_gradients(
    fn: Any, hidden: Tensor, weight: Tensor, target: Tensor, upstream: list[Tensor]
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    outputs = fn(*leaves, target)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def on_shard(rank: int, ranks: int) -> dict[str, list[Tensor]]:
    shard, (hidden, weight, target, upstream) = shard_of(rank, ranks), data(ranks)

    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        return of_shard(shard, hidden, weight, target)

    compiled = torch.compile(
        own_copy(fn), backend="slime_fused", options=OPTIONS | {"chunk_mib": 8 * 40 * 4}
    )
    part = weight[shard.start : shard.stop]
    return {
        kind: values_and_gradients(function, hidden, part, target, upstream)
        for kind, function in (("ours", compiled), ("eager", fn))
    }


def truth(ranks: int) -> list[Tensor]:
    hidden, weight, target, upstream = data(ranks)
    return values_and_gradients(
        lambda h, w, t: whole(h @ w.t(), t)[LOSS],
        hidden.double(),
        weight.double(),
        target,
        [u.double() for u in upstream],
    )


def gathered(found: list[dict[str, list[Tensor]]], kind: str) -> list[Tensor]:
    """Values and hidden's gradient of rank 0, and the whole weight's gradient."""
    per_rank = [each[kind] for each in found]
    return [*per_rank[0][:-1], torch.cat([each[-1] for each in per_rank])]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_sharded_head(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MIB", 1)
    known = len(slime_compile.reports())
    found = on_threads(ranks, on_shard, ranks)
    names = ("log-probs", "entropies", "gradient of hidden", "gradient of weight")
    every = zip(names, gathered(found, "ours"), gathered(found, "eager"), truth(ranks), strict=True)
    for what, got, plain, wanted in every:
        no_worse_than_eager(got, plain, wanted, torch.float32, what)
    for report in [r.to_dict() for r in slime_compile.reports()[known:]]:
        (note,) = (n for n in report["graphs"][0]["notes"] if "never materialised in full" in n)
        assert "; the gradient is computed in backward: " in note
        assert report["fused"] == 2
        # one for the row values, one for hidden's gradient
        assert report["collectives_after"] == 2
