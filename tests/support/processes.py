"""Programs in a process of their own: what a fresh import sees, and what torch's compile cache carries over."""

import os
import subprocess
import sys


def run_python(code: str, *arguments: str, **environ: str) -> str:
    """What `python -c code` prints; a failure shows its errors."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
