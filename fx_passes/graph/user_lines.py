"""The user's line of a node: the last frame of its stack trace outside of libraries, as `file:line`.

Torch is a library; `skip_folder` adds others with frames between the user's line and the operator.
"""

import re
from pathlib import Path

import torch
from torch.fx import Node

_LIBRARIES = [str(Path(torch.__file__).parent)]

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def skip_folder(folder: str) -> None:
    """From now on frames of files below `folder` are not the user's."""
    if folder not in _LIBRARIES:
        _LIBRARIES.append(folder)


def frames(stack_trace: str) -> list[tuple[str, int, str]]:
    """The (file, line, function) of each frame, the outermost first."""
    return [(file, int(line), name.strip()) for file, line, name in _FRAME.findall(stack_trace)]


def source_of(node: Node) -> str:
    """`file:line` of the innermost user frame, or "" without one."""
    every = frames(node.meta.get("stack_trace") or "")
    found = [frame for frame in every if not frame[0].startswith(tuple(_LIBRARIES))] or every
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""
