"""Vocabulary-parallel losses in real processes over gloo: what must not hang."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.parallel import loss_parallel

import slime_compile
from slime_compile.backend import check_ranks
from tests.cases.shards import LOSSES, Shard, whole
from tests.support.ranks import on_ranks

WIDTH, ROWS = 40, 6
EAGER = {"inner": "aot_eager", "min_vocab": 16, "strict": True}


def data(rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(rows, 2 * WIDTH, generator=draw)
    return logits, torch.randint(0, 2 * WIDTH, (rows,), generator=draw)


def part(rank: int, logits: Tensor) -> Tensor:
    return logits[:, rank * WIDTH : (rank + 1) * WIDTH].clone()


def shard_of(rank: int, group: Any = None) -> Shard:
    return Shard(rank * WIDTH, (rank + 1) * WIDTH, group or dist.group.WORLD)


def step(fn: Any, rank: int, rows: int) -> list[Tensor]:
    """Values, and this rank's part of the gradient of their sum."""
    logits, target = data(rows)
    leaf = part(rank, logits).requires_grad_()
    outputs = fn(leaf, target)
    (gradient,) = torch.autograd.grad(sum(o.sum() for o in outputs), leaf)
    return [*(o.detach() for o in outputs), gradient]


def wanted(name: str, rank: int, rows: int) -> list[Tensor]:
    logits, target = data(rows)
    logits.requires_grad_()
    outputs = whole(logits, target)[name]
    (gradient,) = torch.autograd.grad(sum(o.sum() for o in outputs), logits)
    return [*(o.detach() for o in outputs), part(rank, gradient)]


def check(found: list[Any], name: str, rows: int = ROWS) -> None:
    for rank, values in enumerate(found):
        assert not isinstance(values, Exception), values
        for mine, true in zip(values, wanted(name, rank, rows), strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def compiled(name: str, shard: Shard, **options: Any) -> Any:
    fn = LOSSES[name]
    return torch.compile(
        lambda logits, target: fn(shard, logits, target),
        backend="slime_fused",
        options=EAGER | options,
    )


# ---- under inductor, sizes that change ------------------------------------------------------------------------------


def under_inductor(rank: int) -> tuple[list[list[Tensor]], list[int]]:
    fn = compiled("log_probs_and_entropy", shard_of(rank), inner="inductor")
    found = [step(fn, rank, rows) for rows in (ROWS, ROWS + 3, ROWS + 9)]
    return found, [r.to_dict()["collectives_after"] for r in slime_compile.reports()]


@pytest.mark.thorough
def test_under_inductor_with_sizes_that_change() -> None:
    found = on_ranks(2, under_inductor)
    assert not any(isinstance(each, Exception) for each in found), found
    for at, rows in enumerate((ROWS, ROWS + 3, ROWS + 9)):
        check([steps[at] for steps, _ in found], "log_probs_and_entropy", rows)
    assert [counts for _, counts in found] == [[1, 1]] * 2  # one static graph, one for all sizes


# ---- DTensor --------------------------------------------------------------------------------------------------------


def dtensor_step(rank: int, fn: Any) -> list[Tensor]:
    """Value and gradient."""
    mesh = init_device_mesh("cpu", (2,))
    logits, target = data(ROWS)
    leaf = distribute_tensor(logits, mesh, [ShardPlacement(-1)]).requires_grad_()
    output = fn(leaf, distribute_tensor(target, mesh, [Replicate()]))
    output.sum().backward()
    assert isinstance(leaf.grad, DTensor)
    return [output.full_tensor().detach(), leaf.grad.full_tensor()]


def sharded_dtensor(rank: int, parallel: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """What the compiled function and eager code find, and the fused operators."""

    def loss(x: DTensor, tokens: DTensor) -> Tensor:
        if parallel:
            with loss_parallel():
                return F.cross_entropy(x, tokens)
        whole = x.redistribute(x.device_mesh, [Replicate()])
        return whole.log_softmax(-1).gather(-1, tokens[:, None])

    mine = dtensor_step(rank, torch.compile(loss, backend="slime_fused", options=EAGER))
    return mine, dtensor_step(rank, loss), slime_compile.reports()[-1].fused


@pytest.mark.parametrize("parallel", [False, True], ids=["redistributed", "loss_parallel"])
def test_dtensor(parallel: bool) -> None:
    for mine, eager, fused in on_ranks(2, sharded_dtensor, parallel):
        torch.testing.assert_close(mine, eager)
        assert fused == 2


def sharded_dtensor_twice(rank: int, cache: str) -> list[Any]:
    """The second time the code comes from the cache, in which the other rank's lies, too."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    found = []
    with loss_parallel():
        for _ in range(2):
            torch._dynamo.reset()
            fn = torch.compile(
                F.cross_entropy, backend="slime_fused", options=EAGER | {"inner": "inductor"}
            )
            mine = dtensor_step(rank, fn)
            cached = slime_compile.reports()[-1].to_dict()["graphs"][0]["cached"]
            found.append((mine, dtensor_step(rank, F.cross_entropy), cached))
            dist.barrier()
    return found


@pytest.mark.thorough  # two processes, four compiles by inductor
def test_dtensor_from_the_compile_cache(tmp_path: Path) -> None:
    for each in on_ranks(2, sharded_dtensor_twice, str(tmp_path)):
        assert not isinstance(each, Exception), each
        for mine, eager, _ in each:
            torch.testing.assert_close(mine, eager)
        assert [cached for *_, cached in each] == [False, True]


# ---- ranks with another history ------------------------------------------------------------------------------------


def one_rank_compiled_before(rank: int) -> list[Tensor]:
    alone = [dist.new_group([r]) for r in range(2)][rank]
    fn = LOSSES["log_probs_and_entropy"]

    def sharded(logits: Tensor, target: Tensor, group: Any) -> Any:
        return fn(shard_of(rank, group), logits, target)

    loss = torch.compile(sharded, backend="slime_fused", options=EAGER)
    if rank == 0:
        for rows in (3, 4, 5):  # now sizes are symbolic on this rank
            own = part(rank, data(rows)[0]).requires_grad_()
            loss(own, torch.zeros(rows, dtype=torch.long), alone)
    return step(lambda x, t: loss(x, t, dist.group.WORLD), rank, ROWS)


def test_a_rank_that_compiled_other_shapes_before() -> None:
    check(on_ranks(2, one_rank_compiled_before), "log_probs_and_entropy")


def entropy_on_some_steps(rank: int) -> list[list[Tensor]]:
    both = compiled("log_probs_and_entropy", shard_of(rank))
    logged = compiled("logged_entropy", shard_of(rank))
    return [step(fn, rank, ROWS) for fn in (both, logged, both, logged)]


def test_entropy_that_is_only_logged_on_some_steps() -> None:
    found = on_ranks(2, entropy_on_some_steps)
    names = ["log_probs_and_entropy", "logged_entropy"] * 2
    for at, name in enumerate(names):
        check([each if isinstance(each, Exception) else each[at] for each in found], name)


# ---- uneven shards --------------------------------------------------------------------------------------------------


def uneven(rank: int, widths: list[int], alone: dict[str, Any]) -> list[Any]:
    """Values and the rank's gradient, where rank 1 has `alone` beside its shard; and what was fused."""
    starts = [0, widths[0], sum(widths)]
    shard = Shard(*starts[rank : rank + 2], dist.group.WORLD)
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, sum(widths), generator=draw)
    target = torch.randint(0, sum(widths), (ROWS,), generator=draw)
    options = {"min_vocab": 64, "check_ranks": True} | (alone if rank else {})
    gradient = options.pop("gradient", True)
    check_ranks.TIMEOUT = timedelta(minutes=10)
    mine, true = logits[:, shard.start : shard.stop].clone(), logits.double()
    outputs = compiled("log_probs_and_entropy", shard, **options)(
        mine.requires_grad_(gradient), target
    )
    wanted = whole(true.requires_grad_(), target)["log_probs_and_entropy"]
    found = [*zip(outputs, wanted, strict=True)]
    if gradient:
        (ours,) = torch.autograd.grad(sum(o.sum() for o in outputs), mine)
        (whole_gradient,) = torch.autograd.grad(sum(o.sum() for o in wanted), true)
        found.append((ours, whole_gradient[:, shard.start : shard.stop]))
    for each, truth in found:
        torch.testing.assert_close(each.double(), truth, rtol=1e-4, atol=1e-5)
    report = slime_compile.reports()[-1].to_dict()
    return [report["fused"], report["collectives_before"], report["collectives_after"]]


@pytest.mark.parametrize(
    ("widths", "alone"),
    [
        ([80, 40], {}),
        ([64, 63], {"min_vocab": 1024, "save": "softmax"}),
        ([90, ROWS], {"gradient": False}),
        ([4, 2], {}),
    ],
    ids=["both sides of min_vocab", "options", "no gradient, as many rows", "two columns"],
)
def test_uneven_shards(widths: list[int], alone: dict[str, Any]) -> None:
    first, second = on_ranks(2, uneven, widths, alone)
    assert first == [2, 5, 1], first
    assert second == [2 if alone.get("gradient", True) else 1, 5, 1], second


# ---- errors ----------------------------------------------------------------------------------------------------------


def one_rank_fails(rank: int) -> list[Tensor]:
    fn = compiled("log_probs_and_entropy", shard_of(rank))
    step(fn, rank, ROWS)
    if rank == 1:
        raise ValueError("no such sample")
    return step(fn, rank, ROWS)


def test_an_exception_on_one_rank_ends_the_others() -> None:
    first, second = on_ranks(2, one_rank_fails)
    assert "no such sample" in str(second)
    assert isinstance(first, Exception)


# ---- check_ranks ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """The text of an exception, to be sent to the test."""
    text: list[str] = []
    try:
        yield text
    except Exception as error:
        text.append(f"{type(error).__name__}: {error}")


def checked(rank: int, names: list[str]) -> tuple[Any, list[str]]:
    # On a busy machine, too, each rank hears of the other.
    check_ranks.TIMEOUT = timedelta(minutes=10)
    with said() as text:
        return step(compiled(names[rank], shard_of(rank), check_ranks=True), rank, ROWS), text
    return None, text


def test_ranks_that_agree_pass_the_check() -> None:
    found = on_ranks(2, checked, ["log_probs_and_entropy"] * 2)
    check([values for values, _ in found], "log_probs_and_entropy")


def test_ranks_that_disagree_raise_on_all_ranks() -> None:
    for _, text in on_ranks(2, checked, ["log_probs_and_entropy", "entropy_only"]):
        (error,) = text
        assert "must run the same collectives" in error
        assert "-%" in error or "+%" in error  # the differing lines
        assert "gather" in error
        assert "ranks 0 and 1 differ" in error or "ranks 1 and 0 differ" in error


def compiled_alone(rank: int) -> tuple[Any, list[str]]:
    check_ranks.TIMEOUT = timedelta(seconds=1)
    fn = compiled("log_probs_and_entropy", shard_of(rank), check_ranks=rank == 0)
    values = step(fn, rank, ROWS)
    return values, [n for r in slime_compile.reports() for g in r.graphs for n in g.notes]


def test_a_rank_that_compiles_alone_is_told() -> None:
    found = on_ranks(2, compiled_alone)
    check([values for values, _ in found], "log_probs_and_entropy")
    notes = [notes for _, notes in found]
    assert any("ranks [1]" in note and "did not compile" in note for note in notes[0])


def plain_all_reduce(rank: int) -> list[Tensor]:
    return step(compiled("differentiable_all_reduce", shard_of(rank), inner="inductor"), rank, ROWS)


@pytest.mark.thorough
def test_gradient_of_a_plain_all_reduce_is_eager_s() -> None:
    check(on_ranks(2, plain_all_reduce), "differentiable_all_reduce")
