"""The memory probe: what it measures on the CPU, what it logs, and that it is off by default."""

import logging
import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_compile.rl import memory_probe as module
from slime_compile.rl.memory_probe import ENVIRONMENT, MemoryRecord, memory_probe

ROWS, VOCAB = 256, 4096  # 4 MiB of float32: large beside what an operator takes for itself
LOGITS_BYTES = ROWS * VOCAB * 4


def step(scale: Tensor) -> Tensor:
    """Three tensors of the logits' size, at most two at a time, and one that is gone."""
    logits = torch.ones(ROWS, VOCAB) * scale
    doubled = logits * 2
    del logits
    return doubled.exp()


def record_of(probe: Any) -> MemoryRecord:
    assert probe.record is not None
    record: MemoryRecord = probe.record
    return record


def test_peak_on_the_cpu() -> None:
    lines: list[str] = []
    with memory_probe("actor_train", enabled=True, device="cpu", log=lines.append) as probe:
        assert probe.record is None
        probe.saw(step(torch.tensor(0.5)))
    record = record_of(probe)
    assert record.peak_allocated is not None
    # `* scale` holds ones and its result, `exp` its argument and result: two, and small change.
    assert 2 * LOGITS_BYTES <= record.peak_allocated < 2.01 * LOGITS_BYTES
    assert (record.tokens, record.vocab, record.error) == (ROWS, VOCAB, "")
    assert record.host_rss_peak >= record.host_rss > LOGITS_BYTES
    assert record.peak_reserved is None
    assert record.allocated_before is None
    assert len(lines) == 1
    for part in ("memory actor_train on cpu", "peak allocated 0.008 GiB", "peak reserved n/a",
                 "host RSS", f"tokens {ROWS}", f"vocabulary {VOCAB}"):  # fmt: skip
        assert part in lines[0]


def test_forward_and_backward_are_both_seen() -> None:
    weight = torch.ones(VOCAB, requires_grad=True)
    with memory_probe("step", enabled=True, device="cpu", log=lambda line: None) as probe:
        ((torch.ones(ROWS, VOCAB) * weight).exp() ** 2).sum().backward()
    peak = record_of(probe).peak_allocated
    assert peak is not None
    assert peak > 3 * LOGITS_BYTES  # ones and exp are saved, the square is made: then gradients


def test_what_an_earlier_step_left_is_not_subtracted() -> None:
    """A training loop drops the last step's tensors in the middle of the next one."""
    peaks = []
    held = torch.zeros(())
    for _ in range(2):
        with memory_probe("step", enabled=True, device="cpu", log=lambda line: None) as probe:
            held = held.new_zeros(ROWS, VOCAB)  # the old one is dropped when there is a new one
            held.exp()
        peaks.append(record_of(probe).peak_allocated)
    assert peaks == [2 * LOGITS_BYTES] * 2


def test_tokens_of_several_micro_batches() -> None:
    with memory_probe("step", enabled=True, device="cpu", log=lambda line: None) as probe:
        probe.saw(torch.zeros(1, 5, 7))
        probe.saw(torch.zeros(3, 7))
        probe.saw(torch.zeros(0, 7))
    assert (record_of(probe).tokens, record_of(probe).vocab) == (8, 7)


def test_given_tokens_and_none() -> None:
    lines: list[str] = []
    with memory_probe("a", tokens=9, vocab=11, enabled=True, device="cpu", log=lines.append):
        pass
    with memory_probe("b", enabled=True, device="cpu", log=lines.append):
        pass
    assert "tokens 9, vocabulary 11" in lines[0]
    assert "tokens ?, vocabulary ?" in lines[1]


def test_a_step_that_fails_is_logged() -> None:
    lines: list[str] = []
    probe = memory_probe("step", enabled=True, device="cpu", log=lines.append)

    def failing_step() -> None:
        with probe:
            step(torch.tensor(1.0))
            raise MemoryError

    with pytest.raises(MemoryError):
        failing_step()
    assert record_of(probe).error == "MemoryError"
    assert lines[0].endswith(", ended with MemoryError")
    assert record_of(probe).peak_allocated


def test_within_another_profiler() -> None:
    """There is one profiler: the inner probe has no peak, and breaks nothing."""
    lines: list[str] = []
    with (
        memory_probe("outer", enabled=True, device="cpu", log=lines.append) as outer,
        memory_probe("inner", enabled=True, device="cpu", log=lines.append) as inner,
    ):
        step(torch.tensor(1.0))
    assert record_of(inner).peak_allocated is None
    assert "inner on cpu: peak allocated n/a" in lines[0]
    assert (record_of(outer).peak_allocated or 0) >= 2 * LOGITS_BYTES


@pytest.mark.parametrize(("text", "on"), [(None, False), ("", False), ("0", False), ("off", False),
                                          ("False", False), ("1", True), ("true", True)])  # fmt: skip
def test_environment(
    text: str | None,
    on: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    if text is not None:
        monkeypatch.setenv(ENVIRONMENT, text)
    with caplog.at_level(logging.INFO), memory_probe("actor_train", device="cpu") as probe:
        probe.saw(torch.zeros(2, 3))
    assert (probe.record is not None) == on
    assert [message.startswith("memory actor_train on cpu") for message in caplog.messages] == (
        [True] if on else []
    )


def test_costs_nothing_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shared object, no profiler, no look at a device: some microseconds."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    logits = torch.zeros(2, 3)
    assert memory_probe("a") is memory_probe("b")
    rounds = 1000
    start = time.process_time()
    for _ in range(rounds):
        with memory_probe("actor_train") as probe:
            probe.saw(logits)
    per_call_us = (time.process_time() - start) / rounds * 1e6
    assert per_call_us < 100  # measured 2; a profiler takes thousands


def test_off_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.delattr(torch.profiler, "profile")
    monkeypatch.delattr(torch.cuda, "is_available")
    with memory_probe("actor_train") as probe:
        probe.saw(torch.zeros(2, 3))
    assert probe.record is None


class FakeCuda:
    """An allocator with one peak per device, as CUDA's."""

    def __init__(self) -> None:
        self.allocated = 100
        self.peak = 100

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def reset_peak_memory_stats(self, device: object) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: object) -> int:
        return self.allocated

    def max_memory_allocated(self, device: object) -> int:
        return self.peak

    def max_memory_reserved(self, device: object) -> int:
        return 2 * self.peak


def test_probes_within_probes_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic alone, on an allocator of our own: the inner one resets the only peak."""
    cuda = FakeCuda()
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated",
                 "max_memory_reserved"):  # fmt: skip
        monkeypatch.setattr(module.torch.cuda, name, getattr(cuda, name))
    lines: list[str] = []
    outer = memory_probe("outer", enabled=True, device="cuda:0", log=lines.append)
    inner = memory_probe("inner", enabled=True, device="cuda:0", log=lines.append)
    with outer:
        cuda.allocate(1000)
        cuda.allocate(-900)  # the outer's peak is before the inner: 1100
        with inner:
            cuda.allocate(50)
            cuda.allocate(-50)
        cuda.allocate(10)
    assert record_of(outer).peak_allocated == 1100
    assert record_of(outer).allocated_before == 100
    assert record_of(outer).peak_reserved == 2200
    assert record_of(inner).peak_allocated == 250
    assert record_of(inner).allocated_before == 200
    assert re.search(r"memory inner on cuda:0: peak allocated 0.000 GiB", lines[0])


def test_a_line_that_no_log_takes_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with memory_probe("a_step", enabled=True):
        pass
    assert "a_step" in capsys.readouterr().out
