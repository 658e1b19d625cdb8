"""What the tests of who holds the logits compile."""

from __future__ import annotations

import pytest

from tests.support.held import Loss, warm


@pytest.fixture(
    scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def fn(request: pytest.FixtureRequest) -> Loss:
    return warm(request.param)
