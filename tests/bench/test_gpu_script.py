"""What `bench/gpu.sh` collects: every step is in it, those that failed too. The script itself needs a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def collected(out: Path) -> tuple[str, dict[str, object]]:
    collect = [sys.executable, str(ROOT / "bench" / "gpu" / "collect.py"), str(out)]
    subprocess.run(collect, check=True, capture_output=True)
    return (out / "gpu.md").read_text(), json.loads((out / "gpu.json").read_text())


def test_a_step_that_failed_is_in_it_and_so_are_the_others(tmp_path: Path) -> None:
    (tmp_path / "stamp.txt").write_text("some device\n")
    (tmp_path / "steps.txt").write_text("doctor 0 3\ncheck 124 150\nmemory 0 20\nspeed 1 2\n")
    (tmp_path / "check.log").write_text("row_stats float32\n")
    (tmp_path / "memory.md").write_text("| rows | GiB |\n")
    (tmp_path / "memory.json").write_text('{"cells": {}}')
    (tmp_path / "speed.log").write_text("RuntimeError: why it failed\n")
    text, numbers = collected(tmp_path)
    for expected in ("some device", "check: status 124, 150 s", "| rows | GiB |", "why it failed"):
        assert expected in text
    assert numbers["memory"] == {"cells": {}}
    assert numbers["speed"] is None
    assert numbers["steps"][1] == {"name": "check", "status": 124, "seconds": 150}  # type: ignore[index]
