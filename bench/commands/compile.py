"""`python -m bench compile`: the passes' part in the time of a first compile, and its growth with the graph.

Entry points: `main`, `compiled`. A cell is a process of its own, with torch's caches off and inductor warm: the first
call, forward and backward, under inductor or under slime_fused. Timers around the passes and the backend's other work
give their part. Times are CPU times of the process and of its compilers, because a busy machine changes these least.
One more cell builds the CPU operators.
"""

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.cases.losses import Case, Problem
from bench.measure.cells import Cells, Store, run_cells, write_table
from bench.measure.measure import in_fresh_process

ROWS, VOCAB = 256, 2048  # small: no kernel's own time counts
WAYS = ("inductor", "slime_fused")
PIECES = (4, 16, 64)
_KERNELS = "The CPU operators' C++, once per machine, seconds"
CASES = ["slime's policy loss", *(f"{n} chunks" for n in PIECES), "a small model with the loss"]


def main(options: argparse.Namespace) -> None:
    """Every case under both ways."""
    store = Store(options.out, "compile", resume=options.resume)
    cells: Cells = {
        f"{case} | {way}": functools.partial(in_fresh_process, compiled, case, way)
        for case in CASES
        for way in WAYS
    }
    cells[_KERNELS] = functools.partial(in_fresh_process, built)
    run_cells(store, cells, until=time.monotonic() + 60 * options.minutes)
    headers = ["case", "nodes", "inductor", "slime_fused", "passes", "of inductor", "ms per node"]
    tables = [("First compile, forward and backward, seconds of CPU time", headers, _rows(store))]
    if _KERNELS in store.cells:
        found = store.cells[_KERNELS]
        row = [found.get("error") or f"{found[each]:.2f}" for each in ("build", "load")]
        tables.append((_KERNELS, ["built by the first process", "loaded by every other"], [row]))
    write_table(store, tables)


def compiled(case: str, way: str) -> dict[str, float]:
    """Seconds of the first call and of the passes in it, and how many nodes the joint graph has."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    function, arguments = CALLS[case.partition(" ")[2]](case)
    spent = _timed_passes() if way == "slime_fused" else {"passes": 0.0, "nodes": 0}
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        torch.compile(torch.sin, backend="inductor")(torch.ones(8))  # imports, inductor's header
        began = _cpu_seconds()
        torch.compile(function, backend=way, dynamic=False)(*arguments).backward()
        return {"seconds": _cpu_seconds() - began, **spent}


def built() -> dict[str, float]:
    """Seconds to build the CPU operators on a fresh machine, and to load them afterwards."""
    from slime_compile.ops import native

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        found = {}
        for way in ("build", "load"):
            native._loaded.cache_clear()
            began = time.perf_counter()
            if native.functions() is None:
                raise RuntimeError(native.description())
            found[way] = time.perf_counter() - began
        return found


def _cpu_seconds() -> float:
    """Of this process and of its finished children."""
    return sum(os.times()[:4])


def _timed_passes() -> dict[str, float]:
    """Seconds in our code from now on, and the nodes of the largest graph there."""
    from slime_compile import backend
    from slime_compile.backend import inductor

    spent = {"passes": 0.0, "nodes": 0}
    running: list[str] = []  # one calls another

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def called(graph: Any, *rest: Any, **keywords: Any) -> Any:
            spent["nodes"] = max(spent["nodes"], len(getattr(graph, "graph", graph).nodes))
            began = time.process_time()
            running.append(name)
            try:
                return run(graph, *rest, **keywords)
            finally:
                running.pop()
                spent["passes"] += 0.0 if running else time.process_time() - began

        return called

    for home, names in (
        (backend, ("new_record", "prepare")),
        (inductor, ("run_fuse", "_plan_inplace", "run_inplace")),
    ):
        for name in names:
            setattr(home, name, timed(name, getattr(home, name)))
    return spent


# ---- the cases ----------------------------------------------------------------------------------------------------


def _policy_loss(_: str) -> tuple[Any, list[Tensor]]:
    problem = Problem(Case("given", "megatron", "float32", ROWS, VOCAB), with_truth=False)
    return problem.case.function(), [*(w.requires_grad_() for w in problem.wide), *problem.rows]


def _chunks(case: str) -> tuple[Any, list[Tensor]]:
    pieces = int(case.split()[0])

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        log_probs, entropies = [], []
        for rows, tokens in zip(logits.chunk(pieces), target.chunk(pieces), strict=True):
            log_p = torch.log_softmax(rows.float() / 0.7, -1)
            log_probs.append(log_p.gather(-1, tokens[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
        return torch.cat(log_probs).mean() - 0.01 * torch.cat(entropies).mean()

    logits = torch.randn(ROWS, VOCAB, requires_grad=True)
    return loss, [logits, torch.randint(VOCAB, (ROWS,))]


def _model(_: str) -> tuple[Any, list[Tensor]]:
    width, tokens = 64, torch.randint(VOCAB, (2, ROWS // 2))
    layers = [
        nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    model = nn.Sequential(nn.Embedding(VOCAB, width), *layers, nn.Linear(width, VOCAB))

    def loss(inputs: Tensor) -> Tensor:
        logits = model(inputs)[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten())

    return loss, [tokens]


CALLS: dict[str, Callable[[str], tuple[Any, list[Tensor]]]] = {
    "policy loss": _policy_loss,
    "chunks": _chunks,
    "small model with the loss": _model,
}


def _rows(store: Store) -> list[list[str]]:
    rows = []
    for case in CASES:
        plain, ours = (store.cells.get(f"{case} | {way}", {}) for way in WAYS)
        if "seconds" not in plain or "seconds" not in ours:
            rows.append(
                [case, "", str(plain.get("error", "")), str(ours.get("error", "")), "", "", ""]
            )
            continue
        passes, nodes = ours["passes"], ours["nodes"]
        times = [f"{seconds:.2f}" for seconds in (plain["seconds"], ours["seconds"], passes)]
        share = f"{passes / plain['seconds']:.1%}"
        rows.append([case, str(nodes), *times, share, f"{1000 * passes / nodes:.2f}"])
    return rows
