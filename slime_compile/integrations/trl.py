"""TRL's fused head (1.16) over our operators: GRPO's log-probs and entropies, one chunk of logits at a time.

TRL computes the per-token values of its trainers in a function of its own, `ChunkedLogProbFunction`. It never has all
logits where Triton runs, and tiles of 4,096 x 32,768 elsewhere. `enable()` puts `linear_log_probs_and_entropy` in its
place where log-probs and entropies are asked for (GRPO, its reference model). What SFT and DPO ask for beside them
(the mean logit, whether the target is the largest) and softcaps stay with TRL's.

Upstream, a function that `add_fused_lm_head` is given would make this file unnecessary.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

from torch import Tensor

from slime_compile.rl.linear_log_probs import linear_log_probs_and_entropy

__all__ = ["disable", "enable"]

_log = logging.getLogger(__name__)
_NAME = "_ChunkedLogProbFunction"
_ARGUMENTS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
    "logit_scale", "outputs",
)  # fmt: skip


class _OverOurOperators:
    """What TRL calls in place of its function."""

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
        if softcap is not None or not set(outputs) <= {"log_probs", "entropy"} or logit_scale <= 0:
            return self.theirs.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )  # fmt: skip
        log_probs, entropy = linear_log_probs_and_entropy(
            hidden,
            weight.to(hidden.dtype),
            targets,
            None if bias is None else bias.to(hidden.dtype),
            temperature=temperature / logit_scale,
            with_entropy="entropy" in outputs,
        )
        return log_probs, entropy, None, None, None


def enable() -> bool:
    """From now on, in models that TRL's trainers have patched or will; more than once does no harm.

    Returns:
        Whether it holds. If not, a warning says why, and nothing has changed.

    Raises:
        ImportError: TRL is not installed.
    """
    trl, utils = importlib.import_module("trl"), importlib.import_module("trl.trainer.utils")
    theirs: Any = getattr(utils, _NAME, None)
    if isinstance(theirs, _OverOurOperators):
        return True
    given = () if theirs is None else tuple(inspect.signature(theirs.forward).parameters)
    if given != _ARGUMENTS:
        _log.warning(
            "trl %s is not known here: trl.trainer.utils.%s.forward must take %s, got %s; nothing was changed. "
            "Compile the loss with torch.compile(..., backend='slime_fused') where TRL makes logits",
            trl.__version__,
            _NAME,
            _ARGUMENTS,
            given,
        )
        return False
    setattr(utils, _NAME, _OverOurOperators(theirs))
    return True


def disable() -> None:
    """TRL's own again."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    ours = getattr(utils, _NAME, None)
    if isinstance(ours, _OverOurOperators):
        setattr(utils, _NAME, ours.theirs)
