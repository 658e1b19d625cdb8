"""What leaves is what the form says: coefficients packed for `row_grad` and its contract; the same spelled out.

`Packed` forms come from the rules' own cases; zeros among scales, factors and weights are part of the data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch.fx import Node

from fx_passes.algebra.forms import Form
from fx_passes.graph.facts import is_backward, value
from fx_passes.walk.gradient import row_grad
from fx_passes.walk.spelled_out import arithmetic
from tests.cases.operators import CASES, RECIPES, Making, programs
from tests.support.dense import Values, dense
from tests.support.scratch import KINDS, Draw, Scratch, Walked, make, wrong_elements

aten = torch.ops.aten

BOUNDED = settings(
    max_examples=60,  # what is drawn is not the same in every process, by what else it has imported
    phases=[Phase.generate, Phase.shrink],
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
THOUSANDS = settings(BOUNDED, max_examples=3_200, derandomize=False)
PACKED = (
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.exp.default,
    aten.where.self,
    aten.scatter_add.default,
    aten.scatter.value,
    aten.permute.default,
    aten.slice_scatter.default,
)
HALF = {torch.float16, torch.bfloat16}
LARGE = 1e30  # float32 ends soon after
FAR = 1e3  # roundings of float32 that a coefficient may be off by, at the largest number on the way


def targets(cases: tuple[Any, ...]) -> Any:
    return pytest.mark.parametrize("target", cases, ids=[f"{target}" for target in cases])


WAYS = {
    "row_grad": lambda context, form, dtype: row_grad(context, form, dtype).node,
    "spelled out": arithmetic,
}


def leaving(walked: Walked, dtype: torch.dtype, way: str) -> list[tuple[Node, Form, Node]]:
    """The last forms over logits: the user's node, the form, and the node that computes it when it leaves."""
    context, graph = walked.walk.context, walked.walk.graph
    forms = [(n, said) for n in walked.nodes if isinstance(said := walked.said(n), Form) and said.x]
    forms = forms[-2:]  # what the operator made, and what it was made of
    with graph.inserting_before(graph.output_node()):
        return [(node, form, WAYS[way](context, form, dtype)) for node, form in forms]


def dtype_of(node: Node) -> torch.dtype | None:
    """Of a value of floats."""
    dtype = getattr(value(node), "dtype", torch.bool)
    return dtype if dtype.is_floating_point else None


def values_of(walked: Walked, draw: Draw, dtype: torch.dtype | None) -> Values | None:
    """On data on which torch computes the user's program."""
    values = Values(
        {node: make(given, draw, dtype) for node, given in walked.scratch.inputs.items()}, dtype
    )
    try:
        for node in walked.nodes:
            values[node]
    except (RuntimeError, IndexError):
        return None
    return values


def compare(
    walked: Walked, draw: Draw, dtype: torch.dtype | None, way: str, answers: Counter[str]
) -> None:
    """`dtype`: float64 for all that is computed, or None for the dtypes of the graph."""
    if dtype is None and not HALF.isdisjoint(map(dtype_of, walked.nodes)):
        return  # float64 does not round where the program does
    exact = values_of(walked, draw, torch.float64)
    rounded = exact if dtype is not None else values_of(walked, draw, None)
    if exact is None or rounded is None:
        return
    zero = walked.walk.context.rows.zero_outside
    largest = min(LARGE, *(torch.finfo(d).max for d in map(dtype_of, walked.nodes) if d))
    kind = torch.float64 if dtype is not None else torch.float32
    for user, form, node in leaving(walked, kind, way):
        want, size = dense(form, exact, zero)
        size = max(size, exact.largest(node))
        if not (want.isfinite().all() and exact[user].isfinite().all()) or size > largest:
            continue  # `test_rules.py` looks at these, where it is known what eager does
        off = 1e-11 if dtype is not None else FAR * torch.finfo(torch.float32).eps
        if wrong_elements(
            rounded[user].double(), exact[user].double(), off * size, may_mend=False
        ).any():
            continue  # the program itself answers otherwise where it rounds
        found = rounded[node].double()
        wrong = wrong_elements(found, want, off * size, may_mend=False)
        assert not wrong.any(), (
            f"{form}\nleaves as {found[wrong][0]} where it is {want[wrong][0]}, {draw}\n{walked.scratch.script()}"
        )
        answers["compared"] += 1


def run(target: Any, dtype: torch.dtype | None, way: str, how: settings = BOUNDED) -> Counter[str]:
    answers: Counter[str] = Counter()

    @how
    @given(programs(CASES[target]), st.integers(0, 1000))
    def check(made: tuple[Making, int], seed: int) -> None:
        m, _ = made
        assume(not m.failed and (dtype is not None or m.s.dtype is torch.float32))
        walked = m.s.walk(list(m.s.graph.nodes)[-1])
        for kind in ("zeros", KINDS[seed % len(KINDS)]):
            compare(walked, Draw(kind, seed), dtype, way, answers)

    check()
    return answers


QUICK_WAYS = ["row_grad", pytest.param("spelled out", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("way", QUICK_WAYS)
@targets(PACKED)
def test_in_float64(target: Any, way: str) -> None:
    assert run(target, torch.float64, way)["compared"] > 20


@pytest.mark.parametrize("way", QUICK_WAYS)
@targets(PACKED[:5])
def test_in_float32(target: Any, way: str) -> None:
    assert run(target, None, way)["compared"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, None], ids=["float64", "as they are"])
@pytest.mark.parametrize("way", WAYS)
@targets(tuple(CASES))
def test_thousands_of_every_rule(target: Any, way: str, dtype: torch.dtype | None) -> None:
    run(target, dtype, way, THOUSANDS)


def test_from_a_saved_softmax() -> None:
    """save="softmax": gradients of a softmax are computed from its probabilities."""
    saved = 0

    @BOUNDED
    @given(programs(CASES[aten.mul.Tensor], before=0), st.integers(0, 1000))
    def check(made: tuple[Making, int], seed: int) -> None:
        nonlocal saved
        m, _ = made
        assume(not m.failed)
        logs = RECIPES[0](m)
        nodes = list(m.s.graph.nodes)
        probability = m.s.call(aten.exp.default, logs)
        upstream = m.row(probability)
        gradient = m.s.call(aten.mul.Tensor, probability, upstream)
        hits = m.s.input("hits", (*m.lead, 1), torch.int64)
        target = m.s.call(
            aten.scatter_add.default, gradient, -1, hits, m.s.input("rows", (*m.lead, 1))
        )
        backward = [n for n in m.s.graph.nodes if n not in nodes]
        walked = m.s.walk(gradient, target, backward=backward, save="softmax")
        walked.check([Draw("plain", seed), Draw("zeros", seed), Draw("absent", seed)], backward)
        operators = walked.walk.account.gradients
        saved += any(node.args[5] for node in operators)

    check()
    assert saved > 10


# ---- what save="softmax" keeps


def softmax(s: Scratch, x: Node) -> Node:
    top = s.call(aten.amax.default, x, [-1], True)
    e = s.call(aten.exp.default, s.call(aten.sub.Tensor, x, top))
    return s.call(aten.div.Tensor, e, s.call(aten.sum.dim_IntList, e, [-1], True))


def exponential(s: Scratch, x: Node) -> Node:
    """Of no sum that is 1."""
    return s.call(aten.exp.default, s.call(aten.sub.Tensor, x, s.input("rows", (3, 1))))


@pytest.mark.parametrize(
    ("made", "dtype", "scaled", "saved"),
    [
        pytest.param(softmax, torch.float32, False, True, id="a softmax"),
        pytest.param(softmax, torch.bfloat16, False, True, id="a softmax in bfloat16"),
        pytest.param(softmax, torch.float16, False, False, id="in float16 small ones are lost"),
        pytest.param(exponential, torch.float32, False, False, id="no probability"),
        pytest.param(softmax, torch.float32, True, False, id="a temperature of backward's"),
    ],
)
def test_what_is_saved(made: Any, dtype: torch.dtype, scaled: bool, saved: bool) -> None:
    """What backward makes is marked, also where it reads no upstream gradient; the saved softmax is forward's."""
    s = Scratch(dtype)
    x = s.input("logits", (3, 5))
    forward = [] if scaled else [made(s, x)]
    before = set(s.graph.nodes)
    upstream = s.input("positive", (3, 1))
    p = forward[0] if forward else made(s, s.call(aten.mul.Tensor, x, upstream))
    gradient = s.call(aten.neg.default, p)
    backward = [n for n in s.graph.nodes if n not in before]
    walked = s.walk(gradient, backward=backward, save="softmax")
    walked.check(nodes=backward)
    made_here = list(walked.walk.account.gradients)
    assert [node.args[5] for node in made_here] == ([True, False] if saved else [False])
    assert [is_backward(node) for node in made_here] == ([True, False] if saved else [True])
