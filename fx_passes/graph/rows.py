"""The effect of each ATen operator on rows: their position in its result, and the same operator on some rows.

Entry points: `block_of`, the rows' position in a result, from those in its operands; `step_of`, the operator over a
chunk of the rows; `across`, an operator that adds over all rows. `_RULES` is the table.

The rows of a value form a *block*: dimensions whose sizes multiply to the number of rows, such as the first
two of logits [B, T, V], the first of [B * T, V], the second of a transposed [V, N], the first and the last of
[B, V, T]. A chunk of such a value has the rows in front, in one dimension, and the other dimensions behind it in their
order: [n, V]. A `Step` is the operator on chunks. A value without the block is `Whole`: the same for every chunk.

NOTE [Row by row]
An operator works row by row if its result for some rows depends on those rows of its operands only. Cutting its
operands into chunks and concatenating the results then gives the same as all rows at once. By the table this holds for
pointwise operators, operators along a dimension outside the block, permutations, views that keep the dimensions of
rows apart from others, and a matmul with a `Whole` operand. For other operators it is not assumed. Longer than other
files: one table.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from fx_passes.graph.facts import Shape, same, same_shape, value
from fx_passes.graph.operators import (
    CASTS,
    RESHAPES,
    SAME_VALUE,
    is_elementwise,
    name_of,
    under,
)

__all__ = [
    "COUNT",
    "NUMBERS",
    "Across",
    "Block",
    "Rows",
    "Step",
    "Whole",
    "across",
    "are_alternatives",
    "block_of",
    "in_front",
    "normal",
    "shape_of_value",
    "step_of",
]

aten = torch.ops.aten
prims = torch.ops.prims


class Block(NamedTuple):
    """The dimensions of a value's rows, the slowest first: row number `t * B + b` of a block (1, 0), [B, T]."""

    dims: tuple[int, ...]

    def moved(self, dim: int) -> int | None:
        """Dimension `dim` of the value, in its chunks; None for one of the rows."""
        return None if dim in self.dims else dim + 1 - sum(each < dim for each in self.dims)

    def lead(self, shape: Sequence[Any]) -> list[Any]:
        """The sizes of the block."""
        return [shape[dim] for dim in self.dims]

    def rest(self, shape: Sequence[Any]) -> list[Any]:
        """The sizes outside the block."""
        return [size for dim, size in enumerate(shape) if dim not in self.dims]

    def fits(self, shape: Sequence[Any]) -> bool:
        """Whether a value of this shape has these dimensions."""
        return all(0 <= dim < len(shape) for dim in self.dims)


def in_front(rank: int) -> Block:
    """Rows in the first `rank` dimensions."""
    return Block(tuple(range(rank)))


class _Count:
    """The number of rows of a chunk, as an argument."""

    def __repr__(self) -> str:
        return "n"


class _Numbers:
    """The numbers of a chunk's rows, [n], as an argument."""


COUNT, NUMBERS = _Count(), _Numbers()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A chunk of `node`, with `gap` dimensions of size 1 behind the rows."""

    node: Node
    block: Block
    gap: int = 0


@dataclasses.dataclass(frozen=True)
class Whole:
    """All of `node`, without the dimensions of size 1 at the position of the rows."""

    node: Node
    without: Block | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """`target` on chunks.

    Arguments are `Rows`, `Whole`, `COUNT`, `NUMBERS`, nodes that are sizes, other steps, numbers, lists.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def operands(self) -> Iterator[Rows | Whole]:
        return _operands((self.args, tuple(self.kwargs.values())))


@dataclasses.dataclass(frozen=True)
class Across:
    """A reduction over rows.

    Attributes:
        how: "sum", "max" or "min" of the chunks' results of `step`; "product": the two operands of `step` multiplied
            over the rows and added.
        mean_of: for a mean, the operand's dimensions whose sizes divide the sum.
    """

    how: str
    step: Step
    mean_of: tuple[int, ...] = ()


Known = Callable[[Node], Block | None]
"""The block of a node with rows, None for any other node."""


def shape_of_value(node: Node) -> Shape:
    """The shape of a tensor, or of the first one of several; () otherwise."""
    found = value(node)
    several = found if isinstance(found, (tuple, list)) else (found,)
    first = next((each for each in several if isinstance(each, Tensor)), None)
    return () if first is None else tuple(first.shape)


def _operands(arg: Any) -> Iterator[Rows | Whole]:
    if isinstance(arg, (Rows, Whole)):
        yield arg
    elif isinstance(arg, Step):
        yield from arg.operands()
    elif isinstance(arg, (tuple, list)):
        for each in arg:
            yield from _operands(each)


def _product(sizes: Sequence[Any]) -> Any:
    return math.prod(sizes)


def normal(block: Block, shape: Sequence[Any]) -> Block:
    """Without dimensions of size 1, so that equal blocks compare equal."""
    return Block(tuple(dim for dim in block.dims if not same(shape[dim], 1)) or block.dims[-1:])


# ---- arguments ----------------------------------------------------------------------------------------------------

_ELSEWHERE = {"device", "layout", "pin_memory", "memory_format", "requires_grad"}
"""Arguments for the device and the layout of a result, without effect on its values."""


def _signature(node: Node) -> Any:
    target: Any = node.target
    return target._schema


def _bound(node: Node) -> dict[str, Any]:
    """The arguments by the names of the schema, defaults included."""
    found: dict[str, Any] = {}
    for at, argument in enumerate(_signature(node).arguments):
        if at < len(_args(node)):
            found[argument.name] = _args(node)[at]
        else:
            found[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return found


def _called(node: Node, named: Mapping[str, Any]) -> Step:
    """The operator of `node` with other arguments, positional ones first."""
    args, kwargs = [], {}
    for argument in _signature(node).arguments:
        if argument.name in _ELSEWHERE:
            continue
        if argument.kwarg_only:
            if named[argument.name] is not None:
                kwargs[argument.name] = named[argument.name]
        else:
            args.append(named[argument.name])
    return Step(node.target, tuple(args), kwargs)


def _args(node: Node) -> Any:
    """Positional arguments, of whatever type the operator takes."""
    return node.args


def _is_tensor(arg: object) -> bool:
    return isinstance(arg, Node) and isinstance(value(arg), Tensor)


def _tensors(arg: Any) -> list[Node]:
    if isinstance(arg, (list, tuple)):
        return [each for part in arg for each in _tensors(part)]
    return [arg] if _is_tensor(arg) else []


def _rank(node: Node) -> int:
    return len(shape_of_value(node))


def _has_block(node: Node, block: Block, sizes: Sequence[Any]) -> bool:
    """Whether `node` has rows of these sizes in `block`."""
    shape = shape_of_value(node)
    return block.fits(shape) and same_shape(block.lead(shape), sizes)


# ---- families -----------------------------------------------------------------------------------------------------

_LIKE: set[Any] = {
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default,
}  # fmt: skip
_FACTORIES: dict[Any, str] = {
    aten.full.default: "size",
    aten.zeros.default: "size",
    aten.ones.default: "size",
    aten.empty.memory_format: "size",
}
"""Constants: one number everywhere; with the name of the argument that is the shape."""

_ALONG: dict[Any, tuple[str, ...]] = {
    aten.gather.default: ("self", "index"),
    aten.scatter.src: ("self", "index", "src"),
    aten.scatter.value: ("self", "index"),
    aten.scatter.reduce: ("self", "index", "src"),
    aten.scatter.value_reduce: ("self", "index"),
    aten.scatter_add.default: ("self", "index", "src"),
    aten.scatter_reduce.two: ("self", "index", "src"),
    aten.sort.default: ("self",),
    aten.sort.stable: ("self",),
    aten.topk.default: ("self",),
    aten.cumsum.default: ("self",),
    aten.cumprod.default: ("self",),
    aten.logcumsumexp.default: ("self",),
    prims.rev.default: ("a",),
    aten.slice.Tensor: ("self",),
    aten.slice_scatter.default: ("self", "src"),
    aten.index_select.default: ("self",),
    aten.cat.default: ("tensors",),
}
"""Work along a dimension that stays, by the arguments with tensors. All of these have rows, or none does."""

_REDUCTIONS: dict[Any, str] = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.mean.default: "mean",
    aten.mean.dim: "mean",
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.any.default: "",
    aten.any.dim: "",
    aten.any.dims: "",
    aten.all.default: "",
    aten.all.dim: "",
    aten.prod.dim_int: "",
    aten.argmax.default: "",
    aten.argmin.default: "",
    aten.max.dim: "",
    aten.min.dim: "",
    aten.var.correction: "",
    aten.var_mean.correction: "",
    aten.std.correction: "",
    aten.logsumexp.default: "",
    aten.linalg_vector_norm.default: "",
    aten.median.dim: "",
    aten.kthvalue.default: "",
}
"""Reductions over dimensions, with the way to combine the results for parts of the rows, if there is one."""

_MATMULS: set[Any] = {aten.mm.default, aten.addmm.default}
if hasattr(aten.mm, "dtype"):
    _MATMULS |= {aten.mm.dtype}
_LEFT, _RIGHT = Block((0,)), Block((1,))
"""Rows of the left factor of a matmul, and of the right one, which has them in its columns."""

_OWN: dict[str, tuple[str, ...]] = {
    "slime_fused::row_stats": ("x", "scale"),
    "slime_fused::row_grad": ("x", "terms", "affine", "index", "weight"),
}
"""Fused operators over [rows..., V], by their schemas' names: tensors of [rows..., ...], or one number."""

_COLUMNS: set[Any] = {
    aten.gather.default, aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default,
    aten.logsumexp.default, aten.cumsum.default, aten.max.dim,
}  # fmt: skip


def _own(target: Any) -> tuple[str, ...] | None:
    """The tensors of a fused operator."""
    return _OWN.get(name_of(target))


def are_alternatives(node: Node) -> bool:
    """Whether an operator treats the last dimension of its first operand, or of its result, as alternatives."""
    if node.target is aten.eq.Tensor:
        return any(
            under(each, RESHAPES).target is prims.iota.default for each in node.all_input_nodes
        )
    if node.target is aten.index.Tensor:
        return _columns_alone(_args(node)[1]) == _rank(_args(node)[0]) - 1
    return node.target in _COLUMNS or _own(node.target) is not None


def block_of(node: Node, known: Known) -> Block | None:
    """The rows' position in `node`, if it works row by row on operands with rows; otherwise None."""
    rule = _rule_of(node)
    if rule is None:
        return None
    first = next((each for each in node.all_input_nodes if known(each) is not None), None)
    block = None if first is None else known(first)
    if first is None or block is None:
        return None
    return rule.block(node, first, block, known)


def step_of(node: Node, block: Block) -> Step | None:
    """`node` over a chunk of its rows in `block`; None if it does not work row by row on them."""
    rule = _rule_of(node)
    return None if rule is None else rule.step(node, block)


class Rule(NamedTuple):
    """The effect of an operator on rows.

    Attributes:
        block: from the node, its first operand with rows, their block there, and the blocks of others: the result's
            block.
        step: from the node and the block of its result: the operator over a chunk.
    """

    block: Callable[[Node, Node, Block, Known], Block | None]
    step: Callable[[Node, Block], Step | None]


def _rule_of(node: Node) -> Rule | None:
    target: Any = node.target
    if node.op != "call_function":
        return None
    if target is operator.getitem:
        return Rule(_same_block, _item_step)
    if not hasattr(target, "_schema") or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if target in _RULES:
        return _RULES[target]
    if _own(target):
        return Rule(_same_block, _own_step)
    return Rule(_right_aligned, _pointwise) if is_elementwise(node) else None


# ---- where the rows are -------------------------------------------------------------------------------------------


def _same_block(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    return block


def _right_aligned(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    return _shifted(block, _rank(node) - _rank(first))


def _shifted(block: Block, by: int) -> Block:
    return Block(tuple(dim + by for dim in block.dims))


def _in_view(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    return _block_of_view(shape_of_value(first), block, shape_of_value(node))


def _after_select(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    dim = _bound(node)["dim"] % _rank(first)
    if block.moved(dim) is None:
        return None
    return _less(block, [dim])


def _less(block: Block, gone: Sequence[int]) -> Block:
    """The rows' position in a result without these dimensions of the operand."""
    return Block(tuple(each - sum(dim < each for dim in gone) for each in block.dims))


def _before_select(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    named = _bound(node)
    if first is named.get("self"):  # it is written into
        return block
    return _beside(block, named["dim"] % _rank(node))


def _beside(block: Block, dim: int) -> Block:
    """The rows' position in a result with `dim` in addition to the operand's dimensions."""
    return Block(tuple(each + (dim <= each) for each in block.dims))


def _block_of_view(old: Shape, block: Block, new: Shape) -> Block | None:
    """Each run of neighbouring dimensions of rows in `old` must be some dimensions of `new`."""
    found: list[int] = []
    for run in _runs(old, block):
        start = _reaching(new, 0, _product(old[: run[0]]))
        if start is None:
            return None
        stop = _reaching(new, start, _product(old[run[0] : run[-1] + 1]))
        if stop is None or stop == start:
            return None
        found += range(start, stop)
    return normal(Block(tuple(found)), new)


def _runs(shape: Shape, block: Block) -> list[list[int]]:
    """The dimensions of `block`, in groups of neighbours in `shape`; dimensions of size 1 do not separate."""
    runs: list[list[int]] = []
    for dim in block.dims:
        follows = bool(runs) and dim > runs[-1][-1]
        if follows and all(same(size, 1) for size in shape[runs[-1][-1] + 1 : dim]):
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return runs


def _reaching(shape: Shape, start: int, wanted: Any) -> int | None:
    """The end of the dimensions from `start` on whose sizes multiply to `wanted`."""
    size: Any = 1
    while start < len(shape) and not same(size, wanted):
        size, start = size * shape[start], start + 1
    return start if same(size, wanted) else None


def _turned(node: Node) -> list[int]:
    """For each dimension of the result, the operand's dimension."""
    return [dim % _rank(node) for dim in _args(node)[1]]


def _block_of_turn(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    order = _turned(node)
    return Block(tuple(order.index(dim) for dim in block.dims))


def _block_of_matmul(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    left, right = _args(node)[-2:] if node.target is aten.addmm.default else _args(node)[:2]
    of_left, of_right = known(left), known(right)
    if of_left == _LEFT and of_right is None:
        return _LEFT
    return _RIGHT if of_right == _RIGHT and of_left is None else None


def _reduced(node: Node, first: Node) -> list[int]:
    named, rank = _bound(node), _rank(first)
    dims = named.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return sorted(dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))


def _block_of_reduction(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    dims = _reduced(node, first)
    if any(block.moved(dim) is None for dim in dims):
        return None
    gone = [] if _bound(node).get("keepdim") else dims
    return _less(block, gone)


def _block_of_index(node: Node, first: Node, block: Block, known: Known) -> Block | None:
    """Columns of rows indexed by their own numbers; or the same columns of all rows."""
    base, indices = _args(node)[:2]
    if first is base and _columns_alone(indices) is not None:
        return block
    if first is not base or block != in_front(1) or len(indices) != 2:
        return None
    return block if _is_every_row(indices[0], shape_of_value(base)[0]) else None


def _columns_alone(indices: Any) -> int | None:
    """The only indexed dimension, if its index is a list of columns, equal for all rows."""
    given = [dim for dim, each in enumerate(indices) if each is not None]
    if (
        len(given) != 1
        or _rank(indices[given[0]]) != 1
        or value(indices[given[0]]).dtype == torch.bool
    ):
        return None
    return given[0]


def _column_indices(indices: Any, block: Block) -> list[Any] | None:
    """The same for chunks of the rows in `block`."""
    dim = _columns_alone(indices)
    moved = None if dim is None else block.moved(dim)
    if dim is None or moved is None:
        return None
    return [*[None] * moved, Whole(indices[dim])]


def _is_every_row(index: Any, rows: Any) -> bool:
    """[0, 1, ..., rows - 1], in a shape with all of it in the first dimension."""
    if not isinstance(index, Node) or not same(shape_of_value(index)[0], rows):
        return False
    index = under(index, RESHAPES | CASTS | SAME_VALUE)
    if index.target is not prims.iota.default:
        return False
    from_zero = index.kwargs["start"] == 0 and index.kwargs["step"] == 1
    return from_zero and same(_args(index)[0], rows)


# ---- the operator over a chunk ------------------------------------------------------------------------------------


def _item_step(node: Node, block: Block) -> Step | None:
    inner, at = _args(node)
    return Step(operator.getitem, (Rows(inner, block), at))


def _full_step(node: Node, block: Block) -> Step | None:
    named, name = _bound(node), _FACTORIES[node.target]
    return _called(node, {**named, name: [COUNT, *block.rest(named[name])]})


def _memory_step(node: Node, block: Block) -> Step | None:
    sizes = [COUNT, *block.rest(_bound(node)["size"])]
    return Step(aten.empty.memory_format, (sizes,), {"dtype": value(node).dtype})


def _view_step(node: Node, block: Block) -> Step | None:
    inner = _args(node)[0]
    old = _block_of_view(shape_of_value(node), block, shape_of_value(inner))
    return None if old is None else _viewed(inner, old, _size_args(node, block))


def _expand_step(node: Node, block: Block) -> Step | None:
    inner, sizes = _args(node)[:2]
    operand = _aligned(inner, shape_of_value(node), block)
    return None if operand is None else Step(node.target, (operand, [COUNT, *block.rest(sizes)]))


def _size_args(node: Node, block: Block) -> list[Any]:
    """The sizes of `node` outside the block, as numbers or the nodes among its arguments."""
    shape = shape_of_value(node)
    given = (
        _args(node)[1]
        if len(_args(node)) > 1 and isinstance(_args(node)[1], (list, tuple))
        else None
    )
    if given is not None and len(given) == len(shape) and not any(same(size, -1) for size in given):
        return block.rest(given)
    return block.rest(shape)


def _viewed(inner: Node, block: Block, rest: list[Any]) -> Step | None:
    if any(isinstance(size, torch.SymInt) for size in rest):
        return None
    return Step(aten.reshape.default, (Rows(inner, block), [COUNT, *rest]))


def _turned_step(node: Node, block: Block) -> Step | None:
    inner: Node = _args(node)[0]
    order = _turned(node)
    old = Block(tuple(order[dim] for dim in block.dims))
    moved = [old.moved(dim) for at, dim in enumerate(order) if at not in block.dims]
    return Step(aten.permute.default, (Rows(inner, old), [0, *moved]))


def _aligned(arg: Any, shape: Shape, block: Block) -> Rows | Whole | None:
    """An operand broadcast to `shape`, with rows in `block`; None if only some of its rows differ."""
    own = shape_of_value(arg)
    missing = len(shape) - len(own)
    lead = [own[dim - missing] if dim >= missing else 1 for dim in block.dims]
    if same_shape(lead, block.lead(shape)):
        if min(block.dims) < missing:
            return None
        return Rows(arg, _shifted(block, -missing), gap=missing)
    if not all(same(size, 1) for size in lead):
        return None
    there = tuple(dim - missing for dim in block.dims if dim >= missing)
    return Whole(arg, Block(there) if there else None)


def _pointwise(node: Node, block: Block) -> Step | None:
    named, shape = _bound(node), shape_of_value(node)
    found: dict[str, Any] = {}
    for name, arg in named.items():
        if _is_tensor(arg):
            found[name] = _aligned(arg, shape, block)
            if found[name] is None:
                return None
        elif _tensors(arg):
            return None
        else:
            found[name] = arg
    return _called(node, found)


def _matmul_step(node: Node, block: Block) -> Step | None:
    args: list[Any] = list(_args(node))
    at = len(args) - 2 if node.target is aten.addmm.default else 0
    place, other = (at, at + 1) if block == _LEFT else (at + 1, at)
    if block not in (_LEFT, _RIGHT):
        return None
    rows, whole = Rows(args[place], block), Whole(args[other])
    if block == _RIGHT:
        # [V, D] [D, N] -> chunks [n, V]: the transpose of each factor, in the other order
        if node.target is not aten.mm.default:
            return None
        return Step(aten.mm.default, (rows, Step(aten.permute.default, (whole, [1, 0]))))
    args[place], args[other] = rows, whole
    if node.target is aten.addmm.default:
        bias = _aligned(args[0], shape_of_value(node), block)
        if bias is None:
            return None
        args[0] = bias
    return Step(node.target, tuple(args), node.kwargs)


def _reduction_step(node: Node, block: Block) -> Step | None:
    named = _bound(node)
    inner: Node = named["self"]
    dims = _reduced(node, inner)
    old = block
    if not named.get("keepdim"):
        kept = [dim for dim in range(_rank(inner)) if dim not in dims]
        old = Block(tuple(kept[dim] for dim in block.dims))
    moved = [old.moved(dim) for dim in dims]
    if None in moved:
        return None
    return _reduced_step(node, named, Rows(inner, old), moved)


def _reduced_step(
    node: Node, named: dict[str, Any], operand: Rows, dims: Sequence[int | None]
) -> Step | None:
    if "dim" not in named:  # of all dimensions
        return None
    listed = any(a.name == "dim" and "List" in str(a.type) for a in _signature(node).arguments)
    return _called(node, {**named, "self": operand, "dim": list(dims) if listed else dims[0]})


def _select_step(node: Node, block: Block) -> Step | None:
    named = _bound(node)
    inner: Node = named["self"]
    dim = named["dim"] % _rank(inner)
    old = _beside(block, dim)
    moved = old.moved(dim)
    if moved is None:
        return None
    return _called(node, {**named, "self": Rows(inner, old), "dim": moved})


def _put_step(node: Node, block: Block) -> Step | None:
    """A write to a position, or a slice, of another dimension: into zeros or into a value."""
    named = _bound(node)
    dim = named["dim"] % _rank(node)
    moved = block.moved(dim)
    if moved is None:
        return None
    name = "src" if "src" in named else "grad_output"
    written = block
    if node.target is not aten.slice_backward.default:
        written = _less(block, [dim])
    found = {**named, name: Rows(named[name], written), "dim": moved}
    if "self" in named:
        found["self"] = Rows(named["self"], block)
    else:
        found["input_sizes"] = [COUNT, *block.rest(named["input_sizes"])]
    return _called(node, found)


def _along_step(node: Node, block: Block) -> Step | None:
    named = _bound(node)
    name = "dims" if "dims" in named else "dim"
    rank, dims = _rank(node), named[name]
    dims = -1 if dims is None else dims
    moved = [block.moved(d % rank) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if None in moved:
        return None
    lead = block.lead(shape_of_value(node))
    found = {**named, name: moved if isinstance(dims, (list, tuple)) else moved[0]}
    for each in _ALONG[node.target]:
        operand = _rows_operand(named[each], block, lead)
        if operand is None:
            return None
        found[each] = operand
    if node.target is aten.index_select.default:
        found["index"] = Whole(named["index"])
    if node.target is aten.cat.default:
        return _joined(node, block, found)
    return _called(node, found)


def _joined(node: Node, block: Block, found: dict[str, Any]) -> Step:
    """Without other dimensions of size 1: inductor lays four dimensions out as an image, its channels the innermost."""
    rest, dim = block.rest(shape_of_value(node)), found["dim"]
    kept = [at for at, size in enumerate(rest, 1) if at == dim or not same(size, 1)]
    pieces = [_viewed(each.node, block, _thin(each, kept)) for each in found["tensors"]]
    if len(kept) == len(rest) or None in pieces or any(isinstance(s, torch.SymInt) for s in rest):
        return _called(node, found)
    joined = _called(node, {"tensors": pieces, "dim": 1 + kept.index(dim)})
    return Step(aten.reshape.default, (joined, [COUNT, *rest]))


def _thin(piece: Rows, kept: Sequence[int]) -> list[Any]:
    rest = piece.block.rest(shape_of_value(piece.node))
    return [rest[at - 1] for at in kept]


def _rows_operand(arg: Any, block: Block, lead: Sequence[Any]) -> Any:
    if isinstance(arg, (list, tuple)):
        found = [_rows_operand(each, block, lead) for each in arg]
        return None if None in found else found
    return Rows(arg, block) if _has_block(arg, block, lead) else None


def _own_step(node: Node, block: Block) -> Step | None:
    named = _bound(node)
    if max(block.dims) >= _rank(named["x"]) - 1:  # the last dimension is the vocabulary
        return None
    lead = block.lead(shape_of_value(named["x"]))
    found = dict(named)
    for name in _own(node.target) or ():
        arg = named[name]
        if arg is None:
            continue
        if not shape_of_value(arg):
            found[name] = Whole(arg)
        elif _has_block(arg, block, lead):
            found[name] = Rows(arg, block)
        else:
            return None
    return _called(node, {**found, "region": ""})


def _index_step(node: Node, block: Block) -> Step | None:
    base, indices = _args(node)[:2]
    found = _column_indices(indices, block)
    if found is None and len(indices) == 2:
        found = _indices(indices[0], indices[1], shape_of_value(base)[0], block)
    if found is None:
        return None
    return Step(aten.index.Tensor, (Rows(base, block), found))


def _index_write_step(node: Node, block: Block) -> Step | None:
    base, indices, values, *accumulate = _args(node)
    shape = shape_of_value(node)
    lead = block.lead(shape)
    same_columns = _column_indices(indices, block)
    if same_columns is not None:
        of_rows = (_rows_operand(each, block, lead) for each in (base, values))
        into, written = of_rows
        if into is None or written is None or _rank(values) != len(shape):
            return None
        return Step(node.target, (into, same_columns, written, *accumulate))
    if len(indices) != 2 or len(shape) != 2:
        return None
    every, columns = indices
    found = _indices(every, columns, shape[0], block)
    if found is None:
        return None
    written = _aligned(values, _broadcast(every, columns), block)
    if written is None or not _has_block(base, block, shape[:1]):
        return None
    return Step(node.target, (Rows(base, block), found, written, *accumulate))


def _indices(every: Any, columns: Any, rows: Any, block: Block) -> list[Any] | None:
    """Each row's own number, and columns of it."""
    if block != in_front(1) or not _is_tensor(columns) or not _is_every_row(every, rows):
        return None
    shape = _broadcast(every, columns)
    operand = _aligned(columns, shape, block)
    if operand is None or not same(shape[0], rows):
        return None
    numbers = {"start": 0, "step": 1, "dtype": torch.int64, "requires_grad": False}
    own = Step(prims.iota.default, (COUNT,), numbers)
    return [Step(aten.reshape.default, (own, [COUNT, *[1] * (len(shape) - 1)])), operand]


def _broadcast(left: Node, right: Node) -> Shape:
    one, other = shape_of_value(left), shape_of_value(right)
    rank = max(len(one), len(other))
    padded = [(1,) * (rank - len(each)) + each for each in (one, other)]
    return tuple(b if same(a, 1) else a for a, b in zip(*padded, strict=True))


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_FACTORIES, Rule(_same_block, _full_step)),
    **dict.fromkeys(_LIKE, Rule(_right_aligned, _pointwise)),
    **dict.fromkeys(RESHAPES, Rule(_in_view, _view_step)),
    aten.permute.default: Rule(_block_of_turn, _turned_step),
    **dict.fromkeys(_MATMULS, Rule(_block_of_matmul, _matmul_step)),
    **dict.fromkeys(_REDUCTIONS, Rule(_block_of_reduction, _reduction_step)),
    **dict.fromkeys(_ALONG, Rule(_same_block, _along_step)),
    aten.new_empty_strided.default: Rule(_same_block, _memory_step),
    aten.copy.default: Rule(_right_aligned, _pointwise),
    aten.expand.default: Rule(_right_aligned, _expand_step),
    aten.select.int: Rule(_after_select, _select_step),
    aten.select_scatter.default: Rule(_before_select, _put_step),
    aten.select_backward.default: Rule(_before_select, _put_step),
    aten.slice_backward.default: Rule(_same_block, _put_step),
    aten.index.Tensor: Rule(_block_of_index, _index_step),
    aten.index_put.default: Rule(_same_block, _index_write_step),
}
"""Pointwise operators and the fused ones are not listed: see `_rule_of`."""


# ---- over all rows ------------------------------------------------------------------------------------------------


def across(node: Node, known: Known) -> Across | None:
    """The reduction of `node` over the rows of its operands; None if there is none."""
    target: Any = node.target
    if node.op != "call_function":
        return None
    if target is aten.mm.default or target is getattr(aten.mm, "dtype", None):
        left, right = _args(node)[:2]
        places = known(left), known(right)
        if places in ((_RIGHT, _LEFT), (_RIGHT, None), (None, _LEFT)):
            operands = Rows(left, _RIGHT), Rows(right, _LEFT)
            return Across("product", Step("operands", operands))
        return None
    how = _REDUCTIONS.get(target)
    if not how:
        return None
    inner: Node = _args(node)[0]
    block = known(inner)
    dims = _reduced(node, inner) if block is not None else []
    if block is None or not set(block.dims) <= set(dims):
        return None
    moved = [0, *(block.moved(d) for d in dims if block.moved(d) is not None)]
    return _added(node, inner, block, how, moved, dims)


def _added(
    node: Node, inner: Node, block: Block, how: str, moved: list[Any], dims: list[int]
) -> Across | None:
    operand = Rows(inner, block)
    if how in ("max", "min"):
        step = Step(aten.amax.default if how == "max" else aten.amin.default, (operand, moved))
        return Across(how, step)
    dtype: torch.dtype = value(node).dtype
    if not (dtype.is_floating_point or how == "sum"):
        return None
    kwargs = {"dtype": wide_dtype(dtype)}
    step = Step(aten.sum.dim_IntList, (operand, moved), kwargs)
    return Across("sum", step, tuple(dims) if how == "mean" else ())


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over chunks."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
