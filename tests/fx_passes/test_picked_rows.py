"""Full-vocabulary rows that are picked and then summed are summed first; rows that are picked for more stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from fx_passes.graph.facts import same
from fx_passes.picked_rows import sum_first
from tests.support.harness import OPTIONS, VOCAB, Pool, each_inner

BATCH, LENGTH, DRAWS = 3, 8, 8
Picking = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of values `[B, T, V]`, a mask `[B, T]`, numbers of rows `[7]` some of which are the same: one number."""

SUMMED: dict[str, Picking] = {
    "a mask": lambda d, m, r: d[m].sum(),
    "its mean": lambda d, m, r: d[m].mean(),
    "over their number": lambda d, m, r: d[m].sum() / m.sum(),
    "per row": lambda d, m, r: (d[m].sum(-1) * torch.arange(m.numel())[m.flatten()]).sum(),
    "per row, kept": lambda d, m, r: d[m].mean(-1, keepdim=True).tanh().sum(),
    "both dimensions, kept": lambda d, m, r: d[m].sum((0, 1), keepdim=True).sum(),
    "a sum and a mean": lambda d, m, r: d[m].sum() + 3 * d[m].mean(),
    "two masks": lambda d, m, r: d[m].sum() - d[~m].mean(),
    "some samples": lambda d, m, r: d[m[:, 0]].sum((-2, -1)).square().sum(),
    "rows by their numbers": lambda d, m, r: d.flatten(0, 1)[r].sum(-1).square().sum(),
    "rows of the second dimension": lambda d, m, r: d[:, r].sum((0, -1)).square().sum(),
    "by both dimensions": lambda d, m, r: d[r % BATCH, r].sum(-1).square().sum(),
    "places of a matrix": lambda d, m, r: d.flatten(0, 1)[torch.stack([r, 2 * r])].sum(),
    "in float64": lambda d, m, r: d[m].sum(dtype=torch.float64).float(),
}

OTHERS: dict[str, Picking] = {
    "over rows": lambda d, m, r: d[m].sum(0).square().sum(),
    "squared before": lambda d, m, r: d[m].square().sum(),
    "columns": lambda d, m, r: d[..., r].sum(-1).square().sum(),
    "elements": lambda d, m, r: d[m[..., None].expand_as(d)].sum(),
    "summed and more": lambda d, m, r: d[m].sum() + d[m].square().sum(),
}


@pytest.fixture(autouse=True)
def one_graph() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def loss_of(picking: Picking) -> Callable[..., Tensor]:
    """Over the divergence of two softmaxes, as distillation writes it."""

    def loss(x: Tensor, z: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        p, q = x.log_softmax(-1), z.log_softmax(-1)
        return picking(q.exp() * (q - p), mask, rows)

    return loss


def draw(seed: int, dtype: torch.dtype) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x, z = (2 * torch.randn(BATCH, LENGTH, VOCAB, generator=drawn) for _ in range(2))
    mask = torch.rand(BATCH, LENGTH, generator=drawn) < 0.6
    rows = torch.randint(LENGTH, (7,), generator=drawn)
    return [x.to(dtype).requires_grad_(), z.to(dtype), mask, rows]


def picks(graphs: list[Graph]) -> list[torch.fx.Node]:
    targets = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
    return [n for g in graphs for n in g.nodes if n.target in targets]


def wide_picks(graphs: list[Graph]) -> list[torch.fx.Node]:
    """Rows that are picked, or scattered, in their full width."""
    return [n for n in picks(graphs) if same(n.meta["val"].shape[-1], VOCAB)]


def check(
    picking: Picking,
    dtype: torch.dtype = torch.float32,
    inner: str = "aot_eager",
    dynamic: bool | None = None,
) -> None:
    loss = loss_of(picking)
    torch._dynamo.reset()
    options = OPTIONS | {"inner": inner}
    compiled = torch.compile(
        loss, backend="slime_fused", fullgraph=True, dynamic=dynamic, options=options
    )
    pools = {"value": Pool(), "gradient": Pool()}
    for seed in range(DRAWS):
        x, *rest = draw(seed, dtype)
        wide = x.detach().double().requires_grad_()
        found = []
        for fn, leaf in ((compiled, x), (loss, x), (loss, wide)):
            given = [each.to(leaf.dtype) if each.is_floating_point() else each for each in rest]
            value = fn(leaf, *given)
            found.append((value, *torch.autograd.grad(value, leaf)))
        for pool, each in zip(pools.values(), zip(*found, strict=True), strict=True):
            pool.add(*each)
    for what, pool in pools.items():
        pool.check(what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUMMED)
def test_summed_first(name: str, dtype: torch.dtype, graphs: list[Graph]) -> None:
    check(SUMMED[name], dtype)
    assert not wide_picks(graphs)


@each_inner
@pytest.mark.parametrize("name", ["over their number", "rows by their numbers"])
def test_any_number_of_rows(
    name: str, inner: str, graphs: list[Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check(SUMMED[name], inner=inner, dynamic=True)
    assert len(picks(graphs)) == 2
    assert all(same(n.meta["val"].shape[-1], 1) for n in picks(graphs))


def test_half_precision() -> None:
    """Rows are summed in float32, as in one sum: 3 * 257 is 772 in bfloat16, not 3 * 256."""

    def program(x: Tensor, rows: Tensor) -> Tensor:
        return x[rows].sum()

    x = torch.zeros(5, VOCAB, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = 256, 1
    rows = torch.tensor([4, 0, 2])
    module = make_fx(program, tracing_mode="fake")(x, rows)
    assert sum_first(module.graph, VOCAB) == 1
    module.recompile()
    assert torch.equal(module(x, rows), program(x, rows))


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_in_float64(name: str) -> None:
    """As the program asks: 2 ** 24 + 35 is no number of float32."""

    def loss(x: Tensor, rows: Tensor) -> Tensor:
        return getattr(x[rows], name)(dtype=torch.float64) + 0 * x.logsumexp(-1).sum()

    x = torch.ones(5, VOCAB)
    x[:, 0], x[:, 1] = 2**24, 0
    rows = torch.tensor([4, 0, 2])
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="slime_fused", options=OPTIONS)
    got, wanted = compiled(x, rows), loss(x, rows)
    assert got.dtype is torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_what_stays(name: str, graphs: list[Graph]) -> None:
    check(OTHERS[name])
    assert wide_picks(graphs)


def test_rows_that_leave_stay(graphs: list[Graph]) -> None:
    def loss(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        picked = x.sin()[mask]
        return picked.sum(), picked

    x, _, mask, _ = draw(0, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="slime_fused", options=OPTIONS)
    with torch.no_grad():
        for got, wanted in zip(compiled(x, mask), loss(x, mask), strict=True):
            torch.testing.assert_close(got, wanted)
    assert wide_picks(graphs)


def test_a_gradient_that_leaves_has_memory_of_its_own(graphs: list[Graph]) -> None:
    """Nothing but the sum of picked logits: their gradient is scattered, and is no view of numbers per row."""

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return x[mask].sum()

    x, _, mask, _ = draw(0, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="slime_fused", options=OPTIONS)
    (got,) = torch.autograd.grad(compiled(x, mask), x)
    (wanted,) = torch.autograd.grad(loss(x, mask), x)
    assert torch.equal(got, wanted)
    assert got.stride() == wanted.stride()


def test_what_no_vocabulary_is_stays(graphs: list[Graph]) -> None:
    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return x.sin()[mask].sum()

    x, _, mask, _ = draw(0, torch.float32)
    narrow = x.detach()[..., : OPTIONS["min_vocab"] - 1]
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="slime_fused", options=OPTIONS)
    torch.testing.assert_close(compiled(narrow, mask), loss(narrow, mask))
    (pick,) = picks(graphs)
    assert pick.meta["val"].shape[-1] == narrow.shape[-1]
