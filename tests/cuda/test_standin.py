"""The stand-in's own: what it counts, forbids and replays. Skipped on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.cuda import standin
from tests.cuda.standin import counts

pytestmark = pytest.mark.skipif(not standin.kind(), reason="of the stand-in alone")


@triton.jit
def add_one_kernel(x_ptr, out_ptr, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, x + 1, mask=at < n)


def test_it_says_that_it_is_no_gpu() -> None:
    assert "stand-in, no GPU" in torch.cuda.get_device_name()


def test_what_waits_is_counted() -> None:
    x = torch.ones(3, device="cuda")
    counts.reset()
    x.add_(1).mul_(2)
    assert counts.counts().waits == 0
    for wait in (lambda: x.sum().item(), x.cpu, x.nonzero, torch.cuda.synchronize):
        counts.reset()
        wait()
        assert counts.counts().waits > 0


def test_memory_is_counted_by_torch_s_allocator() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(1 << 20, device="cuda")
    y = torch.empty(1 << 20, device="cuda")
    del x
    assert torch.cuda.memory_allocated() - before == 4 << 20
    assert torch.cuda.max_memory_allocated() - before == 8 << 20
    del y


def test_a_graph_replays_operators_and_kernels_over_other_inputs() -> None:
    x, out = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x * 2
        add_one_kernel[(1,)](doubled, out, 5, SIZE=8)
        summed = out.sum()
    assert out.tolist() == [0.0] * 5  # nothing runs while it is captured
    for value in 3.0, 5.0:
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [2 * value + 1] * 5
        assert summed.item() == 5 * (2 * value + 1)


def test_a_wait_in_a_capture_is_illegal() -> None:
    x = torch.ones(3, device="cuda")
    before = counts.counts().illegal
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    assert counts.counts().illegal > before
    counts.reset()


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    x = torch.randn(64, device="cuda")
    out = torch.empty(64, device="cuda", dtype=torch.bfloat16)
    add_one_kernel[(1,)](x, out, 64, SIZE=64)
    assert torch.equal(out, (x + 1).bfloat16())


def test_a_device_that_is_full() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, device="cuda")
