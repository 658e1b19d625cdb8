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
    """The module `home` of `package`, if an integration was written for this version; otherwise one warning, and None.

    Args:
        package: its name in the package index.
        release: start of its version, such as "1.16."; None for a package in no index.
        arguments: of functions in `home`, by their dotted names.
        instead: the user's remedy with another version.

    Raises:
        ImportError: the package, or an import of `home`, is not installed.
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
    """None if there is no such function."""
    try:
        function = operator.attrgetter(name)(module)
    except AttributeError:
        return []
    return list(inspect.signature(function).parameters)


@functools.cache
def _tell(what: str, wanted: str, instead: str) -> None:
    _log.warning("%s is not known here: %s; nothing was changed. %s", what, wanted, instead)
