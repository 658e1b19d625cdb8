"""In-place losses of Megatron, slime and verl: fused, right, and what they leave in the logits is left there.

Every loss x handed over how x dtype x ranks x option x inner; `make test` runs each loss handed over in each way once,
the rest in turn, and CI all that have no option. Two ranks are processes over gloo, since megatron-core knows its group
by a global.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slime_compile
from tests.cases.given_logits import HANDED, LOSSES, meant
from tests.support import harness
from tests.support.ranks import on_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

TOKENS, VOCAB = 6, 72
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "consume": {"consume_logits": True},
    "kept": {"consume_logits": False},
    "softmax": {"save": "softmax"},
    "verify": {"verify": True},
    "unmerged": {"merge_collectives": False},
    "compared": {"check_ranks": True},
    "dynamic": {},
}
DTYPES = (torch.float32, torch.bfloat16)
INNERS = ("aot_eager", "inductor")


@dataclass(frozen=True)
class Row:
    loss: str
    handed: str
    dtype: torch.dtype
    ranks: int
    option: str
    inner: str

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        return f"{self.loss}-{self.handed}-{short}-tp{self.ranks}-{self.option}-{self.inner}"


EVERY = [Row(*r) for r in itertools.product(LOSSES, HANDED, DTYPES, (1, 2), OPTIONS, INNERS)]


def _quick() -> list[Row]:
    """Each loss handed over in each way; dtypes, ranks and options in turn, inductor for what changes in forward."""
    rows = []
    for at, (loss, handed) in enumerate(itertools.product(LOSSES, HANDED)):
        option = list(OPTIONS)[at % len(OPTIONS)]
        dtype, ranks = DTYPES[handed != "given" and at % 2], 1 + at // 2 % 2
        inner = INNERS[loss == "megatron" and handed == "given"]
        rows.append(Row(loss, handed, dtype, ranks, option, inner))
    # a product of bfloat16 logits is rounded, which verifying has to allow for
    return [*rows, Row("megatron", "made", torch.bfloat16, 1, "verify", "aot_eager")]


QUICK = _quick()


def data(row: Row) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(VOCAB)
    logits = 3 * torch.randn(TOKENS, VOCAB, generator=draw)
    return logits.to(row.dtype), torch.randint(VOCAB, (TOKENS,), generator=draw)


def outcome(fn: Any, shard: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Value, gradient, and what is in the logits after forward and after backward."""
    leaf = shard.clone().requires_grad_()
    logits = leaf * 1
    value = fn(logits, target)
    forward = logits.detach().clone()
    upstream = torch.linspace(0.5, 1.5, TOKENS, dtype=value.dtype)
    (grad,) = torch.autograd.grad((value * upstream).sum(), leaf)
    return {
        "value": value.detach(),
        "gradient": grad,
        "left by forward": forward,
        "left by backward": logits.detach().clone(),
    }


def run(rank: int, row: Row) -> dict[str, Any]:
    """One row on one rank, compiled and eager."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
    group = dist.group.WORLD
    logits, target = data(row)
    shard = logits.chunk(row.ranks, -1)[rank].contiguous()

    def fn(logits: Tensor, target: Tensor) -> Tensor:
        return HANDED[row.handed](LOSSES[row.loss], logits, target, group)

    torch._dynamo.reset()
    chosen = {"strict": True, "min_vocab": 32, "inner": row.inner, **OPTIONS[row.option]}
    dynamic = True if row.option == "dynamic" else None
    compiled = torch.compile(fn, backend="slime_fused", dynamic=dynamic, options=chosen)
    known = len(slime_compile.reports())
    got = outcome(compiled, shard, target)
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles its own pieces
        eager = outcome(fn, shard, target)
    reports = [report.to_dict() for report in slime_compile.reports()[known:]]
    return {"got": got, "eager": eager, "reports": reports}


def run_all(rank: int, rows: list[Row]) -> list[dict[str, Any]]:
    return [run(rank, row) for row in rows]


@functools.cache
def on_two(rows: tuple[Row, ...]) -> dict[Row, list[dict[str, Any]]]:
    """What both ranks found, for all rows in one pair of processes."""
    per_rank = on_ranks(2, run_all, list(rows))
    for each in per_rank:
        if isinstance(each, Exception):
            raise each
    return {row: [found[at] for found in per_rank] for at, row in enumerate(rows)}


def check(row: Row, found: list[dict[str, Any]]) -> None:
    logits, target = data(row)
    leaf = logits.double().requires_grad_()
    value = meant(row.loss, row.handed, leaf, target)
    upstream = torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64)
    (grad,) = torch.autograd.grad((value * upstream).sum(), leaf)
    for rank, each in enumerate(found):
        reports = each["reports"]  # one, or with dynamic sizes another of the sizes alone
        assert sum(report["fused"] for report in reports) >= 1, (
            reports
        )  # the gradient may be arithmetic
        assert sum(report["wide_after"] for report in reports) <= 1, reports
        truth = {"value": value.detach(), "gradient": grad.chunk(row.ranks, -1)[rank]}
        for what, got in each["got"].items():
            if what == "left by backward" and row.option == "consume":
                continue  # the option says so
            plain = each["eager"][what]
            assert got.dtype == plain.dtype
            if what in truth:
                name = f"{what} on rank {rank}"
                harness.no_worse_than_eager(got, plain, truth[what], plain.dtype, name)
                continue
            roundings = 8 * torch.finfo(plain.dtype).eps
            atol = roundings * float(plain.abs().max())
            torch.testing.assert_close(got, plain, rtol=roundings, atol=atol)


def _marks(row: Row) -> Any:
    """Beside what `make test` runs, CI runs all that have no option."""
    if row in QUICK:
        return ()
    return pytest.mark.thorough if row.option == "plain" else pytest.mark.slow


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=str(r), marks=_marks(r)) for r in EVERY if r.ranks == 1]
)
def test_one_rank(row: Row) -> None:
    harness.world()
    check(row, [run(0, row)])


@pytest.mark.parametrize("row", [r for r in QUICK if r.ranks == 2], ids=str)
def test_two_ranks(row: Row) -> None:
    check(row, on_two(tuple(r for r in QUICK if r.ranks == 2))[row])


@pytest.mark.parametrize("options", [
    pytest.param(["plain"], id="plain", marks=pytest.mark.thorough),
    pytest.param([o for o in OPTIONS if o != "plain"], id="options", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize(("loss", "inner"), list(itertools.product(LOSSES, INNERS)))
def test_every_row_on_two_ranks(loss: str, inner: str, options: list[str]) -> None:
    rows = [r for r in EVERY if (r.ranks, r.loss, r.inner) == (2, loss, inner)]
    rows = [r for r in rows if r.option in options]
    for at in range(0, len(rows), 6):
        some = tuple(rows[at : at + 6])
        for row, found in on_two(some).items():
            check(row, found)
