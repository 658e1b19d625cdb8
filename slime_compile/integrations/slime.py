"""slime's policy loss (0.3): `calculate_log_probs_and_entropy` compiled, for deferred logits too.

The function can be compiled as it stands, in one piece (`--log-probs-chunk-size` would unroll its loop). But its
caller, `get_log_probs_and_entropy`, first divides by the temperature: that allocates a tensor of the logits' size in
both directions. It also asserts float32; Megatron's `Float16Module` casts tensors to it, but not deferred logits.
`enable()` replaces both names in `slime.backends.megatron_utils.loss`: division and cast are compiled along.

Upstream, a temperature argument of `calculate_log_probs_and_entropy`, `logits.float()` in place of the assertion, and
an option for the backend of torch.compile would make this file unnecessary.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch

from slime_compile.deferred.logits import DeferredLogits, with_tensors
from slime_compile.integrations.known import known

__all__ = ["disable", "enable"]

_HOME = "slime.backends.megatron_utils.loss"
_ARGUMENTS = {
    "calculate_log_probs_and_entropy": [
        "logits", "tokens", "tp_group", "with_entropy", "chunk_size", "log_prob_keep_mask", "with_entropy_grad",
    ],
    "get_log_probs_and_entropy": [
        "logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "non_loss_data",
        "top_p_token_ids", "top_p_token_offsets",
    ],
}  # fmt: skip
_INSTEAD = (
    "Compile calculate_log_probs_and_entropy with torch.compile(..., backend='slime_fused') instead"
)


def enable(options: Mapping[str, Any] | None = None) -> bool:
    """Enables it for this process, in training and for log-probs. Calling it twice is harmless.

    In slime, call it in the function given to `--custom-megatron-init-path`. Call `defer_logits` for the model's last
    stage separately.

    Args:
        options: of the backend.

    Returns:
        True if enabled. Otherwise a warning gives the reason, and nothing changes.

    Raises:
        ImportError: slime or megatron-core is not installed.
    """
    home = known("slime", None, _HOME, _ARGUMENTS, _INSTEAD)
    if home is None:
        return False
    theirs = {name: getattr(home, name) for name in _ARGUMENTS}
    if all(hasattr(function, "theirs") for function in theirs.values()):
        return True
    home.calculate_log_probs_and_entropy = _compiled(
        theirs["calculate_log_probs_and_entropy"], options
    )
    home.get_log_probs_and_entropy = _unscaled(theirs["get_log_probs_and_entropy"])
    return True


def disable() -> None:
    """Undoes `enable()`."""
    home: Any = importlib.import_module(_HOME)
    for name in _ARGUMENTS:
        setattr(home, name, getattr(getattr(home, name), "theirs", getattr(home, name)))


_temperature: ContextVar[float] = ContextVar("temperature", default=1.0)


def _compiled(theirs: Any, options: Mapping[str, Any] | None) -> Any:
    of_tensors = with_tensors(theirs)

    def scaled(logits: Any, temperature: float, *args: Any, **kwargs: Any) -> Any:
        return of_tensors(logits / temperature if temperature != 1.0 else logits, *args, **kwargs)

    whole = torch.compile(scaled, backend="slime_fused", options=dict(options or {}))

    @functools.wraps(theirs)
    def calculate_log_probs_and_entropy(
        logits: Any, *args: Any, chunk_size: int = -1, **kwargs: Any
    ) -> Any:
        return whole(logits, _temperature.get(), *args, **kwargs)

    calculate_log_probs_and_entropy.theirs = theirs  # type: ignore[attr-defined]
    return calculate_log_probs_and_entropy


def _unscaled(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def get_log_probs_and_entropy(logits: Any, *, args: Any, **kwargs: Any) -> Any:
        if isinstance(logits, DeferredLogits):
            logits = logits.float()
        token = _temperature.set(getattr(args, "rollout_temperature", 1.0))
        args = copy.copy(args)
        args.rollout_temperature = 1.0
        try:
            return theirs(logits, args=args, **kwargs)
        finally:
            _temperature.reset(token)

    get_log_probs_and_entropy.theirs = theirs  # type: ignore[attr-defined]
    return get_log_probs_and_entropy
