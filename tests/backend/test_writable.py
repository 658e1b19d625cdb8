"""Full-size values that autograd has saved for a backward graph: inductor may write over them, unless it runs again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from bench.cases.partial import soft_cross_entropy_kept
from bench.measure.measure import profiled_peak
from fx_passes import writable as module
from fx_passes.writable import give_writable
from tests.support.scratch import Scratch

aten = torch.ops.aten
writable = torch.ops.slime_fused.writable.default
row_grad = torch.ops.slime_fused.row_grad.default

ROWS, VOCAB = 300, 1024  # more than `LEAST_BYTES` in float32


# ---- the graph ----------------------------------------------------------------------------------------------------


class Backward(Scratch):
    def __init__(self) -> None:
        super().__init__()
        self.saved = self.input("logits", (ROWS, VOCAB))

    def given(self, *returned: Node, donated: bool = True) -> int:
        """How many are handed over; what read the input reads the operator then."""
        self.graph.output(returned)
        count = give_writable(self.graph, {self.saved} if donated else set())
        self.graph.lint()
        calls = self.graph.find_nodes(op="call_function", target=writable)
        assert len(calls) == count
        assert set(self.saved.users) == set(calls) or not count
        return count


def test_an_element_wise_reader_may_write_over_it() -> None:
    g = Backward()
    scaled = g.call(aten.mul.Tensor, g.saved, 2.0)
    assert g.given(scaled) == 1
    (own,) = scaled.all_input_nodes
    assert own.target is writable
    assert own.meta["val"].stride() == (VOCAB, 1)


def test_seen_through_a_view() -> None:
    g = Backward()
    flat = g.call(aten.view.default, g.saved, [ROWS * VOCAB])
    assert g.given(g.call(aten.exp.default, flat)) == 1


def test_what_is_returned_too_is_handed_over() -> None:
    g = Backward()
    assert g.given(g.call(aten.exp.default, g.saved), g.saved) == 1
    assert g.saved not in g.graph.output_node().all_input_nodes


def test_another_may_see_it() -> None:
    g = Backward()
    assert g.given(g.call(aten.exp.default, g.saved), donated=False) == 0


def test_nothing_would_be_written_over_it() -> None:
    g = Backward()
    other = g.input("logits", (VOCAB, 3))
    assert g.given(g.call(aten.mm.default, g.saved, other)) == 0


def test_a_reader_of_ours_asks_for_itself() -> None:
    g = Backward()
    terms, affine = g.input("rows", (ROWS, 1, 5)), g.input("rows", (ROWS, 3))
    index, weight = g.input("hits", (ROWS, 1), torch.int64), g.input("rows", (ROWS, 1))
    view = g.call(aten.view.default, g.saved, [ROWS, VOCAB])
    grad = g.call(row_grad, view, terms, affine, index, weight, False, torch.float32, "")
    assert g.given(grad, g.call(aten.exp.default, g.saved)) == 0


def test_a_small_one_is_not_worth_a_call() -> None:
    g = Backward()
    g.saved = g.input("logits", (3, VOCAB))
    assert g.given(g.call(aten.exp.default, g.saved)) == 0


# ---- the operator -------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Its backward doubles what was saved where it stands, if it may, and returns that."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return x.sum()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (kept,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return writable(kept).mul_(2), None


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_retained_graph_gets_a_copy(layout: str) -> None:
    kept = torch.arange(6.0).view(2, 3)
    kept = kept if layout == "contiguous" else kept.t()
    x = torch.zeros_like(kept, requires_grad=True)
    total = Doubled.apply(x, kept)
    (first,) = torch.autograd.grad(total, x, retain_graph=True)
    assert torch.equal(first, 2 * kept)
    assert first.stride() == kept.stride()
    assert first.data_ptr() != kept.data_ptr()
    (second,) = torch.autograd.grad(total, x)
    assert torch.equal(first, second)
    assert second.data_ptr() == kept.data_ptr()


def test_outside_of_backward_it_is_a_copy() -> None:
    x = torch.arange(3.0)
    copied = writable(x)
    assert torch.equal(copied, x)
    assert copied.data_ptr() != x.data_ptr()


# ---- a compiled loss ----------------------------------------------------------------------------------------------


def inputs() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn([2, ROWS, VOCAB], generator=drawn).mul(3).unbind()
    return logits.requires_grad_(), teacher


@pytest.mark.thorough  # inductor compiles
def test_a_softmax_that_the_program_keeps() -> None:
    torch._dynamo.reset()
    loss = torch.compile(soft_cross_entropy_kept, backend="slime_fused")
    logits, teacher = inputs()
    out = loss(logits, teacher)
    first, second = (
        torch.autograd.grad(out, logits, retain_graph=again) for again in (True, False)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = torch.autograd.grad(soft_cross_entropy_kept(logits, teacher), logits)
    torch.testing.assert_close(first, expected)

    def step() -> None:
        torch.autograd.grad(loss(logits, teacher), logits)

    assert profiled_peak(step) < 1.1 * logits.nbytes


@pytest.mark.thorough
def test_as_many_rows_as_data_says() -> None:
    """Weights that no row statistic has, as GEM's, over the rows that a mask selects."""

    def loss(logits: Tensor, kept: Tensor) -> Tensor:
        mine = logits[kept]
        with torch.no_grad():
            weights = (mine - mine[:, :1]).sigmoid() * (mine / 0.7).softmax(-1)
        log_probs = mine.log_softmax(-1)
        return (weights * (log_probs[:, :1] - log_probs)).sum(-1).mean()

    torch._dynamo.reset()
    logits, _ = inputs()
    kept = torch.ones(ROWS, dtype=torch.bool)
    peaks: dict[str, float] = {}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for backend in ("inductor", "slime_fused"):
            compiled = torch.compile(loss, backend=backend)

            def step(run: Callable[..., Tensor] = compiled) -> None:
                torch.autograd.grad(run(logits, kept), logits)

            step()
            peaks[backend] = profiled_peak(step) / logits.nbytes
    assert peaks["slime_fused"] < peaks["inductor"] + 0.1, peaks


@pytest.mark.thorough
def test_a_failure_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(node: Node) -> bool:
        raise ValueError("the test's own")

    monkeypatch.setattr(module, "_pays", fails)
    torch._dynamo.reset()
    loss = torch.compile(soft_cross_entropy_kept, backend="slime_fused")
    logits, teacher = inputs()
    (found,) = torch.autograd.grad(loss(logits, teacher), logits)
    expected = torch.autograd.grad(soft_cross_entropy_kept(logits, teacher), logits)
    torch.testing.assert_close(found, *expected)
