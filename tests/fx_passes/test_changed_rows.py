"""Numbers per row that the compiled function changes in place: backward needs what they were.

Eager code saves what it computed of them (`r - b`); a gradient that is made of `b` itself would read it changed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.support import harness

ROWS, VOCAB = 6, 41


def baseline_set(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    """REINFORCE with the last reward for a baseline."""
    log_probs = x.log_softmax(-1)
    loss = -((log_probs.exp() * log_probs).sum(-1) * (reward - state)).sum()
    with torch.no_grad():
        state.copy_(reward)
    return loss


def baseline_averaged(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    log_prob = x.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    loss = -(log_prob * (reward - state)).sum()
    with torch.no_grad():
        state.mul_(0.5).add_(0.5 * reward)
    return loss


def temperature(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    loss = cross_entropy(x * (reward - state)[:, None], target)
    with torch.no_grad():
        state.mul_(3)
    return loss


def shift(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    sums = (x + state[:, None]).exp().sum(-1)
    with torch.no_grad():
        state.zero_()
    return sums


def shift_through_a_view(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    column = state[:, None]
    sums = (x + column).exp().sum(-1)
    column.add_(1)
    return sums


def read_after_the_change(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    sums = (x + state[:, None]).exp().sum(-1)
    with torch.no_grad():
        state.mul_(0.5)
    return sums + cross_entropy(x * (1 + state)[:, None], target)


def straight_through(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    """Forward does not need the state, whose products cancel; it needs the rewards, which change, too."""
    log_prob = x.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    weighted = log_prob * state.clone()
    value = weighted - weighted.detach() + log_prob * reward.clone()
    with torch.no_grad():
        state.mul_(3)
        reward.mul_(0.5)
    return value


def beside_a_constant(x: Tensor, target: Tensor, reward: Tensor, state: Tensor) -> Tensor:
    """A tensor of the graph's own is fetched after the state is read."""
    state.data.copy_(state)
    sums = (x.sin() * state[:, None]).logsumexp(-1)
    with torch.no_grad():
        reward[target < 20] = 0.5
        reward.add_(torch.tensor([0.5, 1.0])[(target < 40).long()])
    return sums[1:5:2]


FUNCTIONS = (
    baseline_set,
    baseline_averaged,
    temperature,
    shift,
    shift_through_a_view,
    read_after_the_change,
    straight_through,
    beside_a_constant,
)


def outcome(fn: Callable[..., Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(ROWS, VOCAB, generator=draw)).requires_grad_()
    target = torch.randint(VOCAB, (ROWS,), generator=draw)
    reward, state = (torch.randn(ROWS, generator=draw) for _ in range(2))
    calls = []
    for _ in range(2):  # the second finds what the first has left
        value = fn(x, target, reward, state)
        calls += [value.detach(), *torch.autograd.grad(value.sum(), x), state.clone()]
    return calls


@harness.each_inner
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_backward_has_what_forward_read(fn: Callable[..., Tensor], inner: str) -> None:
    torch._dynamo.reset()
    options = {**harness.OPTIONS, "inner": inner}
    compiled = torch.compile(fn, backend="slime_fused", options=options)
    torch.testing.assert_close(outcome(compiled), outcome(fn), rtol=1e-5, atol=1e-6)
