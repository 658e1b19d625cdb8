"""A compiled loss in a checkpoint and a checkpoint in a compiled loss: right, and no more memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import slime_compile
from slime_compile.rl.memory_probe import memory_probe
from tests.support.harness import no_worse_than_eager

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

ROWS, VOCAB = 768, 8192  # 24 MiB of float32 logits, above the default min_vocab
LOGITS_BYTES = ROWS * VOCAB * 4
SCRATCH_BYTES = (
    4 * 2**20
)  # of the operators on the CPU with one thread, whatever the size (torch_calls.py)
SMALL = 0.01  # of the logits: what there is per row


def policy_loss(
    logits: Tensor, target: Tensor, old_log_probs: Tensor, advantages: Tensor
) -> Tensor:
    """Each row's clipped policy loss with an entropy bonus, at a temperature, [ROWS]."""
    log_probs_all = (logits / 0.7).log_softmax(-1)
    entropy = -(log_probs_all.exp() * log_probs_all).sum(-1)
    log_probs = log_probs_all.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(0.8, 1.2)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -(gain + 0.01 * entropy)


def compiled(function: Loss, **options: Any) -> Loss:
    options = {"inner": "aot_eager", "strict": True} | options
    return torch.compile(function, backend="slime_fused", fullgraph=True, options=options)


def checkpointed(function: Loss, use_reentrant: bool) -> Loss:
    def call(*args: Tensor) -> Tensor:
        result = checkpoint(function, *args, use_reentrant=use_reentrant)
        assert isinstance(result, Tensor)
        return result

    return call


def around(use_reentrant: bool, **options: Any) -> Loss:
    return checkpointed(compiled(policy_loss, **options), use_reentrant)


def within(use_reentrant: bool, **options: Any) -> Loss:
    return compiled(checkpointed(policy_loss, use_reentrant), **options)


ORDERS = {"checkpoint of compiled": around, "compiled checkpoint": within}
REENTRANT = [
    pytest.param(False, id="non-reentrant"),
    pytest.param(True, id="reentrant", marks=pytest.mark.thorough),
]


def batch() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    target = torch.randint(VOCAB, (ROWS,), generator=generator)
    old = logits.div(0.7).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    old_log_probs = old + 0.3 * torch.randn(ROWS, generator=generator)  # so that some are clipped
    return logits, target, old_log_probs, torch.randn(ROWS, generator=generator)


def loss_and_gradient(loss: Loss, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits, target, old_log_probs, advantages = batch()
    logits = logits.to(dtype).requires_grad_()
    # `+ 0`: not the leaf itself, so that `consume_logits` may write over them
    value = loss(logits + 0, target, old_log_probs.to(dtype), advantages.to(dtype))
    value.mean().backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def check_right(loss: Loss) -> None:
    value, gradient = loss_and_gradient(loss)
    eager_value, eager_gradient = loss_and_gradient(policy_loss)
    true_value, true_gradient = loss_and_gradient(policy_loss, torch.float64)
    no_worse_than_eager(value, eager_value, true_value, torch.float32, "values")
    no_worse_than_eager(gradient, eager_gradient, true_gradient, torch.float32, "gradient")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("use_reentrant", REENTRANT)
def test_right_and_fused(order: str, use_reentrant: bool) -> None:
    known = len(slime_compile.reports())
    check_right(ORDERS[order](use_reentrant))
    new = slime_compile.reports()[known:]
    assert new
    for report in new:
        found = report.to_dict()
        assert found["fused"] > 0, str(report)
        assert found["wide_after"] == 0, str(report)


@pytest.mark.parametrize(
    "order",
    ["checkpoint of compiled", pytest.param("compiled checkpoint", marks=pytest.mark.thorough)],
)
def test_right_under_inductor(order: str) -> None:
    check_right(ORDERS[order](False, inner="inductor"))


def peak_of(loss: Loss) -> int:
    """Bytes of forward and backward, with the logits, which are made from a scalar leaf."""
    logits, target, old_log_probs, advantages = batch()
    for _ in range(2):  # the first call compiles
        scale = torch.ones((), requires_grad=True)
        with memory_probe("loss", enabled=True, device="cpu", log=lambda line: None) as probe:
            # Its backward reads nothing: the peak is the loss's.
            loss(logits + scale, target, old_log_probs, advantages).mean().backward()
    assert probe.record is not None
    assert probe.record.peak_allocated is not None
    return probe.record.peak_allocated


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("use_reentrant", REENTRANT)
def test_memory(order: str, use_reentrant: bool) -> None:
    """The logits, which become their gradient; both where a checkpoint outside holds them; eager needs several."""
    small = SMALL * LOGITS_BYTES + SCRATCH_BYTES
    assert LOGITS_BYTES <= peak_of(compiled(policy_loss)) <= LOGITS_BYTES + small
    buffers = 2 if order == "checkpoint of compiled" else 1
    assert peak_of(ORDERS[order](use_reentrant)) <= buffers * LOGITS_BYTES + small
    assert peak_of(policy_loss) > 3 * LOGITS_BYTES


@pytest.mark.parametrize("order", ORDERS)
def test_consumed_logits(order: str) -> None:
    """The recomputed forward must not read logits that the gradient was written over."""
    check_right(ORDERS[order](False, consume_logits=True))
    assert "reuses the logits' buffer" in str(slime_compile.reports()[-1])
