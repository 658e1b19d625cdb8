"""Gradients taken in forward of random losses: right, or taken in backward."""

import pytest
import torch
from torch import Tensor

from tests.fx_passes.test_linear import compiled, last_report, notes, small_chunks
from tests.support.row_programs import row_program

__all__ = ["small_chunks"]

VOCAB, HIDDEN = 37, 4
SHAPES = ((3, 5), (4, 4), (3, 5), (6, 1), (3, 1))  # three are as many as the columns of a program
QUICK, ALL = 24, 1200
FIRST = 500


def arguments(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    rows = SHAPES[seed % len(SHAPES)]
    target = torch.randint(VOCAB, rows, generator=draw)
    mask = (torch.rand(rows, generator=draw) > 0.3).double()
    mask[:, 0] = 1
    leaves = [normal(*rows, HIDDEN).requires_grad_(), normal(VOCAB, HIDDEN).requires_grad_()]
    return [*leaves, target, normal(*rows) / 4, normal(*rows), mask]


def taken_in_forward(seed: int, dynamic: bool) -> bool:
    """Compares one program, and says where its gradient was taken."""
    torch._dynamo.reset()
    loss, given = row_program(seed), arguments(seed)
    found = compiled(loss, 8, grad_in_forward="always", dynamic=dynamic)(*given)
    got = torch.autograd.grad(3 * found, given[:2])
    eager = loss(*given)
    wanted = torch.autograd.grad(3 * eager, given[:2])
    torch.testing.assert_close(found, eager, rtol=1e-10, atol=1e-12)
    for mine, plain in zip(got, wanted, strict=True):
        assert not mine.isnan().any() or plain.isnan().any()
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-11 * plain.abs().max().item())
    return any("computed in forward" in note for note in notes(last_report()))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + QUICK))
def test_program(seed: int) -> None:
    taken_in_forward(seed, dynamic=seed % 2 == 1)


def test_most_are_taken_in_forward() -> None:
    """Else the others would say little."""
    taken = sum(taken_in_forward(seed, dynamic=False) for seed in range(FIRST, FIRST + 8))
    assert taken >= 4


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_many_programs(batch: int) -> None:
    for seed in range(batch * ALL // 10, (batch + 1) * ALL // 10):
        try:
            taken_in_forward(seed, dynamic=seed % 2 == 1)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
