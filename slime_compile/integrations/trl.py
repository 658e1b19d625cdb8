"""TRL's fused head (1.16) over our operators: log-probs, entropies and metrics of a row, one chunk of logits at a time.

TRL computes its trainers' per-token values in a function of its own, `ChunkedLogProbFunction`. With Triton it never has
all logits, otherwise tiles of 4,096 x 32,768. `enable()` replaces it by `linear_log_probs_and_entropy`, and adds the
values needed by SFT and DPO: whether the target is the largest, and the mean logit. WPO (`log_sum_sq_probs`) and
softcaps stay with TRL's.

Upstream, a function argument of `add_fused_lm_head` would make this file unnecessary.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from slime_compile.integrations.known import known
from slime_compile.rl.linear_log_probs import log_probs_entropy_and_hits

__all__ = ["disable", "enable"]

_HOME = "trl.trainer.utils"
_NAME = "_ChunkedLogProbFunction"
_OUTPUTS = {"log_probs", "entropy", "mean_logits", "is_top1"}
_ARGUMENTS = {
    f"{_NAME}.forward": [
        "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
        "logit_scale", "outputs",
    ],
}  # fmt: skip
_INSTEAD = (
    "Compile the loss with torch.compile(..., backend='slime_fused') if your TRL computes logits"
)


class _OverOurOperators:
    """The replacement of TRL's function."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> Any:
        if softcap is not None or not set(outputs) <= _OUTPUTS or logit_scale <= 0:
            return self.theirs.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )  # fmt: skip
        weight = weight.to(hidden.dtype)
        bias = None if bias is None else bias.to(hidden.dtype)
        log_probs, entropy, hits = log_probs_entropy_and_hits(
            hidden, weight, targets, bias,
            temperature=temperature / logit_scale, with_entropy="entropy" in outputs,
        )  # fmt: skip
        mean = _mean_logits(hidden, weight, bias) if "mean_logits" in outputs else None
        return (
            log_probs,
            entropy,
            None,
            None if mean is None else mean * (logit_scale / temperature),
            hits if "is_top1" in outputs else None,
        )


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N] float32: the mean over a row's logits is the product with the mean row of the weight."""
    mean: Tensor = hidden.float() @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.float().mean()


def enable() -> bool:
    """Enables it for all models patched by TRL's trainers, before or after this call. Calling it twice is harmless.

    `mean_token_accuracy`: a target tied with an earlier column is a hit here and a miss in TRL.

    Returns:
        True if enabled. Otherwise a warning gives the reason, and nothing changes.

    Raises:
        ImportError: TRL is not installed.
    """
    utils: Any = importlib.import_module(_HOME)
    if isinstance(getattr(utils, _NAME, None), _OverOurOperators):
        return True
    if known("trl", "1.16.", _HOME, _ARGUMENTS, _INSTEAD) is None:
        return False
    setattr(utils, _NAME, _OverOurOperators(getattr(utils, _NAME)))
    return True


def disable() -> None:
    """Undoes `enable()`."""
    utils: Any = importlib.import_module(_HOME)
    ours = getattr(utils, _NAME, None)
    if isinstance(ours, _OverOurOperators):
        setattr(utils, _NAME, ours.theirs)
