"""The strides that the user's own code relies on.

Entry point: `keep_layouts`, once a walk is over and all readers are known.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fx_passes.graph.emit import Emitter, viewable
from fx_passes.graph.facts import same_layout, shape_of, value
from fx_passes.graph.operators import VIEWS, Target
from fx_passes.graph.order import computed
from fx_passes.walk.account import Account

aten = torch.ops.aten

_CUT_ANEW: set[Target] = {aten.view.default, aten._unsafe_view.default}
_READ_MEMORY: set[Target] = {
    aten.as_strided.default,
    aten.as_strided_scatter.default,
    aten.view.dtype,
}

# NOTE [Strides of what takes a value's place]
# An operator of a turned tensor gives a turned tensor in eager code, so the program may turn it back and view it, or
# read its memory by strides. What takes its place has the strides that the rewrite gives it. Most readers do not ask;
# for those that do, it is copied into the strides that there were. Strides with gaps or repeats, read by `as_strided`,
# cannot be given to a copy: the pass fails, and the graph stays as it was.


def keep_layouts(emitter: Emitter, account: Account) -> None:
    """Copies of the new values, in the old strides, where a reader depends on them."""
    turned = [pair for pair in account.replacements.items() if _is_turned(*pair)]
    live = computed(emitter.graph, account.replacements) if turned else set()
    for old, new in turned:
        unreadable = list(_unreadable(emitter, old, new, live)) if new in live else []
        if not unreadable:
            continue
        emitter.origin = old
        copy = emitter.laid_out_as(new, old)
        by_strides = [reader.target for reader in unreadable if reader.target in _READ_MEMORY]
        if by_strides and not same_layout(value(old), value(copy)):
            raise NotImplementedError(f"{by_strides[0]} of a value with gaps in its memory")
        account.replacements[old] = copy
        if new in account.leaving:
            account.leaving[copy] = account.leaving.pop(new)


def _is_turned(old: Node, new: Node) -> bool:
    fake = value(old)
    return isinstance(fake, torch.Tensor) and not same_layout(fake, value(new))


def _unreadable(emitter: Emitter, old: Node, new: Node, live: set[Node]) -> Iterator[Node]:
    """Readers of `old`, through views, that cannot read `new` as they are."""
    waiting: list[tuple[Node, Any]] = [(old, value(new))]
    while waiting:
        node, fake = waiting.pop()
        for user in node.users:
            if user not in live:
                continue
            if user.target in _READ_MEMORY or (
                user.target in _CUT_ANEW and not viewable(fake, shape_of(user))
            ):
                yield user
            elif user.target in VIEWS or user.target is operator.getitem:
                waiting.append((user, _seen_through(emitter, user, node, fake)))


def _seen_through(emitter: Emitter, view: Node, node: Node, fake: Any) -> Any:
    """What `view` shows where `node` is `fake`."""
    with emitter.fake_mode:
        args, kwargs = map_arg((view.args, view.kwargs), lambda n: fake if n is node else value(n))
        return view.target(*args, **kwargs)  # type: ignore[operator]
