"""Where the user wrote a node: the last frame of its stack trace, as `file:line`."""

import re

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def frames(stack_trace: str) -> list[tuple[str, int, str]]:
    """The (file, line, function) of each frame, the outermost first."""
    return [(file, int(line), name.strip()) for file, line, name in _FRAME.findall(stack_trace)]


def source_of(node: Node) -> str:
    """`file:line` of the innermost user frame, or "" where torch recorded none."""
    found = frames(node.meta.get("stack_trace") or "")
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""
