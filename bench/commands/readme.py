"""`python -m bench readme`: fills the marks in the documents, up to the next `<!-- end -->`.

<!-- bench NAME -->   bench/results/NAME.md
<!-- headline -->     five figures of bench/results/loss.json
<!-- report -->       the output of the document's example, the Python block after `<!-- example -->`
<!-- options -->      the options of the backend and their defaults
"""

import argparse
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DOCUMENTS = (
    "README.md", "docs/aliasing.md", "docs/benchmarks.md", "docs/options.md",
    "docs/tensor_parallelism.md", "bench/README.md",
)  # fmt: skip
_MARK = re.compile(
    r"(<!-- (?P<mark>bench [\w-]+|headline|report|options) -->\n).*?(<!-- end -->)", re.DOTALL
)
_EXAMPLE = re.compile(r"<!-- example -->\n```python\n(?P<code>.*?)```", re.DOTALL)


def main(options: argparse.Namespace) -> None:
    for name in _DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(), options.out))
        print(f"{path}: {len(_MARK.findall(path.read_text()))} marks")
    _pictures(options.out)


def filled(text: str, results: Path) -> str:
    """The document with every mark's content; a missing table becomes a sentence."""

    def content(found: re.Match[str]) -> str:
        mark = found["mark"]
        if mark == "report":
            made = f"```\n{printed_by_example(text)}```\n"
        elif mark == "options":
            made = _options()
        elif mark == "headline":
            made = _headline(results)
        else:
            path = results / f"{mark.removeprefix('bench ')}.md"
            made = path.read_text() if path.exists() else "Not measured yet.\n"
        return f"{found[1]}\n{made}\n{found[3]}"

    return _MARK.sub(content, text)


def printed_by_example(text: str) -> str:
    """The output of the document's example, run with empty caches as for the first time."""
    example = _EXAMPLE.search(text)
    if example is None:
        raise ValueError("a document with `<!-- report -->` must have an `<!-- example -->`")
    program = f"exec(compile({example['code']!r}, 'example.py', 'exec'), {{'__name__': 'example'}})"
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
        )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def _pictures(results: Path) -> None:
    """README's picture, a part of the whole one, of the same cells."""
    from bench.commands import loss
    from bench.measure.cells import finished

    if cells := finished(results, "loss"):
        loss.plot(cells, loss.SHORT, "megatron", results / "headline.png")
        loss.plot(cells, loss.WHOLE, "megatron", results / "loss.png")


def _headline(results: Path) -> str:
    """Peaks and times of the first table in short: float32, eager beside inductor and this backend."""
    from bench.commands import loss
    from bench.measure.cells import finished

    cells = finished(results, "loss")
    if not cells:
        return "Not measured yet.\n"
    stamp = json.loads((results / "loss.json").read_text())["stamp"]
    lines = [
        "| | logits passed in: peak | time | `lm_head` inside: peak | time |",
        "|---|---|---|---|---|",
    ]
    for way in ("eager", "inductor", "slime_fused"):
        texts: list[str] = []
        for variant in ("given", "inside"):
            peak, _, time, _ = loss.texts_of(cells, variant, "megatron", "float32", way)
            texts += [f"{peak}x", time.split()[0]]
        lines.append(f"| {way} | {' | '.join(texts)} |")
    where = f"`{stamp['command']}`, {stamp['device']}, torch {stamp['torch']}, {stamp['date']}."
    return "\n".join([*lines, "", where, ""])


def _options() -> str:
    from slime_compile.backend.options import Options

    described = inspect.getdoc(Options) or ""  # Python 3.13 takes the indentation away by itself
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", described, re.MULTILINE)
    said = {name: " ".join(text.split()) for name, text in entries}
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {said[field.name]} |"
        for field in dataclasses.fields(Options)
        if field.name != "inductor"
    ]
    rows.append(
        "| `inductor.<name>` | | inductor's own settings; your custom passes keep running |"
    )
    return "\n".join(["| option | default | |", "|---|---|---|", *rows, ""])
