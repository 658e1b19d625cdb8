"""The rewritten graph asks `row_stats` for the mean and the total only where something reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_compile.ops import cpu
from tests.support.harness import OPTIONS, VOCAB, each_inner

ROWS = 5


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def log_prob_and_entropy(logits: Tensor, target: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return (log_p.gather(-1, target[:, None])[:, 0] + 0.1 * entropy).sum()


def entropy_for_the_log_only(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, target[:, None]).sum(), entropy


def label_smoothing(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, label_smoothing=0.1)


@each_inner
@pytest.mark.parametrize(
    ("loss", "mean", "total"),
    [
        (cross_entropy, False, False),
        (log_prob_and_entropy, True, False),
        (entropy_for_the_log_only, True, False),
        (label_smoothing, False, True),
    ],
)
def test_only_what_is_read_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    loss: Callable[..., Any],
    mean: bool,
    total: bool,
    inner: str,
) -> None:
    asked = []
    row_stats = cpu.row_stats

    def spy(x: Tensor, scale: Any, factor: float, mean: bool, total: bool) -> Any:
        asked.append((mean, total))
        return row_stats(x, scale, factor, mean, total)

    monkeypatch.setattr(cpu, "row_stats", spy)
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=draw)
    target = torch.randint(VOCAB, (ROWS,), generator=draw)
    gradients = []
    for fn in (
        torch.compile(loss, backend="slime_fused", options=OPTIONS | {"inner": inner}),
        loss,
    ):
        leaf = logits.clone().requires_grad_()
        outputs = fn(leaf, target)
        (outputs if isinstance(outputs, Tensor) else outputs[0]).backward()
        gradients.append(leaf.grad)
    assert asked == [(mean, total)]
    torch.testing.assert_close(*gradients)
