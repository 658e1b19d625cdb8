"""consume_logits="auto", and autograd has the logits: other nodes, hooks, retained graphs, checkpoints, wrapped models.

Holders in Python and of the memory are in test_who_holds_logits.py.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import Variable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support import harness
from tests.support.held import (
    ROWS,
    UPSTREAM,
    VOCAB,
    Loss,
    compiled,
    leaf,
    log_probs,
    overwritten,
    right,
    step,
)


@pytest.mark.parametrize("first", [True, False], ids=["made_first", "made_last"])
@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x * x).sum(),
        lambda x: x.view(-1).sin().sum(),
        lambda x: (x.t() @ x).sum(),
        lambda x: x[:, :3].exp().sum(),
        lambda x: x.detach().cos().mul(x).sum(),
    ],
    ids=["itself", "a_view", "a_product", "some_columns", "an_alias"],
)
def test_another_node_saved_them(fn: Loss, other: Loss, first: bool) -> None:
    """Whichever runs first in backward."""

    def gradient(values: Loss) -> Tensor:
        x = leaf()
        logits = x * 1
        parts = [f(logits).mul(1.5).sum() for f in ((other, values) if first else (values, other))]
        del logits
        return torch.autograd.grad(parts[0] + parts[1], x)[0]

    torch.testing.assert_close(gradient(fn), gradient(log_probs))


def test_what_made_them_saved_them(fn: Loss) -> None:
    def gradient(values: Loss) -> Tensor:
        x = leaf()
        return torch.autograd.grad(values(x.tanh()), x, UPSTREAM)[0]

    before = overwritten()
    torch.testing.assert_close(gradient(fn), gradient(log_probs))
    assert overwritten() == before


@pytest.mark.parametrize("saved", [True, False])
def test_a_compiled_model_made_them(fn: Loss, saved: bool) -> None:
    """It saves what it returns where its backward reads that."""

    def model(x: Tensor) -> Tensor:
        return x.tanh() if saved else (x * 2).view(2, -1, VOCAB)

    def gradient(made: Loss, values: Loss) -> Tensor:
        x = leaf()
        return torch.autograd.grad(values(made(x).view(ROWS, VOCAB)), x, UPSTREAM)[0]

    before = overwritten()
    found = gradient(torch.compile(model, backend="aot_eager"), fn)
    assert overwritten() == before + (not saved)
    torch.testing.assert_close(found, gradient(model, log_probs))


class Saves(torch.autograd.Function):
    """Returns a tensor that its backward reads, however it keeps it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        made = x * 1
        if how == "save_for_backward":
            ctx.save_for_backward(made)
        ctx.kept = {"attribute": made, "alias": made.detach()}.get(how)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        made = ctx.saved_tensors[0] if ctx.kept is None else ctx.kept
        assert torch.equal(made, right()[0])
        return grad, None


@pytest.mark.parametrize("how", ["save_for_backward", "attribute", "alias"])
def test_a_function_of_the_users_made_them(fn: Loss, how: str) -> None:
    before = overwritten()
    x = leaf()
    (gradient,) = torch.autograd.grad(fn(Saves.apply(x, how)), x, UPSTREAM)
    assert torch.equal(gradient, right()[1])
    assert overwritten() == before


def test_called_twice_on_the_same(fn: Loss) -> None:
    """The second backward to run may overwrite, the first may not."""
    before = overwritten()
    x = leaf()
    logits = x * 1
    out = fn(logits) + 0.5 * fn(logits)
    del logits
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM)
    torch.testing.assert_close(gradient, 1.5 * right()[1])
    assert overwritten() == before + 1


def test_retained_and_twice(fn: Loss) -> None:
    before = overwritten()
    x = leaf()
    out = fn(x * 1)
    for left in (2, 1, 0):
        assert overwritten() == before
        (gradient,) = torch.autograd.grad(out, x, UPSTREAM, retain_graph=left > 0)
        assert torch.equal(gradient, right()[1])
    assert overwritten() == before + 1


def test_retained_gradient(fn: Loss) -> None:
    x = leaf()
    logits = x * 1
    logits.retain_grad()
    fn(logits).backward(UPSTREAM)
    assert torch.equal(logits, right()[0])
    assert logits.grad is not None
    assert torch.equal(logits.grad, right()[1])


def test_gradient_of_the_logits_themselves(fn: Loss) -> None:
    logits = leaf() * 1
    (gradient,) = torch.autograd.grad(fn(logits), logits, UPSTREAM)
    assert torch.equal(gradient, right()[1])
    assert torch.equal(logits, right()[0])


def test_hooks_that_keep_what_is_saved(fn: Loss) -> None:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    before = overwritten()
    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = fn(x * 1)
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM)
    assert torch.equal(gradient, right()[1])
    assert overwritten() == before
    assert any(each.shape == x.shape and torch.equal(each, x) for each in kept)


def test_saved_tensors_read_from_outside(fn: Loss) -> None:
    before = overwritten()
    x = leaf()
    out = fn(x * 1)
    kept = out.grad_fn.saved_tensors
    torch.autograd.grad(out, x, UPSTREAM)
    assert overwritten() == before
    assert any(each.shape == x.shape and torch.equal(each, x) for each in kept)


def test_what_the_function_made_and_somebody_kept() -> None:
    """Logits made inside are nobody else's, but for who looks at what autograd has saved."""
    weight = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(ROWS, 8, requires_grad=True)
    wanted = torch.autograd.grad(log_probs(hidden @ weight), hidden, UPSTREAM)
    for inner in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        head = compiled(lambda h: log_probs(h @ weight), inner=inner, lm_head=False)
        for keep in ("nobody", "hook", "node"):
            kept: list[Tensor] = []

            def pack(x: Tensor, kept: list[Tensor] = kept) -> Tensor:
                kept.append(x)
                return x

            packed = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
            with packed if keep == "hook" else contextlib.nullcontext():
                out = head(hidden)
            if keep == "node":
                kept.extend(out.grad_fn.saved_tensors)
            before, values = overwritten(), [x.clone() for x in kept]
            torch.testing.assert_close(torch.autograd.grad(out, hidden, UPSTREAM), wanted)
            assert overwritten() == before + (keep == "nobody")
            assert all(map(torch.equal, kept, values))


def test_saved_on_the_cpu(fn: Loss) -> None:
    x = leaf()
    with torch.autograd.graph.save_on_cpu():
        out = fn(x * 1)
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM)
    assert torch.equal(gradient, right()[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(fn: Loss, reentrant: bool) -> None:
    x = leaf()
    logits = x * 1
    out = checkpoint(fn, logits, use_reentrant=reentrant)
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM) if not reentrant else (None,)
    if reentrant:
        out.backward(UPSTREAM)
        gradient = x.grad
    assert torch.equal(gradient, right()[1])
    assert torch.equal(logits, right()[0])


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_checkpoint_around_another_reader(fn: Loss, first: bool, given: bool) -> None:
    """Logits that the checkpoint is given, as slime's, or that it makes; another node reads them, too."""

    def both(values: Loss, x: Tensor) -> Tensor:
        logits = x if given else x * 1
        parts = [lambda: values(logits) * 1.5, lambda: logits.square().sum(-1)]
        one, two = (part() for part in (parts if first else parts[::-1]))
        return one + two

    gradients = []
    for values in (fn, log_probs):
        x = leaf()
        out = checkpoint(both, values, x * 1, use_reentrant=False)
        gradients.append(torch.autograd.grad(out, x, UPSTREAM)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("holder", ["nobody", "whole", "local", "detached"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_dtensor(inner: str, holder: str) -> None:
    """The graph has the local tensor, which the DTensor holds."""
    harness.world()
    torch._dynamo.reset()
    local = compiled(lambda logits: log_probs(logits.to_local()), inner=inner)
    mesh = init_device_mesh("cpu", (1,))
    x = leaf()
    logits = DTensor.from_local(x * 1, mesh, [Shard(0)])
    hold = {"whole": lambda x: x, "local": DTensor.to_local, "detached": DTensor.detach}
    kept = hold[holder](logits) if holder != "nobody" else None
    out = local(logits)
    del logits
    before = overwritten()
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM)
    assert torch.equal(gradient, right()[1])
    assert overwritten() == before + (kept is None)
    if kept is not None:
        assert torch.equal(kept.to_local() if isinstance(kept, DTensor) else kept, right()[0])


def test_backward_on_another_thread(fn: Loss) -> None:
    x = leaf()
    logits = x * 1
    out = fn(logits)
    thread = threading.Thread(target=lambda: out.backward(UPSTREAM))
    thread.start()
    thread.join()
    assert x.grad is not None
    assert torch.equal(x.grad, right()[1])
    assert torch.equal(logits, right()[0])


def test_modes_that_see_every_operator(fn: Loss) -> None:
    seen: list[Any] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.extend(a for a in args if isinstance(a, Tensor))
            return func(*args, **(kwargs or {}))

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.extend(a for a in args if isinstance(a, Tensor))
            return func(*args, **(kwargs or {}))

    for mode in (Recorder(), Functions()):
        seen.clear()
        before = overwritten()
        x = leaf()
        out = fn(x * 1)
        with mode:  # the engine itself: torch.autograd.grad takes function modes off
            (gradient,) = Variable._execution_engine.run_backward(
                (out,), (UPSTREAM,), False, False, (x,), True, False
            )
        assert torch.equal(gradient, right()[1])
        assert overwritten() == before
        assert any(each.shape == x.shape and torch.equal(each, x) for each in seen)


def test_anomaly_mode_and_a_default_device(fn: Loss) -> None:
    """Neither holds anything."""
    before = overwritten()
    with torch.device("cpu"):
        step(fn)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        step(fn)
    assert overwritten() == before + 2


def test_compiled_autograd(fn: Loss) -> None:
    """It traces backward anew: nothing is decided there, and nothing overwritten."""
    before = overwritten()
    for held in (True, False):
        x = leaf()
        logits = x * 1
        out = fn(logits)
        if not held:
            del logits
        with compiled_autograd._enable(torch.compile(backend="eager")):
            out.backward(UPSTREAM)
        assert torch.equal(x.grad, right()[1])
        assert not held or torch.equal(logits, right()[0])
    assert overwritten() == before


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_model_that_is_wrapped(fn: Loss, wrapper: str) -> None:
    """Its hooks look at the outputs and hold none of them."""
    harness.world()
    model: torch.nn.Module = torch.nn.Linear(8, VOCAB)
    plain = copy.deepcopy(model)
    hidden = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    log_probs(plain(hidden)).backward(UPSTREAM)
    model = DistributedDataParallel(model) if wrapper == "DDP" else fully_shard(model)
    for held in (False, True):
        before = overwritten()
        logits = model(hidden)
        values = logits.detach().clone()
        out = fn(logits)
        if not held:
            del logits
        out.backward(UPSTREAM)
        assert overwritten() == before + (not held)
        assert not held or torch.equal(logits, values)
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            grad = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
            torch.testing.assert_close(grad, wanted.grad)
            found.grad = None
