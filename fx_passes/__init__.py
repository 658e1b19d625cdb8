"""Graph passes: recognise per-token log-probs and entropies by algebra, and rewrite them to fused operators.

`pipeline.PASSES` lists them in their order, each with its stage and effect; docs/design.md has the list.

Reading order: docs/design.md, `rules/__init__.py` (the table of rules), `algebra/` (forms), `walk/`, `fuse.py`.
Knows graphs only: no Triton, no import of `slime_compile`.
"""

from fx_passes.fuse import fuse
from fx_passes.outcome import FuseConfig, Fused, Outcome, Rejection

__all__ = ["FuseConfig", "Fused", "Outcome", "Rejection", "fuse"]
