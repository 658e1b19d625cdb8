"""The second tier: losses that work row by row, whatever they compute, run over chunks of rows.

Equal to eager code, and nothing of the vocabulary's size is computed as a whole: neither logits that a matmul makes nor
anything between them and the gradients.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

import slime_compile
from bench.cases import public
from bench.cases import rows as cases
from bench.cases.rows import TRAINED, inputs_of, over_heads
from fx_passes.graph.operators import SHOWN
from fx_passes.refused import Refused
from fx_passes.rows import apart
from fx_passes.rows.program import Program
from slime_compile.ops import row_body
from slime_compile.ops.row_loop import Cut, read
from slime_compile.ops.row_loop import Program as RowLoop
from slime_compile.torch_private import functorch_config, inductor_config
from tests.support import harness
from tests.support.program_judge import Judge
from tests.support.programs import Program as Generated
from tests.support.programs import Spec

ROWS, VOCAB, HIDDEN = 44, 160, 12
DRAWS = 4  # of the data, judged together
FROZEN = ("hidden_2", "weight_2")  # a teacher's
LOSSES, HEADS = cases.LOSSES | public.LOSSES, cases.HEADS | public.HEADS
CASES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    **{f"given-{name}": (loss, ()) for name, loss in LOSSES.items()},
    **{f"head-{name}": (over_heads(loss), FROZEN) for name, loss in LOSSES.items()},
    **{f"own-{name}": (loss, ()) for name, loss in HEADS.items()},
}


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    torch._dynamo.reset()
    with harness.chunks_in_bytes():
        yield


def compiled(fn: Callable[..., Any], itemsize: int = 4, **more: Any) -> Callable[..., Any]:
    dynamic = more.pop("dynamic", False)
    chunk = ROWS * VOCAB * itemsize // 4
    options = harness.OPTIONS | {"chunk_mib": chunk} | more
    made: Callable[..., Any] = torch.compile(
        fn, backend="slime_fused", options=options, dynamic=dynamic
    )
    return made


def step(
    fn: Callable[..., Any], given: dict[str, Tensor], frozen: tuple[str, ...] = ()
) -> list[Tensor]:
    """The loss, and the gradients of what is trained."""
    leaves = {
        name: t.detach().clone().requires_grad_() if name in TRAINED and name not in frozen else t
        for name, t in given.items()
    }
    loss = fn(*leaves.values())
    trained = [t for t in leaves.values() if t.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return [loss.detach(), *(g for g in found if g is not None)]


def truth_of(
    fn: Callable[..., Any], given: dict[str, Tensor], frozen: tuple[str, ...] = ()
) -> list[Tensor]:
    wide = dict(zip(given, harness.to_float64(list(given.values())), strict=True))
    return step(fn, wide, frozen)


def check(
    fn: Callable[..., Any],
    given: dict[str, Tensor],
    frozen: tuple[str, ...] = (),
    more: Sequence[dict[str, Tensor]] = (),
    **options: Any,
) -> None:
    """Values and gradients, judged together over `given` and other draws of the same."""
    dtype = given[next(iter(given))].dtype
    run = compiled(fn, dtype.itemsize, **options)
    pools: list[harness.Pool] = []
    for draw in (given, *more):
        got, eager = step(run, draw, frozen), step(fn, draw, frozen)
        truth = truth_of(fn, draw, frozen)
        if not more:
            _check_scalar(got.pop(0), eager.pop(0), truth.pop(0))
        pools = pools or [harness.Pool() for _ in got]
        for pool, *found in zip(pools, got, eager, truth, strict=True):
            pool.add(*found)
    if more:
        _add_eager_draws(pools, fn, frozen, dtype)
    for at, pool in enumerate(pools):
        pool.check(f"{'output' if more else 'gradient'} {at}")


def _add_eager_draws(
    pools: list[harness.Pool], fn: Callable[..., Any], frozen: tuple[str, ...], dtype: torch.dtype
) -> None:
    """What is usual for eager code: one draw does not say it of a loss, or of a number as near to 0 as 1 - p."""
    for seed in range(DRAWS, 16):
        draw = inputs_of(fn, ROWS, VOCAB, dtype, HIDDEN, seed)
        found = zip(pools, step(fn, draw, frozen), truth_of(fn, draw, frozen), strict=True)
        for pool, eager, truth in found:
            pool.more_errors.append(harness.finite_errors(eager, truth))


def _check_scalar(got: Tensor, eager: Tensor, truth: Tensor) -> None:
    """Eager's error of one number may be small by luck; a sum of hundreds is right to a few roundings."""
    assert got.dtype == eager.dtype
    eps = torch.finfo(got.dtype).eps
    allowed = torch.maximum(2 * (eager - truth).abs(), 4 * eps * truth.abs())
    assert (got - truth).abs() <= allowed, (got, eager, truth)


def draws(fn: Callable[..., Any], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [inputs_of(fn, ROWS, VOCAB, dtype, HIDDEN, seed) for seed in range(DRAWS)]


def whole(graph: Graph, rows: int = ROWS) -> list[str]:
    """What is computed as a whole and has the vocabulary's size, loops' results and the gradient that leaves apart."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        if node.target is torch.ops.slime_fused.row_grad.default and _leaves(node):
            continue
        if node.target not in SHOWN | {operator.getitem} and value.numel() >= rows * VOCAB // 2:
            found.append(f"{node.name}: {list(value.shape)}")
    return found


def _leaves(node: Node) -> bool:
    return all(user.op == "output" for user in node.users)


def loops(graph: Graph) -> list[Any]:
    return graph.find_nodes(op="call_function", target=torch.ops.slime_fused.row_loop.default)


def notes() -> list[str]:
    return [note for graph in slime_compile.reports()[-1].graphs for note in graph.notes]


# ---- the table ----------------------------------------------------------------------------------------------------


WIDE = {
    "given-two_answers": "the gradient itself, of a few columns",
    "given-kept_by_gather": "the gradient itself, of a few columns",
    "given-top_k_renormalised": "the gradient itself, of a few columns",
    "given-temperature_of_batches": "the gradient itself, which inductor divides in place",
    "given-cosine_beside": "squares of the teacher, which inductor sums as it computes them",
    "given-balanced": "the teacher's scores, balanced",
}
"""What is computed as a whole, still."""

QUICK = {
    *cases.LOSSES, "adaptive_kl", "decoupled_kd_joined", "top_k_and_tail", "standardised_kd", "earth_mover",
    "correlation_of_rows_and_columns", "smoothed_without_padding", "bi_tempered", "sparsemax", "binary_of_all",
    "typical_columns", "top_p_shifted", "masked_diffusion", "two_answers_of_all", "mutual_information",
    "jensen_shannon_of_batches", "columns_in_the_middle",
}  # fmt: skip
"""Over a head in each run of the tests."""


def _of_table(name: str) -> Any:
    kind, _, loss = name.partition("-")
    quick = kind == "own" or (kind == "head" and loss in QUICK)
    return pytest.param(name, marks=[] if quick else pytest.mark.thorough)


def check_row(name: str, dtype: torch.dtype, graphs: list[Graph]) -> None:
    fn, frozen = CASES[name]
    given, *more = draws(fn, dtype)
    check(fn, given, frozen, more)
    left = [value for graph in graphs for value in whole(graph)]
    assert not left or name in WIDE, left
    assert left or name not in WIDE


@pytest.mark.parametrize("name", [_of_table(name) for name in CASES])
def test_loss(name: str, graphs: list[Graph]) -> None:
    check_row(name, torch.float32, graphs)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("given")])
def test_loss_in_bfloat16(name: str, graphs: list[Graph]) -> None:
    check_row(name, torch.bfloat16, graphs)


SOME = ("given-tsallis", "head-reverse_kl", "head-top_p_by_sort", "own-r_drop", "own-bias_on_head")


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOME)
def test_under_inductor(name: str, graphs: list[Graph], caplog: pytest.LogCaptureFixture) -> None:
    fn, frozen = CASES[name]
    uncached = inductor_config.patch(fx_graph_cache=False)  # the passes are looked at
    with uncached, functorch_config.patch(enable_autograd_cache=False):
        check(fn, inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN), frozen, inner="inductor")
    assert any(loops(graph) for graph in graphs)
    assert "step by step" not in caplog.text


# ---- shapes -------------------------------------------------------------------------------------------------------


def test_batches_and_a_shift(graphs: list[Graph]) -> None:
    """Rows are [B, T], the last of each sequence predicts nothing; the head's matmul has them in one dimension."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        log_p = (hidden[:, :-1] @ weight.t()).log_softmax(-1)
        chosen = log_p.gather(-1, target[:, 1:, None]).squeeze(-1)
        return -chosen.mean() + 0.1 * log_p.exp().square().sum(-1).mean()

    draw = torch.Generator().manual_seed(0)
    given = {
        "hidden": torch.randn(4, 12, HIDDEN, generator=draw),
        "weight": torch.randn(VOCAB, HIDDEN, generator=draw),
        "target": torch.randint(VOCAB, (4, 12), generator=draw),
    }
    check(loss, given)
    assert whole(graphs[0], 44) == []


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _powers(x: Tensor) -> Tensor:
    return (x.softmax(-1) ** 1.5).sum(-1).mean()


def _js(student: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = (student / 2).log_softmax(-1), (teacher / 2).log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return ((log_p.exp() * (log_p - log_m)) + (log_q.exp() * (log_q - log_m))).sum(-1).mean()


PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cut": lambda x, y: _powers(x[:, :-1]),
    "cast before": lambda x, y: _powers(wide(x)[..., :-1, :].contiguous().view(-1, VOCAB)),
    "cast behind": lambda x, y: _powers(wide(x[:, 1:]).reshape(-1, VOCAB)),
    "a temperature before": lambda x, y: _powers((x / 0.7)[:, :-1]),
    "a softcap before": lambda x, y: _powers((torch.tanh(x / 3) * 3)[:, 2:]),
    "cut twice": lambda x, y: _powers(x[:, :-1][:, -6:]),
    "every other": lambda x, y: _powers(x[:, ::2]),
    "some sequences": lambda x, y: _powers(x[1:]),
    "one sequence": lambda x, y: _powers(x[2]),
    "a position": lambda x, y: _powers(x.repeat_interleave(8, 0)[:, -2]),
    "one packed sequence": lambda x, y: _powers(x.view(1, 44, VOCAB)[:, :-4]),
    "a dimension behind": lambda x, y: _powers(x.view(44, 1, VOCAB)[4:]),
    "read twice": lambda x, y: _powers(x[:, 1:]) + _powers(x[:, 1:]),
    "in other shapes": lambda x, y: _powers(x.view(44, VOCAB)[4:].view(4, 10, VOCAB)[:, :-1]),
    "two, with one gradient": lambda x, y: _js(x[:, :-1], y.detach()[:, :-1]),
    "two, with two gradients": lambda x, y: _js(x[:, :-1], y[:, :-1]),
    "two different parts": lambda x, y: _powers(x[:, :-1]) + _powers(x[:, 1:]),
    "with another loss": lambda x, y: (
        F.cross_entropy(x[:, :-1].flatten(0, 1), y.argmax(-1)[:, 1:].flatten()) + _powers(x[:, :-1])
    ),
}
STAY = (
    "a softcap before",
    "a position",
    "one sequence",
    "two different parts",
    "with another loss",
)
"""Their gradient meets another one, or what was done before the cut; or they are few. So it is for two bf16 logits."""


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_given_rows(name: str, dtype: torch.dtype, graphs: list[Graph]) -> None:
    """The loop reads and writes rows of the logits by their numbers."""
    draw = torch.Generator().manual_seed(0)
    given = {
        key: torch.randn(4, 11, VOCAB, generator=draw).to(dtype) for key in ("logits", "hidden")
    }
    check(PARTS[name], given)
    stays = name in STAY or (name.startswith("two") and dtype == torch.bfloat16)
    assert stays or [whole(graph) for graph in graphs] == [[] for _ in graphs]
    check(PARTS[name], given, inner="inductor")


def _apart(a: Tensor, b: Tensor) -> Tensor:
    p, q = wide(a).log_softmax(-1), wide(b).log_softmax(-1)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()


def _with_all(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What reads all rows: a loss, a metric of columns in order, the mean of each column."""
    x = wide(x)
    found = (x.topk(3, -1).values.logsumexp(-1) * x.argmax(-1)).mean()
    return _apart(a, b) + F.cross_entropy(x, x.argmin(-1)) + 1e-3 * found + x.mean(0).square().sum()


MEETING: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: _apart(*x.chunk(2)),
    "halves, and a loss over all": lambda x: _with_all(x, *x.chunk(2)),
    "slices, and a loss over all": lambda x: _with_all(x, x[:22], x[22:]),
    "scaled before": lambda x: _apart((x / 0.7)[:22], (x / 0.7)[22:]),
    "of a stack": lambda x: _with_all(x, *x.view(2, 22, VOCAB)),
    "selected": lambda x: _with_all(x, x.view(2, 22, VOCAB)[1], x.view(2, 22, VOCAB)[0]),
    "of batches": lambda x: _apart(x.view(4, 11, VOCAB)[:2], x.view(4, 11, VOCAB)[2:]),
    "cast before": lambda x: _with_all(x, *wide(x).split(22)),
    "four": lambda x: _apart(*x.chunk(4)[:2]) + _apart(*x.chunk(4)[2:]) + x.mean(),
    "a largest of each column": lambda x: _apart(*x.chunk(2)) + x.amax(0).sum(),
    "a mean of each column, kept as a row": lambda x: (
        _apart(*x.chunk(2)) + x.mean(0, keepdim=True)[0].square().sum()
    ),
    "guided": lambda x: F.cross_entropy(x[22:] + 2 * (x[:22] - x[22:]), x[:22].argmax(-1)),
}


@pytest.mark.parametrize("name", MEETING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_that_meet(name: str, dtype: torch.dtype, graphs: list[Graph]) -> None:
    """One loop makes both parts, each by a matmul of its own."""
    given = {key: t.to(dtype) for key, t in _heads().items()}
    check(_of(MEETING[name]), given)
    assert [whole(graph) for graph in graphs] == [[] for _ in graphs]


@pytest.mark.parametrize("name", MEETING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_given_rows_that_meet(name: str, dtype: torch.dtype, graphs: list[Graph]) -> None:
    """One loop writes the rows of both parts' gradients. A sum of bf16 rows casts them, without storing them."""
    draw = torch.Generator().manual_seed(0)
    given = {"logits": torch.randn(44, VOCAB, generator=draw).to(dtype)}
    check(MEETING[name], given)
    left = [each for graph in graphs for each in whole(graph) if not each.startswith("convert")]
    assert not left
    # inductor (2.15) with AVX2: where(t != -100, t, zero) of int64 tensors is zero, without us, too; so no vectors
    with inductor_config.patch({"cpp.simdlen": 0}):
        check(MEETING[name], given, inner="inductor")


def _beside_statistics(numbers: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Beside log-probs, as trainers write them: a logsumexp for each sample, over all rows for `fuse`."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        z = (hidden @ weight.t()).view(4, 11, VOCAB)[:, :-1]
        target = torch.arange(40).view(4, 10)
        chosen = z.gather(-1, target[..., None]).squeeze(-1)
        log_p = chosen - torch.stack([each.logsumexp(-1) for each in z])
        with torch.no_grad():
            found = numbers(z, target).float()
        return (log_p * (1 + found)).mean()

    return loss


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "argmax": lambda z, t: z.argmax(-1) == t,
    "argmax, kept": lambda z, t: z.argmax(2, keepdim=True).squeeze(-1) == t,
    "of each sample": lambda z, t: torch.stack([each.argmax(-1) for each in z]) == t,
    "several": lambda z, t: z.topk(3, -1).values.sum(-1) / z.topk(2, -1).indices.sum(-1),
    "a largest probability": lambda z, t: z.softmax(-1).max(-1).values,
    "with numbers per row": lambda z, t: (z / (1 + t[..., None])).sigmoid().amax(-1),
    "with a row for all": lambda z, t: (z * torch.linspace(0, 1, VOCAB)).argmin(-1),
    "columns": lambda z, t: z[..., :3].sum(-1) + z[..., [5, 2]].prod(-1),
    "twice": lambda z, t: z.argmax(-1) + z[:, 2:].argmax(-1).sum() + z[:, :5].argmin(-1).sum(),
    "columns of others": lambda z, t: z.gather(-1, t[..., None].expand(4, 10, 7)).sum(-1),
    "the last columns": lambda z, t: z[..., -1] + z[..., -3:].amax(-1) + z[..., [3, 3, -1]].sum(-1),
    "masked": lambda z, t: z.masked_fill(z < 0, -math.inf).argmax(-1) + (z > 2).any(-1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_part_beside_statistics_of_all(name: str) -> None:
    check(_beside_statistics(NUMBERS[name]), _heads())
    report = slime_compile.reports()[-1].to_dict()
    assert (report["stored"], list(report["rejections"])) == (0, [])


def test_a_part_in_another_shape_is_not_a_few_numbers() -> None:
    """Pairs of columns: the last dimension is small, and a row has as many numbers as before."""
    pairs = _beside_statistics(lambda z, t: z.reshape(4, 10, VOCAB // 2, 2).amax((-1, -2)))
    check(pairs, _heads())  # strict: a pass that fails raises


def test_parts_of_another_dtype_are_promoted_first() -> None:
    """The joined rows are float64, and so is what is computed of each half."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        z = hidden @ weight.t()
        both = torch.cat([z, z.double()])
        return both.logsumexp(-1).sum() + both.softmax(-1).square().sum()

    given = inputs_of(loss, ROWS, VOCAB, torch.float32, HIDDEN)
    leaves = {name: each.clone().requires_grad_() for name, each in given.items()}
    got, eager = compiled(loss)(**leaves), loss(**leaves)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, eager, rtol=1e-13, atol=0)


OF_NO_ROW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the largest logit": lambda z, t: z.amax(),
    "reduced once more": lambda z, t: z.logsumexp(-1).mean().logsumexp(-1) + z.mean().amax(-1),
    "turned": lambda z, t: z.square().sum().transpose(0, -1) * t.float().mean().softmax(-1),
    "taken": lambda z, t: z.std().gather(0, t.sum() * 0) + z.norm().topk(1).values.sum(0),
}


@pytest.mark.parametrize("name", OF_NO_ROW)
def test_one_number_that_is_treated_as_a_row(name: str) -> None:
    """Torch takes a scalar for a row of one, and no dimensions for all of them."""
    number = OF_NO_ROW[name]

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        z = hidden @ weight.t()
        return F.cross_entropy(z, target) + number(z, target)

    check(loss, inputs_of(loss, ROWS, VOCAB, torch.float32, HIDDEN))  # strict


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "other rows": lambda x: _apart(x[:-1], x[1:]),
    "of other lengths": lambda x: _apart(x[:20], x[20:40]) + x[40:].square().mean(),
    "parts of parts": lambda x: sum(_apart(x[:11], each) for each in x[11:].split(11)),
    "not all": lambda x: _apart(x[:11], x[11:22]) + x.square().mean(),
}


@pytest.mark.parametrize("name", APART)
def test_parts_that_are_not_all(name: str) -> None:
    check(_of(APART[name]), _heads())


def test_heads_of_which_no_rows_are_taken_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A region takes its time to grow, and a model has many matmuls as wide as a vocabulary."""
    monkeypatch.setattr(apart, "grown", lambda *_: pytest.fail("a region was grown"))
    check(_of(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1).logsumexp(-1).mean()), _heads())


def test_single_rows_that_meet() -> None:
    """There is nothing to cut into chunks."""
    check(lambda hidden, weight: _apart(*(hidden[:2] @ weight.t()).unbind(0)), _heads())


def test_parts_that_meet_of_logits_that_are_returned() -> None:
    """The logits are needed as a whole."""

    def loss(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.t()
        return _apart(*logits.chunk(2)), logits.detach()

    given = _heads()
    check(lambda *args: loss(*args)[0], given)
    for one, other in zip(compiled(loss)(*given.values()), loss(*given.values()), strict=True):
        torch.testing.assert_close(one, other)


def test_parts_of_given_rows_with_any_sizes(graphs: list[Graph]) -> None:
    draw = torch.Generator().manual_seed(0)
    run = compiled(PARTS["cast before"], dynamic=True)
    for rows in (11, 7, 5):
        given = {key: torch.randn(4, rows, VOCAB, generator=draw) for key in ("logits", "hidden")}
        got = step(lambda x, y: run(x, y), given)
        eager, truth = step(PARTS["cast before"], given), truth_of(PARTS["cast before"], given)
        for one, other, true in zip(got, eager, truth, strict=True):
            harness.no_worse_than_eager(one, other, true, torch.float32)
    assert [whole(graph, 8) for graph in graphs] == [[] for _ in graphs]


def test_a_part_that_a_later_loop_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of one of two copies: their gradient is put among both, and the sum of both is the head's."""
    spec = Spec(
        (3, 1), 9, "float32", "float32", ("plain",) * 2, ("inside", "none"), ("plain",), "-100"
    )
    program = Generated(
        (
            "x = F.linear(h, e, e[:, 0])",
            "v0 = x.expand(2, *x.shape)[1]",
            "v1 = F.softmax(v0.roll(1, -1) / tau, dim=-1)",
            "v2 = v1[..., -1]",
            "return (v2.flatten()[1:].sum() + v1.mean(),)",
        ),
        spec,
    )
    monkeypatch.setattr(harness, "OPTIONS", harness.OPTIONS | {"chunk_mib": 64})
    assert Judge().judge(program).kind == "equal"


def test_a_row_that_replaces_another() -> None:
    """Two rows are put at one place, and the second stays: a product over all rows does not read the first."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        rows = (hidden @ weight.t())[3:20].softmax(-1)
        at = torch.arange(17) // 2
        every = torch.zeros(ROWS, VOCAB, dtype=rows.dtype).index_put((at,), rows)
        return (every.t() @ hidden).square().mean()

    check(loss, _heads())


def test_zeros_divided_by_zero() -> None:
    """Rows left out are NaN then, as in eager mode."""

    def loss(logits: Tensor, hidden: Tensor) -> Tensor:
        put = torch.zeros(ROWS, VOCAB).slice_scatter(logits[3:].softmax(-1), 0, 3)
        return put / 0

    logits = torch.randn(ROWS, VOCAB)
    got, eager = compiled(loss)(logits, logits), loss(logits, logits)
    torch.testing.assert_close(got, eager, equal_nan=True)


def _model(leaf: Tensor) -> tuple[Callable[[], Tensor], list[int]]:
    """What makes logits that nothing else holds; the addresses of these and of their gradient, as they come."""
    found: list[int] = []

    def model() -> Tensor:
        made = leaf * 1.0
        found.append(made.data_ptr())
        made.register_hook(lambda grad: found.append(grad.data_ptr()))
        return made

    return model, found


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_parts_are_written_over_the_logits(inner: str) -> None:
    """The gradient of the rows that are left out is zero, in the logits' memory."""
    draw = torch.Generator().manual_seed(0)
    leaf = torch.randn(4, 11, VOCAB, generator=draw).requires_grad_()
    run = compiled(PARTS["cut"], inner=inner)
    model, found = _model(leaf)
    run(model(), leaf.detach()).backward()
    assert found[0] == found[1]
    assert leaf.grad is not None
    assert leaf.grad[:, -1].count_nonzero() == 0
    given = {"logits": leaf.detach(), "hidden": leaf.detach()}
    eager, truth = step(PARTS["cut"], given)[1], truth_of(PARTS["cut"], given)[1]
    harness.no_worse_than_eager(leaf.grad, eager, truth, torch.float32)


def test_given_rows_that_are_not_one_behind_the_other() -> None:
    """`logits[:, :-1]` of several sequences is no view of one dimension of rows."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        p = logits[:, :-1].softmax(-1)
        return (p.square().sum(-1) * target[:, 1:]).mean()

    draw = torch.Generator().manual_seed(0)
    given = {
        "logits": torch.randn(4, 12, VOCAB, generator=draw),
        "target": torch.randint(VOCAB, (4, 12), generator=draw),
    }
    check(loss, given)


def test_chunks_of_rows_in_several_dimensions() -> None:
    """Neighbours are a view; rows of several sequences are put together."""
    every = torch.arange(2 * 4 * 6 * 3).view(2, 4, 6, 3)[:, 1:, :-1]
    rows = every.reshape(30, 3)
    cut = Cut(every, (0, 1, 2))
    for start, stop in ((0, 5), (6, 9), (3, 12), (14, 30), (0, 30)):
        assert torch.equal(cut.at(start, stop), rows[start:stop])
    assert cut.at(16, 19).data_ptr() == every[1, 0, 1].data_ptr()
    turned = Cut(every.movedim(0, 2), (2, 0, 1))
    assert torch.equal(turned.at(3, 12), rows[3:12])


@pytest.mark.parametrize("rows", [1, 2, 3, 45, 53])
def test_any_number_of_rows(rows: int) -> None:
    fn, frozen = CASES["head-symmetric_kl"]
    check(fn, inputs_of(fn, rows, VOCAB, torch.float32, HIDDEN), frozen, chunk_mib=VOCAB * 4 * 4)


def test_no_rows() -> None:
    """A rank without a response token."""
    fn, _ = CASES["own-bias_on_head"]
    run = compiled(lambda *args: fn(*args) * len(args[0]), chunk_mib=VOCAB * 16, dynamic=True)
    step(run, inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN))
    none = {
        name: t[:0] if t.shape[:1] == (ROWS,) else t
        for name, t in inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN).items()
    }
    _, *gradients = step(lambda *args: run(*args).nan_to_num(), none)
    assert all(not g.nan_to_num().any() for g in gradients)


def test_dynamic_sizes(graphs: list[Graph]) -> None:
    fn, frozen = CASES["head-reverse_kl"]
    run = compiled(fn, dynamic=True)
    for rows in (ROWS, ROWS + 9, 2 * ROWS):
        given = inputs_of(fn, rows, VOCAB, torch.float32, HIDDEN)
        got, eager, truth = (
            step(run, given, frozen),
            step(fn, given, frozen),
            truth_of(fn, given, frozen),
        )
        for one, other, true in zip(got, eager, truth, strict=True):
            harness.no_worse_than_eager(one, other, true, torch.float32)
    assert len(graphs) == 1
    assert loops(graphs[0])


# ---- the gradient in forward --------------------------------------------------------------------------------------


def matmuls_of(graph: Graph) -> int:
    return sum(str(node.args).count("aten.mm.default") for node in loops(graph))


def test_the_gradient_is_made_in_forward(graphs: list[Graph]) -> None:
    """One loop makes the logits once: a scalar loss is what backward's number is multiplied with."""
    fn, frozen = CASES["head-accuracy_beside"]
    check(fn, inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN), frozen)
    assert len(loops(graphs[0])) == 1


@pytest.mark.parametrize("option", ["never"])
def test_the_gradient_is_made_in_backward(option: str, graphs: list[Graph]) -> None:
    fn, frozen = CASES["head-accuracy_beside"]
    check(fn, inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN), frozen, grad_in_forward=option)
    assert len(loops(graphs[0])) == 2


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1e-3, 1e-3)


def _cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), target)


@pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_overwrites_the_logits_of_a_loop(
    dtype: torch.dtype, inner: str, graphs: list[Graph]
) -> None:
    given = _heads(dtype) | {"target": torch.arange(ROWS)}
    check(_cross_entropy, given, inner=inner)
    if inner == "aot_eager":
        assert "slime_fused.row_grad_.default" in str([node.args for node in loops(graphs[0])])


def _value(kind: str, at: int) -> dict[str, Any]:
    return {"v": (kind, at)}


MATMUL = ["aten.mm.default", [_value("rows", 0), _value("whole", 0)], {}]
VIEW = ["aten.view.default", [_value("step", 0), [{"n": 1}, 1, 7]], {}]
GRADIENT = ["slime_fused.row_grad.default", [_value("step", 1), *range(7)], {}]


@pytest.mark.parametrize(
    ("first", "later", "results"),
    [
        (MATMUL, [["aten.exp.default", [_value("step", 0)], {}]], []),
        (MATMUL, [["aten.exp.default", [_value("step", 1)], {}]], []),
        (MATMUL, [], [["rows", _value("step", 1), "float32", [7]]]),
        (["aten.exp.default", [_value("rows", 0)], {}], [], []),
        (["aten.slice.Tensor", [_value("rows", 0), 1, 0, 7], {}], [], []),
    ],
)
def test_a_gradient_that_does_not_overwrite(first: Any, later: Any, results: Any) -> None:
    """A step or a result reads the logits again, by whatever view, or no matmul of the loop makes them."""
    program = Program.__new__(Program)
    program.steps, program.results = [first, VIEW, GRADIENT, *later], results
    program._write_over_logits(("step", 2))
    assert program.steps[2] is GRADIENT
    program.steps, program.results = [MATMUL, VIEW, GRADIENT], []
    program._write_over_logits(("step", 2))
    assert program.steps[2][0] == "slime_fused.row_grad_.default"


def test_a_gradient_does_not_overwrite_a_piece_that_is_read_later() -> None:
    program = Program.__new__(Program)
    split: list[Any] = ["aten.split.Tensor", [_value("step", 0), 80, 1], {}]
    piece: list[Any] = ["getitem", [_value("step", 2), 0], {}]
    later: list[Any] = ["aten.exp.default", [_value("step", 3)], {}]
    program.steps, program.results = [MATMUL, VIEW, split, piece, GRADIENT, later], []
    program._write_over_logits(("step", 4))
    assert program.steps[4] is GRADIENT


def test_a_gradient_does_not_overwrite_repeated_logits() -> None:
    program = Program.__new__(Program)
    repeated: list[Any] = ["aten.expand.default", [_value("step", 0), [{"n": 1}, 2, 7]], {}]
    program.steps, program.results = [MATMUL, repeated, GRADIENT], []
    program._write_over_logits(("step", 2))
    assert program.steps[2] is GRADIENT


def test_values_of_logits_are_computed_before_the_gradient_overwrites_them() -> None:
    """Inductor computes an element-wise value at its reader's place, which may come after the gradient's."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        chosen = F.log_softmax(logits, -1).gather(-1, target[:, None]).squeeze(-1)
        entropy = torch.logsumexp(logits, -1) - (logits.softmax(-1) * logits).sum(-1)
        return (chosen.exp() * chosen - 0.01 * entropy).sum()

    given = _heads(torch.float32) | {"target": torch.arange(ROWS)}
    check(loss, given, inner="inductor", grad_in_forward="always")


def test_what_a_gradient_comes_after() -> None:
    """The values of its logits that a later step or a result reads, and no others."""
    steps: tuple[Any, ...] = (
        ["aten.mm.default", [{"v": 0}, {"v": 1}], {}],
        ["aten.exp.default", [{"v": 2}], {}],
        ["aten.sin.default", [{"v": 3}], {}],
        ["aten.cos.default", [{"v": 3}], {}],
        ["aten.cos.default", [{"v": 0}], {}],
        ["aten.view.default", [{"v": 2}, [{"n": 1}, 7]], {}],
        ["slime_fused.row_grad_.default", [{"v": 7}, {"v": 5}], {}],
        ["aten.add.Tensor", [{"v": 4}, {"v": 6}], {}],
    )
    told = row_body.Steps(steps, (3,), (9,))
    assert row_body._Compiled("", told)._read_before(6, 2) == [3, 4]


def test_code_runs_for_the_numbers_of_rows_that_it_is_right_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor decides some things by the number that it is shown, and guards what it took for granted."""
    shown: list[int] = []

    def compile_fx(module: torch.nn.Module, given: list[Tensor]) -> Callable[..., Any]:
        rows = given[0].shape[0]
        is_even = bool(rows % 2 == 0)
        shown.append(rows.node.hint)
        return lambda *_: [torch.tensor(is_even)]

    monkeypatch.setattr("slime_compile.torch_private.compile_fx", compile_fx)
    monkeypatch.setattr(row_body, "_kept", {})
    steps = row_body.Steps((("aten.sum.dim_IntList", [{"v": 0}, [0]], {}),), (), (1,))
    for count in (4, 6, 5, 7, 8):
        chunk = row_body.Chunk([torch.zeros(count, 3)], [], (), [])
        assert row_body._Compiled("", steps)(chunk)[1] == (count % 2 == 0)
    assert shown == [4, 5]


def test_a_gradient_that_the_program_clips_waits(graphs: list[Graph]) -> None:
    """What is not linear in the loss's gradient is made for the number that backward brings."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        squares = (hidden @ weight.t()).softmax(-1).square().sum(-1)
        return _Clipped.apply(squares).mean()  # type: ignore[no-any-return]

    draw = torch.Generator().manual_seed(0)
    given = {
        "hidden": torch.randn(ROWS, HIDDEN, generator=draw),
        "weight": torch.randn(VOCAB, HIDDEN, generator=draw),
    }
    check(lambda h, w: 5 * loss(h, w), given)
    assert len(loops(graphs[0])) == 2
    assert waits("is not linear in the loss's gradient")


def test_rows_that_are_returned_wait(graphs: list[Graph]) -> None:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.t()).softmax(-1).square().sum(-1)

    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    upstream = torch.randn(ROWS, generator=draw)
    run = compiled(loss)

    def outer(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda h, w: (fn(h, w) * upstream.to(h.dtype)).sum()

    given = {"hidden": hidden, "weight": weight}
    got, eager, truth = (
        step(outer(run), given),
        step(outer(loss), given),
        truth_of(outer(loss), given),
    )
    for one, other, true in zip(got, eager, truth, strict=True):
        harness.no_worse_than_eager(one, other, true, torch.float32)
    assert len(loops(graphs[0])) == 2


def waits(reason: str) -> bool:
    """Whether the report says that the gradient is taken in backward for this reason."""
    return any("the gradient is computed in backward: " in n and reason in n for n in notes())


def _of(loss: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda hidden, weight: loss(hidden @ weight.t())


def _heads(dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(ROWS, HIDDEN, generator=draw).to(dtype),
        "weight": torch.randn(vocab, HIDDEN, generator=draw).to(dtype),
    }


def _squares(logits: Tensor) -> Tensor:
    return logits.softmax(-1).square().sum(-1)


class _Best(torch.autograd.Function):
    """Of the gradients of two rows the larger one goes on to both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.sort().values


WAITING: dict[str, tuple[str, Callable[..., Tensor], dict[str, Tensor]]] = {
    "sequences": (
        "it needs sums over all rows of the loss",
        _of(lambda x: _squares(x).view(4, 11).mean(1).exp().square().mean()),
        _heads(),
    ),
    "a sorted gradient": (
        "depends on the loss's gradient",
        _of(lambda x: _Best.apply(_squares(x)).mean()),  # type: ignore[no-any-return]
        _heads(),
    ),
    "float16": (
        "float16 has no room for a gradient before the loss is scaled",
        _of(lambda x: _squares(x.float()).mean()),
        _heads(torch.float16),
    ),
    "a checkpoint inside": (
        "a checkpoint recomputes it in backward",
        lambda h, w: checkpoint(lambda a, b: _squares(a @ b.t()), h, w, use_reentrant=False).mean(),
        _heads(),
    ),
    "few rows in bfloat16": (
        "its sum would take",
        _of(lambda x: _squares(x.float()).mean()),
        _heads(torch.bfloat16),
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_gradient_waits(name: str, graphs: list[Graph]) -> None:
    reason, fn, given = WAITING[name]
    check(fn, given)
    assert len(loops(graphs[0])) >= 2
    assert waits(reason)


def test_logits_that_are_added_to_given_ones_wait() -> None:
    """Their gradient is one of given logits, too."""

    def loss(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        return _squares(logits + hidden @ weight.t()).mean()

    draw = torch.Generator().manual_seed(0)
    check(loss, {"logits": torch.randn(ROWS, VOCAB, generator=draw), **_heads()})
    assert waits("the gradient is as large as the logits")


def test_arguments_that_a_text_cannot_hold() -> None:
    program = object.__new__(Program)
    program.sizes = []
    with pytest.raises(Refused, match="an argument is 1j"):
        program._argument(1j)
    node = Graph().placeholder("given")
    node.meta["val"] = 1.0
    with pytest.raises(Refused, match="an argument is given, no size"):
        program._size(node)


# ---- values that are computed twice ------------------------------------------------------------------------------


CALLED = row_body._called


def _shaken(name: str, *more: Any) -> Any:
    """What the operator of that name gives; a matmul is rounded otherwise each time."""
    found = CALLED(name, *more)
    return found * (1 + 1e-6 * (torch.rand([]) - 0.5)) if name == "aten.mm.default" else found


TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "a maximum": lambda x: (x.logsumexp(-1) + x.amax(-1).square()).mean(),
    "of a softmax": lambda x: x.softmax(-1).amax(-1).mean() + _squares(x).mean(),
    "a threshold": lambda x: (
        x.masked_fill(x < x.topk(9).values[:, -1:], -9.0).logsumexp(-1).square().mean()
    ),
    "half a maximum": lambda x: (
        (x.softmax(-1) * (x >= x.detach().amax(-1, keepdim=True))).sum(-1).square().mean()
    ),
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("when", ["auto", "never"])
def test_what_is_compared_is_of_one_matmul(
    name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later loop computes logits again; the maximum that an earlier one found may not be among them."""
    monkeypatch.setattr(row_body, "_called", _shaken)
    loss, given = _of(TWICE[name]), _heads()
    got, eager = step(compiled(loss, grad_in_forward=when), given), step(loss, given)
    torch.testing.assert_close(got, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "sorts", "kept"),
    [
        ("given-top_p_shifted", 1, 1),
        ("given-top_p_by_sort", 1, 1),
        ("given-entropy_of_top_p", 2, 0),  # the gradient needs the order, too
        ("head-top_p_shifted", 1, 0),  # forward makes the gradient
    ],
)
def test_columns_are_sorted_once(name: str, sorts: int, kept: int, graphs: list[Graph]) -> None:
    """A mask that forward makes of the order is kept, where backward needs nothing else of it."""
    fn, frozen = CASES[name]
    check(fn, inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN), frozen)
    (graph,) = graphs
    programs = [read(node.args[3]) for node in loops(graph)]
    assert sum(step[0].startswith("aten.sort") for p in programs for step in p.steps) == sorts
    assert (
        sum(each[2] == "bool" and each[3] == [VOCAB] for p in programs for each in p.results)
        == kept
    )


def test_masks_of_a_heads_sorted_columns_are_not_kept(graphs: list[Graph]) -> None:
    fn, frozen = CASES["head-top_p_shifted"]
    given = inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN)
    check(fn, given, frozen, grad_in_forward="never")
    results = [each for node in loops(graphs[0]) for each in read(node.args[3]).results]
    assert not [each for each in results if each[2] == "bool"]


# ---- where the gradient lies --------------------------------------------------------------------------------------


def test_second_backward() -> None:
    """`retain_graph=True`: nothing is written over what the second one reads."""
    fn, _ = CASES["given-tsallis"]
    logits = inputs_of(fn, ROWS, VOCAB, torch.float32)["logits"]
    run = compiled(fn)
    leaf = logits.clone().requires_grad_()
    loss = run(leaf * 1.0)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(kept, second)
    assert torch.equal(kept, first)


def test_logits_that_a_variable_holds_are_kept() -> None:
    fn, _ = CASES["given-tsallis"]
    leaf = inputs_of(fn, ROWS, VOCAB, torch.float32)["logits"].requires_grad_()
    held = leaf * 1.0
    before = held.detach().clone()
    compiled(fn)(held).backward()
    assert torch.equal(held, before)


def test_logits_that_nothing_holds_are_written_over() -> None:
    fn, _ = CASES["given-tsallis"]
    leaf = inputs_of(fn, ROWS, VOCAB, torch.float32)["logits"].requires_grad_()
    run = compiled(fn)
    model, _ = _model(leaf)
    run(model()).backward()
    assert "reuses the logits' buffer" in str(slime_compile.reports()[-1])
    assert leaf.grad is not None
    (truth,) = truth_of(fn, {"logits": leaf.detach()})[1:]
    (eager,) = step(fn, {"logits": leaf.detach()})[1:]
    harness.no_worse_than_eager(leaf.grad, eager, truth, torch.float32)


def test_what_a_sum_reads_is_not_written_over() -> None:
    """A gradient of numbers as many as hidden states, which the product for another gradient reads after it."""
    fn, frozen = CASES["own-lora_head"]
    given, *more = draws(fn, torch.float32)
    check(fn, given, frozen, more, grad_in_forward="never")
    check(fn, given, frozen, more, grad_in_forward="never", inner="inductor")


def _loop(steps: list[Any], results: list[Any]) -> RowLoop:
    return RowLoop(((0,), (0,)), (-1, -1), tuple(steps), tuple(results), (VOCAB, 4))


def test_whether_a_sum_reads_a_tensor() -> None:
    """Tensors 0 and 1 have rows, 2 is whole; the first step's value is number 3."""
    product = ["product", {"v": 4}, {"v": 1}, "float32", [VOCAB, HIDDEN]]
    turned = ["aten.permute.default", [{"v": 3}, [0, 1]], {}]
    shown = _loop([["aten.reshape.default", [{"v": 0}, [{"n": 1}, VOCAB]], {}], turned], [product])
    assert [shown.sums_read(at, 3) for at in (0, 1)] == [True, True]
    made = _loop([["aten.exp.default", [{"v": 0}], {}], turned], [product])
    assert [made.sums_read(at, 3) for at in (0, 1)] == [False, True]


def test_what_the_body_writes_itself() -> None:
    """Rows of many numbers; a few numbers per row are handed out and copied."""
    rows = [
        ["rows", {"v": 3 + at}, "float32", sizes] for at, sizes in enumerate(([VOCAB], [], [9]))
    ]
    loop = _loop([["aten.exp.default", [{"v": 0}], {}]] * 3, rows)
    assert (loop.steps_of(None).written, loop.steps_of(None).returned) == ((3,), (4, 5))
    assert (loop.steps_of((0, 0)).written, loop.steps_of((0, 0)).over) == ((), (3, 0))


# ---- what else there is -------------------------------------------------------------------------------------------


def test_checkpoint() -> None:
    fn, frozen = CASES["head-tsallis"]
    run = compiled(fn)
    given = inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN)
    got = step(lambda *args: checkpoint(run, *args, use_reentrant=False), given, frozen)
    eager, truth = step(fn, given, frozen), truth_of(fn, given, frozen)
    for one, other, true in zip(got, eager, truth, strict=True):
        harness.no_worse_than_eager(one, other, true, torch.float32)


def test_without_gradient(graphs: list[Graph]) -> None:
    fn, _ = CASES["head-reverse_kl"]
    given = inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN)
    with torch.no_grad():
        got = compiled(fn)(*given.values())
        eager = fn(*given.values())
    truth = fn(*harness.to_float64(list(given.values())))
    harness.no_worse_than_eager(got, eager, truth, torch.float32)
    assert whole(graphs[0]) == []


def test_a_gradient_that_the_program_takes_itself(graphs: list[Graph]) -> None:
    """`torch.func.grad` inside: everything is forward, and one loop makes it."""

    def step_of(hidden: Tensor, weight: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return (hidden @ w.t()).softmax(-1).square().sum(-1).mean()

        return torch.func.grad(loss)(weight)

    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    got, eager = compiled(step_of)(hidden, weight), step_of(hidden, weight)
    harness.no_worse_than_eager(
        got, eager, step_of(hidden.double(), weight.double()), torch.float32
    )
    assert whole(graphs[0]) == []


def test_verified(graphs: list[Graph]) -> None:
    """A loop that computes something else is refused, and the graph stays as it was."""
    fn, frozen = CASES["head-tsallis"]
    given = inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN)
    check(fn, given, frozen, verify=True)
    assert loops(graphs[-1])
    torch._dynamo.reset()
    with mock.patch.object(
        sys.modules["slime_compile.ops.row_loop"].Sum,
        "add",
        lambda self, left, right: self.out.zero_(),
    ):
        check(fn, given, frozen, verify=True)
    assert not loops(graphs[-1])
    reasons = [r.reason for graph in slime_compile.reports()[-1].graphs for r in graph.rejections]
    assert any(reason.startswith("verify=True: ") for reason in reasons)


def test_switched_off(graphs: list[Graph]) -> None:
    fn, frozen = CASES["head-tsallis"]
    check(fn, inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN), frozen, by_rows=False)
    assert not loops(graphs[0])
    assert whole(graphs[0])


def test_what_one_pass_makes_stays_one_pass(graphs: list[Graph]) -> None:
    """Fused operators over given logits hold nothing of the vocabulary's size: a loop would only add a chunk."""

    def policy(logits: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
        log_p = torch.log_softmax(logits.float(), -1)
        chosen = log_p.gather(-1, target[:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return -(advantages * chosen).mean() - 0.01 * entropy.mean()

    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=draw).requires_grad_()
    target = torch.randint(VOCAB, (ROWS,), generator=draw)
    advantages = torch.randn(ROWS, generator=draw)
    check(policy, {"logits": logits, "target": target, "advantages": advantages})
    assert [loops(graph) for graph in graphs] == [[] for _ in graphs]
    assert [whole(graph) for graph in graphs] == [[] for _ in graphs]


# ---- what is refused ----------------------------------------------------------------------------------------------


def _clip(hidden: Tensor, weight: Tensor) -> Tensor:
    """Softmax over rows and over columns of one matrix."""
    scores = hidden @ weight.t()
    return scores.log_softmax(1).exp().square().sum() + scores.log_softmax(0).diagonal().sum()


def test_softmax_over_rows_and_columns() -> None:
    draw = torch.Generator().manual_seed(0)
    given = {
        "hidden": torch.randn(VOCAB, HIDDEN, generator=draw),
        "weight": torch.randn(VOCAB, HIDDEN, generator=draw),
    }
    check(_clip, given)


def _dropped(hidden: Tensor, weight: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(hidden @ weight.t(), 0.5).softmax(-1).square().sum(-1).mean()


def test_dropout_draws_what_it_would() -> None:
    """Random numbers are drawn for all rows at once, as without loops."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=draw)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw)
    plain = torch.compile(_dropped, backend=harness.PLAIN)
    torch.manual_seed(5)
    wanted = plain(hidden, weight)
    torch._dynamo.reset()
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(_dropped)(hidden, weight), wanted)


def test_sorting_over_rows() -> None:
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        p = (hidden @ weight.t()).softmax(-1)
        return (p.sort(dim=0).values * p.square()).sum(-1).mean()

    draw = torch.Generator().manual_seed(0)
    given = {
        "hidden": torch.randn(ROWS, HIDDEN, generator=draw),
        "weight": torch.randn(VOCAB, HIDDEN, generator=draw),
    }
    check(loss, given)


def test_logits_that_the_function_changes() -> None:
    """Backward would read again what forward was given, after forward has written over it."""

    def squares(logits: Tensor) -> Tensor:
        return logits.softmax(-1).square().sum(-1).mean()

    def changing(logits: Tensor) -> Tensor:
        loss = squares(logits)
        with torch.no_grad():
            logits.mul_(0.5)
        return loss

    logits = inputs_of(LOSSES["tsallis"], ROWS, VOCAB, torch.float32)["logits"]
    gradients = []
    for fn in (squares, compiled(changing)):
        leaf = logits.clone().requires_grad_()
        fn(leaf * 1.0).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    reasons = [r.reason for graph in slime_compile.reports()[-1].graphs for r in graph.rejections]
    assert "the function changes in place a value a loop would read again" in reasons


def test_rows_that_are_all_the_same(graphs: list[Graph]) -> None:
    """Copies of one row are no rows to cut."""
    check(_of(lambda x: _squares(x[:1].expand(ROWS, VOCAB)).mean()), _heads())
    assert not loops(graphs[0])


def test_batches_that_are_turned() -> None:
    """A gradient that comes back in another order of the rows, with as many batches as places."""

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden.view(6, 6, HIDDEN) @ weight.t()
        turned = logits.transpose(0, -1).softmax(0).transpose(0, -1)
        return (turned.square().sum(-1) * logits.square().mean(-1)).mean()

    draw = torch.Generator().manual_seed(0)
    given = {
        "hidden": torch.randn(36, HIDDEN, generator=draw),
        "weight": torch.randn(VOCAB, HIDDEN, generator=draw),
    }
    check(loss, given)


def test_names_of_the_table() -> None:
    """Every loss of the bench is a case here."""
    assert {name.partition("-")[2] for name in CASES} == LOSSES.keys() | HEADS.keys()
    assert all(inspect.signature(fn).parameters for fn, _ in CASES.values())


def test_report() -> None:
    fn, frozen = CASES["own-two_tokens_ahead"]
    check(fn, inputs_of(fn, ROWS, VOCAB, torch.float32, HIDDEN), frozen)
    (line,) = [note for note in notes() if note.startswith("the logits")]
    assert "are never materialised in full: chunks of " in line
    assert "rows.py:" in line
    rejections = [r for graph in slime_compile.reports()[-1].graphs for r in graph.rejections]
    assert not [r for r in rejections if "argmax" in r.reason]
