"""consume_logits="auto", and somebody has the logits' memory: views, aliases, storages, NumPy, C; or it is not torch's.

Each keeps it in its way, and finds after backward what was there before.
"""

from __future__ import annotations

import ctypes
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.held import (
    ROWS,
    UPSTREAM,
    VOCAB,
    Loss,
    Read,
    check_held,
    compiled,
    leaf,
    log_probs,
    overwritten,
    right,
    step,
)


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


def typed_storage(logits: Tensor) -> Read:
    kept = logits._typed_storage()  # type: ignore[attr-defined]
    return lambda: torch.tensor([], dtype=torch.float32).set_(
        kept._untyped_storage, 0, (ROWS, VOCAB)
    )


def part_of_the_storage(logits: Tensor) -> Read:
    """A storage of its own over the same bytes."""
    kept = logits.untyped_storage()[: logits.nbytes]
    return lambda: torch.tensor([], dtype=torch.float32).set_(kept, 0, (ROWS, VOCAB))


def larger_buffer(logits: Tensor) -> Read:
    """What autograd does not know as a view."""
    kept = torch.empty(0).set_(logits.untyped_storage(), 0, (ROWS, VOCAB // 2), (VOCAB, 1))
    rest = logits.detach().clone()[:, VOCAB // 2 :]
    return lambda: torch.cat([kept, rest], -1)


def transposed(logits: Tensor) -> Read:
    kept = logits.detach().t()
    return lambda: kept.t()


def expanded(logits: Tensor) -> Read:
    kept = logits.detach().expand(3, ROWS, VOCAB)
    return lambda: kept[2]


def unsafe_parts(logits: Tensor) -> Read:
    """Views that are not marked as such."""
    kept = torch.unsafe_chunk(logits.detach(), 2)
    return lambda: torch.cat(kept)


def assigned(logits: Tensor) -> Read:
    kept = torch.empty(0)
    kept.data = logits.detach()
    return lambda: kept


def parameter(logits: Tensor) -> Read:
    kept = torch.nn.Parameter(logits.detach())
    return lambda: kept.detach()


def module_buffer(logits: Tensor) -> Read:
    module = torch.nn.Module()
    module.register_buffer("kept", logits.detach(), persistent=False)
    return lambda: module.kept


def subclass(logits: Tensor) -> Read:
    class Named(Tensor):
        pass

    kept = logits.detach().as_subclass(Named)
    return lambda: kept.as_subclass(Tensor)


def wrapper(logits: Tensor) -> Read:
    kept = TwoTensor(logits.detach(), logits.detach())
    return lambda: kept.b


def swapped(logits: Tensor) -> Read:
    kept, other = torch.zeros(ROWS, VOCAB), logits.detach()
    torch.utils.swap_tensors(kept, other)
    return lambda: kept


def under_inference_mode(logits: Tensor) -> Read:
    with torch.inference_mode():
        kept = logits.view(-1)
    return lambda: kept.clone().view(ROWS, VOCAB)


def pickled_in_place(logits: Tensor) -> Read:
    """Protocol 5: what is pickled refers to the memory."""
    buffers: list[pickle.PickleBuffer] = []
    kept = pickle.dumps(logits.detach().numpy(), protocol=5, buffer_callback=buffers.append)
    return lambda: numpy.array(pickle.loads(kept, buffers=buffers))


def c_array(logits: Tensor) -> Read:
    kept = (ctypes.c_float * (ROWS * VOCAB)).from_buffer(logits.detach().numpy())
    return lambda: numpy.array(kept).reshape(ROWS, VOCAB)


def list_of_cpps(logits: Tensor) -> Read:
    kept = torch._C.ScriptList([logits.detach()])
    return lambda: kept[0]


def base(logits: Tensor) -> Read:
    return lambda: logits


def base_in_autograd(logits: Tensor) -> Read:
    """Another node has saved it."""
    kept = logits * logits
    return lambda: kept.grad_fn._saved_self  # type: ignore[union-attr]


MEMORY = [
    detached, data, view, unbound, one_row, under_no_grad, as_numpy, buffer, array_interface, dlpack, dlpack_capsule,
    storage, reinterpreted, typed_storage, part_of_the_storage, larger_buffer, transposed, expanded, unsafe_parts, assigned,
    parameter, module_buffer, subclass, wrapper, swapped, under_inference_mode, pickled_in_place, c_array, list_of_cpps,
]  # fmt: skip


@pytest.mark.parametrize("hold", MEMORY, ids=lambda hold: hold.__name__)
def test_held(fn: Loss, hold: Callable[[Tensor], Read]) -> None:
    check_held(fn, hold)


def test_a_view_is_given(fn: Loss) -> None:
    """Nobody has what it is a view of: as in Megatron, where the batch is one packed sequence, transposed."""
    before = overwritten()
    for number in range(3):
        x = leaf()
        logits = (x * 1).unsqueeze(1).transpose(0, 1).contiguous().squeeze(0)
        assert logits._base is not None
        out = fn(logits)
        del logits
        (gradient,) = torch.autograd.grad(out, x, UPSTREAM)
        assert torch.equal(gradient, right()[1])
        assert overwritten() == before + number + 1


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_one_packed_sequence(inner: str) -> None:
    """[1, T, V] with strides (V, V, 1): what Megatron returns, and slime takes."""
    torch._dynamo.reset()
    packed = compiled(lambda logits: log_probs(logits[0] * 0.5), inner=inner)
    wanted = torch.autograd.grad(log_probs((x := leaf()) * 0.5), x, UPSTREAM)
    for number in range(2):
        x = leaf()
        logits = (x * 1).unsqueeze(1).transpose(0, 1).contiguous()
        assert logits.stride() == (VOCAB, VOCAB, 1)
        out = packed(logits)
        del logits
        before = overwritten()
        torch.testing.assert_close(torch.autograd.grad(out, x, UPSTREAM), wanted)
        assert overwritten() == before + 1, number


HOLDERS_OF_A_BASE = [
    base, view, detached, data, one_row, as_numpy, storage, assigned, list_of_cpps, base_in_autograd,
]  # fmt: skip


@pytest.mark.parametrize("hold", HOLDERS_OF_A_BASE, ids=lambda hold: hold.__name__)
def test_the_base_is_held(fn: Loss, hold: Callable[[Tensor], Read]) -> None:
    x = leaf()
    whole = x * 1
    logits = whole.view(2, -1).view(ROWS, VOCAB)
    read = hold(whole)
    out = fn(logits)
    del logits, whole
    before = overwritten()
    (gradient,) = torch.autograd.grad(out, x, UPSTREAM, retain_graph=False)
    assert torch.equal(gradient, right()[1])
    assert overwritten() == before
    kept = read()
    assert kept is None or torch.equal(torch.as_tensor(kept), right()[0])


def test_weak_references(fn: Loss) -> None:
    """One may become a strong one at any moment."""
    for of in (lambda logits: logits, lambda logits: logits.untyped_storage()):
        before = overwritten()
        read = step(fn, lambda logits, of=of: weakref.ref(of(logits)))
        assert overwritten() == before
        assert read is not None
        assert read() is None


def test_memory_that_is_not_torchs_own(fn: Loss, tmp_path: Path) -> None:
    """Who owns it is not counted: NumPy's, a C buffer, another process's."""
    values = right()[0].numpy()
    file = tmp_path / "logits"
    file.write_bytes(values.tobytes())
    in_c = (ctypes.c_float * values.size)(*values.ravel())
    owners = [values.copy(), in_c, values.copy(), numpy.concatenate([values, values])]
    makers = [
        lambda: torch.from_numpy(owners[0]),
        lambda: torch.frombuffer(owners[1], dtype=torch.float32).view(ROWS, VOCAB),
        lambda: torch.from_numpy(values.copy()).clone().share_memory_(),
        lambda: torch.from_file(str(file), shared=True, size=ROWS * VOCAB).view(ROWS, VOCAB),
        lambda: torch.from_dlpack(owners[2]),
        lambda: torch.from_numpy(owners[3])[:ROWS],
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
        found = numpy.asarray(owner).reshape(-1, VOCAB)[:ROWS]
        numpy.testing.assert_array_equal(found.reshape(ROWS, VOCAB), values)
    assert file.read_bytes() == values.tobytes()


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
