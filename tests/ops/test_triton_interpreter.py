"""The Triton kernels under Triton's interpreter, against `reference.py` in float64.

Triton decides when it is imported whether it interprets, so the kernels run in a child process with TRITON_INTERPRET=1
(this very file run as a script); nothing here changes the tests' own process. Small sizes, every branch.
"""

import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor

from slime_compile.ops import reference

pytest.importorskip("triton")


INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_DTYPE = [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.thorough)]
# 1..9: only single elements, or one group; 127..129, 1023, 1025: lanes; 2048 is a tile of fp32, 4096 of halves
VOCABS = [1, 2, 3, 5, 8, 9, 127, 128, 129, 1023, 1025, 2048, 4097, 6151]
SIZES = [
    *itertools.product(VOCABS, DTYPES[:2]),
    (1, DTYPES[2]),
    (129, DTYPES[2]),
    (4097, DTYPES[2]),
]
# (K, M): nothing, one-hot alone, terms alone, log-prob, log-prob + entropy of two temperatures, more of all
COUNTS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (3, 1)]


# ---- the child ----------------------------------------------------------------------------------------------------


def far_rows(dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Results near and far: rows 2^31 + 7 elements apart, virtual memory of which only the rows are touched."""
    from slime_compile.ops import cuda

    torch.manual_seed(0)
    step, vocab = 2**31 + 7, 300
    near = torch.randn(3, vocab).to(dtype)
    far = torch.empty(2 * step + vocab, dtype=dtype).as_strided((3, vocab), (step, 1))
    far.copy_(near)
    terms, affine, index, weight = coefficients((3,), 1, 1, vocab)
    results = []
    for x in near, far:
        stats = cuda.row_stats(x, None, 1.0)
        out = cuda.row_grad(x, terms, affine, index, weight, False, dtype)
        cuda.row_grad_(x, terms, affine, index, weight, False)
        results.append((*stats, out, x.contiguous()))
    return results


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers (name, settings, arguments) with (result, arguments afterwards) or the exception."""
    from slime_compile.ops import cuda
    from tests.support.interpreted import patch_once_a_launch

    patch_once_a_launch()
    defaults = {name: value for name, value in vars(cuda).items() if name.isupper()}
    while True:
        try:
            name, settings, arguments = pickle.load(requests)
        except EOFError:
            return
        vars(cuda).update(defaults | settings)
        try:
            call = far_rows if name == "far_rows" else getattr(cuda, name)
            answer: object = (call(*arguments), arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


class Interpreter:
    """Calls a function of `slime_compile.ops.cuda` in the child."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def __call__(self, name: str, *arguments: Any, **settings: int) -> Any:
        return self.with_arguments(name, *arguments, **settings)[0]

    def with_arguments(self, name: str, *arguments: Any, **settings: int) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        pickle.dump((name, settings, arguments), self.process.stdin)
        self.process.stdin.flush()
        answer = pickle.load(self.process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpreter]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield Interpreter(process)


# ---- samples and oracle -------------------------------------------------------------------------------------------


def coefficients(
    rows: tuple[int, ...], terms: int, hots: int, vocab: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random terms [..., K, 5], affine [..., 3], index [..., M], weight [..., M]; a third of the rows has f = 0."""
    packed = torch.randn(*rows, terms, 5)
    packed[..., 0] /= 4  # scale, center, shift: no exponential far above 1
    packed[..., 1:3] = packed[..., 1:3].abs() + 3
    affine = torch.randn(*rows, 3)
    affine.view(-1, 3)[::3, 0] = 0
    index = torch.randint(-1, vocab + 1, (*rows, hots))
    return packed, affine, index, torch.randn(*rows, hots)


def check(actual: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Same pattern of NaN and infinity as the truth, and no worse than plain torch plus one rounding."""
    assert actual.shape == truth.shape
    assert actual.dtype == plain.dtype
    expected = truth.to(actual.dtype)
    finite = expected.isfinite()
    torch.testing.assert_close(actual[~finite], expected[~finite], equal_nan=True, rtol=0, atol=0)
    if finite.any():
        truth, right, ours = truth[finite], plain[finite].double(), actual[finite].double()
        band = torch.finfo(actual.dtype).eps * 2 * truth.abs()
        scale = 1e-7 * (1 + truth.abs().max())
        worst = torch.where(right.isfinite(), (right - truth).abs(), 0.0).max()
        excess = (ours - truth).abs() - (2 * worst + band + scale)
        assert excess.max() <= 0, f"error {(ours - truth).abs().max()}, plain torch {worst}"


def check_stats(
    interpret: Interpreter,
    x: Tensor,
    scale: Tensor | None = None,
    factor: float = 1.0,
    wanted: Iterable[tuple[bool, bool]] = ((True, True), (False, False)),
    **settings: int,
) -> None:
    """`wanted`: which of mean and total are asked for; the others must be NaN."""
    plain = reference.row_stats(x, scale, factor)
    truth = reference.row_stats(x.double(), None if scale is None else scale.double(), factor)
    for mean, total in wanted:
        actual = interpret("row_stats", x, scale, factor, mean, total, **settings)
        unread = {2: not mean, 3: not total}
        for at in range(4):
            if unread.get(at):
                assert actual[at].isnan().all()
        kept = [at for at in range(4) if not unread.get(at)]
        _check_stats(
            [actual[at] for at in kept],
            [plain[at] for at in kept],
            [truth[at] for at in kept],
        )


def _check_stats(actual: list[Tensor], plain: list[Tensor], truth: list[Tensor]) -> None:
    bad = truth[1].isnan()
    assert not actual[0][bad].isfinite().any()
    check(actual[0][~bad], plain[0][~bad], truth[0][~bad])
    for of_row in zip(actual[1:], plain[1:], truth[1:], strict=True):
        check(*of_row)


def check_grad(
    interpret: Interpreter,
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool = False,
    dtype: torch.dtype | None = None,
    **settings: int,
) -> Tensor:
    dtype = dtype or x.dtype
    packed = terms, affine, index, weight
    actual = interpret("row_grad", x, *packed, softmax, dtype, **settings)
    assert actual.is_contiguous()
    wide = terms.double(), affine.double(), index, weight.double()
    truth = reference.row_grad(x.double(), *wide, softmax, torch.float64)
    check(actual, reference.row_grad(x, *packed, softmax, dtype), truth)
    return actual


def layouts(dtype: torch.dtype) -> dict[str, Tensor]:
    """[..., V] in every kind of memory layout."""
    torch.manual_seed(1)

    def logits(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype) * 4

    return {
        "contiguous": logits(2, 3, 257),
        "row stride not V": logits(3, 300)[:, :257],
        "odd storage offset": logits(3, 300)[:, 5:262],
        "every second row": logits(6, 264)[::2],
        "shifted": logits(2, 3, 257)[:, :-1],
        "transposed leading": logits(3, 2, 257).transpose(0, 1),
        "three leading strides": logits(2, 2, 4, 130).permute(1, 2, 0, 3)[:, ::2],
        "vocabulary stride": logits(3, 514)[:, ::2],
        "vocabulary outermost": logits(257, 3).t(),
        "one row": logits(257),
    }


# ---- row_stats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "dtype"), SIZES)
def test_stats_of_any_vocabulary(interpret: Interpreter, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    x = (torch.randn(3, vocab) * 5).to(dtype)
    check_stats(interpret, x, torch.tensor([[1.0], [-0.7], [0.0]]), 1.3)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_stats_of_any_layout(interpret: Interpreter, layout: str, dtype: torch.dtype) -> None:
    check_stats(interpret, layouts(dtype)[layout])


def test_stats_of_an_expanded_row(interpret: Interpreter) -> None:
    check_stats(interpret, torch.randn(1, 300).expand(3, 300))


@pytest.mark.parametrize(
    "scale",
    [torch.tensor(0.5), torch.tensor([-2.0]), torch.rand(1, 1, 1), torch.rand(3, 1), torch.rand(2, 1, 1),
     torch.rand(2, 3, 1).bfloat16()],
    ids=lambda s: f"{list(s.shape)}",
)  # fmt: skip
def test_scale_is_broadcast(interpret: Interpreter, scale: Tensor) -> None:
    x = torch.randn(3, 2, 40).transpose(0, 1)
    check_stats(interpret, x, scale, -0.8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1000.0, -1000.0])
def test_common_offset_costs_no_digits(
    interpret: Interpreter, offset: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    x = (torch.randn(4, 2500) * 5 + offset).to(dtype)
    check_stats(interpret, x)
    check_stats(interpret, x, torch.tensor(1 / 0.7), 1.0)


def special_rows(vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows with special values at either end, inside, over whole tiles, everywhere."""
    torch.manual_seed(3)
    lowest = torch.finfo(dtype).min
    row, rows = (torch.randn(vocab) * 4).to(dtype), []
    places = [0, vocab // 2, vocab - 1]
    spans = [slice(0, vocab // 2), slice(vocab // 3, vocab // 2), slice(vocab // 2, None)]
    for value, place in itertools.product((-INF, INF, NAN, lowest), places):
        rows.append(row.clone())
        rows[-1][place] = value
    for value, span in itertools.product((-INF, lowest), [*spans, slice(1, None)]):
        rows.append(row.clone())
        rows[-1][span] = value
    for value in (-INF, lowest, INF, NAN, -20000.0):
        rows.append(torch.full_like(row, value))
    for other in (INF, NAN):
        rows.append(torch.full_like(row, -INF))
        rows[-1][vocab // 3] = other
    return torch.stack(rows)


# 70: most lanes empty; 4500: tiles that are wholly -inf, with and without parts
@pytest.mark.parametrize(
    ("vocab", "tiles", "dtype"),
    [
        (70, 4, torch.bfloat16),
        (4500, 4, torch.float32),
        pytest.param(4500, 1, torch.float32, marks=pytest.mark.thorough),
    ],
)
def test_stats_of_special_values(
    interpret: Interpreter, vocab: int, tiles: int, dtype: torch.dtype
) -> None:
    x = special_rows(vocab, dtype)
    every = itertools.product((True, False), repeat=2)
    check_stats(interpret, x[:: 1 if tiles > 1 else 2], wanted=every, PART_TILES_MIN=tiles)


def test_stats_of_special_values_with_negative_scale(interpret: Interpreter) -> None:
    check_stats(interpret, -special_rows(70, torch.float32)[::2], torch.tensor(-0.5), 1.0)


# 2048 fp32 are a tile: 2, 4 and 6 parts, of aligned and of other rows, the last one short
@pytest.mark.parametrize("vocab", [4096, 8193, 14001])
def test_rows_in_parts(interpret: Interpreter, vocab: int) -> None:
    torch.manual_seed(vocab)
    x = torch.randn(3, vocab + 8) * 5
    x = x[:, :vocab] if vocab % 2 == 0 else x[:, 3 : vocab + 3]
    x[0, : vocab // 2] = -INF
    x[1, vocab // 2 :] = -INF
    check_stats(interpret, x, torch.tensor([[0.5], [1.0], [-1.0]]), 1.0, PART_TILES_MIN=1)


@pytest.mark.parametrize("shape", [(0, 300), (2, 0, 300)])
def test_no_rows(interpret: Interpreter, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert [s.shape for s in interpret("row_stats", x, None, 1.0)] == [(*shape[:-1], 1)] * 4
    packed = coefficients(shape[:-1], 1, 1, 300)
    assert interpret("row_grad", x, *packed, False, torch.bfloat16).shape == shape
    interpret("row_grad_", x, *packed, False)


# ---- row_grad -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "dtype"), SIZES)
def test_grad_of_any_vocabulary(interpret: Interpreter, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    x = torch.randn(3, vocab).to(dtype)
    check_grad(interpret, x, *coefficients((3,), 1, 1, vocab))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
def test_grad_of_any_number_of_terms(
    interpret: Interpreter, counts: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    x = torch.randn(2, 3, 523).to(dtype)
    check_grad(interpret, x, *coefficients((2, 3), *counts, 523))


@pytest.mark.parametrize("out", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_of_any_dtype(interpret: Interpreter, dtype: torch.dtype, out: torch.dtype) -> None:
    torch.manual_seed(5)
    for vocab in 1031, 1032:  # not aligned together, aligned
        packed = coefficients((2,), 1, 1, vocab)
        check_grad(interpret, torch.randn(2, vocab).to(dtype), *packed, dtype=out)


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_in_place_is_bit_equal(interpret: Interpreter, layout: str, dtype: torch.dtype) -> None:
    x = layouts(dtype)[layout]
    packed = coefficients(tuple(x.shape[:-1]), 1, 2, x.shape[-1])
    out = check_grad(interpret, x, *packed)
    _, arguments = interpret.with_arguments("row_grad_", x, *packed, False)
    written = arguments[0]
    assert written.stride() == x.stride()
    torch.testing.assert_close(written, out, rtol=0, atol=0)

    def others(t: Tensor) -> Tensor:
        """What the storage of `t` holds beside `t`."""
        whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).clone()
        whole.as_strided(t.shape, t.stride(), t.storage_offset()).zero_()
        return whole

    torch.testing.assert_close(others(written), others(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_hots_at_every_column_and_alignment(interpret: Interpreter, dtype: torch.dtype) -> None:
    """Rows 65 elements apart, each aligned otherwise; a third of the columns each: both ends and the groups between."""
    vocab, rows = 21, 24
    x = torch.full((rows, 65), NAN, dtype=dtype)[:, :vocab]
    index = (torch.arange(rows)[:, None] // 8 + torch.arange(0, vocab, 3)) % vocab
    packed = torch.zeros(rows, 0, 5), torch.zeros(rows, 3), index, torch.ones(index.shape)
    _, arguments = interpret.with_arguments("row_grad_", x, *packed, False)
    assert torch.equal(arguments[0], torch.zeros(rows, vocab, dtype=dtype).scatter(1, index, 1))


@pytest.mark.parametrize("tiles", [1, 8])
def test_one_hots_between_tiles_and_outside(interpret: Interpreter, tiles: int) -> None:
    """2048 fp32 are a tile, in a program of its own and not; the same column twice adds up."""
    index = torch.tensor([[2047, 2048, 4500, -1], [5, 5, 2**40, 2**32 + 7], [0, 4499, 4095, 4096]])
    packed = torch.zeros(3, 0, 5), torch.zeros(3, 3), index, torch.rand(3, 4) + 1
    x = torch.randn(3, 4500)
    settings = {"ASSUMED_SMS": 132 if tiles == 1 else 0}
    check_grad(interpret, x, *packed, **settings)


def test_rows_of_zero_coefficients_are_not_read(interpret: Interpreter) -> None:
    """NaN in x and in the other coefficients would show."""
    vocab = 4500
    x = torch.randn(3, vocab)
    terms, affine, index, weight = coefficients((3,), 2, 2, vocab)
    for row in 0, 2:
        x[row] = NAN
        terms[row, :, :3] = NAN
        affine[row, 1] = NAN
        terms[row, :, 3:] = affine[row, ::2] = weight[row] = 0
    out = check_grad(interpret, x, terms, affine, index, weight)
    assert (out[::2] == 0).all()
    assert (out[1] != 0).any()


def test_affine_part_looks_at_x_only_where_f_is_not_zero(interpret: Interpreter) -> None:
    x = torch.randn(4, 300)
    x[:, ::7], x[:, 1], x[:, 2] = -INF, INF, NAN
    _, _, index, weight = coefficients((4,), 0, 1, 300)
    affine = torch.tensor([[0.0, 1.0, 2.0], [0.0, NAN, 2.0], [3.0, 1.0, 2.0], [NAN, 0.0, 0.0]])
    check_grad(interpret, x, torch.zeros(4, 0, 5), affine, index, weight)
    finite = torch.randn(4, 300)
    finite[:, ::7] = -INF
    check_grad(interpret, finite, *coefficients((4,), 1, 0, 300)[:1], affine, index, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_of_special_values(interpret: Interpreter, dtype: torch.dtype) -> None:
    """The gradient of -log p and of the entropy at rows that hold infinities and NaN."""
    x = special_rows(301, dtype)
    top, log_sum, mean, _ = reference.row_stats(x.double(), None, 1.0)
    one = torch.ones_like(top)
    scale_center_shift = torch.cat((one, top, log_sum), -1)
    a_b = torch.cat((0.3 * one + (mean - log_sum) * 0.1, 0.1 * one), -1)
    terms = torch.cat((scale_center_shift, a_b), -1).float()[:, None]
    index = torch.full((len(x), 1), 17)
    check_grad(interpret, x, terms, torch.zeros(len(x), 3), index, torch.full((len(x), 1), -0.3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_of_saved_probabilities(interpret: Interpreter, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    x = (torch.randn(3, 1031) * 4).softmax(-1)
    x[:, ::5] = 0
    x[2, 3] = NAN
    terms, _, index, weight = coefficients((3,), 1, 1, 1031)
    check_grad(interpret, x.to(dtype), terms, torch.zeros(3, 3), index, weight, True)


def test_expanded_memory_is_not_written(interpret: Interpreter) -> None:
    x = torch.randn(1, 300).expand(3, 300)
    with pytest.raises(RuntimeError, match=r"`x` must not be expanded, .* got shape \[3, 300\]"):
        interpret("row_grad_", x, *coefficients((3,), 1, 1, 300), False)


def test_row_offsets_have_64_bits(interpret: Interpreter) -> None:
    near, far = interpret("far_rows", torch.bfloat16)
    for a, b in zip(near, far, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


if __name__ == "__main__":
    with open(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what is printed goes to stderr
        serve(sys.stdin.buffer, pipe)
