"""What a program changes in place, hooks or returns twice: values, gradients and memory are those of eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.changes import CHANGES, PLACES, WAYS, Outputs
from tests.support.harness import HIDDEN, OPTIONS, ROWS, VOCAB
from tests.support.program_memory import apart_from, sharing

QUICK = ("relu", "foreach", "packet", "unmarked_function")
"""One way of each kind is in every run; `graph/test_writes.py` has all of them."""

TORCHS_OWN = {
    "function_before_a_temperature",
    "function_of_overlapping_rows",
    "function_after_the_loss",
}
"""Torch's own backends raise."""

Found = dict[str, Any]


def arguments() -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, HIDDEN, generator=draw) for n in (ROWS, VOCAB))
    target = torch.randint(VOCAB, (ROWS,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def found(function: Callable[..., Outputs]) -> Found:
    """What a caller sees: of each result alone, and of all of them together."""
    given = arguments()
    results = function(*given)
    told: Found = {"values": [each.detach().clone() for each in results]}
    told["memory"] = sharing(results, given)
    losses = [
        (n + each.float()).square().sum() for n, each in enumerate(results) if each.requires_grad
    ]
    for loss in (*losses, sum(losses)):
        told["values"] += torch.autograd.grad(
            loss, given[:2], retain_graph=True, allow_unused=True, materialize_grads=True
        )
    return told


def changed_by_the_caller(function: Callable[..., Outputs]) -> list[Tensor]:
    """The results, and the gradients, where the caller overwrites those without a gradient; none where that raises."""
    given = arguments()
    results = function(*given)
    loss = sum(each.float().square().sum() for each in results if each.requires_grad)
    for each in results:
        if not each.requires_grad:
            each.zero_()
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, given[:2], allow_unused=True, materialize_grads=True)
    return [*(each.detach() for each in results), *gradients]


def compare(name: str, inner: str) -> None:
    function = CHANGES[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="slime_fused", options=OPTIONS | {"inner": inner})
    got, expected = found(compiled), found(function)
    torch.testing.assert_close(got["values"], expected["values"], rtol=1e-4, atol=1e-4)
    names = ("hidden", "weight", "target")
    assert not apart_from(expected["memory"], got["memory"], names)
    try:
        changed = changed_by_the_caller(compiled)
    except RuntimeError as error:  # autograd's: nothing is wrong in silence
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        return
    torch.testing.assert_close(changed, changed_by_the_caller(function), rtol=1e-4, atol=1e-4)


def _is_quick(name: str) -> bool:
    ways = [way for way in WAYS for place in PLACES if name == f"{way}_{place}"]
    return not ways or ways[0] in QUICK


ROWS_OF_TABLE = [
    pytest.param(name, marks=() if _is_quick(name) else pytest.mark.thorough)
    for name in CHANGES
    if name not in TORCHS_OWN
]


@pytest.mark.parametrize("name", ROWS_OF_TABLE)
def test_as_in_eager_code(name: str) -> None:
    compare(name, "aot_eager")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "relu_between_heads",
        "packet_between_others_weights",
        "foreach_before_rows",
        "hardtanh_before_the_loss",
        "a_hook_below_a_softcap",
        "equal_logits_both_returned",
    ],
)
def test_as_in_eager_code_under_inductor(name: str) -> None:
    compare(name, "inductor")
