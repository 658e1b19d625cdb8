"""Breaks one thing at a time, and asks the tests whether they see it: `make mutants`.

`support/mutations.py` says what is broken. Each mutant lives in a temporary copy of the packages. The tests that run
the broken line are asked (`support/reached.py`); for a file of slime_compile, the folder of tests that mirrors its own.
Killed: a test fails. Survived: all of them pass; then a test is missing, or the fault is none, and `mutants.txt` has
the reason for its key. Survived so far: no more than `--tests` were asked of more that reach the line.

    python tests/mutants.py                             all of fx_passes, for many hours
    python tests/mutants.py fx_passes/rules             the mutants of these files and folders
    python tests/mutants.py --sample 5                  five of each file, always the same
    python tests/mutants.py --since HEAD~1 --most 16    16 on lines that were changed: what CI runs
    python tests/mutants.py --key "fx_passes/walk/near.py _beside never 1a2b3c"
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.support.mutations import Mutant, mutants_of  # noqa: E402
from tests.support.reached import (  # noqa: E402
    CHOSEN,
    COPIED,
    PROBED,
    Lines,
    Reached,
    copied,
    keep,
    kept,
    reached_lines,
    tests_of,
)

PACKAGES = (PROBED, "slime_compile")
SURVIVORS = REPOSITORY / "tests" / "mutants.txt"
SECONDS = 900  # a mutant that never ends is killed, too
FIRST = 8  # tests that are asked before all others are collected


def verdict(mutant: Mutant, tests: Sequence[str]) -> str:
    """What the tests say: "survived", "killed", or why neither."""
    if not tests:
        return "reached by no test"
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder) / "copy")
        target = copy / mutant.file
        target.write_bytes(mutant.applied(target.read_bytes()))
        for old in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            old.unlink()
        process = multiprocessing.get_context("fork").Process(target=_asked, args=(copy, tests))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return "killed"
        # 2 and 4: the packages could not be imported, or what tests they have depends on the line
        outcomes = {0: "survived", 1: "killed", 2: "killed", 4: "killed"}
        return outcomes.get(process.exitcode or 0, f"broken, exit code {process.exitcode}")


def _asked(copy: Path, tests: Sequence[str]) -> None:
    """In a process that has imported torch and nothing of this repository: a few of the tests, then the others."""
    import pytest

    os.chdir(copy)
    sys.path[:] = [str(copy), *(each for each in sys.path if Path(each).resolve() != REPOSITORY)]
    for name in [each for each in sys.modules if each.split(".")[0] in COPIED]:
        del sys.modules[name]
    log = os.open(copy / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 0
    for part in (tests[:FIRST], tests[FIRST:]):
        status = status or (part and int(pytest.main([*CHOSEN, "-x", *part]))) or 0
    os._exit(status)


def listed() -> dict[str, str]:
    """The reason for each survivor, by its key."""
    lines = [
        line for line in SURVIVORS.read_text().splitlines() if line and not line.startswith("#")
    ]
    return {
        key.strip(): reason.strip() for key, _, reason in (line.partition(":: ") for line in lines)
    }


def all_mutants() -> list[Mutant]:
    files = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    return [
        mutant
        for path in files
        for mutant in mutants_of(str(path.relative_to(REPOSITORY)), path.read_bytes())
    ]


def _changed(since: str) -> Callable[[Mutant], bool]:
    """Whether a mutant is on a line that was added or changed since a commit."""
    command = ["git", "diff", "--unified=0", "--no-color", since, "--", *PACKAGES]
    lines: set[tuple[str, int]] = set()
    file = ""
    for line in subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ .*\+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            lines.update((file, number) for number in range(first, first + count))
    return lambda mutant: (mutant.file, mutant.line) in lines


def chosen_mutants(given: argparse.Namespace) -> list[Mutant]:
    """In an order that looks random and is the same each time, so that a part of them is a fair part."""
    mutants = [each for each in all_mutants() if each.key not in listed() or each.key in given.key]
    if given.key:
        return [each for each in mutants if each.key in given.key]
    if given.since:
        mutants = list(filter(_changed(given.since), mutants))
    parts = tuple(given.files) or (PACKAGES if given.since else (PROBED,))
    mutants = [each for each in mutants if each.file.startswith(parts)]
    mutants.sort(key=lambda each: hashlib.sha256(each.key.encode()).digest())
    if given.sample:
        counts: Counter[str] = Counter()
        counts_before = [(counts.update([each.file]), counts[each.file])[1] for each in mutants]
        mutants = [
            each for each, n in zip(mutants, counts_before, strict=True) if n <= given.sample
        ]
    return mutants[: given.most]


def verdicts(
    mutants: Sequence[Mutant], given: argparse.Namespace
) -> Iterator[tuple[Mutant, str, str]]:
    """With each verdict, how many tests were asked, of how many that reach the line."""
    lines = Lines()
    probing = any(each.file.startswith(PROBED) for each in mutants)
    reached = _reached(given.reached, given.workers) if probing else {}
    sizes = Counter(test for tests in reached.values() for test in tests)

    def one(mutant: Mutant) -> tuple[Mutant, str, str]:
        if not mutant.file.startswith(PROBED):
            folder = str(Path("tests", *Path(mutant.file).parts[1:-1]))
            return mutant, verdict(mutant, [folder]), folder
        tests = tests_of(mutant, lines.of(mutant), reached, sizes)
        found = verdict(mutant, tests[: given.tests])
        asked = min(len(tests), given.tests)
        so_far = " so far" if found == "survived" and asked < len(tests) else ""
        return mutant, found + so_far, f"{asked} of {len(tests)}"

    with ThreadPoolExecutor(given.workers) as pool:
        yield from pool.map(one, mutants)


def _reached(path: Path | None, workers: int) -> Reached:
    if path and path.exists():
        return kept(path)
    reached = reached_lines(workers)
    if path:
        keep(reached, path)
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help=f"files and folders; {PROBED} where none is given")
    parser.add_argument(
        "--key", action="append", default=[], help="this mutant, also if it is in mutants.txt"
    )
    parser.add_argument("--since", help="only mutants on lines changed since this commit")
    parser.add_argument("--sample", type=int, help="no more than this many of each file")
    parser.add_argument("--most", type=int, help="no more than this many in all")
    parser.add_argument(
        "--tests", type=int, default=200, help="no more than this many tests for each"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--reached",
        type=Path,
        help="keep in this file which lines are reached, and take them from it",
    )
    given = parser.parse_args()
    stale = listed().keys() - {each.key for each in all_mutants()}
    for key in sorted(stale):
        print(f"mutants.txt: no such mutant: {key}")
    mutants = chosen_mutants(given)
    counts: Counter[str] = Counter()
    import torch
    import torch._dynamo  # before the processes are forked

    torch.set_num_threads(1)
    for mutant, found, asked in verdicts(mutants, given) if mutants else ():
        counts[found] += 1
        change = f"# line {mutant.line}: {mutant.before} -> {mutant.after}"
        print(f"{found:15} {asked:12}  {mutant.key}  {change}"[:240], flush=True)
    told = [f"{count} {found}" for found, count in sorted(counts.items())]
    print(f"{len(mutants)} mutants:", ", ".join(told))
    return int(bool(counts.keys() - {"killed", "survived so far"} or stale))


if __name__ == "__main__":
    sys.exit(main())
