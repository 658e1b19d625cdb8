"""The operators over chunks of logits against their contract. Needs no accelerator.

Truth is `linear_reference` in float64; the budget is the error of the same reference in the operator's own dtype, which
has all logits at once, plus one rounding.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from fx_passes.rows import chunks
from slime_compile.ops import linear, linear_chunks, linear_reference
from tests.support.harness import no_worse_than_eager

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# odd sizes; 13 rows of 37 columns are 7 chunks of 2 rows at the smaller bound, and columns are cut too
ROWS, VOCAB, HIDDEN = 13, 37, 5
FEW, ONE = (
    2 * VOCAB,
    1 << 20,
)  # elements of a chunk: several chunks, the last one ragged, and a single one
ONE_SCALE = ([None], [1.0], [True], [True])
WANTED = [w for w in itertools.product((True, False), repeat=3) if any(w)]


@pytest.fixture(autouse=True)
def narrow_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few columns are allowed, and begin anywhere."""
    monkeypatch.setattr(chunks, "COLUMNS_MIN", 1)
    monkeypatch.setattr(chunks, "COLUMNS_MULTIPLE", 1)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _head(
    gen: torch.Generator, dtype: torch.dtype, rows: int = ROWS, with_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden = torch.randn(rows, HIDDEN, generator=gen)
    weight = torch.randn(VOCAB, HIDDEN, generator=gen)
    bias = torch.randn(VOCAB, generator=gen).to(dtype) if with_bias else None
    return hidden.to(dtype), weight.to(dtype), bias


def _index(gen: torch.Generator, rows: int = ROWS, columns: int = 2) -> Tensor:
    return torch.randint(VOCAB, (rows, columns), generator=gen)


def _coefficients(
    gen: torch.Generator, head: tuple[Tensor, Tensor, Tensor | None], terms: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of two softmaxes, their entropies, an affine part, and two columns, one of which is outside at times."""
    compute = linear_reference.compute_dtype(head[0].dtype)
    scales = [0.7, 1.3][:terms]
    stats, _ = linear_reference.linear_row_stats(
        *(None if t is None else t.to(compute) for t in head),
        [None] * terms,
        scales,
        [True] * terms,
        [False] * terms,
        _index(gen, len(head[0])),
    )
    rows = len(head[0])
    of_terms = [
        torch.cat(
            [
                torch.full((rows, 1), scale),
                stats[k, 0],
                stats[k, 1],
                *torch.randn(2, rows, 1, generator=gen),
            ],
            -1,
        )
        for k, scale in enumerate(scales)
    ]
    packed = torch.stack(of_terms, 1) if terms else torch.empty(rows, 0, 5)
    affine = torch.randn(rows, 3, generator=gen)
    affine[::2, 0] = 0
    index = _index(gen, rows)
    index[::3, 0] = -100
    values = torch.randn(rows, 2, generator=gen)
    return packed.to(compute), affine.to(compute), index, values.to(compute)


def _doubled(*values: Tensor | None) -> list[Tensor | None]:
    return [v.double() if v is not None and v.is_floating_point() else v for v in values]


def _in_float32(*values: Tensor | None) -> list[Tensor | None]:
    return [v.float() if v is not None and v.is_floating_point() else v for v in values]


def _errors_seen_in_float32(found: Tensor, true: Tensor, dtype: torch.dtype) -> Tensor | None:
    """In float64 the reference is the truth itself; what float32 shows, in units of float64, speaks for it."""
    if dtype != torch.float64:
        return None
    units = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    errors = (found.double() - true).abs().flatten()
    return units * errors[errors.isfinite()]


@pytest.mark.parametrize("elements", [FEW, ONE])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stats(gen: torch.Generator, dtype: torch.dtype, with_bias: bool, elements: int) -> None:
    head = _head(gen, dtype, with_bias=with_bias)
    index = _index(gen)
    scale = torch.rand(ROWS, 1, generator=gen) + 0.5
    what = (
        [None, scale, torch.tensor(2.0)],
        [1.0, 0.5, -1.0],
        [True, False, True],
        [True, True, False],
    )
    got = linear.linear_row_stats(*head, *what, index, elements * dtype.itemsize, "")
    plain = linear_reference.linear_row_stats(*head, *what, index)
    truth = linear_reference.linear_row_stats(*_doubled(*head), *what, index)
    rough = linear_reference.linear_row_stats(*_in_float32(*head), *what, index)
    for what, mine, eager, true, seen in zip(
        ("stats", "picked"), got, plain, truth, rough, strict=True
    ):
        assert mine.dtype == eager.dtype
        more = _errors_seen_in_float32(seen, true, dtype)
        no_worse_than_eager(mine, eager, true, dtype, what, more)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("elements", [FEW, ONE])
@pytest.mark.parametrize("rows", [ROWS, 3 * VOCAB])  # columns are cut where they outnumber rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_grad(
    gen: torch.Generator, dtype: torch.dtype, rows: int, elements: int, transposed: bool
) -> None:
    head = _head(gen, dtype, rows)
    coefficients = _coefficients(gen, head)
    limit = max(elements, 2 * rows) * dtype.itemsize
    every = ((True,) * 3, transposed)
    truth = linear_reference.linear_row_grad(*_doubled(*head), *_doubled(*coefficients), *every)
    plain = linear_reference.linear_row_grad(*head, *coefficients, *every)
    rough = linear_reference.linear_row_grad(
        *_in_float32(*head), *_in_float32(*coefficients), *every
    )
    for wanted in WANTED:
        got = linear.linear_row_grad(*head, *coefficients, wanted, transposed, limit, "")
        for what, made, mine, eager, true, seen in zip(
            ("hidden", "weight", "bias"), wanted, got, plain, truth, rough, strict=True
        ):
            if not made:
                assert mine.shape == (0,)
                continue
            assert mine.dtype == dtype
            assert mine.is_contiguous()
            more = _errors_seen_in_float32(seen, true, dtype)
            no_worse_than_eager(mine, eager, true, dtype, f"gradient of {what}, {wanted}", more)


@pytest.mark.parametrize("rows", [1000, 100])  # chunks of rows, chunks of columns
def test_a_hundred_chunks_in_bfloat16_are_as_good_as_one(gen: torch.Generator, rows: int) -> None:
    vocab = 1100 - rows
    hidden = torch.randn(rows, 64, generator=gen).bfloat16()
    weight = torch.randn(vocab, 64, generator=gen).bfloat16() / 8
    stats, _ = linear_reference.linear_row_stats(
        hidden, weight, None, *ONE_SCALE, torch.zeros(rows, 0, dtype=torch.int64)
    )
    top, log_sum = stats[0, :2]
    one = torch.ones_like(top)
    terms = torch.stack([torch.cat([one, top, log_sum, one, 0 * one], 1)], 1)
    index = torch.randint(vocab, (rows, 1), generator=gen)
    coefficients = (terms, torch.zeros(rows, 3), index, -one)
    wanted = (True, True, False)
    limit = 10 * min(rows, vocab) * 2
    got = linear.linear_row_grad(hidden, weight, None, *coefficients, wanted, False, limit, "")
    plain = linear_reference.linear_row_grad(hidden, weight, None, *coefficients, wanted, False)
    truth = linear_reference.linear_row_grad(
        *_doubled(hidden, weight, None, *coefficients), wanted, False
    )
    for mine, eager, true in list(zip(got, plain, truth, strict=True))[:2]:
        no_worse_than_eager(mine, eager, true, torch.bfloat16)


def _pieces_taken(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    vocab: int,
    wanted: tuple[bool, bool, bool],
    dtype: torch.dtype,
) -> str:
    """Which way backward goes, in chunks of ten rows or ten columns, whichever are longer."""
    taken = []
    for name in ("_by_row_chunks", "_by_column_chunks"):
        original = getattr(linear_chunks, name)

        def spy(*args: object, _name: str = name, _original: object = original) -> object:
            taken.append(_name)
            return _original(*args)  # type: ignore[operator]

        monkeypatch.setattr(linear_chunks, name, spy)
    hidden, weight = torch.randn(rows, 2).to(dtype), torch.randn(vocab, 2).to(dtype)
    none = torch.empty(rows, 0)
    linear.linear_row_grad(
        hidden, weight, None, torch.zeros(rows, 0, 5), torch.zeros(rows, 3), none.long(), none,
        wanted, False, 10 * dtype.itemsize * max(rows, vocab), "",
    )  # fmt: skip
    return taken[0].removeprefix("_by_").removesuffix("_chunks")


@pytest.mark.parametrize(
    ("rows", "vocab", "wanted", "way"),
    [
        (30, 70, (True, True, False), "column"),  # a sum [30, D] instead of [70, D]
        (70, 30, (True, True, False), "row"),
        (30, 70, (True, False, False), "row"),  # a frozen weight: no sum at all
        (70, 30, (False, True, False), "column"),
        (8, 70, (True, True, False), "row"),  # a single chunk
    ],
)
def test_the_smaller_sum_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    vocab: int,
    wanted: tuple[bool, bool, bool],
    way: str,
) -> None:
    assert _pieces_taken(monkeypatch, rows, vocab, wanted, torch.bfloat16) == way


def test_in_float32_the_sum_is_the_gradient_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So rows are cut as in forward, and the logits are bit for bit the same."""
    assert _pieces_taken(monkeypatch, 30, 70, (True, True, False), torch.float32) == "row"


@pytest.mark.parametrize("rows", [ROWS, 3 * VOCAB])
def test_one_buffer_of_the_size_asked_for(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Every chunk is written to the same memory, and none is larger than the bound."""
    places, sizes = set(), []
    fill = linear_chunks.Head.fill

    def spy(self: linear_chunks.Head, buffer: Tensor, *where: slice) -> Tensor:
        made = fill(self, buffer, *where)
        places.add(made.data_ptr())
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(linear_chunks.Head, "fill", spy)
    gen = torch.Generator().manual_seed(1)
    head = _head(gen, torch.bfloat16, rows)
    elements = 4 * max(rows, VOCAB)
    linear.linear_row_grad(*head, *_coefficients(gen, head), (True,) * 3, False, 2 * elements, "")
    assert len(places) == 1
    assert len(sizes) > 2
    assert max(sizes) <= elements
    assert sum(sizes) == rows * VOCAB


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("columns", [0, 1])
def test_few_rows(gen: torch.Generator, rows: int, columns: int) -> None:
    head = _head(gen, torch.float32, rows)
    index = _index(gen, rows, columns)
    stats, picked = linear.linear_row_stats(*head, [], [], [], [], index, 4, "")
    assert stats.shape == (0, 4, rows, 1)
    assert picked.shape == (rows, columns)
    coefficients = _coefficients(gen, head, terms=0)
    got = linear.linear_row_grad(*head, *coefficients, (True,) * 3, False, 4, "")
    want = linear_reference.linear_row_grad(*head, *coefficients, (True,) * 3, False)
    for mine, eager in zip(got, want, strict=True):
        torch.testing.assert_close(mine, eager)


def test_weights_of_any_strides(gen: torch.Generator) -> None:
    hidden, weight, bias = _head(gen, torch.float32)
    index = _index(gen)
    layouts = (weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :HIDDEN])
    want = linear_reference.linear_row_stats(hidden, weight, bias, *ONE_SCALE, index)
    for layout in layouts:
        got = linear.linear_row_stats(hidden, layout, bias, *ONE_SCALE, index, 4 * FEW, "")
        for mine, eager in zip(got, want, strict=True):
            torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(gen: torch.Generator, with_bias: bool) -> None:
    head = _head(gen, torch.float32, with_bias=with_bias)
    two = ([torch.rand(ROWS, 1), None], [1.0, 2.0], [True, True], [True, True])
    for what in (ONE_SCALE, two, ([], [], [], [])):
        args = (*head, *what, _index(gen), 4 * FEW, "region")
        opcheck(linear.linear_row_stats, args)
    for wanted in WANTED:
        args = (*head, *_coefficients(gen, head), wanted, wanted[0], 4 * FEW, "region")
        opcheck(linear.linear_row_grad, args)


def test_outputs_have_no_derivative(gen: torch.Generator) -> None:
    hidden, weight, bias = (t.requires_grad_() for t in _head(gen, torch.float32) if t is not None)
    stats, picked = linear.linear_row_stats(hidden, weight, bias, *ONE_SCALE, _index(gen), 0, "")
    assert not stats.requires_grad
    assert not picked.requires_grad


# ---- bad input ----------------------------------------------------------------------------------------------------


def _stats_of(hidden: Tensor, weight: Tensor, index: Tensor) -> None:
    linear.linear_row_stats(hidden, weight, None, *ONE_SCALE, index, 0, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, i: (h[0], w, i), r"`hidden` must have shape \[N, D\], got \[5\]"),
        (lambda h, w, i: (h, w[:, 1:], i), r"`weight` must have shape \[V, 5\], got \[37, 4\]"),
        (lambda h, w, i: (h, w[:0], i), "has the weight not been gathered yet"),
        (lambda h, w, i: (h, w.double(), i), "`weight` must have the dtype of `hidden`"),
        (lambda h, w, i: (h, w.to("meta"), i), "`weight` must have the device of `hidden`"),
        (lambda h, w, i: (h, w, i[1:]), r"`index` must have shape \[13, M\], got \[12, 2\]"),
        (lambda h, w, i: (h, w, i.int()), "`index` must have dtype torch.int64"),
    ],
)
def test_refuses(gen: torch.Generator, change: object, message: str) -> None:
    hidden, weight, _ = _head(gen, torch.float32)
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        _stats_of(*change(hidden, weight, _index(gen)))  # type: ignore[operator]


def test_a_weight_whose_memory_was_freed_is_named(gen: torch.Generator) -> None:
    hidden, weight, _ = _head(gen, torch.float32)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"`weight` must have memory.*reshard_after_forward"):
        _stats_of(hidden, weight, _index(gen))


def test_fake_weights_have_no_memory_to_ask_for() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(6, 4), torch.empty(9, 4)
        index = torch.empty(6, 1, dtype=torch.int64)
        stats, picked = linear.linear_row_stats(hidden, weight, None, *ONE_SCALE, index, 0, "")
    assert stats.shape == (1, 4, 6, 1)
    assert picked.shape == (6, 1)
