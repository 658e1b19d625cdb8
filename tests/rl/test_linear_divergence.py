"""`linear_divergence`: values and gradients against plain torch in float64, chunks of both models' logits.

The budget is the error of plain torch in the same dtype, which has all logits, plus one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slime_compile
from bench.measure.measure import profiled_peak
from slime_compile import linear_divergence
from slime_compile.backend import options
from tests.support.harness import no_worse_than_eager

# So many rows that plain torch's largest error is not one lucky number; widths that no two sizes share.
N, V, D_STUDENT, D_TEACHER = 257, 130, 12, 20
KINDS: list[dict[str, Any]] = [
    {"kind": "forward_kl"},
    {"kind": "forward_kl", "skew": 0.1},
    {"kind": "reverse_kl"},
    {"kind": "reverse_kl", "skew": 0.3},
    {"kind": "jensen_shannon"},
    {"kind": "jensen_shannon", "beta": 0.2},
]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 rows in float32; a compiler without a past and without code generation."""
    torch._dynamo.reset()
    monkeypatch.setattr(options, "MIB", 1)
    monkeypatch.setenv("SLIME_FUSED_CHUNK_MIB", str(64 * V * 4))
    monkeypatch.setenv("SLIME_FUSED_INNER", "aot_eager")
    monkeypatch.setenv("SLIME_FUSED_MIN_VOCAB", "32")
    monkeypatch.setenv("SLIME_FUSED_STRICT", "1")


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _models(
    gen: torch.Generator, dtypes: Sequence[torch.dtype], rows: Sequence[int] = (N,)
) -> list[Tensor]:
    """Student's and teacher's hidden states and weights."""
    made = []
    for dtype, width in zip(dtypes, (D_STUDENT, D_TEACHER), strict=True):
        made += [torch.randn(*rows, width, generator=gen), torch.randn(V, width, generator=gen) / 2]
        made[-2:] = [each.to(dtype) for each in made[-2:]]
    return made


def _plain(
    models: Sequence[Tensor],
    kind: str,
    temperature: float | Tensor = 1.0,
    beta: float = 0.5,
    skew: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """From the definitions, over whole logits."""
    wide = torch.float64 if torch.float64 in [each.dtype for each in models] else torch.float32
    if isinstance(temperature, Tensor):
        temperature = temperature.to(wide).expand(models[0].shape[:-1]).unsqueeze(-1)
    vocab = min(models[1].shape[0], models[3].shape[0])
    logits = [F.linear(models[at], models[at + 1][:vocab]).to(wide) / temperature for at in (0, 2)]
    log_p, log_q = (each.log_softmax(-1) for each in logits)

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return F.kl_div(second, first, reduction="none", log_target=True).sum(-1)

    def mixed(first: Tensor, second: Tensor, part: float) -> Tensor:
        return second if part == 0 else (part * first.exp() + (1 - part) * second.exp()).log()

    if kind == "forward_kl":
        made = kl(log_q, mixed(log_q, log_p, skew))
    elif kind == "reverse_kl":
        made = kl(log_p, mixed(log_p, log_q, skew))
    else:
        mixture = mixed(log_q, log_p, beta)
        made = beta * kl(log_q, mixture) + (1 - beta) * kl(log_p, mixture)
    return made if weights is None else made * weights


def _ours(models: Sequence[Tensor], kind: Any, *rest: Any, **formula: Any) -> Tensor:
    return linear_divergence(*models, kind, *rest, **formula)


def _with_grads(
    function: Callable[..., Tensor], models: Sequence[Tensor], grad: Tensor, **formula: Any
) -> list[Tensor]:
    """The divergence, then gradients of the student's hidden and weight."""
    student = [each.detach().clone().requires_grad_() for each in models[:2]]
    made = function([*student, *models[2:]], **formula)
    made.backward(grad.to(made.dtype))
    return [made.detach(), *(each.grad for each in student if each.grad is not None)]


def _check(models: Sequence[Tensor], gen: torch.Generator, **formula: Any) -> None:
    grad = torch.randn(models[0].shape[:-1], generator=gen)
    mine = _with_grads(_ours, models, grad, **formula)
    eager = _with_grads(_plain, models, grad, **formula)
    truth = _with_grads(_plain, [each.double() for each in models], grad, **formula)
    for name, ours, plain, true in zip(
        ("divergence", "grad_hidden", "grad_weight"), mine, eager, truth, strict=True
    ):
        assert ours.dtype == plain.dtype, name
        if all(each.dtype == torch.float64 for each in models):  # the truth is no better
            torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-12)
        else:
            least = max((each.dtype for each in models), key=lambda dtype: torch.finfo(dtype).eps)
            no_worse_than_eager(ours, plain, true, least, name)
    report = slime_compile.reports()[-1]
    assert report.assert_fused() is None
    assert "chunks of rows" in str(report)


# ---- values and gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", KINDS, ids=lambda each: "-".join(map(str, each.values())))
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=["float32", "float64", "bfloat16"],
)
def test_values_and_gradients(
    gen: torch.Generator, dtypes: tuple[torch.dtype, ...], formula: dict[str, Any]
) -> None:
    _check(_models(gen, dtypes), gen, **formula)


@pytest.mark.parametrize("student", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("teacher", [torch.float16, torch.float32, torch.float64], ids=str)
def test_models_of_two_dtypes(
    gen: torch.Generator, student: torch.dtype, teacher: torch.dtype
) -> None:
    _check(_models(gen, (student, teacher)), gen, kind="reverse_kl")


@pytest.mark.parametrize("shape", [None, (), (41,), (13, 1), (13, 41)])
def test_temperature(gen: torch.Generator, shape: tuple[int, ...] | None) -> None:
    temperature = 0.7 if shape is None else 0.5 + torch.rand(shape, generator=gen)
    models = _models(gen, (torch.float32, torch.float32), rows=(13, 41))
    _check(models, gen, kind="forward_kl", temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_weights(gen: torch.Generator, dtype: torch.dtype) -> None:
    weights = torch.rand(13, 41, generator=gen) * (torch.rand(13, 41, generator=gen) < 0.7)
    models = _models(gen, (torch.float32, torch.float32), rows=(13, 41))
    _check(models, gen, kind="jensen_shannon", weights=weights.to(dtype))


@pytest.mark.parametrize("student", [V, V - 9])
def test_a_padded_vocabulary(gen: torch.Generator, student: int) -> None:
    """The head with more rows has rows of NaN behind the vocabulary: nothing reads them."""
    models = _models(gen, (torch.float32, torch.float32))
    longer = 1 if student == V else 3
    models[longer][V - 9 :] = torch.nan
    models[4 - longer] = models[4 - longer][: V - 9]
    _check(models, gen, kind="forward_kl", skew=0.1)


def test_rows_without_weight(gen: torch.Generator) -> None:
    """Zero, no gradient, whatever their hidden states are; a row of NaN that counts is NaN."""
    models = _models(gen, (torch.float32, torch.float32))
    models[0][:3], models[2][2:5] = torch.nan, torch.nan
    weights = torch.ones(N)
    weights[:5] = 0
    want = _with_grads(_ours, [each.nan_to_num() for each in models], weights, kind="reverse_kl")
    mine = _with_grads(_ours, models, torch.ones(N), kind="reverse_kl", weights=weights)
    assert (mine[0][:5] == 0).all()
    assert (mine[1][:5] == 0).all()
    torch.testing.assert_close(mine[0][5:], want[0][5:])
    torch.testing.assert_close(mine[1:], want[1:])
    weights[4] = 1
    assert linear_divergence(*models, weights=weights)[4].isnan()


def test_the_teacher_gets_no_gradient(gen: torch.Generator) -> None:
    leaves = [each.requires_grad_() for each in _models(gen, (torch.float32, torch.float32))]
    linear_divergence(*leaves).sum().backward()
    assert [each.grad is None for each in leaves] == [False, False, True, True]


def test_a_teacher_in_inference_mode(gen: torch.Generator) -> None:
    models = _models(gen, (torch.float32, torch.float32))
    student = [each.requires_grad_() for each in models[:2]]
    want = torch.autograd.grad(linear_divergence(*models).sum(), student)
    with torch.inference_mode():
        teacher = [each.clone() for each in models[2:]]
    got = torch.autograd.grad(linear_divergence(*student, *teacher).sum(), student)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("trained", [0, 1])
def test_one_part_of_the_student_is_frozen(gen: torch.Generator, trained: int) -> None:
    models = _models(gen, (torch.float32, torch.float32))
    leaf = models[trained].requires_grad_()
    (mine,) = torch.autograd.grad(linear_divergence(*models).sum(), leaf)
    (want,) = torch.autograd.grad(_plain(models, "forward_kl").sum(), leaf)
    torch.testing.assert_close(mine, want)


def test_without_gradients(gen: torch.Generator) -> None:
    models = _models(gen, (torch.float32, torch.float32))
    models[0].requires_grad_()
    with torch.no_grad():
        made = linear_divergence(*models, "reverse_kl", skew=0.1)
    assert not made.requires_grad
    torch.testing.assert_close(made, _plain(models, "reverse_kl", skew=0.1).detach())


def test_no_rows(gen: torch.Generator) -> None:
    """A rank without a token has a gradient of zero."""
    models = _models(gen, (torch.float32, torch.float32), rows=(0,))
    leaf = models[1].requires_grad_()
    (grad,) = torch.autograd.grad(linear_divergence(*models).sum(), leaf)
    assert (grad == 0).all()


def test_autocast(gen: torch.Generator) -> None:
    """The logits are those of autocast's `F.linear`."""
    models = _models(gen, (torch.float32, torch.float32))
    want = linear_divergence(*(each.bfloat16() for each in models))
    with torch.autocast("cpu", torch.bfloat16):
        mine = linear_divergence(*models)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, want)


def test_in_a_compiled_function(gen: torch.Generator) -> None:
    """The call is a part of its graph."""
    models = _models(gen, (torch.float32, torch.float32))
    leaf = models[0].requires_grad_()
    mask = torch.arange(N) % 3 > 0

    def loss(*models: Tensor) -> Tensor:
        return linear_divergence(*models, "jensen_shannon", weights=mask).mean()

    compiled = torch.compile(loss, backend="slime_fused", fullgraph=True)
    (mine,) = torch.autograd.grad(compiled(*models), leaf)
    (want,) = torch.autograd.grad(_plain(models, "jensen_shannon", weights=mask).mean(), leaf)
    torch.testing.assert_close(mine, want)
    assert "chunks of rows" in str(slime_compile.reports()[-1])


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward_kl", "jensen_shannon"])
def test_chunks_of_logits(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighths: both models' and the temporary tensors of one; the gradients, a few numbers per row."""
    rows, vocab, width = 2048, 4096, 16
    logits = rows * vocab * 4
    monkeypatch.setenv("SLIME_FUSED_INNER", "inductor")
    monkeypatch.setenv("SLIME_FUSED_CHUNK_MIB", str(logits // 8))
    models = [torch.randn(*size) for size in ((rows, width), (vocab, width)) * 2]
    student = [each.requires_grad_() for each in models[:2]]
    weights = torch.ones(rows)

    def step() -> None:
        torch.autograd.grad(linear_divergence(*models, kind, weights=weights).sum(), student)

    step()
    gradients = 2 * (rows + vocab) * width * 4  # with the hidden states in which rows are masked
    per_row = rows * 100
    assert profiled_peak(step) <= 2 * logits / 8 + gradients + per_row


# ---- what must hold -----------------------------------------------------------------------------------------------

HS, WS, HT, WT = (torch.zeros(*size) for size in ((4, 3), (9, 3), (4, 5), (9, 5)))


@pytest.mark.parametrize(
    ("models", "formula", "message"),
    [
        (
            (HS.int(), WS, HT, WT),
            {},
            "`student_hidden` must have a floating dtype, got torch.int32",
        ),
        ((HS, WT, HT, WT), {}, "`student_weight` must have shape [V, 3], V > 0, got [9, 5]"),
        ((HS, WS, HT, WS), {}, "`teacher_weight` must have shape [V, 5], V > 0, got [9, 3]"),
        ((HS, WS, HT[:3], WT), {}, "`teacher_hidden` must have shape [4, D], got [3, 5]"),
        (
            (HS, WS, HT, WT.bfloat16()),
            {},
            "`teacher_weight` must have the dtype and device of `teacher_hidden`, torch.float32 on cpu, got",
        ),
        (
            (HS, WS, HT.to("meta"), WT.to("meta")),
            {},
            "`teacher_hidden` must be on the device of `student_hidden`, cpu, got meta",
        ),
        ((HS, WS, HT, WT), {"kind": "kl"}, "`kind` must be one of ['forward_kl', 'reverse_kl', "),
        ((HS, WS, HT, WT), {"skew": 1.0}, "`skew` must be at least 0 and below 1, got 1.0"),
        (
            (HS, WS, HT, WT),
            {"kind": "jensen_shannon", "skew": 0.1},
            "`skew` must be 0 for kind='jensen_shannon', got 0.1",
        ),
        (
            (HS, WS, HT, WT),
            {"kind": "jensen_shannon", "beta": 1.0},
            "`beta` must lie between 0 and 1, got 1.0; use kind='forward_kl' or kind='reverse_kl'",
        ),
        (
            (HS, WS, HT, WT),
            {"weights": torch.ones(4, 1)},
            "`weights` must have shape [4], got [4, 1]",
        ),
        ((HS, WS, HT, WT), {"temperature": 0.0}, "`temperature` must be positive, got 0.0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refuses(models: Sequence[Tensor], formula: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        linear_divergence(*models, **formula)
    assert message in str(raised.value)


def test_weight_without_memory() -> None:
    """As FSDP leaves it when it has sharded the parameter again."""
    freed = torch.zeros(9, 5)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"`teacher_weight` must have memory"):
        linear_divergence(HS, WS, HT, freed)
