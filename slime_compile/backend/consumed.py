"""Another operation needs logits `consume_logits=True` may overwrite: it gets an error, or the logits stay.

Entry points: `explain_errors`, `watching_hooks`. Autograd watches what it saved and raises "one of the variables needed
for gradient computation has been modified by an inplace operation", of an operation that may be any of the model's.
Nothing tells autograd what to say, so its error is completed on its way out of the engine.

What saved-tensor hooks keep (a checkpoint, `save_on_cpu`) autograd does not watch: another operation would read the
gradient, silently. So what was called under hooks decides from then on as "auto" does: by counting who has the logits.
"""

import functools
from collections.abc import Callable
from typing import Any

from slime_compile import ops
from slime_compile.report.process import reports
from slime_compile.report.record import Record
from slime_compile.torch_private import Variable, saved_tensors_hooks_at_work

_MODIFIED = "has been modified by an inplace operation"
_OPTION = "options={'consume_logits': True}"


class _Explains:
    """In front of a class of autograd's engines."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_backward(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            _complete(error)
            raise


def explain_errors() -> None:
    """From now on, in all of this process; once is enough."""
    engine: type[Any] = type(Variable._execution_engine)
    if not issubclass(engine, _Explains):
        Variable._execution_engine = type("Engine", (_Explains, engine), {})()


def _complete(error: RuntimeError) -> None:
    said = str(error)
    if (
        _MODIFIED not in said or _OPTION in said
    ):  # not of this kind, or a backward inside a backward told already
        return
    lines = _consumed_at()
    if lines:
        error.args = (
            f"{said}\nIf these are logits, or a view of them: {_OPTION} let the gradient at {', '.join(lines)} "
            "overwrite them, and another operation needs their values in backward. Compile without that option: "
            "logits are then overwritten only if nothing else, autograd included, references them.",
        )


def _consumed_at() -> list[str]:
    """The user's lines whose gradients have been written over logits of a caller's that allowed it."""
    placements = [p for r in reports() for graph in r.graphs for p in graph.placements]
    written = [p.source or "an unknown line" for p in placements if p.owner == "caller" and p.over]
    return list(dict.fromkeys(written))


def watching_hooks(compiled: Callable[..., Any], record: Record) -> Callable[..., Any]:
    """`compiled`, which remembers that it was called under hooks for what autograd saves."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        if saved_tensors_hooks_at_work(True) is not None:
            ops.under_hooks.update(record.cached_as)  # known once loaded code has been called
        return outputs

    return call
