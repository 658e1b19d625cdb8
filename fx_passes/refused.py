"""`Refused`: the reason for leaving a value, a head, a loop or a gradient unchanged.

It is raised before any edit. Exception: if a pass raises it, the pass has failed, and its runner restores the graph.
"""

from __future__ import annotations

from torch.fx import Node


class Refused(Exception):
    """The reason, for the user; and the node, if the handler does not know it."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node
