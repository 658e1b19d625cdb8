"""One line of log per training step: peak memory, tokens, vocabulary.

Entry point: `memory_probe`, off unless `SLIME_MEM_PROBE` is set (or `enabled=True`); off, it costs one
look at the environment. On CUDA the numbers are the allocator's, and a probe within a probe is
measured too. On the CPU torch records no peak: the numbers are the profiler's memory events of the
thread running the step, which is good for small runs and not free.

Not handled: memory from outside of torch (NCCL's buffers, CUDA's context), apart from the
host's resident set.
"""

import logging
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from slime_compile.torch_private import ProfilerEvent

ENVIRONMENT = "SLIME_MEM_PROBE"
_OFF_WORDS = ("", "0", "false", "off", "no")
_GIB = 2**30

_autograd: Any = torch.autograd  # its type stubs lack the functions used here
_logger = logging.getLogger(__name__)


def _say(line: str) -> None:
    if _logger.isEnabledFor(logging.INFO):
        _logger.info(line)
    else:
        print(line, flush=True)


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of one step, in bytes; None if the device does not report it.

    Attributes:
        name: of the step.
        device: of its tensors.
        peak_allocated: most live bytes of tensors. On the CPU: only tensors allocated in the
            step.
        allocated_before: bytes of tensors when the step began. None on the CPU.
        peak_reserved: most bytes reserved by the allocator. None on the CPU.
        host_rss: resident set of the process when the step ended.
        host_rss_peak: largest resident set of the process until then, of this and earlier steps.
        tokens: rows of logits in the step, if the trainer said.
        vocab: columns of the logits, if the trainer said.
        error: the type of the step's exception, or "".
    """

    name: str
    device: torch.device
    peak_allocated: int | None
    allocated_before: int | None
    peak_reserved: int | None
    host_rss: int
    host_rss_peak: int
    tokens: int | None
    vocab: int | None
    error: str

    def __str__(self) -> str:
        parts = [
            f"peak allocated {_gib(self.peak_allocated)}",
            f"before {_gib(self.allocated_before)}",
            f"peak reserved {_gib(self.peak_reserved)}",
            f"host RSS {_gib(self.host_rss)} (peak {_gib(self.host_rss_peak)})",
            f"tokens {'?' if self.tokens is None else self.tokens}",
            f"vocabulary {'?' if self.vocab is None else self.vocab}",
        ]
        ended = f", ended with {self.error}" if self.error else ""
        return f"memory {self.name} on {self.device}: {', '.join(parts)}{ended}"


def _gib(size: int | None) -> str:
    return "n/a" if size is None else f"{size / _GIB:.3f} GiB"


class Probe(Protocol):
    """The context manager of `memory_probe`."""

    record: MemoryRecord | None  # after the step; None while it runs, and if the probe is off

    def saw(self, logits: Tensor) -> None:
        """Counts the rows of `[..., V]` logits as tokens of the step."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def memory_probe(
    name: str,
    *,
    tokens: int | None = None,
    vocab: int | None = None,
    device: torch.device | str | None = None,
    enabled: bool | None = None,
    log: Callable[[str], None] = _say,
) -> Probe:
    """A context manager logging the memory of its body, even if the body raises.

    Args:
        name: of the step, for the log.
        tokens: rows of the step's logits; or say it inside, with `probe.saw(logits)`.
        vocab: columns of the logits; or likewise.
        device: default: the current CUDA device, or the CPU without one.
        enabled: None asks the environment: on if `SLIME_MEM_PROBE` is set to anything but 0, false,
            no or off.
        log: receives the line; the default logs it at INFO, or prints it if INFO is off.

    Returns:
        The probe; its `record` holds the numbers afterwards.

    Examples:
        >>> with memory_probe("actor_train") as probe:
        ...     logits = model(batch)
        ...     probe.saw(logits)
        ...     loss_fn(logits, batch).backward()
    """
    if enabled is None:
        enabled = os.environ.get(ENVIRONMENT, "").strip().lower() not in _OFF_WORDS
    if not enabled:
        return _OFF
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    meter = _CudaMeter(where) if where.type == "cuda" else _CpuMeter()
    return _MemoryProbe(name, tokens, vocab, where, meter, log)


class _Off:
    record: MemoryRecord | None = None

    def saw(self, logits: Tensor) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


_OFF = _Off()


class _MemoryProbe:
    def __init__(
        self,
        name: str,
        tokens: int | None,
        vocab: int | None,
        device: torch.device,
        meter: "_CudaMeter | _CpuMeter",
        log: Callable[[str], None],
    ) -> None:
        self.record: MemoryRecord | None = None
        self._name = name
        self._tokens = tokens
        self._vocab = vocab
        self._device = device
        self._meter = meter
        self._log = log

    def saw(self, logits: Tensor) -> None:
        self._tokens = (self._tokens or 0) + logits[..., 0].numel()
        self._vocab = logits.shape[-1]

    def __enter__(self) -> Self:
        self._meter.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._meter.stop()
        host_rss = _host_rss()
        self.record = MemoryRecord(
            name=self._name,
            device=self._device,
            peak_allocated=self._meter.peak_allocated,
            allocated_before=self._meter.allocated_before,
            peak_reserved=self._meter.peak_reserved,
            host_rss=host_rss,
            host_rss_peak=max(host_rss, _host_rss_peak()),  # the system's is updated late
            tokens=self._tokens,
            vocab=self._vocab,
            error="" if kind is None else kind.__name__,
        )
        self._log(str(self.record))


class _CudaMeter:
    """The allocator's peaks. They are one per device, so nested probes share them."""

    _open: ClassVar[list["_CudaMeter"]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_allocated: int | None = 0
        self.allocated_before: int | None = None
        self.peak_reserved: int | None = 0

    def start(self) -> None:
        self._share()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.allocated_before = torch.cuda.memory_allocated(self.device)
        self._open.append(self)

    def stop(self) -> None:
        self._share()
        self._open.remove(self)

    def _share(self) -> None:
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device)
        for meter in self._open:
            if meter.device == self.device:
                meter.peak_allocated = max(meter.peak_allocated or 0, allocated)
                meter.peak_reserved = max(meter.peak_reserved or 0, reserved)


class _CpuMeter:
    """The profiler's memory events. There is one profiler, so a nested probe has no events of its own."""

    allocated_before: int | None = None
    peak_reserved: int | None = None

    def __init__(self) -> None:
        self.peak_allocated: int | None = None
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        if _autograd._profiler_enabled():
            return
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,
        )
        self._profile.__enter__()

    def stop(self) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        profiler: Any = self._profile.profiler
        self.peak_allocated = _peak_of(_allocations(profiler.kineto_results))
        self._profile = None


def _allocations(results: Any) -> list[Any]:
    """Allocations and frees on the CPU, in order; each has an address and a size, below 0 for a free."""
    found, events = [], list(results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == ProfilerEvent.Allocation and event.extra_fields.device.type == "cpu":
            found.append(event)
    found.sort(key=lambda event: event.start_time_ns)
    return [event.extra_fields for event in found]


def _peak_of(allocations: list[Any]) -> int:
    """Most bytes at one time; memory from before is not counted, nor its free."""
    sizes: dict[int, int] = {}
    held = peak = 0
    for each in allocations:
        if each.alloc_size > 0:
            sizes[each.ptr] = each.alloc_size
            held += each.alloc_size
        else:
            held -= sizes.pop(each.ptr, 0)
        peak = max(peak, held)
    return peak


def _host_rss() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return _host_rss_peak()


def _host_rss_peak() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
