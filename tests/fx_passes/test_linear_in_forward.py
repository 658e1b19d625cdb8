"""The gradient of a scalar loss, taken in forward while a chunk of logits is there; and losses that have to wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from slime_compile.ops import native, row_loop
from tests.cases.heads import values_of
from tests.cases.spellings import IGNORE, NV, Outputs, Spelling
from tests.fx_passes.test_linear import (
    VOCAB,
    compiled,
    example,
    full_logits,
    last_report,
    notes,
    small_chunks,
)
from tests.support import harness

__all__ = ["small_chunks"]

Loss = Callable[..., Outputs]


def always(fn: Loss, itemsize: int = 4, **more: Any) -> Callable[..., Any]:
    return compiled(fn, itemsize, grad_in_forward="always", **more)


# ---- losses that can --------------------------------------------------------------------------------------------


def cross_entropy(hidden: Tensor, weight: Tensor, ignored_target: Tensor) -> Outputs:
    return (F.cross_entropy(hidden @ weight.t(), ignored_target, ignore_index=IGNORE),)


def cross_entropy_summed(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Outputs:
    return (F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum"),)


def smoothed(hidden: Tensor, turned_weight: Tensor, target: Tensor) -> Outputs:
    return (F.cross_entropy(hidden @ turned_weight, target, label_smoothing=0.1),)


def frozen_weight(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return (F.cross_entropy(hidden @ weight.detach().t(), target),)


def policy(
    hidden: Tensor, weight: Tensor, target: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    log_probs, entropy = values_of(hidden @ weight.t(), target)
    ratio = (log_probs - log_probs.detach() - drift).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (-surrogate.mean() - 0.01 * entropy.mean(),)


def policy_near_its_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    drift: Tensor,
    advantages: Tensor,
    row_temperature: Tensor,
    mask: Tensor,
) -> Outputs:
    """Masked mean, temperature per row, the k3 estimate of the divergence; what is reported is detached."""
    logits = (hidden @ weight.t()).float() / row_temperature[:, None]
    log_probs, entropy = values_of(logits, target)
    far = log_probs.detach() + drift - log_probs
    kl = far.exp() - far - 1
    each = -log_probs * advantages + 0.1 * kl - 0.01 * entropy
    total = (each * mask).sum() / mask.sum().clamp(min=1)
    return total, entropy.detach().mean(), log_probs.detach()


def z_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = hidden @ weight.t()
    return (F.cross_entropy(logits, target) + 1e-2 * logits.logsumexp(-1).square().mean(),)


def loss_of_sequences(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, mask: Tensor
) -> Outputs:
    """Mean over each sequence first; advantages are those of a sequence."""
    log_probs, _ = values_of(F.linear(hidden, weight), target)
    each = -log_probs * advantages[:, :1] * mask
    return ((each.sum(-1) / mask.sum(-1)).mean(),)


def cross_entropy_of_some_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = (hidden @ weight.t())[:, 1:4].reshape(-1, weight.shape[0])
    return (F.cross_entropy(logits, target[:, 2:5].reshape(-1)),)


def policy_of_selected_columns(
    hidden: Tensor, weight: Tensor, target: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    """The column is selected, not squeezed: backward writes it into zeros."""
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    log_probs = log_p.gather(-1, target[:, None])[:, 0]
    ratio = (log_probs - log_probs.detach() - drift).exp()
    return (-(ratio * advantages).mean() + 0.01 * (log_p.exp() * log_p).sum(-1).mean(),)


def several_columns(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Outputs:
    """Of a row's columns some are read by themselves, some are summed, one is read twice."""
    log_p = (hidden @ weight.t()).log_softmax(-1)
    columns = torch.stack([target, (target + 1) % weight.shape[0], target // 2], -1)
    found = log_p.gather(-1, columns)
    some = found[:, 0] * advantages + found[:, 1:].exp().sum(-1) + found[..., -1].square()
    return (some.mean(),)


def ratio_times_advantages_of_sequences(
    hidden: Tensor, weight: Tensor, target: Tensor, drift: Tensor, advantages: Tensor, mask: Tensor
) -> Outputs:
    """What depends on the logits is multiplied by one number per sequence."""
    log_probs, _ = values_of(hidden @ weight.t(), target)
    ratio = (log_probs - log_probs.detach() - drift).exp()
    of_sequence = advantages[:, :1]
    each = torch.max(-ratio * of_sequence, -ratio.clamp(0.8, 1.2) * of_sequence)
    return ((each * mask).sum() / mask.sum().clamp(min=1),)


def policy_sample_by_sample(
    hidden: Tensor, weight: Tensor, target: Tensor, drift: Tensor, advantages: Tensor, mask: Tensor
) -> Outputs:
    """TRL's, verl's and OpenRLHF's log-probs: one logsumexp for each sample, to save memory."""
    logits = hidden @ weight.t()
    normalisers = torch.stack([sample.logsumexp(-1) for sample in logits])
    log_probs = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - normalisers
    ratio = (log_probs - log_probs.detach() - drift).exp()
    each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((each * mask).sum() / mask.sum(),)


def policy_sample_by_sample_with_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    """The entropy is of all samples at once, and both are of divided logits: their gradients are added up."""
    logits = (hidden @ weight.t()) / 0.7
    probs = logits.softmax(-1)
    entropy = logits.logsumexp(-1) - (probs * logits).sum(-1)
    normalisers = torch.stack([sample.logsumexp(-1) for sample in logits])
    log_probs = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - normalisers
    ratio = (log_probs - log_probs.detach() - drift).exp()
    each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (each.mean() - 0.01 * entropy.mean(),)


def log_probs_sample_by_sample(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor
) -> Outputs:
    """In half precision they take log-probs and the column of each sample."""
    found = []
    for sample, columns in zip(hidden @ weight.t(), target, strict=True):
        log_p = F.log_softmax(sample, -1)
        found.append(log_p.gather(-1, columns.unsqueeze(-1)).squeeze(-1))
    return (-(torch.stack(found) * advantages).mean(),)


def log_probs_in_two_parts(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor
) -> Outputs:
    logits = hidden @ weight.t()
    parts = zip(logits.split(5), target.split(5), strict=True)
    found = [part.log_softmax(-1).gather(-1, at[:, None])[:, 0] for part, at in parts]
    return (-(torch.cat(found) * advantages).mean(),)


CAN: list[tuple[Loss, str]] = [
    (cross_entropy, NV),
    (cross_entropy_summed, NV),
    (smoothed, NV),
    (frozen_weight, NV),
    (policy, NV),
    (policy_near_its_reference, NV),
    (z_loss, NV),
    (policy_of_selected_columns, NV),
    (several_columns, NV),
    (ratio_times_advantages_of_sequences, "[B,S,V]"),
    (loss_of_sequences, "[B,S,V]"),
    (policy, "[B,S,V]"),
    (cross_entropy_of_some_rows, "[B,S,V]"),
    (policy_sample_by_sample, "[B,S,V]"),
    (log_probs_sample_by_sample, "[B,S,V]"),
    (log_probs_in_two_parts, NV),
]
HALF = (torch.float32, torch.bfloat16)


def row_of(fn: Loss, shape: str = NV) -> Spelling:
    inputs = tuple(fn.__code__.co_varnames[: fn.__code__.co_argcount])
    return Spelling(fn.__name__, (), fn, shape, 1, inputs, data=("plain",))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("fn", "shape"), CAN, ids=[f"{fn.__name__}{shape}" for fn, shape in CAN])
def test_in_forward(fn: Loss, shape: str, dtype: torch.dtype, graphs: list[Graph]) -> None:
    row = row_of(fn, shape)
    harness.prepare(row)
    harness.compare(always(fn, dtype.itemsize), row, dtype, data=row.data)
    (note,) = notes(last_report())
    assert note.endswith("with the gradient computed in forward"), note
    assert not full_logits(graphs[-1])
    loops = graphs[-1].find_nodes(op="call_function", target=row_loop)
    assert [loop for loop in loops if "partitioner_tag" in loop.meta] == []


def test_samples_whose_gradients_are_added_to_others_wait() -> None:
    row = row_of(policy_sample_by_sample_with_entropy, "[B,S,V]")
    harness.prepare(row)
    harness.compare(always(row.fn), row, torch.float32, data=row.data)
    (note,) = notes(last_report())
    assert note.endswith("it needs sums over all rows of the loss")


def test_float64() -> None:
    row = row_of(policy)
    harness.compare(always(policy, 8), row, torch.float64, data=row.data)
    assert "computed in forward" in notes(last_report())[0]


@pytest.mark.parametrize(
    "fn", [policy_near_its_reference, policy_of_selected_columns, several_columns]
)
def test_any_number_of_rows(fn: Loss, graphs: list[Graph]) -> None:
    row = row_of(fn)
    harness.prepare(row)
    function = always(row.fn, dynamic=True)
    harness.compare(function, row, torch.float32, data=row.data, draws=2)
    made = len(graphs)
    harness.compare(function, row, torch.float32, data=row.data, draws=2, rows=harness.ROWS + 4)
    assert len(graphs) == made
    assert "computed in forward" in notes(last_report())[0]


@pytest.mark.parametrize("kernels", ["C++", "torch calls"])
@pytest.mark.parametrize("rows", [(6, 1), (2, 3, 1, 1), (1, 6)], ids=str)
def test_rows_of_one(rows: tuple[int, ...], kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coefficients [N, 1, ...] are coefficients [N, ...]."""
    if kernels == "torch calls":
        monkeypatch.setattr(native, "functions", lambda: None)

    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return (hidden @ weight.t()).log_softmax(-1).gather(-1, target.unsqueeze(-1)).sum()

    hidden, weight, target = example()
    count = math.prod(rows)
    given = (hidden[:count].detach().view(*rows, -1).requires_grad_(), weight)
    at = target[:count].view(rows)
    found, wanted = (
        torch.autograd.grad(each(*given, at), given)
        for each in (always(fn), torch.compiler.disable(fn))
    )
    assert "computed in forward" in notes(last_report())[0]
    for mine, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


def test_as_many_columns_as_rows() -> None:
    """A number per column is no number per row, also where a chunk is one row."""
    weights = torch.arange(1.0, 4.0)

    def fn(hidden: Tensor, weight: Tensor, columns: Tensor) -> Tensor:
        log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, columns)
        return (log_probs * weights).tanh().sum()

    hidden, weight, target = example(3)
    columns = torch.stack([target, target + 1, target // 2], -1) % VOCAB
    found, wanted = (
        torch.autograd.grad(each(hidden, weight, columns), (hidden, weight))
        for each in (always(fn, chunk_mib=4 * VOCAB), torch.compiler.disable(fn))
    )
    assert "computed in forward" in notes(last_report())[0]
    for mine, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


def test_under_inductor() -> None:
    row = row_of(policy)
    harness.prepare(row)
    harness.compare(always(policy, inner="inductor"), row, torch.float32, data=row.data, draws=2)
    assert "computed in forward" in notes(last_report())[0]


def test_verified() -> None:
    hidden, weight, target = example()
    always(cross_entropy, verify=True)(hidden, weight, target)
    assert "computed in forward" in notes(last_report())[0]


@pytest.mark.parametrize("factor", [0.0, -3.0])
def test_backward_multiplies_by_what_comes(factor: float) -> None:
    """The loss is scaled after the compiled function."""
    hidden, weight, target = example()
    mine, eager = (
        torch.autograd.grad(factor * fn(hidden, weight, target)[0], (hidden, weight))
        for fn in (always(cross_entropy), cross_entropy)
    )
    for one, other in zip(mine, eager, strict=True):
        torch.testing.assert_close(one, other)


# ---- losses that wait -------------------------------------------------------------------------------------------


def _per_token(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return values_of(hidden @ weight.t(), target)


def _two_losses(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    log_probs, entropy = values_of(hidden @ weight.t(), target)
    return log_probs.mean(), entropy.mean()


def _ratio_of_a_sequence(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    log_probs, _ = values_of(hidden @ weight.t(), target)
    return ((log_probs - 1).mean().exp(),)


def _columns_of_another_row(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """One row's log-prob is a factor of all."""
    log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, target[:, None])
    return ((log_probs[1] * log_probs[:, 0]).mean(),)


def _normalised(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    log_probs, _ = values_of(hidden @ weight.t(), target)
    return ((log_probs / log_probs.detach().norm()).sum(),)


def _checkpointed(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return (
        checkpoint(lambda h: F.cross_entropy(h @ weight.t(), target), hidden, use_reentrant=False),
    )  # type: ignore[return-value]


def _some_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    hidden, target = torch.cat([hidden, hidden]), torch.cat([target, target])
    # so nearly all that they are not taken before the matmul
    log_probs, _ = values_of((hidden @ weight.t())[1:], target[1:])
    return (log_probs.exp().mean(),)


def _ranked(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    """Each row's place among all."""
    log_probs, _ = values_of(hidden @ weight.t(), target)
    known, count = log_probs.detach(), len(target)
    place = (known.unsqueeze(0).expand(count, count) < known.unsqueeze(1)).sum(-1)
    return ((place * log_probs).mean(),)


Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


def _weighted(weights: Weights) -> Loss:
    """Log-probs times what is made of them: of two samples' [4], and of numbers [4, 2] that no logits are in."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        logits = (hidden.repeat(2, 1)[:8] @ weight.t()).view(2, 4, -1)
        log_probs, _ = values_of(logits, target.repeat(2)[:8].view(2, 4))
        given = weight[:8, 0].detach().view(4, 2)
        return ((weights(*log_probs.detach(), given).exp() * log_probs).mean(),)

    return loss


def _home(sample: Tensor, at: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(2, 4, dtype=dtype).select_scatter(sample, 0, at)


def _both_times(one: Tensor, other: Tensor, number: Tensor) -> Tensor:
    return torch.stack([one * number, other * number])


IN_ORDER: dict[str, Weights] = {
    "stacked": lambda one, other, _: torch.stack([one.tanh(), other.tanh()]),
    "joined": lambda one, other, _: torch.cat([one, other]).view(2, 4),
    "written": lambda one, other, _: _home(one, 0) + _home(other, 1),
    "given number": lambda one, other, given: _both_times(one, other, given[0, 0]),
    "beside another": lambda one, other, _: (
        _home(one, 0) + torch.stack([one.tanh(), other.tanh()]) + _home(other, 1)
    ),
}
OTHERWISE: dict[str, Weights] = {
    "taken away": lambda one, other, _: -_home(one, 0) - _home(other, 1),
    "beside another that is taken away": lambda one, other, _: (
        _home(one, 0) - torch.stack([one.tanh(), other.tanh()]) + _home(other, 1)
    ),
    "two at once": lambda one, other, _: (
        _home(one, 0) + _home(one.tanh(), 0) + _home(other.tanh(), 1) - -_home(other, 1)
    ),
    "multiples": lambda one, other, _: _home(one, 0) * 2 + _home(other, 1) * 2,
    "turned": lambda one, other, _: torch.stack([other, one]),
    "twice the same": lambda one, other, _: torch.stack([one, one]),
    "differing": lambda one, other, _: torch.stack([one, other * 2]),
    "of both": lambda one, other, _: torch.stack([one + other, other + one]),
    "with another": lambda one, other, _: torch.stack([one, torch.zeros_like(one)]),
    "only one": lambda one, other, _: _home(one, 0),
    "written turned": lambda one, other, _: _home(one, 1) + _home(other, 0),
    "written twice": lambda one, other, _: _home(one, 0) + _home(one, 0),
    "added and taken away": lambda one, other, _: _home(one, 0) - _home(other, 1),
    "different multiples": lambda one, other, _: _home(one, 0) * 2 + _home(other, 1) * 3,
    "infinite multiples": lambda one, other, _: (
        _home(one, 0) * math.inf + _home(other, 1) * math.inf
    ).nan_to_num(1),
    "unknown multiples": lambda one, other, given: (
        _home(one, 0) * given.t() + _home(other, 1) * given.t()
    ).nan_to_num(1),
    "one of two": lambda one, other, _: (
        _home(one, 0) + _home(one.tanh(), 0) + _home(other.tanh(), 1)
    ),
    "rounded": lambda one, other, _: (
        _home(one, 0, torch.bfloat16) + _home(other, 1, torch.bfloat16)
    ).float(),
    "of two dtypes": lambda one, other, _: (
        _home(one.bfloat16(), 0, torch.bfloat16)
        + torch.stack([one, other])
        + _home(other.bfloat16(), 1, torch.bfloat16)
        + torch.stack([one, other]).bfloat16()
    ),
    "pairs": lambda one, other, _: torch.stack(
        [(each[:, None] - each).tanh().sum(-1) for each in (one, other)]
    ),
    "given numbers": lambda one, other, given: torch.stack(
        [(each[:, None] + given).tanh().sum(-1) for each in (one, other)]
    ),
}


def _changed(change: Callable[[Tensor], Tensor]) -> Loss:
    """A loss whose backward changes the gradients of the log-probs, [N, 1]."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.view_as(values)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return change(grad)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, target[:, None])
        return (Changed.apply(log_probs).mean(),)

    return loss


def _joined_with_ones(grad: Tensor) -> Tensor:
    """The second of two columns is no multiple of the gradient."""
    return torch.ones_like(grad).expand(-1, 2).select_scatter(grad[:, 0], 1, 0).sum(-1, True)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "clipped": lambda grad: grad.clamp(-1e-2, 1e-2),
    "shifted": lambda grad: grad + 1,
    "shifted the other way": lambda grad: 1 - grad,
    "squared": lambda grad: grad * grad,
    "divided by itself": lambda grad: grad / grad,
    "by its sign": lambda grad: torch.where(grad > 0, grad, 2 * grad),
    "a column of two": _joined_with_ones,
}


WAIT = [
    (_per_token, "the gradient does not come from one scalar loss"),
    (_two_losses, "the gradient does not come from one scalar loss"),
    (_ratio_of_a_sequence, "it needs sums over all rows of the loss"),
    (_columns_of_another_row, "it needs sums over all rows of the loss"),
    (_normalised, "it needs sums over all rows of the loss"),
    (_checkpointed, "a checkpoint recomputes it in backward"),
    (_some_rows, "it needs sums over all rows of the loss"),
    (_ranked, "it needs sums over all rows of the loss"),
]


@pytest.mark.parametrize(("fn", "reason"), WAIT, ids=lambda each: getattr(each, "__name__", ""))
def test_waits(fn: Loss, reason: str) -> None:
    waits(fn, reason)


@pytest.mark.parametrize("weights", OTHERWISE.values(), ids=OTHERWISE)
def test_samples_that_are_put_together_otherwise_wait(weights: Weights) -> None:
    note = compared(_weighted(weights))
    assert "it needs sums over all rows of the loss" in note or "rows are broadcast" in note


@pytest.mark.parametrize(
    "together",
    [
        lambda x: torch.cat([x[:1], x[1:]]).view(-1),
        lambda x: torch.stack([each.view(-1) for each in x]),
        lambda x: torch.stack([each.view(5, 1) for each in x]),
    ],
)
def test_samples_that_are_put_together_and_returned_have_their_own_memory(
    together: Callable[[Tensor], Tensor],
) -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        log_p = (hidden @ weight.t()).log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
        return log_p, together(log_p)

    inputs = torch.randn(3, 5, 4), torch.randn(VOCAB, 4), torch.randint(VOCAB, (3, 5))
    first, other = compiled(loss)(*inputs)
    assert first.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_columns_of_some_samples() -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
        logits = (hidden.repeat(2, 1)[:9] @ weight.t()).view(3, 3, -1)
        first, last = (logits[at].gather(-1, target[:3, None]) for at in (0, 2))
        return (logits.logsumexp(-1).mean() - first.mean() - last.exp().mean(),)

    compared(loss)


@pytest.mark.parametrize("weights", IN_ORDER.values(), ids=IN_ORDER)
def test_samples_that_are_put_together(weights: Weights) -> None:
    assert "computed in forward" in compared(_weighted(weights))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_not_linear_in_the_gradient_waits(change: Callable[[Tensor], Tensor]) -> None:
    waits(_changed(change), "is not linear in the loss's gradient")


def waits(fn: Loss, reason: str) -> None:
    """The reason is in the report, and the gradient is right."""
    note = compared(fn)
    assert "the gradient is computed in backward: " in note
    assert reason in note


def compared(fn: Loss) -> str:
    """What the report says of a loss whose gradient is right."""
    hidden, weight, target = example()
    got, want = always(fn)(hidden, weight, target), fn(hidden, weight, target)
    total, plain = (sum(3 * each.sum() for each in outputs) for outputs in (got, want))
    mine = torch.autograd.grad(total, (hidden, weight))  # type: ignore[arg-type]
    eager = torch.autograd.grad(plain, (hidden, weight))  # type: ignore[arg-type]
    for one, other in zip(mine, eager, strict=True):
        torch.testing.assert_close(one, other)
    (note,) = notes(last_report())
    return note


def test_float16_waits() -> None:
    """Before the loss is scaled its gradient has no room there."""
    hidden, weight, target = (t.detach().half() if t.is_floating_point() else t for t in example())
    always(cross_entropy, 2)(hidden.requires_grad_(), weight.requires_grad_(), target)
    assert "float16 has no room" in notes(last_report())[0]


@pytest.mark.parametrize(
    ("mode", "dtype", "said"),
    [
        ("auto", torch.float32, "with the gradient computed in forward"),
        ("auto", torch.bfloat16, "its sum would take"),
        ("always", torch.bfloat16, "with the gradient computed in forward"),
        ("never", torch.float32, "option grad_in_forward is never"),
    ],
)
def test_option(mode: str, dtype: torch.dtype, said: str) -> None:
    hidden, weight, target = (
        t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in example()
    )
    compiled(cross_entropy, dtype.itemsize, grad_in_forward=mode)(hidden, weight, target)
    assert said in notes(last_report())[0]
