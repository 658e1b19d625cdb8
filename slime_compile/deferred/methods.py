"""Methods of a tensor by their effect: logits stay deferred, change, or are described without computing them.

Another deferred operator is a name in `STAYS`; on the meta device it must do the same except for the numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

STAYS = {
    # rows
    "__getitem__", "narrow", "select", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose",
    "contiguous", "clone", "detach",
    # element by element
    "div", "mul", "tanh", "add", "sub",
}  # fmt: skip
STAYING_OPERATORS = {"__truediv__": "div", "__mul__": "mul", "__rmul__": "mul"}
SUMS = ("add", "sub")
"""Of two deferred logits, too."""

NEW_MEMORY = {"clone", "div", "mul", "tanh", "to", *SUMS}
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
_AUGMENTED = {f"__i{name}__" for name in (
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)} | {"__setitem__"}  # fmt: skip


def changes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes to an argument: by its schema, by its flag, or by torch's names."""
    place = _place_of_flag(func)
    flag = args[place] if 0 <= place < len(args) else kwargs.get("inplace")
    return _is_change(func) or kwargs.get("out") is not None or bool(flag)


@torch.compiler.assume_constant_result
def _is_change(func: Any) -> bool:
    """Whether it is any overload of such an operator, without `out`."""
    if isinstance(func, torch._ops.OpOverload):
        return bool(func._schema.is_mutable)
    if isinstance(func, torch._ops.OpOverloadPacket):
        every = (getattr(func, name)._schema for name in func.overloads())
        return any(s.is_mutable and not any(a.is_out for a in s.arguments) for s in every)
    name = getattr(func, "__name__", "")
    return is_change(name) or name in _AUGMENTED


@torch.compiler.assume_constant_result
def _place_of_flag(func: Any) -> int:
    """The position of the parameter `inplace` of a function in Python; -1 without one."""
    names = [*inspect.signature(func).parameters] if inspect.isfunction(func) else []
    return names.index("inplace") if "inplace" in names else -1
