"""Collects the output of `bench/gpu.sh` in one Markdown and one JSON: OUT/gpu.md, OUT/gpu.json.

    python bench/gpu/collect.py OUT

Entry point: `main`. Needs neither torch nor a device. Failed steps come first, with their last lines.
"""

import json
import sys
from pathlib import Path
from typing import Any

TABLES = ("head", "memory", "speed")
LAST_LINES = 15


def steps(out: Path) -> list[dict[str, Any]]:
    """Name, exit status and seconds of each, in their order."""
    lines = (out / "steps.txt").read_text().splitlines()
    names = ("name", "status", "seconds")
    return [dict(zip(names, [n, int(s), int(t)], strict=True)) for n, s, t in map(str.split, lines)]


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _table(out: Path, name: str) -> str:
    """The step's Markdown or plain text; without one, the end of its output."""
    if found := _text(out / f"{name}.md"):
        return found
    if found := _text(out / f"{name}.txt"):
        return f"```\n{found}\n```"
    return f"```\n{_end(out, name)}\n```"


def _end(out: Path, name: str) -> str:
    return "\n".join(_text(out / f"{name}.log").splitlines()[-LAST_LINES:])


def markdown(out: Path) -> str:
    parts = [f"# {_text(out / 'stamp.txt')}"]
    parts += [f"- {s['name']}: status {s['status']}, {s['seconds']} s" for s in steps(out)]
    failed = [s["name"] for s in steps(out) if s["status"] and s["name"] not in TABLES]
    parts += [f"## {name} failed\n\n```\n{_end(out, name)}\n```" for name in failed]
    parts += [f"## {name}\n\n```\n{_end(out, name)}\n```" for name in ("check", "sanitizer")]
    parts += [f"## {name}\n\n{_table(out, name)}" for name in TABLES]
    return "\n\n".join(parts) + "\n"


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"stamp": _text(out / "stamp.txt"), "steps": steps(out)}
    for name in TABLES:
        text = _text(out / f"{name}.json")
        found[name] = json.loads(text) if text else None
    return found


def main() -> None:
    out = Path(sys.argv[1])
    (out / "gpu.md").write_text(markdown(out))
    (out / "gpu.json").write_text(json.dumps(results(out), indent=1) + "\n")
    print(f"{out / 'gpu.md'}, {out / 'gpu.json'}")


if __name__ == "__main__":
    main()
