"""Other packages with these losses, and the call of each.

Entry point: `PEERS`: a name -> `Peer`. `make` imports the package and raises ImportError (or AttributeError for a torch
without the function) if it is missing; the row then says so. Each entry describes the peer's computation.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.cases.losses import values
from bench.measure.measure import WAYS

Function = Callable[..., Any]
"""`logits, target` or `hidden, weight, target` to a tensor [N], or to several."""


@dataclass(frozen=True)
class Peer:
    """Its call, and a description of its computation.

    Attributes:
        linear: takes hidden states and a weight instead of logits.
        overwrites: leaves the gradient in the logits.
    """

    make: Callable[[], Function]
    computes: str
    linear: bool = False
    cuda_only: bool = False
    overwrites: bool = False


def _both(way: str, linear: bool = False) -> Peer:
    def make() -> Function:
        plain = values("plain")

        def of_logits(logits: Tensor, target: Tensor) -> Any:
            return plain(logits, target)

        def of_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
            return plain(hidden @ weight.t(), target)

        how, function = WAYS[way], of_hidden if linear else of_logits
        return function if how is None else torch.compile(function, dynamic=False, **how)

    return Peer(make, "log-prob, entropy", linear, overwrites="consume" in way)


def _cross_entropy() -> Function:
    return lambda x, target: torch.nn.functional.cross_entropy(x, target, reduction="none")


def _linear_cross_entropy() -> Function:
    options = torch.nn.LinearCrossEntropyOptions()
    call = torch.nn.functional.linear_cross_entropy
    return lambda h, w, target: call(h, w, target, reduction="none", options=options)


def _auto_chunker() -> Function:
    from torch._inductor import config

    if not hasattr(config, "auto_chunker"):
        raise ImportError("this torch has no auto_chunker")

    def mean(h: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(h @ w.t(), target)

    options = {"auto_chunker.enable": True}
    return torch.compile(mean, dynamic=False, options=options)


def _liger() -> Function:
    function = importlib.import_module("liger_kernel.ops").LigerCrossEntropyFunction
    return lambda x, target: function.apply(
        x, target, None, -100, 0.0, 0.0, "none", None, False
    )[0]  # fmt: skip


def _liger_linear() -> Function:
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    return lambda h, w, target: function.apply(h, w, target)[0]


def _cut() -> Function:
    call = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda h, w, target: call(h, w, target, reduction="none")


def _verl() -> Function:
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    return lambda h, w, target: module.linear_cross_entropy(h, w, target, 1.0, "none", None)


def _flash() -> Function:
    call = importlib.import_module("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    return lambda x, target: call(x, target)[0]


PEERS: dict[str, Peer] = {
    "eager": _both("eager"),
    "inductor": _both("inductor"),
    "slime_fused": _both("slime_fused"),
    "slime_fused consume_logits=True": _both("slime_fused consume_logits=True"),
    "F.cross_entropy": Peer(_cross_entropy, "log-prob"),
    "Liger cross entropy": Peer(_liger, "log-prob", cuda_only=True),
    "flash-attn cross entropy": Peer(_flash, "log-prob", cuda_only=True),
    "linear: eager": _both("eager", linear=True),
    "linear: inductor": _both("inductor", linear=True),
    "linear: slime_fused": _both("slime_fused", linear=True),
    "linear: F.linear_cross_entropy": Peer(_linear_cross_entropy, "log-prob", linear=True),
    "linear: inductor, auto_chunker": Peer(_auto_chunker, "mean log-prob", linear=True),
    "linear: Liger": Peer(_liger_linear, "mean log-prob", linear=True, cuda_only=True),
    "linear: Cut Cross-Entropy": Peer(_cut, "log-prob", linear=True, cuda_only=True),
    "linear: verl": Peer(_verl, "log-prob, entropy", linear=True, cuda_only=True),
}
