"""Losses over vocabulary shards: ranks are threads that replay the reductions in one process, unless said otherwise."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slime_compile
from fx_passes import collectives
from tests.cases.shards import LOSSES, Loss, Shard, whole
from tests.support.harness import no_worse_than_eager
from tests.support.ranks import on_threads, own_copy

ROWS = 61
OPTIONS = {"inner": "aot_eager", "min_vocab": 16, "strict": True}
WIDTHS = {1: [80], 2: [40, 40], 3: [40, 40, 29], 4: [33, 33, 33, 20]}


def data(ranks: int, offset: float = 0.0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits to which a power of two up to 2**10 can be added without a rounding."""
    draw = torch.Generator().manual_seed(ranks)
    vocabulary = sum(WIDTHS[ranks])
    logits = (3 * torch.randn(ROWS, vocabulary, generator=draw) * 2**10).round() / 2**10 + offset
    target = torch.randint(0, vocabulary, (ROWS,), generator=draw)
    return logits, target, [torch.randn(ROWS, generator=draw) for _ in range(2)]


def shard_of(rank: int, ranks: int, group: Any = None) -> Shard:
    bounds = [0, *itertools.accumulate(WIDTHS[ranks])]
    return Shard(bounds[rank], bounds[rank + 1], group or dist.group.WORLD)


def compiled(shard: Shard, fn: Loss, **options: Any) -> Any:
    def sharded(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return fn(shard, logits, target)

    return torch.compile(own_copy(sharded), backend="slime_fused", options=OPTIONS | options)


def values_and_gradient(
    fn: Any, logits: Tensor, target: Tensor, upstream: list[Tensor]
) -> list[Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    outputs = fn(leaf, target)
    tracked = [(o, g) for o, g in zip(outputs, upstream, strict=False) if o.requires_grad]
    (gradient,) = torch.autograd.grad([o for o, _ in tracked], leaf, [g for _, g in tracked])
    return [*(o.detach() for o in outputs), gradient]


def on_shard(
    rank: int, ranks: int, name: str, options: dict[str, Any], offset: float = 0.0
) -> dict[str, list[Tensor]]:
    shard, (logits, target, upstream) = shard_of(rank, ranks), data(ranks, offset)
    part = logits[:, shard.start : shard.stop]
    fn = LOSSES[name]
    with torch.random.fork_rng(devices=[]):
        ours = values_and_gradient(compiled(shard, fn, **options), part, target, upstream)
        eager = values_and_gradient(functools.partial(fn, shard), part, target, upstream)
    return {"ours": ours, "eager": eager}


def truth(name: str, ranks: int) -> list[Tensor]:
    logits, target, upstream = data(ranks)
    return values_and_gradient(
        lambda x, t: whole(x, t)[name], logits.double(), target, [u.double() for u in upstream]
    )


def gathered(found: list[dict[str, list[Tensor]]], kind: str) -> list[Tensor]:
    """Values of rank 0, and the whole gradient."""
    per_rank = [each[kind] for each in found]
    return [*per_rank[0][:-1], torch.cat([each[-1] for each in per_rank], -1)]


CASES = [(name, 2) for name in LOSSES if name != "chunked"]
CASES += [("log_probs_and_entropy", 4), ("chunked", 3), ("differentiable_all_reduce", 4)]


def with_more_than_two_marked(cases: list[tuple[str, int]]) -> list[Any]:
    """A thread for each rank."""
    return [
        pytest.param(name, ranks, marks=pytest.mark.thorough if ranks > 2 else ())
        for name, ranks in cases
    ]


@pytest.mark.parametrize(("name", "ranks"), with_more_than_two_marked(CASES))
def test_equal_to_the_unsharded_loss(name: str, ranks: int) -> None:
    known = len(slime_compile.reports())
    found = on_threads(ranks, on_shard, ranks, name, {})
    ours, eager, true = gathered(found, "ours"), gathered(found, "eager"), truth(name, ranks)
    for at, (got, plain, wanted) in enumerate(zip(ours, eager, true, strict=True)):
        no_worse_than_eager(got, plain, wanted, torch.float32, f"{name}, value {at}")
    for each in found:
        for mine, first in zip(each["ours"][:-1], found[0]["ours"], strict=False):
            assert torch.equal(mine, first), "ranks hold different values"
    for report in [r.to_dict() for r in slime_compile.reports()[known:]]:
        assert report["fused"] == 2
        assert report["wide_after"] == 0
        assert report["collectives_before"] >= 2
        assert report["collectives_after"] == 1


# combined_norms takes a masked logit, and what a group of more sums up is seen to be one
OF_ONE = [(name, 1) for name in LOSSES if name not in ("chunked", "combined_norms")]


# ---- offsets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), with_more_than_two_marked([*CASES, *OF_ONE]))
def test_at_an_offset(name: str, ranks: int) -> None:
    """No less accurate than eager code at the same offset."""
    found = on_threads(ranks, on_shard, ranks, name, {}, 2.0**10)
    ours, eager, true = gathered(found, "ours"), gathered(found, "eager"), truth(name, ranks)
    for at, (got, plain, wanted) in enumerate(zip(ours, eager, true, strict=True)):
        no_worse_than_eager(got, plain, wanted, torch.float32, f"{name}, value {at}")


class OverAnother(torch.autograd.Function):
    """Weights that do not sum to 1: the sum that they are divided by is that of `rescaled` exponentials."""

    @staticmethod
    def forward(ctx, logits, rescaled, group):  # type: ignore[no-untyped-def]
        peak = logits.amax(-1, keepdim=True)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        weights, total = (logits - peak).exp(), rescaled(logits - peak)
        if total.shape == peak.shape:
            dist.all_reduce(total, group=group)
        weights = weights / total
        expected = (weights * logits).sum(-1, keepdim=True)
        dist.all_reduce(expected, group=group)
        ctx.save_for_backward(weights, logits)
        return (expected - peak).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        weights, logits = ctx.saved_tensors
        return grad.unsqueeze(-1) * weights * logits, None, None


@pytest.mark.parametrize(
    "rescaled",
    [
        lambda shifted: (shifted / 2).exp().sum(-1, keepdim=True),
        lambda shifted: shifted[:, ::2].exp().sum(-1, keepdim=True),
        lambda shifted: shifted.exp().sum(-1, keepdim=True).expand(-1, shifted.shape[-1]),
    ],
    ids=["another temperature", "half the columns", "the rank's own"],
)
def test_what_is_no_mean_keeps_its_offset(monkeypatch: pytest.MonkeyPatch, rescaled: Any) -> None:
    def over_another(shard: Shard, logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (OverAnother.apply(logits, rescaled, shard.group),)

    monkeypatch.setitem(LOSSES, "over_another", over_another)
    found = on_threads(2, on_shard, 2, "over_another", {}, 2.0**6)
    for mine, eager in zip(gathered(found, "ours"), gathered(found, "eager"), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-4)


class Weighed(torch.autograd.Function):
    """What a rank sends, times numbers per row of its own."""

    @staticmethod
    def forward(ctx, logits, shard, kind):  # type: ignore[no-untyped-def]
        own = torch.full((), 1.25 if shard.start else 0.75)
        weight = {which: own if which == kind else torch.ones(()) for which in KINDS}
        peak = logits.amax(-1, keepdim=True) * weight["maximum"]
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
        probs = (logits - peak).exp()
        total = probs.sum(-1, keepdim=True) * weight["total"]
        dist.all_reduce(total, group=shard.group)
        probs = probs / total
        expected = (probs * logits).sum(-1, keepdim=True) * weight["mean"]
        dist.all_reduce(expected, group=shard.group)
        ctx.save_for_backward(logits, probs, expected)
        return (expected - peak).squeeze(-1) + total.squeeze(-1).log()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, probs, expected = ctx.saved_tensors
        return grad.unsqueeze(-1) * probs * (expected - logits), None, None


KINDS = ["maximum", "total", "mean"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_a_rank_stay_in_what_it_sends(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def weighed(shard: Shard, logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        return (Weighed.apply(logits, shard, kind),)

    monkeypatch.setitem(LOSSES, "weighed", weighed)
    found = on_threads(2, on_shard, 2, "weighed", {"merge_collectives": True}, 4.0)
    for mine, eager in zip(gathered(found, "ours"), gathered(found, "eager"), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


# ---- what is merged, and what is not ------------------------------------------------------------------------------


def reports_of(ranks: int, name: str, **options: Any) -> list[dict[str, Any]]:
    known = len(slime_compile.reports())
    found = on_threads(ranks, on_shard, ranks, name, options)
    for mine, eager in zip(gathered(found, "ours"), gathered(found, "eager"), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-5)
    return [report.to_dict() for report in slime_compile.reports()[known:]]


def test_merging_can_be_switched_off() -> None:
    for report in reports_of(2, "log_probs_and_entropy", merge_collectives=False):
        assert (report["fused"], report["wide_after"]) == (2, 0)
        assert report["collectives_before"] == report["collectives_after"] == 5


def test_another_all_reduce_stands_in_the_place_of_the_program_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entropy is exchanged without its offset; as many collectives as before, where they are not merged, too."""
    counted = [r["collectives_before"] for r in reports_of(2, "log_probs_and_entropy")]
    monkeypatch.setattr(collectives, "MAX_NODES", 3)
    apart = [r["collectives_after"] for r in reports_of(2, "log_probs_and_entropy")]
    assert counted == apart == [5, 5]


def test_verified_with_collectives() -> None:
    for report in reports_of(2, "log_probs_and_entropy", verify=True):
        assert (report["fused"], report["collectives_after"], report["rejections"]) == (2, 1, [])


def test_softmax_is_kept_where_asked() -> None:
    for report in reports_of(2, "entropy_only", save="softmax"):
        assert report["collectives_after"] == 1


class ScaledByRank(torch.autograd.Function):
    """A number between two collectives, which differs by rank."""

    @staticmethod
    def forward(ctx, logits, number, group):  # type: ignore[no-untyped-def]
        peak = logits.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        doubled = peak * number
        dist.all_reduce(doubled, group=group)
        total = logits.exp().sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(logits, total)
        return total.log() + doubled

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, total = ctx.saved_tensors
        return (grad / total).unsqueeze(-1) * logits.exp(), None, None


def scaled_by_rank(shard: Shard, logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (ScaledByRank.apply(logits, 2.0 + shard.start, shard.group),)


def test_a_number_between_collectives_is_a_reason_not_to_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOSSES, "scaled_by_rank", scaled_by_rank)
    for report in reports_of(2, "scaled_by_rank"):
        assert (report["collectives_before"], report["collectives_after"]) == (3, 2)
        (note,) = [n for g in report["graphs"] for n in g["notes"] if "stays" in n]
        assert "mul" in note
        assert "test_vocabulary_parallel.py" in note


# ---- nothing hangs --------------------------------------------------------------------------------------------------


def some_ranks_without_gradient(rank: int, ranks: int) -> list[Tensor]:
    shard, (logits, target, _) = shard_of(rank, ranks), data(ranks)
    fn = compiled(shard, LOSSES["log_probs_and_entropy"])
    part = logits[:, shard.start : shard.stop].clone().requires_grad_(rank == 0)
    return [o.detach() for o in fn(part, target)]


def test_one_rank_without_gradient() -> None:
    first, second = on_threads(2, some_ranks_without_gradient, 2)
    logits, target, _ = data(2)
    for mine, other, wanted in zip(
        first, second, whole(logits, target)["log_probs_and_entropy"], strict=True
    ):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def two_groups(rank: int) -> list[Tensor]:
    """Ranks 0 and 1 hold no rows, 2 and 3 hold rows."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, place = divmod(rank, 2)
    shard = shard_of(place, 2, groups[pair])
    logits, target, upstream = data(2)
    rows = slice(0, ROWS * pair)
    part = logits[rows, shard.start : shard.stop]
    fn = compiled(shard, LOSSES["log_probs_and_entropy"])
    return values_and_gradient(fn, part, target[rows], [u[rows] for u in upstream])


def test_two_groups_one_of_them_without_rows() -> None:
    found = on_threads(4, two_groups)
    assert all(value.shape[0] == 0 for each in found[:2] for value in each)
    wanted = truth("log_probs_and_entropy", 2)
    gradient = torch.cat([each[-1] for each in found[2:]], -1)
    for mine, true in zip([*found[2][:-1], gradient], wanted, strict=True):
        torch.testing.assert_close(mine, true.float(), rtol=1e-4, atol=1e-5)


def sequence_first(shard: Shard, logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Megatron's order: what is reduced is looked at by a view, which needs it packed."""
    x = logits.view(3, -1, logits.shape[-1]).transpose(0, 1).contiguous()
    top = x.max(-1).values
    dist.all_reduce(top, dist.ReduceOp.MAX, shard.group)
    total = (x - top[..., None]).exp().sum(-1)
    dist.all_reduce(total, dist.ReduceOp.SUM, shard.group)
    return top.view(-1), total.log().view(-1)


def test_rows_in_another_order() -> None:
    def on_rank(rank: int) -> list[tuple[Tensor, ...]]:
        shard, (logits, target, _) = shard_of(rank, 2), data(2)
        part = logits[:60, shard.start : shard.stop]
        run = compiled(shard, sequence_first)
        return [run(part, target), sequence_first(shard, part, target)]

    for ours, eager in on_threads(2, on_rank):
        torch.testing.assert_close(ours, eager)
