"""Option `inline_below`: losses over few elements, whose formulas inductor compiles.

The other tests call the operators (`tests/conftest.py`); `test_programs.py` has generated programs for this, too.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import slime_compile
from bench.measure.measure import profiled_peak
from slime_compile.ops import native
from tests.support.harness import in_float64, no_worse_than_eager

ROWS, VOCAB = 6, 1030
INLINED = {"inline_below": 1 << 18, "strict": True}


needs_vectors = pytest.mark.skipif(not native.has_vectors(), reason="no vector instructions")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def policy(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    """With a temperature for each row, ignored rows and an entropy."""
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    chosen = log_probs.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    return torch.where(target >= 0, -chosen - 0.01 * entropy, 0.0).sum()


def _arguments(dtype: torch.dtype, vocab: int = VOCAB) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    target = torch.randint(0, vocab, (ROWS,), generator=gen)
    target[2] = -100
    temperature = 0.5 + torch.rand(ROWS, 1, generator=gen)
    return [(4 * torch.randn(ROWS, vocab, generator=gen)).to(dtype), target, temperature]


def _step(function: Any, arguments: list[Tensor]) -> list[Tensor]:
    leaf = arguments[0].clone().requires_grad_()
    value = function(leaf * 1, *arguments[1:])
    return [value.detach(), *torch.autograd.grad(value, leaf)]


def _compiled(options: dict[str, Any], **how: Any) -> Any:
    return torch.compile(policy, backend="slime_fused", options=options, **how)


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_compiles_the_formulas(dtype: torch.dtype) -> None:
    arguments = _arguments(dtype)
    found, code = run_and_get_code(_step, _compiled(INLINED), arguments)
    assert "slime_fused" not in "".join(code)
    eager = _step(policy, arguments)
    with in_float64():
        truth = _step(policy, [a.double() if a.is_floating_point() else a for a in arguments])
    for ours, theirs, true in zip(found, eager, truth, strict=True):
        no_worse_than_eager(ours, theirs, true, dtype)
    report = slime_compile.reports()[-1]
    report.assert_fused(2, in_place=False)
    assert "full-vocabulary values" in str(report)
    assert "not in place: the logits have few elements, and inductor compiles the formula" in str(
        report
    )


@needs_vectors
def test_a_dry_run_says_so_too() -> None:
    """And counts the gradient's memory; of larger logits nothing is said."""
    logits, *others = _arguments(torch.float32)
    arguments = [logits.requires_grad_() * 1, *others]
    slime_compile.explain(policy, **INLINED)(*arguments).assert_fused(2, in_place=False)
    report = slime_compile.explain(policy, inline_below=0)(*arguments)
    assert "few elements" not in str(report)
    peaks = [
        slime_compile.estimate_peak(
            policy, *arguments, consume_logits=False, inline_below=fewer
        ).peak_bytes
        for fewer in (1 << 18, 0)
    ]
    assert peaks[0] == peaks[1]


@needs_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_all_that_is_made(dtype: torch.dtype) -> None:
    function, (logits, *others) = _compiled(INLINED), _arguments(dtype, 20_000)
    leaf = logits.requires_grad_()

    def step() -> None:
        torch.autograd.grad(function(leaf, *others), leaf)

    step()
    assert profiled_peak(step) <= 1.01 * leaf.nbytes


@needs_vectors
@pytest.mark.parametrize("rows_vocab", [(1, 250_000), (4, 60_000)])
def test_long_rows_are_as_accurate(rows_vocab: tuple[int, int]) -> None:
    """Sums of a quarter of a million exponentials."""
    rows, vocab = rows_vocab
    logits, target = torch.randn(rows, vocab), torch.arange(rows)

    def step(function: Any, logits: Tensor) -> list[Tensor]:
        leaf = logits.clone().requires_grad_()
        value = function(leaf * 1, target, reduction="none")
        return [value.detach(), *torch.autograd.grad(value.sum(), leaf)]

    function = torch.compile(F.cross_entropy, backend="slime_fused", options=INLINED)
    found = step(function, logits)
    slime_compile.reports()[-1].assert_fused(2, in_place=False)
    for ours, theirs, true in zip(
        found, step(F.cross_entropy, logits), step(F.cross_entropy, logits.double()), strict=True
    ):
        no_worse_than_eager(ours, theirs, true, torch.float32)


def test_without_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor adds a row element by element there; the operators do not."""
    monkeypatch.setattr(native, "has_vectors", lambda: False)
    _, code = run_and_get_code(_step, _compiled(INLINED), _arguments(torch.float32))
    assert "slime_fused.row_stats" in "".join(code)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"consume_logits": True}, {}),
        ({"save": "softmax"}, {}),
        ({"inline_below": ROWS * VOCAB}, {}),
        ({}, {"dynamic": True}),
    ],
    ids=str,
)
def test_operators_are_called(options: dict[str, Any], how: dict[str, Any]) -> None:
    """Where the user asks for a buffer to be written over, for more elements, and where sizes are not known."""
    _, code = run_and_get_code(
        _step, _compiled(INLINED | options, **how), _arguments(torch.float32)
    )
    assert "slime_fused.row_stats" in "".join(code)
    assert "slime_fused.row_grad" in "".join(code)
    slime_compile.reports()[-1].assert_fused(
        2, max_full_vocabulary=options.get("save") == "softmax"
    )


@needs_vectors
@pytest.mark.thorough
def test_small_and_large_logits_in_one_graph() -> None:
    """The report travels with the operator that is left."""
    small, large = _arguments(torch.float32), _arguments(torch.float32, 4 * VOCAB)

    def both(x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target) + F.cross_entropy(y, target)

    leaves = [a[0].clone().requires_grad_() for a in (small, large)]
    options = INLINED | {"inline_below": 2 * ROWS * VOCAB}
    function = torch.compile(both, backend="slime_fused", options=options)

    def step(function: Any) -> list[Tensor]:
        value = function(*(leaf * 1 for leaf in leaves), small[1])
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    found, code = run_and_get_code(step, function)
    for ours, theirs in zip(found, step(both), strict=True):
        torch.testing.assert_close(ours, theirs)
    text = "".join(code)
    assert text.count("slime_fused.row_stats.default(") == 1
    assert text.count("slime_fused.row_grad_over.default(") == 1
    report = slime_compile.reports()[-1].to_dict()
    assert report["fused"] == 4
    assert sorted(bool(p["calls"]) for p in report["in_place"]) == [False, True]
