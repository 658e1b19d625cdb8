"""The operators over chunks of logits as a GPU runs them: what they allocate and wait for; their kernels interpreted.

No GPU is needed: meta tensors take the same path as a device's, with kernels that only note that they were called, and
the Triton kernels run under Triton's interpreter in a process of their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from slime_compile.ops import linear_chunks
from slime_compile.ops.linear_chunks import Head, Statistics
from slime_compile.torch_private import TorchDispatchMode
from tests.support.processes import run_python

ROWS, VOCAB, HIDDEN = 24, 64, 8
WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select"}
"""Operators whose result a program has to wait for."""


class NoKernels:
    """Stands in for the CUDA module: the calls and their memory, no values."""

    def __init__(self) -> None:
        self.places: set[int] = set()

    def row_stats(self, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        self.places.add(x.untyped_storage()._cdata)
        return tuple(x.new_empty([*x.shape[:-1], 1], dtype=torch.float32) for _ in range(4))

    def row_grad_(self, x: Tensor, *args: Any, **kwargs: Any) -> None:
        self.places.add(x.untyped_storage()._cdata)


class Recorder(TorchDispatchMode):
    """Notes operators, and how many elements each new memory has."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.new: list[int] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs or {}))}
        found = func(*args, **(kwargs or {}))
        self.called.append(func.overloadpacket.__name__)
        for tensor in _tensors(found):
            if tensor.untyped_storage()._cdata not in given:
                self.new.append(tensor.numel())
        return found


def _tensors(values: Any) -> Sequence[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def run(which: str, rows_of_chunk: int, dtype: torch.dtype) -> Recorder:
    hidden = torch.empty(ROWS, HIDDEN, dtype=dtype, device="meta")
    weight = torch.empty(VOCAB, HIDDEN, dtype=dtype, device="meta")
    bias = torch.empty(VOCAB, dtype=dtype, device="meta")
    head = Head(hidden, weight, bias)
    limit = rows_of_chunk * VOCAB * dtype.itemsize
    index = torch.empty(ROWS, 1, dtype=torch.int64, device="meta")
    numbers = torch.empty(ROWS, 5, device="meta")
    coefficients = (numbers[:, None], numbers[:, :3], index, numbers[:, :1])
    statistics, kernels = Statistics([None], [1.0], [True], [False]), NoKernels()
    with Recorder() as recorder:
        if which == "stats":
            linear_chunks.linear_row_stats(kernels, head, statistics, index, limit)  # type: ignore[arg-type]
        else:
            wanted = (True, True, True) if which == "grad" else (False, True, False)
            linear_chunks.linear_row_grad(kernels, head, coefficients, wanted, False, limit)  # type: ignore[arg-type]
    assert len(kernels.places) == 1  # one buffer
    return recorder


OPERATORS = ["stats", "grad", "grad of the weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", OPERATORS)
def test_no_chunk_allocates_or_waits(which: str, dtype: torch.dtype) -> None:
    """As many large tensors are made for 12 chunks as for 3; what is new for a chunk has a few numbers per row."""
    few, many = (run(which, rows, dtype) for rows in (8, 2))
    assert many.called.count("addmm") > few.called.count("addmm") > 1
    row_numbers = 8 * 5  # of the largest chunk: terms, [n, 1, 5]
    large = [sum(size > row_numbers for size in each.new) for each in (few, many)]
    assert large[0] == large[1]
    assert not WAITS.intersection(many.called)


CHILD = """
import json, torch
from slime_compile.ops import cuda, linear_chunks, linear_reference
from slime_compile.ops.linear_chunks import Head, Statistics

def largest(mine, true):
    return max(((a.double() - b).abs().max() / (1 + b.abs().max())).item() for a, b in zip(mine, true) if a.numel())

torch.manual_seed(0)
found = {}
rows, vocab, width = 5, 129, 8
for dtype in (torch.float32, torch.bfloat16):
    hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(vocab, width).to(dtype)
    head = Head(hidden, weight, None)
    limit = 2 * vocab * dtype.itemsize
    index = torch.randint(vocab, (rows, 2))
    what = ([None], [1.5], [True], [True])
    stats, picked = linear_chunks.linear_row_stats(cuda, head, Statistics(*what), index, limit)
    wide = (hidden.double(), weight.double(), None)
    true = linear_reference.linear_row_stats(*wide, *what, index)
    terms = torch.cat([torch.full((rows, 1), 1.5), *stats[0, :2], *torch.randn(2, rows, 1)], -1)[:, None]
    numbers = (terms, torch.randn(rows, 3), index, torch.randn(rows, 2))
    for wanted in ((True, True, False), (True, False, False)):
        mine = linear_chunks.linear_row_grad(cuda, head, numbers, wanted, False, limit)
        plain = [n.double() if n.is_floating_point() else n for n in numbers]
        want = linear_reference.linear_row_grad(*wide, *plain, wanted, False)
        found[f"{dtype} {wanted}"] = largest(mine, want)
    found[f"{dtype} stats"] = largest((stats, picked), true)
print(json.dumps(found))
"""


def test_kernels_interpreted() -> None:
    """Chunks of two of five rows of an odd vocabulary, Triton's kernels over each, against the contract in float64."""
    pytest.importorskip("triton")
    found = json.loads(run_python(CHILD, TRITON_INTERPRET="1"))
    assert len(found) == 2 * 3
    for what, error in found.items():
        assert error < (2e-2 if "bfloat16" in what else 2e-5), what
