"""What the tests of the passes see of a compilation."""

from __future__ import annotations

from typing import Any

import pytest
from torch.fx import Graph

from slime_compile.backend import inductor, interpreted, passes


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The joint and inference graphs after the passes."""
    found: list[Graph] = []
    run = passes.run_fuse

    def spy(graph: Graph, *args: Any) -> None:
        run(graph, *args)
        found.append(graph)

    for caller in (interpreted, inductor):
        monkeypatch.setattr(caller, "run_fuse", spy)
    return found
