"""A dry run leaves all as it was: values, versions, gradients, attributes, random numbers; also when it raises."""

import collections
import contextlib
import contextvars
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slime_compile import estimate_peak, explain

ROWS, HIDDEN, VOCAB = 4, 8, 1030
CALLS = 0
SEEN = [torch.zeros(3)]

DryRun = Callable[..., Any]


def explained(fn: Any, *args: Any) -> Any:
    return explain(fn)(*args)


def strictly(fn: Any, *args: Any) -> Any:
    return explain(fn, strict=True)(*args)


DRY_RUNS: dict[str, DryRun] = {"explain": explained, "strict": strictly, "estimate": estimate_peak}


class Slotted:
    __slots__ = ("count", "last", "never")
    of_all = 0

    def __init__(self) -> None:
        self.count, self.last = 0, torch.zeros(2)

    def step(self) -> None:
        self.count += 1
        self.last = self.last + 1
        self.never = self.last
        Slotted.of_all += 1


class Model(torch.nn.Module):
    """Everything that a training step may change on the way."""

    decay: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN))
        self.weight.grad = torch.ones(VOCAB, HIDDEN)
        self.norm = torch.nn.BatchNorm1d(HIDDEN)
        self.register_buffer("decay", torch.ones(HIDDEN))
        self.steps = 0
        self.last: Tensor | None = None
        self.history: list[Tensor] = []
        self.means: dict[str, Tensor] = {"a": torch.zeros(1)}
        self.latest = collections.OrderedDict(a=1, b=2)
        self.meter = types.SimpleNamespace(total=torch.zeros(()))
        self.slotted = Slotted()
        self.queue: collections.deque[Tensor] = collections.deque([torch.zeros(1)], 2)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        with torch.no_grad():
            self.weight.mul_(0.9)
        self.decay.mul_(0.5)
        self.steps += 1
        self.slotted.step()
        logits = self.norm(F.dropout(hidden * self.decay)) @ self.weight.t()
        self.last = logits.detach()
        self.history.append(self.last)
        self.means["a"] = self.means["a"] + logits.mean().detach()
        self.means["b"] = self.last
        self.latest["a"] = self.steps
        self.latest.move_to_end("a")
        self.meter.total += logits.sum().detach()
        self.queue.append(self.last)
        SEEN[0].add_(1)
        return F.cross_entropy(logits, target)


def shown(value: Any) -> Any:
    """A value to compare: tensors by identity, values and versions, containers by their contents."""
    assert not isinstance(value, FakeTensor)
    if isinstance(value, Tensor):
        grad = shown(value.grad) if value.is_leaf else None
        own = (id(value), value._version, value.requires_grad, value.is_leaf)
        return (*own, value.detach().clone().tolist(), grad)
    if isinstance(value, dict):
        return type(value), [(key, shown(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [shown(each) for each in value]
    if isinstance(value, torch.nn.Module | types.SimpleNamespace):
        return id(value), shown(vars(value))
    if isinstance(value, Slotted):
        names = [name for name in Slotted.__slots__ if hasattr(value, name)]
        return id(value), [(name, shown(getattr(value, name))) for name in names], Slotted.of_all
    return value


def everything(*values: Any) -> Any:
    generators = torch.random.get_rng_state().tolist(), random.getstate()
    return shown(values), shown((CALLS, SEEN)), generators, torch.is_grad_enabled()


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, HIDDEN, requires_grad=True), torch.randint(VOCAB, (ROWS,))


class Stopped(Exception):
    pass


@torch.compiler.disable
def stop() -> None:
    torch.randn(3)
    random.random()
    torch.set_grad_enabled(False)
    raise Stopped


def in_graph(model: Model, hidden: Tensor, target: Tensor) -> Tensor:
    return model(hidden, target)


def in_python(model: Model, hidden: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = torch.compiler.disable(model)(hidden, target)
    return loss


def differentiated(model: Model, hidden: Tensor, target: Tensor) -> Tensor:
    in_python(model, hidden, target).backward()
    return in_graph(model, hidden, target)


def with_history(model: Model, hidden: Tensor, target: Tensor) -> Tensor:
    """A buffer that the code in Python gives a gradient."""

    @torch.compiler.disable
    def remember() -> None:
        model.decay += hidden.mean()
        model.means["a"].requires_grad_()

    remember()
    return in_graph(model, hidden, target)


STEPS = (in_graph, in_python, differentiated, with_history)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dry_run", DRY_RUNS.values(), ids=DRY_RUNS)
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_of_training(step: Any, raises: bool, dry_run: DryRun) -> None:
    model = Model()
    given = inputs()
    counted = [torch.zeros(2)]
    cell = 0

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        nonlocal cell
        counted[0].add_(1)
        cell += 1
        found: Tensor = step(model, hidden, target)
        if raises:
            stop()
        return found

    before = everything(model, given, counted)
    expected = pytest.raises(Stopped) if raises and dry_run is not explained else None
    with expected or contextlib.nullcontext():
        dry_run(loss, *given)
    assert everything(model, given, counted) == before
    assert cell == 0


@pytest.mark.parametrize("dry_run", DRY_RUNS.values(), ids=DRY_RUNS)
def test_a_module_and_its_arguments(dry_run: DryRun) -> None:
    model, given = Model(), inputs()
    before = everything(model, given)
    dry_run(model, *given)
    assert everything(model, given) == before


@pytest.mark.parametrize("dry_run", DRY_RUNS.values(), ids=DRY_RUNS)
def test_logits_that_are_changed_in_place(dry_run: DryRun) -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.div_(0.7), target)

    logits, target = torch.randn(ROWS, VOCAB, requires_grad=True) * 1, inputs()[1]
    history = logits.grad_fn
    before = everything(logits, target)
    dry_run(loss, logits, target)
    assert everything(logits, target) == before
    assert logits.grad_fn is history


CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("CURRENT")


class Holders:
    """What keeps values of the user's, and is no plain container."""

    def __init__(self, model: Model) -> None:
        self.layer = torch.nn.Linear(2, 2)
        self.of_thread = threading.local()
        self.weakly: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.chain: collections.ChainMap[str, Any] = collections.ChainMap({}, {})
        self.numpys = np.random.default_rng(0)
        self.numpys_old = np.random.RandomState(0)
        self.weight = model.weight

    def change(self) -> None:
        self.of_thread.last = self.weakly[self.layer] = self.chain["a"] = self.weight * 2
        CURRENT.set(self.weight * 2)
        self.numpys.random(), self.numpys_old.rand()
        self.weight.register_hook(lambda grad: grad * 2)
        self.weight.register_post_accumulate_grad_hook(lambda weight: None)
        torch.nn.utils.parametrizations.weight_norm(self.layer)

    def shown(self) -> Any:
        hooks = self.weight._backward_hooks, self.weight._post_accumulate_grad_hooks
        return (
            type(self.layer),
            [*vars(self.of_thread)],
            [*self.weakly],
            [*self.chain],
            CURRENT.get(None),
            self.numpys.bit_generator.state,
            self.numpys_old.get_state()[1].tolist(),
            [[*(each or {})] for each in hooks],
        )


@pytest.mark.parametrize("dry_run", DRY_RUNS.values(), ids=DRY_RUNS)
@pytest.mark.parametrize("hooked", [False, True])
def test_other_holders_and_hooks(hooked: bool, dry_run: DryRun) -> None:
    model, given = Model(), inputs()
    holders = Holders(model)
    if hooked:
        model.weight.register_hook(lambda grad: grad + 1)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        torch.compiler.disable(holders.change)()
        return in_graph(model, hidden, target)

    before = everything(model, given, vars(holders.layer)), holders.shown()
    dry_run(loss, *given)
    assert (everything(model, given, vars(holders.layer)), holders.shown()) == before


@pytest.mark.parametrize("dry_run", DRY_RUNS.values(), ids=DRY_RUNS)
def test_memory_that_python_code_exchanges(dry_run: DryRun) -> None:
    model, given, centre = Model(), inputs(), torch.zeros(HIDDEN)

    @torch.compiler.disable
    def move(hidden: Tensor) -> None:
        centre.data = hidden.detach().mean(0)
        model.weight.data = model.weight.data * 2

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        found: Tensor = model(hidden, target)
        move(hidden)
        return found

    before = everything(model, given, centre)
    dry_run(loss, *given)
    assert everything(model, given, centre) == before


def test_what_was_trained_before_can_go_on() -> None:
    """Autograd has saved the weight; its version tells that nobody has changed it."""
    model, (hidden, target) = Model(), inputs()
    value = (hidden @ model.weight.t()).square().sum()
    explain(in_python)(model, hidden, target)
    value.backward()


# ---- tensors on "meta" --------------------------------------------------------------------------------------------


def head_loss(head: Any, hidden: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden), target)


def test_meta_is_as_fake() -> None:
    """Torch has no derivative of cross entropy on "meta"."""
    rows, vocab = 1 << 16, 4096
    with torch.device("meta"):
        logits = torch.empty(rows, vocab, requires_grad=True) * 1
        target = torch.empty(rows, dtype=torch.long)
    report = explain(F.cross_entropy)(logits, target)
    report.assert_fused(2)
    assert "gradient" in [value.kind for value in report.graphs[0].values]
    with torch._subclasses.FakeTensorMode():
        fakes = torch.empty(rows, vocab, requires_grad=True) * 1, torch.empty(rows).long()
    found = estimate_peak(F.cross_entropy, logits, target, consume_logits=False)
    assert found == estimate_peak(F.cross_entropy, *fakes, consume_logits=False)
    assert found.peak_bytes >= 2 * rows * vocab * 4
    assert logits.device.type == "meta"


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        head = torch.nn.Linear(HIDDEN, 4096, bias=False)
        hidden, target = torch.empty(1 << 16, HIDDEN), torch.empty(1 << 16, dtype=torch.long)
    weight = head.weight

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return head_loss(head, hidden, target)

    explain(loss)(hidden, target).assert_fused()
    real = torch.nn.Linear(HIDDEN, 4096, bias=False)
    found = estimate_peak(loss, hidden, target)
    given = torch.zeros(1 << 16, HIDDEN), torch.zeros(1 << 16, dtype=torch.long)
    assert found == estimate_peak(lambda h, t: head_loss(real, h, t), *given)
    assert head.weight is weight
