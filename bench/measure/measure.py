"""One measurement: the peak of a case under one way to compile it, and the times of several ways in one process.

Entry points: `peak` and `times`, both called through `in_fresh_process`. The protocol and its reasons are in README.md.
This module prints nothing and knows no table.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.cases import losses
from bench.cases.losses import Case, Problem, Result

T = TypeVar("T")

WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "aot_eager": {"backend": "aot_eager"},
    "inductor": {"backend": "inductor"},
    "slime_fused": {"backend": "slime_fused"},
    "slime_fused save=softmax": {"backend": "slime_fused", "options": {"save": "softmax"}},
    "slime_fused consume_logits=True": {
        "backend": "slime_fused",
        "options": {"consume_logits": True},
    },
}
"""How a function is compiled: arguments of `torch.compile`, or None for not at all."""


# ---- one step -----------------------------------------------------------------------------------------------------


class _Handed(torch.autograd.Function):
    """Hands over a tensor as a computed one: no leaf, unreferenced, with its gradient kept."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, step: "Step") -> Tensor:
        ctx.step = step
        return step.take()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.step.gradients = [grad]
        return None, None


class Step:
    """Forward and backward of one function: `prepare`, then `run`; `result` until the next `prepare`."""

    def __init__(self, problem: Problem, way: str):
        how, function = WAYS[way], problem.case.function()
        self.function = function
        if how is not None:
            self.function = torch.compile(function, fullgraph=True, dynamic=False, **how)
        self.problem = problem
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self._anchor = torch.zeros((), device=problem.case.device, requires_grad=True)

    def take(self) -> Tensor:
        """The given logits; the caller gets the only reference, until `prepare` makes others."""
        logits = self.problem.wide.pop()
        return logits.detach()

    def prepare(self) -> None:
        """Drops the results of the last step and makes overwritten logits anew."""
        self.outputs, self.gradients = [], []
        if self.problem.case.variant == "given" and not self.problem.wide:
            self.problem.refill()
        for value in self.problem.wide:
            value.grad = None

    def run(self) -> None:
        """A measured case."""
        wide, rows = self.problem.wide, self.problem.rows
        if self.problem.case.variant == "no_grad":
            with torch.no_grad():
                self.outputs = list(self.function(*wide, *rows))
        elif self.problem.case.variant == "given":
            loss = self.function(_Handed.apply(self._anchor, self), *rows)
            loss.backward()
            self.outputs = [loss.detach()]
        else:
            loss = self.function(*(value.requires_grad_() for value in wide), *rows)
            loss.backward()
            self.outputs = [loss.detach()]
            self.gradients = [value.grad for value in wide if value.grad is not None]

    def result(self) -> Result:
        return Result(self.outputs, self.gradients)


# ---- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """Most live bytes, warm, counted as in README.md, "Memory".

    Attributes:
        allocated_bytes: by the allocator's events.
        resident_bytes: by the process's resident set; None on CUDA.
        fused: fused operators in the compiled graphs.
        reserved_bytes: most bytes reserved from the device by the caching allocator; None on the CPU.
    """

    allocated_bytes: int
    resident_bytes: int | None
    fused: int
    reserved_bytes: int | None = None


def peak(case: Case, way: str) -> Peak:
    """The peak of one step: given logits count, gradients of the matmul's operands do not."""
    torch.set_num_threads(1)  # the profiler sees the thread that it was started in and no other
    problem = Problem(case, with_truth=False)
    step = Step(problem, way)
    meters = [_cuda_peak] if case.device == "cuda" else [resident_peak, profiled_peak]
    step.run()
    peaks = []
    for meter in meters:
        step.prepare()
        peaks.append(meter(step.run))
    *resident, allocated = (found + outside_bytes(problem) for found in peaks)
    reserved = torch.cuda.max_memory_reserved() if case.device == "cuda" else None
    return Peak(allocated, resident[0] if resident else None, _fused(way), reserved)


def outside_bytes(problem: Problem) -> int:
    """Added to a step's allocations: logits passed in exist before it; gradients of a matmul's operands leave it."""
    if problem.case.variant == "inside":
        return -sum(value.nbytes for value in problem.wide)
    return problem.case.logits_bytes


def _fused(way: str) -> int:
    if not way.startswith("slime_fused"):
        return 0
    import slime_compile

    return sum(report.fused for report in slime_compile.reports())


def _cuda_peak(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def profiled_peak(run: Callable[[], object]) -> int:
    """Most live bytes allocated by `run` in this thread."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def resident_peak(run: Callable[[], object]) -> int:
    """By how many bytes the process's resident set rose while `run` ran; Linux."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status must have a line {name}")


# ---- time and error -----------------------------------------------------------------------------------------------


@dataclass
class Timed:
    """Times of every measured round, and the errors against float64 of a first step."""

    rounds_ms: list[float] = field(default_factory=list)
    output_error: float = 0.0
    gradient_error: float = 0.0

    @property
    def time_ms(self) -> float:
        return statistics.median(self.rounds_ms)


def times(
    case: Case, ways: list[str], seconds: float = 15.0, least: int = 3, most: int = 25
) -> dict[str, Timed]:
    """Forward and backward of every way in turn, over the same data, until `seconds` are over."""
    problem = Problem(case)
    true = losses.truth(problem)
    steps = {way: Step(problem, way) for way in ways}
    found = {way: Timed() for way in ways}
    for way, step in steps.items():
        step.run()
        found[way].output_error, found[way].gradient_error = losses.errors(step.result(), true)
        step.prepare()
    del true
    clock = clock_of(case.device)
    end = time.perf_counter() + seconds
    for number in range(1 + most):
        if number > least and time.perf_counter() > end:
            break
        for way, step in steps.items():
            start = clock()
            step.run()
            if number:  # the first round warms up
                found[way].rounds_ms.append(1e3 * (clock() - start))
            step.prepare()  # frees the gradient before the next way starts
    return found


def clock_of(device: str) -> Callable[[], float]:
    """Seconds, when all work so far is done."""

    def cuda() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return cuda if device == "cuda" else time.perf_counter


# ---- processes ----------------------------------------------------------------------------------------------------


class CellFailed(Exception):
    """The reason of a cell without numbers: "OOM", or the exception of its process."""


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """Calls a function of this package in a process forked from one with torch imported and nothing computed.

    Raises:
        CellFailed: it raised there, or the process was ended.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints each start of the profiler
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch" if torch.cuda.is_available() else "bench.measure.preload"]
    )
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        succeeded, answer = receiver.recv()
    except EOFError:
        process.join()
        # the kernel ends by SIGKILL whom it has no memory for
        raise CellFailed("OOM" if process.exitcode == -9 else f"exit {process.exitcode}") from None
    finally:
        process.join()
    if not succeeded:
        raise CellFailed(answer)
    found: T = answer
    return found


def _answer(sender: Any, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        sender.send((True, function(*args)))
    except torch.OutOfMemoryError:
        sender.send((False, "OOM"))
    except Exception as error:
        sender.send((False, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"))
