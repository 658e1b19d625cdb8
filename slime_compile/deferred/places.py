"""The user's lines with full logits in eager code, out of reach of any backend.

Entry point: `Places`. Each line is logged once if a gradient goes through it: there the loss is not compiled.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path

import torch

from slime_compile.report.places import shortened

__all__ = ["Places"]

_log = logging.getLogger(__name__)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Places:
    """Counts them, for one head.

    Attributes:
        counts: calls at each `file:line`.
        deferred: calls in which the head returned lazy logits.
    """

    def __init__(self, head: str) -> None:
        self.head = head
        self.counts: Counter[str] = Counter()
        self.deferred = 0

    def add(self) -> None:
        """Counts a computation of the logits at the innermost line outside of torch and of this package."""
        place = _line()
        self.counts[place] += 1
        if self.counts[place] == 1 and torch.is_grad_enabled():
            _log.warning(
                "deferred logits of %s are computed in full at %s, outside torch.compile; "
                "compile the function with this line, and they stay lazy",
                self.head,
                place,
            )

    def __str__(self) -> str:
        lines = [
            f"logits of {self.head}: returned {self.deferred} times in eager code without being computed "
            "(calls within compiled code are not counted)"
        ]
        for place, count in self.counts.most_common():
            lines.append(f"  computed {count} times at {place}")
        return shortened("\n".join(lines))


def _line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
