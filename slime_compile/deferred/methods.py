"""Which methods of a tensor leave logits deferred, which change them, which are known without computing them.

An operator more that stays deferred is a name in `STAYS`; it must be the same on the meta device but for its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

STAYS = {
    # rows
    "__getitem__", "narrow", "select", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose",
    "contiguous", "clone", "detach",
    # element by element
    "div", "mul", "tanh",
}  # fmt: skip
STAYING_OPERATORS = {"__truediv__": "div", "__mul__": "mul", "__rmul__": "mul"}
NEW_MEMORY = {"clone", "div", "mul", "tanh", "to"}
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
IN_PLACE = {"div_": "div", "mul_": "mul", "tanh_": "tanh", "masked_fill_": "masked_fill"}
FACTS = {
    "shape", "dtype", "ndim", "layout", "itemsize", "nbytes", "size", "dim", "numel", "nelement", "stride",
    "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "element_size", "ndimension",
}  # fmt: skip
FLAGS = {
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_mps",
    "is_xpu",
    "is_nested",
}


FORWARDED = (
    "add", "radd", "sub", "rsub", "rtruediv", "rdiv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul",
    "rmatmul", "neg", "pos", "abs", "invert", "and", "rand", "or", "ror", "xor", "rxor", "lt", "le", "eq", "ne", "gt",
    "ge", "bool", "int", "float", "complex", "index", "contains", "array", "format", "dlpack", "dlpack_device",
    "deepcopy",
)  # fmt: skip
CHANGING = ("iadd", "isub", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")


def is_change(name: str) -> bool:
    """Whether a method or function of this name changes its first argument."""
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


FUNCTIONS: dict[Any, str] = {
    getattr(torch, name): name for name in sorted(STAYS) if hasattr(torch, name)
}
CHANGES = frozenset(
    getattr(torch, name)
    for name in dir(torch)
    if is_change(name) and name[0] != "_" and not name.startswith("resize")
)


def changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    out, inplace = kwargs.get("out"), kwargs.get("inplace")
    return func in CHANGES or out is not None or bool(inplace)
