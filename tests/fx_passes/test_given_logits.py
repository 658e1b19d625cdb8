"""In-place losses of Megatron, slime and verl: fused, right, and what they leave in the logits is left there.

Every loss x handed over how x dtype x ranks x option x inner; `make test` runs each loss handed over in each way once,
the rest in turn, and CI all that have no option. Two ranks are processes over gloo, since megatron-core knows its group
by a global. Each is compiled once and run over `DRAWS` draws, which are judged together.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slime_compile
from slime_compile.backend import options as backend_options
from tests.cases.given_logits import HANDED, LOSSES, OF_HEADS, meant
from tests.support import harness
from tests.support.ranks import on_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

TOKENS, VOCAB, DRAWS = 6, 72, 16
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
HEAD_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunk_mib": 2 * VOCAB},  # in bytes: `run`
    "in forward": {"chunk_mib": 2 * VOCAB, "grad_in_forward": "always"},
    "in backward": {"chunk_mib": 2 * VOCAB, "grad_in_forward": "never"},
    "whole": {"lm_head": False},
    "verify": {"verify": True},
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


CHUNKED = [option for option, chosen in HEAD_OPTIONS.items() if "chunk_mib" in chosen]
EVERY = [
    Row(*row)
    for handed, options in ((HANDED, OPTIONS), (OF_HEADS, HEAD_OPTIONS))
    for row in itertools.product(LOSSES, handed, DTYPES, (1, 2), options, INNERS)
]


def _quick() -> list[Row]:
    """Each loss handed over in each way; dtypes, ranks and options in turn, inductor for what changes in forward."""
    rows = []
    for handed, options in ((HANDED, OPTIONS), (OF_HEADS, HEAD_OPTIONS)):
        for at, (loss, how) in enumerate(itertools.product(LOSSES, handed)):
            option = list(options)[at % len(options)]
            dtype, ranks = DTYPES[how != "given" and at % 2], 1 + at // 2 % 2
            inner = INNERS[loss == "megatron" and how == "given"]
            rows.append(Row(loss, how, dtype, ranks, option, inner))
    # a product of bfloat16 logits is rounded, which verifying has to allow for
    return [*rows, Row("megatron", "made", torch.bfloat16, 1, "verify", "aot_eager")]


QUICK = _quick()


def data(row: Row) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(VOCAB)
    return [
        (
            3 * torch.randn(TOKENS, VOCAB, generator=draw).to(row.dtype),
            torch.randint(VOCAB, (TOKENS,), generator=draw),
        )
        for _ in range(DRAWS)
    ]


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
    of_head = row.handed in OF_HEADS
    handed, options = (OF_HEADS, HEAD_OPTIONS) if of_head else (HANDED, OPTIONS)
    rest = [dist.group.WORLD, *[torch.eye(VOCAB // row.ranks, dtype=row.dtype)] * of_head]

    def fn(logits: Tensor, target: Tensor) -> Tensor:
        return handed[row.handed](LOSSES[row.loss], logits, target, *rest)

    torch._dynamo.reset()
    chosen = {"strict": True, "min_vocab": 32, "inner": row.inner, **options[row.option]}
    dynamic = True if row.option == "dynamic" else None
    compiled = torch.compile(fn, backend="slime_fused", dynamic=dynamic, options=chosen)
    known = len(slime_compile.reports())
    shards = [(logits.chunk(row.ranks, -1)[rank].contiguous(), t) for logits, t in data(row)]
    with mock.patch.object(backend_options, "MIB", 1):
        got = [outcome(compiled, *drawn) for drawn in shards]
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles its own pieces
        eager = [outcome(fn, *drawn) for drawn in shards]
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


def truth(row: Row) -> list[dict[str, Tensor]]:
    """Over the whole vocabulary."""
    upstream = torch.linspace(0.5, 1.5, TOKENS, dtype=torch.float64)
    found = []
    for logits, target in data(row):
        leaf = logits.double().requires_grad_()
        value = meant(row.loss, row.handed, leaf, target)
        (grad,) = torch.autograd.grad((value * upstream).sum(), leaf)
        found.append({"value": value.detach(), "gradient": grad})
    return found


def check(row: Row, found: list[dict[str, Any]]) -> None:
    wanted = truth(row)
    for rank, each in enumerate(found):
        reports = each["reports"]  # one, or with dynamic sizes another of the sizes alone
        # the gradient may be arithmetic
        assert sum(report["fused"] for report in reports) >= 1, reports
        assert sum(report["wide_after"] for report in reports) <= 1, reports
        if row.option in CHUNKED:
            assert any(
                "never materialised in full" in note for note in reports[0]["graphs"][0]["notes"]
            ), reports
        judged = {"value": harness.Pool(), "gradient": harness.Pool()}
        for got, plain, true in zip(each["got"], each["eager"], wanted, strict=True):
            for what, pool in judged.items():
                whole = what == "value"
                shard = true[what] if whole else true[what].chunk(row.ranks, -1)[rank]
                pool.add(got[what], plain[what], shard)
            for what in ("left by forward", "left by backward"):
                if what == "left by backward" and row.option == "consume":
                    continue  # option grad_in_forward is never
                roundings = 8 * torch.finfo(plain[what].dtype).eps
                atol = roundings * float(plain[what].abs().max())
                torch.testing.assert_close(got[what], plain[what], rtol=roundings, atol=atol)
        for what, pool in judged.items():
            pool.check(f"{what} on rank {rank}")


def _marks(row: Row) -> Any:
    """Beside what `make test` runs, CI runs all that have no option; of heads without inductor's code."""
    if row in QUICK:
        return ()
    compiles = row.handed in OF_HEADS and row.inner == "inductor"
    return pytest.mark.thorough if row.option == "plain" and not compiles else pytest.mark.slow


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
    pytest.param({"plain"}, id="plain", marks=pytest.mark.thorough),
    pytest.param({*OPTIONS, *HEAD_OPTIONS} - {"plain"}, id="options", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize(("loss", "inner"), list(itertools.product(LOSSES, INNERS)))
def test_every_row_on_two_ranks(loss: str, inner: str, options: set[str]) -> None:
    rows = [r for r in EVERY if (r.ranks, r.loss, r.inner) == (2, loss, inner)]
    rows = [r for r in rows if r.option in options]
    for at in range(0, len(rows), 6):
        some = tuple(rows[at : at + 6])
        for row, found in on_two(some).items():
            check(row, found)
