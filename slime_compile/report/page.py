"""A report's dict as HTML: `fragment` for a notebook's cell, `document` for a self-contained file."""

from html import escape

from slime_compile.report.places import shortened
from slime_compile.report.text import Fields, Section, Table, notes, sections

_STYLE = """
.slime-report { font: 14px/1.5 system-ui, sans-serif; }
.slime-report h3, .slime-report h4 { margin: 1em 0 .3em; }
.slime-report p { margin: .3em 0; }
.slime-report table { border-collapse: collapse; margin: .4em 0; }
.slime-report th, .slime-report td { border: 1px solid #8888; padding: .2em .6em; text-align: left; }
"""


def fragment(report: Fields) -> str:
    first, *others = sections(report)
    parts = [f"<h3>{_text(first.title)}</h3>", *map(_section, others)]
    parts += [f"<p>{_text(note)}</p>" for note in notes(report)]
    return f'<div class="slime-report"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</div>"


def document(report: Fields) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>slime_fused report</title></head>\n'
        f"<body>\n{fragment(report)}\n</body></html>\n"
    )


def _section(section: Section) -> str:
    parts = [_table(p) if isinstance(p, Table) else f"<p>{_text(p)}</p>" for p in section.parts]
    return "\n".join([f"<h4>{_text(section.title)}</h4>", *parts])


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in table.headers)
    rows = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in table.rows)
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _text(text: str) -> str:
    return escape(shortened(text))
