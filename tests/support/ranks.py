"""Ranks for tests: threads that replay a process group in one process, or real processes over gloo."""

import io
import multiprocessing
import tempfile
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.distributed.multi_threaded_pg import (
    ThreadLocalWorld,
    _uninstall_threaded_pg,
)

# A guard against hangs alone: a rank waits for another one's compiler, for which a busy machine may take minutes.
GROUP_TIMEOUT_S = 600

if not hasattr(ThreadLocalWorld, "comms"):
    # torch 2.11: without it destroy_process_group fails, and the next test finds the groups of the last
    ThreadLocalWorld.comms = property(lambda _: [])  # type: ignore[attr-defined]

SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["torch.distributed", "slime_compile.backend"])


def on_threads(ranks: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """`function(rank, *args)` in `ranks` threads of this process, whose collectives reduce in rank order.

    Returns what each returned. An exception on a rank ends all of them, and is raised.
    """
    torch._dynamo.lookup_backend(
        "slime_fused"
    )  # now, once: torch's registry is not made for threads
    results: list[Any] = [None] * ranks

    @spawn_threads_and_init_comms(world_size=ranks)
    def run(_: object) -> None:
        results[dist.get_rank()] = function(dist.get_rank(), *args)

    try:
        run(None)
    finally:
        _uninstall_threaded_pg()
    return results


def own_copy(fn: Any) -> Any:
    """`fn` with a code object of its own: to that Dynamo ties what it compiles, a rank's numbers included."""
    return types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )


def on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: object,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> list[Any]:
    """`function(rank, *args)` in `ranks` processes of one gloo group.

    Returns what each returned, or the exception it ended with. A collective that another rank does not answer raises
    after `timeout_s`; where pytest's limit ends the test before, the processes are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(ranks):
            here, there = SPAWN.Pipe(duplex=False)
            process = SPAWN.Process(
                target=_rank,
                args=(rank, ranks, Path(folder) / "store", timeout_s, there, function, args),
            )
            process.start()
            there.close()
            workers.append((process, here))
        try:
            return [_received(here) for _, here in workers]
        finally:
            for process, here in workers:
                process.join(1)
                if process.is_alive():
                    process.kill()
                    process.join()
                here.close()


def _received(answer: Connection) -> Any:
    try:
        return torch.load(io.BytesIO(answer.recv_bytes()), weights_only=False)
    except EOFError:
        return RuntimeError("the process ended without an answer")


def _rank(
    rank: int,
    ranks: int,
    store: Path,
    timeout_s: float,
    answer: Connection,
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(rank, *args)
    except Exception as error:
        result = RuntimeError("".join(traceback.format_exception(error)))
    sent = io.BytesIO()
    torch.save(
        result, sent
    )  # tensors by value: a pipe would share their memory with a process that ends
    answer.send_bytes(sent.getvalue())
