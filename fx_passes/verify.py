"""Translation validation: run a graph and its rewrite on the same random data and compare the results.

Entry points: `trial_of`, `mismatch`. Opt-in (`verify=True`), at compile time, at the sizes of the graph (hints for
symbolic sizes), on the device of the inputs. Collectives run as if every rank had the same data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from fx_passes.graph.facts import ranks_of
from fx_passes.torch_private import unset_fake_temporarily

# A few roundings, far below any wrong coefficient.
_TOLERANCE: dict[torch.dtype | None, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 6e-2,
}


class _AlikeRanks(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._assert_async.msg:
            return None  # random data keep no promise of the program's
        if getattr(target, "namespace", "") != "_c10d_functional":
            return super().call_function(target, args, kwargs)
        name = target._schema.name.split("::")[-1]
        if name == "wait_tensor" or (name == "all_reduce" and args[1] in ("max", "min", "avg")):
            return args[0].clone()
        if name == "all_reduce" and args[1] == "sum":
            return args[0] * ranks_of(args[2])
        if name == "all_gather_into_tensor":
            return torch.cat([args[0]] * args[1])
        raise NotImplementedError(f"verify=True cannot run {target}")


def trial_of(graph: Graph) -> Graph:
    """A copy, to be rewritten first."""
    trial = Graph()
    output = trial.graph_copy(graph, val_map={}, return_output_node=True)
    assert isinstance(output, tuple), graph
    trial.output(output[0]).meta = dict(output[1].meta)
    return trial


def mismatch(
    before: Graph, after: Graph, module: torch.nn.Module, narrow: torch.dtype | None = None
) -> str | None:
    """The difference between the results of the two graphs, or None.

    `narrow`: the dtype of roundings inside the graph, if narrower than the outputs'.
    """
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = [_random(node) for node in before.find_nodes(op="placeholder")]
        for given in (inputs, [_with_garbage(one) for one in inputs]):
            wanted, found = (_run(graph, module, given) for graph in (before, after))
            told = _first_difference(wanted, found, _TOLERANCE.get(narrow, 0.0))
            if told is not None:
                return told
        return None


def _first_difference(wanted: list[Any], found: list[Any], least: float) -> str | None:
    for at, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if not isinstance(want, torch.Tensor):
            continue
        if want.dtype != have.dtype or want.shape != have.shape:
            return f"output {at} was {want.dtype} {list(want.shape)}, is {have.dtype} {list(have.shape)}"
        error = _error(want, have)
        if not error <= max(_TOLERANCE.get(want.dtype, 0.0), least):
            return f"output {at} differs by {error:.1e} of its row's largest element"
    return None


def _run(graph: Graph, module: torch.nn.Module, inputs: list[Any]) -> list[Any]:
    torch.manual_seed(0)
    copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]
    outputs = _AlikeRanks(GraphModule(module, graph)).run(*copies, enable_io_processing=False)
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _error(want: torch.Tensor, have: torch.Tensor) -> float:
    """The largest error relative to the largest element of its row, or a hundredth of the largest of all.

    NaN for an element that has become NaN; one that was NaN may be anything.
    """
    if want.numel() == 0:
        return 0.0
    want, have = want.double(), have.double()
    size = torch.where(want.isfinite(), want, 0.0).abs()
    row = size.amax(-1, keepdim=True) if size.dim() > 1 else size
    error = torch.where(want.isnan() | (want == have), 0.0, (want - have).abs())
    return float((error / (row + 0.01 * size.max()).clamp_min(1e-6)).max())


def _random(node: Node) -> Any:
    """A random value for a placeholder, also of kinds that rules must not exclude.

    Integers are 0 or 1, valid for every row and vocabulary. Floating values are normal numbers; a third of the rows (or
    numbers) is zero, because a coefficient may be zero, and some are equal to the one before. None is infinite, because
    the compared results would then be NaN.
    """
    fake = node.meta.get("val")
    if isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return fake.node.hint
    if not isinstance(fake, torch.Tensor):
        return fake
    sizes = [size if isinstance(size, int) else int(size.node.hint) for size in fake.shape]
    if not (fake.dtype.is_floating_point or fake.dtype.is_complex):
        return torch.randint(0, 2, sizes, device=fake.device).to(fake.dtype)
    made = torch.randn(sizes, dtype=torch.float32, device=fake.device)
    if fake.dtype.is_floating_point and made.dim():
        _special(made)
    return made.to(fake.dtype)


def _special(values: torch.Tensor) -> None:
    """Zeros and repetitions in place, for `_random`."""
    rows = values.flatten(0, -2) if values.dim() > 1 else values.view(-1, 1)
    rows[torch.randperm(rows.shape[0], device=rows.device)[: (rows.shape[0] + 1) // 3]] = 0
    rows[7::7] = rows[6:-1:7]


def _with_garbage(value: Any) -> Any:
    """Every fifth row NaN, the next one inf, as in unwritten rows: if a program masks them, so must the rewrite."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dim() < 2:
        return value
    made = value.clone()
    rows = made.flatten(0, -2)
    rows[2::5], rows[3::5] = math.nan, math.inf
    return made
