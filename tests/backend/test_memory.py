"""Peaks of slime's policy loss under the backend, by torch's allocator events, against the promised bounds.

`make bench` measures the same at a large size, under inductor, and in fresh processes. Here graphs are interpreted
(`inner="aot_eager"`), which allocates the same [N, V] tensors and needs no compiler.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import slime_compile
from bench.cases.losses import Case, Problem
from bench.measure.measure import Step, outside_bytes, profiled_peak
from slime_compile.ops import native, torch_calls

# 4 MB of logits in float32; less than what the CPU operators share among threads, which the profiler does not see
ROWS, VOCAB, HIDDEN = 250, 4096, 16
CHUNK_ROWS = 8  # of the CPU operators without a compiler; fewer take the profiler longer
SCRATCH_BYTES = 2 * CHUNK_ROWS * VOCAB * 4  # two buffers of a chunk in float32; the C++ has none
ROW_BYTES = 100  # statistics, coefficients, targets of a row: twenty numbers and some

WAYS = ["slime_fused", "slime_fused save=softmax", "slime_fused consume_logits=True"]
CASES = [
    # variant, way, logits at one time
    ("given", WAYS[0], 1),  # nobody holds them
    ("given", WAYS[1], 2),  # in float32: the softmax buffer becomes the gradient
    ("given", WAYS[2], 1),
    ("inside", WAYS[0], 1),
    ("no_grad", WAYS[0], 1),
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("SLIME_FUSED_INNER", "aot_eager")
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", CHUNK_ROWS * VOCAB)


@pytest.fixture(params=["C++", "torch calls"])
def scratch_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the operators take for themselves, with a compiler and without."""
    if request.param == "torch calls":
        monkeypatch.setattr(native, "functions", lambda: None)
        return SCRATCH_BYTES
    if native.functions() is None:
        pytest.skip(native.description())
    return 0


def peak_bytes(case: Case, way: str) -> int:
    problem = Problem(case, with_truth=False)
    step = Step(problem, way)
    step.run()
    step.prepare()
    return profiled_peak(step.run) + outside_bytes(problem)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "way", "buffers"), CASES)
def test_peak(variant: str, way: str, buffers: int, dtype: str, scratch_bytes: int) -> None:
    if "save=" in way and dtype != "float32":
        pytest.skip("the softmax is kept in float32, whatever the logits are")
    case = Case(variant, "plain", dtype, ROWS, VOCAB, HIDDEN)
    # the matmul copies its operands for its gradients, in bfloat16
    matmul = 2 * (ROWS + VOCAB) * HIDDEN * case.torch_dtype.itemsize if variant == "inside" else 0
    bound = buffers * case.logits_bytes + scratch_bytes + ROWS * ROW_BYTES + matmul
    assert peak_bytes(case, way) <= bound
    if (variant, way) == ("given", WAYS[0]):
        said = "reuses the logits' buffer, nothing else referenced them: 2 of 2 calls"
        assert said in str(slime_compile.reports()[-1])


def test_logits_that_somebody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two: the report says who it is, and what else there is to say."""
    kept: list[torch.Tensor] = []
    take = Step.take

    def shared(step: Step) -> torch.Tensor:
        logits = take(step)
        kept[:] = [logits.view(-1)]
        return logits

    monkeypatch.setattr(Step, "take", shared)
    case = Case("given", "plain", "float32", ROWS, VOCAB)
    assert peak_bytes(case, WAYS[0]) >= 2 * case.logits_bytes
    assert "not in place, 0 of 2 calls" in str(slime_compile.reports()[-1])


def test_eager_takes_more() -> None:
    """The measuring sees what there is: log-softmax, softmax and their gradients."""
    case = Case("given", "plain", "float32", ROWS, VOCAB)
    assert peak_bytes(case, "eager") >= 5 * case.logits_bytes


@pytest.mark.parametrize("rows", [1023, 1024, 4096])
def test_as_many_rows_as_a_vocabulary_has_columns(rows: int) -> None:
    """A scalar loss's gradient is one number over all rows, which are no vocabulary (`min_vocab` is 1024)."""
    case = Case("given", "plain", "float32", rows, VOCAB)
    with FakeTensorMode():
        logits = torch.empty(rows, VOCAB, requires_grad=True)
        target = torch.empty(rows, dtype=torch.int64)
        old, advantages = torch.empty(rows), torch.empty(rows)
    report = slime_compile.explain(case.function())(logits, target, old, advantages)
    assert report.fused == 2
    assert report.to_dict()["wide_after"] == 0
