"""Logits that are given and that the compiled function itself changes in place: values, gradients and the change stay.

Backward runs after the change; a gradient that reads the logits there would read them changed. Each function over plain
given logits (no leaf), training and not; megatron-core's own cross entropies in the same way.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import harness

ROWS, VOCAB, DRAWS = 5, 64, 16
OPTIONS = ({}, {"consume_logits": True}, {"save": "softmax"}, {"verify": True})


def _token(log_probs: Tensor, target: Tensor) -> Tensor:
    return log_probs.gather(-1, target[:, None]).squeeze(-1)


def divided_before(logits: Tensor, target: Tensor) -> Tensor:
    logits.div_(0.7)
    return _token(logits.log_softmax(-1), target)


def divided_after(logits: Tensor, target: Tensor) -> Tensor:
    log_prob = _token(logits.clone().log_softmax(-1), target)
    with torch.no_grad():
        logits.div_(0.7)
    return log_prob


def divided_through_data(logits: Tensor, target: Tensor) -> Tensor:
    log_prob = _token(logits.clone().log_softmax(-1), target)
    logits.data.mul_(3)
    return log_prob


def zeroed_after(logits: Tensor, target: Tensor) -> Tensor:
    """What nothing but the output needs is read before the logits are gone."""
    log_prob = logits.log_softmax(-1).gather(-1, target[:, None])
    with torch.no_grad():
        logits.zero_()
    return log_prob


def divided_after_a_view(logits: Tensor, target: Tensor) -> Tensor:
    log_prob = _token(logits[None].log_softmax(-1)[0], target)
    with torch.no_grad():
        logits.div_(0.7)
    return log_prob


def masked(logits: Tensor, target: Tensor) -> Tensor:
    logits.masked_fill_(torch.arange(VOCAB) > VOCAB - 3, -1e4)
    return _token(logits.log_softmax(-1), target.clamp(max=VOCAB - 4))


def a_view_is_changed(logits: Tensor, target: Tensor) -> Tensor:
    logits[1:].div_(0.7)
    log_probs = logits.log_softmax(-1)
    return _token(log_probs, target) - (log_probs.exp() * log_probs).sum(-1)


class InPlaceCrossEntropy(torch.autograd.Function):
    """As Megatron writes it: the softmax is computed in the logits' own memory and kept there for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float()
        logits -= logits.max(-1, keepdim=True).values
        chosen = _token(logits, target).clone()
        total = torch.exp(logits, out=logits).sum(-1, keepdim=True)
        loss = total.squeeze(-1).log() - chosen
        ctx.save_for_backward(logits.div_(total), target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, target = ctx.saved_tensors
        softmax[torch.arange(len(target)), target] -= 1
        return softmax.mul_(grad[:, None]), None


def cross_entropy_in_place(logits: Tensor, target: Tensor) -> Tensor:
    return InPlaceCrossEntropy.apply(logits, target)


class LeavesExponentials(torch.autograd.Function):
    """ROLL's: what is left in the logits is divided by its sum in backward, in place too."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shift: bool) -> Tensor:
        if shift:
            logits -= logits.max(-1, keepdim=True).values
        chosen = _token(logits, target)
        total = torch.exp(logits, out=logits).sum(-1, keepdim=True)
        ctx.save_for_backward(logits, total, target)
        return chosen - total.log().squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        exponentials, total, target = ctx.saved_tensors
        gradient = exponentials.div_(total).neg_()
        gradient[torch.arange(len(target)), target] += 1
        return gradient.mul_(grad[:, None]), None, None


def exponentials_are_left(logits: Tensor, target: Tensor) -> Tensor:
    return LeavesExponentials.apply(logits, target, True)


def exponentials_of_the_logits_are_left(logits: Tensor, target: Tensor) -> Tensor:
    return LeavesExponentials.apply(logits, target, False)


class LeavesSquares(torch.autograd.Function):
    """The exponentials of a sum, whose squares are left in the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        exponentials = logits.exp()
        ctx.save_for_backward(exponentials)
        logits.mul_(2).exp_()
        return exponentials.sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (exponentials,) = ctx.saved_tensors
        return exponentials * grad[:, None]


def another_power_is_left(logits: Tensor, target: Tensor) -> Tensor:
    return LeavesSquares.apply(logits)


class LeavesSoftmax(torch.autograd.Function):
    """Cross entropy that leaves its softmax, rounded to the logits' dtype, and keeps its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        wide = logits.float()
        log_probs = wide - wide.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(log_probs.exp(), target)
        loss, left = -_token(log_probs, target), (wide / temperature).softmax(-1)
        logits.zero_().add_(left)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, target = ctx.saved_tensors
        hit = torch.zeros_like(softmax).scatter(-1, target[:, None], 1.0)
        return (softmax - hit) * grad[:, None], None, None


def rounded_where_it_is_left(logits: Tensor, target: Tensor) -> Tensor:
    """A gradient from the bfloat16 softmax would be less exact than the program's own."""
    return LeavesSoftmax.apply(logits, target, 1.0)


def another_softmax_is_left(logits: Tensor, target: Tensor) -> Tensor:
    return LeavesSoftmax.apply(logits, target, 2.0)


class InPlaceEverywhere(torch.autograd.Function):
    """No copy, whatever the dtype; and an entropy, whose gradient is the softmax that is left times its logarithm."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logits -= logits.max(-1, keepdim=True).values
        chosen = _token(logits, target)
        logits.exp_()
        total = logits.sum(-1, keepdim=True)
        logits.div_(total)
        expected = (logits * (logits.log())).sum(-1, keepdim=True)
        ctx.save_for_backward(logits, target, expected)
        return chosen - total.log().squeeze(-1) - expected.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        softmax, target, expected = ctx.saved_tensors
        hit = torch.zeros_like(softmax).scatter(-1, target[:, None], 1.0)
        return (hit - softmax - softmax * (softmax.log() - expected)) * grad[:, None], None


def everything_in_place(logits: Tensor, target: Tensor) -> Tensor:
    return InPlaceEverywhere.apply(logits, target)


def two_losses(logits: Tensor, target: Tensor) -> Tensor:
    """An entropy over a copy, then the logits themselves, then a loss over what is left in them."""
    entropy = torch.distributions.Categorical(logits=logits.clone(), validate_args=False).entropy()
    loss = InPlaceCrossEntropy.apply(logits, target)
    with torch.no_grad():
        left = logits.log_softmax(-1).sum(-1)
    return loss - 0.1 * entropy + left


class ChangesInBackward(torch.autograd.Function):
    """slime's entropy: backward subtracts in the logits that were given, and leaves them so."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        softmax = logits.softmax(-1)
        expected = (softmax * logits).sum(-1, keepdim=True)
        ctx.save_for_backward(logits, softmax, expected)
        return (logits.logsumexp(-1, keepdim=True) - expected).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, softmax, expected = ctx.saved_tensors
        logits.sub_(expected)
        return softmax.mul_(logits).mul_(-grad[:, None])


class ChangesBack(ChangesInBackward):
    """verl's: subtracts, and adds again."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, softmax, expected = ctx.saved_tensors
        logits.sub_(expected)
        softmax.mul_(logits).mul_(-grad[:, None])
        logits.add_(expected)
        return softmax


class ReadsAndChangesInBackward(ChangesInBackward):
    """What is computed element by element of the logits before the change is wanted after it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, softmax, expected = ctx.saved_tensors
        before = logits.cos()
        logits.sub_(expected)
        return softmax.mul_(logits).mul_(-grad[:, None]) + before


class ChangesSomeInBackward(ChangesInBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, softmax, expected = ctx.saved_tensors
        gradient = softmax * (logits - expected) * -grad[:, None]
        logits[1:3].mul_(2)
        return gradient


class ChangesToTheGradient(ChangesInBackward):
    """The gradient itself is what is left in the logits."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        logits, softmax, expected = ctx.saved_tensors
        logits.sub_(expected).mul_(softmax).mul_(-grad[:, None])
        return logits.clone()


def changed_in_backward(logits: Tensor, target: Tensor) -> Tensor:
    return ChangesInBackward.apply(logits)


def changed_back(logits: Tensor, target: Tensor) -> Tensor:
    return ChangesBack.apply(logits)


def read_and_changed_in_backward(logits: Tensor, target: Tensor) -> Tensor:
    return ReadsAndChangesInBackward.apply(logits)


def some_changed_in_backward(logits: Tensor, target: Tensor) -> Tensor:
    return ChangesSomeInBackward.apply(logits)


def changed_to_the_gradient(logits: Tensor, target: Tensor) -> Tensor:
    return ChangesToTheGradient.apply(logits)


def changed_in_backward_beside_another_loss(logits: Tensor, target: Tensor) -> Tensor:
    return ChangesInBackward.apply(logits) + _token(logits.log_softmax(-1), target)


IN_BACKWARD = [
    changed_in_backward,
    changed_back,
    read_and_changed_in_backward,
    some_changed_in_backward,
    changed_to_the_gradient,
    changed_in_backward_beside_another_loss,
]


FUNCTIONS = [
    rounded_where_it_is_left,
    another_softmax_is_left,
    everything_in_place,
    two_losses,
    *IN_BACKWARD,
    divided_before,
    divided_after,
    divided_after_a_view,
    divided_through_data,
    zeroed_after,
    masked,
    a_view_is_changed,
    cross_entropy_in_place,
    exponentials_are_left,
    exponentials_of_the_logits_are_left,
    another_power_is_left,
]


def _outcome(fn: Callable[..., Tensor], leaf: Tensor, target: Tensor, train: bool) -> list[Tensor]:
    """The value, the gradient and what is in the logits after forward."""
    leaf = leaf.clone().requires_grad_(train)
    given = leaf * 1
    value = fn(given, target)
    after = given.detach().clone()
    if not train:
        return [value, after]
    weights = torch.linspace(0.5, 1.5, ROWS, dtype=value.dtype)
    (grad,) = torch.autograd.grad((value.view(ROWS) * weights).sum(), leaf)
    return [value.detach(), grad, after, given.detach()]


def _check(
    fn: Callable[..., Tensor],
    vocab: int,
    dtype: torch.dtype,
    train: bool,
    options: dict[str, Any],
    truth: Callable[..., Tensor] | None = None,
) -> None:
    """`truth` is what `fn` means, where `fn` itself has no float64 (what it leaves in the logits aside)."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="slime_fused", options=options)
    names = ("value", "gradient", "left in forward", "left") if train else ("value", "left")
    if options.get("consume_logits"):  # what backward leaves in the logits is the gradient then
        names = names[:3]
    pools: dict[str, harness.Pool] = {}
    draw = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        logits = (3 * torch.randn(ROWS, vocab, generator=draw)).to(dtype)
        target = torch.randint(vocab, (ROWS,), generator=draw)
        got = _outcome(compiled, logits, target, train)
        with torch.compiler.set_stance("force_eager"):  # Megatron compiles its own pieces
            eager = _outcome(fn, logits, target, train)
            with harness.in_float64():
                true = _outcome(truth or fn, logits.double(), target, train)
        for name, a, e, t in zip(names, got, eager, true, strict=False):
            if truth is not None and "left" in name:
                torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)
            else:
                pools.setdefault(name, harness.Pool()).add(a, e, t)
    for name, pool in pools.items():
        pool.check(name)


def _rows() -> Iterator[Any]:
    """All; those that are not slow: each function in both dtypes with two options in turn, once without gradients."""
    every = itertools.product(FUNCTIONS, (torch.float32, torch.bfloat16), (True, False), OPTIONS)
    for fn, dtype, train, options in every:
        turn = (FUNCTIONS.index(fn) + OPTIONS.index(options)) % 2 == (dtype is torch.bfloat16)
        quick = turn and (train or not options)
        name = f"{fn.__name__}-{dtype}-{'train' if train else 'no-grad'}-{options}"
        marks = () if quick else pytest.mark.slow
        yield pytest.param(fn, dtype, train, options, id=name, marks=marks)


@pytest.mark.parametrize(("fn", "dtype", "train", "options"), list(_rows()))
def test_value_gradient_and_change_are_eagers(
    fn: Callable[..., Tensor], dtype: torch.dtype, train: bool, options: dict[str, Any]
) -> None:
    if train:
        _check(fn, VOCAB, dtype, True, {**harness.OPTIONS, **options})
    else:
        with torch.no_grad():
            _check(fn, VOCAB, dtype, False, {**harness.OPTIONS, **options})


@pytest.mark.thorough
@pytest.mark.parametrize("fn", IN_BACKWARD)
def test_changes_in_backward_under_inductor(fn: Callable[..., Tensor]) -> None:
    _check(fn, VOCAB, torch.float32, True, {**harness.OPTIONS, "inner": "inductor"})


def _twice(loss: Tensor, leaf: Tensor) -> None:
    for _ in range(2):
        torch.autograd.grad(loss, leaf, retain_graph=True)


@pytest.mark.parametrize(
    "fn", [cross_entropy_in_place, changed_in_backward, changed_to_the_gradient]
)
def test_what_eager_refuses_is_refused(fn: Callable[..., Tensor]) -> None:
    """Logits that are changed again before backward, and backward twice, where it reads what it has changed."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="slime_fused", options=dict(harness.OPTIONS))
    target = torch.arange(ROWS)
    for each in (fn, compiled):
        leaf = torch.linspace(-2, 2, ROWS * VOCAB).view(ROWS, VOCAB).requires_grad_()
        given = leaf * 1
        loss = each(given, target).sum()
        with torch.no_grad():
            given.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, leaf)
        loss = each(leaf * 1, target).sum()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|donated buffer"):
            _twice(loss, leaf)


def test_a_confident_row_keeps_its_gradient() -> None:
    """p - 1 of a probability near 1: what is left in bfloat16 logits is rounded to 1, the program's own p is not."""
    leaf = torch.zeros(ROWS, VOCAB, dtype=torch.bfloat16)
    leaf[:, 3] = 11.0
    leaf.requires_grad_()
    fn = torch.compile(
        rounded_where_it_is_left, backend="slime_fused", options=dict(harness.OPTIONS)
    )
    target = torch.full((ROWS,), 3)
    (grad,) = torch.autograd.grad(fn(leaf * 1, target).sum(), leaf)
    true = leaf.double().softmax(-1)[:, 3] - 1
    torch.testing.assert_close(grad[:, 3].double(), true, rtol=0.01, atol=0)


@harness.each_inner
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_megatrons_own_cross_entropy_on_given_logits(fused: bool, inner: str) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    harness.world()
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        if fused:
            group = parallel_state.get_tensor_model_parallel_group()
            return fused_vocab_parallel_cross_entropy(logits[:, None], target[:, None], group)
        return vocab_parallel_cross_entropy(logits[:, None], target[:, None])

    def meant(
        logits: Tensor, target: Tensor
    ) -> Tensor:  # the fused one rounds its gradient to bfloat16
        return torch.nn.functional.cross_entropy(logits, target, reduction="none")[:, None]

    _check(loss, 1030, torch.float32, True, {"strict": True, "inner": inner}, meant)


def test_report_says_why_the_given_logits_are_not_what_is_kept() -> None:
    from slime_compile import explain

    given = torch.randn(ROWS, VOCAB, requires_grad=True) * 1
    target = torch.randint(VOCAB, (ROWS,))
    report = explain(divided_after, **harness.OPTIONS)(given, target)
    reasons = {r["reason"] for r in report.to_dict()["rejections"]}
    assert (
        "the function changes these logits in place, and backward would read the new values"
        in reasons
    )
