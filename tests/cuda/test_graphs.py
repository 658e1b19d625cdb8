"""CUDA graphs on the device: captured once, replayed over other inputs; logits of a graph are not written over."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor

import slime_compile
from tests.cuda.judge import relative_error, results, steps, truth
from tests.cuda.losses import (
    BF16,
    F32,
    HIDDEN,
    ROWS,
    Data,
    Loss,
    given,
    head,
    inside,
    per_row,
    policy,
)

VOCAB = 2048  # above the least vocabulary that is fused
STEPS = 4
BOUND = {BF16: 2e-2, F32: 1e-4}
REDUCED = {"backend": "slime_fused", "mode": "reduce-overhead"}

BOTH = pytest.mark.parametrize(
    ("loss", "make"), [(policy, given), (head, inside)], ids=["given", "head"]
)


@BOTH
def test_replays_over_other_inputs(loss: Loss, make: object) -> None:
    assert callable(make)
    function = torch.compile(loss, **REDUCED)
    errors = steps(loss, function, [make(BF16, seed, VOCAB) for seed in range(STEPS)])
    assert max(errors) < BOUND[BF16]


@pytest.mark.usefixtures("_counted")
def test_graphs_are_captured_and_launched() -> None:
    """Forward and backward, each captured once; a warm step launches these, and waits for nothing."""
    from tests.cuda.standin import counts

    function = torch.compile(policy, **REDUCED)
    counts.reset()
    steps(policy, function, [given(BF16, seed, VOCAB) for seed in range(STEPS)])
    assert counts.counts().captures == 3  # of torch, before the first, an empty one
    data = given(BF16, 9, VOCAB)
    counts.reset()
    torch.compiler.cudagraph_mark_step_begin()
    results(function, data)
    asked = counts.counts()
    assert asked.graph_launches == 2
    assert (asked.captures, asked.waits, asked.mallocs) == (0, 0, 0), str(asked)


def test_a_model_in_a_graph() -> None:
    """Its logits are memory of the graph, which no gradient may be written over."""
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda") / 2).requires_grad_()
    model = torch.compile(lambda hidden: hidden @ weight.t(), mode="reduce-overhead")
    function = torch.compile(policy, backend="slime_fused")
    for seed in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        hidden, rest = torch.randn(ROWS, HIDDEN, device="cuda"), per_row(seed, ROWS, VOCAB, "cuda")
        (got,) = torch.autograd.grad(function(model(hidden), *rest), weight)
        _, _, true = truth(head, Data([hidden, weight], rest))
        assert relative_error([got], [true]) < BOUND[F32]
    assert "a CUDA graph's" in str(slime_compile.reports()[-1])


def test_a_step_in_the_caller_s_graph() -> None:
    """torch.cuda.graph around forward and backward: what is captured waits for nothing, and replays are right."""
    data = given(F32)
    logits = data.leaves[0].clone().requires_grad_()
    function = torch.compile(policy, backend="slime_fused", options={"min_vocab": 8})

    def step() -> tuple[Tensor, ...]:
        loss = function(logits, *data.rest)
        return loss.detach(), *torch.autograd.grad(loss, logits)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in 1, 2:
        other = given(F32, seed)
        with torch.no_grad():
            logits.copy_(other.leaves[0])
        for into, value in zip(data.rest, other.rest, strict=True):
            into.copy_(value)
        graph.replay()
        assert relative_error(list(captured), truth(policy, other)) < BOUND[F32]


def test_a_retained_graph() -> None:
    """Backward twice over one forward, where torch donates nothing to backward, as its error advises."""
    function = torch.compile(policy, **REDUCED)
    for seed in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        data = given(F32, seed, VOCAB)
        leaf = data.leaves[0].clone().requires_grad_()
        with functorch_config.patch(donated_buffer=False):
            loss = function(leaf, *data.rest)
            (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            first = first.clone()
            (second,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(first, second)
        assert relative_error([first], truth(policy, data)[1:]) < BOUND[F32]


def test_a_retained_graph_that_was_donated_to() -> None:
    """An error of torch's, which says what to do, and no other numbers."""
    data = given(F32, 0, VOCAB)
    leaf = data.leaves[0].requires_grad_()
    loss = torch.compile(policy, **REDUCED)(leaf, *data.rest)
    with pytest.raises(RuntimeError, match="donated_buffer=False"):
        torch.autograd.grad(loss, leaf, retain_graph=True)
