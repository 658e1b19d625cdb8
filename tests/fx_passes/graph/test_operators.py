"""What a program changes through a view: which node has the value that is read afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fx_passes.graph.operators import read_back, written_over

aten = torch.ops.aten

Program = Callable[[Tensor], Tensor]


def changed(whole: Tensor, value: Tensor, *where: int) -> Tensor:
    return aten.slice_scatter.default(whole, value, 0, *where)


def copied(value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return aten.copy.default(aten.empty.memory_format([5, 3], dtype=dtype), value)


def doubled(x: Tensor) -> Tensor:
    return x[1:3] * 2


READ: dict[str, tuple[Program, bool]] = {
    "the same slice": (lambda x: aten.slice.Tensor(changed(x, doubled(x), 1, 3), 0, 1, 3), True),
    "another": (lambda x: aten.slice.Tensor(changed(x, doubled(x), 1, 3), 0, 2, 4), False),
    "another dimension": (
        lambda x: aten.slice.Tensor(changed(x, doubled(x), 1, 3), 1, 1, 3),
        False,
    ),
    "a row": (lambda x: aten.select_scatter.default(x, x[0] * 2, 0, 1)[1], True),
    "another row": (lambda x: aten.select_scatter.default(x, x[0] * 2, 0, 1)[0], False),
    "of a copy": (lambda x: aten.slice.Tensor(copied(changed(x, doubled(x), 1, 3)), 0, 1, 3), True),
    "of a copy in another dtype": (
        lambda x: aten.slice.Tensor(copied(changed(x, doubled(x), 1, 3), torch.float64), 0, 1, 3),
        False,
    ),
    "a slice of a slice": (
        lambda x: aten.slice.Tensor(
            aten.slice.Tensor(changed(x, changed(x[:4], doubled(x), 1, 3), 0, 4), 0, 0, 4), 0, 1, 3
        ),
        True,
    ),
}

WRITTEN: dict[str, tuple[Program, bool]] = {
    "twice in one place": (lambda x: changed(changed(x, doubled(x), 1, 3), x[:2], 1, 3), True),
    "in two places": (lambda x: changed(changed(x, doubled(x), 1, 3), x[:2], 2, 4), False),
    "over a copy": (lambda x: changed(copied(changed(x, doubled(x), 1, 3)), x[:2], 1, 3), True),
}


def last_of(program: Program) -> Node:
    graph = make_fx(program, tracing_mode="fake")(torch.ones(5, 3)).graph
    return graph.output_node().all_input_nodes[0]


@pytest.mark.parametrize("name", READ)
def test_read_back(name: str) -> None:
    program, found = READ[name]
    written = read_back(last_of(program))
    assert (written is not None) == found
    assert written is None or written.target is aten.mul.Tensor


@pytest.mark.parametrize("name", WRITTEN)
def test_written_over(name: str) -> None:
    program, replaced = WRITTEN[name]
    base = written_over(last_of(program))
    assert base is not None
    assert (base.op == "placeholder") == replaced


def test_what_writes_nothing() -> None:
    assert written_over(last_of(lambda x: x * 2)) is None
    assert read_back(last_of(lambda x: x * 2)) is None
