"""`check_ranks=True`: the ranks of a group compare their planned exchange before they could hang.

Entry points: `check` at compile time, `group_sizes` for the identity of compiled code. Compared: the collectives
over each group, in order, with every value they are computed from. Not compared, since ranks may differ there: numbers
(the start of a vocabulary shard), sizes, and values that no collective depends on. Torch's compile caches are not used.

Ranks meet in the store of the default process group, under the compiled function's name and the number of its
compilation. A rank that compiles alone waits for `TIMEOUT` and goes on, with a note in its report.
"""

from __future__ import annotations

import collections
import difflib
import itertools
import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from fx_passes.graph.operators import SAME_VALUE, is_collective
from fx_passes.graph.order import ancestors
from slime_compile.torch_private import distributed_c10d

aten = torch.ops.aten

TIMEOUT = timedelta(seconds=30)
_compiled: collections.Counter[tuple[str, str]] = collections.Counter()


class RanksDisagree(RuntimeError):
    """The ranks of a process group would run different collectives."""


def group_sizes() -> tuple[tuple[str, int], ...]:
    """The number of ranks of each process group, by name: compiled code contains them."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    groups = distributed_c10d._world.pg_names
    return tuple(sorted((str(name), group.size()) for group, name in groups.items()))


def check(graph: Graph, name: str) -> str:
    """Compares this rank's collectives with those of the other ranks of each group.

    Returns:
        What could not be compared, or "".

    Raises:
        RanksDisagree: on every rank of the group, with the lines that differ.
    """
    missing = []
    for group in dict.fromkeys(n.args[-1] for n in graph.nodes if is_collective(n)):
        if isinstance(group, str):
            missing.append(_check_group(graph, name, group))
    return "; ".join(filter(None, missing))


def _check_group(graph: Graph, name: str, group: str) -> str:
    ranks = distributed_c10d._world.pg_group_ranks[_group(group)]
    mine, number = dist.get_rank(), _compiled[name, group]
    _compiled[name, group] += 1
    store = distributed_c10d._get_default_store()
    keys = {rank: f"slime_fused/{group}/{name}/{number}/{rank}" for rank in ranks}
    own = describe(graph, group)
    store.set(keys[mine], json.dumps(own))
    late = []
    for rank, key in keys.items():
        try:
            store.wait([key], TIMEOUT)
        except RuntimeError:  # each store's error at its time-out
            late.append(rank)
            continue
        _compare(own, json.loads(store.get(key)), mine, rank, name, group)
    if not late:
        return ""
    return f"check_ranks: ranks {late} of group {group} did not compile {name} within {TIMEOUT.seconds} s"


def _group(name: str) -> dist.ProcessGroup:
    return next(g for g, known in distributed_c10d._world.pg_names.items() if known == name)


def _compare(own: list[str], other: list[str], mine: int, rank: int, name: str, group: str) -> None:
    if own == other:
        return
    lines = difflib.unified_diff(own, other, f"rank {mine}", f"rank {rank}", lineterm="", n=1)
    shown = "\n".join(itertools.islice(lines, 40))
    raise RanksDisagree(
        f"the ranks of group {group} must run the same collectives in {name}; ranks {mine} and {rank} differ:\n{shown}\n"
        "Give all ranks the same options, above all merge_collectives, and the same branches of the loss; "
        "merge_collectives=False on all ranks keeps the loss's own collectives. Shards may differ in width."
    )


def describe(graph: Graph, group: str) -> list[str]:
    """One line per collective over `group`, and per value needed by one of them."""
    own = [n for n in graph.nodes if is_collective(n) and n.args[-1] == group]
    wanted = {*own, *ancestors(own)}
    number: dict[Node, int] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if node not in wanted or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        if _copies(node):
            number[node] = number[node.all_input_nodes[0]]
        else:
            number[node] = len(lines)
            inputs = ", ".join(f"%{number[arg]}" for arg in node.all_input_nodes if arg in number)
            kind = node.target if node.op == "call_function" else node.op
            lines.append(f"%{number[node]} = {kind}({inputs}) {_type(node)}".rstrip())
    return lines


def _copies(node: Node) -> bool:
    """A rank's copy for its backward; `maximum` of a value and itself is a copy that inductor keeps."""
    twice = node.target is aten.maximum.default and node.args[0] is node.args[1]
    return twice or node.target in SAME_VALUE


def _type(node: Node) -> str:
    value = node.meta.get("val")
    return str(value.dtype) if isinstance(value, torch.Tensor) else ""
