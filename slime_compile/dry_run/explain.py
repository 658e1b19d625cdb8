"""A dry run: the effect of the backend on a function, without code generation and without computing anything.

Entry point: `explain(fn, **options)(*args, **kwargs)`. Dynamo traces the function, AOTAutograd makes the joint
graph, our passes rewrite it; tensors are fake, so sizes may be those of production. Python code between graphs does
run, on fake tensors: if it needs a value (`.item()`, `print(loss)`), the dry run ends and says so. Its changes are
undone: `dry_run/untouched.py`.

Torch's caches are not used, and the function's own compiled code stays as it is: a copy of its code object is traced.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from slime_compile.backend.identity import new_record
from slime_compile.backend.interpreted import compile_interpreted
from slime_compile.backend.options import Options
from slime_compile.backend.passes import BACKWARD_WITH_FORWARD, prepare
from slime_compile.backend.returned import with_own_gradient
from slime_compile.dry_run.own_code import check_callable, with_own_code, without_grad_warnings
from slime_compile.dry_run.untouched import untouched
from slime_compile.dynamo.frames import Frame, Watch, graph_break, summary, with_restarts
from slime_compile.report.record import Record
from slime_compile.report.values import Report
from slime_compile.torch_private import FakeTensorMode, ShapeEnv, functorch_config


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., Report]:
    """The report of `torch.compile(fn, backend="slime_fused", options=options)` for a call, without computing anything.

    Args:
        fn: a function, method or module, compiled or not.
        options: as in `torch.compile(options=...)`; `inner` has no meaning here.

    Raises:
        TypeError: `fn` is not a function, but for example the result of one.
        RuntimeError: an unknown option.

    Examples:
        >>> print(slime_compile.explain(loss_fn)(logits, target))
        >>> slime_compile.explain(loss_fn, consume_logits=True)(logits, target).assert_fused()
    """
    check_callable(fn, "explain(fn)(...)")
    chosen = dataclasses.replace(Options.parse(options), check_ranks=False)

    def dry_run(*args: Any, **kwargs: Any) -> Report:
        return DryRun(chosen).run(fn, args, kwargs)

    return dry_run


class DryRun:
    """One call of a function, traced on fake tensors; `observe` sees each graph before the fusing pass."""

    def __init__(self, options: Options, observe: Callable[[Graph], None] = lambda graph: None):
        self.options = options
        self.observe = observe
        self.records: list[Record] = []
        self.breaks: list[Frame] = []

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Report:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        traced = torch.compile(with_own_code(fn), backend=self.slime_fused, dynamic=False)
        notes: tuple[str, ...] = ()
        with Watch() as watch, without_grad_warnings(), untouched(mode, fn, args, kwargs) as kept:
            self.kept = kept
            fake_args, fake_kwargs = kept.fake((tuple(args), kwargs))
            try:
                with kept.nothing_real():
                    contextvars.copy_context().run(traced, *fake_args, **fake_kwargs)
            except Exception as error:
                if self.options.strict:
                    raise
                notes = (_ended(error),)
        return Report(
            graphs=tuple(r.result() for r in self.records),
            breaks=with_restarts(self.breaks, watch.breaks),
            python_frames=watch.python_frames,
            notes=notes,
        )

    def slime_fused(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles as `inner="aot_eager"` does, for the report alone; Dynamo's graph itself runs, on fake tensors.

        Dynamo's messages take the backend's name from this function.
        """
        self.breaks += filter(None, [graph_break(gm)])
        record = new_record(gm, example_inputs, self.options)
        self.records.append(record)
        with record.compiling(), functorch_config.patch(BACKWARD_WITH_FORWARD):
            returned = prepare(gm, self.options, record)
            compile_interpreted(gm, example_inputs, self.options, record, self.observe)
        run, kept = with_own_gradient(gm.forward, returned), self.kept
        return lambda *inputs: run(*kept.fake(inputs))


def _ended(error: Exception) -> str:
    cause = (
        getattr(error, "inner_exception", None) or error.__cause__ or error
    )  # under the backend's name
    return f"the dry run ended here; the rest of the function is not in this report: {type(cause).__name__}: {summary(str(cause))}"
