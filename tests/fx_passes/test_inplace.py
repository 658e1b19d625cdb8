"""Whether a gradient may be written over the logits: a backward graph per reason, and graphs that are rewritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput
from torch.fx import GraphModule, Node

from fx_passes.inplace import Consume, Decision, inplace, mark_inputs
from tests.support.scratch import Scratch

aten = torch.ops.aten
row_grad = torch.ops.slime_fused.row_grad.default
row_grad_ = torch.ops.slime_fused.row_grad_.default
row_grad_over = torch.ops.slime_fused.row_grad_over.default

ROWS, VOCAB = 3, 5


class Backward:
    """A backward graph: saved logits, coefficients, and the gradient that is made of them."""

    def __init__(
        self, layout: str = "contiguous", dtype: torch.dtype = torch.float32, rows: int = ROWS
    ) -> None:
        self.s = Scratch(dtype)
        self.x = self.s.input("logits", (rows, VOCAB), dtype, layout)
        self.terms = self.s.input("rows", (rows, 1, 5), torch.float32)
        self.affine = self.s.input("rows", (rows, 3), torch.float32)
        self.index = self.s.input("hits", (rows, 1), torch.int64)
        self.weight = self.s.input("rows", (rows, 1), torch.float32)

    def gradient(
        self, x: Node | None = None, dtype: torch.dtype = torch.float32, **changed: Node
    ) -> Node:
        given = {
            name: changed.get(name, getattr(self, name))
            for name in ("terms", "affine", "index", "weight")
        }
        return self.s.call(row_grad, x or self.x, *given.values(), False, dtype, "")

    def decide(
        self,
        *returned: Node,
        donated: bool = True,
        consume: Consume = False,
        recorded: bool = False,
    ) -> Decision:
        self.s.graph.output(tuple(returned))
        (decision,) = inplace(self.s.graph, {self.x} if donated else set(), consume, recorded)
        targets = [node.target for node in self.s.graph.nodes]
        assert targets.count(row_grad_over) == bool(decision.owner)
        assert targets.count(row_grad_) == (decision.in_place and not decision.owner)
        assert targets.count(row_grad) == (not decision.in_place)
        return decision

    def marked(self, reason: str) -> None:
        """The joint graph's note: the logits are an input of the caller's, and why it must not be overwritten."""
        self.x.meta["desc"] = PlainAOTInput(0)
        mark_inputs(_returning(self.s), {0: reason} if reason else {})


def _returning(s: Scratch, *nodes: Node, desc: Any = ()) -> Any:
    """The graph with an output, for as long as it is a joint graph."""
    for node in s.graph.find_nodes(op="output"):
        s.graph.erase_node(node)
    output = s.graph.output(tuple(nodes))
    output.meta["desc"] = desc
    return s.graph


def taken_back(s: Scratch) -> None:
    s.graph.erase_node(s.graph.output_node())


# ---- what is written over the logits


def test_donated_logits_hold_the_gradient() -> None:
    b = Backward()
    gradient = b.gradient()
    doubled = b.s.call(aten.mul.Tensor, gradient, 2.0)
    assert b.decide(doubled) == Decision(gradient.name, "", True, "", "graph")


def test_the_rewritten_graph_computes_the_same() -> None:
    draws = [torch.randn(ROWS, VOCAB), torch.rand(ROWS, 1, 5), torch.rand(ROWS, 3)]
    draws += [torch.randint(VOCAB, (ROWS, 1)), torch.rand(ROWS, 1)]
    found = []
    for donated in (False, True):
        b = Backward()
        gradient = b.gradient()
        b.decide(b.s.call(aten.mul.Tensor, gradient, 2.0), donated=donated)
        module = GraphModule(torch.nn.Module(), b.s.graph)
        found.append(module(*[t.clone() for t in draws])[0])
    assert torch.equal(*found)


def test_logits_made_in_the_graph() -> None:
    b = Backward()
    made = b.s.call(aten.mul.Tensor, b.x, 2.0)
    decision = b.decide(b.gradient(made), donated=False)
    assert (decision.in_place, decision.owner) == (True, "")


def _copied(b: Backward, over: Node, *returned: Node, used: bool = False) -> list[Any]:
    """What is left of a gradient that is copied over `over`: the targets of the graph."""
    gradient = b.gradient()
    copy = b.s.call(aten.copy_.default, over, gradient)
    if used:
        returned = (*returned, copy)
    b.s.graph.output(returned)
    inplace(b.s.graph, set(), False)
    return [node.target for node in b.s.graph.nodes if node.op == "call_function"]


def test_what_is_copied_over_the_logits_is_written_there() -> None:
    b = Backward()
    assert _copied(b, b.x, b.weight) == [row_grad_]


def test_copied_over_another_tensor() -> None:
    b = Backward()
    assert row_grad in _copied(b, b.s.input("logits", (ROWS, VOCAB)))


def test_copied_over_the_logits_and_read() -> None:
    b = Backward()
    assert row_grad in _copied(b, b.x, used=True)


def test_copied_over_logits_that_were_read_for_later_use() -> None:
    b = Backward()
    early = b.s.call(aten.tanh.default, b.x)
    assert row_grad in _copied(b, b.x, early)


def test_a_matrix_product_may_read_the_logits_before() -> None:
    """A kernel of its own reads when it stands in the graph, which the gradient waits for."""
    b = Backward()
    product = b.s.call(aten.mm.default, b.x, b.s.input("rows", (VOCAB, 2)))
    assert b.decide(b.gradient(), product).in_place
    (over,) = b.s.graph.find_nodes(op="call_function", target=row_grad_over)
    assert over.kwargs == {"after": [product]}


def test_what_the_gradient_needs_may_read_the_logits() -> None:
    b = Backward()
    peak = b.s.call(aten.amax.default, b.x, [-1], True)
    assert b.decide(b.gradient(weight=peak)).in_place


def test_a_gradient_that_only_leaves_may_have_the_strides_of_the_logits() -> None:
    """Nobody in the graph has been promised a contiguous one."""
    b = Backward("sliced")
    assert b.decide(b.gradient()).in_place
    (over,) = b.s.graph.find_nodes(op="call_function", target=row_grad_over)
    assert over.kwargs == {"strided": True}


def test_the_stride_of_a_single_row_says_nothing() -> None:
    b = Backward("sliced", rows=1)
    assert b.x.meta["val"].stride() != (VOCAB, 1)
    assert b.decide(b.s.call(aten.mul.Tensor, b.gradient(), 2.0)).in_place
    (over,) = b.s.graph.find_nodes(op="call_function", target=row_grad_over)
    assert not over.kwargs


# ---- what is not


def test_another_dtype() -> None:
    b = Backward()
    reason = b.decide(b.gradient(dtype=torch.bfloat16)).reason
    assert reason == "the gradient is torch.bfloat16, the logits are torch.float32"


def test_other_strides() -> None:
    b = Backward("permuted")
    reason = b.decide(b.s.call(aten.mul.Tensor, b.gradient(), 2.0)).reason
    assert reason == "the logits have strides [1, 3], the gradient is contiguous"


def test_rows_that_share_memory() -> None:
    b = Backward("expanded")
    assert (
        b.decide(b.gradient()).reason
        == "the logits have strides [0, 1], the gradient is contiguous"
    )


def test_coefficients_that_alias_the_logits() -> None:
    b = Backward()
    part = b.s.call(aten.slice.Tensor, b.x, 1, 0, 1)
    assert (
        b.decide(b.gradient(weight=part)).reason == "the gradient's coefficients alias the logits"
    )


@pytest.mark.parametrize("view", [False, True])
def test_logits_that_leave(view: bool) -> None:
    b = Backward()
    gradient = b.gradient()
    left = b.s.call(aten.t.default, b.x) if view else b.x
    assert b.decide(gradient, left).reason == "the logits leave the backward graph"


@pytest.mark.parametrize("view", [False, True])
def test_logits_read_again(view: bool) -> None:
    b = Backward()
    seen = b.s.call(aten.view.default, b.x, [-1]) if view else b.x
    gradient = b.gradient()
    late = b.s.call(aten.tanh.default, seen)
    assert b.decide(gradient, late).reason == "the logits are read again at tanh_default"


def test_logits_read_before_for_later_use() -> None:
    """Inductor would compute the tanh where it is needed, of what the gradient has left."""
    b = Backward()
    early = b.s.call(aten.tanh.default, b.x)
    reason = b.decide(b.s.call(aten.add.Tensor, b.gradient(), early)).reason
    assert reason == "the logits are read at tanh_default, for later use"


def test_two_saved_tensors_with_one_storage() -> None:
    b = Backward()
    other = b.s.input("logits", (ROWS, VOCAB))
    other.meta["val"] = b.x.meta["val"].view(ROWS, VOCAB)
    reason = b.decide(b.gradient()).reason
    assert reason == "two saved tensors share the storage of the logits"


def test_saved_logits_that_are_not_donated() -> None:
    b = Backward()
    reason = b.decide(b.gradient(), donated=False, consume=True).reason
    assert reason == "the saved logits alias a value the caller can see"


# ---- the caller's own


def consumed(reason: str = "", consume: Consume = True) -> Decision:
    b = Backward()
    b.marked(reason)
    taken_back(b.s)
    return b.decide(b.gradient(), donated=False, consume=consume)


def test_given_logits_are_consumed_where_allowed() -> None:
    assert consumed().in_place
    assert consumed(consume=False).reason == (
        "the logits are an input of the compiled function; "
        "options={'consume_logits': True} lets the gradient overwrite them"
    )


def test_given_logits_that_are_a_leaf() -> None:
    assert consumed("they are a leaf").reason == "the logits are an input and they are a leaf"


def test_returned_logits() -> None:
    b = Backward()
    b.x.meta["desc"] = PlainAOTInput(0)
    view = b.s.call(aten.t.default, b.x)
    mark_inputs(_returning(b.s, view), {})
    taken_back(b.s)
    reason = b.decide(b.gradient(), donated=False, consume=True).reason
    assert reason == "the logits are an input and they are returned to the caller"


@pytest.mark.parametrize("consume", ["auto", True])
def test_logits_that_the_function_changes(consume: Consume) -> None:
    b = Backward()
    b.x.meta["desc"] = PlainAOTInput(0)
    changed = b.s.call(aten.mul.Tensor, b.x, 2.0)
    mark_inputs(_returning(b.s, changed, desc=(InputMutationAOTOutput(PlainAOTInput(0)),)), {})
    taken_back(b.s)
    b.s.graph.erase_node(changed)
    reason = b.decide(b.gradient(), donated=False, consume=consume).reason
    assert reason == "the logits are an input and the function changes them in place"


def test_a_view_of_given_logits() -> None:
    b = Backward()
    b.marked("")
    taken_back(b.s)
    view = b.s.call(aten.alias.default, b.x)
    reason = b.decide(b.gradient(view), donated=False, consume=True).reason
    assert reason == "only a view of the caller's logits is used, and autograd does not check it"


def test_another_wide_input() -> None:
    """It may share storage with the logits at some later call."""
    b = Backward()
    other = b.s.input("logits", (ROWS, VOCAB))
    other.meta["desc"] = PlainAOTInput(1)
    b.marked("")
    taken_back(b.s)
    late = b.s.call(aten.tanh.default, other)
    reason = b.decide(b.gradient(), late, donated=False, consume=True).reason
    assert reason == "another input with the same vocabulary is read in backward"


# ---- whoever holds them, which the call finds out


def test_what_the_caller_may_hold_is_decided_at_run_time() -> None:
    b = Backward()
    gradient = b.gradient()
    decision = b.decide(b.s.call(aten.mul.Tensor, gradient, 2.0), donated=False, consume="auto")
    assert (decision.in_place, decision.owner) == (True, "anyone")


def test_a_leaf_is_found_out_at_run_time() -> None:
    """The next call may have another one."""
    assert consumed("they are a leaf", consume="auto").owner == "anyone"


def test_holders_of_a_view_cannot_be_counted() -> None:
    b = Backward()
    view = b.s.call(aten.alias.default, b.x)
    reason = b.decide(b.gradient(view), donated=False, consume="auto").reason
    assert reason == "only a view of the logits is used, and its references cannot be counted"


def test_a_reader_without_a_result_cannot_be_waited_for() -> None:
    """The gradient must come after it, and only data says so."""
    b = Backward()
    other = b.s.input("logits", (ROWS, VOCAB))
    b.s.graph.call_function(row_grad_, (b.x, b.terms, b.affine, b.index, b.weight, False, ""))
    b.s.graph.output((b.gradient(), other))
    (decision,) = inplace(b.s.graph, {b.x}, False)
    assert decision.reason.startswith("the logits are read at row_grad_")


@pytest.mark.parametrize("consume", ["auto", True])
def test_recorded_graphs_decide_nothing(consume: Consume) -> None:
    """A CUDA graph runs again without asking."""
    b = Backward()
    b.marked("")
    taken_back(b.s)
    reason = b.decide(b.gradient(), donated=False, consume=consume, recorded=True).reason
    assert reason == "CUDA graphs are recorded, and nothing can be decided at run time"
    kept = Backward()
    assert kept.decide(kept.gradient(), recorded=True).owner == ""
