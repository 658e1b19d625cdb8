"""The estimate of the peak against what is measured, and at sizes that nobody here could measure."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.cases.losses import Case
from slime_compile import estimate_peak
from slime_compile.ops import cpu
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
    monkeypatch.setattr(cpu, "_CHUNK_ELEMENTS", CHUNK_ROWS * VOCAB)


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
    options = {"save": "softmax"} if "save=" in way else {"consume_logits": "consume" in way}
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
    assert "GiB" in str(found)


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
