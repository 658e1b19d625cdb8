"""Selections of rows move before the matmul that makes the logits: values, gradients, what is computed, what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

import slime_compile
from tests.cases.heads import values_of
from tests.cases.spellings import Outputs
from tests.fx_passes.test_linear import (
    compiled,
    example,
    full_logits,
    last_report,
    notes,
    small_chunks,
)
from tests.support.harness import HIDDEN, MIN_VOCAB, ROWS, VOCAB

__all__ = ["small_chunks"]

Loss = Callable[..., Outputs]
MOVED: list[Any] = []


def moved(rows: str) -> Callable[[Loss], Loss]:
    """A loss that reads `rows` of ROWS rows, as the report says with fixed sizes."""

    def enter(fn: Loss) -> Loss:
        MOVED.append(pytest.param(fn, rows, id=fn.__name__))
        return fn

    return enter


@pytest.fixture
def masks() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def row_numbers(target: Tensor) -> Tensor:
    """Rows by data, one of them twice and out of order."""
    return torch.stack([target[0] % 3, target[0] % 3, target[1] % 3 + 3, target[2] % 3])


# ---- selections ---------------------------------------------------------------------------------------------------


@moved("3")
def slices(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of((hidden @ weight.t())[2:5], target[2:5])


@moved("2")
def every_third_from_the_second(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(F.linear(hidden, weight)[1::3], target[1::3])


@moved("3")
def slices_of_sequences(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = F.linear(hidden.unsqueeze(0), weight)[..., 1:4, :].float()
    return values_of(logits.view(-1, weight.shape[0]), target[1:4])


@moved("4")
def slices_of_slices(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = F.linear(hidden.view(1, -1, HIDDEN), weight)
    return values_of(logits[:, :-1, :][:, -4:], target[None, 2:6])


@moved("5")
def two_slices(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(logits[4:6], target[:2]), *values_of(logits[:3] / 0.7, target[:3])


@moved("6")
def overlapping_slices(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = torch.matmul(hidden, weight.t())
    return *values_of(logits[1:4], target[:3]), *values_of(logits[2:5], target[2:5])


@moved("2")
def one_of_two_pieces(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    _, second, _ = (hidden @ weight.t()).split([2, 2, 3])
    return values_of(second, target[2:4])


@moved("3")
def narrowed(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(F.linear(hidden, weight).narrow(0, 2, 3), target[2:5])


@moved("4")
def rows_by_number(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of((hidden @ weight.t())[row_numbers(target)], target[:4])


@moved("5")
def joined_slices(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return values_of(torch.cat([logits[4:6], logits[:3]]), target[:5])


@moved("4")
def joined_answers(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """Of each sequence its own length."""
    logits = (hidden[:6].view(2, 3, HIDDEN) @ weight.t()).float()
    return values_of(torch.cat([logits[0, 1:2], logits[1, :3]]), target[:4])


@moved("5")
def joined_and_overlapping(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return values_of(torch.cat([logits[3:5], logits[2:5]]), target[:5])


@moved("4")
def gathered_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    rows = row_numbers(target)[:, None].expand(-1, logits.shape[-1])
    return values_of(logits.gather(0, rows), target[:4])


@moved("4")
def gathered_positions(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """Two of each sequence, as reward models take the last one."""
    logits = hidden[:6].view(2, 3, HIDDEN) @ weight.t()
    places = (target[:4] % 3).view(2, 2, 1).expand(-1, -1, logits.shape[-1])
    return values_of(logits.gather(1, places).flatten(0, 1), target[:4])


@moved("4")
def selected_rows(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
    logits = F.linear(hidden, weight, bias)
    return values_of(logits.index_select(0, row_numbers(target)), target[:4])


@moved("4")
def rows_of_pairs(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = F.linear(hidden[:6].view(2, 3, HIDDEN), weight)
    found = logits[target[:4] % 2, target[1:5] % 3]
    return values_of(found, target[:4])


# ---- what stands between ------------------------------------------------------------------------------------------


@moved("3")
def behind_a_temperature_of_each_row(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    temperature = 1 + target[:, None] / 50
    return values_of(((hidden @ weight.t()) / temperature)[2:5], target[2:5])


@moved("2")
def behind_a_temperature_of_each_sequence(
    hidden: Tensor, weight: Tensor, target: Tensor
) -> Outputs:
    temperature = torch.tensor([0.5, 2.0, 3.0])[:, None, None]
    logits = F.linear(hidden[:6].view(3, 2, HIDDEN), weight) / temperature
    return values_of(logits[1], target[:2])


@moved("3")
def behind_a_softcap(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of((2 * torch.tanh((hidden @ weight.t()) / 2))[2:5], target[2:5])


@moved("3")
def below_a_softcap(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(2 * torch.tanh((hidden @ weight.t())[2:5] / 2), target[2:5])


@moved("3")
def changed_in_place_afterwards(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = (hidden @ weight.t())[1:4]
    logits.div_(0.7)
    return values_of(logits, target[1:4])


@moved("3")
def beside_a_buffer(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    shifted = torch.zeros_like(target)
    shifted[:-1] = target[1:]
    return values_of(logits[1:4], shifted[1:4])


@moved("3")
def out_of_autocast(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)
    return values_of(logits[1:4].float(), target[1:4])


@moved("3")
def checkpointed(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    def loss(hidden: Tensor, weight: Tensor) -> Outputs:
        return values_of((hidden @ weight.t())[1:4], target[1:4])

    return checkpoint(loss, hidden, weight, use_reentrant=False)  # type: ignore[no-any-return]


def inputs_of(fn: Loss) -> list[Tensor]:
    hidden, weight, target = example()
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return [hidden, weight, bias, target] if fn is selected_rows else [hidden, weight, target]


def compare(function: Loss, fn: Loss) -> list[Tensor]:
    """Values and gradients of both; the compiled function's gradients."""
    inputs, results = inputs_of(fn), []
    leaves = [each for each in inputs if each.requires_grad]
    for each in (function, fn):
        outputs = each(*inputs)
        total = sum((n + 1) * o.float().sum() for n, o in enumerate(outputs) if o.requires_grad)
        results.append([*outputs, *torch.autograd.grad(total, leaves)])  # type: ignore[arg-type]
    rounded = fn in (out_of_autocast, _row_numbers_out_of_autocast)
    close = {"rtol": 2e-2, "atol": 2e-2} if rounded else {}
    for mine, eager in zip(*results, strict=True):
        torch.testing.assert_close(mine, eager, **close)
    return results[0][-len(leaves) :]


def told(report: dict[str, Any]) -> list[str]:
    every = [note for graph in report["graphs"] for note in graph["notes"]]
    return [note for note in every if note.startswith("rows computed: ")]


@pytest.mark.parametrize(("fn", "rows"), MOVED)
def test_moved(fn: Loss, rows: str, graphs: list[Graph]) -> None:
    compare(compiled(fn, chunk_mib=4 * VOCAB), fn)
    report = last_report()
    (note,) = told(report)
    of_six = (
        rows_of_pairs,
        behind_a_temperature_of_each_sequence,
        gathered_positions,
        joined_answers,
    )
    total = 6 if fn in of_six else ROWS
    assert note.startswith(f"rows computed: {rows} of {total} of the logits at {__file__}:")
    assert note.endswith("; the others are unread")
    assert report["rejections"] == []
    assert not full_logits(graphs[-1])
    assert report["fused"] == (4 if fn in (two_slices, overlapping_slices) else 2)


def _taken_apart_again(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    rows = (hidden @ weight.t())[2:5]
    return *values_of(rows, target[2:5]), *values_of(torch.cat(rows.split(2)), target[:3])


def _taken_apart_for_nothing(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    rows = (hidden @ weight.t())[2:5]
    found = values_of(rows, target[2:5])
    torch.cat(rows.split(2))
    return found


def _taken_apart_twice(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    rows = (hidden @ weight.t())[1:5]
    first, second = rows.split(2)
    parts = torch.cat([second.view(2, 1, -1)[0], first.split(1)[1]])
    return *values_of(first, target[1:3]), *values_of(parts, target[:2])


@pytest.mark.parametrize(
    ("fn", "rows"),
    [(_taken_apart_again, 3), (_taken_apart_for_nothing, 3), (_taken_apart_twice, 4)],
)
def test_rows_that_are_taken_apart_behind_what_is_read(fn: Loss, rows: int) -> None:
    compare(compiled(fn), fn)
    (note,) = told(last_report())
    assert note.startswith(f"rows computed: {rows} of {ROWS} ")


@pytest.mark.parametrize("fn", [slices, slices_of_slices, rows_by_number])
def test_moved_with_any_sizes(fn: Loss, graphs: list[Graph]) -> None:
    compare(compiled(fn, dynamic=True), fn)
    assert len(told(last_report())) == 1
    assert not full_logits(graphs[-1])


def test_sizes_that_are_asked_for_behind_hidden(graphs: list[Graph]) -> None:
    """The rows are moved behind what they are moved by, be it the size of a view that leaves none out."""

    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        flat = F.linear(hidden.flatten(0, 1), weight)
        logits = flat.view(*hidden.shape[:2], -1)[1:]
        return torch.stack([F.cross_entropy(each, target) for each in logits.log_softmax(-1)])

    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, HIDDEN, generator=draw).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=draw).requires_grad_()
    found = [
        torch.autograd.grad(loss(hidden, weight, torch.arange(5)).sum(), (hidden, weight))
        for loss in (compiled(fn, dynamic=True), fn)
    ]
    torch.testing.assert_close(*found)
    assert len(told(last_report())) == 1
    assert not full_logits(graphs[-1])


def viewed_as_another(logits: Tensor) -> Tensor:
    taken = logits[torch.tensor([1, 0, 1])]
    return taken.view(taken.shape)


def gathered_as_another(logits: Tensor) -> Tensor:
    rows = torch.tensor([[1], [0], [1]])
    return logits.gather(0, rows.expand(logits[:3].shape))


@pytest.mark.parametrize("taken", [viewed_as_another, gathered_as_another])
def test_sizes_in_one_value(taken: Callable[[Tensor], Tensor]) -> None:
    """`view(x.shape)`, whose sizes are not written one by one where they are symbolic."""

    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        return values_of(taken(hidden @ weight.t()), target[:3])

    compare(compiled(fn, dynamic=True), fn)


def test_rows_by_a_symbolic_bound(graphs: list[Graph]) -> None:
    def fn(hidden: Tensor, weight: Tensor, target: Tensor, kept: int) -> Outputs:
        return values_of((hidden @ weight.t())[-kept:], target[-kept:])

    function = compiled(fn, dynamic=True)
    for kept in (3, 4, 5):
        compare(lambda *inputs, kept=kept: function(*inputs, kept), lambda *i, kept=kept: fn(*i, kept))  # fmt: skip
    assert len(graphs) == 1
    (note,) = told(last_report())
    assert " of s" in note


def test_rows_by_a_mask(graphs: list[Graph], masks: None) -> None:
    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        taken = target > 15
        return values_of((hidden @ weight.t())[taken], target[taken])

    compare(compiled(fn), fn)
    (note,) = told(last_report())
    assert note.startswith("rows computed: u0 of 7 of ")
    assert "the logits [u0, 37] at " in notes(last_report())[0]


@pytest.mark.parametrize(
    "fn",
    [
        slices_of_sequences,
        pytest.param(two_slices, marks=pytest.mark.thorough),
        pytest.param(rows_by_number, marks=pytest.mark.thorough),
    ],
)
def test_moved_under_inductor(fn: Loss) -> None:
    compare(compiled(fn, inner="inductor"), fn)
    assert len(told(last_report())) == 1


def test_without_gradient(graphs: list[Graph]) -> None:
    with torch.no_grad():
        inputs = example()
        for mine, eager in zip(compiled(slices)(*inputs), slices(*inputs), strict=True):
            torch.testing.assert_close(mine, eager)
    assert len(told(last_report())) == 1
    assert not full_logits(graphs[-1])


def test_rows_that_nobody_takes_have_no_gradient_and_may_be_anything() -> None:
    hidden, weight, target = example()
    with torch.no_grad():
        hidden[0] = torch.nan
    found = compiled(slices)(hidden, weight, target)
    of_hidden, of_weight = torch.autograd.grad(found[0].sum(), (hidden, weight))
    assert torch.equal(of_hidden[[0, 1, 5, 6]], torch.zeros(4, HIDDEN))
    assert of_weight.isfinite().all()


# ---- what stays as it was -----------------------------------------------------------------------------------------


def _shifted(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    hidden = torch.cat([hidden, hidden])  # 13 of 14 rows: a copy of hidden for nothing
    return values_of((hidden @ weight.t())[:-1], torch.cat([target, target])[1:])


def _all_read(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(logits[2:5], target[2:5]), logits.mean()


def _returned(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return *values_of(logits[2:5], target[2:5]), logits


def _pieces_that_are_all(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    first, second = (hidden @ weight.t()).split([3, 4])
    return *values_of(first, target[:3]), *values_of(second, target[3:])


def _columns(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return ((hidden @ weight.t())[:, 3:36].logsumexp(-1),)


def _columns_behind_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return ((hidden @ weight.t())[torch.arange(ROWS), target],)


def _changed_before(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    logits.div_(0.7)
    return values_of(logits[2:5], target[2:5])


def _numbers_changed_between(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    at = torch.arange(3)
    logits = hidden @ weight.t()
    at.add_(1)
    return values_of(logits[at], target[at])


def _gradient_switched_between(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    with torch.no_grad():
        some = logits[2:5]
    return ((some.logsumexp(-1) * hidden[2:5].sum(-1)).sum() + weight.sum(),)


def _written_in_one_of_two(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    first, second = logits[1:4], logits[2:5]
    first.mul_(2)
    return *values_of(first, target[:3]), *values_of(second, target[2:5])


def _row_numbers_out_of_autocast(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)
    return values_of(logits[target[:3] % 7].float(), target[:3])


def _rows_of_the_softmax(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return ((hidden @ weight.t()).log_softmax(0)[2:5].sum(-1),)


def _joined_twice(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    rows = (hidden @ weight.t())[2:4]
    return values_of(torch.cat([rows, rows]), target[:4])


def _joined_with_others(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    joined = torch.cat([logits[4:6], 2 * logits[:1], logits[:1]])
    return *values_of(joined, target[:4]), *values_of(joined[1:3], target[:2]), logits[3:5].sum()


def _bias_of_each_row(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    bias = torch.arange(ROWS * VOCAB).view(ROWS, VOCAB) / 50
    return values_of(torch.addmm(bias, hidden, weight.t())[2:5], target[2:5])


def _summed_over_a_dimension(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """Of the bias's gradient, [2, 3, V] over the first dimension."""
    bias = weight[:, 0] * torch.ones(3, 1)
    logits = (hidden[:6] @ weight.t()).view(2, 3, -1) + bias
    return values_of(logits[1], target[:3])


def _zeros_added_to_what_is_returned(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    found = values_of(logits[2:5], target[2:5])
    states = hidden.detach() * 2
    return *found, states, states + torch.zeros(ROWS, HIDDEN)


STAYS = [
    _shifted,
    _all_read,
    _returned,
    _pieces_that_are_all,
    _columns,
    _columns_behind_rows,
    _rows_of_the_softmax,
]
RIGHT = [
    _changed_before, _numbers_changed_between, _gradient_switched_between,
    _written_in_one_of_two, _row_numbers_out_of_autocast, _joined_twice, _joined_with_others, _bias_of_each_row, _summed_over_a_dimension,
    _zeros_added_to_what_is_returned,
]  # fmt: skip


@pytest.mark.parametrize("fn", STAYS, ids=lambda fn: fn.__name__)
def test_stays(fn: Loss) -> None:
    compare(compiled(fn), fn)
    assert told(last_report()) == []


@pytest.mark.parametrize("fn", RIGHT, ids=lambda fn: fn.__name__)
def test_what_is_changed_or_switched_between_is_right(fn: Loss) -> None:
    compare(compiled(fn), fn)


def test_switched_off() -> None:
    compare(compiled(slices, lm_head=False), slices)
    assert told(last_report()) == []


def test_estimate_and_explain_know() -> None:
    hidden, weight, target = example()
    report = slime_compile.explain(slices, min_vocab=MIN_VOCAB)(hidden, weight, target).to_dict()
    assert len(told(report)) == 1
    few = slime_compile.estimate_peak(slices, *example(), min_vocab=MIN_VOCAB)
    all_rows = slime_compile.estimate_peak(slices, *example(), min_vocab=MIN_VOCAB, lm_head=False)
    assert few.peak_bytes < all_rows.peak_bytes
