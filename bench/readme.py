"""`python -m bench readme`: puts the tables that the commands wrote where the documents have a mark for them.

A mark is `<!-- bench NAME -->`; up to the next `<!-- end -->` stands `bench/results/NAME.md`.
"""

import argparse
import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_DOCUMENTS = ("README.md", "bench/README.md")
_MARK = re.compile(r"(<!-- bench (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(options: argparse.Namespace) -> None:
    for name in _DOCUMENTS:
        path = _ROOT / name
        path.write_text(filled(path.read_text(), options.out))
        print(f"{path}: {len(_MARK.findall(path.read_text()))} tables")


def filled(text: str, results: Path) -> str:
    """The document with every mark's table; a table that was never made leaves a sentence."""

    def table(found: re.Match[str]) -> str:
        path = results / f"{found['name']}.md"
        content = path.read_text() if path.exists() else "Not measured yet.\n"
        return f"{found[1]}\n{content}\n{found[3]}"

    return _MARK.sub(table, text)
