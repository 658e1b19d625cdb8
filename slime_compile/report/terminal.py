"""A report's dict for rich: the same sections, with tables that fit the terminal.

Entry points: `Report.__rich__` calls `renderable`; `show` prints for the command line, with rich if it is installed and
the output is a terminal. No colour has a meaning.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from slime_compile.report.places import shortened
from slime_compile.report.text import Fields, Table, notes, sections

if TYPE_CHECKING:
    from slime_compile.report.values import Report


def show(report: "Report") -> None:
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        import rich

        rich.print(report)
    else:
        print(report)


def renderable(report: Fields) -> Any:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[Any] = []
    for section in sections(report):
        parts.append(Text(shortened(f"\n{section.title}" if parts else section.title)))
        for part in section.parts:
            drawn = _table(part) if isinstance(part, Table) else Text(shortened(part))
            parts.append(Padding(drawn, (0, 0, 0, 2)))
    return Group(*parts, *(Text(shortened(note)) for note in notes(report)))


def _table(table: Table) -> Any:
    import rich.box
    import rich.table
    from rich.text import Text

    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for header in table.headers:
        drawn.add_column(header, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(shortened(cell)) for cell in row))
    return drawn
