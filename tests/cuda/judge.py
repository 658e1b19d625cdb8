"""Compiled losses on the device beside eager ones in the same dtype and in float64: `compare`, `results`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Variable

import slime_compile
from slime_compile.backend import options as backend_options
from tests.cuda.losses import Data, Loss, Row
from tests.support.harness import in_float64, to_float64

SCALAR = 1e-6  # a loss is a mean of numbers of about one to ten a row, of either sign, in float32


def compiled(row: Row, dtype: torch.dtype, vocab: int) -> Loss:
    options = {"min_vocab": 8, "strict": True, **row.options}
    if row.chunk_rows:
        options["chunk_mib"] = row.chunk_rows * vocab * dtype.itemsize
    function: Loss = torch.compile(row.loss, backend="slime_fused", options=options, **row.how)
    return function


@contextmanager
def chunks_in_bytes() -> Iterator[None]:
    """`chunk_mib` counts bytes: chunks of a few rows."""
    with mock.patch.object(backend_options, "MIB", 1):
        yield


def results(function: Loss, data: Data, handed_over: bool = False) -> list[Tensor]:
    """The loss and the gradients of fresh leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in data.leaves]
    loss = function(leaves[0] * 1, *data.rest) if handed_over else function(*leaves, *data.rest)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def truth(loss: Loss, data: Data) -> list[Tensor]:
    wide = Data(to_float64(data.leaves), to_float64(data.rest))
    with in_float64():
        leaves = [leaf.detach().clone().requires_grad_() for leaf in wide.leaves]
        value = loss(*leaves, *wide.rest)
        # not autograd.grad, which leaves the mode: a checkpoint computes again in backward
        found = Variable._execution_engine.run_backward(
            (value,), (torch.ones_like(value),), False, False, tuple(leaves),
            allow_unreachable=True, accumulate_grad=False,
        )  # fmt: skip
    return [value.detach(), *found]


def assert_near(got: list[Tensor], plain: list[Tensor], true: list[Tensor], what: str = "") -> None:
    """No error above twice eager's largest and one rounding at the largest value."""
    for number, (g, p, t) in enumerate(zip(got, plain, true, strict=True)):
        assert g.dtype == p.dtype
        assert g.shape == p.shape
        error, usual = ((each.double() - t).abs().max().item() for each in (g, p))
        largest = t.abs().max().item()
        rounding = torch.finfo(g.dtype).eps * largest if number else SCALAR * max(largest, 1)
        name = f"{what} gradient {number}" if number else f"{what} loss"
        assert error <= 2 * usual + rounding, f"{name}: {error:.2e}, eager {usual:.2e}"


def compare(row: Row, data: Data) -> slime_compile.Report:
    """Values and gradients, and how much of it was fused."""
    dtype, vocab = data.leaves[-1].dtype, data.leaves[-1].shape[0 if row.chunk_rows else -1]
    function = compiled(row, dtype, vocab)
    earlier = len(slime_compile.reports())
    with chunks_in_bytes() if row.chunk_rows else nullcontext():
        got = results(function, data, row.handed_over)
    assert_near(got, results(row.loss, data), truth(row.loss, data), row.name)
    report = slime_compile.reports()[earlier]
    assert report.fused >= row.fused, str(report)
    return report


def relative_error(got: list[Tensor], true: list[Tensor]) -> float:
    """The largest, each tensor's relative to its largest value."""
    return max(
        ((g.double() - t).abs().max() / t.abs().max()).item()
        for g, t in zip(got, true, strict=True)
    )


def steps(row: Any, function: Loss, data: list[Data]) -> list[float]:
    """Errors of several steps on other data each."""
    found = []
    for each in data:
        torch.compiler.cudagraph_mark_step_begin()
        got = [value.clone() for value in results(function, each)]
        found.append(relative_error(got, truth(row, each)))
    return found
