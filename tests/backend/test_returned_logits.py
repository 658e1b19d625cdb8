"""Logits that a compiled function makes and returns beside their loss: they have a gradient where one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import slime_compile
from bench.measure.measure import profiled_peak
from slime_compile.backend import slime_fused
from slime_compile.ops import torch_calls
from tests.support.harness import MIN_VOCAB, OPTIONS, each_inner

ROWS, VOCAB, HIDDEN = 40, 1040, 8
Loss = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def _compiled(function: Loss, **options: Any) -> Loss:
    compiled: Loss = torch.compile(function, backend="slime_fused", options=OPTIONS | options)
    return compiled


def _arguments() -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    return hidden, weight, torch.randint(VOCAB, (ROWS,))


# ---- spellings: each returns a loss, then logits ------------------------------------------------------------------


def as_made(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float(), target), logits


def scaled(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = (hidden @ weight.t()) / 0.7
    return F.cross_entropy(logits, target), logits


def per_row(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """The temperature of each row is computed in the graph."""
    logits = hidden @ weight.t() / (1 + target.float().sigmoid())[:, None]
    return F.cross_entropy(logits, target), logits


def capped(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = 30 * torch.tanh(hidden @ weight.t() / 30)
    return F.cross_entropy(logits, target), logits.double()


def made_inside(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Hidden states are no input, and become an output."""
    logits = torch.mm(hidden.relu() * 2, weight.t())
    return F.cross_entropy(logits[1:], target[1:], reduction="none"), logits


def shifted(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """As TRL's DPO returns them."""
    logits = F.linear(hidden.view(2, ROWS // 2, HIDDEN), weight)[:, :-1]
    taken = target.view(2, -1)[:, 1:]
    return logits.log_softmax(-1).gather(-1, taken[..., None]).sum(), logits


def beside_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """The hidden states are returned, too."""
    hidden = hidden.tanh()
    logits = torch.matmul(hidden, weight.t())
    return F.cross_entropy(logits, target), logits, hidden


def with_bias(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = torch.addmm(weight[:, 0].detach(), hidden, weight.t())
    return F.cross_entropy(logits, target), logits


AGAIN = (as_made, scaled, per_row, capped, made_inside, shifted, beside_hidden)


def _assert_same(function: Loss, compiled: Loss, use: Callable[[Any], Tensor]) -> None:
    arguments = _arguments()
    found, wanted = (use(each(*arguments)) for each in (compiled, function))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(each, arguments[:2]) for each in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


USES: dict[str, Callable[[Any], Tensor]] = {
    "the loss alone": lambda out: out[0].sum(),
    "the logits alone": lambda out: out[1].square().mean(),
    "both": lambda out: out[0].sum() + 1e-2 * out[1].logsumexp(-1).square().mean(),
    "all": lambda out: sum(each.square().mean() for each in out),
}


@each_inner
@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize("function", [*AGAIN, with_bias], ids=lambda f: f.__name__)
def test_values_and_gradients(function: Loss, use: str, inner: str) -> None:
    _assert_same(function, _compiled(function, inner=inner), USES[use])


@pytest.mark.parametrize("function", AGAIN, ids=lambda f: f.__name__)
def test_nobody_asks_for_a_gradient_and_none_is_made(function: Loss) -> None:
    compiled = _compiled(function)
    out = compiled(*_arguments())
    assert out[1].requires_grad
    assert type(out[1].grad_fn).__name__ == "_AgainBackward"
    assert len(out) == len(function(*_arguments()))
    assert "backward may get a gradient of their size" not in str(slime_compile.reports()[-1])


def _given() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, VOCAB, requires_grad=True), torch.randint(VOCAB, (ROWS,))


@pytest.mark.parametrize("use", USES, ids=str)
def test_given_logits_that_are_scaled(use: str) -> None:
    def scaled(logits: Tensor, target: Tensor) -> Any:
        logits = logits * 2
        return F.cross_entropy(logits, target), logits

    compiled, given = _compiled(scaled), _given()
    assert type(compiled(*given)[1].grad_fn).__name__ == "_AgainBackward"
    found, wanted = (
        torch.autograd.grad(USES[use](f(*given)), given[0]) for f in (compiled, scaled)
    )
    torch.testing.assert_close(found, wanted)


def test_given_logits_seen_otherwise() -> None:
    """Views of what is given are views of it for the caller, too."""

    def seen(logits: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(logits, target), logits.view(2, -1, VOCAB).float()

    compiled, (logits, target) = _compiled(seen), _given()
    computed = logits * 1
    _, view = compiled(computed, target)
    assert view._base is computed
    view.sum().backward()
    assert (logits.grad == 1).all()


@pytest.mark.parametrize("use", USES, ids=str)
def test_hidden_states_as_wide_as_a_vocabulary(use: str) -> None:
    """They are returned after the logits, whose way back goes on through them."""

    def normed(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        logits = hidden @ weight.t()
        return F.cross_entropy(logits, target), logits, hidden, hidden / 3

    hidden = torch.randn(ROWS, MIN_VOCAB, requires_grad=True)
    weight = torch.randn(2 * MIN_VOCAB, MIN_VOCAB, requires_grad=True)
    given = hidden, weight, torch.randint(2 * MIN_VOCAB, (ROWS,))
    compiled = _compiled(normed)
    kinds = [type(each.grad_fn).__name__ for each in compiled(*given)]
    assert kinds[1:3] == ["_AgainBackward", "CompiledFunctionBackward"]
    found, wanted = (
        torch.autograd.grad(USES[use](f(*given)), given[:2]) for f in (compiled, normed)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_graph_returns_what_the_function_does() -> None:
    """Not the hidden states, which Dynamo did not ask for."""
    counts = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Loss:
        compiled = slime_fused(gm, inputs, options=OPTIONS)

        def call(*args: Any) -> Any:
            outputs = compiled(*args)
            counts.append(len(outputs))
            return outputs

        return call

    torch.compile(made_inside, backend=backend)(*_arguments())
    assert counts == [2]


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "chunk_mib", "most"),
    [(False, 32, 1.1), (True, 32, 2.1), (False, 1, 1.6), (True, 1, 1.6)],
)
def test_peak(kept: bool, chunk_mib: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient, and the logits where the caller has them; inductor and eager code hold three and more.

    In chunks of a quarter the logits and two chunks.
    """
    hidden = torch.randn(500, HIDDEN, requires_grad=True)
    weight = torch.randn(2000, HIDDEN, requires_grad=True)
    target = torch.randint(2000, (500,))
    compiled = _compiled(as_made, chunk_mib=chunk_mib)
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", 4 * 2000)  # where there is no C++

    def step() -> None:
        loss, logits = compiled(hidden, weight, target)
        if not kept:
            del logits
        torch.autograd.grad(loss, [hidden, weight])

    step()
    assert profiled_peak(step) <= most * 500 * 2000 * 4


# ---- what goes around it ------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(self.embedding(tokens)).tanh()
        logits = self.lm_head(hidden)
        loss = F.cross_entropy(logits[:-1].float(), tokens[1:])
        return {"loss": loss, "logits": logits, "hidden_states": hidden}


@each_inner
def test_a_model_with_a_tied_head(inner: str) -> None:
    """As transformers' outputs."""
    model, tokens = Model(), torch.randint(VOCAB, (ROWS,))
    compiled = torch.compile(model, backend="slime_fused", options=OPTIONS | {"inner": inner})
    for use in ("loss", "logits"):
        found = []
        for each in (compiled, model):
            model.zero_grad()
            each(tokens)[use].square().mean().backward()
            found.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_autocast_outside() -> None:
    """What runs again in backward, where autocast is off, runs as it did."""
    compiled, arguments = _compiled(as_made), _arguments()
    gradients = []
    for each in (compiled, as_made):
        with torch.autocast("cpu", torch.bfloat16):
            out = each(*arguments)
        assert out[1].dtype is torch.bfloat16
        gradients.append(torch.autograd.grad(out[1].float().square().sum(), arguments[:2]))
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)
    plain = compiled(*arguments)  # compiled again
    assert plain[1].dtype is torch.float32
    found, wanted = (
        torch.autograd.grad(out[1].sum(), arguments[1]) for out in (plain, as_made(*arguments))
    )
    torch.testing.assert_close(found, wanted)


def test_a_frozen_weight_and_no_gradients() -> None:
    hidden, weight, target = _arguments()
    compiled = _compiled(as_made)
    out = compiled(hidden, weight.detach(), target)
    (grad,) = torch.autograd.grad(out[1].square().sum(), hidden)
    torch.testing.assert_close(grad, 2 * (hidden @ weight.t() @ weight).detach())
    with torch.no_grad():
        out = compiled(hidden, weight, target)
    assert not out[1].requires_grad
    out = compiled(hidden.detach(), weight.detach(), target)
    assert not out[1].requires_grad


def test_gradients_that_are_on_inside_alone() -> None:
    def on(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        with torch.enable_grad():
            return as_made(hidden, weight, target)

    arguments, gradients = _arguments(), []
    for each in (_compiled(on), on):
        with torch.no_grad():
            out = each(*arguments)
        gradients.append(torch.autograd.grad(USES["both"](out), arguments[:2]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_caller_changes_them() -> None:
    """In place, as `logits.div_(temperature)` of a model's output, and differentiates the result."""
    hidden, weight, target = _arguments()
    compiled = _compiled(as_made)

    def use(function: Loss) -> Tensor:
        return function(hidden, weight, target)[1].div_(0.5).square().mean()

    found, wanted = (torch.autograd.grad(use(f), [hidden, weight]) for f in (compiled, as_made))
    torch.testing.assert_close(found, wanted)


def test_a_changed_weight_is_an_error() -> None:
    hidden, weight, target = _arguments()
    out = _compiled(as_made)(hidden, weight, target)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out[1].sum().backward()


def test_a_second_derivative_is_an_error() -> None:
    """As of all that AOTAutograd compiles."""
    hidden, weight, target = _arguments()
    logits = _compiled(as_made)(hidden, weight, target)[1]
    (grad,) = torch.autograd.grad(logits.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_in_a_checkpoint() -> None:
    compiled = _compiled(as_made)
    _assert_same(
        as_made, lambda *given: checkpoint(compiled, *given, use_reentrant=False), USES["both"]
    )


def test_retained_graph() -> None:
    arguments = _arguments()
    loss, logits = _compiled(as_made)(*arguments)
    both = loss + logits.square().mean()
    first, second = (
        torch.autograd.grad(both, arguments[:2], retain_graph=keep) for keep in (True, False)
    )
    torch.testing.assert_close(first, second)


@pytest.mark.thorough
def test_any_size() -> None:
    compiled = torch.compile(made_inside, backend="slime_fused", options=OPTIONS, dynamic=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    for rows in (5, 9, 12):
        hidden = torch.randn(rows, HIDDEN, requires_grad=True)
        given = hidden, weight, torch.randint(VOCAB, (rows,))
        found, wanted = (
            torch.autograd.grad(USES["both"](f(*given)), given[:2]) for f in (compiled, made_inside)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# ---- what is left as it was ---------------------------------------------------------------------------------------


def without_a_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    return hidden.sum(), F.linear(hidden, weight)


def of_a_changed_matrix(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Of which nothing is saved: the weight has no gradient."""
    hidden = hidden * 1
    logits = F.linear(hidden, weight.detach())
    loss = F.cross_entropy(logits, target) + weight.sum()
    hidden.mul_(2)
    return loss, logits, hidden


def changed(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(hidden, weight)
    loss = F.cross_entropy(logits * 2, target)
    logits.mul_(2)
    return loss, logits


def masked(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(hidden, weight)
    logits = torch.where(torch.arange(VOCAB) < VOCAB - 5, logits, -1e4)
    return F.cross_entropy(logits, target), logits


def in_another_mode(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float(), target), logits.float()


def views_of_each_other(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = hidden @ weight.t()
    return F.cross_entropy(logits, target), logits, logits.view(2, -1, VOCAB)


def of_memory_that_is_changed(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """Through what the hidden states are a view of; the loss reads nothing of them in backward."""
    whole = hidden * 1
    logits = torch.tanh(whole.view(ROWS, HIDDEN) @ weight.detach().t())
    loss = F.cross_entropy(logits, target) + weight.sum()
    whole.zero_()
    return loss, logits


def a_linear_probe(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    """An optimizer's step between forward and backward is no error in eager code."""
    logits = hidden.detach() @ weight.t()
    return F.cross_entropy(logits, target) + hidden.sum(), logits


def of_a_computed_matrix(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    logits = F.linear(hidden, weight.cumsum(-1))
    return F.cross_entropy(logits, target), logits


@pytest.mark.parametrize(
    "function",
    [
        without_a_loss,
        of_a_changed_matrix,
        changed,
        masked,
        in_another_mode,
        views_of_each_other,
        of_memory_that_is_changed,
        a_linear_probe,
        of_a_computed_matrix,
    ],
    ids=lambda f: f.__name__,
)
def test_left_as_it_was(function: Loss) -> None:
    compiled = _compiled(function)
    assert type(compiled(*_arguments())[1].grad_fn).__name__ != "_AgainBackward"
    if function is not in_another_mode:
        _assert_same(function, compiled, USES["all"])
