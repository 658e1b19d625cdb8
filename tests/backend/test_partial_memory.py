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
