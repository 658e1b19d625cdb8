"""A batch multiplied by one matrix becomes one matmul: a frozen head over a part of hidden runs in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

import slime_compile
from fx_passes.one_matrix import multiply_once
from tests.support import harness
from tests.support.harness import BATCH, HIDDEN, LENGTH, VOCAB

Loss = Callable[[Tensor, Tensor], Tensor]
TARGET = torch.arange(BATCH * (LENGTH - 1)) * 5 % VOCAB


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    torch._dynamo.reset()
    with harness.chunks_in_bytes():
        yield


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=draw).requires_grad_()
    return hidden, torch.randn(VOCAB, HIDDEN, generator=draw)


def shifted(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden[:, :-1], weight).flatten(0, 1), TARGET)


def shifted_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """The pass `row_demand` makes this the same."""
    return F.cross_entropy((hidden @ weight.t())[:, :-1].flatten(0, 1), TARGET)


def entropy(hidden: Tensor, weight: Tensor) -> Tensor:
    log_p = (hidden[:, 1:] @ weight.t()).log_softmax(-1)
    return (log_p.exp() * log_p).sum(-1).square().mean()


def metric(hidden: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        return shifted(hidden, weight)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("loss", [shifted, shifted_logits, entropy, metric])
def test_a_frozen_head(loss: Loss, dynamic: bool) -> None:
    hidden, weight = inputs()
    options = harness.OPTIONS | {"chunk_mib": 2 * VOCAB * 4}
    compiled = torch.compile(
        loss, backend="slime_fused", fullgraph=True, options=options, dynamic=dynamic
    )

    def values(function: Loss, *of: Tensor) -> list[Tensor]:
        value = function(*of)
        grads = torch.autograd.grad(value, of[0]) if value.requires_grad else ()
        return [value.detach(), *grads]

    wide = hidden.detach().double().requires_grad_(), weight.double()
    triples = zip(
        values(compiled, hidden, weight),
        values(loss, hidden, weight),
        values(loss, *wide),
        strict=True,
    )
    for mine, plain, truth in triples:
        harness.no_worse_than_eager(mine, plain, truth, torch.float32)
    report = slime_compile.reports()[-1]
    report.assert_fused()
    assert report.to_dict()["chunked_heads"] == 1


def _joint(function: Callable[..., Tensor], *of: Tensor) -> Graph:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(each) for each in of]
        traced = torch.fx.experimental.proxy_tensor.make_fx(function)(*fakes)
    return traced.graph


@pytest.mark.parametrize(
    "function",
    [
        lambda h, w: torch.bmm(h, w.t().expand(BATCH, -1, -1) * 2),
        lambda h, w: torch.bmm(h, torch.stack([w.t()] * BATCH)),
        lambda h, w: torch.bmm(w.t().expand(BATCH, -1, -1).mT, h.mT),  # the matrix is on the left
        lambda h, w: torch.bmm(h, w[:31].t().expand(BATCH, -1, -1)),  # no vocabulary
    ],
)
def test_left_as_it_was(function: Callable[..., Tensor]) -> None:
    graph = _joint(function, *(each.detach() for each in inputs()))
    before = str(graph)
    assert multiply_once(graph, harness.MIN_VOCAB) == 0
    assert str(graph) == before


def test_from_the_vocabulary() -> None:
    """As in backward: the matrix is seen turned."""
    _, weight = inputs()
    grads = torch.randn(BATCH, LENGTH, VOCAB)
    function = lambda g, w: torch.bmm(g, w.t().expand(BATCH, -1, -1).transpose(1, 2))  # noqa: E731
    graph = _joint(function, grads, weight)
    assert multiply_once(graph, harness.MIN_VOCAB) == 1
    graph.lint()
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    made = torch.fx.GraphModule({}, graph)(grads, weight)
    torch.testing.assert_close(made, function(grads, weight))
