"""Requirements on the operators' arguments; the kernels rely on them.

Each raises RuntimeError with the name, the requirement and the given value. Under tracing a condition on symbolic sizes
becomes a guard or an assertion at run time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime_compile.ops.reference import AFFINE, TERM, compute_dtype
from slime_compile.torch_private import has_internal_overlap, sym_or, torch_check

__all__ = ["check_grad", "check_memory", "check_result_dtype", "check_stats", "check_writable"]


def _check(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    if condition is not True:  # torch's own check takes a microsecond if all is right
        torch_check(condition, message)


def _check_root(x: Tensor) -> None:
    _check(x.dim() > 0, lambda: "`x` must have shape [..., V], got a tensor without dimensions")
    _check(x.dtype.is_floating_point, lambda: f"`x` must have a floating dtype, got {x.dtype}")


def _check_scale(x: Tensor, scale: Tensor) -> None:
    rows = [*x.shape[:-1], 1]

    def message() -> str:
        return f"`scale` must be broadcastable to {rows}, got {list(scale.shape)}"

    _check(scale.dim() <= len(rows), message)
    for size, wanted in zip(reversed(scale.shape), reversed(rows), strict=False):
        _check(sym_or(size == 1, size == wanted), message)


def _check_rows(name: str, value: Tensor, rows: Sequence[int], last: Sequence[int | str]) -> None:
    """Checks the shape rows + last; a name instead of a number in `last` stands for any size."""
    wanted = [*rows, *last]
    fits = value.dim() == len(wanted)

    def message() -> str:
        sizes = ", ".join(map(str, wanted))
        return f"`{name}` must have shape [{sizes}], got {list(value.shape)}"

    _check(fits, message)
    for size, number in zip(value.shape, wanted, strict=True):
        if not isinstance(number, str):
            _check(size == number, message)


def _check_dtype(name: str, value: Tensor, dtype: torch.dtype) -> None:
    _check(value.dtype == dtype, lambda: f"`{name}` must have dtype {dtype}, got {value.dtype}")


def check_grad(
    x: Tensor, terms: Tensor, affine: Tensor, index: Tensor, weight: Tensor, softmax: bool
) -> None:
    _check_root(x)
    rows, compute = x.shape[:-1], compute_dtype(x.dtype)
    _check_rows("terms", terms, rows, ("K", TERM))
    _check_rows("affine", affine, rows, (AFFINE,))
    _check_rows("index", index, rows, ("M",))
    _check_rows("weight", weight, rows, (index.shape[-1],))
    _check_dtype("terms", terms, compute)
    _check_dtype("affine", affine, compute)
    _check_dtype("index", index, torch.int64)
    _check_dtype("weight", weight, compute)
    if softmax:
        _check(
            terms.shape[-2] == 1,
            lambda: f"`terms` must hold one term where softmax=True, got {terms.shape[-2]}",
        )


def check_stats(x: Tensor, scale: Tensor | None) -> None:
    _check_root(x)
    _check(
        x.shape[-1] > 0,
        lambda: (
            f"`x` must have a vocabulary of at least one column, got shape {list(x.shape)}; "
            "has the weight not been gathered yet?"
        ),
    )
    if scale is not None:
        _check_scale(x, scale)


def check_result_dtype(dtype: torch.dtype) -> None:
    _check(dtype.is_floating_point, lambda: f"`dtype` must be a floating dtype, got {dtype}")


def check_writable(x: Tensor) -> None:
    """The caller still owns a leaf, and a view of one is the leaf; rows sharing memory have one value."""
    if has_internal_overlap(x) == 1:
        raise RuntimeError(
            "`x` must have no elements that share memory, since its values are overwritten; got shape "
            f"{list(x.shape)} with strides {list(x.stride())}. Call row_grad instead."
        )
    owner = x if x._base is None else x._base
    if owner.requires_grad and owner.is_leaf:
        raise RuntimeError(
            "`x` must not be a leaf that requires grad, since its values are overwritten; "
            f"got {'a leaf' if owner is x else 'a view of a leaf'} of shape {list(owner.shape)}. "
            "Call row_grad instead, or compile without options={'consume_logits': True}."
        )


def check_alone(x: Tensor, others: Sequence[Tensor]) -> None:
    """Inputs with separate memory at compile time may share memory in a later call."""
    memory = x.untyped_storage().data_ptr()
    for other in others:
        if x.numel() and other.numel() and other.untyped_storage().data_ptr() == memory:
            raise RuntimeError(
                "`x` must share its memory with no other tensor that backward reads, since its values are overwritten; "
                f"in this call an input of shape {list(other.shape)} is a view of the logits, of shape {list(x.shape)}. "
                "Pass a clone of it, or compile without options={'consume_logits': True}."
            )


def check_memory(**tensors: Tensor | None) -> None:
    """FSDP frees the memory of a weight that it has sharded again, and leaves the tensor."""
    for name, tensor in tensors.items():
        if tensor is None or not tensor.numel():
            continue
        if tensor.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"`{name}` must have memory, got shape {list(tensor.shape)} over a storage of 0 bytes. Has FSDP "
                "sharded it again? Keep the head's parameters gathered until backward (reshard_after_forward=False)."
            )
