"""Graph passes: recognise per-token log-probs and entropies by meaning, and rewrite them to two fused operators.

Entry points: `fuse` on the joint graph before partitioning, `inplace.inplace` on the backward graph after it. Reading
order: `rules.py` (what is recognised), `forms.py` (the normal form), `algebra.py`, `row_maps.py`, `walk.py`, `fuse.py`.
Knows graphs only: no Triton, no import of `slime_compile`.
"""

from fx_passes.fuse import fuse
from fx_passes.outcome import FuseConfig, Fused, Outcome, Rejection

__all__ = ["FuseConfig", "Fused", "Outcome", "Rejection", "fuse"]
