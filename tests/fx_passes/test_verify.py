"""What `verify=True` takes for a difference of two graphs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from fx_passes.verify import mismatch

X = torch.zeros(4, 5)


def graph_of(fn: Callable[[Tensor], Tensor]) -> Graph:
    return make_fx(fn, tracing_mode="fake")(X).graph


def doubled(x: Tensor) -> Tensor:
    return x + x


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda x: 2 * x, None),
        (lambda x: (x + x).double(), r"output 0 was torch.float32 \[4, 5\], is torch.float64"),
        (lambda x: (x + x)[:, :4], r"output 0 was .* \[4, 5\], is .* \[4, 4\]"),
        (lambda x: 2.1 * x, "output 0 differs by"),
        (lambda x: x + x + (x == 0) * 0.1, "output 0 differs by"),
        (lambda x: torch.where(x > 0, x + x, torch.nan), "output 0 differs by"),
    ],
)
def test_difference(other: Callable[[Tensor], Tensor], said: str | None) -> None:
    found = mismatch(graph_of(doubled), graph_of(other), torch.nn.Module())
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(said, found)


def without_garbage(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda x: x.nan_to_num(0, 0, 0), True),
        (lambda x: x * x.isfinite(), False),  # 0 * NaN
        (lambda x: x.nan_to_num(0), False),  # inf is a large number
    ],
)
def test_rows_of_garbage_that_a_program_masks(
    other: Callable[[Tensor], Tensor], same: bool
) -> None:
    found = mismatch(graph_of(without_garbage), graph_of(other), torch.nn.Module())
    assert (found is None) == same


def test_what_a_program_asserts_of_its_data_is_not_asserted_of_random_data() -> None:
    def asserting(x: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg((x > 5).all(), "above five")
        return x + x

    asserts = graph_of(asserting)
    assert asserts.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)
    assert mismatch(asserts, asserts, torch.nn.Module()) is None
