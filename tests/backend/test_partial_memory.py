"""A loss that is fused in part never needs more memory than inductor alone; `python -m bench partial` has the times."""

import pytest
import torch

from bench.cases.partial import PROGRAMS
from bench.commands import partial
from bench.measure import measure


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_peak(name: str) -> None:
    theirs, ours = (
        measure.in_fresh_process(partial.peak, name, torch.float32, way) for way in partial.COMPARED
    )
    assert ours <= 1.02 * theirs


ONE_GRADIENT = (
    "jensen_shannon_of_a_sample",
    "kl_of_shifted_rows",
    "reverse_kl_of_shifted_rows",
    "jensen_shannon_of_shifted_rows",
    "loss_and_kl_of_shifted_rows",
)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ONE_GRADIENT)
def test_two_logits_keep_the_gradient_and_a_few_chunks(name: str, dtype: torch.dtype) -> None:
    taken = measure.in_fresh_process(partial.peak, name, dtype, "slime_fused")
    assert taken <= 1.25 * partial.ROWS * partial.VOCAB * dtype.itemsize
