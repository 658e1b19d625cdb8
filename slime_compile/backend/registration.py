"""Our entry in torch's table of backends; several threads may add it at the same time.

NOTE [First use from several threads]
`torch.compile(backend="slime_fused")` looks into a table of loaded backends; where it finds none, it loads the entry
point, and enters what it got, which is an error if the name is there by then. Nothing locks the table. So threads that
use the backend for the first time together all wait for one import of ours, and all but the first fail with "duplicate
name" (torch 2.11 to 2.13). The import is the only moment at which our code runs before they go on: it lets the table
say that our name is not in it, so that entering the same function again is no error.
"""

from typing import Any

from slime_compile.torch_private import backend_registry

NAME = "slime_fused"


class _Table(dict[str, Any]):
    def __contains__(self, name: object) -> bool:
        return name != NAME and super().__contains__(name)


def allow_again() -> None:
    """Entering our backend a second time is no error any more."""
    if not isinstance(backend_registry._COMPILER_FNS, _Table):
        backend_registry._COMPILER_FNS = _Table(backend_registry._COMPILER_FNS)
