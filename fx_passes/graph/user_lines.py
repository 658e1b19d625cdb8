"""Where the user wrote a node: the last frame of its stack trace that is not torch's own, as `file:line`."""

import re
from pathlib import Path

import torch
from torch.fx import Node

_TORCH = str(Path(torch.__file__).parent)

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def frames(stack_trace: str) -> list[tuple[str, int, str]]:
    """The (file, line, function) of each frame, the outermost first."""
    return [(file, int(line), name.strip()) for file, line, name in _FRAME.findall(stack_trace)]


def source_of(node: Node) -> str:
    """`file:line` of the innermost user frame, or "" where torch recorded none."""
    every = frames(node.meta.get("stack_trace") or "")
    found = [frame for frame in every if not frame[0].startswith(_TORCH)] or every
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""
