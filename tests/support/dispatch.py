"""What operators do in a `with` block: the storages that they make, how often they are called."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Size of every storage that an operator made: in bytes, and in elements of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []
        self.elements: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = tree_leaves((args, kwargs))
        known = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.nbytes.append(t.untyped_storage().nbytes())
                self.elements.append(self.nbytes[-1] // t.itemsize)
        return out


class Calls(TorchDispatchMode):
    """Counts the operators of some namespaces, in the forward and, on CPU, the backward."""

    def __init__(self, *namespaces: str) -> None:
        super().__init__()
        self.namespaces = namespaces
        self.calls: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.calls.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in self.namespaces:
            self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Collectives(Calls):
    def __init__(self) -> None:
        super().__init__("c10d", "_c10d_functional")
