"""`enable()` checks its target: the package's release, and the arguments of the functions to replace.

Entry point: `known`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["known"]

_log = logging.getLogger(__name__)


def known(
    package: str,
    release: str | None,
    home: str,
    arguments: Mapping[str, Sequence[str]],
    instead: str,
) -> Any | None:
    """The module `home` of `package`, if it is what an integration was written for; else one warning, and None.

    Args:
        package: its name in the package index.
        release: how its version must begin, such as "1.16."; None for one that is in no index.
        arguments: of functions in `home`, by their dotted names.
        instead: what the user can do where it is another one.

    Raises:
        ImportError: the package is not installed, or what `home` imports.
    """
    version = None if release is None else importlib.metadata.version(package)
    if release is not None and version is not None and not version.startswith(release):
        _tell(f"{package} {version}", f"its version must be {release}*", instead)
        return None
    module = importlib.import_module(home)
    taken = {name: _arguments_of(module, name) for name in arguments}
    if taken == arguments:
        return module
    wanted = f"{home} must have functions with the arguments {dict(arguments)}, got {taken}"
    _tell(f"{package} {version}" if version else f"this {package}", wanted, instead)
    return None


def _arguments_of(module: Any, name: str) -> list[str]:
    """None where there is no such function."""
    try:
        function = operator.attrgetter(name)(module)
    except AttributeError:
        return []
    return list(inspect.signature(function).parameters)


@functools.cache
def _tell(what: str, wanted: str, instead: str) -> None:
    _log.warning("%s is not known here: %s; nothing was changed. %s", what, wanted, instead)
