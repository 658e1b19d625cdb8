"""Full-vocabulary rows picked by an index and then summed: the sum over the vocabulary comes first.

Entry point: `sum_first`, on the joint graph before `fuse`. In `loss[mask].sum()` over `[..., V]`, the way distillation
drops padding, forward writes the picked rows to memory, and backward scatters one number per row into zeros of full
width. `loss.sum(-1)[mask].sum()` has numbers per row only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import is_wide, rank_of, same, shape_of, value
from fx_passes.graph.operators import SAME_VALUE, TO_SHAPE, is_elementwise, is_zero
from fx_passes.graph.order import tidy
from fx_passes.graph.per_row import reduced_dims
from fx_passes.torch_private import detect_fake_mode

aten = torch.ops.aten

_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}
_MEANS = {aten.mean.default, aten.mean.dim}


def sum_first(graph: Graph, min_vocab: int) -> int:
    """Sums rows `[..., V]` over the vocabulary before an index picks some of them, if they are summed after it.

    Args:
        graph: a functional ATen graph with fake values, decomposed.
        min_vocab: the smallest last dimension treated as a vocabulary.

    Returns:
        The number of picks, and gradients of picks, with numbers per row now; with 0 the graph is exactly as it was. A
        pick stays if it has a reader other than sums and means over the vocabulary; a gradient stays if it is no number
        per row, or has a reader other than element-wise operators.
    """
    picks = [n for n in _found(graph, aten.index.Tensor, min_vocab) if _is_summed(n)]
    puts = [n for n in _found(graph, aten.index_put.default, min_vocab) if _is_put_into_zeros(n)]
    fake_mode = detect_fake_mode([value(node) for node in [*picks, *puts]])
    if fake_mode is None:
        return 0
    emit = Emitter(graph, fake_mode)
    with graph.inserting_before(graph.output_node()):
        for pick in picks:
            _sum_first(emit, pick)
        count = len(picks) + sum(_put_numbers(emit, put) for put in puts)
    if count:
        tidy(graph)
    else:
        emit.discard()
    return count


def _found(graph: Graph, target: Any, min_vocab: int) -> list[Node]:
    """Nodes that take, or write, complete rows of floating full-vocabulary values."""
    nodes = graph.find_nodes(op="call_function", target=target)
    return [n for n in nodes if is_wide(n.args[0], min_vocab) and _takes_rows(n)]


def _takes_rows(node: Node) -> bool:
    """No index is over the vocabulary; a mask is over as many dimensions as it has."""
    rows, indices, *_ = node.args
    assert isinstance(indices, (list, tuple))
    dims = last = 0
    for index in indices:
        is_mask = index is not None and value(index).dtype in (torch.bool, torch.uint8)
        dims += rank_of(index) if is_mask else 1
        last = dims if index is not None else last
    return last < rank_of(rows)


def _is_summed(pick: Node) -> bool:
    summed = [user for user in pick.users if not _is_size_of_rows(user)]
    return bool(summed) and all(_sums_columns(user) for user in summed)


def _is_size_of_rows(user: Node) -> bool:
    if user.target is not aten.sym_size.int:
        return False
    rank, dim = rank_of(user.args[0]), int(user.args[1])  # type: ignore[arg-type]
    return dim % rank != rank - 1


def _sums_columns(user: Node) -> bool:
    return user.target in _SUMS and rank_of(user.args[0]) - 1 in reduced_dims(user)


def _sum_first(emit: Emitter, pick: Node) -> None:
    """The pick itself stays, with one column, because the graph may read its size."""
    rows: Any = pick.args[0]
    readers = [user for user in pick.users if user.target in _SUMS]
    wide = torch.promote_types(value(rows).dtype, torch.float32)
    for reader in readers:
        wide = torch.promote_types(wide, value(reader).dtype)
    emit.origin = pick
    summed = emit.call(aten.sum.dim_IntList, rows, [-1], True, dtype=wide)
    columns = emit.size(rows, rank_of(rows) - 1)
    pick.update_arg(0, summed)
    picked = value(pick)
    with emit.fake_mode:
        pick.meta["val"] = picked.new_empty([*picked.shape[:-1], 1], dtype=wide)
    for reader in readers:
        emit.origin = reader
        keeps = len(reader.args) > 2 and bool(reader.args[2])
        if reader.target in _MEANS:
            whole = emit.call(aten.mean.dim, pick, reduced_dims(reader), keeps)
            whole = emit.call(aten.div.Tensor, whole, columns)
        else:
            whole = emit.call(aten.sum.dim_IntList, pick, reduced_dims(reader), keeps)
        reader.replace_all_uses_with(emit.cast(whole, value(reader).dtype))


def _is_put_into_zeros(put: Node) -> bool:
    """And read by element only: no reader sees the shared memory of the columns."""
    zeros: Any = put.args[0]
    views = _views_of_rows(put)
    readers = [u for shown in (put, *views) for u in shown.users if u not in views]
    alone = all(is_elementwise(u) and u.target not in SAME_VALUE for u in readers)
    return zeros.target is aten.full.default and is_zero(zeros) and alone


def _views_of_rows(node: Node) -> list[Node]:
    """The same rows in another shape."""
    views = [user for user in node.users if user.target in TO_SHAPE]
    return [v for v in views if same(shape_of(v)[-1], shape_of(node)[-1]) and -1 not in v.args[1]]  # type: ignore[operator]


def _put_numbers(emit: Emitter, put: Node) -> bool:
    zeros, indices, values, *accumulate = put.args
    assert isinstance(zeros, Node)
    assert isinstance(values, Node)
    emit.origin = put
    numbers = _one_column(emit, values)
    if numbers is None:
        return False
    sizes: Any = zeros.args[0]
    into = emit.full([*sizes[:-1], 1], 0, value(put).dtype, put)
    made = emit.call(aten.index_put.default, into, indices, numbers, *accumulate)
    for view in _views_of_rows(put):
        shape: Any = view.args[1]
        view.replace_all_uses_with(emit.expand(emit.reshape(made, [*shape[:-1], 1]), shape))
    put.replace_all_uses_with(emit.expand(made, sizes))
    return True


def _one_column(emit: Emitter, node: Node) -> Node | None:
    """Values equal in all columns, as `[..., 1]`; None if that is not known."""
    if not isinstance(value(node), torch.Tensor) or rank_of(node) == 0:
        return node
    if same(shape_of(node)[-1], 1):
        return node
    sizes: Any
    if node.target is aten.full.default:
        sizes, *rest = node.args
        return emit.call(aten.full.default, [*sizes[:-1], 1], *rest, **node.kwargs)
    if node.target is aten.expand.default:
        source, sizes = node.args
        if rank_of(source) and not same(shape_of(source)[-1], 1):
            return None
        return emit.call(aten.expand.default, source, [*sizes[:-1], 1])
    if node.op != "call_function" or not is_elementwise(node):
        return None
    narrow = {operand: _one_column(emit, operand) for operand in node.all_input_nodes}
    if None in narrow.values():
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), narrow.__getitem__)
    return emit.call(node.target, *args, **kwargs)
