"""A CPU tensor over the memory of a CUDA tensor: `alias`."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def is_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def alias(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    size, pointer = storage.nbytes(), storage.data_ptr()
    if size == 0 or pointer == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    raw = torch.frombuffer((ctypes.c_byte * size).from_address(pointer), dtype=torch.uint8)
    plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
    made = plain.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return made.conj() if tensor.is_conj() else made


def new_like(value: Tensor, device: torch.device) -> Tensor:
    """Memory of the device, laid out as a CPU tensor."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
