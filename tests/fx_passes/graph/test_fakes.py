"""Fake values of new nodes are those that torch gives, with and without running the operator."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fx_passes.graph import fakes
from fx_passes.torch_private import FakeTensor, FakeTensorMode

TARGETS = sorted(fakes._ARITHMETIC, key=str)  # alike in every worker
BINARY = [op for op in TARGETS if len(op._schema.arguments) > 1]
UNARY = [op for op in TARGETS if op not in BINARY]

ones = torch.ones
PAIRS = {
    "of rows": (ones(5, 1), ones(5, 1)),
    "of half precision": (ones(5, 3, dtype=torch.bfloat16), ones(5, 3, dtype=torch.bfloat16)),
    "without dimensions": (torch.tensor(1.0), torch.tensor(2.0)),
    "without elements": (ones(0, 3), ones(0, 3)),
    "and a number": (ones(5), 2.5),
    "and an integer": (ones(5, dtype=torch.float16), 2),
    "and a truth value": (ones(5), True),
    "and a complex number": (ones(5), 1j),
    "of integers": (ones(5, dtype=torch.int64), ones(5, dtype=torch.int64)),
    "of integers and a number": (ones(5, dtype=torch.int64), 0.5),
    "of two dtypes": (ones(5), ones(5, dtype=torch.float64)),
    "of two shapes": (ones(5, 3), ones(3)),
    "turned": (ones(5, 3).t(), ones(5, 3).t()),
    "of two layouts": (ones(5, 3).t(), ones(3, 5)),
    "repeated": (ones(5, 1).expand(5, 3), ones(5, 1).expand(5, 3)),
    "with gaps": (ones(5, 4)[:, :3], ones(5, 4)[:, :3]),
    "on two devices": (ones(5, device="meta"), torch.tensor(1.0)),
}


def described(fake: Tensor) -> tuple[Any, ...]:
    layout = (tuple(fake.shape), fake.stride(), fake.storage_offset())
    return (type(fake), fake.dtype, fake.device, *layout, fake.requires_grad)


def assert_as_torch_gives_it(target: Any, args: tuple[Any, ...]) -> None:
    mode = FakeTensorMode()
    fake = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
    with mode:
        expected = target(*fake)
    with FakeTensorMode():  # that of a compile that goes on
        found = fakes.result_of(mode, target, fake, {})
    assert described(found) == described(expected)
    assert isinstance(found, FakeTensor)
    assert found.fake_mode is mode
    assert all(found.untyped_storage()._cdata != arg.untyped_storage()._cdata for arg in fake[:1])


@pytest.mark.parametrize("target", BINARY, ids=str)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_of_two(target: Any, pair: tuple[Any, Any]) -> None:
    assert_as_torch_gives_it(target, pair)


@pytest.mark.parametrize("target", UNARY, ids=str)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_of_one(target: Any, pair: tuple[Any, Any]) -> None:
    assert_as_torch_gives_it(target, pair[:1])


def test_of_symbolic_sizes() -> None:
    """Comparing them would add a guard."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    x, y = (mode.from_tensor(torch.ones(rows, 3), static_shapes=False) for rows in (5, 7))
    found = fakes.result_of(mode, torch.ops.aten.add.Tensor, (x, x), {})
    assert found.shape == x.shape
    assert fakes._all_alike((x, y)) is None
    assert not shapes.guards


def test_a_size_of_its_own() -> None:
    """Torch looks for new symbols in the next value that it makes."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    x, number = mode.from_tensor(torch.ones(8, 3)), mode.from_tensor(torch.tensor(5))
    with mode:
        rows = number.item()
    pending = list(shapes.pending_fresh_unbacked_symbols)
    arguments = (x, 0, 0, rows)
    text = "the size of the result of a new aten.slice.Tensor depends on data"
    with pytest.raises(fakes.Refused, match=text):
        fakes.result_of(mode, torch.ops.aten.slice.Tensor, arguments, {})
    full = fakes.result_of(mode, torch.ops.aten.full.default, ([rows, 3], 0.0), {})
    assert fakes._symbols(full) == fakes._symbols(rows) != set()
    assert shapes.pending_fresh_unbacked_symbols == pending
