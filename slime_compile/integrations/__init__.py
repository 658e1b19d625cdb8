"""One file per trainer, for its needs beyond `torch.compile(..., backend="slime_fused")`; docs/integrations.md.

    accelerate   TrainingArguments(torch_compile_backend="slime_fused"), Accelerator(dynamo_backend="slime_fused")
    trl          its fused head over our operators
    openrlhf     log-probs and entropies of its actor in one compiled function
    slime        its log-probs and entropies compiled, of deferred logits too
    verl         log-probs and entropies of its FSDP engine in one compiled function

Each has `enable()`, which changes as little of the package as possible, and `disable()`, which undoes it. With another
version of the package, `enable()` warns once and changes nothing.
"""

import importlib
from typing import Any

__all__ = ["accelerate", "openrlhf", "slime", "trl", "verl"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
