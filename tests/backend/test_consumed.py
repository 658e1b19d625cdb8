"""consume_logits=True, and autograd needs the logits elsewhere: its error names the option and the user's line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from tests.support.held import VOCAB, Loss, compiled, leaf, log_probs, overwritten


@pytest.fixture(scope="module", params=["aot_eager", "inductor"])
def fn(request: pytest.FixtureRequest) -> Iterator[Loss]:
    engine = Variable._execution_engine
    torch._dynamo.reset()
    yield compiled(log_probs, inner=request.param, consume_logits=True)
    Variable._execution_engine = engine


class BackwardInside(torch.autograd.Function):
    """As a checkpoint that keeps its graph does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.given = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.made = ctx.given * ctx.given
        return ctx.made.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.made.backward(grad)
        return ctx.given.grad


READERS = {
    "the logits": lambda x: x * x,
    "a view": lambda x: x.view(-1).sin(),
    "some columns": lambda x: x[:, :3] * x[:, 1:4],
    "a backward inside": BackwardInside.apply,
}
MAKERS = {
    "tanh": torch.tanh,
    "a compiled model": torch.compile(lambda x: x.tanh(), backend="aot_eager"),
}


LINE = log_probs.__code__.co_firstlineno + 1


def check_error(loss: Tensor) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        loss.backward()
    said = str(caught.value)
    assert said.count("options={'consume_logits': True} let the gradient at ") == 1
    lines = said.partition("let the gradient at ")[2].partition(" overwrite them")[0]
    # and the lines of other tests
    assert any(line.endswith(f"held.py:{LINE}") for line in lines.split(", "))
    assert said.endswith("only if nothing else, autograd included, references them.")


@pytest.mark.parametrize("reader", READERS)
def test_another_operation_saved(fn: Loss, reader: str) -> None:
    """In the same backward; it was called first, so it is differentiated last."""
    logits = leaf() * 1
    other = READERS[reader](logits).sum()
    check_error(other + fn(logits).sum())


@pytest.mark.parametrize("maker", MAKERS)
def test_what_made_them_saved(fn: Loss, maker: str) -> None:
    check_error(fn(MAKERS[maker](leaf())).sum())


def test_a_later_backward(fn: Loss) -> None:
    logits = (leaf() * 1).view(-1, VOCAB)
    other = (logits * logits).sum()
    fn(logits).sum().backward()
    check_error(other)


def checkpointed(call: Loss) -> Loss:
    return lambda x: checkpoint(call, x, use_reentrant=False)


def saved_on_the_cpu(call: Loss) -> Loss:
    def under_hooks(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return call(x)

    return under_hooks


@pytest.mark.parametrize("around", [checkpointed, saved_on_the_cpu])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_hooks_for_what_is_saved(inner: str, around: Callable[[Loss], Loss]) -> None:
    """Autograd does not watch what they keep: where somebody has the logits they stay as they are."""
    torch._dynamo.reset()
    held = compiled(lambda x: log_probs(x) * 2, inner=inner, consume_logits=True)
    gradients = []
    for values in (held, lambda x: log_probs(x) * 2):

        def both(logits: Tensor, values: Loss = values) -> Tensor:
            return logits.square().sum(-1) + values(logits)

        x = leaf()
        gradients += torch.autograd.grad(around(both)(x * 1).sum(), x)
    torch.testing.assert_close(*gradients)
    before = overwritten()
    around(held)(leaf() * 1).sum().backward()
    assert overwritten() == before + 1


def test_errors_of_another_kind(fn: Loss) -> None:
    fn(leaf() * 1).sum().backward()
    other = leaf().exp()
    with pytest.raises(RuntimeError) as caught:
        other.sum().backward(torch.ones(2))
    assert "consume_logits" not in str(caught.value)


def test_without_the_option_autograd_is_left_alone() -> None:
    torch._dynamo.reset()
    engine = Variable._execution_engine
    compiled(log_probs, inner="aot_eager")(leaf() * 1).sum().backward()
    assert Variable._execution_engine is engine
