"""Fast CPU implementation of the fused operators."""

from slime_compile.reference import row_grad, row_grad_, row_stats

__all__ = ["row_grad", "row_grad_", "row_stats"]
