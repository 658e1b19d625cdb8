"""Operators of few elements as formulas in the graph: `fx_passes/inlined.py` with the formulas of the contract.

That inductor computes the same with them: `tests/backend/test_inline_below.py` and `test_programs.py`.
"""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fx_passes.graph.formulas import Formulas
from fx_passes.inlined import inline, is_small
from slime_compile.backend import passes
from slime_compile.ops import reference
from slime_compile.torch_private import FakeTensorMode

fused = torch.ops.slime_fused
FORMULAS = Formulas(passes.FORMULAS.of)
INF, NAN = float("inf"), float("nan")
ROWS, VOCAB = 5, 11


def _inlined(program: Callable[..., Any], *arguments: Tensor, mode: str = "fake") -> GraphModule:
    module = make_fx(program, tracing_mode=mode)(*arguments)
    nodes = [node for node in module.graph.nodes if node.target in FORMULAS.of]
    small = [n for n in nodes if is_small(n, 1 << 18)]
    if small:
        inline(module.graph, small, FORMULAS)
    module.graph.lint()
    module.recompile()
    return module


def _targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def _assert_plain(module: GraphModule) -> None:
    """Nothing but ATen, all of which somebody reads, and every value known."""
    assert not [t for t in _targets(module) if getattr(t, "namespace", "") == "slime_fused"]
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert node.users, f"{node} is unread"
            assert "val" in node.meta, node


def _logits(dtype: torch.dtype = torch.float32, *lead: int) -> Tensor:
    x = torch.randn(*(lead or (ROWS,)), VOCAB, generator=torch.Generator().manual_seed(0))
    rows = (3 * x).flatten(0, -2)
    rows[0, 1], rows[1], rows[2, 3] = -INF, -INF, NAN
    return rows.view(x.shape).to(dtype)


def _same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-6, atol=1e-6)


# ---- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [1.0, -0.5, 0.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_statistics(dtype: torch.dtype, factor: float, scaled: bool) -> None:
    x = _logits(dtype)
    scale = torch.tensor([1.0, 2.0, -1.0, 0.0, 0.5])[:, None] if scaled else None

    def program(x: Tensor, *scale: Tensor) -> Any:
        peak, log_sum, mean, total = fused.row_stats(x, *scale or [None], factor, "region")
        return peak, log_sum, mean, total

    given = [x] if scale is None else [x, scale]
    module = _inlined(program, *given)
    _assert_plain(module)
    _same(module(*given), reference.row_stats(x, scale, factor))


def test_what_nobody_reads_is_not_computed() -> None:
    def program(x: Tensor) -> Any:
        peak, *_ = fused.row_stats(x, None, 1.0, "", mean=False, total=False)
        return peak

    module = _inlined(program, _logits())
    assert _targets(module) == [torch.ops.aten.amax.default]


# ---- gradients ----------------------------------------------------------------------------------------------------

NUMBERS = (0.0, 1.0, -2.0, 0.5)


@st.composite
def _tables(draw: st.DrawFn, columns: int) -> list[list[float]]:
    """A list for each column: a number for every row, or one for all."""
    number = st.sampled_from(NUMBERS)
    per_row = st.lists(number, min_size=ROWS, max_size=ROWS)
    return draw(st.lists(per_row | number.map(lambda n: [n]), min_size=columns, max_size=columns))


def _joined(table: list[list[float]], *last: int) -> Tensor:
    """As the passes put coefficients together: columns side by side, a constant one expanded."""
    cells = [
        torch.full([ROWS, 1], column[0]) if len(column) == 1 else torch.tensor(column)[:, None]
        for column in table
    ]
    joined = torch.cat(cells, -1) if cells else torch.zeros(ROWS, 0)
    return joined.view(ROWS, *last)


@settings(max_examples=40)
@given(
    data=st.data(),
    terms=st.integers(0, 2),
    hots=st.integers(0, 3),
    softmax=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_gradient(
    data: st.DataObject, terms: int, hots: int, softmax: bool, dtype: torch.dtype
) -> None:
    softmax = softmax and terms == 1
    x = _logits(dtype)
    x = x.float().softmax(-1).to(dtype) if softmax else x
    tables = [data.draw(_tables(columns)) for columns in (5 * terms, 3, hots)]
    for scale in tables[0][::5]:  # -inf is no probability
        scale[:] = map(abs, scale)
    columns = torch.randint(-1, VOCAB + 1, (ROWS, hots), generator=torch.Generator().manual_seed(1))
    compute = reference.compute_dtype(dtype)

    def coefficients() -> tuple[Tensor, ...]:
        found = _joined(tables[0], terms, 5), _joined(tables[1], 3), _joined(tables[2], hots)
        return tuple(each.to(compute) for each in found)

    def program(x: Tensor, index: Tensor) -> Tensor:
        term, affine, weight = coefficients()
        return fused.row_grad(x, term, affine, index, weight, softmax, dtype, "region")

    module = _inlined(program, x, columns)
    _assert_plain(module)
    term, affine, weight = coefficients()
    wanted = reference.row_grad(x, term, affine, columns, weight, softmax, dtype)
    _same(module(x, columns), wanted)


def test_an_infinite_weight_is_in_its_column_alone() -> None:
    def program(x: Tensor, index: Tensor) -> Tensor:
        weight = torch.cat([torch.full([ROWS, 1], INF), torch.full([ROWS, 1], NAN)], -1)
        empty = x.new_zeros(ROWS, 0, 5)
        return fused.row_grad(x, empty, x.new_zeros(ROWS, 3), index, weight, False, x.dtype, "")

    x, index = torch.randn(ROWS, VOCAB), torch.tensor([[1, 3]]).expand(ROWS, 2)
    wanted = torch.zeros(ROWS, VOCAB)
    wanted[:, 1], wanted[:, 3] = INF, NAN
    _same(_inlined(program, x, index)(x, index), wanted)


def test_constants_are_numbers() -> None:
    """Of a softmax's gradient with one factor for each row no more is left than is written by hand."""

    def program(x: Tensor, shift: Tensor, factor: Tensor) -> Tensor:
        zero, one = torch.full([ROWS, 1], 0.0), torch.full([ROWS, 1], 1.0)
        terms = torch.cat([one, zero, shift, factor, zero], -1).view(ROWS, 1, 5)
        affine, no = torch.cat([zero, zero, zero], -1), torch.zeros(ROWS, 0)
        return fused.row_grad(x, terms, affine, no.long(), no, False, x.dtype, "")

    x = torch.randn(ROWS, VOCAB)
    module = _inlined(program, x, torch.randn(ROWS, 1), torch.randn(ROWS, 1))
    names = [str(target) for target in _targets(module)]
    assert "aten.cat.default" not in names
    assert names.count("aten.exp.default") == 1
    wide = [
        n for n in module.graph.nodes if n.op == "call_function" and n.meta["val"].numel() > ROWS
    ]
    products = [n for n in wide if n.target is torch.ops.aten.mul.Tensor]
    assert len(products) == 1, module.graph  # with the factor


def test_rows_in_two_dimensions() -> None:
    """Coefficients of [T, V] that a pass has reshaped to go with logits [B, S, V]."""

    def program(x: Tensor, a: Tensor) -> Tensor:
        one = torch.ones(6, 1)
        terms = torch.cat([one, one, one, a, one], -1).view(2, 3, 1, 5)
        affine = torch.cat([a, one, a], -1).view(2, 3, 3)
        no = torch.zeros(2, 3, 0)
        return fused.row_grad(x, terms, affine, no.long(), no, False, x.dtype, "")

    def by_contract(x: Tensor, a: Tensor) -> Tensor:
        one = torch.ones(6, 1)
        terms = torch.cat([one, one, one, a, one], -1).view(2, 3, 1, 5)
        affine, no = torch.cat([a, one, a], -1).view(2, 3, 3), torch.zeros(2, 3, 0)
        return reference.row_grad(x, terms, affine, no.long(), no, False, x.dtype)

    x, a = torch.randn(2, 3, VOCAB), torch.randn(6, 1)
    module = _inlined(program, x, a)
    _assert_plain(module)
    assert torch.ops.aten.cat.default not in _targets(module)
    _same(module(x, a), by_contract(x, a))


def test_columns_that_a_reshape_has_mixed_with_rows() -> None:
    """Five columns of two rows, seen as two of five; and two columns, one below the other."""
    cells = [torch.tensor([[2 * k], [2 * k + 1]]) for k in range(ROWS)]
    below = [torch.arange(ROWS)[:, None] + ROWS * k for k in range(2)]

    for dim, pieces in ((-1, cells), (0, below)):

        def program(x: Tensor, *pieces: Tensor, dim: int = dim) -> Tensor:
            index = torch.cat(pieces, dim).view(ROWS, -1)
            weight, empty = torch.ones(index.shape), x.new_zeros(ROWS, 0, 5)
            affine = x.new_zeros(ROWS, 3)
            return fused.row_grad(x, empty, affine, index, weight, False, x.dtype, "")

        x, index = torch.randn(ROWS, VOCAB), torch.cat(pieces, dim).view(ROWS, -1)
        module = _inlined(program, x, *pieces)
        _assert_plain(module)
        _same(module(x, *pieces), torch.zeros(ROWS, VOCAB).scatter_(1, index, 1.0))


# ---- what stays an operator ---------------------------------------------------------------------------------------


def _statistics(x: Tensor) -> Any:
    return fused.row_stats(x, None, 1.0, "")[1]


def test_sizes_that_are_not_known() -> None:
    module = _inlined(_statistics, _logits(), mode="symbolic")
    assert fused.row_stats.default in _targets(module)


@pytest.mark.parametrize(("device", "fewer", "small"), [
    ("cpu", ROWS * VOCAB + 1, True), ("cpu", ROWS * VOCAB, False), ("cuda", 1 << 18, False),
])  # fmt: skip
def test_small(device: str, fewer: int, small: bool) -> None:
    module = make_fx(_statistics, tracing_mode="fake")(_logits())
    (node,) = module.graph.find_nodes(op="call_function", target=fused.row_stats.default)
    with FakeTensorMode():
        node.args[0].meta["val"] = torch.empty(ROWS, VOCAB, device=device)
    assert is_small(node, fewer) is small
