"""Values that the user's code goes on with are arithmetic in the graph, not `row_grad`s that store them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

import slime_compile
from bench.cases.partial import PROGRAMS, inputs_of
from fx_passes.walk.spelled_out import _rounded
from tests.support import harness
from tests.support.dense import Values
from tests.support.scratch import Scratch

STORED = {
    "kl_distillation": 0,
    "forward_kl": 0,
    "reverse_kl": 0,
    "jensen_shannon": 0,
    "jensen_shannon_of_a_sample": 0,
    "jensen_shannon_of_probabilities": 0,  # each softmax is computed twice
    "entropies_apart": 0,
    "interpolated_teacher": 0,
    "loss_and_reference_kl": 0,
    "masked_loss": 0,  # backward puts the mask over the gradient
    "padded_vocabulary": 0,
    "masked_softmax_returned": 1,  # what is returned
    "top_p_log_probs": 0,
    "weighted_columns": 0,
    "poly_loss": 1,  # nothing but the gradient: fused entirely
}
"""How many `row_grad`s are left of each program."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(
        function, backend="slime_fused", options=harness.OPTIONS | options
    )
    return made


def outcome(function: Callable[..., Any], given: dict[str, Tensor]) -> list[Tensor]:
    """Loss and gradient of the logits."""
    leaf = given["logits"].detach().clone().requires_grad_()
    found = function(**given | {"logits": leaf})
    loss = found[0] if isinstance(found, tuple) else found
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad]


def row_grads(graph: Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=torch.ops.slime_fused.row_grad.default))


GIVEN_ALONE = [
    "masked_loss",
    "padded_vocabulary",
    "kl_distillation",
    "reverse_kl",
    "jensen_shannon_of_a_sample",
    "jensen_shannon_of_probabilities",
    "entropies_apart",
    "interpolated_teacher",
]


@harness.each_inner
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GIVEN_ALONE)
def test_backward_keeps_only_what_was_given(name: str, dtype: torch.dtype, inner: str) -> None:
    given = inputs_of(PROGRAMS[name], 6, 40, dtype)
    logits = given["logits"].requires_grad_()
    teachers = {given["teacher"].data_ptr()} if "teacher" in given else set()
    kept = wide_kept(compiled(PROGRAMS[name], inner=inner), given)
    assert kept - teachers == {logits.data_ptr()}


def wide_kept(function: Callable[..., Any], given: dict[str, Tensor]) -> set[int]:
    """Where in memory the full-vocabulary numbers are that backward is left."""
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        function(**given)
    shape = given["logits"].shape
    return {each.data_ptr() for each in kept if each.shape == shape and each.is_floating_point()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STORED)
def test_what_is_stored(name: str, dtype: torch.dtype, graphs: list[Graph]) -> None:
    program = PROGRAMS[name]
    given = inputs_of(program, 6, 40, dtype)
    got = outcome(compiled(program), given)
    assert sum(map(row_grads, graphs)) == STORED[name]
    exact = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    eps = torch.finfo(dtype).eps
    for mine, eager, true in zip(
        got, outcome(program, given), outcome(program, exact), strict=True
    ):
        usual = (eager.double() - true).abs().max()
        assert (mine.double() - true).abs().max() <= 2 * usual + 8 * eps * true.abs().max()


def test_a_value_that_is_stored_anyway_stays_one_operator(graphs: list[Graph]) -> None:
    """A matmul reads the softmax, beside a comparison: it is made once."""

    def fn(logits: Tensor, values: Tensor) -> Tensor:
        probs = logits.softmax(-1)
        return (probs @ values).sum(-1) + (probs > 0.5).sum(-1) + logits.logsumexp(-1)

    compiled(fn)(torch.randn(6, 40), torch.randn(40, 3))
    assert row_grads(graphs[-1]) == 1


def test_a_saved_softmax_stays() -> None:
    """save="softmax": backward reads what forward has stored, whatever follows."""

    def fn(logits: Tensor) -> Tensor:
        return (logits.logsumexp(-1) + (2 * logits).tanh().sum(-1)).sum()

    given = {"logits": torch.randn(6, 40)}
    got = outcome(compiled(fn, save="softmax"), given)
    for mine, eager in zip(got, outcome(fn, given), strict=True):
        torch.testing.assert_close(mine, eager)


def test_several_columns(graphs: list[Graph]) -> None:
    """Up to four comparisons for each element; more are one `row_grad`."""

    def fn(logits: Tensor, columns: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        return (log_probs.gather(-1, columns).sum(-1) + logits.sin().sum(-1)).sum()

    for count, stored in ((3, 0), (6, 1)):
        torch._dynamo.reset()
        columns = torch.randint(0, 40, [6, count])
        given = {"logits": torch.randn(6, 40), "columns": columns}
        got = outcome(compiled(fn), given)
        assert row_grads(graphs[-1]) == stored
        for mine, eager in zip(got, outcome(fn, given), strict=True):
            torch.testing.assert_close(mine, eager)


def test_rows_that_the_loss_leaves_out(graphs: list[Graph]) -> None:
    """NaN in a row that a factor of zero takes out stays out, as in `row_grad`."""

    def fn(logits: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        chosen = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
        bounded = torch.where(keep[:, None], logits, 0.0).sin().sum(-1)
        return torch.where(keep, chosen + bounded, 0.0).sum()

    logits = torch.randn(6, 40)
    logits[2] = torch.nan
    keep = torch.tensor([True, True, False, True, True, True])
    given = {"logits": logits, "target": torch.randint(0, 40, [6]), "keep": keep}
    loss, grad = outcome(compiled(fn), given)
    assert row_grads(graphs[-1]) == 0
    assert loss.isfinite()
    assert grad.isfinite().all()
    rest = keep.nonzero()[:, 0]
    eager = outcome(
        fn, {"logits": logits[rest], "target": given["target"][rest], "keep": keep[rest]}
    )
    torch.testing.assert_close(grad[rest], eager[1])


def test_the_report_says_so() -> None:
    program = PROGRAMS["weighted_columns"]
    torch._dynamo.reset()  # this compile is the last
    outcome(compiled(program), inputs_of(program, 6, 40, torch.float32))
    assert "gradient, as arithmetic" in str(slime_compile.reports()[-1])


def test_logits_that_are_returned_are_told() -> None:
    def fn(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scaled = logits * torch.linspace(0.5, 1, logits.shape[-1])[None]
        return torch.nn.functional.cross_entropy(scaled, target), scaled

    given = {"logits": torch.randn(6, 40), "target": torch.randint(0, 40, [6])}
    got = outcome(compiled(fn), given)
    for mine, eager in zip(got, outcome(fn, given), strict=True):
        torch.testing.assert_close(mine, eager)
    assert "the logits are an output of the compiled function" in str(slime_compile.reports()[-1])


# ---- logits that are computed in half precision -------------------------------------------------------------------


HALF = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)]


def capped(logits: Tensor) -> Tensor:
    return 30 * torch.tanh(logits / 30)


def capped_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(capped(logits).float(), target, reduction="none")


def capped_entropy(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = torch.where(logits.isnan(), 0, capped(logits)).float().log_softmax(-1)
    return (log_probs.exp() * log_probs).sum(-1) - log_probs.gather(-1, target[:, None])[:, 0]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("loss", [capped_cross_entropy, capped_entropy])
def test_logits_that_are_computed_again_are_rounded(
    loss: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """What inductor computes where it is read it does not round; the statistics are of rounded logits."""
    draw = torch.Generator().manual_seed(0)
    logits, target = 2 * torch.randn(64, 300, generator=draw), torch.arange(64)
    # near to p = 1, where a sum that is not 1 shows
    logits[target, target] += torch.linspace(12, 22, 64)
    logits = logits.to(dtype)

    def gradient(function: Callable[..., Tensor], given: Tensor) -> Tensor:
        leaf = given.detach().requires_grad_()
        function(leaf, target).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    with harness.in_float64():
        truth = gradient(loss, logits.double())
    eager = gradient(loss, logits)
    ours = gradient(compiled(loss, inner="inductor"), logits)
    assert slime_compile.reports()[-1].to_dict()["fused"]
    harness.no_worse_than_eager(ours, eager, truth, dtype, "gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_by_bits(dtype: torch.dtype) -> None:
    """As a cast rounds: ties, what is too large, infinities and NaN of any bits included."""
    draw = torch.Generator().manual_seed(0)
    info, spoilt = torch.finfo(dtype), torch.tensor([0x7FFFFFFF, -1, 0x7F800001]).int()
    between = 1 + info.eps / 2 * torch.arange(9)  # every other one is a tie
    x = torch.cat(
        [
            torch.randn(4000, generator=draw) * 1e3,
            between,
            -between,
            torch.tensor([0.0, -0.0, math.inf, -math.inf, info.max, info.max * (1 + info.eps / 8)]),
            torch.tensor([info.min, 1e-3, 3e4, 65519.0, 65520.0, -65520.0]),
            spoilt.view(torch.float32),
        ]
    )
    scratch = Scratch(torch.float32)
    given = scratch.input("rows", x.shape, torch.float32)
    found = Values({given: x}, None)[_rounded(scratch.walk().walk.context, given, dtype)]
    torch.testing.assert_close(found, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
