"""What a CUDA graph does: the calls that were made while it was captured, made again at each replay.

`perform` is how everything that computes is called. As on a device, nothing runs while it is captured. The library
calls the hook when a capture begins, when it ends, and when a graph is launched.
"""

import ctypes
import threading
from collections.abc import Callable

import torch

from tests.cuda.standin import counts

BEGINS, ENDS, LAUNCHED, OF_TORCH = 1, 2, 3, 4  # `What` in driver/device.h
_Hook = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_longlong, ctypes.c_char_p)

_actions: dict[int, list[Callable[[], object]]] = {}  # by the graph's number
_open: list[int] = []  # graphs that are being captured, the last begun last
_thread = threading.local()


def is_captured() -> bool:
    """Whether a graph captures what the current stream is given."""
    if not _open or getattr(_thread, "replays", False):
        return False
    return torch.cuda.is_current_stream_capturing()


def perform(action: Callable[[], object]) -> None:
    """Calls it now, or at every replay of the graph that is being captured."""
    if is_captured():
        _actions[_open[-1]].append(action)
    else:
        action()


def _replay(number: int) -> None:
    _thread.replays = True
    try:
        for action in _actions[number]:
            action()
    finally:
        _thread.replays = False


@_Hook
def _hook(what: int, number: int, name: bytes) -> None:
    if what == BEGINS:
        _actions[number] = []
        _open.append(number)
    elif what == ENDS and abs(number) in _open:
        _open.remove(abs(number))
    elif what == LAUNCHED:
        _replay(number)
    elif what == OF_TORCH:
        kernel = name.decode()
        counts.not_run[kernel] = counts.not_run.get(kernel, 0) + 1


def install() -> None:
    counts.library().standin_set_hook(_hook)
