"""The table of row moves: each operator over chunks of rows gives what it gives for all rows, wherever these lie.

A program is traced over a layout. Every node that the table has a step for is computed from chunks of its operands, and
compared with the value that the program has there.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

import slime_compile.ops  # noqa: F401  (registers the fused operators)
from fx_passes.graph.rows import COUNT, Block, Rows, Step, Whole, across, block_of, normal, step_of

aten = torch.ops.aten
V, N, CHUNK = 6, 12, 5
UNSET = (aten.empty_like.default, aten.empty.memory_format, aten.new_empty_strided.default)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where rows and columns are: sizes of the rows, and the dimension of the columns among all."""

    name: str
    lead: tuple[int, ...]
    columns: int

    @property
    def block(self) -> Block:
        return Block(tuple(dim for dim in range(len(self.lead) + 1) if dim != self.columns))

    def shape(self, columns: int) -> tuple[int, ...]:
        return (*self.lead[: self.columns], columns, *self.lead[self.columns :])

    def values(self, columns: int = V, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        """Numbers with infinities and NaN among them."""
        draw = torch.Generator().manual_seed(seed)
        made = 3 * torch.randn(self.shape(columns), generator=draw)
        if columns == V:
            flat = made.view(-1)
            flat[3], flat[10], flat[17], flat[29] = -math.inf, math.nan, math.inf, 0.0
        return made.to(dtype)

    def index(self, columns: int = 2, below: int = V) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        return torch.randint(0, below, self.shape(columns), generator=draw)


LAYOUTS = [
    Layout("rows first", (N,), 1),
    Layout("batches", (3, 4), 2),
    Layout("a batch of one", (1, N), 2),
    Layout("as many rows as columns", (V,), 1),
    Layout("columns first", (N,), 0),
    Layout("columns in the middle", (3, 4), 1),
]

Program = Callable[..., Any]
"""Of a layout and the dimension of the columns, tensors: x first."""


def one(x: Tensor, d: int) -> Tensor:
    return x.sum(d, keepdim=True)


PROGRAMS: dict[str, Callable[[Tensor, int, Layout], Any]] = {
    "arithmetic": lambda x, d, at: (x * 2 - x.exp()) / 3,
    "a number per row": lambda x, d, at: x - x.amax(d, keepdim=True),
    "columns alone": lambda x, d, at: (
        x * torch.arange(V).view([V if k == d else 1 for k in range(x.dim())])
    ),
    "a constant": lambda x, d, at: torch.where(x > 0, x, torch.full_like(x, 2.0)),
    "a full": lambda x, d, at: torch.full(x.shape, 2.0) + x,
    "a cast": lambda x, d, at: x.double().to(torch.float16),
    "a mask": lambda x, d, at: x.masked_fill(x.isnan() | x.isinf(), -math.inf),
    "clamp": lambda x, d, at: x.clamp(-1, 1),
    "sum": lambda x, d, at: x.sum(d),
    "sum, kept": lambda x, d, at: x.sum(d, keepdim=True),
    "mean": lambda x, d, at: x.mean(d),
    "amax": lambda x, d, at: x.amax(d),
    "argmax": lambda x, d, at: x.argmax(d),
    "max": lambda x, d, at: x.max(d)[1],
    "any": lambda x, d, at: (x > 1).any(d),
    "var": lambda x, d, at: x.var(d),
    "logsumexp": lambda x, d, at: x.logsumexp(d),
    "gather": lambda x, d, at: x.gather(d, at.index()),
    "scatter": lambda x, d, at: x.scatter(d, at.index(1), x.sum(d, keepdim=True)),
    "scatter a number": lambda x, d, at: x.scatter(d, at.index(), 7.0),
    "scatter into zeros": lambda x, d, at: torch.zeros(x.shape).scatter(d, at.index(1), one(x, d)),
    "scatter_add": lambda x, d, at: x.scatter_add(d, at.index(), at.values(2, seed=3)),
    "sort": lambda x, d, at: x.sort(dim=d)[0],
    "topk": lambda x, d, at: x.topk(2, dim=d)[1],
    "cumsum": lambda x, d, at: x.cumsum(d),
    "turned round": lambda x, d, at: torch.ops.prims.rev(x, [d]),
    "some columns": lambda x, d, at: x.narrow(d, 1, 3),
    "every other column": lambda x, d, at: aten.slice.Tensor(x, d, 0, V, 2),
    "a column": lambda x, d, at: x.select(d, -1),
    "columns written": lambda x, d, at: aten.slice_scatter(x, x.narrow(d, 0, 2) * 2, d, 2, 4),
    "a column written": lambda x, d, at: aten.select_scatter(x, x.select(d, 0) * 2, d, 4),
    "memory": lambda x, d, at: aten.copy(aten.new_empty_strided(x, x.shape, x.stride()), x),
    "columns by numbers": lambda x, d, at: x.index_select(d, torch.tensor([4, 0, 4])),
    "joined": lambda x, d, at: torch.cat([x, x.narrow(d, 0, 1)], d),
    "slice backward": lambda x, d, at: aten.slice_backward(
        x.narrow(d, 0, 2), list(x.shape), d, 3, 5, 1
    ),
    "select backward": lambda x, d, at: aten.select_backward(x.select(d, 0), list(x.shape), d, 4),
    "expand": lambda x, d, at: x.sum(d, keepdim=True).expand(x.shape),
    "turned": lambda x, d, at: x.movedim(d, 0 if d else -1).exp(),
    "unsqueezed": lambda x, d, at: x.unsqueeze(0).exp().squeeze(0),
    "copied over": lambda x, d, at: aten.copy(x.exp(), x.sum(d, keepdim=True)),
    "clone": lambda x, d, at: x.clone().detach(),
}
ONLY_2D: dict[str, Callable[[Tensor, int, Layout], Any]] = {
    "matmul": lambda x, d, at: x @ torch.ones(V, 4) if d else torch.ones(4, V) @ x,
    "addmm": lambda x, d, at: torch.addmm(torch.arange(4.0), x, torch.ones(V, 4)) if d else x + 0,
}
LAST: dict[str, Callable[[Tensor, int, Layout], Any]] = {
    "the same columns of all rows": lambda x, d, at: x[..., torch.tensor([3, 0])],
    "rows put together": lambda x, d, at: x.flatten(0, -2).exp(),
    "columns in groups": lambda x, d, at: x.unflatten(-1, (2, 3)).sum(-1),
    "two dimensions of columns": lambda x, d, at: x.unflatten(-1, (2, 3)).amax((-2, -1)),
    "statistics": lambda x, d, at: torch.ops.slime_fused.row_stats(x, None, 1.0, "")[1],
}
ROWS_BY_NUMBER: dict[str, Callable[[Tensor, int, Layout], Any]] = {
    "a column of each row": lambda x, d, at: x[torch.arange(x.shape[0]), at.index(1)[:, 0]],
    "columns of each row": lambda x, d, at: x[torch.arange(x.shape[0])[:, None], at.index(2)],
    "written by numbers": lambda x, d, at: aten.index_put(
        torch.zeros(x.shape), [torch.arange(x.shape[0]), at.index(1)[:, 0]], x[:, 0], True
    ),
}


def traced(program: Callable[..., Any], layout: Layout) -> tuple[GraphModule, Tensor]:
    x = layout.values()
    dim = layout.columns
    numbers = get_decompositions([aten.arange])  # as AOTAutograd has them
    return make_fx(lambda x: program(x, dim, layout), decomposition_table=numbers)(x), x


class Chunks:
    """Computes steps over chunks of rows, from the whole values of their operands."""

    def __init__(self, values: dict[Node, Any], start: int, stop: int, rows: int) -> None:
        self.values, self.start, self.stop, self.rows = values, start, stop, rows

    def of(self, tensor: Any, block: Block) -> Any:
        if isinstance(tensor, (tuple, list)):
            return [self.of(each, block) for each in tensor]
        count = len(block.dims)
        front = tensor.movedim(list(block.dims), list(range(count)))
        return front.reshape(self.rows, *front.shape[count:])[self.start : self.stop]

    def run(self, step: Step) -> Any:
        args, kwargs = self._plain(step.args), self._plain(dict(step.kwargs))
        if step.target is torch.ops.prims.iota.default:
            kwargs["device"] = "cpu"
        return step.target(*args, **kwargs)

    def _plain(self, arg: Any) -> Any:
        if isinstance(arg, Step):
            return self.run(arg)
        if arg is COUNT:
            return self.stop - self.start
        if isinstance(arg, Rows):
            found = self.of(self.values[arg.node], arg.block)
            if arg.gap:
                found = found.reshape(found.shape[0], *[1] * arg.gap, *found.shape[1:])
            return found
        if isinstance(arg, Whole):
            found = self.values[arg.node]
            return found if arg.without is None else found.squeeze(arg.without.dims)
        if isinstance(arg, dict):
            return {key: self._plain(each) for key, each in arg.items()}
        if isinstance(arg, (tuple, list)):
            return type(arg)(self._plain(each) for each in arg)
        return arg


def all_values(module: GraphModule, x: Tensor) -> dict[Node, Any]:
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = x
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(module)
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


def checked(program: Callable[..., Any], layout: Layout) -> Node | None:
    """Compares every step; the node that is returned, where it has rows."""
    module, x = traced(program, layout)
    values = all_values(module, x)
    rows = math.prod(layout.lead)
    (given,) = module.graph.find_nodes(op="placeholder")
    blocks: dict[Node, Block] = {given: normal(layout.block, x.shape)}
    for node in module.graph.nodes:
        block = block_of(node, blocks.get)
        step = None if block is None else step_of(node, block)
        if block is None or step is None:
            continue
        fake = values[node]
        first = fake[0] if isinstance(fake, (tuple, list)) else fake
        blocks[node] = normal(block, first.shape)
        for start, stop in ((0, CHUNK), (CHUNK, rows)) if node.target not in UNSET else ():
            chunks = Chunks(values, start, stop, rows)
            _assert_same(chunks.run(step), chunks.of(fake, blocks[node]), node)
    (returned,) = module.graph.output_node().all_input_nodes
    return returned if returned in blocks else None


def _assert_same(got: Any, wanted: Any, node: Node) -> None:
    pairs = zip(got, wanted, strict=True) if isinstance(wanted, (tuple, list)) else [(got, wanted)]
    for one, other in pairs:
        torch.testing.assert_close(
            one, other, equal_nan=True, msg=lambda m: f"{node.format_node()}: {m}"
        )


def _ids(cases: list[tuple[str, Layout]]) -> list[str]:
    return [f"{name}-{layout.name}".replace(" ", "_") for name, layout in cases]


EVERYWHERE = [(name, layout) for name in PROGRAMS for layout in LAYOUTS]
FLAT = [(name, layout) for name in ONLY_2D for layout in LAYOUTS if len(layout.lead) == 1]
COLUMNS_LAST = [(name, at) for name in LAST for at in LAYOUTS if at.columns == len(at.lead)]
BY_NUMBER = [(name, layout) for name in ROWS_BY_NUMBER for layout in LAYOUTS[:1] + LAYOUTS[3:4]]
CASES = EVERYWHERE + FLAT + COLUMNS_LAST + BY_NUMBER
ALL = PROGRAMS | ONLY_2D | LAST | ROWS_BY_NUMBER


@pytest.mark.parametrize(("name", "layout"), CASES, ids=_ids(CASES))
def test_row_by_row(name: str, layout: Layout) -> None:
    assert checked(ALL[name], layout) is not None


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "softmax over rows": lambda x: x.softmax(0),
    "sort over rows": lambda x: x.sort(dim=0)[0],
    "cumsum over rows": lambda x: x.cumsum(0),
    "rows turned round": lambda x: torch.ops.prims.rev(x, [0]),
    "some rows": lambda x: x[1:4].exp(),
    "rows by a mask": lambda x: x[torch.arange(N) % 2 == 0],
    "rows by numbers": lambda x: x[torch.arange(N - 1, -1, -1)],
    "other rows' columns": lambda x: x[torch.arange(N).flip(0), torch.zeros(N, dtype=torch.int64)],
    "two rows as one": lambda x: x.reshape(N // 2, 2 * V).exp(),
    "a product of rows": lambda x: x @ x.permute(1, 0),
    "the maximum of all": lambda x: x.argmax(),
    "random numbers": lambda x: torch.rand_like(x),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixes_rows(name: str) -> None:
    assert checked(lambda x, d, at: MIXED[name](x), LAYOUTS[0]) is None


def test_stacked_batches_of_one() -> None:
    """Chunks of [1, N, V] are joined as [n, 1, V]: inductor takes [n, 1, 1, V] for images, channels innermost."""
    layout = LAYOUTS[2]
    program = lambda x, d, at: torch.cat([x[None].exp(), x[None]])  # noqa: E731
    assert checked(program, layout) is not None
    module, _ = traced(program, layout)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    step = step_of(node, Block((2,)))
    assert step is not None
    joined, sizes = step.args
    assert (joined.target, joined.args[1], sizes) == (aten.cat.default, 1, [COUNT, 2, 1, V])
    assert [piece.args[1] for piece in joined.args[0]] == [[COUNT, 1, V]] * 2


def test_a_row_written() -> None:
    assert checked(lambda x, d, at: aten.select_scatter(x, x[0], 0, 1), LAYOUTS[0]) is None


def test_half_of_the_rows_dimensions_is_summed() -> None:
    assert checked(lambda x, d, at: x.sum(1), LAYOUTS[1]) is None


def test_rows_in_two_places() -> None:
    """[B, V, T] of [B, T, V], whose columns lie between batches and places."""
    for program in (
        lambda x, d, at: x.permute(0, 2, 1).exp(),
        lambda x, d, at: x.permute(0, 2, 1).reshape(3, 2, 3, 4).exp(),
        lambda x, d, at: x.permute(0, 2, 1)[:, None].exp().permute(0, 3, 1, 2).flatten(0, 1),
    ):
        assert checked(program, LAYOUTS[1]) is not None
    assert checked(lambda x, d, at: x.permute(0, 2, 1).reshape(3, -1).exp(), LAYOUTS[1]) is None


def test_rows_in_another_order() -> None:
    """[T, B, V] of [B, T, V], with as many of both: its rows are not those of the operand one after the other."""
    turned = Layout("as many batches as places", (3, 3), 2)
    assert checked(lambda x, d, at: x.permute(1, 0, 2).exp(), turned) is not None
    assert checked(lambda x, d, at: x.permute(1, 0, 2).reshape(9, V).exp(), turned) is None
    module = make_fx(lambda x: x.permute(1, 0, 2))(torch.randn(3, 3, V))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.permute.default)
    (given,) = module.graph.find_nodes(op="placeholder")
    assert block_of(node, {given: Block((0, 1))}.get) == Block((1, 0))


SUMS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a sum over rows": ("sum", lambda x: x.sum(0)),
    "a sum over all": ("sum", lambda x: x.sum()),
    "a mean over rows": ("sum", lambda x: x.mean(0)),
    "the largest of each column": ("max", lambda x: x.amax(0)),
    "the smallest of all": ("min", lambda x: x.amin()),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adds_over_rows(name: str, dtype: torch.dtype) -> None:
    how, program = SUMS[name]
    x = LAYOUTS[0].values().nan_to_num(0.0, 1.0, -1.0).to(dtype)
    module = make_fx(program)(x)
    values = all_values(module, x)
    (given,) = module.graph.find_nodes(op="placeholder")
    (returned,) = module.graph.output_node().all_input_nodes
    found = across(returned, {given: Block((0,))}.get)
    assert found is not None
    assert found.how == how
    parts = [Chunks(values, a, b, N).run(found.step) for a, b in ((0, CHUNK), (CHUNK, N))]
    added = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[how](*parts)
    if found.mean_of:
        added = added / math.prod(x.shape[dim] for dim in found.mean_of)
    torch.testing.assert_close(added.to(dtype), program(x))
    if dtype is torch.bfloat16 and how == "sum":
        assert parts[0].dtype is torch.float32


def test_a_product_over_rows() -> None:
    left, right = LAYOUTS[0].values(seed=5).nan_to_num(), torch.randn(N, 3)
    module = make_fx(lambda a: a.t() @ right)(left)
    values = all_values(module, left)
    (given,) = module.graph.find_nodes(op="placeholder")
    (returned,) = module.graph.output_node().all_input_nodes
    blocks = {given: Block((0,))}
    turned = returned.args[0]
    assert isinstance(turned, Node)
    blocks[turned] = Block((1,))
    found = across(returned, blocks.get)
    assert found is not None
    assert found.how == "product"
    a, b = found.step.args
    chunks = [Chunks(values, start, stop, N) for start, stop in ((0, CHUNK), (CHUNK, N))]
    made = sum(c._plain(a).t() @ c._plain(b) for c in chunks)
    torch.testing.assert_close(made, left.t() @ right)
