"""Deferred logits in a compiled loss: the head is in the graph, values and gradients are those without us."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import slime_compile
from slime_compile import DeferredLogits, defer_logits, with_tensors
from tests.deferred.models import (
    BATCH,
    LOSSES,
    VOCAB,
    CappedModel,
    Model,
    assert_fused,
    causal,
    compiled,
    fresh,
    gradients,
    policy,
    tokens,
)
from tests.support.harness import each_inner

__all__ = ["fresh", "tokens"]


def same(mine: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(mine, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@each_inner
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(loss: Callable[..., Tensor], inner: str, tokens: Tensor) -> None:
    model = Model()
    want = gradients(model, lambda: loss(model(tokens), tokens))
    defer_logits(model)
    function = compiled(loss, inner=inner)
    same(gradients(model, lambda: function(model(tokens), tokens)), want)
    assert_fused()


@pytest.mark.parametrize(
    "model", [Model(tied=True), Model(bias=True), CappedModel()], ids=["tied", "bias", "softcap"]
)
def test_models(model: nn.Module, tokens: Tensor) -> None:
    want = gradients(model, lambda: policy(model(tokens), tokens))
    function = compiled(policy)
    with defer_logits(model):
        same(gradients(model, lambda: function(model(tokens), tokens)), want)
    assert_fused()
    assert isinstance(model(tokens), Tensor)


@pytest.mark.parametrize("around_loss", [False, True])
def test_autocast(around_loss: bool, tokens: Tensor) -> None:
    """The logits are of the line of the head, wherever they are read: in bfloat16, or in float32."""
    model = Model()

    def run(loss: Callable[..., Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not around_loss):
            logits = model(tokens)
        assert logits.dtype == (torch.float32 if around_loss else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=around_loss):
            return loss(logits, tokens)

    want = gradients(model, lambda: run(causal))
    with defer_logits(model):
        eager = gradients(model, lambda: run(causal))
        function = compiled(causal)
        found = gradients(model, lambda: run(function))
    for mine, plain, other in zip(found, want, eager, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=0)
        torch.testing.assert_close(mine, plain, rtol=2e-2, atol=2e-3)  # bfloat16: 8 bits
    if (
        not around_loss
    ):  # torch differentiates a function in the autocast that is around it, the head's product too
        assert_fused()


def test_the_model_is_compiled_too(tokens: Tensor) -> None:
    model = Model()
    want = gradients(model, lambda: causal(model(tokens), tokens))
    defer_logits(model)
    whole: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert isinstance(whole(tokens), DeferredLogits)
    function = compiled(causal)
    same(gradients(model, lambda: function(whole(tokens), tokens)), want)
    assert_fused()


def test_a_step_that_is_one_function(tokens: Tensor) -> None:
    model = Model()
    want = gradients(model, lambda: causal(model(tokens), tokens))
    defer_logits(model)
    step = compiled(lambda tokens: causal(model(tokens), tokens))
    same(gradients(model, lambda: step(tokens)), want)
    assert_fused()


def test_what_eager_code_computed_is_given_logits(tokens: Tensor) -> None:
    model = Model()
    want = gradients(model, lambda: causal(model(tokens), tokens))
    defer_logits(model)
    function = compiled(causal)

    def step() -> Tensor:
        logits = model(tokens)
        assert logits.argmax(-1).shape == tokens.shape  # a metric, in eager code
        return function(logits, tokens)

    same(gradients(model, step), want)
    assert slime_compile.reports()[-1].to_dict()["chunked_heads"] == 0


def test_without_gradients(tokens: Tensor) -> None:
    model = Model()
    want = policy(model(tokens), tokens)
    defer_logits(model, in_eval=True)
    function = compiled(policy)
    with torch.no_grad():
        logits = model.eval()(tokens)
        assert isinstance(logits, DeferredLogits)
        found = function(logits, tokens)
    torch.testing.assert_close(found, want.detach())
    assert not found.requires_grad
    # of the line of the head, whatever the loss is under
    assert not compiled(causal)(model(tokens).detach(), tokens).requires_grad


def test_logits_that_leave_the_function(tokens: Tensor) -> None:
    """As they came, changed, and made inside: what eager code has then is what it would have had."""

    def function(logits: Any, tokens: Tensor) -> tuple[Tensor, Any, Any]:
        cut = logits[:, :-1]
        logits.div_(2)
        return causal(logits, tokens), logits, cut

    model = Model()
    want = model(tokens)
    defer_logits(model)
    logits = model(tokens)
    loss, returned, cut = compiled(function)(logits, tokens)
    torch.testing.assert_close(loss, causal(want / 2, tokens))
    assert returned is logits
    torch.testing.assert_close(logits.tensor(), want / 2)
    with pytest.raises(RuntimeError, match="through another view of them"):
        cut.tensor()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_head(reentrant: bool, fused: bool, tokens: Tensor) -> None:
    """A reentrant one is an autograd.Function, which must return a tensor: nothing is deferred there."""
    model = Model()

    def step() -> Tensor:
        embedded = model.embedding(tokens)
        logits = checkpoint(model.lm_head, embedded.tanh(), use_reentrant=reentrant)
        assert isinstance(logits, DeferredLogits) == (deferred and not reentrant)
        loss: Tensor = function(logits, tokens) + embedded.square().sum()
        return loss

    function, deferred = causal, False
    want = gradients(model, step)
    defer_logits(model)
    function, deferred = compiled(causal) if fused else causal, True
    same(gradients(model, step), want)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_gradient_checkpointing(reentrant: bool, inner: bool, tokens: Tensor) -> None:
    """Of a layer, and of the loss whose closure has the logits."""

    class Checkpointed(Model):
        def forward(self, tokens: Tensor) -> Any:
            embedded = self.embedding(tokens)
            return self.lm_head(checkpoint(self.body, embedded, use_reentrant=reentrant))

    model = Checkpointed() if inner else Model()
    function = compiled(causal)

    def step(loss: Callable[..., Tensor]) -> Tensor:
        logits = model(tokens)
        if inner:
            return loss(logits, tokens)
        found = checkpoint(lambda t: loss(logits.tensor(), t), tokens, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found

    if not inner and reentrant:
        return  # autograd.Function, see below
    want = gradients(model, lambda: function(model(tokens), tokens))
    defer_logits(model)
    same(gradients(model, lambda: step(causal)), want)
    same(gradients(model, lambda: step(function)), want)


# ---- what would be wrong in silence -------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits.float().softmax(-1))
        return logits.float().logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return 2 * p * grad.unsqueeze(-1)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_an_autograd_function_is_given_the_tensor(backend: str | None, tokens: Tensor) -> None:
    model = Model()
    want = gradients(model, lambda: Doubled.apply(model(tokens)).mean())
    defer_logits(model)

    def bare(logits: Any) -> Tensor:
        return Doubled.apply(logits).mean()

    def given(logits: Any) -> Tensor:
        return Doubled.apply(logits.tensor()).mean()

    if backend is not None:
        bare, given = (torch.compile(each, backend=backend) for each in (bare, given))
    with pytest.raises(RuntimeError, match=r"must be given logits as a tensor.*logits\.tensor\(\)"):
        bare(model(tokens))
    same(gradients(model, lambda: given(model(tokens))), want)
    function = with_tensors(lambda logits: Doubled.apply(logits).mean())
    if backend is not None:
        function = torch.compile(function, backend=backend)
    same(gradients(model, lambda: function(model(tokens))), want)


class WritesData(torch.optim.Optimizer):
    """Which no version counter sees."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


ON_THE_WAY: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda logits: logits,
    "detached": lambda logits: tree_map(Tensor.detach, logits),
    "copied": lambda logits: tree_map(Tensor.clone, logits),  # as DDP does it
    "cast": lambda logits: tree_map(Tensor.double, logits),
}


@pytest.mark.parametrize("on_the_way", ON_THE_WAY)
@pytest.mark.parametrize("kind", ["SGD", "WritesData"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_step_before_the_loss(
    fused: bool, kind: str, on_the_way: str, tokens: Tensor
) -> None:
    model = Model(bias=True)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "SGD"
        else WritesData(model.parameters(), {})
    )
    defer_logits(model)
    function = compiled(causal) if fused else causal
    function(model(tokens), tokens).backward()
    late = ON_THE_WAY[on_the_way](model(tokens))
    optimizer.step()
    with pytest.raises(Exception, match="has been overwritten since the head ran"):
        function(late, tokens)
    assert function(model(tokens), tokens).isfinite()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("on_the_way", ON_THE_WAY)
def test_a_step_that_changes_other_weights(on_the_way: str, whole: bool, tokens: Tensor) -> None:
    model = Model()
    model.lm_head.requires_grad_(False)
    optimizer = WritesData(model.body.parameters(), {})
    defer_logits(model)
    function = compiled(causal)
    run = torch.compile(model, backend="eager") if whole else model
    function(run(tokens), tokens).backward()
    late = ON_THE_WAY[on_the_way](run(tokens))
    optimizer.step()
    assert function(late, tokens).isfinite()


CHANGES: list[Callable[[Any], Any]] = [
    lambda x: F.relu(x, True),
    lambda x: F.leaky_relu(x, 0.1, True),
    lambda x: nn.Hardtanh(-0.1, 0.1, inplace=True)(x),
    lambda x: torch.ops.aten.mul_(x, 2),
    lambda x: torch.ops.aten.mul_.Tensor(x, torch.tensor(2.0)),
    lambda x: torch._foreach_mul_([x], 2),
    lambda x: torch.relu_(x),
    lambda x: F.relu(x, inplace=True),
    lambda x: nn.init.zeros_(x),
    lambda x: x.zero_(),
    lambda x: x.clamp_(0),
    lambda x: operator.isub(x, 1),
    lambda x: operator.imul(x, 2),
    lambda x: x.masked_fill_(x.detach() > 0, 0),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_in_place_are_made_or_refused(change: Callable[[Any], Any], tokens: Tensor) -> None:
    """A whole graph may be refused; with breaks it runs, and is right."""

    def function(logits: Any) -> Tensor:
        change(logits)
        return logits.square().sum()

    model = Model()
    want = gradients(model, lambda: function(model(tokens) * 1))
    defer_logits(model)
    same(gradients(model, lambda: torch.compile(function, backend="eager")(model(tokens))), want)
    same(gradients(model, lambda: function(model(tokens))), want)
    torch._dynamo.reset()
    try:
        found = gradients(model, lambda: compiled(function)(model(tokens)))
    except (torch._dynamo.exc.Unsupported, RuntimeError):
        return  # the message is Dynamo's where it does not ask us
    same(found, want)


LOST: dict[str, Callable[[Any], Any]] = {
    "a tensor's method": lambda x: torch.Tensor.mul_(x, 2),
    "clamp": lambda x: torch.Tensor.clamp_(x, 0),
    "an operator": lambda x: torch.Tensor.__imul__(x, 2),
    "an item": lambda x: torch.Tensor.__setitem__(x, 0, 0.0),
    "data": lambda x: x.data.mul_(2),
    "a view": lambda x: x.permute(1, 0, 2).mul_(2),
    "a view by a function": lambda x: F.relu(torch.Tensor.view(x, -1, VOCAB), True),
    "another view": lambda x: x[0].diagonal().mul_(2),
    "the tensor": lambda x: x.tensor().mul_(2),
    "the tensor of what is made of them": lambda x: (x / 2).tensor().mul_(2) + (x / 2),
}


@pytest.mark.parametrize("change", LOST)
def test_changes_that_would_be_lost_are_refused(change: str, tokens: Tensor) -> None:
    def function(logits: Any) -> Tensor:
        LOST[change](logits)
        return logits.square().sum()

    model = Model()
    defer_logits(model)
    with pytest.raises((RuntimeError, TypeError)) as caught:
        compiled(function)(model(tokens))
    assert "deferred logits must not be" in str(caught.value) or "DeferredLogits" in str(
        caught.value
    )


def test_a_tensor_that_is_asked_for_may_be_changed(tokens: Tensor) -> None:
    def changing(logits: Tensor) -> Tensor:
        logits.sub_(logits.detach().amax(-1, keepdim=True))
        return F.relu(logits * 1, True).sum() + logits.exp().sum(-1).log().sum()

    def asking(logits: Any) -> Tensor:
        return changing(logits.tensor())

    model = Model()
    want = gradients(model, lambda: changing(model(tokens) * 1))
    defer_logits(model)
    for function in map(compiled, (asking, with_tensors(changing))):
        torch._dynamo.reset()
        same(gradients(model, functools.partial(lambda call: call(model(tokens)), function)), want)


def _temperature(x: Any) -> Any:
    given = torch.full((BATCH, 1, 1), 2.0)
    divided = x / given
    given.add_(3)
    return divided


def _rows(x: Any) -> Any:
    at = torch.tensor([0, 2])
    taken = x[at]
    at.zero_()
    return taken


def _mask(x: Any) -> Any:
    mask = torch.arange(VOCAB) < 3
    x.masked_fill_(mask, -1e4)
    mask.zero_()
    return x


def _assigned(x: Any) -> Any:
    value = torch.zeros(VOCAB)
    x[:, 0] = value
    value.add_(30 * torch.arange(VOCAB))
    return x


@pytest.mark.parametrize("change", [_temperature, _rows, _mask, _assigned])
def test_arguments_that_change_before_the_read(
    change: Callable[[Any], Any], tokens: Tensor
) -> None:
    """What a compiled function gave to a method is that of its line."""
    model = Model()

    def loss(logits: Any) -> Tensor:
        return change(logits).log_softmax(-1)[..., 1].mean()

    with torch.no_grad():
        want = loss(model(tokens))
        defer_logits(model)
        torch.testing.assert_close(compiled(loss)(model(tokens)), want)


@pytest.mark.parametrize("fused", [False, True])
def test_a_temperature_that_an_optimizer_changes(fused: bool, tokens: Tensor) -> None:
    model, temperature = Model(), nn.Parameter(torch.tensor(2.0))
    defer_logits(model)
    optimizer = torch.optim.SGD([temperature], 1.0)
    function = compiled(causal) if fused else causal
    logits = model(tokens) / temperature
    temperature.grad = torch.ones(())
    optimizer.step()
    with pytest.raises(RuntimeError, match="an argument of `div` has been overwritten"):
        function(logits, tokens)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("call", [
    lambda logits, loss: logits.register_hook(torch.neg),
    lambda logits, loss: logits.retain_grad(),
    lambda logits, loss: torch.autograd.grad(loss, logits),
    lambda logits, loss: torch.autograd.grad([loss], inputs=[logits], allow_unused=True),
])  # fmt: skip
def test_a_gradient_of_logits_is_asked_for_after_the_loss(
    call: Callable[[Any, Tensor], Any], view: bool, tokens: Tensor
) -> None:
    model = Model()
    defer_logits(model)
    logits = model(tokens)
    given = logits.float() / 2 if view else logits
    loss = compiled(causal)(given, tokens)
    with pytest.raises(RuntimeError, match="before a compiled function reads them"):
        call(given, loss)


def test_a_hook_that_is_there_before_the_loss(tokens: Tensor) -> None:
    model = Model()
    want = gradients(model, lambda: -causal(model(tokens), tokens))
    defer_logits(model)

    def loss() -> Tensor:
        logits = model(tokens)
        logits.register_hook(torch.neg)
        return compiled(causal)(logits, tokens)  # type: ignore[no-any-return]

    same(gradients(model, loss)[1:], want[1:])


def test_item_assignment(tokens: Tensor) -> None:
    def banned(logits: Any, tokens: Tensor) -> Tensor:
        logits[..., 5] = -torch.inf
        return torch.logsumexp(logits, -1).sum()

    model = Model()
    want = gradients(model, lambda: banned(model(tokens) * 1, tokens))
    defer_logits(model)
    function = compiled(banned)
    same(gradients(model, lambda: function(model(tokens), tokens)), want)
    same(gradients(model, lambda: banned(model(tokens), tokens)), want)


def test_a_copy_of_the_model_has_its_own_weight(tokens: Tensor) -> None:
    model = Model()
    defer_logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert isinstance(other(tokens), DeferredLogits)
    assert (other(tokens).tensor() == 0).all()
    assert not (model(tokens).tensor() == 0).any()
    assert other(tokens).shape == (*tokens.shape, VOCAB)
