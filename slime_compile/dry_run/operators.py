"""The ATen operators of a function in front of the fusing pass: count, user lines, and a rule or none.

Entry point: `operators`. Many operators in user code are decomposed before: rules see the remaining ones
(docs/design.md).
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from fx_passes.graph.backward import mark_backward
from fx_passes.graph.facts import is_backward
from fx_passes.graph.user_lines import source_of
from fx_passes.rules import ROW_SCALARS, RULES
from slime_compile.backend.options import Options
from slime_compile.dry_run.explain import DryRun
from slime_compile.report.text import table
from slime_compile.report.values import Report


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator in the joint graphs of a call.

    Attributes:
        name: torch's name of the overload.
        forward: its number in forward.
        backward: its number in backward.
        rule: whether the pass has a rule for it, on full-vocabulary values or on numbers per row.
        lines: the user's lines with it, in the order of the graph.
    """

    name: str
    forward: int
    backward: int
    rule: bool
    lines: tuple[str, ...]


def operators(
    fn: Callable[..., Any], **options: Any
) -> Callable[..., tuple[tuple[Operator, ...], Report]]:
    """The operators that reach the pass when `fn` is called, and the report of the same dry run.

    Args:
        fn: a function, method or module, as for `slime_compile.explain`.
        options: as in `torch.compile(options=...)`.
    """
    chosen = dataclasses.replace(Options.parse(options), check_ranks=False)

    def dry_run(*args: Any, **kwargs: Any) -> tuple[tuple[Operator, ...], Report]:
        seen: list[tuple[Node, bool]] = []

        def observe(graph: Graph) -> None:
            mark_backward(graph)
            called = (node for node in graph.nodes if node.op == "call_function")
            seen.extend((node, is_backward(node)) for node in called)

        report = DryRun(chosen, observe).run(fn, args, kwargs)
        return _counted(seen), report

    return dry_run


def _counted(seen: list[tuple[Node, bool]]) -> tuple[Operator, ...]:
    """Per operator; a node comes with whether backward computes it."""
    counts: collections.Counter[tuple[Any, bool]] = collections.Counter()
    lines: dict[Any, dict[str, None]] = {}
    for node, late in seen:
        counts[node.target, late] += 1
        lines.setdefault(node.target, {})[source_of(node)] = None
    return tuple(
        Operator(
            str(target),
            counts[target, False],
            counts[target, True],
            target in RULES or target in ROW_SCALARS,
            tuple(filter(None, at)),
        )
        for target, at in lines.items()
    )


def render(found: tuple[Operator, ...]) -> str:
    """A table, in the order of the graph."""
    rows = [
        (
            each.name,
            str(each.forward),
            str(each.backward),
            "yes" if each.rule else "",
            ", ".join(each.lines[:3]) + (", ..." if len(each.lines) > 3 else ""),
        )
        for each in found
    ]
    return table(("operator", "forward", "backward", "rule", "at"), rows)
