"""The cost of a head in the graph on a GPU: its time against the time of its matrix products.

    python bench/gpu/head.py OUT [--small]

N rows, V columns, D hidden: a program keeping its logits multiplies 6 N V D, one recomputing them in backward 8, one
taking the gradient in forward 6. The floor is the time of as many full matrix products on the same device (`6THV`,
`8THV`). Each way: milliseconds, share of its floor, most memory beyond inputs and gradients in N, the bytes of all
logits; and whether a CUDA graph captures its step.
Entry point: `main`. Tables go to OUT/head.txt and OUT/head.json.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tabulate
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.check import time_ms

SIZES = [(8192, 32_000, 4096), (8192, 128_256, 4096), (2048, 128_256, 4096)]
SMALL = [(512, 4096, 256)]
WAYS: dict[str, tuple[str, dict[str, Any], int]] = {
    "eager": ("", {}, 6),
    "inductor": ("inductor", {}, 6),
    "slime_fused lm_head=False": ("slime_fused", {"lm_head": False}, 6),
    "slime_fused": ("slime_fused", {}, 6),
    "slime_fused grad_in_forward=always": ("slime_fused", {"grad_in_forward": "always"}, 6),
    "slime_fused grad_in_forward=never": ("slime_fused", {"grad_in_forward": "never"}, 8),
}
"""Backend, options, and how many N V D its products are at least."""


def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), target)


def floor_ms(hidden: Tensor, weight: Tensor, logits: Tensor) -> float:
    """2 N V D: the time of one product, the mean of the three in forward and backward."""
    calls: list[Callable[[], object]] = [
        lambda: torch.mm(hidden, weight.t(), out=logits),
        lambda: torch.mm(logits, weight),
        lambda: torch.mm(logits.t(), hidden),
    ]
    return sum(map(time_ms, calls)) / 3


def measure(rows: int, vocab: int, width: int) -> list[dict[str, Any]]:
    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    with torch.no_grad():
        matrices = torch.randn(rows, width, **new), torch.randn(vocab, width, **new) / width**0.5
        product = floor_ms(*matrices, torch.empty(rows, vocab, **new))
    hidden, weight = (matrix.requires_grad_() for matrix in matrices)
    target = torch.randint(vocab, (rows,), device="cuda")
    found = []
    for name, (backend, options, products) in WAYS.items():
        torch._dynamo.reset()
        function = loss
        if backend:
            how: dict[str, Any] = {"backend": backend, "dynamic": False, "fullgraph": True}
            function = torch.compile(loss, **how, **({"options": options} if options else {}))
        try:
            cell = _cell(function, hidden, weight, target)
        except torch.OutOfMemoryError:
            cell = {"why": "does not fit"}
        floor = product * products / 2
        found.append(
            {"rows": rows, "vocab": vocab, "hidden": width, "way": name, "floor_ms": floor, **cell}
        )
    return found


def _cell(
    function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, target: Tensor
) -> dict[str, Any]:
    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(hidden, weight, target), (hidden, weight))

    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    own = hidden.nbytes + weight.nbytes
    peak = torch.cuda.max_memory_allocated() - before - own
    return {
        "time_ms": time_ms(step),
        "peak_n": peak / (hidden.shape[0] * weight.shape[0] * 2),
        "captured": _captured(step),
    }


def _captured(step: Callable[[], object]) -> bool:
    """Whether nothing in a step waits for the device: a CUDA graph takes it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    except RuntimeError as error:
        print(f"not captured: {error}", file=sys.stderr)
        return False
    return True


def table(cells: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{c['rows']} x {c['vocab']} x {c['hidden']}",
            c["way"],
            c.get("why") or f"{c['time_ms']:.2f}",
            "" if "why" in c else f"{c['floor_ms'] / c['time_ms']:.2f}",
            "" if "why" in c else f"{c['peak_n']:.2f}",
            "" if "why" in c else ("yes" if c["captured"] else "no"),
        ]
        for c in cells
    ]
    header = ["N x V x D", "way", "ms", "share of 6THV or 8THV", "peak / N", "captured"]
    return tabulate.tabulate(rows, header, disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="one size, to see that it runs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu/head.py needs a CUDA device; torch finds none here. Nothing was measured.")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, Any]] = []
    for size in SMALL if options.small else SIZES:
        cells += measure(*size)
        (options.out / "head.json").write_text(json.dumps(cells, indent=1))
        (options.out / "head.txt").write_text(table(cells) + "\n")
    print(table(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
