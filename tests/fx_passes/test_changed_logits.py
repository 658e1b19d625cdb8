"""Logits that are given and that the compiled function itself changes in place: values, gradients and the change stay.

Backward runs after the change; a gradient that reads the logits there would read them changed. Each function over plain
given logits (no leaf), training and not; megatron-core's own cross entropies in the same way.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import harness

ROWS, VOCAB = 5, 64
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


FUNCTIONS = [
    divided_before,
    divided_after,
    divided_through_data,
    zeroed_after,
    masked,
    a_view_is_changed,
    cross_entropy_in_place,
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
    return [value.detach(), grad, after]


def _check(
    fn: Callable[..., Tensor],
    vocab: int,
    dtype: torch.dtype,
    train: bool,
    options: dict[str, Any],
    truth: Callable[..., Tensor] | None = None,
) -> None:
    """`truth` is what `fn` means, where `fn` itself has no float64 (what it leaves in the logits aside)."""
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(ROWS, vocab, generator=draw)).to(dtype)
    target = torch.randint(vocab, (ROWS,), generator=draw)
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="slime_fused", options=options)
    got = _outcome(compiled, logits, target, train)
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles its own pieces
        eager = _outcome(fn, logits, target, train)
        with harness.in_float64():
            true = _outcome(truth or fn, logits.double(), target, train)
    if truth is not None:
        true[-1] = eager[-1].double()
    names = ("value", "gradient", "logits") if train else ("value", "logits")
    for name, a, e, t in zip(names, got, eager, true, strict=True):
        assert a.dtype == e.dtype
        harness.no_worse_than_eager(a, e, t, e.dtype, name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("train", [True, False], ids=["train", "no-grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_value_gradient_and_change_are_eagers(
    fn: Callable[..., Tensor], dtype: torch.dtype, train: bool, options: dict[str, Any]
) -> None:
    if train:
        _check(fn, VOCAB, dtype, True, {**harness.OPTIONS, **options})
    else:
        with torch.no_grad():
            _check(fn, VOCAB, dtype, False, {**harness.OPTIONS, **options})


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
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
    report = explain(cross_entropy_in_place, **harness.OPTIONS)(given, target)
    reasons = {r["reason"] for r in report.to_dict()["rejections"]}
    assert (
        "the function changes these logits in place, and backward would read them changed"
        in reasons
    )
