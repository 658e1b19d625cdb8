"""`python -m bench tp`: slime's policy loss over vocabulary shards, per rank, and the cost of a nested compile there.

Entry point: `main`. TP processes over gloo on this machine, one thread each; every rank has logits `[ROWS, SHARD]` in
float32, and the vocabulary grows with TP. All ways of a cell run in the same processes, one after the other
for the peak and in turn for the time. See README.md, "Shards".
"""

import argparse
import dataclasses
import datetime
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import functions, losses
from bench.cases.losses import Case, Problem, Result
from bench.measure import measure
from bench.measure.cells import Cells, Store, run_cells, write_table

RANKS = (1, 2, 4)
ROWS, SHARD = 1024, 8192  # 32 MiB a rank
LEAST_ROUNDS, MOST_ROUNDS = 7, 15
_TIMEOUT = datetime.timedelta(minutes=5)  # one rank may compile while the others wait

WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "slime_fused": {"backend": "slime_fused"},
    "slime_fused merge_collectives=False": {
        "backend": "slime_fused",
        "options": {"merge_collectives": False},
    },
}
"""How a function is compiled: arguments of `torch.compile`, or None for not at all."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks measuring together.

    Attributes:
        ranks: how many. ways: of `WAYS`.
        nested: entropy defines a compiled function inside its forward, as slime's and verl's did.
        inlined: under `slime_compile.inline_nested_compile`. megatron: its own cross entropy, else our words for it.
        rows, shard: logits of one rank. seconds: for the rounds.
    """

    ranks: int
    ways: tuple[str, ...] = tuple(WAYS)
    nested: bool = False
    inlined: bool = False
    megatron: bool = dataclasses.field(default_factory=losses.has_megatron)
    rows: int = ROWS
    shard: int = SHARD
    seconds: float = 4.0


NESTED = [Group(2, ("eager", "slime_fused"), nested=True, inlined=on) for on in (False, True)]
"""What the second table adds. The remedy holds for a whole process, hence two cells, each with its own eager time."""


# ---- the loss -----------------------------------------------------------------------------------------------------


def loss_of(group: Group) -> Callable[..., Tensor]:
    """Clones, Megatron's cross entropy, the entropy, and the clipped policy loss of both; everything over the world."""
    cross_entropy: Callable[..., Tensor] = functions.CrossEntropyLikeMegatron.apply
    if group.megatron:
        cross_entropy = functions.megatron_cross_entropy()
    entropy = functions.NestedEntropy if group.nested else functions.VocabParallelEntropy

    def sharded_loss(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        tokens = target.unsqueeze(1)  # Megatron wants [sequence, batch, vocabulary]
        nll = cross_entropy(logits.clone().unsqueeze(1), tokens, dist.group.WORLD).squeeze(1)
        return losses.policy_loss(-nll, entropy.apply(logits.clone()), old, advantages)

    return sharded_loss


# ---- one rank -----------------------------------------------------------------------------------------------------


def measured(group: Group) -> list[dict[str, dict[str, Any]]]:
    """The numbers of each way on each rank; every rank is a process of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(group.ranks) as pool:
        calls = [
            pool.submit(measure.in_fresh_process, _rank, group, rank, f"{folder}/store")
            for rank in range(group.ranks)
        ]
        return [call.result() for call in calls]


def _rank(group: Group, rank: int, store: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)  # ranks share the cores; the profiler sees one thread
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=group.ranks, timeout=_TIMEOUT
    )
    if group.inlined:
        import slime_compile

        slime_compile.inline_nested_compile()
    logits, rows, true = _data(group, rank)
    steps = {way: _Step(group, way, logits, rows) for way in group.ways}
    found = {way: step.inspect(true) for way, step in steps.items()}
    for way, rounds_ms in _rounds(steps, group.seconds).items():
        found[way]["rounds_ms"] = rounds_ms
    dist.destroy_process_group()
    return found


def _data(group: Group, rank: int) -> tuple[Tensor, list[Tensor], Result]:
    """This rank's logits, target, old log-probs and advantages, and its part of the float64 truth."""
    problem = Problem(Case(rows=group.rows, vocab=group.ranks * group.shard))
    true = losses.truth(problem)
    columns = slice(rank * group.shard, (rank + 1) * group.shard)
    mine = [gradient[:, columns].clone() for gradient in true.gradients]
    logits = problem.wide[0][:, columns].clone().requires_grad_()
    return logits, problem.rows, Result(true.outputs, mine)


class _Step:
    """Forward and backward of one way."""

    def __init__(self, group: Group, way: str, logits: Tensor, rows: list[Tensor]):
        how, self.loss = WAYS[way], loss_of(group)
        if how is not None:
            whole = not group.nested or group.inlined
            self.loss = torch.compile(self.loss, fullgraph=whole, dynamic=False, **how)
        self.logits, self.rows = logits, rows

    def run(self) -> Result:
        loss = self.loss(self.logits, *self.rows)
        return Result([loss.detach()], list(torch.autograd.grad(loss, self.logits)))

    def inspect(self, true: Result) -> dict[str, Any]:
        """Compiles; then error, peak, graph breaks and collectives, in the reports and as they ran."""
        import slime_compile

        earlier, breaks = len(slime_compile.reports()), _breaks()
        output_error, gradient_error = losses.errors(self.run(), true)
        graphs = [report.to_dict() for report in slime_compile.reports()[earlier:]]
        return {
            "output_error": output_error,
            "gradient_error": gradient_error,
            "allocated_bytes": measure.profiled_peak(self.run) + self.logits.nbytes,
            "shard_bytes": self.logits.nbytes,
            "collectives": _collectives(self.run),
            "collectives_before": sum(graph["collectives_before"] for graph in graphs),
            "collectives_after": sum(graph["collectives_after"] for graph in graphs),
            "graphs": len(graphs),
            "breaks": _breaks() - breaks,
        }


def _breaks() -> int:
    """Graph breaks so far, as Dynamo counts them: again each time it traces a frame up to one."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def _collectives(run: Callable[[], object]) -> int:
    """Collectives that ran, however they were called: each passes through one operator of c10d."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.name.startswith("c10d::") for event in profile.events())


def _rounds(steps: dict[str, _Step], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every round, all ways in turn, started together on all ranks; rank 0 says when it is enough."""
    found: dict[str, list[float]] = {way: [] for way in steps}
    end = time.perf_counter() + seconds
    go_on = torch.ones(1)
    while go_on:
        for way, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step.run()
            found[way].append(1e3 * (time.perf_counter() - start))
        done = len(found[way])
        go_on.fill_(done < LEAST_ROUNDS or (done < MOST_ROUNDS and time.perf_counter() < end))
        dist.broadcast(go_on, 0)
    return {way: times[1:] for way, times in found.items()}  # the first one warms up


# ---- cells and tables ---------------------------------------------------------------------------------------------


def main(options: argparse.Namespace) -> None:
    store = Store(options.out, "tp", resume=options.resume)
    groups = {
        _name(group): dataclasses.replace(group, seconds=options.seconds / 2)
        for group in [*(Group(ranks) for ranks in RANKS), *NESTED]
    }
    cells: Cells = {name: functools.partial(_cell, group) for name, group in groups.items()}
    run_cells(store, cells)
    write_table(store, [_table(store), _nested_table(store)])
    plot(store, store.path.with_suffix(".png"))


def _cell(group: Group) -> dict[str, Any]:
    return {**dataclasses.asdict(group), "by_rank": measured(group)}


def _name(group: Group) -> str:
    kind = "" if not group.nested else " nested" if not group.inlined else " nested, inlined"
    return f"TP = {group.ranks}{kind}"


def _table(store: Store) -> tuple[str, list[str], list[list[str]]]:
    headers = ["TP", "", *_COLUMNS]
    rows = [
        [str(group.ranks), way, *_texts(store, group, way)]
        for group in map(Group, RANKS)
        for way in group.ways
    ]
    return f"slime's policy loss over [{ROWS}, {SHARD}] fp32 logits on each rank", headers, rows


_COLUMNS = (
    "peak / shard",
    "collectives run",
    "in the graph",
    "time / eager",
    "time / inductor",
    "error",
)


def _texts(store: Store, group: Group, way: str) -> list[str]:
    cell = store.cells.get(_name(group), {"error": "not run"})
    if "error" in cell:
        return [cell["error"], *[""] * (len(_COLUMNS) - 1)]
    mine = [ranks[way] for ranks in cell["by_rank"]]
    fused = way.startswith("slime_fused")
    counts = _same(
        [f"{rank['collectives_before']} -> {rank['collectives_after']}" for rank in mine]
    )
    peaks = [f"{rank['allocated_bytes'] / rank['shard_bytes']:.2f}" for rank in mine]
    time_ms = _time_ms(cell, way)
    return [
        _same(sorted(peaks)),
        _same([str(rank["collectives"]) for rank in mine]),
        counts if fused else "",
        f"{time_ms / _time_ms(cell, 'eager'):.2f} ({time_ms:.0f} ms)",
        f"{time_ms / _time_ms(cell, 'inductor'):.2f}" if "inductor" in group.ways else "",
        f"{max(rank['gradient_error'] for rank in mine):.1e}",
    ]


def _same(texts: list[str]) -> str:
    """The value of all ranks, or the first and the last rank's."""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _time_ms(cell: dict[str, Any], way: str) -> float:
    """Median over the rounds; in each the slowest rank counts."""
    rounds = zip(*(ranks[way]["rounds_ms"] for ranks in cell["by_rank"]), strict=True)
    return statistics.median(map(max, rounds))


def _nested_table(store: Store) -> tuple[str, list[str], list[list[str]]]:
    headers = ["", "graphs", "breaks", *(_COLUMNS[at] for at in _OF_NESTED)]
    rows = [
        [title, *_graphs(store, group), *(_texts(store, group, "slime_fused")[at] for at in _OF_NESTED)]
        for title, group in zip(_NESTED_TITLES, [*NESTED, Group(2)], strict=True)
    ]  # fmt: skip
    return "What a nested torch.compile costs: slime_fused, TP = 2", headers, rows


_OF_NESTED = (0, 1, 2, 3, 5)
_NESTED_TITLES = (
    "`@torch.compile` inside the entropy's forward",
    "the same after `inline_nested_compile()`",
    "without `@torch.compile`",
)


def _graphs(store: Store, group: Group) -> list[str]:
    cell = store.cells.get(_name(group), {})
    if "by_rank" not in cell:
        return ["", ""]
    mine = [ranks["slime_fused"] for ranks in cell["by_rank"]]
    return [_same([str(rank[what]) for rank in mine]) for what in ("graphs", "breaks")]


def plot(store: Store, path: Path) -> None:
    """Bars of the peaks, above bars of the times."""
    from bench.measure import plots

    title = f"[{ROWS}, {SHARD}] fp32 logits on each rank"
    bars = {
        what: {
            title: {
                f"TP = {ranks}": [_number(_texts(store, Group(ranks), way)[at]) for way in WAYS]
                for ranks in RANKS
            }
        }
        for what, at in (("peak / shard", 0), ("time / eager's", 3))
    }
    plots.bars(bars, {title: list(WAYS)}, path)


def _number(text: str) -> float | None:
    try:
        return float(text.split()[-1 if "to" in text else 0])
    except (ValueError, IndexError):
        return None
