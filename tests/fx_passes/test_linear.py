"""Logits that a matmul in the graph makes are never whole: values, gradients, graph, report; and what refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

import slime_compile
from fx_passes.rows import RowsConfig, by_rows
from tests.cases.heads import HEADS, values_of
from tests.cases.spellings import Outputs, Spelling
from tests.support import harness
from tests.support.harness import HIDDEN, ROWS, VOCAB

CHUNK = 2 * VOCAB  # elements: two rows, so that all logits are several chunks, the last one ragged
MATMULS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"}


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    torch._dynamo.reset()
    with harness.chunks_in_bytes():
        yield


def compiled(fn: Callable[..., Any], itemsize: int = 4, **more: Any) -> Callable[..., Any]:
    own = {"chunk_mib": CHUNK * itemsize, "grad_in_forward": "never"}
    chosen = harness.OPTIONS | own | more
    dynamic = chosen.pop("dynamic", False)
    made: Callable[..., Any] = torch.compile(
        fn, backend="slime_fused", options=chosen, dynamic=dynamic
    )
    return made


def full_logits(graph: Graph) -> list[str]:
    """Floating values with a vocabulary and several rows, other than the weight, its views and its gradients."""
    found = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.dim() < 2:
            continue
        wide = VOCAB in (value.shape[-1], value.shape[-2]) and HIDDEN not in value.shape
        if wide and value.dtype.is_floating_point and value.numel() > VOCAB:
            found.append(node.name)
    return found


def last_report() -> dict[str, Any]:
    return slime_compile.reports()[-1].to_dict()


def notes(report: dict[str, Any]) -> list[str]:
    """What is said of heads; how many rows are made is another matter (test_fewer_rows.py)."""
    every = [note for graph in report["graphs"] for note in graph["notes"]]
    return [note for note in every if not note.startswith("rows computed: ")]


# ---- what is never whole ------------------------------------------------------------------------------------------

CASES = [
    pytest.param(row, dtype, id=f"{row.name}-{str(dtype).removeprefix('torch.')}")
    for row in HEADS
    for dtype in row.dtypes
]


@pytest.mark.parametrize(("row", "dtype"), CASES)
def test_head(row: Spelling, dtype: torch.dtype, graphs: list[Graph]) -> None:
    harness.prepare(row)
    function = compiled(row.fn, dtype.itemsize, chunk_mib=CHUNK * dtype.itemsize)
    harness.compare(function, row, dtype, data=row.data)
    report = last_report()
    assert report["fused"] == row.fused, report["rejections"]
    assert sum("are never materialised in full" in note for note in notes(report)) == row.fused // 2
    assert report["rejections"] == []
    assert not full_logits(graphs[-1])


@pytest.mark.parametrize("row", HEADS, ids=str)
def test_head_without_gradient(row: Spelling, graphs: list[Graph]) -> None:
    with torch.no_grad():
        harness.prepare(row)
        inputs = harness.make_inputs(row, torch.float32, 0)
        got, want = compiled(row.fn)(*inputs), row.fn(*inputs)
    for mine, eager in zip(got, want, strict=True):
        torch.testing.assert_close(mine, eager)
    assert not full_logits(graphs[-1])
    assert last_report()["fused"] == row.fused // 2


ANY_ROWS = (
    "bias_of_sequences",
    "einsum",
    "cross_entropy",
    "temperature_of_each_sequence",
    "shifted",
    "softcap_of_sequences",
)


@pytest.mark.parametrize("row", [row for row in HEADS if row.name in ANY_ROWS], ids=str)
def test_head_with_any_number_of_rows(
    row: Spelling, graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of rows is symbolic, and the next call has another."""
    harness.prepare(row)
    function = compiled(row.fn, dynamic=True)
    harness.compare(function, row, torch.float32, data=row.data, draws=2)
    made = len(graphs)
    harness.compare(function, row, torch.float32, data=row.data, draws=2, rows=ROWS + 4)
    assert len(graphs) == made
    assert not full_logits(graphs[-1])


def _plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return (F.cross_entropy(logits.float(), target),)


def _halves_that_meet(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    log_p = logits.float().log_softmax(-1)
    one, other = log_p.chunk(2)
    return ((one.exp() * (one - other)).sum() + log_p.gather(-1, target[:, None]).sum(),)


def _joined_with_numbers(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    every = torch.cat([logits, 2 * logits[1:]])
    log_p = every.float().log_softmax(-1)
    return (log_p[torch.arange(len(every)), torch.cat([target, target[1:]])].sum(),)


def _number_of_chosen(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    chosen = logits.float()[target > 9]
    losses = F.cross_entropy(chosen, target[target > 9], reduction="none")
    return ((losses * torch.arange(len(chosen))).sum(),)


def _piece_of_no_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    total = hidden.new_zeros([], dtype=torch.float32)
    for start, stop in ((0, 2), (2, 4), (4, 8), (8, None)):
        logits = hidden[start:stop] @ weight.t()
        total = total + F.cross_entropy(logits.float(), target[start:stop], reduction="sum")
    return (total,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fn", [_plain, _halves_that_meet, _joined_with_numbers, _number_of_chosen, _piece_of_no_rows]
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_symbolic_sizes(fn: Callable[..., Outputs], dtype: torch.dtype) -> None:
    """In the rows that a program takes and joins, and in the columns of backward's chunks."""
    function = compiled(fn, dtype.itemsize, dynamic=True)
    for rows in (8, 12):
        hidden, weight, target = example(rows)
        inputs = [each.detach().to(dtype).requires_grad_() for each in (hidden, weight)]
        every = zip(
            _with_gradients(function, [*inputs, target]),
            _with_gradients(fn, [*inputs, target]),
            strict=True,
        )
        near = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {}
        for got, want in every:
            torch.testing.assert_close(got, want, **near)


UNDER_INDUCTOR = ["linear_with_bias", "shifted", "einsum", "policy"]


@pytest.mark.parametrize(
    "name",
    ["softcap", *(pytest.param(name, marks=pytest.mark.thorough) for name in UNDER_INDUCTOR)],
)
def test_head_under_inductor(name: str) -> None:
    row = next(row for row in HEADS if row.name == name)
    harness.prepare(row)
    function = compiled(row.fn, inner="inductor")
    harness.compare(function, row, torch.float32, data=row.data, draws=2)
    assert last_report()["fused"] == row.fused


def test_autocast() -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(hidden, weight)
        return values_of(logits.float(), target)

    hidden, weight, target = example()
    got = compiled(loss, 2)(hidden, weight, target)
    want = loss(hidden, weight, target)
    for mine, eager in zip(got, want, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-2, atol=1e-2)
    mine = torch.autograd.grad(got[0].sum() + got[1].sum(), (hidden, weight))
    eager = torch.autograd.grad(want[0].sum() + want[1].sum(), (hidden, weight))
    for one, other in zip(mine, eager, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert "are never materialised in full" in notes(last_report())[0]


def example(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, generator=draw).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=draw).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (rows,), generator=draw)


def head_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(hidden @ weight.t(), target)


# ---- what the report says -----------------------------------------------------------------------------------------


def test_report_has_the_chunks() -> None:
    compiled(head_loss)(*example(rows=8))
    report = last_report()
    (note,) = notes(report)
    assert note.startswith("the logits [8, 37] at ")
    assert (
        "are never materialised in full: chunks of 2 x 37; the gradient is computed in backward: "
        in note
    )
    assert report["saved_bytes_after"] == 0
    assert report["chunked_heads"] == 1
    # there are no logits that a gradient could be written beside
    slime_compile.reports()[-1].assert_fused(2, in_place=True)


def test_verified() -> None:
    compiled(head_loss, verify=True)(*example())
    assert "are never materialised in full" in notes(last_report())[0]


# ---- what stays ---------------------------------------------------------------------------------------------------


def test_switched_off(graphs: list[Graph]) -> None:
    compiled(head_loss, lm_head=False)(*example())
    assert full_logits(graphs[-1])
    assert notes(last_report()) == []


def test_logits_that_are_one_chunk_stay(graphs: list[Graph]) -> None:
    """Made again in backward, they would take longer and no less memory."""
    compiled(head_loss, chunk_mib=4 * ROWS * VOCAB)(*example())
    assert full_logits(graphs[-1])
    assert notes(last_report()) == []


def _argmax(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(logits, target), logits.argmax(-1)


def _returned(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(logits, target), logits


def _bent(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(torch.sin(hidden @ weight.t()), target)


def _read_before_the_softcap(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(2 * torch.tanh(logits / 2), target), logits.argmax(-1)


def _capped_in_bfloat16(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(torch.tanh((hidden @ weight.t()).bfloat16() / 2).float(), target)


class _CapWithoutGradient(torch.autograd.Function):
    """The gradient goes through as if there were no softcap."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return torch.tanh(logits / 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.view_as(grad)


def _capped_without_gradient(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(_CapWithoutGradient.apply(hidden @ weight.t()), target)


def _matrix_added(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(torch.addmm(hidden[:, :1], hidden, weight.t()), target)


def _batched(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = torch.bmm(hidden.expand(2, -1, -1), torch.stack([weight, 2 * weight]).mT)
    return values_of(logits, torch.stack([target, target]))


def _rows_joined(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return values_of(torch.cat([logits[4:], logits[:4]]), target)


ROW_BY_ROW = [
    _argmax,
    _bent,
    _read_before_the_softcap,
    _capped_in_bfloat16,
    _capped_without_gradient,
    _matrix_added,
]


@pytest.mark.parametrize("fn", ROW_BY_ROW)
def test_other_work_on_rows(fn: Callable[..., Outputs], graphs: list[Graph]) -> None:
    inputs = example()
    near = {"rtol": 0.05, "atol": 0.01} if fn is _capped_in_bfloat16 else {}
    every = zip(_with_gradients(compiled(fn), inputs), _with_gradients(fn, inputs), strict=True)
    for got, want in every:
        torch.testing.assert_close(got, want, **near)
    assert not full_logits(graphs[-1])
    assert last_report()["chunked_heads"] == 1


@pytest.mark.parametrize("lead", [(), (1,), (ROWS,)], ids=str)
def test_addmm_in_half_precision(lead: tuple[int, ...]) -> None:
    """Factors of the two addends, and a bias of each shape: backward cuts columns only of a bias of columns."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        logits = torch.addmm(bias, hidden, weight.t(), beta=0.5, alpha=2)
        return (F.cross_entropy(logits.float(), target),)

    hidden, weight, target = example()
    inputs = [each.detach().bfloat16().requires_grad_() for each in (hidden, weight)]
    bias = torch.randn(*lead, VOCAB).bfloat16()
    found = _with_gradients(compiled(loss, 2), [*inputs, target])
    for got, want in zip(found, _with_gradients(loss, [*inputs, target]), strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("batch", [1, 3])
def test_numbers_per_row_for_chunks_of_columns(batch: int) -> None:
    """Of a softmax over the columns, and of one over the rows: forward's loop has made them with its rows in front."""

    def loss(hidden: Tensor, weight: Tensor) -> Outputs:
        logits = hidden @ weight.t()
        return (F.cross_entropy(logits, logits.softmax(-1), reduction="sum") + logits.sum(),)

    _, weight, _ = example()
    hidden = torch.randn(batch, 6, HIDDEN, generator=torch.Generator().manual_seed(0))
    inputs = [each.detach().bfloat16().requires_grad_() for each in (hidden, weight)]
    found = _with_gradients(compiled(loss, 2), inputs)
    for got, want in zip(found, _with_gradients(loss, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.2)


def _with_gradients(fn: Callable[..., Outputs], inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs = fn(*inputs)
    total = sum(each.sum() for each in outputs if each.requires_grad)
    assert isinstance(total, Tensor)
    return [*outputs, *torch.autograd.grad(total, inputs[:2])]


IN_FULL = [
    (_returned, "the logits are returned, so they are materialised in full"),
    (_rows_joined, "the logits are materialised in full: the matmul does not work row by row"),
    (
        _batched,
        "the logits are materialised in full: a batch of matrices is multiplied, each by a matrix of its own",
    ),
]


@pytest.mark.parametrize(("fn", "reason"), IN_FULL, ids=lambda each: getattr(each, "__name__", ""))
def test_in_full(fn: Callable[..., Outputs], reason: str) -> None:
    inputs = example()
    every = zip(_with_gradients(compiled(fn), inputs), _with_gradients(fn, inputs), strict=True)
    for got, want in every:
        torch.testing.assert_close(got, want)
    report = last_report()
    found = [r["reason"] for r in report["rejections"]]
    assert [each for each in found if each.startswith(reason)], found
    assert report["chunked_heads"] == 0


def test_hidden_that_the_function_changes() -> None:
    """Backward would make other logits from it."""

    def fn(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
        found = values_of(F.linear(hidden, weight, bias), target)
        hidden.mul_(2)
        return found

    hidden, weight, target = example()
    results = []
    for function in (compiled(fn), fn):
        bias = torch.ones(VOCAB, requires_grad=True)
        found = function(hidden.detach().clone(), weight.detach(), bias, target)
        results.append(torch.autograd.grad(found[0].sum() + found[1].sum(), bias)[0])
    torch.testing.assert_close(*results)
    found = [r["reason"] for r in last_report()["rejections"]]
    assert any(
        each.startswith("the function changes in place a value a loop would read") for each in found
    ), found


def test_hidden_that_the_function_changes_without_gradient() -> None:
    """What is returned is the new operator's own result, with nothing of the program's between it and the end."""

    def fn(hidden: Tensor, weight: Tensor) -> Tensor:
        found = (hidden @ weight.t()).logsumexp(-1)
        hidden.mul_(2)
        return found

    hidden, weight, _ = (each.detach() for each in example())
    torch.testing.assert_close(compiled(fn)(hidden.clone(), weight), fn(hidden.clone(), weight))


def test_gradient_that_the_program_changes(graphs: list[Graph]) -> None:

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.view_as(logits)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad.clamp(-1, 1)

    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        return values_of(Double.apply(hidden @ weight.t()), target)

    hidden, weight, target = example()
    got = compiled(fn)(hidden, weight, target)
    want = fn(hidden, weight, target)
    mine = torch.autograd.grad(got[0].sum(), (hidden, weight))
    for one, other in zip(mine, torch.autograd.grad(want[0].sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(one, other)
    assert not full_logits(graphs[-1])


def test_a_second_run_changes_nothing(graphs: list[Graph]) -> None:
    compiled(head_loss)(*example())
    before = str(graphs[-1])
    assert by_rows(graphs[-1], RowsConfig(harness.MIN_VOCAB, chunk_bytes=4 * CHUNK)).loops == ()
    assert str(graphs[-1]) == before


def test_logits_that_are_one_of_several_results() -> None:
    def fn(logits: Tensor) -> Outputs:
        ordered = logits.sort(-1).values
        return torch.cat([part.log_softmax(-1)[:, 3] for part in ordered.split(2)]), ordered[0]

    logits = torch.randn(6, VOCAB, requires_grad=True)
    for got, want in zip(compiled(fn)(logits), fn(logits), strict=True):
        torch.testing.assert_close(got, want)


def test_a_number_beside_the_gradient() -> None:
    """What is added to a value as wide as a vocabulary may be a view of a number."""

    def fn(logits: Tensor) -> Outputs:
        row = logits[1]
        log_p = row.log_softmax(-1)
        return log_p.exp().log_softmax(-1), row.sum()

    logits = torch.randn(3, VOCAB, requires_grad=True)
    for got, want in zip(compiled(fn)(logits), fn(logits), strict=True):
        torch.testing.assert_close(got, want)
