"""Lets accelerate, and with it transformers' `Trainer` and TRL, take "slime_fused" as a backend of torch.compile.

accelerate checks the name against an enum of its own (`accelerate.utils.DynamoBackend`), without backends registered by
other packages: `TrainingArguments(torch_compile_backend="slime_fused")` raises "'SLIME_FUSED' is not a valid
DynamoBackend". Upstream it would take any name of `torch._dynamo.list_backends()`; then this file is not needed.
"""

from __future__ import annotations

import enum
import importlib
import logging
from typing import Any

__all__ = ["disable", "enable"]

_log = logging.getLogger(__name__)
_NAME = "SLIME_FUSED"


def enable() -> bool:
    """Adds the backend's name to accelerate's list. Calling it twice is harmless.

    Returns:
        True if accelerate now accepts the name. Otherwise a warning gives the reason, and nothing changes.

    Raises:
        ImportError: accelerate is not installed.

    Examples:
        >>> slime_compile.integrations.accelerate.enable()
        >>> TrainingArguments(..., torch_compile_backend="slime_fused")
    """
    package: Any = importlib.import_module("accelerate")
    backends: Any = getattr(package.utils, "DynamoBackend", None)
    if not _is_enum_of_strings(backends):
        _log.warning(
            "accelerate %s is not known here: accelerate.utils.DynamoBackend must be an enum of strings, got %r; "
            "nothing was changed. Compile the loss with torch.compile(..., backend='slime_fused') instead",
            package.__version__,
            backends,
        )
        return False
    if _NAME not in backends.__members__:
        member: Any = str.__new__(backends, _NAME)
        member._name_ = member._value_ = _NAME
        backends._member_map_[_NAME] = backends._value2member_map_[_NAME] = member
        backends._member_names_.append(_NAME)
    return True


def _is_enum_of_strings(backends: Any) -> bool:
    return isinstance(backends, enum.EnumMeta) and issubclass(backends, str)


def disable() -> None:
    """Undoes `enable()`."""
    backends: Any = importlib.import_module("accelerate").utils.DynamoBackend
    if _NAME in backends.__members__:
        del backends._member_map_[_NAME], backends._value2member_map_[_NAME]
        backends._member_names_.remove(_NAME)
