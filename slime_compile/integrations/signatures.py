"""How `enable()` knows what it replaces: by the arguments that it takes."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["arguments_of"]


def arguments_of(function: Any) -> list[str]:
    """Their names; none where there is no such function."""
    return [] if function is None else list(inspect.signature(function).parameters)
