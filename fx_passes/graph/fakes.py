"""The fake value of a new node: its operator on fake operands.

Entry point: `result_of`. Torch runs the operator on fake tensors, which took half of the passes' time. For arithmetic
on tensors of one layout the result is like the operands; that takes a tenth of the time.

NOTE [Sizes that data alone says]
If a program slices rows at a number read from a tensor, the slice's size is a new symbol (u0), bound by the slice's
node. The same slice in a new node would be another symbol, bound by no node. So the passes do not create such nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fx_passes.graph.operators import Target
from fx_passes.refused import Refused
from fx_passes.torch_private import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    free_unbacked_symbols,
    unset_fake_temporarily,
)

aten = torch.ops.aten

_ARITHMETIC = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.exp.default,
}
"""Element-wise operators. If all tensors have one floating dtype, so has the result."""


def result_of(
    fake_mode: FakeTensorMode, target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The result of `target` on these fake tensors, numbers and lists of them.

    Raises:
        Refused: see NOTE [Sizes that data alone says].
    """
    if target in _ARITHMETIC and not kwargs and (like := _all_alike(args)) is not None:
        with unset_fake_temporarily():  # of the compilation in progress
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            return FakeTensor(fake_mode, made, like.device)
    with fake_mode, _leaving_no_symbol(fake_mode.shape_env):
        made = target(*args, **kwargs)
    if (symbols := _symbols(made)) and not symbols <= _symbols((args, kwargs)):
        raise Refused(f"the size of the result of a new {target} depends on data")
    return made


def _leaving_no_symbol(shapes: ShapeEnv | None) -> AbstractContextManager[None]:
    return nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()


def _symbols(values: Any) -> set[Any]:
    """The symbols of sizes that depend on data."""
    found: set[Any] = set()
    for value in tree_leaves(values):
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            found |= free_unbacked_symbols(value)
    return found


def _all_alike(args: Sequence[Any]) -> torch.Tensor | None:
    """One of the tensors, if all have floating dtypes, static sizes, and equal layouts without gaps."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if not tensors or any(type(arg) not in (FakeTensor, int, float) for arg in args):
        return None
    first = tensors[0]
    described = (first.dtype, first.device, first.shape, first.stride())
    if not first.is_floating_point() or any(type(size) is not int for size in first.shape):
        return None
    if any((arg.dtype, arg.device, arg.shape, arg.stride()) != described for arg in tensors[1:]):
        return None
    return first if first.is_contiguous() else None
