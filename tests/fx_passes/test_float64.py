"""Programs in float64 stay in float64: no compiled node is narrower, and gradients are those of eager code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from slime_compile.backend import interpreted
from tests.cases.heads import HEADS
from tests.cases.spellings import SPELLINGS, Spelling
from tests.support import harness

NARROW = (torch.float32, torch.float16, torch.bfloat16)
RELATIVE, ABSOLUTE = 1e-12, 1e-15
QUICK = (  # masks that become numbers; the others are thorough
    "one_hot_as_a_mask",
    "chosen_where_the_column_is",
    "smoothed_by_where",
    "others_filled_with_zero",
    "entropy_detached_weights",
    "policy",
)
HIDDEN_CASTS = ("linear_checkpoint_per_chunk",)  # the mode does not see into a checkpoint


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """What is run: forward, backward and inference graphs after all passes."""
    found: list[GraphModule] = []
    compile_ = interpreted._interpreted

    def spy(gm: GraphModule) -> Any:
        found.append(gm)
        return compile_(gm)

    monkeypatch.setattr(interpreted, "_interpreted", spy)
    return found


def narrow(graphs: Sequence[GraphModule]) -> list[str]:
    """Nodes, of nested graphs too, one of whose tensors is floating and narrower than float64."""
    return [
        f"{node.format_node()}: {[each.dtype for each in tensors]}"
        for gm in graphs
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if (tensors := [t for t in _tensors(node.meta.get("val")) if t.dtype in NARROW])
    ]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    return (t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def cases() -> list[Any]:
    """How a head's gradient is made matters where there is one."""
    pairs = [(row, "never") for row in (*SPELLINGS, *HEADS)]
    pairs += [(row, "always") for row in HEADS]
    return [
        pytest.param(
            row,
            when,
            id=f"{row.name}-{when}",
            marks=() if row.name in QUICK else pytest.mark.thorough,
        )
        for row, when in pairs
        if row.name not in HIDDEN_CASTS
    ]


@pytest.mark.parametrize(("spelling", "grad_in_forward"), cases())
def test_no_node_is_narrower(
    spelling: Spelling, grad_in_forward: str, compiled_graphs: list[GraphModule]
) -> None:
    """The program's own casts to narrower dtypes are casts to float64 here."""
    harness.prepare(spelling)
    options = harness.OPTIONS | {"grad_in_forward": grad_in_forward}
    compiled = torch.compile(spelling.fn, backend="slime_fused", options=options)
    made = harness.make_inputs(spelling, torch.float64, 0)
    inputs = [
        v if v.requires_grad else wide
        for v, wide in zip(made, harness.to_float64(made), strict=True)
    ]
    with harness.in_float64(), harness.chunks_in_bytes():
        runs = [harness.call(fn, spelling, inputs) for fn in (compiled, spelling.fn)]
        outputs = runs[1].outputs
        chosen = [at for at, each in enumerate(outputs) if each.requires_grad]
        draw = torch.Generator().manual_seed(0)
        upstream = [torch.randn(each.shape, generator=draw) for each in outputs]
        found, eager = ([*run.outputs, *harness.gradients(run, chosen, upstream)] for run in runs)
    assert compiled_graphs
    assert not narrow(compiled_graphs)
    for at, (mine, true) in enumerate(zip(found, eager, strict=True)):
        assert mine.dtype is true.dtype
        torch.testing.assert_close(
            mine,
            true,
            rtol=0,
            atol=RELATIVE * float(true.detach().abs().max()) + ABSOLUTE,
            equal_nan=True,
            msg=lambda text, at=at: f"tensor {at}: {text}",
        )
