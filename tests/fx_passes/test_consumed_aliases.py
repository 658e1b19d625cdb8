"""consume_logits=True, and an input that shares the logits' memory in a later call only: never other values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import slime_compile
from tests.support import harness

ROWS, VOCAB = 5, 64


def loss(logits: Tensor, target: Tensor, other: Tensor) -> Tensor:
    """Backward reads `other` after the gradient has taken the logits' place, or may."""
    log_p = logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    return (log_p * other.flatten()[:ROWS].sin()).sum() + (other * other).sum()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda x: x[:, 3],
    "a block of columns": lambda x: x[:, :2],
    "a flat view": lambda x: x.view(-1)[7:30],
    "another dtype": lambda x: x.view(torch.int32)[:, 3].view(torch.float32),
}


READ_IN_BACKWARD = {
    "a column",
    "another dtype",
}  # forward makes a copy of what it needs of the others


def run(fn: Callable[..., Tensor], view: Callable[[Tensor], Tensor], alias: bool) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    leaf = torch.randn(ROWS, VOCAB, generator=draw, requires_grad=True)
    given = leaf * 1
    other = view(given.detach() if alias else given.detach().clone())  # of one layout
    fn(given, torch.arange(ROWS), other).backward()
    assert leaf.grad is not None
    return leaf.grad


@harness.each_inner
@pytest.mark.parametrize("view", VIEWS, ids=lambda name: name.replace(" ", "_"))
def test_alias_in_a_later_call(view: str, inner: str) -> None:
    torch._dynamo.reset()
    options = {**harness.OPTIONS, "inner": inner, "consume_logits": True}
    compiled = torch.compile(loss, backend="slime_fused", options=options)
    wanted = run(loss, VIEWS[view], alias=False)
    torch.testing.assert_close(run(compiled, VIEWS[view], alias=False), wanted)
    refused = ""
    try:
        torch.testing.assert_close(run(compiled, VIEWS[view], alias=True), wanted)
    except RuntimeError as error:
        refused = str(error)
    assert slime_compile.reports()[-1].to_dict()["in_place"][0]["in_place"]
    assert bool(refused) == (view in READ_IN_BACKWARD)
    assert not refused or "compile without options={'consume_logits': True}" in refused
