"""OpenRLHF's actor (0.11): log-probs and entropies in one compiled function.

`Actor.forward` computes the entropy by a compiled function, then the log-probs by another one, which Dynamo breaks at
`try: from flash_attn import ...`. Neither shares its reading of the logits, and the returned output keeps the logits.
With `enable()` the first of the two calls does both, the temperature included, and the logits are dropped from an
output returned next to log-probs (OpenRLHF does not read them there).

Upstream, one function of both in `openrlhf.models.utils`, with the import at the top of the file, could be compiled as
it is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_compile.integrations.known import known

__all__ = ["disable", "enable"]

_HOME = "openrlhf.models.actor"
_ARGUMENTS = {
    "compute_entropy": ["logits"],
    "log_probs_from_logits": ["logits", "labels", "temperature"],
    "unpad_and_slice_tensor": ["sequences", "attention_mask", "ring_attn_group"],
}
_INSTEAD = "Compile a function of both log-probs and entropy with torch.compile(..., backend='slime_fused') instead"


def enable(options: Mapping[str, Any] | None = None) -> bool:
    """Enables it for this process. Calling it twice is harmless. Call `defer_logits(actor.model)` separately.

    Args:
        options: of the backend.

    Returns:
        True if enabled. Otherwise a warning gives the reason, and nothing changes.

    Raises:
        ImportError: OpenRLHF or one of its imports (flash_attn, deepspeed) is not installed.
    """
    home = known("openrlhf", "0.11.", _HOME, _ARGUMENTS, _INSTEAD)
    if home is None:
        return False
    if hasattr(home.Actor.forward, "theirs"):
        return True
    readings = _Readings(home, options)
    for name in _ARGUMENTS:
        setattr(home, name, getattr(readings, name))
    home.Actor.forward = readings.over(home.Actor.forward)
    return True


def disable() -> None:
    """Undoes `enable()`."""
    home: Any = importlib.import_module(_HOME)
    readings = getattr(home.Actor.forward, "readings", None)
    if readings is not None:
        home.Actor.forward = home.Actor.forward.theirs
        for name in _ARGUMENTS:
            setattr(home, name, readings.theirs[name])


@dataclass
class _Call:
    """The state of an actor's forward between its two readings of the logits."""

    labels: Tensor | None
    temperature: float
    logits: Any = None
    log_probs: Tensor | None = None


_call: ContextVar[_Call | None] = ContextVar("call", default=None)


class _Readings:
    """The replacement of OpenRLHF's functions; calls these if no log-probs are requested."""

    def __init__(self, home: Any, options: Mapping[str, Any] | None) -> None:
        self.theirs = {name: getattr(home, name) for name in _ARGUMENTS}
        self.both: Any = torch.compile(
            _log_probs_and_entropy, backend="slime_fused", options=dict(options or {})
        )

    def over(self, forward: Any) -> Any:
        """`Actor.forward` with known labels and temperature; the compiled function scales the logits."""
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def known(actor: Any, sequences: Tensor, *args: Any, **kwargs: Any) -> Any:
            asked = signature.bind(actor, sequences, *args, **kwargs).arguments
            if asked.get("action_mask") is None and not asked.get("return_logprobs"):
                return forward(actor, sequences, *args, **kwargs)
            labels = None if actor.packing_samples else sequences.roll(-1, 1)
            token = _call.set(_Call(labels, actor.temperature))
            temperature, actor.temperature = actor.temperature, 1.0
            try:
                found = forward(actor, sequences, *args, **kwargs)
            finally:
                actor.temperature = temperature
                _call.reset(token)
            if isinstance(found, tuple):
                found[1]["logits"] = None  # unscaled and unread
            return found

        known.theirs, known.readings = forward, self  # type: ignore[attr-defined]
        return known

    def unpad_and_slice_tensor(
        self, sequences: Tensor, attention_mask: Tensor, ring_attn_group: Any
    ) -> Any:
        theirs, call = self.theirs["unpad_and_slice_tensor"], _call.get()
        found = theirs(sequences, attention_mask, ring_attn_group)
        if call is not None:
            call.labels = found[2]
        return found

    def compute_entropy(self, logits: Tensor) -> Any:
        call = _call.get()
        if call is None:
            return self.theirs["compute_entropy"](logits)
        call.logits = logits
        call.log_probs, entropy = self.both(logits, call.labels, call.temperature, True)
        return entropy

    def log_probs_from_logits(
        self, logits: Tensor, labels: Tensor, temperature: float = 1.0
    ) -> Any:
        call = _call.get()
        if call is None:
            return self.theirs["log_probs_from_logits"](logits, labels, temperature)
        if call.logits is not logits:
            call.log_probs, _ = self.both(logits, labels, call.temperature, False)
        return call.log_probs


def _log_probs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    every = torch.log_softmax(logits / temperature if temperature != 1.0 else logits, -1)
    log_probs = every.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return log_probs, -(every.exp() * every).sum(-1) if with_entropy else None
