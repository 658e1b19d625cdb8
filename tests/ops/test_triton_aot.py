"""Every kernel specialisation the launchers choose, compiled ahead of time for sm_90 and sm_80, without a GPU.

What the launchers would launch is recorded, then compiled; registers and spills are read from the assembler's report.
"""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slime_compile.ops import cuda, linear_chunks, triton_kernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
POINTER = {FP32: "*fp32", BF16: "*bf16", FP16: "*fp16", torch.int64: "*i64"}
VOCAB = 4096


class Launch(NamedTuple):
    """One launch as Triton would specialise it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]

    @property
    def key(self) -> str:
        return f"{self.kernel.__name__} {self.signature} {self.constants}"


class Recorder:
    """Stands in for a kernel and notes its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(0 < size < 2**31 for size in grid)
        return self.launch

    def launch(self, *arguments: Any, **named: Any) -> None:
        options = {k: named.pop(k) for k in cuda.OPTIONS}
        arguments = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
        signature, constants = {}, {}
        for parameter in self.kernel.params:
            value = arguments.pop(parameter.name)
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name] = POINTER[value.dtype]
            else:
                signature[parameter.name] = parameter.annotation_type
                assert parameter.annotation_type, f"{parameter.name} is typed by its value"
        assert not arguments
        self.launches.append(Launch(self.kernel, signature, constants, options))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    for name in "row_stats_kernel", "merge_parts_kernel", "row_grad_kernel":
        monkeypatch.setattr(triton_kernels, name, Recorder(getattr(triton_kernels, name), found))
    return found


def grad_arguments(rows: int, terms: int, hots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = torch.zeros(rows, hots, dtype=torch.int64)
    return torch.zeros(rows, terms, 5), torch.zeros(rows, 3), index, torch.zeros(rows, hots)


class Report(NamedTuple):
    registers: int
    stack_bytes: int  # spilled registers, and arrays that could not be kept in registers
    ptx: str


def compiled(launch: Launch, capability: int, tmp_path: Path) -> Report:
    """Compiles for `capability`; the report is that of the assembler, in the binary."""
    source = ASTSource(launch.kernel, launch.signature, constexprs=launch.constants)
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options=launch.options)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    return Report(int(registers), int(stack) + int(local), kernel.asm["ptx"])


# ---- what is compiled ---------------------------------------------------------------------------------------------

# With 72 registers 7 programs of 128 threads are resident on a multiprocessor, with 64 there are 8.
REGISTERS = 72
# The assembler of Triton 3.8 and later takes 95 for bf16 on sm_80, 5 programs; held to 72 it would spill 64 bytes.
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
REGISTERS_LATER_ON_80 = 96 if TRITON >= (3, 8) else REGISTERS
DTYPES = [FP32, BF16, FP16]
# dtype, out dtype, K, M, softmax
GRADS = [
    (FP32, FP32, 1, 1, False),
    (BF16, BF16, 1, 1, False),
    (BF16, BF16, 2, 2, False),
    (FP16, FP16, 1, 1, False),
    (BF16, FP32, 1, 1, False),
    (FP32, BF16, 1, 1, False),
    (FP32, FP32, 2, 2, False),
    (BF16, BF16, 0, 1, False),
    (BF16, BF16, 1, 0, False),
    (FP32, FP32, 1, 1, True),
    (BF16, BF16, 1, 1, True),
]
CAPABILITIES = [90, 80]


def check(report: Report, capability: int) -> None:
    assert report.stack_bytes == 0
    assert report.registers <= (REGISTERS_LATER_ON_80 if capability == 80 else REGISTERS)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_stats(
    launches: list[Launch],
    tmp_path: Path,
    dtype: torch.dtype,
    capability: int,
    wanted: tuple[bool, bool],
) -> None:
    cuda.row_stats(torch.zeros(3, VOCAB, dtype=dtype), None, 1.0, *wanted)
    (launch,) = launches
    report = compiled(launch, capability, tmp_path)
    check(report, capability)
    assert "ld.global.v4.b32" in report.ptx
    # the threads of a warp meet only to merge: 5 steps for the maximum and each of 4 sums, again over the warps
    assert report.ptx.count("shfl.sync") <= 2 * 5 * 5
    # per thread: one per element in the loop and in the last tile, one per tile, one to merge the threads
    elements = launch.constants["DEPTH"] * launch.constants["VEC"]
    assert report.ptx.count("ex2.approx.ftz") == 2 * (elements + 1) + 1


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_row_stats_with_a_vocabulary_stride(
    launches: list[Launch], tmp_path: Path, dtype: torch.dtype
) -> None:
    cuda.row_stats(torch.zeros(3, VOCAB, 2, dtype=dtype)[..., 0], None, 1.0)
    check(compiled(launches[0], 90, tmp_path), 90)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_merge_parts(launches: list[Launch], tmp_path: Path, capability: int) -> None:
    cuda.row_stats(torch.zeros(3, 100_000), None, 1.0)
    assert [launch.kernel.__name__ for launch in launches] == [
        "row_stats_kernel",
        "merge_parts_kernel",
    ]
    check(compiled(launches[1], capability, tmp_path), capability)


@pytest.mark.parametrize(
    ("dtype", "out", "terms", "hots", "softmax", "capability"),
    [(*grad, 90) for grad in GRADS] + [(*grad, 80) for grad in GRADS[:3]],
)
def test_row_grad(
    launches: list[Launch],
    tmp_path: Path,
    dtype: torch.dtype,
    out: torch.dtype,
    terms: int,
    hots: int,
    softmax: bool,
    capability: int,
) -> None:
    x = torch.zeros(3, VOCAB, dtype=dtype)
    cuda.row_grad(x, *grad_arguments(3, terms, hots), softmax, out)
    (launch,) = launches
    report = compiled(launch, capability, tmp_path)
    check(report, capability)
    assert "ld.global.v4.b32" in report.ptx
    assert "st.global.v4.b32" in report.ptx


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_row_grad_of_rows_aligned_otherwise_than_x(
    launches: list[Launch], tmp_path: Path, dtype: torch.dtype
) -> None:
    cuda.row_grad(
        torch.zeros(3, 1001, dtype=dtype)[:, :1000], *grad_arguments(3, 1, 1), False, dtype
    )
    check(compiled(launches[0], 90, tmp_path), 90)


def test_in_place_runs_the_kernel_of_out_of_place(launches: list[Launch]) -> None:
    x, packed = torch.zeros(3, 1001, dtype=BF16), grad_arguments(3, 1, 1)
    cuda.row_grad(x, *packed, False, x.dtype)
    cuda.row_grad_(x, *packed, False)
    assert launches[0].key == launches[1].key


def test_one_compile_per_dtype(launches: list[Launch]) -> None:
    """Neither N, V, strides, scale nor alignment starts another compile; only a vocabulary stride does."""
    for name in "row_stats_kernel", "merge_parts_kernel", "row_grad_kernel":
        kernel = getattr(triton_kernels, name).kernel
        assert all(p.is_constexpr or p.do_not_specialize for p in kernel.params)
    for rows, vocab in (1, 5), (7, 32000), (16, 50257), (1, 151936), (3, 248320):
        x = torch.empty(rows, vocab + 3, dtype=BF16)
        for scale, view in (None, x[:, :vocab]), (torch.ones(rows, 1), x[:, 3:]):
            cuda.row_stats(view, scale, 0.5)
            cuda.row_grad_(view, *grad_arguments(rows, 1, 1), False)
    assert len({launch.key for launch in launches}) == 3


def test_no_copy_and_few_launches(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch up to two leading strides, then one per outer index; never memory of [N, V]."""
    monkeypatch.setattr(Tensor, "contiguous", None)
    monkeypatch.setattr(Tensor, "clone", None)
    for shape, order, wanted in (
        ((6, 8), (0, 1), 1),
        ((2, 3, 8), (0, 1, 2), 1),
        ((2, 3, 8), (1, 0, 2), 1),
        ((2, 3, 4, 8), (2, 0, 1, 3), 1),  # 2 and 3 are still one
        ((2, 3, 4, 8), (2, 1, 0, 3), 4),
    ):
        launches.clear()
        cuda.row_stats(torch.zeros(shape).permute(order), None, 1.0)
        assert len(launches) == wanted


# The largest logits of the users, 2^33.9 elements: memory that a meta tensor does not have.
ROWS_MAX, VOCAB_OF_ROWS_MAX = 205_280, 76_032


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_launches_wait_for_nothing_and_count_in_64_bits(
    launches: list[Launch], dtype: torch.dtype
) -> None:
    """A meta tensor has no values: whatever asks for one, as a wait for the device would, raises."""
    rows, vocab = ROWS_MAX, VOCAB_OF_ROWS_MAX
    x = torch.empty(rows, vocab, dtype=dtype, device="meta")
    packed = [t.to("meta") for t in grad_arguments(1, 1, 1)]
    terms, affine, index, weight = (t.expand(rows, *t.shape[1:]) for t in packed)
    scale = torch.empty(rows, 1, device="meta")
    assert [s.shape for s in cuda.row_stats(x, scale, 0.5)] == [(rows, 1)] * 4
    assert cuda.row_grad(x, terms, affine, index, weight, False, dtype).shape == x.shape
    cuda.row_grad_(x, terms, affine, index, weight, False)
    cuda.row_stats(x[:8], None, 1.0)  # in parts
    for launch in launches:
        assert all(
            kind == "i64"
            for name, kind in launch.signature.items()
            if name == "rows" or name.endswith("stride")
        )
    assert len(launches) == 5


@pytest.mark.parametrize("name", ["row_stats_kernel", "merge_parts_kernel", "row_grad_kernel"])
def test_kernels_are_short(name: str) -> None:
    source = inspect.getsource(getattr(triton_kernels, name).fn)
    assert len(source.splitlines()) <= 70


def test_the_package_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, slime_compile, slime_compile.ops as ops\n"
        "ops.row_stats(torch.randn(2, 5), None, 1.0, '')\n"
        "assert 'slime_compile.ops.cuda' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---- chunks of logits ---------------------------------------------------------------------------------------------


def test_chunks_of_logits(launches: list[Launch], tmp_path: Path) -> None:
    """Every chunk, the ragged last one too, launches the same code, over rows of one buffer."""
    rows, size = 10, 3  # 4 chunks
    hidden, weight = torch.zeros(rows, 8, dtype=BF16), torch.zeros(VOCAB, 8, dtype=BF16)
    head = linear_chunks.Head(hidden, weight, None)
    limit = size * VOCAB * BF16.itemsize
    statistics = linear_chunks.Statistics([None], [1.0], [True], [False])
    index = torch.zeros(rows, 1, dtype=torch.int64)
    linear_chunks.linear_row_stats(cuda, head, statistics, index, limit)
    of_stats = launches.copy()
    assert len(of_stats) == 4
    assert len({launch.key for launch in of_stats}) == 1
    launches.clear()
    coefficients = grad_arguments(rows, 1, 1)
    # no gradient of hidden: rows are cut, as in forward
    linear_chunks.linear_row_grad(cuda, head, coefficients, (True, False, False), False, limit)
    assert len(launches) == 4
    assert len({launch.key for launch in launches}) == 1
    for launch in (of_stats[0], launches[0]):
        check(compiled(launch, 90, tmp_path), 90)
