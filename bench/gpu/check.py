"""Checks the CUDA row operators on this machine's GPU, then measures their bandwidth.

    python bench/gpu/check.py [--no-large] [--no-speed] [--strict]
    compute-sanitizer --error-exitcode 1 python bench/gpu/check.py --small      memcheck; --tool racecheck, initcheck

Correctness: against `reference.py` in float64 on the device, small sizes of every kind, then more than 2^31 and 2^33
elements where memory allows; no host synchronisation, CUDA graphs. Speed: medians of CUDA events, next to a copy and a
plain reduction in the same run. Needs torch, triton, tabulate and this checkout.

Exit code: 0 all right, 1 a check failed (with --strict also: below 92 % of the copy or the reduction), 2 no CUDA device
or a package missing.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

try:
    import tabulate
    import torch
    import triton
    from torch import Tensor

    from slime_compile.ops import reference, row_grad, row_grad_, row_stats
except ImportError as error:
    print(f"gpu_check needs torch, triton, tabulate and slime_compile: {error}")
    sys.exit(2)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# each size has its reason: one group, lanes, odd, the models' vocabularies
VOCABS = [1, 5, 129, 1025, 4097, 32000, 50257, 76032, 128256, 151936, 248320]
COUNTS = [(0, 1), (1, 0), (1, 1), (2, 2)]
SHAPES = [
    (9216, 76032, torch.float32),
    (9216, 76032, torch.bfloat16),
    (4096, 151936, torch.float32),
    (8192, 151936, torch.bfloat16),
]
SMALL_VOCAB = 4097
WANTED_SHARE = 0.92

failures: list[str] = []


# ---- correctness --------------------------------------------------------------------------------------------------


def compare(name: str, actual: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Same NaN and infinities as the truth, and no worse than plain torch in the same dtype plus one rounding."""
    expected = truth.to(actual.dtype)
    finite = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if not (finite | same).all():
        failures.append(
            f"{name}: other NaN or infinities in {int((~(finite | same)).sum())} places"
        )
    actual, plain, truth = actual[finite].double(), plain[finite].double(), truth[finite]
    if not actual.numel():
        return
    worst = torch.where(plain.isfinite(), (plain - truth).abs(), 0.0).max()
    band = torch.finfo(expected.dtype).eps * 2 * truth.abs() + 1e-7 * (1 + truth.abs().max())
    excess = ((actual - truth).abs() - 2 * worst - band).max().item()
    if not excess <= 0:
        failures.append(f"{name}: error {excess:.2e} above the budget (plain torch {worst:.2e})")


def check_stats(name: str, x: Tensor, scale: Tensor | None = None, factor: float = 1.0) -> None:
    wide = None if scale is None else scale.double()
    truth = reference.row_stats(x.double(), wide, factor)
    plain = reference.row_stats(x, scale, factor)
    actual = row_stats(x, scale, factor, "")
    usual = ~(truth[0].isnan() | (truth[0] == torch.inf))  # the maximum of other rows may be either
    for label, a, p, t in zip(
        ("max", "log_sum", "mean", "total"), actual, plain, truth, strict=True
    ):
        rows = usual if label == "max" else torch.ones_like(usual)
        compare(f"row_stats {name} {label}", a[rows], p[rows], t[rows])


def coefficients(rows: tuple[int, ...], terms: int, hots: int, vocab: int) -> list[Tensor]:
    packed = torch.randn(*rows, terms, 5, device="cuda")
    packed[..., 0] /= 4
    packed[..., 1:3] = packed[..., 1:3].abs() + 3
    affine = torch.randn(*rows, 3, device="cuda")
    affine.view(-1, 3)[::3, 0] = 0
    index = torch.randint(-1, vocab + 1, (*rows, hots), device="cuda")
    weight = torch.randn(*rows, hots, device="cuda")
    for t in packed, affine, weight:
        t.view(prod(rows), *t.shape[len(rows) :])[1::4] = 0  # rows of zeros
    return [packed, affine, index, weight]


def check_grad(name: str, x: Tensor, terms: int, hots: int, softmax: bool = False) -> None:
    packed = coefficients(tuple(x.shape[:-1]), terms, hots, x.shape[-1])
    t, affine, index, weight = packed
    truth = reference.row_grad(
        x.double(), t.double(), affine.double(), index, weight.double(), softmax, torch.float64
    )
    actual = row_grad(x, *packed, softmax, x.dtype, "")
    compare(f"row_grad {name}", actual, reference.row_grad(x, *packed, softmax, x.dtype), truth)
    whole = torch.empty(0, dtype=x.dtype, device="cuda").set_(x.untyped_storage()).clone()
    written = whole.as_strided(x.shape, x.stride(), x.storage_offset())
    row_grad_(written, *packed, softmax, "")
    same = (written == actual) | (written.isnan() & actual.isnan())
    if not same.all():
        failures.append(
            f"row_grad_ {name}: not bit-equal to row_grad in {int((~same).sum())} places"
        )


def special_rows(vocab: int, dtype: torch.dtype) -> Tensor:
    row, rows = (torch.randn(vocab, device="cuda") * 4).to(dtype), []
    lowest = torch.finfo(dtype).min
    spans = [slice(0, 1), slice(-1, None), slice(0, vocab // 2), slice(vocab // 2, None)]
    for value, span in itertools.product(
        (-torch.inf, torch.inf, torch.nan, lowest), [*spans, slice(None), slice(1, None)]
    ):
        rows.append(row.clone())
        rows[-1][span] = value
    return torch.stack(rows)


def check_small(vocab_max: int) -> None:
    vocabs = [vocab for vocab in VOCABS if vocab <= vocab_max]
    for dtype, vocab in itertools.product(DTYPES, vocabs):
        name = f"{str(dtype)[6:]} V={vocab}"
        logits = torch.randn(7, vocab + 5, device="cuda").mul_(4).to(dtype)
        for label, x in (
            ("contiguous", logits[:, :vocab].contiguous()),
            ("row stride", logits[:, :vocab]),
            ("odd offset", logits[:, 5:]),
            ("shifted", logits[:, :vocab].reshape(1, 7, vocab)[:, :-1]),
        ):
            check_stats(f"{name} {label}", x)
            check_grad(f"{name} {label}", x, 1, 1)
        scale = torch.randn(7, 1, device="cuda")
        scale[0] = 0
        check_stats(f"{name} scaled", logits, scale, 1.25)
        check_stats(f"{name} special", special_rows(vocab, dtype))
        check_grad(f"{name} probabilities", logits.softmax(-1), 1, 1, softmax=True)
    for dtype, (terms, hots) in itertools.product(DTYPES, COUNTS):
        check_grad(
            f"{dtype} K={terms} M={hots}",
            torch.randn(5, 2, 3001, device="cuda").to(dtype),
            terms,
            hots,
        )
    x = torch.randn(2, 3, 4, 1001, device="cuda")
    for label, view in (("permuted", x.permute(2, 1, 0, 3)), ("vocabulary stride", x[..., ::2])):
        check_stats(label, view)
        check_grad(label, view, 1, 1)
    for rows in 1, 2:  # in parts
        check_stats(f"{rows} rows", torch.randn(rows, 33001, device="cuda").bfloat16())


def check_many_rows() -> None:
    """In many parts, in few, whole."""
    for rows in 100, 3000, 9000:
        check_stats(f"{rows} rows", torch.randn(rows, 33001, device="cuda").bfloat16())


def check_large(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """First and last rows of more than 2^31 elements."""
    need = 2.2 * rows * vocab * torch.empty(0, dtype=dtype).element_size()
    name = f"{rows} x {vocab} {str(dtype)[6:]}"
    if torch.cuda.mem_get_info()[0] < need:
        print(f"  {name}: skipped, needs {need / 2**30:.0f} GiB")
        return
    x = torch.empty(rows, vocab, dtype=dtype, device="cuda").normal_()
    packed = coefficients((rows,), 1, 1, vocab)
    packed[1][:, 0] = 0  # f
    stats = row_stats(x, None, 1.0, "")
    out = row_grad(x, *packed, False, dtype, "")
    for part in slice(0, 16), slice(rows // 2, rows // 2 + 16), slice(rows - 16, rows):
        some, few = x[part], [p[part] for p in packed]
        wide = [p if p.dtype == torch.int64 else p.double() for p in few]
        truth = reference.row_stats(some.double(), None, 1.0)
        for a, p, t in zip(stats, reference.row_stats(some, None, 1.0), truth, strict=True):
            compare(f"row_stats {name}", a[part], p, t)
        right = reference.row_grad(some.double(), *wide, False, torch.float64)
        compare(f"row_grad {name}", out[part], reference.row_grad(some, *few, False, dtype), right)
    row_grad_(x, *packed, False, "")
    if not all(torch.equal(a, b) for a, b in zip(x.split(1024), out.split(1024), strict=True)):
        failures.append(f"row_grad_ {name}: not bit-equal")


def check_capture() -> None:
    """No host synchronisation, and a CUDA graph gives the same bits on other data."""
    x = torch.randn(64, 32001, device="cuda")
    packed = coefficients((64,), 1, 1, 32001)

    def step() -> list[Tensor]:
        return [*row_stats(x, None, 1.0, ""), row_grad(x, *packed, False, x.dtype, "")]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        failures.append(f"the operators wait for the device: {error}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.normal_()
    graph.replay()
    if not all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True)):
        failures.append("a CUDA graph gives other values")


# ---- speed --------------------------------------------------------------------------------------------------------


def time_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Median of single calls; every tensor is many times the L2 cache."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def measure(rows: int, vocab: int, dtype: torch.dtype) -> list[list[object]]:
    """Rows of the table; the share is of the reduction for reads, of the copy for reads and writes."""
    x = torch.empty(rows, vocab, dtype=dtype, device="cuda").normal_()
    top, log_sum, _, _ = row_stats(x, None, 1.0, "")
    one = torch.ones_like(top)
    terms = torch.cat((one, top, log_sum, one * 0.1, one * 0), -1)[:, None]
    affine = torch.zeros(rows, 3, device="cuda")
    index = torch.randint(0, vocab, (rows, 1), device="cuda")
    packed = terms, affine, index, torch.ones(rows, 1, device="cuda")
    read = x.numel() * x.element_size()
    copy = time_ms(partial(torch.empty_like(x).copy_, x))
    reduction = min(time_ms(lambda: x.sum(-1, dtype=torch.float32)), time_ms(lambda: x.amax(-1)))
    results = [
        ("copy", 2 * read, copy, copy),
        ("reduction", read, reduction, reduction),
        ("row_stats", read, time_ms(lambda: row_stats(x, None, 1.0, "")), reduction),
        ("row_grad", 2 * read, time_ms(lambda: row_grad(x, *packed, False, dtype, "")), copy),
        ("row_grad_", 2 * read, time_ms(lambda: row_grad_(x, *packed, False, "")), copy),
    ]
    return [
        [f"{rows} x {vocab}", str(dtype)[6:], name, ms, moved / ms * 1e-6, floor / ms]
        for name, moved, ms, floor in results
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-large", action="store_true", help="skip more than 2^31 elements")
    parser.add_argument("--no-speed", action="store_true", help="correctness only")
    parser.add_argument("--strict", action="store_true", help="fail below 92 %% of the limit")
    parser.add_argument("--small", action="store_true", help="only sizes for compute-sanitizer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device; torch finds none here. Nothing was checked.")
        return 2
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    check_small(SMALL_VOCAB if options.small else max(VOCABS))
    if not options.small:
        check_many_rows()
        check_capture()
    if not (options.no_large or options.small):
        check_large(16384, 152064, torch.bfloat16)  # 2^31.2 elements
        check_large(70000, 128256, torch.bfloat16)  # 2^33.1 elements
        check_large(9216, 250001, torch.float32)  # 2^31.1 elements, odd rows
    for failure in failures[:40]:
        print("FAILED", failure)
    print(f"correctness: {len(failures)} failures")
    table: list[list[object]] = []
    if not (options.no_speed or options.small):
        for shape in SHAPES:
            torch.cuda.empty_cache()
            table += measure(*shape)
        print(tabulate.tabulate(
            table, ["N x V", "dtype", "what", "ms", "GB/s", "share of limit"], floatfmt=("", "", "", ".3f", ".0f", ".3f")
        ))  # fmt: skip
    slow = [row for row in table if float(str(row[-1])) < WANTED_SHARE]
    if slow:
        print(f"{len(slow)} lines are below {WANTED_SHARE:.0%} of their limit")
    return 1 if failures or (options.strict and slow) else 0


if __name__ == "__main__":
    sys.exit(main())
