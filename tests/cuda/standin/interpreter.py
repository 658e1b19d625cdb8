"""Triton's kernels on the stand-in, interpreted: over the memory itself, and again at a graph's replay. `install`."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter
from triton.testing import do_bench

from tests.cuda.standin import counts, graphs
from tests.cuda.standin.libdevice import Libdevice
from tests.cuda.standin.memory import alias, is_cuda


class Driver:
    """What Triton and inductor ask a driver for, where kernels are interpreted."""

    def __init__(self) -> None:
        self.target = GPUTarget("cuda", int(os.environ.get("STANDIN_CC", 90)), 32)
        self.get_device_capability = torch.cuda.get_device_capability
        self.get_current_stream = torch._C._cuda_getCurrentRawStream
        self.get_current_device = torch.cuda.current_device
        self.set_current_device = torch.cuda.set_device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        return do_bench


def install() -> None:
    interpreter._convert_float = _rounding(interpreter._convert_float)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    executor = interpreter.GridExecutor
    executor._restore_args_dev = lambda *args: None  # they are the memory itself
    executor.__call__ = _launching(executor.__call__)
    triton_helpers.libdevice = Libdevice()
    getattr(driver, "driver", driver).set_active(Driver())


def _launching(launch: Callable[..., Any]) -> Callable[..., None]:
    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("stream", None)
        plain = [_plain(value) for value in args]
        plain_kwargs = {name: _plain(value) for name, value in kwargs.items()}
        counts.count(f"triton::{getattr(self.fn, '__name__', '?')}")

        def action() -> None:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                launch(self, *plain, **plain_kwargs)

        graphs.perform(action)

    return launched


def _plain(value: Any) -> Any:
    return alias(value) if is_cuda(value) else value


def _rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    """bfloat16 as the device rounds, to nearest even; the interpreter cuts it off."""

    def converted(data: Any, of: Any, to: Any, rounding: Any) -> Any:
        names = str(of), str(to)
        if names == ("fp32", "bf16"):
            given = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return given.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if names == ("bf16", "fp32"):
            bits = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32)
            return (bits << np.uint32(16)).reshape(data.shape)
        return convert(data, of, to, rounding)

    return converted


def _with_index(patch: Callable[..., Any]) -> Callable[..., None]:
    """An array of one element is no index to newer releases of NumPy."""

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return patched
