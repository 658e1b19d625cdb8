"""The fake value of a new node: what its operator would give.

Entry point: `result_of`. Torch runs the operator on fake tensors; half of the passes' time was that. Arithmetic of
tensors that are laid out alike gives one like them, which takes a tenth of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fx_passes.graph.operators import Target
from fx_passes.torch_private import FakeTensor, FakeTensorMode, unset_fake_temporarily

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
    """What `target` gives for these fake tensors, numbers and lists of them."""
    if target in _ARITHMETIC and not kwargs and (like := _all_alike(args)) is not None:
        with unset_fake_temporarily():  # of the compile that goes on
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            return FakeTensor(fake_mode, made, like.device)
    with fake_mode:
        return target(*args, **kwargs)


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
