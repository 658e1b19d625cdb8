"""Do other references to a tensor exist? An operator asks in backward, before it overwrites the tensor.

Entry point: `why_not(x, frame)`. `add_path` registers other callers of the operator than generated code.

NOTE [How an operator counts the references to a tensor]
Code that can still read a tensor after backward owns a reference: to the Python object (a variable of any frame, a
container, a closure, NumPy's array), to the C++ tensor (saved by another node of autograd, a view's base), to the
storage (a view, a detached alias, DLPack), or to the storage's Python object. Each of the four is counted. A view owns
its base (from torch 2.15 on, a tensor saved by a compiled function may be a view): references to the base, in Python
and C++, are counted, too. The caller of the operator and the call itself own some references. Their number depends on
Python, torch and the caller's code. So it is measured, once per process and path, for views and for other tensors: the
operator is called with unreferenced tensors, through the same code, and then with each kind of reference, which must
show. Counts equal to those of an unreferenced tensor mean: no other reference.

That is right only if the code at hand owns at least as many references as the measured code. Measured is the minimum:
one local name. Whether the calling frame has exactly one name for the tensor is looked up once for each calling
instruction; if that is impossible (a C++ caller, an unknown frame), nothing is overwritten.

No count shows a retained graph, memory from outside of torch or mapped by another process, a leaf, a weak reference, or
a mode that sees every operator's arguments: each has its own check. Outside a backward of autograd's engine (compiled
autograd among them) the answer is always: another reference may exist.
"""

import inspect
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_compile.torch_private import (
    OpOverload,
    dispatch_modes,
    function_modes,
    graph_is_kept,
    storage_use_count,
)

__all__ = ["Counts", "add_path", "counts", "keeps_graph", "why_not"]


class Counts(NamedTuple):
    """References to a tensor, from `counts`; a storage has one Python object at most.

    The last two: references to the base of a view.
    """

    python: int
    tensor: int
    storage: int
    storage_object: int
    base_python: int = 0
    base_tensor: int = 0

    @property
    def of_view(self) -> bool:
        return self.base_tensor > 0


def counts(python: int, x: Tensor) -> Counts:
    """All of them, `python` being `sys.getrefcount(x)` of the kernel's own parameter.

    How many references a call of a Python function owns is not the same every time: Python 3.11 and later run such
    calls without a C call between, until Dynamo or another package, in any thread, has installed a frame evaluator.
    """
    storage = x.untyped_storage()
    own = Counts(
        python,
        x._use_count(),
        storage_use_count(storage._cdata),
        sys.getrefcount(storage),
    )
    base = x._base
    if base is None:
        return own
    return own._replace(base_python=sys.getrefcount(base), base_tensor=base._use_count())


def keeps_graph() -> bool:
    """Backward may run again (`retain_graph`, `create_graph`), or none of autograd's engine is running."""
    return bool(graph_is_kept())


def why_not(x: Tensor, seen: Counts, kernel: FrameType) -> str:
    """Why `x` may not be overwritten, or "" if nothing else references it.

    Args:
        seen: the `counts`, before anything else was done.
        kernel: the frame of the operator's kernel.
    """
    if keeps_graph():
        return RETAINED
    known = _cannot_be_ours(x) or _watched()
    if known:
        return known
    path = _path(kernel, x)
    if path is None:
        return UNCLEAR + "the calling code is not known"
    least = path.least(seen.of_view)
    if isinstance(least, str):
        return UNCLEAR + least
    return _more(seen, least)


PYTHON = "Python references the logits"
MEMORY = "a view or an alias references the logits"
RETAINED = "the graph is retained, or compiled autograd runs it"
UNCLEAR = "references to the logits cannot be counted: "
"""Start of a reason for failed counting, in contrast to found references."""


def _cannot_be_ours(x: Tensor) -> str:
    """Reasons that no count shows."""
    if type(x) is not Tensor or x.layout is not torch.strided:
        return f"the logits are a {type(x).__name__}"
    owner = x if x._base is None else x._base
    if owner.requires_grad and owner.is_leaf:
        return f"the logits are {'' if owner is x else 'a view of '}a leaf that requires grad"
    storage = x.untyped_storage()
    if any(map(weakref.getweakrefcount, (x, owner, storage))):
        return "a weak reference leads to the logits"
    if not storage.resizable():
        return "the logits' memory is not torch's own (NumPy's, DLPack's, a CUDA graph's)"
    if x.device.type == "cpu" and storage.is_shared():
        return "other processes share the logits' memory"
    return ""


def _watched() -> str:
    """Modes see the arguments of every operator, and may keep them."""
    if dispatch_modes():
        return "a TorchDispatchMode sees all operators"
    if function_modes():
        return "a TorchFunctionMode (torch.set_default_device is one) sees all operators"
    return ""


def _more(seen: Counts, least: Counts) -> str:
    if seen == least:
        return ""
    holders = [name for name, s, n in zip(Counts._fields, seen, least, strict=True) if s > n]
    if {*holders} - {"python", "tensor"}:
        return MEMORY
    if "python" in holders:
        return PYTHON
    if holders:
        return "autograd or other C++ code references the logits"
    return UNCLEAR + f"fewer references than an unreferenced tensor has ({seen}, {least})"


# ---- the calling code ---------------------------------------------------------------------------------------------


class _Path:
    """Code that calls the operator.

    Attributes:
        names: references to the tensor in a frame of it.
        call: calls the operator with the tensor in the list, and empties the list, as that code would.
    """

    def __init__(self, names: Callable[[FrameType, Tensor], int], call: Callable[[list[Any]], Any]):
        self.names = names
        self.call = call
        self._least: dict[bool, Counts | str] = {}
        self._lock = threading.Lock()

    def least(self, of_view: bool) -> Counts | str:
        """The counts of an unreferenced tensor, or why there is no clear answer; measured at the first call.

        Args:
            of_view: of a view of an otherwise unreferenced tensor, instead.
        """
        with self._lock:
            if of_view not in self._least:
                if sys.gettrace() or sys.getprofile():
                    return "a debugger or profiler traces this thread"  # and would be measured, too
                self._least[of_view] = _measured(self.call, of_view)
            return self._least[of_view]


_CALL = getattr(OpOverload.__call__, "__code__", None)
_paths: dict[CodeType, _Path] = {}
_sites: dict[tuple[int, int], tuple[CodeType, bool]] = {}
"""Calling places, by the code's id and the instruction: the code, kept alive, and whether it has one name."""


def add_path(
    code: CodeType, names: Callable[[FrameType, Tensor], int], call: Callable[[list[Any]], Any]
) -> None:
    """Registers other code than generated code, with its operands in local variables, one name each.

    Args:
        code: of the frames that call the operator.
        names: references to a tensor in such a frame.
        call: calls `row_grad_over` as such a frame does; takes the tensor in a list, and empties it.
    """
    _paths.setdefault(code, _Path(names, call))


def _path(kernel: FrameType, x: Tensor) -> _Path | None:
    """The path of the operator's calling frame, if it has exactly one name for the tensor."""
    caller = kernel.f_back
    if _CALL is not None and (caller is None or caller.f_code is not _CALL):
        return None  # a shorter way than the measured one owns less
    frame = caller if _CALL is None or caller is None else caller.f_back
    if frame is None:
        return None
    code = frame.f_code
    path = _paths.get(code, _generated)
    site = (id(code), frame.f_lasti)
    if site not in _sites:
        if sys.gettrace() is not None:  # a debugger's frame, which writes local variables back
            return None
        _sites[site] = (code, path.names(frame, x) == 1)
    return path if _sites[site][1] else None


def local_variables(frame: FrameType) -> dict[str, Any]:
    """A copy for the caller; Python before 3.13 would otherwise keep one in the frame."""
    variables = frame.f_locals
    found = dict(variables)
    picture = isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if (
        picture and sys.getrefcount(variables) <= 3
    ):  # the frame's, ours, the call's: none from locals()
        variables.clear()
    return found


def _local_names(frame: FrameType, x: Tensor) -> int:
    """Plain local variables; one read by a nested function too is not the frame's alone."""
    shared = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    names = [name for name, value in local_variables(frame).items() if value is x]
    return 0 if shared & {*names} else len(names)


# ---- measuring ----------------------------------------------------------------------------------------------------


class Probe(threading.local):
    """A kernel's counts, stored instead of computing, while a path is measured."""

    def __init__(self) -> None:
        self.seen: list[Counts] | None = None


probe = Probe()


def _call_from_one_name(args: list[Any]) -> Any:
    """As inductor's generated code does."""
    (x,) = args
    args.clear()
    one = _unread
    result = torch.ops.slime_fused.row_grad_over.default(
        x, one, one, one, one, False, "anyone", "", place="probe"
    )
    del x
    return result


_unread = torch.empty(0, device="cpu")  # the other arguments, unread by the kernel
_generated = _Path(_local_names, _call_from_one_name)


def _measured(call: Callable[[list[Any]], Any], of_view: bool) -> Counts | str:
    """On a thread of its own: no hook, mode or gradient setting of the caller's is at work there."""
    found: list[Counts | str] = ["measuring did not end"]

    def work() -> None:
        try:
            found[0] = _measure(call, of_view)
        except Exception as error:  # whatever a later torch has changed: nothing is overwritten, the report says why
            found[0] = f"measuring failed, {type(error).__name__}: {error}"

    thread = threading.Thread(target=work, name="slime_fused_holders", daemon=True)
    thread.start()
    thread.join(timeout=10)  # a caller with a lock needed here would go on
    return found[0]


def _measure(call: Callable[[list[Any]], Any], of_view: bool) -> Counts | str:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python does not count all references (free threading)"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a debugger or profiler traces new threads"
    kinds = (_viewed, _made_as_view, _viewed) if of_view else (_logits, _plain, _logits)
    nobody = {_seen(call, made, _no_holder) for made in kinds}
    if len(nobody) != 1 or None in nobody:
        return f"counts of an unreferenced tensor differ ({nobody})"
    least = nobody.pop()
    assert least is not None
    holds = (_variable, _view, _detached, _saved, _storage)
    for hold in (*holds, _base, _saved_base) if of_view else holds:
        seen = _seen(call, kinds[0], hold)
        assert seen is not None
        if not any(s > n for s, n in zip(seen, least, strict=True)):
            return f"{hold.__name__.strip('_')}: a reference is not seen ({seen})"
    return least


def _seen(
    call: Callable[[list[Any]], Any], make: Callable[[], Tensor], hold: Callable[[Tensor], object]
) -> Counts | None:
    """The operator's counts; None if another reference to the tensor remained afterwards."""
    made = [make()]
    dead = weakref.ref(made[0])
    holder = hold(made[0])
    probe.seen = []
    try:
        call(made)
        (seen,) = probe.seen
    finally:
        probe.seen = None
    return None if holder is None and dead() is not None else seen


def _logits() -> Tensor:
    with torch.enable_grad():
        return torch.zeros(2, 2, device="cpu", requires_grad=True) * 1


def _plain() -> Tensor:
    return torch.zeros(2, 2, device="cpu")


def _viewed() -> Tensor:
    return _logits().view(4)


def _made_as_view() -> Tensor:
    """A view of a product unknown to Python."""
    return torch.tensordot(torch.zeros(1, 2, 2, device="cpu"), torch.zeros(2, 2, device="cpu"), 1)


def _no_holder(x: Tensor) -> object:
    return None


def _variable(x: Tensor) -> object:
    return [x]


def _view(x: Tensor) -> object:
    return x.view(-1)


def _detached(x: Tensor) -> object:
    return x.detach()


def _storage(x: Tensor) -> object:
    return x.untyped_storage()


def _saved(x: Tensor) -> object:
    return x.sin()


def _base(x: Tensor) -> object:
    return x._base


def _saved_base(x: Tensor) -> object:
    assert x._base is not None
    return x._base.sin()
