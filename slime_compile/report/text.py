"""A report's dict as text, for people and bug reports; tables by `tabulate` if it is installed."""

import importlib.util
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from slime_compile.report.places import shortened

Fields = dict[str, Any]
"""A report, a graph or a frame, from `Report.to_dict`."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Table(NamedTuple):
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """A title, and the lines and tables below it."""

    title: str
    parts: Sequence[str | Table] = ()


def render(report: Fields) -> str:
    """The complete report, from `Report.to_dict()`; never empty."""
    lines = []
    for section in sections(report):
        lines += ["", section.title]
        for part in section.parts:
            lines += _indented(table(*part) if isinstance(part, Table) else part)
    return shortened("\n".join([*lines[1:], *notes(report)]))


def sections(report: Fields) -> list[Section]:
    """The parts of the text, in order; the first is a headline. `notes` come after them."""
    graphs = report["graphs"]
    found = [Section(headline(report))]
    for number, graph in enumerate(graphs, 1):
        found.append(Section(f"graph {number} of {len(graphs)}: {_title(graph)}", _graph(graph)))
    if others := report["other_graphs"]:
        found.append(Section(f"{counted(others, 'more graph')} without a vocabulary"))
    for name, calls in report["eager_calls"].items():
        found.append(Section(f"eager code: {name}, {counted(calls, 'call')}"))
    found += _frames("graph breaks", report["breaks"])
    found += _frames("running in Python, not compiled", report["python_frames"])
    return found


def notes(report: Fields) -> list[str]:
    return [f"note: {note}" for note in report["notes"]]


def headline(report: Fields) -> str:
    graphs = report["graphs"]
    if not graphs and report["other_graphs"]:
        return "slime_fused: 0 fused operators; the logits are in no graph"
    if not graphs:
        frames = len(report["python_frames"])
        runs = f"; {frames} frame{' runs' if frames == 1 else 's run'} in Python" if frames else ""
        eager = "; eager code calls the operators" if report["eager_calls"] else ""
        return f"slime_fused: no graph{eager}{runs}"
    operators = counted(report["fused"], "fused operator")
    said = f"slime_fused: {operators} in {counted(len(graphs), 'graph')}"
    if not any(g["has_vocabulary"] or g["cached"] or g["raised"] for g in graphs):
        said += "; the logits are in no graph"
    return said


def _title(graph: Fields) -> str:
    kind = "training" if graph["training"] else "inference"
    if graph["cached"]:
        kind = "from torch's compile cache" + (f"; {kind}" if graph["values"] else "")
    if graph["raised"]:
        return f"{_named(graph['name'])}, not compiled"
    return f"{_named(graph['name'])}, {kind}, {counted(graph['operators'], 'fused operator')}"


def _named(frame: str) -> str:
    """Dynamo's name of a function's rest after a graph break, in words."""
    rest = re.match(r"torch_dynamo_resume_in_(.+)_at_(\d+) (.*)", frame)
    return f"{rest[1]} {rest[3]} from line {rest[2]} on" if rest else frame


def _graph(graph: Fields) -> list[str | Table]:
    parts: list[str | Table] = []
    if graph["values"]:
        rows = [
            (
                v["kind"] + (f" x{v['count']}" if v["count"] > 1 else ""),
                v["shape"],
                v["dtype"],
                shortened(v["source"]),
            )
            for v in graph["values"]
        ]
        parts.append(Table(("fused", "shape", "dtype", "at"), rows))
    if graph["wide_before"] or graph["values"]:
        parts.append(
            f"full-vocabulary values {graph['wide_before']} -> {graph['wide_after']}{_stored(graph)}, read by backward "
            f"{size(graph['saved_bytes_before'])} -> {size(graph['saved_bytes_after'])}"
        )
    if graph["collectives_before"]:
        parts.append(f"collectives {graph['collectives_before']} -> {graph['collectives_after']}")
    for each in graph["placements"]:
        parts.append(f"gradient at {each['source'] or 'unknown line'}: {_placed(each)}")
    if graph["rejections"]:
        refused = [
            (shortened(r["reason"]), r["node"], shortened(r["source"])) for r in graph["rejections"]
        ]
        parts.append(Table(("not fused, because", "node", "at"), refused))
    if not (graph["has_vocabulary"] or graph["failed"] or graph["raised"]):
        parts.append("no value of this graph is as wide as a vocabulary (see option min_vocab)")
    return parts + notes(graph)


def _stored(graph: Fields) -> str:
    """If unfused values exist: the number of values in memory, in contrast to parts of a kernel."""
    return f" ({graph['stored']} stored)" if graph["stored"] or graph["wide_after"] else ""


def _placed(gradient: Fields) -> str:
    """The memory of a gradient."""
    calls, over, reason = gradient["calls"], gradient["over"], gradient["reason"]
    asks = gradient["owner"] == "anyone"
    if not calls:
        if asks:
            return "reuses the logits' buffer if nothing else references them (checked at each backward)"
        return "reuses the logits' buffer" if gradient["in_place"] else f"not in place: {reason}"
    share = f"{over} of {counted(calls, 'call')}"
    if over == calls:
        return "reuses the logits' buffer" + (
            f", nothing else referenced them: {share}" if asks else ""
        )
    if not over:
        return f"not in place, {share}: {reason}"
    return f"reuses the logits' buffer in {share}; otherwise: {reason}"


def _frames(title: str, frames: Sequence[Fields]) -> list[Section]:
    lines = [f"{f['name']} at {f['source']}: {f['reason']}" for f in frames]
    return [Section(f"{title}:", lines)] if lines else []


def _indented(lines: str) -> list[str]:
    return [f"  {line}".rstrip() for line in lines.splitlines()]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines, with a header; by `tabulate` if it is installed."""
    if importlib.util.find_spec("tabulate") is not None:
        from tabulate import tabulate

        return str(tabulate(rows, headers=headers, disable_numparse=True))
    every = [headers, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in every
    )


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def size(count: float) -> str:
    """Bytes, in the largest unit of which there is one."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.4g} {_UNITS[unit]}"
