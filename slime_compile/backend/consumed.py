"""Another operation needs logits `consume_logits=True` may overwrite: it gets an error, or the logits stay.

Entry points: `explain_errors`, `watching_hooks`. Autograd checks its saved tensors and raises "one of the variables
needed for gradient computation has been modified by an inplace operation", for any operation of the model. Its text
cannot be changed inside of autograd, so the error is completed on its way out of the engine.

Autograd does not check tensors kept by saved-tensor hooks (a checkpoint, `save_on_cpu`): another operation would
silently read the gradient. So a function called under hooks decides like "auto" from then on: by counting references to
the logits.
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
    ):  # another error, or one already completed by a backward inside this backward
        return
    lines = _consumed_at()
    if lines:
        error.args = (
            f"{said}\nIf these are logits, or a view of them: {_OPTION} let the gradient at {', '.join(lines)} "
            "overwrite them, and another operation needs their values in backward. Compile without that option: "
            "logits are then overwritten only if nothing else, autograd included, references them.",
        )


def _consumed_at() -> list[str]:
    """The user's lines whose gradients have overwritten logits passed in with consume_logits=True."""
    placements = [p for r in reports() for graph in r.graphs for p in graph.placements]
    written = [p.source or "an unknown line" for p in placements if p.owner == "caller" and p.over]
    return list(dict.fromkeys(written))


def watching_hooks(compiled: Callable[..., Any], record: Record) -> Callable[..., Any]:
    """`compiled`, recording calls under hooks for autograd's saved tensors."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        outputs = compiled(*args)
        if saved_tensors_hooks_at_work(True) is not None:
            ops.under_hooks.update(record.cached_as)  # known once loaded code has been called
        return outputs

    return call
