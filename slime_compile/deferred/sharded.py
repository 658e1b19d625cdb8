"""A head whose weight is a DTensor: this rank's columns, by torch's own tensor parallelism.

Entry points: `is_sharded_head`, whether its product is deferred, and `FACTS`, `ColwiseParallel`'s questions to a
result. Deferred are products without a collective: replicated hidden states times a weight sharded by columns or
replicated. Hidden's gradient is exchanged when autograd reaches hidden, as with the tensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

__all__ = ["FACTS", "METHODS", "are_same", "is_sharded_head", "placements_of"]

FACTS = ("placements", "device_mesh")
METHODS = ("to_local", "redistribute", "full_tensor")
"""They compute the tensor."""


def is_sharded_head(hidden: Any, weight: Any) -> bool:
    if type(hidden) is not DTensor or type(weight) is not DTensor:
        return False
    if hidden.device_mesh != weight.device_mesh:
        return False
    columns = all(each in (Shard(0), Replicate()) for each in weight.placements)
    return columns and all(each == Replicate() for each in hidden.placements)


def placements_of(hidden: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Of the logits."""
    assert isinstance(weight, DTensor), weight
    columns = Shard(hidden.dim() - 1)
    return tuple(columns if each == Shard(0) else Replicate() for each in weight.placements)


def are_same(placements: Any, own: tuple[Any, ...], rank: int) -> bool:
    """Whether a tensor of `rank` dimensions with the placements `own` has `placements`: -1 is the last dimension."""
    if placements is None or len(placements) != len(own):
        return False
    asked = [Shard(each.dim % rank) if type(each) is Shard else each for each in placements]
    return asked == list(own)
