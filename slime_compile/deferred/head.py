"""Finds the head of a model, and checks the requirements for deferring it.

Entry points: `head_of`, and `method_of`, the method to replace. The module computes
`F.linear(hidden, weight, bias)` and nothing else, or has a forward of its own with such maps in it (`own_forward.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from slime_compile.deferred import column_parallel, own_forward

__all__ = ["head_of", "method_of"]

_NAMES = ("lm_head", "output_layer")
_WRAPPERS = ("module", "_orig_mod", "model")


def head_of(model: nn.Module, head: nn.Module | str | None) -> tuple[str, nn.Module]:
    """The name and the module.

    Args:
        model: a model, wrapped or not.
        head: the module, or its name as `model.get_submodule` takes it; None looks for it.

    Raises:
        TypeError: `model` is no module, or `head` none of the above.
        ValueError: there is no such module, or it computes something else than a linear map.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if not (head is None or isinstance(head, str | nn.Module)):
        raise TypeError(f"`head` must be a module or its name, got {type(head).__name__}")
    found = _named(model, head) if isinstance(head, str) else head
    if found is None:
        found = _found(model)
    name = next((name for name, each in model.named_modules() if each is found), None)
    if name is None:
        raise ValueError(
            f"`head` must be a module of `model`, got a module outside {type(model).__name__}: {_brief(found)}"
        )
    _check(name or "the model", found)
    return name or type(found).__name__, found


def _named(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"`head` must name a module of `model`, got {name!r}; {_candidates(model)}"
        ) from None


def _found(model: nn.Module) -> nn.Module:
    for each in _unwrapped(model):
        getter = getattr(each, "get_output_embeddings", None)
        made = getter() if callable(getter) else None
        if isinstance(made, nn.Module):
            return made
        for name in _NAMES:
            made = getattr(each, name, None)
            if isinstance(made, nn.Module):
                return made
    raise ValueError(
        f"`model` must have get_output_embeddings() or a module {' or '.join(_NAMES)}, got {type(model).__name__}; "
        f"give `head`: {_candidates(model)}"
    )


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and the models inside the wrappers of DDP, torch.compile and PEFT."""
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inner = [getattr(each, name, None) for name in _WRAPPERS]
        waiting += [one for one in inner if isinstance(one, nn.Module)]


def _candidates(model: nn.Module) -> str:
    linear = [(m.out_features, n) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        return "it has no torch.nn.Linear"
    widest = sorted(linear, reverse=True)[:3]
    return "its widest linear modules are " + ", ".join(f"{n!r} ({v:,} wide)" for v, n in widest)


def method_of(head: nn.Module) -> str:
    """The method that computes the logits."""
    return column_parallel.METHOD if column_parallel.is_column_parallel(head) else "forward"


def _check(name: str, head: nn.Module) -> None:
    own: Any = vars(head).get(method_of(head))
    if own is not None:
        from slime_compile.deferred.handle import DeferHandle

        if isinstance(own, DeferHandle):
            raise ValueError(
                f"`head` must not be deferred already, got {name}; call remove() on the handle of the first time"
            )
        raise ValueError(
            f"`head` must have its class's own forward, got {name}, with its forward replaced by "
            f"{getattr(own, '__qualname__', own)!r} (accelerate's device hooks do); defer the logits before that is done"
        )
    if method_of(head) == column_parallel.METHOD or type(head).forward is nn.Linear.forward:
        return
    if own_forward.width_of(head) is None or _is_opaque(head):
        raise ValueError(
            f"`head` must end in a linear map to the vocabulary, got {name}: {_brief(head)} with "
            f"its own forward; {_remedy(head)}"
        )


def _brief(module: Any) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_opaque(head: nn.Module) -> bool:
    """Whether its matmul is an operator or autograd.Function of its library."""
    homes = {
        kind.__module__.split(".")[0] for each in head.modules() for kind in type(each).__mro__
    }
    return not homes.isdisjoint(("bitsandbytes", "torchao", "transformer_engine"))


def _remedy(head: nn.Module) -> str:
    if _is_opaque(head):
        return (
            "its matmul is one operator with a quantised weight: exclude the head from quantisation"
        )
    return "compute the logits inside the compiled loss, or use slime_compile.linear_log_probs_and_entropy"
