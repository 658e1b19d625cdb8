"""Reports of graphs without an operator of ours to carry them through torch's compile cache.

Entry points: `keep` and `kept`. Each graph has a file next to torch's cached code, named by the graph's identity. If
the file is gone, or the code came from a cache shared by machines, the graph has no report.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def keep(identity: str, regions: Sequence[str]) -> None:
    """Stores the regions of a graph's report. A read-only cache stores nothing."""
    path = _path(identity)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as written:
            json.dump(list(regions), written)
        os.replace(written.name, path)  # other processes read a complete file or none


def kept(identity: str) -> list[str]:
    """The regions stored by `keep`, in this process or another one."""
    try:
        found: list[str] = json.loads(_path(identity).read_text())
    except (OSError, ValueError):
        return []
    return found


def _path(identity: str) -> Path:
    from slime_compile.torch_private import cache_dir

    return Path(cache_dir()) / "slime_compile" / "aside" / f"{identity}.json"
