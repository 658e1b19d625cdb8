"""Programs in a process of their own: what a fresh import sees, and what torch's compile cache carries over.

`runs_while_compiling` marks tests whose threads run what is compiled while others compile.
"""

import os
import subprocess
import sys

import pytest
import torch

runs_while_compiling = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.12 runs nothing compiled while it compiles: aot_eager and inductor raise, too",
)


def run_python(code: str, *arguments: str, **environ: str) -> str:
    """What `python -c code` prints; a failure shows its errors."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
