"""Graph passes: recognise per-token log-probs and entropies by meaning, and rewrite them to two fused operators.

In their order:

    function_outputs.drop_unread_outputs(gm)        Dynamo's graph: what autograd.Functions return (torch 2.11)
    collective_gradients.keep_eager_gradients(gm)   Dynamo's graph: in-place collectives keep eager's gradient
    returned_logits.detach_returned(gm, min_vocab)  Dynamo's graph: logits beside a loss have their own gradient
    fuse(graph, config) -> Outcome                  joint or inference graph, before partitioning; calls
        collectives.merge                           row-level all-reduces -> one all-gather
        verify.mismatch                             verify=True: the graph and its rewrite on the same random data
    linear.linear(graph, config) -> LinearOutcome   after fuse: logits that a matmul makes, in chunks
    inlined.inline                                  after partitioning: operators of few elements -> formulas
    inplace.mark_inputs, inplace.inplace            backward graph, after partitioning -> Decisions

Reading order: docs/design.md, `rules/__init__.py` (what is recognised), `algebra/` (forms), `walk/`, `fuse.py`.
Knows graphs only: no Triton, no import of `slime_compile`.
"""

from fx_passes.fuse import fuse
from fx_passes.outcome import FuseConfig, Fused, Outcome, Rejection

__all__ = ["FuseConfig", "Fused", "Outcome", "Rejection", "fuse"]
