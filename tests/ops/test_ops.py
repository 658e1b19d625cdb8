"""The fused operators against their contract, on the CPU. Needs no accelerator.

Truth is `slime_compile.ops.reference` in float64; for statistics, its formulas in numpy's longdouble. The budget is
`tests/support/operator_budget.py`. Every test runs on the C++ and on the torch calls that stand in for it (`way`).
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.library import opcheck

from slime_compile import ops
from slime_compile.ops import cpu, native, operators, reference, torch_calls
from tests.support.dispatch import Allocations
from tests.support.operator_budget import Coefficients, check_grad, check_stats, rms_errors

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# the smallest, and both sides of what a vector, a block or a chunk may hold
VOCABS = (1, 2, 3, 5, 127, 128, 129, 255, 257, 1023, 1025)
ROWS = (0, 1, 7)
# 7 rows of 127 columns take 4 chunks, the last one ragged; 1023 columns take a chunk for each row
SMALL_CHUNK = 300


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(native, "functions", lambda: None)
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", SMALL_CHUNK)


@pytest.fixture(params=["C++", "torch calls"], autouse=True)
def way(request: pytest.FixtureRequest) -> str:
    """Every test here runs on both."""
    if request.param == "torch calls":
        request.getfixturevalue("torch_only")
    elif native.functions() is None:
        pytest.skip(native.description())
    return request.param


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# ---- layouts: the same values, other strides; NaN where the operator has no business -------------------------------


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _column_slice(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], x.shape[1] + 5), NAN)
    wide[:, 3:-2] = x
    return wide[:, 3:-2]


def _column_step(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], 2 * x.shape[1]), NAN)
    wide[:, ::2] = x
    return wide[:, ::2]


def _row_step(x: Tensor) -> Tensor:
    tall = x.new_full((2 * x.shape[0], x.shape[1]), NAN)
    tall[::2] = x
    return tall[::2]


def _odd_offset(x: Tensor) -> Tensor:
    storage = x.new_full((x.numel() + 1,), NAN)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def _three_dim(x: Tensor) -> Tensor:
    return x.clone()[:, None]


def _sequence_first(x: Tensor) -> Tensor:
    """[2, N, V] in memory as [N, 2, V]: no view of it is [2 * N, V]."""
    return torch.stack([x, x], 1).transpose(0, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "transposed": _transposed,
    "column slice": _column_slice,
    "column step": _column_step,
    "row step": _row_step,
    "odd offset": _odd_offset,
    "3-D": _three_dim,
    "sequence first": _sequence_first,
}


# ---- samples ------------------------------------------------------------------------------------------------------


def _logits(
    gen: torch.Generator, n: int, v: int, dtype: torch.dtype, offset: float = 0.0
) -> Tensor:
    x = offset + 5 * torch.randn(n, v, generator=gen, dtype=torch.float64)
    return x.to(dtype)


def _special_rows(gen: torch.Generator, v: int, dtype: torch.dtype) -> Tensor:
    x = _logits(gen, 8, v, dtype)
    x[1, 0] = -INF
    x[2, 1:] = -INF
    x[3] = -INF
    x[4, v // 2] = INF
    x[5, v // 2] = NAN
    x[6, 0], x[6, -1] = -INF, NAN
    x[7, 0], x[7, -1] = -INF, INF
    return x


def _coefficients(
    gen: torch.Generator, x: Tensor, terms: int = 1, hots: int = 1, affine: bool = False
) -> Coefficients:
    """Shifts from the row's statistics, as a loss has them; two columns on either side are in no vocabulary."""
    dtype, rows = reference.compute_dtype(x.dtype), x.shape[:-1]

    def draw(*size: int) -> Tensor:
        return torch.randn(*rows, *size, generator=gen, dtype=torch.float64).to(dtype)

    columns = [torch.zeros(*rows, 0, 5, dtype=dtype)]
    for k in range(terms):
        scale = 1.0 - 0.3 * k
        top, log_sum, _, _ = reference.row_stats(x, None, scale)
        column = [torch.full_like(top, scale), top, log_sum, draw(1), draw(1)]
        columns.append(torch.stack(column, -1))
    index = torch.randint(-2, x.shape[-1] + 2, (*rows, hots), generator=gen)
    linear = draw(3) if affine else torch.zeros(*rows, 3, dtype=dtype)
    return torch.cat(columns, -2), linear, index, draw(hots)


# ---- row_stats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_stats(gen: torch.Generator, layout: str, dtype: torch.dtype) -> None:
    for v in VOCABS:
        for n in ROWS:
            check_stats(LAYOUTS[layout](_logits(gen, n, v, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_stats_of_large_offsets(gen: torch.Generator, dtype: torch.dtype) -> None:
    for v in (129, 1025):
        check_stats(_logits(gen, 7, v, dtype, offset=1000.0))


def _peaked(gen: torch.Generator, n: int, v: int, dtype: torch.dtype) -> Tensor:
    """Rows of which one token has most of the probability: all other elements are small beside the sum so far."""
    x = torch.randn(n, v, generator=gen, dtype=torch.float64)
    x[:, v // 3] = 14.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_stats_are_as_accurate_as_the_reference(
    gen: torch.Generator, dtype: torch.dtype
) -> None:
    # Over 512 rows the RMS of an error is known to 5 %. Sums of one lane through a block had up to 4.6 times it.
    for x in (
        _logits(gen, 512, 4096, dtype),
        _logits(gen, 512, 4096, dtype, offset=1000.0),
        _peaked(gen, 512, 4096, dtype),
    ):
        for found, usual in rms_errors(x):
            assert found <= 1.4 * usual


@pytest.mark.parametrize("shape", [(7, 1), (1, 1), (1,), ()])
def test_row_stats_scale(gen: torch.Generator, shape: tuple[int, ...]) -> None:
    x = _logits(gen, 7, 129, torch.float32)
    scale = torch.rand(shape, generator=gen) + 0.5
    check_stats(x, scale, 0.7)
    check_stats(x.to(torch.bfloat16), scale, -1.3)


def test_row_stats_of_scale_zero_are_those_of_zeros(gen: torch.Generator) -> None:
    x = _logits(gen, 7, 129, torch.float32)
    scale = torch.ones(7, 1)
    scale[2:4] = 0.0
    check_stats(x, scale)
    top, log_sum, mean, total = ops.row_stats(x, scale, 1.0, "")
    torch.testing.assert_close(log_sum[2:4], torch.full((2, 1), 129.0).log())
    assert (torch.stack([top, mean, total])[:, 2:4] == 0).all()


def test_row_stats_of_expanded_rows_and_of_one_row(gen: torch.Generator) -> None:
    row = _logits(gen, 1, 129, torch.float32)
    check_stats(row.expand(7, 129))
    check_stats(row[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [3, 129, 1025])
def test_row_stats_of_special_rows(gen: torch.Generator, v: int, dtype: torch.dtype) -> None:
    x = _special_rows(gen, v, dtype)
    check_stats(x)
    top, log_sum, mean, total = ops.row_stats(x, None, 1.0, "")
    assert torch.cat([top, log_sum, mean, total], 1)[:3, :3].isfinite().all()
    assert mean[2] == 0  # one token left: probability 1
    assert (total[1:3] == -INF).all()
    assert (top[3], log_sum[3]) == (-INF, -INF)
    assert torch.cat([mean, total], 1)[3].isnan().all()
    assert torch.cat([log_sum, mean, total], 1)[4:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mean", "total"), [(True, False), (False, True), (False, False)])
def test_row_stats_that_nobody_reads_are_nan_and_change_no_other(
    gen: torch.Generator, mean: bool, total: bool, dtype: torch.dtype
) -> None:
    x = torch.cat([_special_rows(gen, 1025, dtype), _logits(gen, 7, 1025, dtype, offset=300.0)])
    every = ops.row_stats(x, None, 0.7, "")
    some = ops.row_stats(x, None, 0.7, "", mean=mean, total=total)
    for got, full, read in zip(some, every, (True, True, mean, total), strict=True):
        expected = full if read else torch.full_like(full, NAN)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# ---- row_grad -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_grad(gen: torch.Generator, layout: str, dtype: torch.dtype) -> None:
    for v in VOCABS:
        for n in ROWS:
            x = LAYOUTS[layout](_logits(gen, n, v, dtype))
            check_grad(x, _coefficients(gen, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("terms", "hots"), [(0, 0), (0, 2), (1, 0), (2, 1), (3, 3)])
def test_row_grad_terms(
    gen: torch.Generator, terms: int, hots: int, affine: bool, dtype: torch.dtype
) -> None:
    for v in (3, 129, 1025):
        x = _logits(gen, 7, v, dtype)
        check_grad(x, _coefficients(gen, x, terms, hots, affine))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_grad_of_large_offsets(gen: torch.Generator, dtype: torch.dtype) -> None:
    x = _logits(gen, 7, 129, dtype, offset=1000.0)
    check_grad(x, _coefficients(gen, x))


@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_softmax_ends_where_float32_does(scale: float, terms: int) -> None:
    """Denormal numbers are not 0: a logarithm may be taken of them."""
    x = torch.linspace(-110, 0, 4001).expand(2, -1) * scale
    x[1, :1000] = -torch.inf * scale
    own = torch.tensor([scale, 0.0, 0.0, 1.0 / terms, 0.0]).expand(2, terms, 5)
    none = torch.zeros(2, 0)
    found = ops.row_grad(x, own, torch.zeros(2, 3), none.long(), none, False, x.dtype, "")
    truth = (x.double() * scale).exp()
    smallest = terms * torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    error = (found.double() - truth).abs()
    assert bool((error <= terms * torch.finfo(torch.float32).eps * truth + smallest).all())


def test_row_grad_of_expanded_rows_and_of_one_row(gen: torch.Generator) -> None:
    row = _logits(gen, 1, 129, torch.float32)
    check_grad(row.expand(7, 129), _coefficients(gen, row.expand(7, 129)))
    check_grad(row[0], _coefficients(gen, row[0]))


def test_row_grad_of_expanded_coefficients(gen: torch.Generator) -> None:
    x = _logits(gen, 7, 129, torch.float32)
    terms, affine, index, weight = (value[:1].expand_as(value) for value in _coefficients(gen, x))
    check_grad(x, (terms, affine, index, weight))


def test_row_grad_adds_one_hot_terms_at_the_same_column(gen: torch.Generator) -> None:
    x = torch.zeros(2, 5)
    terms, affine, _, _ = _coefficients(gen, x, terms=0)
    index = torch.tensor([[1, 1, 5], [-1, 4, 4]])
    weight = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    result = ops.row_grad(x, terms, affine, index, weight, False, torch.float32, "")
    assert result.tolist() == [[0, 3, 0, 0, 0], [0, 0, 0, 0, 6]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("v", [3, 129, 1025])
def test_row_grad_of_special_rows(
    gen: torch.Generator, v: int, terms: int, dtype: torch.dtype
) -> None:
    x = _special_rows(gen, v, dtype)
    coefficients = _coefficients(gen, x, terms, hots=0)
    check_grad(x, coefficients)
    result = ops.row_grad(x, *coefficients, False, dtype, "")
    assert (result[1:3][x[1:3] == -INF] == 0).all()  # no probability, no gradient
    assert result[:3].isfinite().all()
    assert result[3:].isnan().any(1).all()


@pytest.mark.parametrize("shift", [1.0, -INF, INF, NAN])
@pytest.mark.parametrize("b", [0.0, 0.5])
@pytest.mark.parametrize("columns", [0, 1])
def test_row_grad_of_one_term(shift: float, b: float, columns: int) -> None:
    """As most losses have it, and few rows: of only -inf, of a gradient that is not finite."""
    x = torch.tensor([[0.0, 1.0, -INF, NAN, -200.0, 300.0] * 9, [-INF] * 54]).repeat(3, 1)
    terms = torch.tensor([[1.0, 0.0, shift, a, b] for a in (1.0, -2.0, INF) for _ in range(2)])
    index = torch.ones(6, columns, dtype=torch.int64)
    args = x, terms[:, None], torch.zeros(6, 3), index, torch.ones(6, columns)
    found = cpu.row_grad(*args, False, torch.float32)
    torch.testing.assert_close(
        found, reference.row_grad(*args, False, torch.float32), equal_nan=True
    )


def test_row_grad_ignores_x_where_only_e_counts(gen: torch.Generator) -> None:
    x = torch.full((3, 129), NAN)
    _, _, index, weight = _coefficients(gen, x)
    affine = torch.tensor([[0.0, NAN, 2.0], [1.0, 0.0, 2.0], [0.0, 7.0, -1.0]])
    result = ops.row_grad(
        x, torch.zeros(3, 0, 5), affine, index, weight.zero_(), False, torch.float32, ""
    )
    assert (result[0] == 2).all()
    assert result[1].isnan().all()
    assert (result[2] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dead", [(0, 1, 2, 3, 4, 5, 6), (0, 1), (1, 3, 6), (5,)], ids=str)
@pytest.mark.parametrize("v", [5, 129, 1025])
def test_row_grad_does_not_read_rows_without_coefficients(
    gen: torch.Generator, v: int, dead: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = _logits(gen, 7, v, dtype)
    terms, affine, index, weight = _coefficients(gen, x, terms=2, affine=True)
    rows = list(dead)
    terms[rows, :, 3:], affine[rows, ::2], weight[rows] = 0.0, 0.0, 0.0
    terms[rows, :, :3] = NAN
    coefficients = terms, affine, index, weight
    expected = ops.row_grad(x, *coefficients, False, dtype, "")
    x[rows] = NAN
    check_grad(x, coefficients)
    result = ops.row_grad(x, *coefficients, False, dtype, "")
    assert torch.equal(result, expected)
    assert (result[rows] == 0).all()
    ops.row_grad_(x, *coefficients, False, "")
    assert torch.equal(x, result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("v", [1, 5, 129, 1025])
def test_row_grad_of_kept_probabilities(gen: torch.Generator, v: int, dtype: torch.dtype) -> None:
    logits = _logits(gen, 7, v, dtype)
    logits[2, 1:] = -INF
    terms, affine, index, weight = _coefficients(gen, logits)
    probabilities = logits.softmax(-1)
    kept = terms.clone()
    kept[..., :2] = NAN  # scale and center
    check_grad(probabilities, (kept, affine, index, weight), softmax=True)
    result = ops.row_grad(probabilities, kept, affine, index, weight, True, dtype, "")
    expected = ops.row_grad(logits, terms, affine, index, weight, False, dtype, "")
    # log(p) has the rounding of p, so many roundings of the result where it is not tiny
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result, expected, rtol=8 * eps, atol=8 * eps)


# ---- row_grad_ ----------------------------------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_is_bit_equal(gen: torch.Generator, layout: str, dtype: torch.dtype) -> None:
    for v in (1, 3, 129, 1025):
        for n in ROWS:
            x = LAYOUTS[layout](_logits(gen, n, v, dtype))
            for terms, affine in ((0, True), (1, False), (2, True)):
                coefficients = _coefficients(gen, x, terms, 2, affine)
                expected = ops.row_grad(x, *coefficients, False, dtype, "")
                written = LAYOUTS[layout](x.reshape(-1, v)[:n])
                assert ops.row_grad_(written, *coefficients, False, "") is None
                assert torch.equal(_bits(written), _bits(expected))


def test_in_place_is_bit_equal_on_special_rows_and_on_probabilities(gen: torch.Generator) -> None:
    x = _special_rows(gen, 129, torch.float32)
    for softmax in (False, True):
        given = x.softmax(-1) if softmax else x.clone()
        coefficients = _coefficients(gen, x)
        expected = ops.row_grad(given, *coefficients, softmax, x.dtype, "")
        ops.row_grad_(given, *coefficients, softmax, "")
        assert torch.equal(_bits(given), _bits(expected))


def test_in_place_writes_nothing_beside_x(gen: torch.Generator) -> None:
    wide = torch.full((7, 12), 3.0)
    x = wide[::2, 3:8]
    ops.row_grad_(x, *_coefficients(gen, x), False, "")
    wide[::2, 3:8] = 3.0
    assert (wide == 3.0).all()


def test_in_place_refuses_a_leaf(gen: torch.Generator) -> None:
    x = torch.zeros(3, 5, requires_grad=True)
    coefficients = _coefficients(gen, x.detach())
    with pytest.raises(
        RuntimeError, match=r"leaf that requires grad.*got a leaf of shape \[3, 5\]"
    ):
        ops.row_grad_(x, *coefficients, False, "")
    with pytest.raises(RuntimeError, match=r"got a view of a leaf of shape \[3, 5\].*row_grad"):
        ops.row_grad_(x[:], *coefficients, False, "")
    assert (x == 0).all()


def test_in_place_refuses_rows_that_share_memory(gen: torch.Generator) -> None:
    x = torch.zeros(1, 129).expand(7, 129)
    with pytest.raises(RuntimeError, match=r"no elements that share memory.*\[7, 129\]"):
        ops.row_grad_(x, *_coefficients(gen, x), False, "")


def test_in_place_makes_a_later_use_of_the_saved_tensor_an_error(gen: torch.Generator) -> None:
    x = torch.zeros(3, 5, requires_grad=True) * 2
    y = (x * x).sum()  # saves x
    version = x._version
    ops.row_grad_(x, *_coefficients(gen, x.detach()), False, "")
    assert x._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_in_place_under_inference_mode(gen: torch.Generator) -> None:
    with torch.inference_mode():
        x = torch.zeros(3, 5)
        coefficients = _coefficients(gen, x)
        expected = ops.row_grad(x, *coefficients, False, x.dtype, "")
        ops.row_grad_(x, *coefficients, False, "")
        assert torch.equal(x, expected)


# ---- what must hold -----------------------------------------------------------------------------------------------


def _arguments(**changed: Any) -> list[Any]:
    arguments = {
        "x": torch.zeros(4, 7),
        "terms": torch.zeros(4, 2, 5),
        "affine": torch.zeros(4, 3),
        "index": torch.zeros(4, 1, dtype=torch.int64),
        "weight": torch.zeros(4, 1),
        "softmax": False,
        "dtype": torch.float32,
    }
    return [*(arguments | changed).values(), ""]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"terms": torch.zeros(4, 5)}, "`terms` must have shape [4, K, 5], got [4, 5]"),
        ({"terms": torch.zeros(3, 1, 5)}, "`terms` must have shape [4, K, 5], got [3, 1, 5]"),
        ({"affine": torch.zeros(4, 2)}, "`affine` must have shape [4, 3], got [4, 2]"),
        ({"weight": torch.zeros(4, 2)}, "`weight` must have shape [4, 1], got [4, 2]"),
        ({"index": torch.zeros(4, 1)}, "`index` must have dtype torch.int64, got torch.float32"),
        (
            {"terms": torch.zeros(4, 2, 5).double()},
            "`terms` must have dtype torch.float32, got torch.float64",
        ),
        ({"softmax": True}, "`terms` must hold one term where softmax=True, got 2"),
        ({"dtype": torch.int32}, "`dtype` must be a floating dtype, got torch.int32"),
        ({"x": torch.zeros(4, 7).int()}, "`x` must have a floating dtype, got torch.int32"),
        ({"x": torch.tensor(1.0)}, "`x` must have shape [..., V], got a tensor without dimensions"),
    ],
)
def test_row_grad_refuses(changed: dict[str, Any], message: str) -> None:
    for device in ("cpu", "meta"):
        arguments = [a.to(device) if isinstance(a, Tensor) else a for a in _arguments(**changed)]
        with pytest.raises(RuntimeError) as raised:
            ops.row_grad(*arguments)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        ((4, 7), (3, 1), "`scale` must be broadcastable to [4, 1], got [3, 1]"),
        ((4, 7), (4,), "`scale` must be broadcastable to [4, 1], got [4]"),
        ((4, 7), (1, 4, 1), "`scale` must be broadcastable to [4, 1], got [1, 4, 1]"),
        ((4, 0), None, "`x` must have a vocabulary of at least one column, got shape [4, 0]"),
    ],
)
def test_row_stats_refuses(x: tuple[int, ...], scale: tuple[int, ...] | None, message: str) -> None:
    for device in ("cpu", "meta"):
        factors = None if scale is None else torch.ones(scale, device=device)
        with pytest.raises(RuntimeError) as raised:
            ops.row_stats(torch.zeros(x, device=device), factors, 1.0, "")
        assert message in str(raised.value)


# ---- registration -------------------------------------------------------------------------------------------------


def _samples(gen: torch.Generator) -> Iterator[tuple[Tensor, Coefficients, bool]]:
    for dtype in DTYPES:
        x = _logits(gen, 3, 5, dtype)
        yield x, _coefficients(gen, x), False
    x = _logits(gen, 3, 5, torch.float32)
    for name in ("transposed", "column slice", "odd offset", "sequence first"):
        strided = LAYOUTS[name](x)
        yield strided, _coefficients(gen, strided, 2, 2, True), False
    yield x[:0], _coefficients(gen, x[:0]), False
    yield x[0], _coefficients(gen, x[0]), False
    yield x.softmax(-1), _coefficients(gen, x), True
    x = _special_rows(gen, 5, torch.float32)[:3]  # opcheck wants NaN equal to NaN, which it is not
    yield x, _coefficients(gen, x), False


def test_opcheck(gen: torch.Generator) -> None:
    for x, coefficients, softmax in _samples(gen):
        opcheck(ops.row_stats, (x, None, 0.5, "region"))
        # without the two that compare values: opcheck wants NaN equal to NaN, which it is not
        some = ("test_schema", "test_faketensor", "test_autograd_registration")
        opcheck(ops.row_stats, (x, None, 0.5, "region"), {"total": False}, test_utils=some)
        opcheck(ops.row_grad, (x, *coefficients, softmax, x.dtype, "region"))
        opcheck(ops.row_grad_, (x, *coefficients, softmax, "region"))


def test_opcheck_with_inputs_that_require_grad(gen: torch.Generator) -> None:
    x = _logits(gen, 3, 5, torch.float32)
    terms, affine, index, weight = _coefficients(gen, x)
    terms.requires_grad_()
    opcheck(ops.row_grad_, (x.clone(), terms, affine, index, weight, False, ""))
    x.requires_grad_()
    opcheck(ops.row_stats, (x, torch.rand(3, 1).requires_grad_(), 1.0, ""))
    opcheck(ops.row_grad, (x, terms, affine, index, weight, False, torch.bfloat16, ""))


def test_outputs_have_no_derivative_eager_and_compiled(gen: torch.Generator) -> None:
    x = torch.randn(3, 5, generator=gen).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        top, *_ = ops.row_stats(x, None, 1.0, "")
        return top, (x * top).sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for run in (function, compiled):
        top, loss = run(x)
        assert not top.requires_grad
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, top.expand(3, 5))


def test_one_graph_for_every_number_of_rows(gen: torch.Generator) -> None:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def function(x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        top, *_ = ops.row_stats(x, x.new_ones(x.shape[0], 1), 1.0, "")
        return top + ops.row_grad(x, terms, affine, index, weight, False, torch.float32, "")

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for n in (5, 1, 0, 7):
        x = torch.randn(n, 5, generator=gen)
        arguments = [x, *_coefficients(gen, x)]
        for argument in arguments:
            torch._dynamo.decorators.mark_unbacked(argument, 0)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert graphs == 1


def test_seen_regions_counts_named_calls(gen: torch.Generator) -> None:
    x = torch.zeros(3, 5)
    before = dict(ops.seen_regions)
    name = "tests/ops/test_ops.py:1"
    ops.row_stats(x, None, 1.0, name)
    ops.row_grad(x, *_coefficients(gen, x), False, x.dtype, name)
    ops.row_grad_(x, *_coefficients(gen, x), False, name)
    ops.row_stats(x, None, 1.0, "")
    assert ops.seen_regions == before | {name: before.get(name, 0) + 3}


def test_cuda_without_triton_uses_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators.importlib.util, "find_spec", lambda name: None)
    operators._cuda_kernels.cache_clear()
    try:
        assert operators._cuda_kernels() is reference
    finally:
        operators._cuda_kernels.cache_clear()


def test_import_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import slime_compile.ops"
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_temporary_beyond_chunks(
    gen: torch.Generator, way: str, layout: str, dtype: torch.dtype
) -> None:
    x = LAYOUTS[layout](_special_rows(gen, 129, dtype).repeat(4, 1))
    coefficients = _coefficients(gen, x, 2, 1, True)
    chunk, of_three = (n // 129 * 129 for n in (SMALL_CHUNK, SMALL_CHUNK * 2 // 3))  # whole rows
    with Allocations() as stats:
        cpu.row_stats(x, None, 1.0)
    with Allocations() as grad:
        cpu.row_grad(x, *coefficients, False, dtype)
    with Allocations() as grad_:
        cpu.row_grad_(x, *coefficients, False)
    if way == "C++":
        assert stats.elements == [x.shape[:-1].numel()] * 4
        assert grad.elements == [x.numel()]
        assert grad_.elements == []
        return
    # scratch is one allocation: 2 chunks for the statistics, 3 smaller ones for a gradient of two terms
    assert max(stats.elements) == 2 * chunk
    most = max(3 * of_three, *(value.numel() for value in coefficients))
    assert 3 * of_three in grad.elements
    assert 3 * of_three <= sorted(grad.elements)[-2] <= most < x.numel() == max(grad.elements)
    assert 3 * of_three <= max(grad_.elements) <= most


# ---- threads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def always_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The C++ takes a thread for each 32,768 elements or segment of a row, the torch calls one for each chunk."""
    before = torch.get_num_threads()
    monkeypatch.setattr(torch_calls, "_PARALLEL_ELEMENTS", 1)
    torch.set_num_threads(3)  # no divisor of the number of chunks
    yield
    torch.set_num_threads(before)


def _threads_of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_change_no_bit(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, always_threads: None, layout: str
) -> None:
    x = LAYOUTS[layout](_special_rows(gen, 129, torch.float32).repeat(128, 1))
    terms, affine, index, weight = _coefficients(gen, x, 2, 1, True)
    weight[:1], affine[:1], terms[:1] = 0.0, 0.0, 0.0
    arguments = [terms, affine, index, weight, False]
    stats, grad = ops.row_stats(x, None, 1.0, ""), ops.row_grad(x, *arguments, x.dtype, "")
    with monkeypatch.context() as serial:
        serial.setattr(torch_calls, "_PARALLEL_ELEMENTS", 1 << 60)
        torch.set_num_threads(1)
        expected = ops.row_stats(x, None, 1.0, "")
        assert torch.equal(_bits(torch.stack(stats)), _bits(torch.stack(expected)))
        assert torch.equal(_bits(grad), _bits(ops.row_grad(x, *arguments, x.dtype, "")))
    ops.row_grad_(x, *arguments, "")
    assert torch.equal(_bits(x), _bits(grad))


def test_threads_leave_torchs_number_of_threads(gen: torch.Generator, always_threads: None) -> None:
    ops.row_stats(torch.zeros(7, 129), None, 1.0, "")
    assert torch.get_num_threads() == 3
    assert _threads_of_a_new_thread() == 3


def test_threads_with_inputs_that_require_grad(gen: torch.Generator, always_threads: None) -> None:
    x = torch.randn(7, 129, generator=gen, requires_grad=True)
    coefficients = [c.requires_grad_(c.is_floating_point()) for c in _coefficients(gen, x.detach())]
    assert not ops.row_stats(x, None, 1.0, "")[0].requires_grad
    expected = ops.row_grad(x, *coefficients, False, x.dtype, "")
    assert not expected.requires_grad
    written = x * 1
    ops.row_grad_(written, *coefficients, False, "")
    assert torch.equal(written, expected)


def test_threads_under_inference_mode(gen: torch.Generator, always_threads: None) -> None:
    with torch.inference_mode():
        x = torch.randn(7, 129, generator=gen)
        coefficients = _coefficients(gen, x)
        expected = ops.row_grad(x, *coefficients, False, x.dtype, "")
        ops.row_grad_(x, *coefficients, False, "")
        assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_threads_share_long_rows(
    gen: torch.Generator, always_threads: None, dtype: torch.dtype
) -> None:
    x = _logits(gen, 3, 100_000, dtype)  # a row is 4 segments, the last one ragged
    x[0, 70_000], x[0, 40_000:60_000], x[1, :99_999] = 40.0, -INF, -INF
    check_stats(x)
    check_grad(x, _coefficients(gen, x, 1, 3))
    x[2, -1] = NAN
    check_stats(x)


def test_threads_pass_errors_on(
    monkeypatch: pytest.MonkeyPatch, torch_only: None, always_threads: None
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("of a chunk")

    monkeypatch.setattr(torch_calls, "_chunk_stats", fail)
    with pytest.raises(ValueError, match="of a chunk"):
        ops.row_stats(torch.zeros(7, 129), None, 1.0, "")
    assert torch.get_num_threads() == 3


# ---- anything -----------------------------------------------------------------------------------------------------


@settings(max_examples=150, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    n=st.integers(0, 5),
    v=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(sorted(LAYOUTS)),
    terms=st.integers(0, 2),
    hots=st.integers(0, 3),
    affine=st.booleans(),
    masked=st.floats(0, 1),
    dead=st.floats(0, 1),
    chunk=st.sampled_from([1, 50, 1 << 19]),
)
def test_any_shape(
    seed: int,
    n: int,
    v: int,
    dtype: torch.dtype,
    layout: str,
    terms: int,
    hots: int,
    affine: bool,
    masked: float,
    dead: float,
    chunk: int,
) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = _logits(gen, n, v, dtype)
    x[torch.rand(n, v, generator=gen) < masked] = -INF
    x = LAYOUTS[layout](x)
    coefficients = _coefficients(gen, x, terms, hots, affine)
    empty = torch.rand(x.shape[:-1], generator=gen) < dead
    for value, part in zip(coefficients, (3, 0, 0, 0), strict=True):
        if value.is_floating_point():
            value[empty, ..., part:] = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_calls, "_CHUNK_ELEMENTS", chunk)
        check_stats(x)
        check_grad(x, coefficients)
