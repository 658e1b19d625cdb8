"""Runs a command on the stand-in; see `tests/cuda/standin/__init__.py`. Exit status 75 where there can be none."""

import argparse
import os
import sys
from pathlib import Path

from tests.cuda.standin import NO_KERNELS, ON, VALUES
from tests.cuda.standin.build import HERE, NotHere, headers, library

CANNOT = 75  # EX_TEMPFAIL


def environment(kind: str) -> dict[str, str]:
    """Of the command: every Python in it finds the library, and installs the rest when it imports torch."""
    built = library()
    # what is compiled to be interpreted is no code for a device
    caches = {
        f"{name}_CACHE_DIR": str(HERE / "build" / f"{kind}-{name.lower()}")
        for name in ("TORCHINDUCTOR", "TRITON")
    }
    values = {"TRITON_INTERPRET": "1"} if kind == VALUES else {"STANDIN_FOLD": "1"}
    return {
        **os.environ,
        **caches,
        **values,
        ON: kind,
        "LD_PRELOAD": str(built),
        **_before("PYTHONPATH", HERE / "site", HERE.parents[2]),
        # for the C++ that inductor writes
        **_before("CPATH", *headers()),
        **_before("LIBRARY_PATH", built.parent),
        "TRITON_LIBCUDA_PATH": str(built.parent),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "KINETO_LOG_LEVEL": "99",
        "TRITON_DEFAULT_FP_FUSION": "1",  # the default, of which Triton 3.9 warns
    }


def _before(name: str, *paths: Path) -> dict[str, str]:
    """A variable with more paths in front."""
    given = os.environ.get(name, "")
    return {name: os.pathsep.join([*map(str, paths), *([given] if given else [])])}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.cuda.standin")
    parser.add_argument("--no-kernels", action="store_true", help="for sizes without values")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        made = environment(NO_KERNELS if options.no_kernels else VALUES)
    except NotHere as reason:
        print(f"no stand-in for a CUDA device here: {reason}", file=sys.stderr)
        sys.exit(CANNOT)
    os.execvpe(options.command[0], options.command, made)


if __name__ == "__main__":
    main()
