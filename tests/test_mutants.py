"""Mutants: what is made of a few lines, keys that outlast a renaming, and each can be compiled."""

import ast
from collections import Counter
from pathlib import Path

import fx_passes
from tests import mutants
from tests.support import reached
from tests.support.mutations import KINDS, Mutant, mutants_of

SOURCE = b'''
TABLE = {first, second}

def whole(c: Context, form: Form) -> bool:
    """A docstring."""
    if form.x is None and not form.exps:
        raise Refused("no logits")
    form = c.operand(form, at=0)
    c.rows.note(form)
    kept = [min(each + 1, 2) for each in form.terms if each > 0]
    return all(kept) or c.emitter.where(form.mask, kept, form.b)
'''


def made(source: bytes = SOURCE) -> list[Mutant]:
    return mutants_of("walk/a.py", source)


def test_each_kind_is_made_and_compiles() -> None:
    assert {each.kind for each in made()} == set(KINDS)
    for each in made():
        changed = each.applied(SOURCE)
        assert changed != SOURCE
        ast.parse(changed)


def test_what_is_made() -> None:
    changes = {(each.kind, each.before, each.after) for each in made()}
    assert changes >= {
        ("never", "form.x is None and (not form.exps)", "False"),
        ("conjunct", "form.x is None and (not form.exps)", "(form.x is None)"),
        ("comparison", "each > 0", "(each >= 0)"),
        ("exchange", "min(each + 1, 2)", "max(each + 1, 2)"),
        ("element", "{first, second}", "{second}"),
        ("statement", "c.rows.note(form)", "pass"),
        ("keyword", "c.operand(form, at=0)", "c.operand(form)"),
        ("filter", "each > 0", "True"),
        ("number", "2", "3"),
    }
    assert not any("no logits" in each.before or "docstring" in each.before for each in made())


def test_a_key_outlasts_a_renaming_and_other_lines() -> None:
    renamed = SOURCE.replace(b"form", b"value").replace(b"kept", b"left_over")
    moved = b"import math\n" + renamed.replace(b"    kept", b"    c.check()\n    kept")
    keys = [each.key for each in made()]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= {each.key for each in made(moved)}


def test_the_survivors_have_reasons_and_the_tests_of_a_line_are_found() -> None:
    assert all(mutants.listed().values())
    file = "fx_passes/walk/near.py"
    text = (Path(fx_passes.__file__).parents[1] / file).read_text()
    lines = reached.Lines()
    notes = {f"{file}:{line}": [f"tests/test_a.py::{line}"] for line in range(text.count("\n") + 1)}
    inside = [each for each in mutants_of(file, text.encode()) if each.function != "module"]
    for each in inside:
        assert reached.tests_of(each, lines.of(each), notes, Counter())


def test_a_probed_file_notes_its_statements() -> None:
    text = '"""Doc."""\nfrom __future__ import annotations\n\ndef f(x):\n    if x:\n        return 1\n    return 2\n'
    probed = reached.probed("a.py", text).replace("from reached_lines", "# ")
    seen: list[str] = []
    space = {"_reached": seen.append}
    exec(compile(probed, "a.py", "exec"), space)
    assert space["f"](True) == 1  # type: ignore[operator]
    assert seen == ["a.py:5", "a.py:6"]
