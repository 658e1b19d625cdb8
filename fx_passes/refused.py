"""`Refused`: why a value, a head, a loop or a gradient stays as it was.

It is raised before anything is edited. Exception: a pass that it leaves has failed, and its runner restores the graph.
"""

from __future__ import annotations

from torch.fx import Node


class Refused(Exception):
    """The reason, which the user reads; and the node at which it was found, where the handler does not know it."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node
