"""The operators on the device, judged as `bench/gpu/check.py` judges them on a GPU, at sizes for a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.gpu import check

ROWS, VOCAB = 3, 133

DTYPES = pytest.mark.parametrize("dtype", check.DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(autouse=True)
def _failures() -> Iterator[None]:
    check.failures.clear()
    yield
    assert not check.failures


@DTYPES
def test_statistics(dtype: torch.dtype) -> None:
    logits = torch.randn(ROWS, VOCAB + 5, device="cuda").mul_(4).to(dtype)
    check.check_stats("row stride", logits[:, :VOCAB])
    check.check_stats("odd offset", logits[:, 5:])
    check.check_stats("scaled", logits, torch.randn(ROWS, 1, device="cuda"), 1.25)
    check.check_stats("special", check.special_rows(VOCAB, dtype)[::3])


@DTYPES
def test_gradients(dtype: torch.dtype) -> None:
    logits = torch.randn(ROWS, VOCAB + 5, device="cuda").mul_(4).to(dtype)
    check.check_grad("contiguous", logits[:, :VOCAB].contiguous(), 2, 2)
    check.check_grad("odd offset", logits[:, 5:], 1, 1)
    check.check_grad("affine", logits, 0, 1)
    check.check_grad("probabilities", logits.softmax(-1), 1, 1, softmax=True)


def test_strides() -> None:
    x = torch.randn(2, 2, 2, VOCAB, device="cuda")
    for label, view in (("permuted", x.permute(2, 1, 0, 3)), ("vocabulary stride", x[..., ::2])):
        check.check_stats(label, view)
        check.check_grad(label, view, 1, 1)


def test_a_row_in_parts() -> None:
    check.check_stats("one row", torch.randn(1, 33001, device="cuda").bfloat16())
