"""Which tests run which lines of fx_passes, and a copy of the packages in which something may be changed.

`reached_lines` runs the tests of fx_passes once in a copy where each statement of a function notes that it runs.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.support.mutations import Mutant

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = ("fx_passes", "slime_compile", "tests", "bench", "pyproject.toml")
PROBED = "fx_passes"
CHOSEN = ["-q", "-m", "not slow and not thorough and not trainers", "-p", "no:cacheprovider"]

Reached = dict[str, list[str]]  # "walk/near.py:12" -> tests


PROBE = """
import json, os, pytest
lines = set()
reached = lines.add

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    lines.clear()
    result = yield
    with open(os.path.join(os.environ["SLIME_REACHED"], f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps([item.nodeid, sorted(lines)]) + "\\n")
    return result
"""


def probed(file: str, text: str) -> str:
    """The file, which notes each statement of a function before it is run."""
    tree = ast.parse(text)

    def with_probes(body: list[ast.stmt]) -> list[ast.stmt]:
        probes = [ast.parse(f"_reached({f'{file}:{each.lineno}'!r})").body[0] for each in body]
        return [each for pair in zip(probes, body, strict=True) for each in pair]

    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        for node in [*ast.walk(function)]:
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if (
                    isinstance(body, list)
                    and body
                    and isinstance(body[0], ast.stmt)
                    and not hasattr(node, f"_{field}")
                ):
                    setattr(node, field, with_probes(body))
                    setattr(node, f"_{field}", True)
    at = 1 + max(
        (
            i
            for i, n in enumerate(tree.body[:3])
            if (i == 0 and ast.get_docstring(tree)) or "__future__" in ast.unparse(n)
        ),
        default=-1,
    )
    tree.body.insert(at, ast.parse("from reached_lines import reached as _reached").body[0])
    return ast.unparse(tree)


def reached_lines(workers: int) -> Reached:
    """The tests that pass, by the lines that they reach."""
    with tempfile.TemporaryDirectory() as folder:
        copy, notes = copied(Path(folder) / "copy"), Path(folder) / "notes"
        notes.mkdir()
        for file in (copy / PROBED).rglob("*.py"):
            file.write_text(probed(str(file.relative_to(copy)), file.read_text()))
        (copy / "reached_lines.py").write_text(PROBE)
        command = [
            sys.executable,
            "-m",
            "pytest",
            *CHOSEN,
            "-p",
            "reached_lines",
            "-n",
            str(workers),
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy), "SLIME_REACHED": str(notes)}
        subprocess.run([*command, f"tests/{PROBED}"], cwd=copy, env=environment, check=False)
        result: Reached = defaultdict(list)
        for note in sorted(notes.iterdir()):
            for test, lines in map(json.loads, note.read_text().splitlines()):
                for line in lines:
                    result[line].append(test)
    return result


def keep(reached: Reached, path: Path) -> None:
    """As a file; each test's name once."""
    number = {test: n for n, test in enumerate(sorted({t for ts in reached.values() for t in ts}))}
    lines = {line: [number[test] for test in tests] for line, tests in reached.items()}
    path.write_text(json.dumps([list(number), lines]))


def kept(path: Path) -> Reached:
    names, lines = json.loads(path.read_text())
    return {line: [names[n] for n in tests] for line, tests in lines.items()}


def tests_of(
    mutant: Mutant, lines: Sequence[str], reached: Reached, sizes: Counter[str]
) -> list[str]:
    """Those that reach one of `lines`: from each file of tests in turn, those that reach least first."""
    tests = sorted(
        {test for line in lines for test in reached.get(line, ())}, key=lambda t: (sizes[t], t)
    )
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.split("::")[0]].append(test)
    own = Path(mutant.file).stem
    order = sorted(files, key=lambda file: (own not in file, sizes[files[file][0]], file))
    rounds = itertools.zip_longest(*(files[file] for file in order))
    return [test for each in rounds for test in each if test is not None]


class Lines:
    """The lines by which a mutant is reached: its statement's, or those that name the table it is in."""

    def __init__(self) -> None:
        self.starts: dict[
            str, dict[int, int]
        ] = {}  # of the innermost statement of a function on a line
        self.tables: dict[str, dict[int, str]] = {}  # which name of a module a line is about
        self.naming: dict[str, set[str]] = defaultdict(set)
        for path in (REPOSITORY / PROBED).rglob("*.py"):
            file, text = str(path.relative_to(REPOSITORY)), path.read_text()
            tree = ast.parse(text)
            functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
            inside = [n for each in functions for n in ast.walk(each) if isinstance(n, ast.stmt)]
            inside.sort(key=lambda n: n.lineno - _end(n))
            self.starts[file] = {
                line: n.lineno for n in inside for line in range(n.lineno, _end(n))
            }
            self.tables[file] = {
                line: name.id
                for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)
                for name in ast.walk(n) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                for line in range(n.lineno, _end(n))
            }  # fmt: skip
            for number, line in enumerate(text.split("\n"), 1):
                if number in self.starts[file]:
                    for word in re.findall(r"\w+", line):
                        self.naming[word].add(f"{file}:{self.starts[file][number]}")

    def of(self, mutant: Mutant) -> list[str]:
        start = self.starts[mutant.file].get(mutant.reached)
        if start is not None:
            return [f"{mutant.file}:{start}"]
        return sorted(self.naming[self.tables[mutant.file].get(mutant.line, "")])


def _end(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) + 1


def copied(copy: Path) -> Path:
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name
            )  # with __pycache__, which is true of copies with the same times
        else:
            shutil.copy(source, copy / name)
    return copy
