"""Inductor's C++ wrapper, which puts an operator's text between quotes as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import slime_compile

OPTIONS = {"inductor.cpp_wrapper": True, "chunk_mib": 1, "strict": True}


@pytest.mark.thorough  # C++ that takes 15 s to compile
def test_a_head_whose_gradient_is_taken_in_forward() -> None:
    """Logits of 2 MiB: two chunks, so that the report and the rows' program are both texts of an operator."""
    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (256, 2048))
    target = torch.randint(2048, (256,))

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), target)

    compiled = torch.compile(loss, backend="slime_fused", options=OPTIONS)(hidden, weight)
    found = torch.autograd.grad(compiled, (hidden, weight))
    expected = loss(hidden, weight)
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-5)
    for got, wanted in zip(found, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
    assert "with the gradient computed in forward" in str(slime_compile.reports()[-1])
