"""Losses and other code that look like what we fuse and are not: what is left alone stays as it was, and the report
says why.

Rows with `fused=0`: the pass leaves every node of the joint graph alone and gives the reason; the compiled function is
bit for bit what torch makes of it without us. Rows with more: statistics or gradients beside what is refused are fused,
and the result is right. In both the report says what was refused, why and at which line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor
from torch.fx import Graph, GraphModule

import slime_compile
import slime_compile.ops  # registers what the pass puts into graphs
from fx_passes.fuse import fuse
from fx_passes.outcome import FuseConfig, Outcome
from slime_compile.backend.passes import FORMULAS
from tests.cases.spellings import Outputs, pick
from tests.support import harness
from tests.support.harness import MIN_VOCAB, OPTIONS, VOCAB

ROWS = 6
Maker = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class NearMiss:
    """`reason` is a part of the text that the user reads; "" where nothing is near enough to be mentioned."""

    fn: Callable[..., Outputs]
    reason: str
    make: Maker
    fused: int


NEAR_MISSES: list[NearMiss] = []


def draw(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (3 * values).requires_grad_(grad)


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


def logits_and_target() -> list[Tensor]:
    return [draw(ROWS, VOCAB), tokens(ROWS)]


def near_miss(
    reason: str, make: Maker = logits_and_target, fused: int = 0
) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
    def enter(fn: Callable[..., Outputs]) -> Callable[..., Outputs]:
        NEAR_MISSES.append(NearMiss(fn, reason, make, fused))
        return fn

    return enter


# ---------------------------------------------------------------- a softmax that is needed in full


def attention_inputs() -> list[Tensor]:
    return [draw(2, 5, 8), draw(2, VOCAB, 8, seed=1), draw(2, VOCAB, 8, seed=2)]


@near_miss("used in full", attention_inputs)
def attention(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
    scores = query @ key.transpose(1, 2) / 8**0.5
    return (scores.softmax(-1) @ value,)


@near_miss("used in full", attention_inputs)
def attention_with_causal_mask(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
    scores = query @ key.transpose(1, 2)
    mask = torch.ones(5, VOCAB, dtype=torch.bool).tril()
    probs = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return (torch.bmm(F.dropout(probs, 0.1), value),)


@near_miss("used in full", lambda: [draw(ROWS, VOCAB), draw(VOCAB, 8, seed=1)])
def expected_embedding(logits: Tensor, table: Tensor) -> Outputs:
    return (logits.softmax(-1) @ table,)


@near_miss("", lambda: [draw(ROWS, VOCAB)], fused=1)
def log_probs_returned_in_full(logits: Tensor) -> Outputs:
    return (logits.log_softmax(-1),)


@near_miss("used in full", lambda: [draw(ROWS, VOCAB)])
def softmax_returned(logits: Tensor) -> Outputs:
    return (logits.float().softmax(-1),)


@near_miss("used in full", lambda: [draw(ROWS, VOCAB)])
def straight_through_choice(logits: Tensor) -> Outputs:
    probs = logits.softmax(-1)
    hard = F.one_hot(probs.argmax(-1), VOCAB).float()
    return (hard + probs - probs.detach(),)


# ---------------------------------------------------------------- another dimension


@near_miss("")
def softmax_over_rows(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(F.log_softmax(logits, dim=0), target),)


@near_miss("smaller than min_vocab", lambda: [draw(2, VOCAB, 5), tokens(2, 5)])
def softmax_over_the_middle(logits: Tensor, target: Tensor) -> Outputs:
    """The vocabulary in the middle and the softmax over the last, small dimension."""
    return (logits.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1),)


@near_miss("over other dimensions than the vocabulary", lambda: [draw(2, 3, VOCAB)], fused=1)
def softmax_over_two_dimensions(logits: Tensor) -> Outputs:
    peak = logits.amax((1, 2), keepdim=True)
    return ((logits - peak).exp().sum((1, 2)).log() + peak.flatten(),)


@near_miss("smaller than min_vocab", lambda: [draw(ROWS, MIN_VOCAB - 1), tokens(ROWS) % 31])
def small_vocabulary(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(logits.log_softmax(-1), target),)


# ---------------------------------------------------------------- something in between


@near_miss("not computed from the logits", fused=1)
def dropout_on_log_probs(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(F.dropout(logits.log_softmax(-1), 0.3), target),)


@near_miss("not computed from the logits")
def dropout_on_probabilities(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(F.dropout(logits.softmax(-1), 0.3), target),)


@near_miss("tanh", fused=1)
def tanh_of_log_probs(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(torch.tanh(logits.log_softmax(-1)), target),)


@near_miss("sort", lambda: [draw(ROWS, VOCAB)])
def sorted_probabilities(logits: Tensor) -> Outputs:
    return (logits.softmax(-1).sort(-1, descending=True).values[:, :5],)


@near_miss("cumsum", lambda: [draw(ROWS, VOCAB)])
def nucleus_size(logits: Tensor) -> Outputs:
    probs = logits.softmax(-1)
    return ((probs.cumsum(-1) < 0.9).sum(-1), (probs.cumsum(-1) ** 2).sum(-1))


@near_miss("clamp over the vocabulary changes values")
def clamped_probabilities(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(logits.softmax(-1).clamp(min=1e-3, max=0.9), target).log(),)


@near_miss("log of a value that is not one softmax")
def log_of_probability_plus_eps(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(torch.log(logits.softmax(-1) + 1e-3), target),)


@near_miss("a power of 3", lambda: [draw(ROWS, VOCAB)], fused=1)
def third_moment(logits: Tensor) -> Outputs:
    return ((logits.log_softmax(-1) ** 3).sum(-1),)


@near_miss("two different logits", lambda: [draw(ROWS, VOCAB), draw(ROWS, VOCAB, seed=1)])
def expected_reward(logits: Tensor, reward: Tensor) -> Outputs:
    return ((logits.softmax(-1) * reward).sum(-1),)


@near_miss(
    "not computed from the logits", lambda: [draw(ROWS, VOCAB), draw(ROWS, VOCAB, seed=1)], fused=1
)
def soft_targets(logits: Tensor, teacher: Tensor) -> Outputs:
    return (F.cross_entropy(logits, teacher.detach().sigmoid(), reduction="none"),)


@near_miss(
    "two different logits",
    lambda: [draw(ROWS, VOCAB), draw(ROWS, VOCAB, seed=1), tokens(ROWS)],
    fused=2,
)
def contrastive_decoding(logits: Tensor, amateur: Tensor, target: Tensor) -> Outputs:
    return (torch.sigmoid(logits.log_softmax(-1) - amateur.log_softmax(-1)).sum(-1),)


@near_miss("part of the vocabulary", fused=1)
def half_of_the_log_probs(logits: Tensor, target: Tensor) -> Outputs:
    return (logits.log_softmax(-1)[:, :20].sigmoid().sum(-1),)


# ---------------------------------------------------------------- the caller's logits change


def mutable_logits() -> list[Tensor]:
    """No gradient: with one, inductor's decompositions alone have backward read what was written over."""
    return [draw(ROWS, VOCAB, grad=False), tokens(ROWS)]


@near_miss("sigmoid", mutable_logits, fused=1)
def mutated_between_two_uses(logits: Tensor, target: Tensor) -> Outputs:
    log_probs = logits.log_softmax(-1)
    logits.clamp_(max=2.0)
    return (pick(torch.sigmoid(log_probs) * logits, target),)


# ---------------------------------------------------------------- other dtypes


@near_miss("", lambda: [tokens(ROWS, VOCAB), tokens(ROWS)])
def integer_scores(scores: Tensor, target: Tensor) -> Outputs:
    return (pick(scores - scores.amax(-1, keepdim=True), target),)


@near_miss(
    "", lambda: [torch.complex(draw(ROWS, VOCAB), draw(ROWS, VOCAB, seed=1)).detach(), tokens(ROWS)]
)
def complex_scores(scores: Tensor, target: Tensor) -> Outputs:
    weights = scores.exp()
    return (pick(weights / weights.sum(-1, keepdim=True), target).real,)


# ---------------------------------------------------------------- no softmax at all


@near_miss("", lambda: [draw(ROWS, VOCAB)])
def normalised_rows(hidden: Tensor) -> Outputs:
    return (F.layer_norm(hidden, (VOCAB,)),)


@near_miss("", lambda: [draw(ROWS, VOCAB), draw(ROWS, VOCAB, seed=1)])
def mean_squared_error(logits: Tensor, other: Tensor) -> Outputs:
    return (F.mse_loss(logits, other, reduction="none").mean(-1),)


@near_miss("", logits_and_target)
def hinge_of_the_target(logits: Tensor, target: Tensor) -> Outputs:
    return (F.multi_margin_loss(logits, target),)


# ---------------------------------------------------------------- the checks


def rows(misses: list[NearMiss]) -> Any:
    return pytest.mark.parametrize("miss", misses, ids=lambda miss: miss.fn.__name__)


UNTOUCHED = rows([m for m in NEAR_MISSES if not m.fused])
PARTLY = rows([m for m in NEAR_MISSES if m.fused])


def passes(miss: NearMiss) -> list[tuple[list[Any], list[Any], Outcome]]:
    """Each joint or inference graph of the function before and after the pass, and the answer."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found = []

    def look(gm: GraphModule) -> None:
        before = described(gm.graph)
        outcome = fuse(gm.graph, FuseConfig(FORMULAS, min_vocab=MIN_VOCAB))
        found.append((before, described(gm.graph), outcome))

    def partition(gm: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        look(gm)
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    def inference(gm: GraphModule, inputs: Any) -> Any:
        look(gm)
        return make_boxed_func(gm)

    def backend(gm: GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=lambda gm, _: make_boxed_func(gm),
            inference_compiler=inference,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )

    torch._dynamo.reset()
    torch.compile(miss.fn, backend=backend)(*miss.make())
    assert found, "no graph was seen"
    return found


def described(graph: Graph) -> list[Any]:
    return [(n.op, str(n.target), n.name, str(n.args), str(n.kwargs)) for n in graph.nodes]


@UNTOUCHED
def test_graph_is_left_as_it_was(miss: NearMiss) -> None:
    for before, after, outcome in passes(miss):
        assert outcome.fused == ()
        assert after == before
        reasons = [r.reason for r in outcome.rejections]
        assert any(miss.reason in reason for reason in reasons or [""]), reasons
        if not miss.reason:
            assert reasons == []


def values_and_gradients(miss: NearMiss, fn: Callable[..., Outputs]) -> list[Tensor]:
    """Outputs, gradients and what the arguments hold afterwards, with the same random numbers every time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = miss.make()
    outputs = fn(*given)
    wanted = [o for o in outputs if o.requires_grad]
    upstream = [draw(1, *o.shape, seed=2, grad=False)[0] for o in wanted]
    inputs = [v for v in given if v.requires_grad]
    grads = (
        torch.autograd.grad(wanted, inputs, upstream, allow_unused=True, materialize_grads=True)
        if wanted
        else ()
    )
    return [t.detach() for t in (*outputs, *grads, *given)]


def with_us_and_without(miss: NearMiss) -> Iterator[tuple[Tensor, Tensor]]:
    """Values and gradients under slime_fused, each with that of the same decompositions without our pass."""
    ours = torch.compile(miss.fn, backend="slime_fused", options=OPTIONS)
    theirs = torch.compile(miss.fn, backend=harness.PLAIN)
    return zip(values_and_gradients(miss, ours), values_and_gradients(miss, theirs), strict=True)


@UNTOUCHED
def test_result_is_torchs_own(miss: NearMiss) -> None:
    """Bit for bit, with the same random numbers, and the caller's logits changed alike."""
    for got, expected in with_us_and_without(miss):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@PARTLY
def test_result_beside_what_is_refused(miss: NearMiss) -> None:
    for got, expected in with_us_and_without(miss):
        assert got.dtype == expected.dtype
        # Order of summation only: a value that is missing or counted twice is off by more than 1e-3 of the largest.
        close = 1e-5 * float(expected.abs().max()) if expected.is_floating_point() else 0
        torch.testing.assert_close(got, expected, rtol=0, atol=close)


@rows(NEAR_MISSES)
def test_report_says_why(miss: NearMiss) -> None:
    torch._dynamo.reset()
    report = slime_compile.explain(miss.fn, **OPTIONS)(*miss.make())
    found = report.to_dict()
    assert found["fused"] == miss.fused, f"{report}"
    assert miss.reason in str(report)
    if miss.fused:
        assert found["wide_before"] > found["wide_after"]
    else:
        assert found["wide_before"] == found["wide_after"]
        with pytest.raises(AssertionError, match="fused"):
            report.assert_fused()
    told = [r for r in found["rejections"] if miss.reason and miss.reason in r["reason"]]
    assert bool(told) == bool(miss.reason)
    if told and not any(r["node"].startswith("primals") for r in told):
        assert any("test_near_misses.py" in r["source"] for r in told), told


def test_one_loss_is_fused_and_an_attention_beside_it_is_not() -> None:
    """A refusal is about its own root."""

    def both(query: Tensor, key: Tensor, value: Tensor, logits: Tensor, target: Tensor) -> Outputs:
        return (*attention(query, key, value), pick(logits.log_softmax(-1), target))

    torch._dynamo.reset()
    inputs = [*attention_inputs(), *logits_and_target()]
    report = slime_compile.explain(both, **OPTIONS)(*inputs).to_dict()
    assert report["fused"] == 2
    assert any("used in full" in r["reason"] for r in report["rejections"])
