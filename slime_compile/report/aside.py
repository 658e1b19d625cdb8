"""Reports of graphs without an operator of ours to carry them through torch's compile cache.

Entry points: `keep` and `kept`. A file for each graph lies beside the code that torch keeps of it, named by the graph's
identity. Where it is gone, or the code came from a cache that machines share, nothing is known of the graph.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def keep(identity: str, regions: Sequence[str]) -> None:
    """What the report of a graph is made of; a cache that cannot be written to is none."""
    path = _path(identity)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as written:
            json.dump(list(regions), written)
        os.replace(written.name, path)  # other processes read a whole file or none


def kept(identity: str) -> list[str]:
    """What `keep` was given, in this process or another one."""
    try:
        found: list[str] = json.loads(_path(identity).read_text())
    except (OSError, ValueError):
        return []
    return found


def _path(identity: str) -> Path:
    from slime_compile.torch_private import cache_dir

    return Path(cache_dir()) / "slime_compile" / "aside" / f"{identity}.json"
