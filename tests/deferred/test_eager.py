"""Deferred logits in eager code: bit for bit the tensor, computed once, or an error that says what to do."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from slime_compile import DeferredLogits, defer_logits
from slime_compile.report.places import shortened
from tests.deferred.models import LOSSES, VOCAB, Model, fresh, gradients, tokens

__all__ = ["fresh", "tokens"]


def same(mine: Any, want: Any) -> None:
    assert type(mine) is type(want)
    torch.testing.assert_close(mine, want, rtol=0, atol=0)


# ---- as good as the tensor ----------------------------------------------------------------------------------------

COMPUTE: list[Callable[[Any], Any]] = [
    lambda x: x.softmax(-1),
    lambda x: torch.log_softmax(x, -1),
    lambda x: F.cross_entropy(x.view(-1, VOCAB), torch.zeros(21, dtype=torch.int64)),
    lambda x: x + 1,
    lambda x: 1 - x,
    lambda x: 1 / x,
    lambda x: x @ torch.ones(VOCAB),
    lambda x: -x,
    lambda x: x > 0,
    lambda x: x == x,
    lambda x: x.argmax(-1),
    lambda x: torch.argmax(x, dim=-1),
    lambda x: x.max(-1).values,
    lambda x: torch.cat([x, x]),
    lambda x: torch.stack([x[0], x[1]]),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.gather(-1, torch.zeros(3, 7, 1, dtype=torch.int64)),
    lambda x: x[x > 0],
    lambda x: x[torch.tensor([True, False, True])],
    lambda x: x.mT.shape,
    lambda x: x.split([1, 2])[1],
    lambda x: [row.sum() for row in x][2],
    lambda x: x.numel() + len(x) + x.dim() + x.ndim + x.size(-1) + x.nelement(),
    lambda x: x.stride(),
    lambda x: x.new_zeros(2).dtype,
    lambda x: torch.zeros_like(x),
    lambda x: x.sum().item(),
    lambda x: float(x.detach()[0, 0, 0]),
    lambda x: bool((x == x).all()),
    lambda x: x.detach().numpy().sum(),
    lambda x: np.asarray(x.detach()).sum(),
    lambda x: x.tolist()[0][0][0],
    lambda x: x.topk(3).indices,
    lambda x: x.to(torch.float64).sum(),
    lambda x: x.type(torch.bfloat16).sum(),
    lambda x: x.double().sum(),
    lambda x: x.to("meta").shape,
    lambda x: x.is_cuda or x.is_sparse or x.is_leaf,
    lambda x: x.requires_grad and x.detach().requires_grad,
    lambda x: torch.is_floating_point(x),
    lambda x: (x.device, x.dtype, x.layout, x.is_contiguous()),
    lambda x: x[:, -1, :].to(copy=True, dtype=torch.float32).exp(),
    lambda x: x.flatten(0, 1)[3:5].sum(),
    lambda x: x.transpose(0, 1).contiguous().view(-1, VOCAB).exp(),
    lambda x: x.transpose(0, 1).contiguous().is_contiguous(),
    lambda x: x.transpose(-3, -2).contiguous().transpose(0, 1).sum(0),
    lambda x: x.transpose(1, 2).contiguous().sum(1),
    lambda x: x[:1].transpose(0, 1).contiguous().sum(-1),
    lambda x: x.unsqueeze(0).squeeze(0).narrow(1, 2, 3).select(0, 1).clone().sum(),
    lambda x: torch.tanh(x / 30.0).mul(30.0).sum(),
    lambda x: x[torch.tensor([0, 2]), torch.tensor([1, 3])].exp(),
    lambda x: x.float() is x,
    lambda x: hasattr(x, "no_such_method"),
]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_kind_of_operator(grad: bool, bias: bool, tokens: Tensor) -> None:
    model = Model(bias=bias)
    for number, function in enumerate(COMPUTE):
        with torch.set_grad_enabled(grad):
            want = function(model(tokens))
            with defer_logits(model):
                logits = model(tokens)
                assert isinstance(logits, DeferredLogits)
                found = function(logits)
        if isinstance(want, Tensor):
            assert found.requires_grad == want.requires_grad, number
            same(found, want)
        else:
            assert found == want, number


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(loss: Callable[..., Tensor], tokens: Tensor) -> None:
    model = Model(tied=True)
    want = gradients(model, lambda: loss(model(tokens), tokens))
    defer_logits(model)
    same(gradients(model, lambda: loss(model(tokens), tokens)), want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient_first(mode: Callable[[], Any], tokens: Tensor) -> None:
    """A metric computes what the loss then trains."""
    model = Model()
    want = gradients(model, lambda: model(tokens).logsumexp(-1).mean())
    defer_logits(model)

    def step() -> Tensor:
        logits = model(tokens)
        with mode():
            assert not logits.exp().requires_grad
            assert not (logits / 2).argmax(-1).requires_grad
        return logits.logsumexp(-1).mean()

    same(gradients(model, step), want)


def test_inference_mode(tokens: Tensor) -> None:
    model = Model()
    defer_logits(model)
    with torch.inference_mode():
        logits = model(tokens)
        want = (logits / 2).exp()
    assert not logits.exp().requires_grad
    same((logits / 2).exp(), want)


def test_autocast_is_that_of_the_head(tokens: Tensor) -> None:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        want = model(tokens)
    defer_logits(model)
    with torch.autocast("cpu", torch.bfloat16):
        inside = model(tokens)
    outside = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert outside.exp().dtype == torch.float32
    assert inside.dtype == torch.bfloat16
    same(inside.tensor(), want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_loss(reentrant: bool, tokens: Tensor) -> None:
    """What is computed inside is kept; it is no part of what is recomputed."""
    model = Model()
    want = gradients(model, lambda: model(tokens).logsumexp(-1).mean())
    defer_logits(model)

    def step() -> Tensor:
        logits = model(tokens)
        given = logits.tensor() if reentrant else logits
        found = checkpoint(lambda x: x.logsumexp(-1).mean(), given, use_reentrant=reentrant)
        assert isinstance(found, Tensor)
        return found

    same(gradients(model, step), want)
    if reentrant:
        with (
            pytest.warns(UserWarning, match="None of the inputs"),
            pytest.raises(
                RuntimeError, match=r"autograd.Function must be given logits as a tensor"
            ),
        ):
            checkpoint(lambda x: x.sum(), model(tokens), use_reentrant=True)


# ---- once, and told -----------------------------------------------------------------------------------------------


def test_computed_once_and_reported_once(tokens: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    handle = defer_logits(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            logits = model(tokens)
            first = logits.softmax(-1) + logits.exp()
            assert logits.tensor() is logits.tensor()
            assert first.requires_grad
    line = (
        first.grad_fn is not None and test_computed_once_and_reported_once.__code__.co_firstlineno
    )
    place = f"{__file__}:{line + 6}"
    assert dict(handle.places.counts) == {place: 2}
    (told,) = [r.getMessage() for r in caplog.records if r.name.startswith("slime_compile")]
    assert told == (
        f"deferred logits of lm_head are computed in full at {place}, outside torch.compile; "
        "compile the function with this line, and they stay lazy"
    )
    assert str(handle).splitlines() == [
        "logits of lm_head: returned 2 times in eager code without being computed "
        "(calls within compiled code are not counted)",
        shortened(f"  computed 2 times at {place}"),
    ]


def test_nothing_is_told_without_gradients(
    tokens: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    handle = defer_logits(model)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        model(tokens).argmax(-1)
    assert handle.places.counts.total() == 1
    assert not caplog.records


def test_what_is_derived_lets_go_of_the_whole(tokens: Tensor) -> None:
    model = Model()
    defer_logits(model)
    cast = model(tokens).double()
    assert "not computed" in repr(cast)
    cast.exp()
    assert cast.expression.before is None
    assert "not computed" not in repr(cast)


# ---- the handle ---------------------------------------------------------------------------------------------------


def test_removed(tokens: Tensor) -> None:
    model = Model()
    handle = defer_logits(model, "lm_head")
    assert repr(handle) == "DeferHandle('lm_head', deferred)"
    kept = model(tokens)
    handle.remove()
    handle.remove()
    assert repr(handle) == "DeferHandle('lm_head', removed)"
    assert "forward" not in vars(model.lm_head)
    same(kept.tensor(), model(tokens))
    with pytest.raises(ZeroDivisionError), defer_logits(model):
        raise ZeroDivisionError
    assert isinstance(model(tokens), Tensor)


def test_evaluation(tokens: Tensor) -> None:
    model = Model().eval()
    with defer_logits(model):
        assert isinstance(model(tokens), Tensor)
    with defer_logits(model, in_eval=True):
        assert isinstance(model(tokens), DeferredLogits)


def test_saved_and_loaded(tokens: Tensor) -> None:
    model = Model()
    want = model(tokens).detach()
    names = list(model.state_dict())
    defer_logits(model)
    assert list(model.state_dict()) == names
    file = io.BytesIO()
    torch.save({"model": model, "logits": model(tokens).detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    same(loaded["logits"], want)
    same(loaded["model"](tokens).tensor().detach(), want)
    same(pickle.loads(pickle.dumps(model(tokens).detach())), want)
    other = Model()
    other.load_state_dict(model.state_dict())
    same(other(tokens).detach(), want)


def test_hooks(tokens: Tensor) -> None:
    model = Model()
    seen: list[Any] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    want = model(tokens)
    defer_logits(model)
    logits = model(tokens)
    assert seen[1] is logits
    same(logits.tensor(), want)
    model.lm_head.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    assert isinstance(model(tokens), Tensor)  # the hook asks for the logits' gradient


def test_a_head_in_a_wrapper(tokens: Tensor) -> None:
    model = Model()
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        with defer_logits(wrapped) as handle:
            assert handle.module is model.lm_head


def _replaced(model: Model) -> Model:
    model.lm_head.forward = lambda hidden: hidden
    return model


def _deferred(model: Model) -> Model:
    defer_logits(model)
    return model


class Quantised(nn.Linear):
    """Of a library whose matmul is an operator of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


Quantised.__module__ = "bitsandbytes.nn.modules"


def _quantised(model: Model) -> Model:
    model.lm_head = Quantised(8, VOCAB)
    return model


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (lambda m: ("model",), TypeError, "`model` must be a torch.nn.Module, got str"),
        (lambda m: (m, 3), TypeError, "`head` must be a module or its name, got int"),
        (lambda m: (m, "head"), ValueError, "got 'head'; its widest linear modules are 'lm_head' (131 wide)"),
        (lambda m: (m, nn.Linear(8, 9)), ValueError, "`head` must be a module of `model`"),
        (lambda m: (m.body,), ValueError, "must have get_output_embeddings() or a module lm_head or output_layer"),
        (lambda m: (m, "embedding"), ValueError, "torch.nn.modules.sparse.Embedding with its own forward"),
        (lambda m: (_quantised(m),), ValueError, "exclude the head from quantisation"),
        (lambda m: (_replaced(m),), ValueError, "with its forward replaced"),
        (lambda m: (_deferred(m),), ValueError, "must not be deferred already, got lm_head; call remove()"),
    ],
)  # fmt: skip
def test_refuses(
    arguments: Callable[[Model], tuple[Any, ...]], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as raised:
        defer_logits(*arguments(Model()))
    assert message in str(raised.value)


# ---- what would be wrong in silence -------------------------------------------------------------------------------


def _parent_then_view(x: Any) -> Any:
    cut = x[:, 1:]
    x.div_(2)
    return cut.exp()


def _view_then_parent(x: Any) -> Any:
    x[:, 1:].div_(2)
    return x.exp()


def _copy_is_apart(x: Any) -> Any:
    copy = x.double()
    x.div_(2)
    return copy.exp().sum() + x.exp().sum()


def _read_before(x: Any) -> Any:
    read = x.exp()
    cut = x[:, 1:]
    cut.mul_(2)
    return read.sum() + x.exp().sum() + cut.sum()


def _item(x: Any) -> Any:
    cut = x[:, 1:]
    x[..., 3] = -1.0
    return cut.exp()


def _augmented(x: Any) -> Any:
    other = x
    x /= 2
    x *= 3
    return other.exp()


def _temperature_changes(x: Any) -> Any:
    t = torch.full((3, 1, 1), 2.0)
    scaled = x / t
    t.fill_(3.0)
    return scaled.exp()


def _copied_twice(x: Any) -> Any:
    flat = x[:, :-1].reshape(-1, VOCAB)  # a copy, since the slice has gaps
    flat.div_(2)
    return x.exp().sum() + flat.exp().sum()


def _kept_then_changed(x: Any) -> Any:
    half = x * 0.5
    x.exp()
    x.tensor().mul_(3)
    return half.exp()


CHANGES = [
    (_parent_then_view, "through another view"),
    (_view_then_parent, "through another view"),
    (_copy_is_apart, None),
    (_read_before, None),
    (_item, "the tensor of `__getitem__` has been overwritten"),
    (_augmented, None),
    (_temperature_changes, "an argument of `div` has been overwritten"),
    (_copied_twice, None),
]


@pytest.mark.parametrize(("program", "refused"), CHANGES, ids=lambda x: getattr(x, "__name__", ""))
def test_in_place(program: Callable[[Any], Any], refused: str | None, tokens: Tensor) -> None:
    """Right, or an error."""
    model = Model()
    want = program(model(tokens) * 1)
    defer_logits(model)
    if refused is None:
        same(program(model(tokens)), want)
    else:
        with pytest.raises(RuntimeError, match=refused):
            program(model(tokens))


def test_a_tensor_that_is_changed_under_what_was_made_of_it(tokens: Tensor) -> None:
    model = Model()
    defer_logits(model)
    with pytest.raises(RuntimeError, match="the tensor of `mul` has been overwritten"):
        _kept_then_changed(model(tokens))


@pytest.mark.parametrize("what", ["weight", "hidden"])
def test_operands_that_are_overwritten(what: str, tokens: Tensor) -> None:
    model = Model()
    defer_logits(model)
    logits = model(tokens)
    with torch.no_grad():
        (model.lm_head.weight if what == "weight" else logits.expression.hidden).add_(1)
    with pytest.raises(RuntimeError, match=f"`{what}` has been overwritten since the head ran"):
        logits.exp()


@pytest.mark.parametrize("what", ["weight", "hidden"])
def test_what_has_no_gradient_at_the_heads_line_gets_none(what: str, tokens: Tensor) -> None:
    head = nn.Linear(8, VOCAB)
    hidden = torch.randn(2, 8)
    frozen = head.weight if what == "weight" else hidden
    defer_logits(head, head)
    frozen.requires_grad_(False)
    logits = head(hidden)
    frozen.requires_grad_()
    logits.square().sum().backward()
    assert frozen.grad is None
    assert head.bias.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # make_dual's own
def test_a_tangent_goes_on() -> None:
    head, hidden = torch.nn.Linear(4, VOCAB), torch.randn(3, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden, torch.ones(3, 4))
        want = forward_ad.unpack_dual(head(dual).softmax(-1)).tangent
        defer_logits(head, head)
        same(forward_ad.unpack_dual(head(dual).softmax(-1)).tangent, want)


def _sliced_by_a_tensor_that_moves(x: Any) -> Any:
    start = torch.tensor(0)
    taken = x[:, start : start + 3]
    start += 2
    return taken + 0


def _taken_by_an_array_that_changes(x: Any) -> Any:
    at = np.array([0, 2])
    taken = x[at]
    at[:] = 1
    return taken + 0


@pytest.mark.parametrize("use", [
    _sliced_by_a_tensor_that_moves,
    _taken_by_an_array_that_changes,
    lambda x: x[torch.tensor(1)] + 0,
    lambda x: x[:, torch.tensor(1)] + 0,
    lambda x: x[np.array([True, False, True])] + 0,
    lambda x: x.narrow(1, torch.tensor(2), 3) + 0,
    lambda x: x.select(1, torch.tensor(2)) + 0,
    lambda x: torch.stack([x[each] for each in torch.arange(2)]),
    lambda x: torch.mul(x.detach(), 2, out=torch.empty(3, 7, VOCAB)),
    lambda x: (np.float32(2) * x) + 0,
    lambda x: (x * np.float32(2)) + 0,
    lambda x: x.view([21, VOCAB]) + 0,
])  # fmt: skip
def test_arguments_that_do_not_say_when_they_change(
    use: Callable[[Any], Any], tokens: Tensor
) -> None:
    model = Model()
    want = use(model(tokens))
    defer_logits(model)
    with torch.no_grad():
        same(use(model(tokens)), want.detach())


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_under_torch_func(transform: str, tokens: Tensor) -> None:
    model = Model()

    def loss(weight: Tensor) -> Tensor:
        given = {"lm_head.weight": weight}
        made: Tensor = torch.func.functional_call(model, given, (tokens,)).exp().sum()
        return made

    weights = model.lm_head.weight.detach()
    if transform == "vmap":
        weights = torch.stack([weights, 2 * weights])
    function = getattr(torch.func, transform)(loss)
    want = function(weights)
    defer_logits(model)
    same(function(weights), want)


def test_a_weight_without_memory(tokens: Tensor) -> None:
    model = Model()
    defer_logits(model)
    logits = model(tokens)
    model.lm_head.weight.untyped_storage().resize_(0)
    with pytest.raises(
        RuntimeError, match=r"`weight` must have memory.*reshard_after_forward=False"
    ):
        logits.exp()


# ---- pytrees ------------------------------------------------------------------------------------------------------


def test_a_leaf_is_hidden(tokens: Tensor) -> None:
    model = Model(bias=True)
    want = model(tokens)
    defer_logits(model)
    logits = model(tokens)
    leaves, _ = tree_flatten({"logits": logits[:, 1:]})
    assert [leaf.shape[-1] for leaf in leaves] == [8]
    assert tree_map(lambda x: x, logits) is logits
    assert tree_map(lambda x: None, logits) is None
    cast = tree_map(lambda x: x.double(), logits)
    assert isinstance(cast, DeferredLogits)
    same(cast.tensor(), want.double())
    detached = tree_map(lambda x: x.detach(), logits)
    assert not detached.requires_grad
    assert not detached.exp().requires_grad
    with pytest.raises(TypeError, match="must leave deferred logits as they are"):
        tree_map(lambda x: 2 * x, logits)
    logits.exp()
    same(tree_map(lambda x: 2 * x, logits), 2 * want)
