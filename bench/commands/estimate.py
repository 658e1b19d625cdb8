"""`python -m bench estimate`: `slime_compile.estimate_peak` beside measured peaks, and at full size without a GPU.

Entry points: `main`, `estimated_bytes`. Estimates exist for slime_fused only; eager mode and inductor are measured.
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.cases.losses import Case
from bench.measure import measure
from bench.measure.cells import Cells, Store, finished, gib, run_cells, write_table
from bench.measure.measure import WAYS

_ALLOWED = 0.03  # of the measured peak
SLIME_WAYS = [way for way in WAYS if way.startswith("slime_fused")]


def estimated_bytes(case: Case, way: str) -> int:
    """As `measure.peak` counts: given logits are in it, gradients of a matmul's operands are not."""
    how = WAYS[way] or {}
    arguments = fake_arguments(case)
    with torch.set_grad_enabled(case.variant != "no_grad"):
        import slime_compile

        found = slime_compile.estimate_peak(case.function(), *arguments, **how.get("options", {}))
    wide = sum(t.nbytes for t in arguments if t.is_floating_point() and t.dim() == 2)
    rows = found.inputs_bytes - wide
    return found.peak_bytes - rows - (2 * wide if case.variant == "inside" else 0)


def fake_arguments(case: Case) -> list[Tensor]:
    """The inputs of the case's function. Logits passed in are not a leaf, like a model's output."""
    grad = case.variant != "no_grad"
    new: Any = {"dtype": case.torch_dtype, "device": "cpu", "requires_grad": grad}
    with FakeTensorMode():
        if case.variant == "inside":
            wide = [torch.empty(n, case.hidden, **new) for n in (case.rows, case.vocab)]
        else:
            wide = [torch.empty(case.rows, case.vocab, **new).clone()]
        target = torch.empty(case.rows, dtype=torch.int64)
        return [*wide, target, torch.empty(case.rows), torch.empty(case.rows)]


def main(options: argparse.Namespace) -> None:
    """Estimates every cell measured by `python -m bench` under slime_fused."""
    measured = finished(options.out, "loss")
    fields = Case.__dataclass_fields__
    cells: Cells = {}
    for name, found in measured.items():
        way = name.split(" | ")[-1]
        if name.startswith("peak") and way in SLIME_WAYS and "error" not in found:
            case = Case(**{key: found[key] for key in fields})
            cells[name] = _cell(case, way, found["allocated_bytes"])
    if not cells:
        raise SystemExit(f"{options.out}/loss.json has no peaks: run `python -m bench` first")
    store = Store(options.out, "estimate", resume=options.resume)
    run_cells(store, cells)
    headers = ["case", "way", "measured GiB", "estimated GiB", "difference", "within 3 %"]
    write_table(store, [("Estimated and measured peaks", headers, _rows(store))])


def _cell(case: Case, way: str, measured_bytes: int) -> Any:
    def cell() -> dict[str, Any]:
        estimated = measure.in_fresh_process(estimated_bytes, case, way)
        return {"measured_bytes": measured_bytes, "estimated_bytes": estimated}

    return cell


def _rows(store: Store) -> list[list[str]]:
    rows = []
    for name, found in store.cells.items():
        _, case, way = name.split(" | ")
        if "error" in found:
            rows.append([case, way, "", found["error"], "", ""])
            continue
        measured, estimated = found["measured_bytes"], found["estimated_bytes"]
        off = estimated / measured - 1
        fits = "yes" if abs(off) <= _ALLOWED else "NO"
        rows.append([case, way, gib(measured, 3), gib(estimated, 3), f"{off:+.1%}", fits])
    return rows
