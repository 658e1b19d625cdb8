"""A dry run: what the backend would do to a function, without code generation and without computing anything.

Entry point: `explain(fn, **options)(*args, **kwargs)`. Dynamo traces the function, AOTAutograd makes the joint
graph, our passes rewrite it; tensors are fake, so sizes may be those of production. Python code between graphs does
run, on fake tensors: where it asks for a value (`.item()`, `print(loss)`), the dry run ends and says so.

Torch's caches are not used, and the function's own compiled code stays as it is: a copy of its code object is traced.
"""

import contextlib
import dataclasses
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from slime_compile import backend, report
from slime_compile.backend.options import Options
from slime_compile.dynamo.frames import Frame, Watch, summary


def explain(fn: Callable[..., Any], **options: Any) -> Callable[..., report.Report]:
    """What `torch.compile(fn, backend="slime_fused", options=options)` would do to a call.

    Args:
        fn: a function, method or module, compiled or not.
        options: as in `torch.compile(options=...)`; `inner` has no meaning here.

    Example:
        >>> print(slime_compile.explain(loss_fn)(logits, target))
        >>> slime_compile.explain(loss_fn, consume_logits=True)(logits, target).assert_fused()
    """
    chosen = dataclasses.replace(Options.parse(options), check_ranks=False)

    def dry_run(*args: Any, **kwargs: Any) -> report.Report:
        return _DryRun(chosen).run(fn, args, kwargs)

    return dry_run


class _DryRun:
    def __init__(self, options: Options):
        self.options = options
        self.records: list[report.Record] = []
        self.breaks: list[Frame] = []

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> report.Report:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        traced = torch.compile(_with_own_code(fn), backend=self._backend, dynamic=False)
        notes: tuple[str, ...] = ()
        with Watch() as watch, torch.random.fork_rng(devices=[]), _without_grad_warnings():
            fake_args, fake_kwargs = _faked(mode, (tuple(args), kwargs))
            try:
                with mode:
                    traced(*fake_args, **fake_kwargs)
            except Exception as error:
                if self.options.strict:
                    raise
                notes = (_ended(error),)
        return report.Report(
            graphs=tuple(r.result() for r in self.records),
            breaks=_with_restarts(self.breaks, watch.breaks),
            python_frames=watch.python_frames,
            notes=notes,
        )

    def _backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles as `inner="aot_eager"` does, for the report alone; what runs is Dynamo's graph, on fake tensors."""
        self._note_break(gm)
        record = backend.new_record(gm, example_inputs, self.options)
        self.records.append(record)
        backend.prepare(gm, record)
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            backend.compile_eager(gm, example_inputs, self.options, record)
        return gm.forward

    def _note_break(self, gm: GraphModule) -> None:
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        place = reason.user_stack[-1] if reason.user_stack else None
        self.breaks.append(
            Frame.found(
                place.name if place else "a frame",
                f"{place.filename}:{place.lineno}" if place else "",
                summary(str(reason.reason)),
            )
        )


def _faked(mode: FakeTensorMode, values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), values)


@contextlib.contextmanager
def _without_grad_warnings() -> Iterator[None]:
    """Torch looks at `.grad` of every tensor that it fakes, leaf or not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


def _with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` over a copy of its code object, to which Dynamo ties what it compiles."""
    plain = torch._dynamo.eval_frame.innermost_fn(fn)
    if isinstance(plain, torch.nn.Module):
        plain = plain.forward
    if inspect.ismethod(plain):
        return types.MethodType(_copied(plain.__func__), plain.__self__)
    return _copied(plain) if inspect.isfunction(plain) else plain


def _copied(fn: Any) -> types.FunctionType:
    made = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__module__ = fn.__module__
    return made


def _ended(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"the dry run ended here, what follows is not in this report: {type(cause).__name__}: {summary(str(cause))}"


def _with_restarts(breaks: Sequence[Frame], restarts: Sequence[Frame]) -> tuple[Frame, ...]:
    """Graph breaks after which a graph ended, with their line, and those that Dynamo only started anew for."""
    told = {(f.name, f.reason) for f in breaks}
    return tuple(dict.fromkeys([*breaks, *(f for f in restarts if (f.name, f.reason) not in told)]))
