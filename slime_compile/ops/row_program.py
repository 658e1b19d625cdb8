"""Row programs: the arithmetic between the statistics of some rows and the coefficients of their gradient.

Entry point: `compiled`. `fx_passes/linear/in_forward.py` writes them, NOTE [Row programs] there says how they look.
"""

from __future__ import annotations

import functools
import json
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Coefficients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
_State: TypeAlias = list[Tensor]
_Step: TypeAlias = Callable[["Chunk", _State], Tensor]


class Chunk:
    """The inputs of a program on rows `at`: statistics [S, 4, n, 1], picked columns [n, M], complete tensors."""

    def __init__(self, at: slice, stats: Tensor, picked: Tensor, inputs: Sequence[Tensor]) -> None:
        self.at = at
        self.stats = stats
        self.picked = picked
        self.inputs = inputs

    @property
    def rows(self) -> int:
        return self.picked.shape[0]


@functools.lru_cache(maxsize=64)
def compiled(text: str) -> Callable[[Chunk], Coefficients]:
    """The function of a program's text: coefficients (terms, affine, index, values) of a chunk's rows."""
    program = json.loads(urllib.parse.unquote(text))
    steps = [_STEPS[kind](*rest) for kind, *rest in program["values"]]
    terms, affine, index, values = program["results"]

    def run(chunk: Chunk) -> Coefficients:
        state: _State = []
        for step in steps:
            state.append(step(chunk, state))
        return state[terms], state[affine], state[index], state[values]

    return run


def _stat(scale: int, kind: int) -> _Step:
    return lambda chunk, state: chunk.stats[scale, kind]


def _pick(start: int, stop: int) -> _Step:
    return lambda chunk, state: chunk.picked[:, start:stop]


def _row(number: int) -> _Step:
    return lambda chunk, state: chunk.inputs[number][chunk.at]


def _whole(number: int) -> _Step:
    return lambda chunk, state: chunk.inputs[number].reshape(())


def _rows(at: int, rest: list[int]) -> _Step:
    return lambda chunk, state: state[at].reshape([chunk.rows, *rest])


def _expand(at: int, rest: list[int]) -> _Step:
    return lambda chunk, state: state[at].expand([chunk.rows, *rest])


def _cast(at: int, dtype: str) -> _Step:
    return lambda chunk, state: state[at].to(getattr(torch, dtype))


def _cat(places: list[int], dim: int) -> _Step:
    return lambda chunk, state: torch.cat([state[at] for at in places], dim)


def _call(name: str, args: list[Any], kwargs: dict[str, Any]) -> _Step:
    namespace, packet, overload = name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)

    def step(chunk: Chunk, state: _State) -> Tensor:
        found: Tensor = function(
            *(_argument(arg, state) for arg in args),
            **{key: _argument(arg, state) for key, arg in kwargs.items()},
        )
        return found

    return step


def _argument(arg: Any, state: _State) -> Any:
    if not isinstance(arg, dict):
        return arg
    return state[arg["value"]] if "value" in arg else getattr(torch, arg["dtype"])


_STEPS: dict[str, Callable[..., _Step]] = {
    "stat": _stat,
    "pick": _pick,
    "row": _row,
    "whole": _whole,
    "rows": _rows,
    "expand": _expand,
    "cast": _cast,
    "cat": _cat,
    "call": _call,
}
