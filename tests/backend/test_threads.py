"""Six threads compile while six others run compiled code; and the first use of the backend from six threads at once."""

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import harness
from tests.support.processes import run_python, runs_while_compiling

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 compiles in one thread only: aot_eager crashes, too",
)

ROWS, VOCAB = 6, 1030  # just above the default min_vocab
THREADS = 6


def loss(logits: Tensor, target: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, target[:, None])[:, 0] + entropy


def compiled(inner: str, min_vocab: int) -> Callable[..., Tensor]:
    """With a code object of its own, to which Dynamo ties what it compiles."""
    own = types.FunctionType(loss.__code__.replace(), loss.__globals__, loss.__name__)
    options = {"inner": inner, "min_vocab": min_vocab, "strict": True}
    return torch.compile(own, backend="slime_fused", options=options, dynamic=False)


def check(fn: Callable[..., Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, VOCAB, generator=draw, requires_grad=True)
    target = torch.randint(0, VOCAB, (ROWS,), generator=draw)
    (got,) = torch.autograd.grad(fn(logits, target).sum(), logits)
    (expected,) = torch.autograd.grad(loss(logits, target).sum(), logits)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class Threads:
    """Six threads that each do the same work, told their number; what they raise is kept."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self.failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, number)) for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            self.failures.append(error)


def compile_beside_running(inner: str, rounds: int) -> None:
    """Six threads compile `rounds` times, with options of their own; six others run what is compiled all the time."""
    torch._dynamo.reset()
    running = [compiled(inner, 64 + number) for number in range(THREADS)]
    for number, fn in enumerate(running):
        check(fn, number)
    runs = [0] * THREADS
    done = threading.Event()

    def run(number: int) -> None:
        while not done.is_set():
            check(running[number], runs[number])
            runs[number] += 1
            done.wait(0.001)  # six threads that never wait would leave the compiling ones no time

    def compile_anew(number: int) -> None:
        for turn in range(rounds):
            check(compiled(inner, 128 + (turn * THREADS + number) % 512), turn)

    runners, compilers = Threads(run), Threads(compile_anew)
    compilers.join()
    done.set()
    runners.join()
    assert not [*compilers.failures, *runners.failures]
    assert all(runs), runs


@runs_while_compiling
@pytest.mark.parametrize(
    ("inner", "rounds"), [("aot_eager", 2), pytest.param("inductor", 1, marks=pytest.mark.thorough)]
)
def test_compiling_beside_running(inner: str, rounds: int, private_cache: None) -> None:
    compile_beside_running(inner, rounds)


@runs_while_compiling
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_200_rounds_of_compiling_beside_running(inner: str, private_cache: None) -> None:
    compile_beside_running(inner, 200)


@pytest.fixture
def private_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled here, not loaded."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


FIRST_USE = """
import threading, torch
def loss(x, t):
    return torch.log_softmax(x, -1).gather(-1, t[:, None]).sum()
failures, together = [], threading.Barrier(6)
def work(number):
    try:
        together.wait()
        options = {"inner": INNER, "min_vocab": 64 + number}
        x, t = torch.randn(4, 1030, requires_grad=True), torch.randint(0, 1030, (4,))
        torch.compile(loss, backend="slime_fused", options=options)(x, t).backward()
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
import slime_compile
print(sorted(report.fused for report in slime_compile.reports()))
"""


@harness.each_inner
def test_first_use_from_six_threads(inner: str, private_cache: None) -> None:
    found = run_python(f"INNER = {inner!r}" + FIRST_USE)
    assert found.strip() == "[2, 2, 2, 2, 2, 2]"
