"""How hard documents are to read: relative pronouns per 100 words of running text.

Entry points: `density` of one text, and `python tests/support/prose.py FILES` for a table. Headless relative clauses
("what is left", "who holds it") are what readers of these documents stumbled over.
"""

import re
import sys
from pathlib import Path

PRONOUNS = frozenset({"that", "which", "who", "whom", "whose", "where", "what"})
_NOT_PROSE = re.compile(
    r"<!--.*?-->"  # marks
    r"|^```.*?^```$"  # code, and printed reports
    r"|^(?: {4}|\t)(?![-*\d]).*?$"  # indented code
    r"|^\|.*?$"  # tables
    r"|`[^`\n]*(?:\n[^`\n]+)?`"  # names in a sentence
    r"|\]\([^)]*\)",  # addresses of links
    re.MULTILINE | re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")


def words_of(markdown: str) -> list[str]:
    """The words of a document's running text, in small letters."""
    return [word.lower() for word in _WORD.findall(_NOT_PROSE.sub(" ", markdown))]


def density(markdown: str) -> float:
    """Relative pronouns per 100 words; 0 for a text without words."""
    words = words_of(markdown)
    return 100 * sum(word in PRONOUNS for word in words) / max(len(words), 1)


def main(paths: list[str]) -> None:
    for path in paths:
        text = Path(path).read_text()
        print(f"{density(text):5.2f}  {len(words_of(text)):6d} words  {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
