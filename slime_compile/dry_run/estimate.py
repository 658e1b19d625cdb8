"""The peak memory of a loss at any size, without that memory and without a GPU.

Entry point: `estimate_peak(fn, *args, kwargs=...)`. The function is compiled as with `inner="aot_eager"`, over fake
tensors: its forward and backward graphs run operator by operator, every value lives until its last use, and torch's
`MemTracker` adds up the live storages. Nothing is computed.

Non-leaf logits count as referenced by the call alone, as `consume_logits="auto"` finds them in a training step.
Counted too: the current chunk of logits in an operator over chunks. Not counted: the row operators' own buffers (on the
CPU without a compiler chunks of rows, a few MiB a thread), and the allocator's rounding. If inductor computes
vocabulary-sized element-wise values, the estimate is an upper bound: inductor stores fewer of them than their graph
has.
"""

import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from slime_compile.backend.identity import new_record
from slime_compile.backend.interpreted import compile_interpreted
from slime_compile.backend.options import Options
from slime_compile.backend.passes import BACKWARD_WITH_FORWARD, prepare
from slime_compile.backend.returned import without_added
from slime_compile.dry_run.own_code import check_callable, with_own_code, without_grad_warnings
from slime_compile.dry_run.scratch import Scratch
from slime_compile.dry_run.untouched import Untouched, untouched
from slime_compile.dynamo.frames import Watch
from slime_compile.report.text import size
from slime_compile.torch_private import (
    FakeTensorMode,
    MemTracker,
    ShapeEnv,
    functorch_config,
    innermost_fn,
)


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate:
    """Live bytes of tensors, on the device with the most of them.

    Attributes:
        inputs_bytes: tensors among the arguments, and parameters of a module.
        forward_bytes: most during forward, inputs included.
        peak_bytes: most during forward and backward, inputs and the gradients of the inputs included.
    """

    inputs_bytes: int
    forward_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"estimated peak {size(self.peak_bytes)} (forward {size(self.forward_bytes)}, "
            f"inputs {size(self.inputs_bytes)})"
        )

    def __repr__(self) -> str:
        return f"<Estimate: {self}>"


def estimate_peak(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Estimate:
    """The peak memory of `torch.compile(fn, backend="slime_fused", options=options)(*args, **kwargs)` and its backward.

    Exception: an upper bound if inductor computes a part of the loss element by element, because the estimate counts
    these values as tensors.

    Args:
        fn: a function or module, as for `slime_compile.explain`. Backward runs from all outputs requiring grad, to
            the arguments requiring grad and to the parameters `fn` reads, of a module or captured by a closure.
            Exception: logits from a matmul in `fn`, returned next to their loss, start no backward.
            Under `torch.no_grad()` backward is left out.
        args: as in the real call. Fake tensors (made under `FakeTensorMode`) and "meta" tensors may have any size;
            only shapes and dtypes of real tensors are read. "meta" tensors, also inside `fn`, stand for tensors on
            the device of the other arguments, or on the CPU.
        kwargs: keyword arguments of the same call.
        options: as in `torch.compile(options=...)`; `inner` has no meaning here.

    Raises:
        RuntimeError: an unknown option; `fn` needs a value of a fake tensor (`.item()`); or `fn` returns no tensor
            requiring grad although an argument or a parameter does.

    Examples:
        >>> with torch._subclasses.FakeTensorMode():
        ...     logits = torch.empty(205_280, 76_032, requires_grad=True)
        ...     target = torch.empty(205_280, dtype=torch.int64)
        >>> print(slime_compile.estimate_peak(loss_fn, logits, target))
    """
    check_callable(fn, "estimate_peak(fn, ...)")
    try:
        chosen = Options.parse(options)
    except RuntimeError as error:
        raise RuntimeError(
            f"{error}; keyword arguments of fn are given as kwargs={{...}}"
        ) from None
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with Watch(), without_grad_warnings(), untouched(mode, fn, args, kwargs) as kept:
        given = kept.fake((tuple(args), dict(kwargs or {})))
        return contextvars.copy_context().run(_estimated, fn, kept, given, chosen)


def _estimated(fn: Callable[..., Any], kept: Untouched, given: Any, chosen: Options) -> Estimate:
    """Of a call with fake arguments."""
    tracker, captured = MemTracker(), _Captured(kept)

    def compile_tracked(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        record = new_record(gm, example_inputs, chosen)
        returned = prepare(gm, chosen, record)
        with functorch_config.patch(BACKWARD_WITH_FORWARD):
            compiled = compile_interpreted(gm, example_inputs, chosen, record)

        def tracked(*inputs: Any) -> Any:
            fakes = kept.fake(inputs)
            tracker.track_external(*captured.add(inputs, fakes))
            with tracker, Scratch():
                return without_added(compiled(*fakes), returned)

        return tracked

    run = torch.compile(with_own_code(fn), backend=compile_tracked, dynamic=False)
    with kept.nothing_real():
        args, kwargs = given
        parameters = kept.fake(_parameters(fn))
        held = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        captured.known.update(map(_storage, [*held, *parameters]))
        tracker.track_external(*held, *parameters)
        inputs = _total(tracker, "current")
        wanted = [get_gradient_edge(t) for t in held if t.requires_grad]  # before it is changed
        outputs = run(*args, **kwargs)
        inputs += sum(t.untyped_storage().nbytes() for t in captured.tensors)
        forward = max(inputs, _total(tracker, "peak"))
        if torch.is_grad_enabled():
            roots = _roots(outputs, [*held, *parameters, *captured.tensors])
            with tracker, Scratch():
                gradients = _gradients(roots, [*wanted, *captured.edges])
            del gradients
        return Estimate(inputs, forward, max(forward, _total(tracker, "peak")))


class _Captured:
    """The user's tensors read by graphs and not among the arguments, as fakes, one per storage."""

    def __init__(self, kept: Untouched) -> None:
        self._kept = kept
        self.tensors: list[Tensor] = []
        self.edges: list[GradientEdge] = []
        self.known: set[int] = set()

    def add(self, inputs: Sequence[Any], fakes: Sequence[Any]) -> list[Tensor]:
        """The new ones among a graph's inputs. Arguments are fake already, and values between graphs are no leaves."""
        pairs = zip(inputs, fakes, strict=True)
        users = [fake for value, fake in pairs if self._is_users(value, fake)]
        self.edges += [get_gradient_edge(t) for t in users if t.requires_grad and not t.is_leaf]
        new = []
        for fake in users:
            if _storage(fake) not in self.known:
                self.known.add(_storage(fake))
                new.append(fake)
        self.tensors += new
        return new

    def _is_users(self, value: Any, fake: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        leaf = value.is_leaf and value.requires_grad
        return leaf or value is not fake or self._kept.is_moved(value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _roots(outputs: Any, held: Sequence[Tensor]) -> list[Tensor]:
    """The tensors backward starts from. None is an error, because backward would be skipped silently."""
    found = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if not found and any(t.requires_grad for t in held):
        raise RuntimeError(
            "fn must return the tensors backward starts from, or tuples, lists and dicts of them, since an argument "
            f"or a parameter requires grad; it returned {type(outputs).__name__} without a tensor that requires grad. "
            "Return the loss, without calling backward; for forward alone, call estimate_peak under torch.no_grad()"
        )
    return found


def _gradients(roots: Sequence[Tensor], given: list[GradientEdge]) -> Sequence[Tensor | None]:
    """The gradients of the given edges, and of every other leaf below the roots."""
    wanted = [*given, *map(get_gradient_edge, _leaves(roots, given))]
    if not roots or not wanted:
        return ()
    ones = [torch.ones_like(root) for root in roots]
    return cast(
        Sequence[Tensor | None], torch.autograd.grad(roots, wanted, ones, allow_unused=True)
    )


def _leaves(roots: Sequence[Tensor], given: Sequence[GradientEdge]) -> list[Tensor]:
    """The leaves below `roots`, not looking behind the given edges."""
    waiting: list[Any] = [get_gradient_edge(root).node for root in roots]
    seen = {None, *(edge.node for edge in given)}
    found = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # a node accumulating a gradient
            found.append(node.variable)
        waiting += [below for below, _ in node.next_functions]
    return found


def _parameters(fn: Callable[..., Any]) -> list[Tensor]:
    plain = innermost_fn(fn)
    return list(plain.parameters()) if isinstance(plain, torch.nn.Module) else []


def _total(tracker: MemTracker, kind: str) -> int:
    """On the device with the most."""
    snapshot = tracker.get_tracker_snapshot(kind)
    return max((int(parts["Total"]) for parts in snapshot.values()), default=0)
