"""Our entry in torch's table of backends; several threads may add it at the same time.

NOTE [First use from several threads]
`torch.compile(backend="slime_fused")` looks into a table of loaded backends. If the name is missing, torch loads the
entry point and adds it to the table; a name already there is then an error. Nothing locks the table. So several threads
using the backend for the first time all wait for one import of ours, and all but the first fail with "duplicate name"
(torch 2.11 to 2.13). Our code runs before they go on only during this import: it makes the table answer that our name
is missing, so that adding the same function again is no error.
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
