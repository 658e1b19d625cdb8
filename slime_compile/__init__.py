"""slime_compile: a torch.compile backend that fuses log-prob and entropy losses over a large vocabulary.

    loss_fn = torch.compile(loss_fn, backend="slime_fused")       needs no import of this package

Public here: `explain` (what would be fused, a dry run), `reports` (what this process has compiled), `Report`, and
`log_probs_and_entropy` (the same operators for eager callers). Everything is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from slime_compile.version import __version__

if TYPE_CHECKING:
    from slime_compile.dry_run import explain
    from slime_compile.eager import log_probs_and_entropy
    from slime_compile.report import Report, reports

__all__ = ["Report", "__version__", "explain", "log_probs_and_entropy", "reports"]

_HOMES = {
    "explain": "slime_compile.dry_run",
    "log_probs_and_entropy": "slime_compile.eager",
    "Report": "slime_compile.report",
    "reports": "slime_compile.report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
