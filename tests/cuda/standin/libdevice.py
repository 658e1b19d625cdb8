"""CUDA's mathematical functions, which Triton's interpreter does not have: by NumPy and torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

TESTS = {"isnan": "isnan", "isinf": "isinf", "isfinited": "isfinite", "finitef": "isfinite", "signbit": "signbit"}  # fmt: skip
OTHER_NAMES = {"pow": "power", "fabs": "abs", "nearbyint": "rint"}
OF_TORCH = {"erf": "erf", "lgamma": "gammaln"}


class Libdevice:
    """`libdevice.exp(x)` and the like, on values of the interpreter's."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            first = next(a for a in args if isinstance(a, tl.tensor))
            plain = [a.handle.data if isinstance(a, tl.tensor) else np.asarray(a) for a in args]
            with np.errstate(all="ignore"):
                found = _values(name, plain)
            if name not in TESTS:
                kind = first.handle.dtype
                return tl.tensor(TensorHandle(found.astype(plain[0].dtype), kind), first.type)
            of = first.type.with_element_ty(tl.int32) if first.type.is_block() else tl.int32
            return tl.tensor(TensorHandle(found.astype(np.int32), tl.int32), of)

        return function


def _values(name: str, plain: list[Any]) -> Any:
    if name == "rsqrt":
        return 1 / np.sqrt(plain[0])
    if name in OF_TORCH:
        given = torch.from_numpy(np.ascontiguousarray(plain[0]))
        return getattr(torch.special, OF_TORCH[name])(given).numpy()
    return getattr(np, TESTS.get(name, OTHER_NAMES.get(name, name)))(*plain)
