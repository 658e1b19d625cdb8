"""Times the CPU operators against inductor's own code for a log-prob and entropy loss, forward and backward.

    python -m bench.commands.ops_cpu                    # N=1024, V=32000, float32 and bfloat16
    python -m bench.commands.ops_cpu --rows 256 --vocab 152064 --dtype bfloat16

The variants run in turn in one process, over copies of the logits in rotation, because no variant may find its input in
cache. The medians of a shared machine drift; compare by the ratio of the medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slime_compile.ops import row_grad, row_stats

COPIES = 2  # of logits far larger than any cache


def plain_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    log_probs = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return log_probs, -(log_p.exp() * log_p).sum(-1)


def autograd_step(
    loss: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, target: Tensor, grads: list[Tensor]
) -> Tensor:
    leaf = logits.detach().requires_grad_()
    torch.autograd.backward(loss(leaf, target), grads)
    assert leaf.grad is not None
    return leaf.grad


def coefficients(logits: Tensor, target: Tensor, grads: list[Tensor]) -> list[Tensor]:
    top, log_sum, mean, _ = row_stats(logits, None, 1.0, "")
    grad_log_probs, grad_entropy = (grad.unsqueeze(-1) for grad in grads)
    offset = grad_entropy * mean - grad_log_probs
    terms = torch.stack([torch.ones_like(top), top, log_sum, offset, -grad_entropy], -1)
    return [terms, top.new_zeros(*top.shape[:-1], 3), target.unsqueeze(-1), grad_log_probs]


def ops_step(logits: Tensor, target: Tensor, grads: list[Tensor]) -> Tensor:
    grad: Tensor = row_grad(logits, *coefficients(logits, target, grads), False, logits.dtype, "")
    return grad


def median_ms(variants: dict[str, Callable[[int], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 2):
        for name, run in variants.items():
            start = time.perf_counter()
            run(repeat % COPIES)
            if repeat >= 2:  # the first two warm up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(rows: int, vocab: int, dtype: torch.dtype, repeats: int) -> None:
    logits = [(3 * torch.randn(rows, vocab)).to(dtype) for _ in range(COPIES)]
    target = torch.randint(0, vocab, (rows,))
    grads = [torch.randn(rows), torch.randn(rows)]
    compiled = torch.compile(plain_loss)
    kept = coefficients(logits[0], target, grads)
    expected = autograd_step(compiled, logits[0], target, grads)
    difference = (ops_step(logits[0], target, grads) - expected).abs().max().item()

    def forward(copy: int) -> object:
        with torch.no_grad():
            return compiled(logits[copy], target)

    step = partial(autograd_step, compiled)
    times_ms = median_ms(
        {
            "inductor forward + backward": lambda copy: step(logits[copy], target, grads),
            "row_stats + row_grad": lambda copy: ops_step(logits[copy], target, grads),
            "inductor forward": forward,
            "row_stats": lambda copy: row_stats(logits[copy], None, 1.0, ""),
            "row_grad": lambda copy: row_grad(logits[copy], *kept, False, dtype, ""),
        },
        repeats,
    )
    print(
        f"\n[{rows}, {vocab}] {dtype}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, medians of {repeats}, largest difference {difference:.1e}"
    )
    whole, size = times_ms["inductor forward + backward"], rows * vocab * logits[0].itemsize
    for name, time_ms in times_ms.items():
        print(
            f"{name:30} {time_ms:8.1f} ms  {time_ms / whole:5.2f} of inductor  "
            f"{size / time_ms / 1e6:6.2f} GB/s of logits"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    for dtype in options.dtype:
        measure(options.rows, options.vocab, getattr(torch, dtype), options.repeats)


if __name__ == "__main__":
    main()
