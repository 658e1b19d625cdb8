"""The fake value of a new node: its operator on fake operands.

Entry point: `result_of`. Torch runs the operator on fake tensors; half of the passes' time was that. Arithmetic of
tensors that are laid out alike gives one like them, which takes a tenth of it.

NOTE [Sizes that data alone says]
Where a program cuts rows at a number out of a tensor, the size of what it gets is a symbol of its own (u0), which the
node in the program binds. The same cut in a new node is another symbol, which nothing binds: there is no such node.
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
"""Element by element, of one dtype if that of its tensors is one of floats."""


def result_of(
    fake_mode: FakeTensorMode, target: Target, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What `target` gives for these fake tensors, numbers and lists of them.

    Raises:
        Refused: see NOTE [Sizes that data alone says].
    """
    if target in _ARITHMETIC and not kwargs and (like := _all_alike(args)) is not None:
        with unset_fake_temporarily():  # of the compile that goes on
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            return FakeTensor(fake_mode, made, like.device)
    with fake_mode, _leaving_no_symbol(fake_mode.shape_env):
        made = target(*args, **kwargs)
    if (symbols := _symbols(made)) and not symbols <= _symbols((args, kwargs)):
        raise Refused(f"data alone says how large the result of a new {target} is")
    return made


def _leaving_no_symbol(shapes: ShapeEnv | None) -> AbstractContextManager[None]:
    return nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()


def _symbols(values: Any) -> set[Any]:
    """Of sizes that data alone says."""
    found: set[Any] = set()
    for value in tree_leaves(values):
        if isinstance(value, (torch.Tensor, torch.SymInt)):
            found |= free_unbacked_symbols(value)
    return found


def _all_alike(args: Sequence[Any]) -> torch.Tensor | None:
    """One of the tensors, where all are of a dtype of floats, sizes are numbers, and layouts equal and without gaps."""
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
