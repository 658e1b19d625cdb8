"""Every spelling of the table under the backend: values, gradients, dtypes, fused operators, what is left wide.

The table is `spellings.py`, the judge is `harness.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from tests.cases.spellings import BSV, NV, SPELLINGS, Outputs, Spelling, pick
from tests.support import harness
from tests.support.harness import OPTIONS, VOCAB, example_arguments, no_worse_than_eager, prepare

BY_NAME = {s.name: s for s in SPELLINGS}

# One of each kind also in the dtypes that take another path: fp16 overflows, float64 is its own compute dtype.
OTHER_DTYPES = (
    "log_softmax_gather",
    "minus_cross_entropy_as_given",
    "row_loop_of_logsumexps",
    "categorical_both",
    "entropy_expected_logit",
    "baselines_entropy",
    "clones_sharded_log_prob_and_entropy",
    "sharded_log_prob_and_entropy",
    "group_policy_loss",
)

# These call `.float()`, which rounds float64: the gradient that is taken back to float64 is the compiler's to cast.
ROUND_FLOAT64 = ("sharded_log_prob_and_entropy", "group_policy_loss")

# 7 s each: one per path through inductor (views, loops, buffers, mutation, collectives, the matmul inside, metrics).
UNDER_INDUCTOR = (
    ("log_softmax_gather", torch.bfloat16),
    ("row_loop_of_logsumexps", torch.float32),
    ("result_buffer", torch.float32),
    ("temperature_in_place", torch.bfloat16),
    ("clones_sharded_log_prob_and_entropy", torch.float32),
    ("sharded_log_prob_and_entropy", torch.bfloat16),
    ("linear_inside_with_entropy", torch.bfloat16),
    ("proximal_policy_loss", torch.float32),
)

# The lengths of their samples are numbers in the code.
FIXED_SIZES = ("ragged_samples", "packed_samples")

# 3 s each: the others, up to 20 s a loop, are for `make fuzz`.
DYNAMIC = (
    "log_softmax_gather",
    "minus_cross_entropy_as_given",
    "shifted_before",
    "arange_index",
    "class_axis_one",
    "logit_minus_logsumexp",
    "chunk_and_cat",
    "result_buffer_along_sequence",
    "categorical_both",
    "left_padded_rows_to_response",
    "sharded_log_prob_and_entropy",
    "proximal_policy_loss",
)

MARKED = (
    "log_softmax_gather",
    "minus_cross_entropy_as_given",
    "categorical_both",
    "entropy_of_one_log_softmax",
    "sharded_log_prob_and_entropy",
)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")


def rows_and_dtypes() -> list[Any]:
    pairs = [(s, dtype) for s in SPELLINGS for dtype in s.dtypes]
    pairs += [(BY_NAME[n], torch.float16) for n in OTHER_DTYPES]
    pairs += [(BY_NAME[n], torch.float64) for n in OTHER_DTYPES if n not in ROUND_FLOAT64]
    pairs += [(replace(BY_NAME[n], fused=None), torch.float64) for n in ROUND_FLOAT64]
    return [
        pytest.param(s, dtype, id=f"{s.name}-{short(dtype)}", marks=not_float32(dtype))
        for s, dtype in pairs
    ]


def not_float32(dtype: torch.dtype) -> Any:
    """The graph is the same but for casts."""
    return () if dtype is torch.float32 else pytest.mark.thorough


def must_fuse_with_the_slow_ones_marked() -> list[Any]:
    return [
        pytest.param(s, id=s.name, marks=() if s.name in DYNAMIC else pytest.mark.slow)
        for s in SPELLINGS
        if harness.must_fuse(s)
    ]


def by_name(names: tuple[str, ...]) -> Any:
    return pytest.mark.parametrize("spelling", [BY_NAME[n] for n in names], ids=names)


def compiled(spelling: Spelling, **options: Any) -> Callable[..., Outputs]:
    prepare(spelling)
    return torch.compile(spelling.fn, backend="slime_fused", options=OPTIONS | options)


def test_table_is_complete() -> None:
    named = {c for s in SPELLINGS for c in s.classes}
    assert named >= harness.MUST_FUSE
    assert {
        "probability space",
        "masked or filtered",
        "guarded entropy",
        "vocabulary in chunks",
        "top-k weight",
        "squared probabilities",
    } <= named
    assert {
        "divergence",
        "kl_div",
        "Jensen-Shannon",
        "top-k divergence",
        "sharded entropy",
        "sharded distribution",
        "functional collectives",
        "shards' norms",
        "sharded soft targets",
    } <= named
    assert {"linear function", "linear inside", "linear checkpoint"} <= named
    assert len(BY_NAME) == len(SPELLINGS)


@pytest.mark.parametrize(("spelling", "dtype"), rows_and_dtypes())
def test_spelling(spelling: Spelling, dtype: torch.dtype) -> None:
    harness.check(spelling, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spelling", "position"),
    [
        pytest.param(s, i, id=f"{s.name}-{i}")
        for s in SPELLINGS
        if harness.must_fuse(s) and (count := harness.output_count(s)) > 1
        for i in range(count)
    ],
)
def test_output_compiled_alone(spelling: Spelling, position: int) -> None:
    alone = harness.only_output(spelling, position)
    harness.compare(compiled(alone), alone, torch.float32, draws=2, data=("plain",))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(n, d, id=f"{n}-{short(d)}", marks=not_float32(d)) for n, d in UNDER_INDUCTOR],
)
@pytest.mark.parametrize(
    "inline_below",
    [
        pytest.param(0, id="operators"),
        pytest.param(1 << 18, id="formulas", marks=pytest.mark.thorough),
    ],
)
def test_spelling_under_inductor(name: str, dtype: torch.dtype, inline_below: int) -> None:
    if torch.__version__ < "2.12" and name == "result_buffer":
        pytest.skip("the C++ that inductor 2.11 makes of it does not compile, without us either")
    harness.check(BY_NAME[name], dtype, inner="inductor", inline_below=inline_below)


OTHERWISE_OF_ANY_SIZE = {
    "arange_index_shifted": 1,  # the gradient is arithmetic
    "temperature_in_place_on_slice": 2,  # its softmax is that of the slice
}
"""Fused operators of graphs with symbolic sizes, where these differ from the others."""


@pytest.mark.parametrize("spelling", must_fuse_with_the_slow_ones_marked())
def test_dynamic_sizes(spelling: Spelling) -> None:
    """Fused as with fixed sizes, and right for every N, whether or not N is in the code."""
    prepare(spelling)
    spelling = replace(spelling, fused=OTHERWISE_OF_ANY_SIZE.get(spelling.name, spelling.fused))
    fn = torch.compile(spelling.fn, backend="slime_fused", options=OPTIONS, dynamic=True)
    earlier = len(slime_compile.reports())
    for rows in batch_sizes(spelling):
        harness.compare(fn, spelling, torch.float32, rows=rows, draws=1, data=("plain",))
    for report in slime_compile.reports()[earlier:]:
        harness.check_report(spelling, report.to_dict())


SIZES_AMONG_NUMBERS = (
    "smoothed_by_scatter",
    "smoothed_by_where",
    "smoothed_kl_div",
)


@by_name(SIZES_AMONG_NUMBERS)
def test_numbers_of_dynamic_sizes_stay_float64(spelling: Spelling) -> None:
    """A number times the size of the vocabulary, which no operator on tensors may compute in float32."""
    prepare(spelling)
    fn = torch.compile(spelling.fn, backend="slime_fused", options=OPTIONS, dynamic=True)
    harness.compare(fn, spelling, torch.float64, data=("plain",))


def uniform(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).softmax(-1)


OF_SIZES_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda x: x.logsumexp(-1) - uniform(x).log().sum(-1),
    "divided": lambda x: (x.softmax(-1) / uniform(x)).square().sum(-1),
    "inverse": lambda x: x.logsumexp(-1) + (1 / uniform(x)).sum(-1),
    "rounded": lambda x: x.logsumexp(-1) + uniform(x).bfloat16().to(x.dtype).sum(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_SIZES_ALONE)
def test_numbers_that_are_made_of_sizes_alone(name: str, dtype: torch.dtype) -> None:
    """A uniform softmax is one over the size of the vocabulary, a number that is on no device."""
    torch._dynamo.reset()
    loss = OF_SIZES_ALONE[name]
    fn = torch.compile(loss, backend="slime_fused", options=OPTIONS, dynamic=True)
    for rows, vocab in ((5, 40), (7, 64)):
        draw = torch.Generator().manual_seed(rows)
        logits = torch.randn(rows, vocab, generator=draw).to(dtype)
        true, plain, mine = (
            value_and_gradient(each, of)
            for each, of in ((loss, logits.double()), (loss, logits), (fn, logits))
        )
        for at in range(2):
            no_worse_than_eager(mine[at], plain[at], true[at], dtype)


def value_and_gradient(loss: Callable[[Tensor], Tensor], given: Tensor) -> list[Tensor]:
    logits = given.clone().requires_grad_()
    value = loss(logits)
    return [value.detach(), *torch.autograd.grad(value.sum(), logits)]


def batch_sizes(spelling: Spelling) -> tuple[int, ...]:
    """Two numbers of rows, or the one that the spelling is written for."""
    return (harness.ROWS,) if spelling.name in FIXED_SIZES else (5, 9)


@by_name(MARKED)
def test_one_compile_serves_every_number_of_rows(spelling: Spelling) -> None:
    prepare(spelling)
    fn = marking_rows(torch.compile(spelling.fn, backend="slime_fused", options=OPTIONS))
    torch._dynamo.utils.counters.clear()
    for rows in (2, 5, 33):
        harness.compare(fn, spelling, torch.float32, rows=rows, draws=2, data=("plain",))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    report = slime_compile.reports()[-1].to_dict()
    assert (report["fused"], report["wide_after"]) == (spelling.fused, 0)


def marking_rows(fn: Callable[..., Outputs]) -> Callable[..., Outputs]:
    def call(*arguments: Tensor) -> Outputs:
        for argument in arguments:
            torch._dynamo.mark_dynamic(argument, 0)
        return fn(*arguments)

    return call


NO_GRADIENT = (
    "log_softmax_gather",
    "minus_cross_entropy_flat",
    "row_loop_log_softmax",
    "categorical_both",
    "entropy_expected_logit_upcast",
    "statistics_amax_detached",
    "sharded_log_prob_and_entropy",
    "group_policy_loss",
)


@by_name(NO_GRADIENT)
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "requires_grad=False"])
def test_without_gradient(spelling: Spelling, how: str) -> None:
    fn = compiled(spelling)
    inputs = harness.make_inputs(spelling, torch.float32, 0)
    if how == "requires_grad=False":
        inputs = [v.detach() for v in inputs]
    mode = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "requires_grad=False": torch.enable_grad,
    }[how]
    with mode():
        actual, eager = fn(*inputs), spelling.fn(*inputs)
        report = slime_compile.explain(spelling.fn, **OPTIONS)(*inputs).to_dict()
    with torch.no_grad(), harness.in_float64():
        truth = spelling.fn(*harness.to_float64(inputs))
    for i, (got, plain, true) in enumerate(zip(actual, eager, truth, strict=True)):
        assert (got.dtype, got.requires_grad) == (plain.dtype, plain.requires_grad)
        harness.no_worse_than_eager(got, plain, true, got.dtype, f"{spelling.name}, output {i}")
    assert (report["fused"], report["wide_after"]) == (1, 0)


ANY_ROWS = (
    "log_softmax_gather",
    "minus_cross_entropy_as_given",
    "arange_index",
    "logit_minus_logsumexp",
    "categorical_both",
    "entropy_expected_logit",
    "baselines_entropy",
    "sharded_log_prob_and_entropy",
)


@by_name(ANY_ROWS)
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_no_row_and_one_row(spelling: Spelling, rows: int, dynamic: bool) -> None:
    prepare(spelling)
    fn = torch.compile(spelling.fn, backend="slime_fused", options=OPTIONS, dynamic=dynamic)
    inputs = harness.make_inputs(spelling, torch.float32, 0, rows=rows)
    run = harness.call(fn, spelling, inputs)
    eager = harness.call(spelling.fn, spelling, inputs)
    upstream = [torch.randn_like(o) for o in eager.outputs]
    assert all(o.requires_grad for o in run.outputs)
    chosen = range(len(upstream))
    (grad,) = harness.gradients(run, chosen, upstream)
    (plain,) = harness.gradients(eager, chosen, upstream)
    assert (grad.shape, grad.dtype) == (plain.shape, plain.dtype)
    assert not grad.isnan().any()
    if rows:
        harness.compare(fn, spelling, torch.float32, rows=rows, data=("plain",))


OUT_OF_RANGE = (
    "log_softmax_gather",
    "log_softmax_nll_per_token",
    "minus_cross_entropy_as_given",
    "arange_index",
    "logit_minus_logsumexp",
    "categorical_both",
)


@by_name(OUT_OF_RANGE)
@pytest.mark.parametrize("bad", [-VOCAB - 1, VOCAB, VOCAB + 100])
def test_target_out_of_range_raises(spelling: Spelling, bad: int) -> None:
    fn = compiled(spelling)
    inputs = example_arguments(spelling, torch.float32)
    position = next(i for i, n in enumerate(spelling.inputs) if n.endswith("target"))
    inputs[position].view(-1)[-1] = bad
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of (bounds|range)"):
        spelling.fn(*inputs)
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of (bounds|range)"):
        fn(*inputs)


@pytest.mark.parametrize("bad", [-1, -100])
def test_negative_target_raises_where_gather_does(bad: int) -> None:
    spelling = BY_NAME["log_softmax_gather"]
    fn = compiled(spelling)
    logits, target = example_arguments(spelling, torch.float32)
    target[0] = bad
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of (bounds|range)"):
        fn(logits, target)


def test_negative_target_counts_from_the_end_where_indexing_does() -> None:
    spelling = BY_NAME["arange_index"]
    fn = compiled(spelling)
    logits, target = example_arguments(spelling, torch.float32)
    (forward,) = fn(logits, target)
    (backward,) = fn(logits, target - VOCAB)
    assert torch.equal(forward, backward)
    weight = torch.randn(forward.shape, generator=torch.Generator().manual_seed(0))
    (one,) = torch.autograd.grad(forward, logits, weight)
    (two,) = torch.autograd.grad(backward, logits, weight)
    assert torch.equal(one, two)


def test_every_row_ignored() -> None:
    spelling = BY_NAME["log_softmax_nll_per_token"]
    fn = compiled(spelling)
    logits, target = example_arguments(spelling, torch.float32)
    (loss,) = fn(logits, torch.full_like(target, -100))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.equal(loss, torch.zeros_like(loss))
    assert torch.equal(grad, torch.zeros_like(grad))


# ---------------------------------------------------------------- special values


def log_softmax_and_entropy(logits: Tensor, target: Tensor) -> Outputs:
    log_probs = F.log_softmax(logits, -1)
    return pick(log_probs, target), -(log_probs.exp() * log_probs).sum(-1)


def cross_entropy_and_expectation(logits: Tensor, target: Tensor) -> Outputs:
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return F.cross_entropy(logits, target, reduction="none"), entropy


def logsumexp_and_two_softmaxes(logits: Tensor, target: Tensor) -> Outputs:
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return pick(logits, target) - logits.logsumexp(-1), entropy


SPECIAL = (log_softmax_and_entropy, cross_entropy_and_expectation, logsumexp_and_two_softmaxes)
FINITE, MASKED, TARGET_MASKED, ALL_MASKED, INF, NAN = range(6)


def special_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, VOCAB, generator=draw)).to(dtype)
    target = torch.full((6,), 5)
    logits[MASKED, 10:30] = -torch.inf
    logits[TARGET_MASKED, 5] = -torch.inf
    logits[ALL_MASKED] = -torch.inf
    logits[INF, 7] = torch.inf
    logits[NAN, 9] = torch.nan
    return logits, target


@pytest.mark.parametrize("fn", SPECIAL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("position", [0, 1])
def test_special_rows(fn: Callable[..., Outputs], dtype: torch.dtype, position: int) -> None:
    """A logit of -inf contributes nothing; rows of only -inf, with +inf or with NaN stay NaN."""
    torch._dynamo.reset()
    logits, target = special_logits(dtype)
    weight = torch.randn(6, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(f: Callable[..., Outputs], x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().clone().requires_grad_()
        output = f(leaf, target)[position]
        return output.detach(), torch.autograd.grad(output, leaf, w)[0]

    value, grad = run(torch.compile(fn, backend="slime_fused", options=OPTIONS), logits, weight)
    plain, plain_grad = run(fn, logits, weight)
    masked = logits.double() == -torch.inf
    # -1e5 has probability 0 as well, and 0 * -1e5 is 0: the truth that eager's NaN hides
    true, true_grad = run(fn, logits.double().masked_fill(masked, -1e5), weight.double())
    true[target_is_masked(position)] = -torch.inf if fn is not SPECIAL[1] else torch.inf
    good = torch.tensor([FINITE, MASKED, TARGET_MASKED])
    assert value[[ALL_MASKED, INF, NAN]].isnan().all()
    assert grad[[ALL_MASKED, NAN]].isnan().any(-1).all()
    for got, eager, truth, what in (
        (value, plain, true, "value"),
        (grad, plain_grad, true_grad, "gradient"),
    ):
        assert got[good].isnan().sum() == 0, f"{what}: {got[good]}"
        eager = torch.where(eager.isnan(), truth.to(dtype), eager)
        harness.no_worse_than_eager(got[good], eager[good], truth[good], dtype, what)


def target_is_masked(position: int) -> list[int]:
    return [TARGET_MASKED] if position == 0 else []


def test_shapes_of_the_table() -> None:
    assert {s.shape for s in SPELLINGS} == {NV, BSV}
