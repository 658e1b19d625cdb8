"""Graph passes: recognise per-token log-probs and entropies by meaning, and rewrite them to two fused operators.

`pipeline.PASSES` lists them in their order, each with its stage and what it does; docs/design.md has the list.

Reading order: docs/design.md, `rules/__init__.py` (what is recognised), `algebra/` (forms), `walk/`, `fuse.py`.
Knows graphs only: no Triton, no import of `slime_compile`.
"""

from fx_passes.fuse import fuse
from fx_passes.outcome import FuseConfig, Fused, Outcome, Rejection

__all__ = ["FuseConfig", "Fused", "Outcome", "Rejection", "fuse"]
