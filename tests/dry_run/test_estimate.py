"""The estimate of the peak against what is measured, and at sizes that nobody here could measure."""

import contextlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.cases.losses import Case
from slime_compile import Estimate, estimate_peak
from slime_compile.ops import torch_calls
from tests.backend.test_memory import (
    CASES,
    CHUNK_ROWS,
    HIDDEN,
    ROWS,
    SCRATCH_BYTES,
    VOCAB,
    peak_bytes,
)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("SLIME_FUSED_INNER", "aot_eager")
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", CHUNK_ROWS * VOCAB)


def fake_arguments(case: Case) -> list[Tensor]:
    """What a case's function takes. Given logits are no leaf, as after a model."""
    dtype, grad = case.torch_dtype, case.variant != "no_grad"
    with FakeTensorMode():
        if case.variant == "inside":
            shapes = [[case.rows, case.hidden], [case.vocab, case.hidden]]
            wide = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        else:
            wide = [torch.empty(case.rows, case.vocab, dtype=dtype, requires_grad=grad).clone()]
        target = torch.empty(case.rows, dtype=torch.int64)
        return [*wide, target, torch.empty(case.rows), torch.empty(case.rows)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "way", "buffers"), CASES)
def test_agrees_with_what_is_measured(variant: str, way: str, buffers: int, dtype: str) -> None:
    case = Case(variant, "plain", dtype, ROWS, VOCAB, HIDDEN)
    options: dict[str, Any] = {"save": "softmax"} if "save=" in way else {}
    options |= {"consume_logits": True} if "consume" in way else {}
    with torch.set_grad_enabled(variant != "no_grad"):
        found = estimate_peak(case.function(), *fake_arguments(case), **options)
    torch._dynamo.reset()
    apart = 2 * (ROWS + VOCAB) * HIDDEN * case.torch_dtype.itemsize if variant == "inside" else 0
    measured = peak_bytes(case, way)
    # whether an operator's own buffers count depends on when the peak is
    assert 0.97 * (measured - SCRATCH_BYTES) <= found.peak_bytes - apart <= 1.03 * measured


def test_a_size_that_fits_no_card() -> None:
    case = Case("given", "plain", "float32", 205_280, 76_032)
    found = estimate_peak(case.function(), *fake_arguments(case), consume_logits=True)
    assert found.inputs_bytes == pytest.approx(case.logits_bytes, rel=0.01)
    assert found.peak_bytes == pytest.approx(case.logits_bytes, rel=0.01)
    assert str(found).startswith("estimated peak 58.16 GiB (forward 58.1")


def test_a_small_estimate_has_a_small_unit() -> None:
    found = Estimate(inputs_bytes=1000, forward_bytes=3 << 19, peak_bytes=5 << 20)
    assert str(found) == "estimated peak 5 MiB (forward 1.5 MiB, inputs 1000 B)"
    assert repr(found) == f"<Estimate: {found}>"


def test_real_arguments_stay_as_they_are() -> None:
    logits = torch.randn(ROWS, VOCAB, requires_grad=True)
    before = logits.detach().clone()
    target = torch.randint(VOCAB, [ROWS])

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1).gather(-1, target[:, None]).sum()

    found = estimate_peak(loss, logits, target)
    assert logits.grad is None
    assert torch.equal(logits, before)
    assert found.peak_bytes == pytest.approx(2 * logits.nbytes, rel=0.02)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(RuntimeError, match="known options"):
        estimate_peak(lambda x: x, torch.zeros(2), inplace=True)
    with pytest.raises(RuntimeError, match="keyword arguments of fn are given as kwargs"):
        estimate_peak(lambda x, scale: x * scale, torch.zeros(2), scale=2.0)


def test_backward_is_not_skipped_without_a_word() -> None:
    logits, target = torch.randn(ROWS, VOCAB, requires_grad=True), torch.randint(VOCAB, [ROWS])

    def backward_inside(x: Tensor, t: Tensor) -> None:
        torch.nn.functional.cross_entropy(x, t).backward()

    def hidden_in_an_object(x: Tensor, t: Tensor) -> object:
        return types.SimpleNamespace(loss=torch.nn.functional.cross_entropy(x, t))

    for loss in (backward_inside, hidden_in_an_object):
        with pytest.raises(RuntimeError, match="fn must return the tensors backward starts from"):
            estimate_peak(loss, logits, target)
    with torch.no_grad():
        estimate_peak(hidden_in_an_object, logits, target)


# ---- keyword arguments, and what a function captures --------------------------------------------------------------


def head_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.t(), -1).gather(-1, target[:, None]).sum()


def head_arguments() -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    return hidden, weight, torch.randint(VOCAB, [ROWS])


def test_keyword_arguments() -> None:
    hidden, weight, target = head_arguments()
    positional = estimate_peak(head_loss, hidden, weight, target)
    named = estimate_peak(head_loss, hidden, kwargs={"target": target, "weight": weight})
    assert named == positional


def test_the_peak_may_be_in_forward() -> None:
    """With save="softmax" forward holds the logits and the softmax; backward makes the softmax the gradient."""
    hidden, weight, target = head_arguments()
    found = estimate_peak(head_loss, hidden, weight, target, save="softmax", lm_head=False)
    assert found.peak_bytes == found.forward_bytes
    assert found.peak_bytes == pytest.approx(2 * ROWS * VOCAB * 4, rel=0.1)


class Head(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach())


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_captured_parameters_are_arguments_too(fake: bool, frozen: bool) -> None:
    """A closure over a module: its gradient is made, its bytes are there."""
    mode = FakeTensorMode() if fake else contextlib.nullcontext()
    with mode:
        hidden, weight, target = head_arguments()
        hidden.requires_grad_(not frozen)
        head = Head(weight)
    given = estimate_peak(head_loss, hidden, weight, target)
    captured = estimate_peak(lambda h, t: head_loss(h, head.weight, t), hidden, target)
    assert captured.peak_bytes == given.peak_bytes
    assert captured.peak_bytes >= captured.forward_bytes
    assert captured.inputs_bytes == given.inputs_bytes
    assert head.weight.grad is None


def test_captured_constants_count_as_inputs() -> None:
    hidden, weight, target = head_arguments()
    reference = torch.randn(ROWS, VOCAB)
    plain = estimate_peak(head_loss, hidden, weight, target)
    beside = estimate_peak(
        lambda h, w, t: head_loss(h, w, t) + reference.sum(), hidden, weight, target
    )
    assert beside.inputs_bytes - plain.inputs_bytes == reference.nbytes
    assert beside.peak_bytes - plain.peak_bytes == pytest.approx(reference.nbytes, rel=0.01)


def test_logits_that_are_changed_in_place() -> None:
    """Given or captured, the gradient is that of the values before: backward does not look for what made them."""
    logits = torch.randn(ROWS, VOCAB, requires_grad=True) * 1
    target = torch.randint(VOCAB, [ROWS])

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.div_(0.7), target)

    given = estimate_peak(loss, logits, target)
    assert given.peak_bytes >= 2 * logits.nbytes
    assert estimate_peak(lambda t: loss(logits, t), target) == given
