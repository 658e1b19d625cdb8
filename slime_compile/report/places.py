"""Places in the code for people: short paths, and cells of a notebook by their number.

Entry point: `shortened`. Programs read absolute paths (`Report.to_dict`).
"""

import re
import sys
from pathlib import Path

_PACKAGES = re.compile(r"(?<![\w.-])/[^\s\"'()]*/(?:site|dist)-packages/")
_CELL = re.compile(r"<ipython-input-(?P<number>\d+)-\w+>|(?<![\w.-])/\S*?ipykernel_\d+/\d+\.py")


def shortened(text: str) -> str:
    """`text` with its files named from the current directory, from their package's parent, or by their cell."""
    text = _CELL.sub(_cell, text)
    here = Path.cwd()
    if here != Path(here.anchor):
        text = re.sub(rf"(?<![\w./-]){re.escape(str(here))}/", "", text)
    return _PACKAGES.sub("", text)


def _cell(found: re.Match[str]) -> str:
    number = found["number"] or _number(found[0])
    return f"In [{number}]" if number else found[0]


def _number(file: str) -> str:
    """The number of the cell with this code name, or "" if IPython does not know it."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    label = getattr(getattr(shell, "compile", None), "format_code_name", lambda name: None)(file)
    return "".join(re.findall(r"\d+", label[1])) if label else ""
