"""What a compiled function returns stays as many tensors as it was, and nobody's argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import slime_compile
from bench.measure.measure import profiled_peak
from tests.support import harness

ROWS, VOCAB = 6, 41
HEAD = torch.linspace(-1, 1, 8 * VOCAB).view(8, VOCAB)


def token(log_probs: Tensor, target: Tensor) -> Tensor:
    return log_probs.gather(-1, target[:, None])


def new_and_old(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """As PPO's first step computes them."""
    new = token(x.log_softmax(-1), target)
    with torch.no_grad():
        old = token(x.log_softmax(-1), target)
    return new, old


def old_and_new(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return tuple(reversed(new_and_old(x, target, weight)))


def views_of_both(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The memory is the same, the nodes are not."""
    new, old = new_and_old(x, target, weight)
    return new[:, 0], old.squeeze(-1), old


def a_metric_of_it(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    given = x.detach()
    entropy = (x.softmax(-1) * x.log_softmax(-1)).sum(-1)
    return entropy, (given.softmax(-1) * given.log_softmax(-1)).sum(-1), x.logsumexp(-1).mean()


def detached_inside(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Equal values with other gradients."""
    log_probs, probs = x.log_softmax(-1), x.softmax(-1)
    return (probs * log_probs).sum(-1), (probs.detach() * log_probs).sum(-1)


def maxima(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        peak = x.amax(-1)
    return x.amax(-1), peak, x.logsumexp(-1)


def predictions(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return x.argmax(-1), (2 * x).argmax(-1), x.logsumexp(-1)


def weights_come_back(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A softmax sums to its weight, which is the caller's."""
    return (x.softmax(-1) * weight[:, None]).sum(-1), x.logsumexp(-1)


def one_of_them_is_a_view(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """What shares memory in eager code does here."""
    log_prob = token(x.log_softmax(-1), target)
    return log_prob, log_prob.detach(), weight[1:]


def a_column(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A view of the caller's logits."""
    return x.chunk(2)[-1][:, 3], x.logsumexp(-1)


def columns_of_results(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Views of a copy of the logits, and of log-probs that leave."""
    given, log_probs = torch.cat([x[:2], x[2:]]).detach(), x.log_softmax(-1)
    return given[:, 1], given, log_probs[:, 2], log_probs, given.logsumexp(-1)


def an_inverse(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A result that the operator for gradients computes."""
    probs = x.softmax(-1)
    return token(probs, target), x / probs


def sums_of_exponentials(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Backward reads the second as the sum of the first."""
    shifted = x - x.amax(-1, keepdim=True)
    return shifted.logsumexp(-1), shifted.exp().sum(-1).log().detach()


def what_is_copied_over_another(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Backward reads the copy, which is the result's value."""
    state, squares = torch.zeros(ROWS), weight.square()
    with torch.no_grad():
        state.copy_(squares)
    return (x.softmax(-1).clamp(max=0.5) - state[:, None]).exp().sum(-1), squares, x.logsumexp(-1)


def a_column_and_a_part_of_it(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Both are views of an input, one through the other."""
    column = x.chunk(2)[-1][..., 0]
    return column, column[::2][1:], x.softmax(-1).clamp(max=0.5).sum(-1), x.logsumexp(-1)


def one_column_by_two_ways(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Views of one value, with elements in common; torch knows no base of parts."""
    log_probs = x.log_softmax(-1)
    columns = log_probs.select(-1, 1), log_probs.narrow(-1, 1, 1)
    left, right = (column.split(2)[0] for column in columns)
    return left, right.flatten()[1:], x.logsumexp(-1)


def a_threshold(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Of top-k, and the log-normaliser of what is not below it."""
    least = x.detach().topk(9, -1).values[:, -1:]
    return least, x.masked_fill(x < least, -math.inf).logsumexp(-1)


def a_part_of_a_mixture(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    teacher = (weight[:, None] * torch.arange(VOCAB)).softmax(-1).log()
    both = torch.stack([teacher, x]).sum(0).masked_fill(weight[:, None] < 0.5, 0)
    return teacher, both.sum(-1), both.logsumexp(-1)


def parts_of_logits(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Made inside, which backward reads; the parts overlap."""
    made = x.cumsum(-1)
    return token(made.log_softmax(-1), target), made.detach()[1:4], made.detach()[2:5]


def parts_of_equal_heads(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The same rows of the same logits, each time multiplied anew."""
    hidden = x[:, :8]
    return (hidden * 1 @ HEAD)[1:], (hidden * 1 @ HEAD)[1:]


def logits_of_an_equal_head(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Backward reads the other product."""
    hidden = x[:, :8]
    returned = (hidden * 1 @ HEAD).detach()
    return token((hidden * 1 @ HEAD).log_softmax(-1), target), returned


def numbers_of_joined_heads(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Each half is computed on its own, and what is computed twice is two results."""
    hidden = x[:, :8]
    halves = [hidden * 1 @ HEAD, (hidden * 1 @ HEAD) / 2]
    return (
        torch.cat(halves).logsumexp(-1),
        torch.cat(halves).logsumexp(-1),
        halves[0].tanh().sum(-1),
    )


def shifted_logits(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The logits have a gradient of their own, which needs no number of the shift."""
    shift = weight + 1
    return x.logsumexp(-1).sum(), shift, x - shift[:, None]


FUNCTIONS = (
    parts_of_logits,
    numbers_of_joined_heads,
    shifted_logits,
    parts_of_equal_heads,
    logits_of_an_equal_head,
    one_column_by_two_ways,
    a_threshold,
    a_part_of_a_mixture,
    a_column,
    a_column_and_a_part_of_it,
    columns_of_results,
    an_inverse,
    new_and_old,
    old_and_new,
    views_of_both,
    a_metric_of_it,
    detached_inside,
    maxima,
    predictions,
    weights_come_back,
    one_of_them_is_a_view,
    sums_of_exponentials,
    what_is_copied_over_another,
)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(ROWS, VOCAB, generator=draw)).requires_grad_()
    return x, torch.randint(VOCAB, (ROWS,), generator=draw), torch.rand(ROWS, generator=draw)


def facts(fn: Callable[..., tuple[Tensor, ...]]) -> dict[str, Any]:
    """What a caller sees of the results beside their values."""
    args = inputs()
    found = fn(*args)
    memory = [each.untyped_storage().data_ptr() for each in (*found, *args)]
    loss = sum((at + 1) * each.sum() for at, each in enumerate(found) if each.requires_grad)
    (grad,) = torch.autograd.grad(loss, args[0])
    return {
        "values": [each.detach().clone() for each in found],
        "gradient": grad,
        "requires_grad": [each.requires_grad for each in found],
        "memory": [[left == right for left in memory] for right in memory],
    }


@harness.each_inner
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_results_are_those_of_eager_code(fn: Callable[..., tuple[Tensor, ...]], inner: str) -> None:
    torch._dynamo.reset()
    options = {**harness.OPTIONS, "inner": inner}
    eager, got = facts(fn), facts(torch.compile(fn, backend="slime_fused", options=options))
    for name in ("requires_grad", "memory"):
        assert got[name] == eager[name], name
    for name in ("values", "gradient"):
        torch.testing.assert_close(got[name], eager[name], rtol=1e-4, atol=1e-5)


VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "rows": lambda made: (made.detach()[1:], made.detach()[:3]),
    "all of it": lambda made: (made.detach(), made.detach()),
    "columns": lambda made: (made.detach()[:, 1:], made.detach()[:, :30]),
    "turned": lambda made: (made.detach().t(), made.detach().view(2, 3, VOCAB)),
    "columns of a softmax": lambda made: (lambda p: (p[:, 3:], p[:, :5]))(
        made.detach().softmax(-1)
    ),
    "rows of log-probs": lambda made: (lambda p: (p[1:], p[:, 2:], p.unbind(0)[2]))(
        made.log_softmax(-1).detach()
    ),
}


@harness.each_inner
@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_results_of_a_loop_share_memory_as_in_eager_code(
    views: Callable[[Tensor], tuple[Tensor, ...]], inner: str
) -> None:
    """A loop makes what they are views of, once."""
    head = torch.ones(8, VOCAB).cumsum(-1) / VOCAB

    def fn(x: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        made = x[:, :8] @ head
        return *views(made), token(made.log_softmax(-1), target)

    torch._dynamo.reset()
    options = {**harness.OPTIONS, "inner": inner, "chunk_mib": 2 * VOCAB * 4}
    with harness.chunks_in_bytes():
        got = facts(torch.compile(fn, backend="slime_fused", options=options))
    eager = facts(fn)
    assert got["memory"] == eager["memory"]
    for name in ("values", "gradient"):
        torch.testing.assert_close(got[name], eager[name], rtol=1e-4, atol=1e-5)


def gradient_beside_changed_results(fn: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    """That of the results that have one, when the caller writes over all others first."""
    args = inputs()
    found = fn(*args)
    loss = sum((at + 1) * each.sum() for at, each in enumerate(found) if each.requires_grad)
    for each in found:
        if not each.requires_grad:
            each.fill_(3)
    (grad,) = torch.autograd.grad(loss, args[0])
    return grad


@harness.each_inner
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_results_that_are_changed_change_no_gradient(
    fn: Callable[..., tuple[Tensor, ...]], inner: str
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="slime_fused", options={**harness.OPTIONS, "inner": inner})
    got, expected = gradient_beside_changed_results(compiled), gradient_beside_changed_results(fn)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


SHIFTED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:-1],
    "of sequences": lambda x: x.view(2, -1, VOCAB)[:, :-1],
    "one sequence": lambda x: x.view(2, -1, VOCAB)[1],
}


@pytest.mark.parametrize("made", [False, True], ids=["given", "made inside"])
@pytest.mark.parametrize("shift", SHIFTED.values(), ids=SHIFTED)
def test_shifted_logits_for_a_metric(shift: Callable[[Tensor], Tensor], made: bool) -> None:
    """Part of the logits comes back: their gradient is made at once, for all rows, and is no part of another one."""

    def fn(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        shifted = shift(x + 1 if made else x)
        rows = shifted.reshape(-1, VOCAB)
        return token(rows.log_softmax(-1), target[: len(rows)]).sum(), shifted

    x, target, _ = inputs()
    compiled = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    torch._dynamo.reset()
    (loss, logits), (expected, eager) = compiled(x, target), fn(x, target)
    torch.testing.assert_close([loss, logits], [expected, eager])
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, x))
    assert made or logits._is_view()  # torch knows no base of a part of what is made inside
    (graph,) = slime_compile.reports()[-1].graphs
    assert graph.wide_after == 0, graph
    if not made:  # nor does a gradient come in for it
        (gradient,) = (each for each in graph.values if each.kind == "gradient")
        assert gradient.shape in (f"[{ROWS}, {VOCAB}]", f"[2, {ROWS // 2}, {VOCAB}]")


@pytest.mark.thorough  # inductor compiles
def test_shifted_logits_of_a_head_for_a_metric() -> None:
    """The gradient that comes in for them is added where the one of all rows is made: no more than without us."""

    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        shifted = (hidden @ weight.t())[:, :-1]
        rows = shifted.reshape(-1, shifted.shape[-1])
        return torch.nn.functional.cross_entropy(rows, target[:, 1:].flatten()), shifted

    drawn = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(s, generator=drawn) for s in ([2, 128, 32], [8192, 32]))
    target = torch.randint(8192, (2, 128), generator=drawn)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    peaks: dict[str, float] = {}
    for backend in ("inductor", "slime_fused"):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=backend)

        def step(run: Callable[..., tuple[Tensor, Tensor]] = compiled) -> None:
            loss, _ = run(*leaves, target)
            torch.autograd.grad(loss, leaves)

        step()
        peaks[backend] = profiled_peak(step) / (256 * 8192 * 4)
    assert peaks["slime_fused"] < peaks["inductor"] + 0.1, peaks


def test_a_result_that_is_changed_changes_no_other() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(predictions, backend="slime_fused", options=harness.OPTIONS)
    args = inputs()
    first, second, _ = compiled(*args)
    expected = second.clone()
    first.fill_(-100)
    assert torch.equal(second, expected)
    total, _ = torch.compile(weights_come_back, backend="slime_fused", options=harness.OPTIONS)(
        *args
    )
    total.detach().zero_()
    assert args[2].all(), "the caller's weights"
