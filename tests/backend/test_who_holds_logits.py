"""consume_logits="auto": logits that somebody can still see stay as they are, whoever it is; nobody's are overwritten.

Each holder keeps the logits in its way, reads them after backward, and finds what it was given; the gradient is
eager's in all cases, bit for bit that of a gradient in a buffer of its own. Functions are compiled once for all cases.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import Variable
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import slime_compile
from slime_compile import ops
from slime_compile.ops import holders
from slime_compile.ops.held_by import variables
from tests.support import harness

ROWS, VOCAB = 6, 64
TARGET = torch.arange(ROWS) * 7
UPSTREAM = torch.linspace(-1.0, 2.0, ROWS)
OPTIONS = {"min_vocab": 32, "strict": True}

Loss = Callable[[Tensor], Tensor]
Read = Callable[[], Any]
"""What a holder still sees."""


def log_probs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, TARGET[:, None])[:, 0]


def compiled(fn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return torch.compile(fn, backend="slime_fused", options={**OPTIONS, **options})


@pytest.fixture(scope="module", params=["aot_eager", "inductor"])
def fn(request: pytest.FixtureRequest) -> Loss:
    torch._dynamo.reset()
    made = compiled(log_probs, inner=request.param)
    step(made)  # compiles
    return made


def leaf() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, VOCAB, generator=draw).requires_grad_()


@functools.cache
def right() -> tuple[Tensor, Tensor]:
    """The logits, and their gradient from a buffer of its own."""
    x = leaf()
    beside = compiled(log_probs, inner="aot_eager", consume_logits=False)
    (gradient,) = torch.autograd.grad(beside(x * 1), x, UPSTREAM)
    torch.testing.assert_close(gradient, torch.autograd.grad(log_probs(x * 1), x, UPSTREAM)[0])
    return x.detach(), gradient


def overwritten() -> int:
    """Gradients of this process that were written over logits so far."""
    return sum(p.over for p in ops.placements.values())


def step(fn: Loss, hold: Callable[[Tensor], Read] | None = None) -> Read | None:
    """One step in which nobody holds the logits but `hold`; the gradient is right."""
    x = leaf()
    logits = x * 1
    read = hold(logits) if hold is not None else None
    out = fn(logits)
    del logits
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM)
    assert torch.equal(gradient, right()[1])
    return read


def check_held(fn: Loss, hold: Callable[[Tensor], Read]) -> None:
    before = overwritten()
    read = step(fn, hold)
    assert read is not None
    assert overwritten() == before
    torch.testing.assert_close(torch.as_tensor(read()), right()[0], rtol=0, atol=0)


# ---- nobody -------------------------------------------------------------------------------------------------------


def test_nobody(fn: Loss) -> None:
    before = overwritten()
    for _ in range(5):
        step(fn)
    assert overwritten() == before + 5


def test_the_report_counts(fn: Loss) -> None:
    """Last of the reports is `right`'s, or that of `fn`."""
    step(fn)
    said = "\n".join(str(report) for report in slime_compile.reports())
    assert "written over the logits" in said


def test_a_holder_that_lets_go_is_none(fn: Loss) -> None:
    before = overwritten()

    def for_a_while(logits: Tensor) -> Read:
        kept = [
            logits,
            logits.view(-1),
            logits.detach(),
            logits.untyped_storage(),
            weakref.ref(logits),
        ]
        kept.clear()
        return lambda: None

    step(fn, for_a_while)
    assert overwritten() == before + 1


# ---- Python -------------------------------------------------------------------------------------------------------


class Box:
    logits: Tensor


def variable(logits: Tensor) -> Read:
    return lambda: logits  # a cell


def attribute(logits: Tensor) -> Read:
    box = Box()
    box.logits = logits
    return lambda: box.logits


def in_a_list(logits: Tensor) -> Read:
    return functools.partial([logits].__getitem__, 0)


def in_a_dict(logits: Tensor) -> Read:
    return functools.partial({"logits": logits}.get, "logits")


def default_argument(logits: Tensor) -> Read:
    def read(kept: Tensor = logits) -> Tensor:
        return kept

    return read


def generator(logits: Tensor) -> Read:
    def waiting() -> Iterator[Tensor]:
        kept = logits * 0 + logits  # runs at the first next
        yield kept
        yield logits

    made = waiting()
    next(made)
    return lambda: next(made)


def exception(logits: Tensor) -> Read:
    def fails(kept: Tensor) -> None:
        raise ValueError(kept.shape)

    try:
        fails(logits)
    except ValueError as error:
        caught = error
    assert caught.__traceback__ is not None
    return lambda: caught.__traceback__.tb_next.tb_frame.f_locals["kept"]  # type: ignore[union-attr]


def another_thread(logits: Tensor) -> Read:
    go, found = threading.Event(), []

    def work(kept: Tensor) -> None:
        go.wait()
        found.append(kept)

    thread = threading.Thread(target=work, args=(logits,))
    thread.start()

    def read() -> Tensor:
        go.set()
        thread.join()
        return found[0]

    return read


def cycle(logits: Tensor) -> Read:
    """Unreachable but not collected; `__del__` sees it."""
    seen: list[Tensor] = []

    class Dying:
        def __del__(self) -> None:
            seen.append(self.logits)  # type: ignore[attr-defined]

    gc.disable()
    dying = Dying()
    dying.logits, dying.itself = logits, dying  # type: ignore[attr-defined]
    del dying

    def read() -> Tensor:
        gc.enable()
        gc.collect()
        return seen[0]

    return read


def hook(logits: Tensor) -> Read:
    seen: list[Tensor] = []
    logits.register_hook(lambda grad: seen.append(logits.detach().clone()))
    return lambda: seen[0]


def own_attribute(logits: Tensor) -> Read:
    """A cycle through the tensor itself."""
    logits.itself = logits  # type: ignore[attr-defined]
    seen = weakref.ref(logits)
    return lambda: seen()


PYTHON = [
    variable, attribute, in_a_list, in_a_dict, default_argument, generator, exception, another_thread, cycle, hook,
    own_attribute,
]  # fmt: skip


# ---- the same memory ----------------------------------------------------------------------------------------------


def detached(logits: Tensor) -> Read:
    kept = logits.detach()
    return lambda: kept


def data(logits: Tensor) -> Read:
    kept = logits.data
    return lambda: kept


def view(logits: Tensor) -> Read:
    kept = logits.view(-1)
    return lambda: kept.view(ROWS, VOCAB)


def unbound(logits: Tensor) -> Read:
    kept = logits.unbind()
    return lambda: torch.stack(kept)


def one_row(logits: Tensor) -> Read:
    kept, rest = logits[2], logits.detach().clone()

    def read() -> Tensor:
        rest[2] = kept
        return rest

    return read


def under_no_grad(logits: Tensor) -> Read:
    with torch.no_grad():
        kept = logits[:]
    return lambda: kept


def as_numpy(logits: Tensor) -> Read:
    kept = logits.detach().numpy()
    return lambda: kept


def buffer(logits: Tensor) -> Read:
    kept = memoryview(logits.detach().numpy())
    return lambda: numpy.asarray(kept)


def array_interface(logits: Tensor) -> Read:
    class Foreign:
        __array_interface__ = logits.detach().numpy().__array_interface__
        owner = logits.untyped_storage()

    kept = numpy.asarray(Foreign())
    return lambda: kept


def dlpack(logits: Tensor) -> Read:
    kept = numpy.from_dlpack(logits.detach())
    return lambda: kept


def dlpack_capsule(logits: Tensor) -> Read:
    kept = torch.utils.dlpack.to_dlpack(logits.detach())
    return lambda: torch.utils.dlpack.from_dlpack(kept)


def storage(logits: Tensor) -> Read:
    kept = logits.untyped_storage()
    return lambda: torch.tensor([], dtype=torch.float32).set_(kept, 0, (ROWS, VOCAB))


def reinterpreted(logits: Tensor) -> Read:
    kept = torch.as_strided(logits.detach(), (ROWS * VOCAB,), (1,)).view(torch.int32)
    return lambda: kept.view(torch.float32).view(ROWS, VOCAB)


MEMORY = [
    detached, data, view, unbound, one_row, under_no_grad, as_numpy, buffer, array_interface, dlpack, dlpack_capsule,
    storage, reinterpreted,
]  # fmt: skip


@pytest.mark.parametrize("hold", [*PYTHON, *MEMORY], ids=lambda hold: hold.__name__)
def test_held(fn: Loss, hold: Callable[[Tensor], Read]) -> None:
    check_held(fn, hold)


def test_weak_references(fn: Loss) -> None:
    """One may become a strong one at any moment."""
    before = overwritten()
    read = step(fn, lambda logits: weakref.ref(logits))
    assert overwritten() == before
    assert read is not None
    assert read() is None


def test_memory_that_is_not_torchs_own(fn: Loss) -> None:
    """Who owns it is not counted: NumPy's, a C buffer, another process's."""
    values = right()[0].numpy()
    owners = [values.copy(), (ctypes.c_float * (ROWS * VOCAB))(*values.ravel())]
    makers = [
        lambda: torch.from_numpy(owners[0]),
        lambda: torch.frombuffer(owners[1], dtype=torch.float32).view(ROWS, VOCAB),
        lambda: torch.from_numpy(values.copy()).clone().share_memory_(),
    ]
    before = overwritten()
    for make in makers:
        one = torch.ones((), requires_grad=True)
        logits = make().mul_(one)  # no leaf, and the memory is the owner's
        out = fn(logits)
        del logits
        torch.autograd.grad(out, one, UPSTREAM)
    assert overwritten() == before
    for owner in owners:
        numpy.testing.assert_array_equal(numpy.asarray(owner).reshape(ROWS, VOCAB), values)


def test_a_leaf(fn: Loss) -> None:
    before = overwritten()
    x = leaf()
    (gradient,) = torch.autograd.grad(fn(x), x, UPSTREAM)
    assert torch.equal(gradient, right()[1])
    assert torch.equal(x, right()[0])
    views = leaf()
    torch.autograd.grad(fn(views.view(ROWS, VOCAB)), views, UPSTREAM)
    assert torch.equal(views, right()[0])
    assert overwritten() == before


# ---- autograd -----------------------------------------------------------------------------------------------------


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


# ---- what the report says -----------------------------------------------------------------------------------------


class Outputs:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_the_remedy_names_the_variable() -> None:
    torch._dynamo.reset()
    fn = compiled(lambda logits: log_probs(logits) * 0.5, inner="aot_eager")
    outputs = Outputs(leaf() * 1)
    fn(outputs.logits).backward(UPSTREAM)
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    said = placement.reason
    assert said.startswith(
        "Python holds them (`outputs.logits` in test_the_remedy_names_the_variable ("
    )
    line = str(slime_compile.reports()[-1]).splitlines()[-1]
    assert f"not in place, 0 of 1 call: {said}" in line

    kept = [(leaf() * 1).view(-1, VOCAB)]
    alias = kept[0].detach()
    fn(kept.pop()).backward(UPSTREAM)
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    assert "`alias` in test_the_remedy" in placement.reason
    assert alias.shape == (ROWS, VOCAB)


def test_looking_for_variables_leaves_no_trace() -> None:
    """Before Python 3.13 a frame keeps a picture of its variables once somebody has asked for them."""
    logits = leaf() * 1
    dead = weakref.ref(logits)
    (said,) = variables(logits)
    assert said.startswith("`logits` in test_looking_for_variables_leaves_no_trace (")
    mine = locals()
    assert mine["logits"] is logits
    variables(logits)
    assert mine["logits"] is logits
    del logits
    mine.clear()
    assert dead() is None


# ---- where counting is at fault -----------------------------------------------------------------------------------


def test_no_clear_answer(fn: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is overwritten, and one note says so."""
    for path in (holders._generated, *holders._paths.values()):
        monkeypatch.setattr(path, "_least", "counts of a tensor that nobody holds differ")
    torch._dynamo.reset()
    again = compiled(log_probs, inner="aot_eager")
    before = overwritten()
    step(again)
    assert overwritten() == before
    (note,) = slime_compile.reports()[-1].graphs[0].notes
    assert note.startswith(
        "consume_logits='auto' overwrites nothing here: who holds them cannot be told"
    )
