"""All-reduces of row values become one all-gather: small graphs on faked ranks, before and after bit for bit.

Two ranks are two sets of values of one graph, run node by node; a collective looks at both.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

import fx_passes.collectives as collectives
from fx_passes.collectives import Merged, merge
from fx_passes.collectives.plan import AllReduce, Kind, Plan
from fx_passes.graph.order import tidy
from slime_compile.ops import reference
from tests.support.scratch import Scratch

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
row_stats = torch.ops.slime_fused.row_stats.default
getitem = operator.getitem

ROWS, VOCAB, RANKS = 3, 5, 2


class Sharded:
    """A forward graph of a loss over vocabulary shards."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.s = Scratch(dtype)
        self.x = self.s.input("logits", (ROWS, VOCAB))
        stats = self.s.call(row_stats, self.x, None, 1.0, "")
        self.max, self.log_sum = (self.s.call(getitem, stats, at) for at in (0, 1))

    def call(self, target: Any, *args: Any) -> Node:
        return self.s.call(target, *args)

    def reduced(self, node: Node, operation: str = "sum", group: str = "g") -> Node:
        return self.call(
            c10d.wait_tensor.default, self.call(c10d.all_reduce.default, node, operation, group)
        )

    def log_sum_exp(self) -> Node:
        """max + log sum exp(...): what Megatron's loss reduces, twice."""
        peak = self.reduced(self.max, "max")
        mass = self.call(
            aten.exp.default,
            self.call(aten.sub.Tensor, self.call(aten.add.Tensor, self.max, self.log_sum), peak),
        )
        return self.call(aten.add.Tensor, self.call(aten.log.default, self.reduced(mass)), peak)

    def merged(self, *returned: Node, enabled: bool = True) -> Merged:
        self.s.graph.output(tuple(returned))

        def is_wide(node: Node) -> bool:
            return node is self.x

        found = merge(self.s.graph, self.s.fake_mode, is_wide, enabled)
        tidy(self.s.graph)
        self.s.graph.lint()
        return found


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ranks_of", lambda group: RANKS)


def run(graph: Graph, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    """What each rank returns; `inputs` by rank."""
    ranks = range(len(inputs))
    values: list[dict[Node, Any]] = [{} for _ in ranks]
    for node in graph.nodes:
        if node.op == "placeholder":
            for rank in ranks:
                values[rank][node] = inputs[rank][
                    len([n for n in values[rank] if n.op == "placeholder"])
                ]
            continue
        given = [
            map_aggregate(node.args, lambda a, r=rank: values[r][a] if isinstance(a, Node) else a)
            for rank in ranks
        ]
        if node.op == "output":
            return [list(args[0]) for args in given]  # type: ignore[index]
        for rank, result in enumerate(_computed(node, given)):
            values[rank][node] = result
    raise AssertionError("a graph without an output")


def _computed(node: Node, given: list[Any]) -> list[Any]:
    if node.target is c10d.all_reduce.default:
        total = given[0][0]
        for other in given[1:]:
            total = torch.maximum(total, other[0]) if given[0][1] == "max" else total + other[0]
        return [total for _ in given]
    if node.target is c10d.all_gather_into_tensor.default:
        return [torch.cat([args[0] for args in given]) for _ in given]
    if node.target is c10d.wait_tensor.default:
        return [args[0] for args in given]
    if node.target is row_stats:
        return [reference.row_stats(*args[:3]) for args in given]
    return [node.target(*args, **node.kwargs) for args in given]  # type: ignore[operator]


def inputs(sharded: Sharded) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        [
            3 * torch.randn(each.shape, generator=draw, dtype=each.dtype)
            for each in sharded.s.inputs.values()
        ]
        for _ in range(RANKS)
    ]


def check(build: Any, dtype: torch.dtype = torch.float32) -> Merged:
    """`build` makes the outputs of a graph; the merged one returns the same, on every rank."""
    plain, ours = Sharded(dtype), Sharded(dtype)
    plain.merged(*build(plain), enabled=False)
    merged = ours.merged(*build(ours))
    data = inputs(plain)
    for wanted, found in zip(run(plain.s.graph, data), run(ours.s.graph, data), strict=True):
        for want, have in zip(wanted, found, strict=True):
            assert torch.equal(want, have)
    return merged


# ---- what is merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_reductions_become_one_gather(dtype: torch.dtype) -> None:
    assert check(lambda g: [g.log_sum_exp()], dtype) == Merged(2, 1)


def test_each_group_has_its_own_gather() -> None:
    def build(g: Sharded) -> list[Node]:
        return [g.log_sum_exp(), g.reduced(g.log_sum, group="h"), g.reduced(g.max, "max", "h")]

    assert check(build) == Merged(4, 2)


def test_reductions_of_backward_stay() -> None:
    def build(g: Sharded) -> list[Node]:
        forward = g.log_sum_exp()
        before = set(g.s.graph.nodes)
        backward = [g.reduced(forward), g.reduced(g.log_sum)]
        for node in g.s.graph.nodes:
            if node not in before:
                node.meta["partitioner_tag"] = "is_backward"
        return [forward, *backward]

    assert check(build) == Merged(4, 3)


def test_switched_off_it_only_counts() -> None:
    g = Sharded()
    assert g.merged(g.log_sum_exp(), enabled=False) == Merged(2, 2)


def test_one_reduction_alone_stays() -> None:
    assert check(lambda g: [g.reduced(g.max, "max")]) == Merged(1, 1)


@pytest.mark.parametrize("operation", ["sum", "max"])
def test_each_operation(operation: str) -> None:
    assert check(
        lambda g: [g.reduced(g.max, operation), g.reduced(g.log_sum, operation)]
    ) == Merged(2, 1)


def test_a_mask_is_gathered_with_the_rest() -> None:
    def build(g: Sharded) -> list[Node]:
        target = g.call(aten.gather.default, g.x, 1, g.call(aten.argmax.default, g.x, 1, True))
        mine = g.call(aten.gt.Tensor, target, g.log_sum)
        zero = g.call(aten.zeros_like.default, target)
        return [g.log_sum_exp(), g.reduced(g.call(aten.where.self, mine, target, zero))]

    assert check(build) == Merged(3, 1)


def test_a_group_of_one_rank_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ranks_of", lambda group: 1)
    g = Sharded()
    assert g.merged(g.log_sum_exp()) == Merged(2, 0)


def test_an_inplace_reduction_is_a_copy_of_the_result() -> None:
    def build(g: Sharded) -> list[Node]:
        peak = g.reduced(g.max, "max")
        copied = g.call(aten.copy.default, g.max, peak)
        return [g.reduced(g.call(aten.sub.Tensor, g.log_sum, copied))]

    assert check(build) == Merged(2, 1)


# ---- what is not, and why


def note(merged: Merged) -> str:
    (text,) = merged.notes
    return text


def test_an_operation_that_is_not_replayed() -> None:
    g = Sharded()
    merged = g.merged(g.reduced(g.max, "avg"), g.reduced(g.log_sum))
    assert (
        note(merged)
        == "the all-reduce at wait_tensor_default stays: avg is not one of ['max', 'min', 'sum']"
    )
    assert (merged.before, merged.after) == (2, 2)


def test_counts_are_not_gathered() -> None:
    g = Sharded()
    whole = g.call(torch.ops.prims.convert_element_type.default, g.max, torch.int64)
    merged = g.merged(g.reduced(whole))
    assert note(merged) == "the all-reduce at wait_tensor_default stays: not a floating row value"


def test_a_number_between_two_reductions() -> None:
    """It may be another one on another rank."""
    g = Sharded()
    doubled = g.call(aten.mul.Tensor, g.reduced(g.max), 2.0)
    merged = g.merged(g.reduced(g.call(aten.add.Tensor, doubled, g.log_sum)))
    assert note(merged) == (
        "the all-reduce at wait_tensor_default_1 stays: another rank's value at aten.mul.Tensor () cannot be computed on this rank"
    )


def test_a_number_that_changed_once() -> None:
    """A tensor without dimensions is sent only where it is a constant of the graph."""
    g = Sharded()
    mean = g.call(aten.mean.default, g.max)
    merged = g.merged(g.reduced(mean), g.reduced(g.log_sum))
    assert note(merged) == (
        "the all-reduce at wait_tensor_default stays: only floating row values and masks are gathered"
    )


def test_a_reduction_of_something_else() -> None:
    """Of no softmax: no note, and it is left alone."""
    g = Sharded()
    norms = g.s.input("rows", (ROWS,))
    merged = g.merged(g.reduced(norms), g.reduced(norms, "max"))
    assert merged == Merged(2, 2)
    reduce = AllReduce.of(
        g.s.graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[0]
    )
    plan = Plan({}, lambda node: False)
    assert reduce is not None
    assert plan._obstacle(reduce) == "not a row value of a fused softmax"


def test_logits_are_not_gathered_for_a_column_of_them() -> None:
    g = Sharded()
    first = g.call(aten.select.int, g.x, 1, 0)
    peak = g.reduced(g.max, "max")
    beside = g.call(aten.sub.Tensor, g.call(aten.unsqueeze.default, first, 1), peak)
    merged = g.merged(g.reduced(g.call(aten.exp.default, beside)))
    assert note(merged) == (
        "the all-reduce at wait_tensor_default_1 stays: another rank's value at aten.sub.Tensor () cannot be computed on this rank"
    )
    assert (merged.before, merged.after) == (2, 2)


def test_too_much_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_NODES", 3)
    g = Sharded()
    merged = g.merged(g.log_sum_exp())
    assert note(merged) == (
        "2 all-reduces are not merged: 2 operations for each of 2 ranks are more than 3"
    )
    assert merged.after == 2


# ---- what a value is to the other ranks


def test_kinds() -> None:
    g = Sharded()
    own = g.call(aten.exp.default, g.log_sum)
    peak = g.reduced(g.max, "max")
    shared = g.call(aten.exp.default, peak)
    mixed = g.call(aten.sub.Tensor, own, peak)
    stuck = g.call(aten.cumsum.default, mixed, 0)
    plan = Plan({peak: AllReduce.of(peak)}, lambda node: node is g.x)  # type: ignore[dict-item]
    for node in g.s.graph.nodes:
        plan.visit(node)
    kinds = [plan.kinds[node] for node in (own, peak, shared, mixed, stuck)]
    assert kinds == [Kind.OWN, Kind.SHARED, Kind.SHARED, Kind.MIXED, Kind.STUCK]
