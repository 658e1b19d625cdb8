"""Inputs from inference mode, which eager code may train on as long as no operation saves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_compile.backend.inference import copying_inference_tensors
from tests.support.harness import OPTIONS, each_inner

Loss = Callable[[Tensor, Tensor], Tensor]


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


LOSSES: dict[str, Loss] = {
    "forward": forward_kl,
    "forward, shifted": lambda x, z: forward_kl(x[:, :-1], z[:, :-1]),
    "reverse": reverse_kl,
    "reverse, shifted": lambda x, z: reverse_kl(x[:, :-1], z[:, :-1]),
    "targets": lambda x, z: F.cross_entropy(
        x.flatten(0, 1), (9 * z[..., 0].sigmoid()).flatten().long()
    ),
}


def run(loss: Loss, teacher: Tensor) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(1)
    student = torch.randn(3, 7, 40, generator=drawn, requires_grad=True)
    value = loss(student, teacher)
    return [value.detach(), *torch.autograd.grad(value, student)]


def teacher_of(mode: bool) -> Tensor:
    with torch.inference_mode(mode):
        return torch.randn(3, 7, 40, generator=torch.Generator().manual_seed(0))


@each_inner
@pytest.mark.parametrize("name", LOSSES)
def test_teachers(name: str, inner: str) -> None:
    """One after the other: Dynamo tells them apart."""
    torch._dynamo.reset()
    fused = torch.compile(LOSSES[name], backend="slime_fused", options=OPTIONS | {"inner": inner})
    for mode in (True, False, True):
        torch.testing.assert_close(
            run(fused, teacher_of(mode)), run(LOSSES[name], teacher_of(mode))
        )


def test_copies_only_where_something_is_saved() -> None:
    def compiled(*args: Tensor) -> tuple[Tensor, ...]:
        return args

    mine, teacher = torch.zeros(2, requires_grad=True), teacher_of(True)
    assert copying_inference_tensors(compiled, [mine, teacher_of(False)]) is compiled
    assert copying_inference_tensors(compiled, [mine.detach(), teacher]) is compiled
    with torch.no_grad():
        assert copying_inference_tensors(compiled, [mine, teacher]) is compiled
    same, own = copying_inference_tensors(compiled, [mine, teacher])(mine, teacher)
    assert same is mine
    assert own is not teacher
    assert torch.equal(own, teacher)
    assert not own.is_inference()


@each_inner
def test_changes_in_place_are_not_lost(inner: str) -> None:
    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        value = reverse_kl(student, teacher)
        teacher.mul_(2)
        return value

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        run(loss, teacher_of(True))
    fused = torch.compile(loss, backend="slime_fused", options=OPTIONS | {"inner": inner})
    with pytest.raises(RuntimeError, match="changes an inference tensor in place"):
        run(fused, teacher_of(True))
