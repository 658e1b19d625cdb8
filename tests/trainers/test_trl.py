"""TRL: the example does what it says; its fused head over our operators, value for value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed; make test-trainers does")

import trl.trainer.grpo_trainer

from slime_compile.integrations import trl as integration
from tests.support.dispatch import Calls
from tests.trainers.checks import check_another_release, check_not_known

if hasattr(trl.trainer.grpo_trainer, "selective_log_softmax"):
    reason = f"the trainers of trl {trl.__version__} make logits"
    pytest.skip(f"{reason}: test_trl_logits.py", allow_module_level=True)

STEPS = 20
N, V, D = 65, 1040, 8
EVERYTHING = ("log_probs", "entropy", "mean_logits", "is_top1")


@pytest.fixture
def utils() -> Any:
    import trl.trainer.utils as found

    yield found
    integration.disable()


def run(utils: Any, dtype: torch.dtype, outputs: tuple[str, ...], **more: Any) -> list[Any]:
    """What TRL's call gives, and the gradients of hidden, weight, bias."""
    draw = torch.Generator().manual_seed(0)
    head = [
        torch.randn(*shape, generator=draw).to(dtype).requires_grad_()
        for shape in ((N, D), (V, D), (V,))
    ]
    target = torch.randint(V, (N,), generator=draw)
    logits = torch.nn.functional.linear(*head).detach()
    target[: N // 2] = logits[: N // 2].argmax(-1)
    given = {"softcap": None, "scale": 1.0} | more
    found = utils._ChunkedLogProbFunction.apply(
        *head, target, 0.7, 4096, given["softcap"], given["scale"], outputs
    )
    weights = torch.randn(2, N, generator=draw).to(found[0].dtype)
    total = sum((w * v).sum() for w, v in zip(weights, found[:2], strict=True) if v is not None)
    return [*found, *torch.autograd.grad(total, head)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy"), EVERYTHING], ids=len)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_values(utils: Any, dtype: torch.dtype, outputs: tuple[str, ...], scale: float) -> None:
    theirs = run(utils, dtype, outputs, scale=scale)
    assert integration.enable()
    assert integration.enable()
    mine = run(utils, dtype, outputs, scale=scale)
    for number, (ours, other) in enumerate(zip(mine, theirs, strict=True)):
        if other is None:
            assert ours is None
            continue
        assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
        if ours.dtype == torch.bool:
            assert torch.equal(ours, other)
            assert ours[: N // 2].all()
            assert not ours.all()
            continue
        rounding = 1e-5 if dtype == torch.float32 else 2e-2  # of the largest; bfloat16 has 8 bits
        assert (ours - other).abs().max() <= rounding * other.abs().max(), number
    integration.disable()
    for again, other in zip(run(utils, dtype, outputs, scale=scale), theirs, strict=True):
        assert again is other is None or torch.equal(again, other)


@pytest.mark.parametrize(
    "more", [{"outputs": ("log_probs", "log_sum_sq_probs")}, {"softcap": 30.0}], ids=str
)
def test_what_stays_with_trl(utils: Any, more: dict[str, Any]) -> None:
    given = {"outputs": ("log_probs", "entropy")} | more
    theirs = run(utils, torch.float32, **given)
    assert integration.enable()
    for again, other in zip(run(utils, torch.float32, **given), theirs, strict=True):
        assert again is other is None or torch.equal(again, other)


def test_another_trl(utils: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
            return hidden

    def names() -> list[Any]:
        return [utils._ChunkedLogProbFunction]

    with monkeypatch.context() as context:
        check_another_release(integration, names, context, caplog)
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    check_not_known(integration, names, caplog)


# what the peaks of TRL and of ours are held against, in logits; the metrics that the trainer logs
TRAINERS: dict[str, tuple[float, float, list[str]]] = {
    "trl_grpo": (8.0, 0.5, []),
    "trl_sft": (6.0, 0.5, ["entropy", "mean_token_accuracy"]),
    "trl_dpo": (10.0, 0.52, ["entropy", "mean_token_accuracy", "logits/chosen", "rewards/chosen"]),
}

# of the statistics, in a step; GRPO's log-probs before an update serve two steps, DPO has a reference
STATISTICS = {"trl_grpo": 1.5, "trl_sft": 1, "trl_dpo": 2}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_examples(name: str, example: Callable[[str], Any]) -> None:
    module = example(name)
    with Calls("slime_fused") as operators:
        runs = module.main(["--steps", str(STEPS)])
    theirs, ours = runs["trl"], runs["slime_compile"]
    calls = {"linear_row_stats.default": STATISTICS[name] * STEPS, "linear_row_grad.default": STEPS}
    assert operators.calls == calls
    least, most, metrics = TRAINERS[name]
    assert len(theirs.losses) == STEPS
    assert len(set(theirs.losses)) == STEPS  # it trains
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4, abs=1e-6)
    assert ours.peak_bytes < most * module.LOGITS_BYTES
    assert theirs.peak_bytes > least * module.LOGITS_BYTES
    for metric in metrics:
        mine, other = ([row[metric] for row in run.logged[:STEPS]] for run in (ours, theirs))
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5), metric
