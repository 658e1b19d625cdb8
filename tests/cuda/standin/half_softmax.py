"""Softmax and log-softmax on the stand-in: of half precision with a float32 result, which only CUDA has. `KERNELS`."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.cuda.standin import NO_KERNELS, counts, graphs, kind
from tests.cuda.standin.memory import alias

LARGE = 1 << 20


def _fill(out: Tensor, values: Callable[[], Tensor]) -> Tensor:
    if kind() != NO_KERNELS or out.numel() <= LARGE:
        into = alias(out)
        graphs.perform(lambda: into.copy_(values()))
    return out


def _forward(name: str, function: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        counts.count(name)
        dtype, given = torch.float32 if half_to_float else x.dtype, alias(x)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        return _fill(out, lambda: function(given.to(dtype), dim))

    return kernel


def _backward(name: str, of_log: bool) -> Callable[..., Tensor]:
    def kernel(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        counts.count(name)
        given, saved = alias(grad), alias(output)
        out = torch.empty(grad.shape, dtype=input_dtype, device=grad.device)

        def values() -> Tensor:
            wide = torch.float64 if input_dtype is torch.float64 else torch.float32
            g, o = given.to(wide), saved.to(wide)
            if of_log:
                return g - o.exp() * g.sum(dim, keepdim=True)
            return o * (g - (g * o).sum(dim, keepdim=True))

        return _fill(out, values)

    return kernel


KERNELS = {
    "_softmax": _forward("aten::_softmax", torch.softmax),
    "_log_softmax": _forward("aten::_log_softmax", torch.log_softmax),
    "_softmax_backward_data": _backward("aten::_softmax_backward_data", False),
    "_log_softmax_backward_data": _backward("aten::_log_softmax_backward_data", True),
}
