"""`defer_logits`: from now on the model's head returns `DeferredLogits`; the returned handle undoes it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from slime_compile.deferred import (
    autograd_functions,
    column_parallel,
    expressions,
    logits,
    methods,
    own_forward,
    places,
    pytree,
    sharded,
)
from slime_compile.deferred.autograd_functions import run_by_function
from slime_compile.deferred.expressions import Product
from slime_compile.deferred.frames import only_inlined
from slime_compile.deferred.head import head_of, method_of
from slime_compile.deferred.logits import DeferredLogits
from slime_compile.deferred.places import Places
from slime_compile.torch_private import is_functorch_wrapped_tensor

__all__ = ["DeferHandle", "defer_logits"]


def defer_logits(
    model: nn.Module, head: nn.Module | str | None = None, *, in_eval: bool = False
) -> DeferHandle:
    """Makes a model's logits lazy: the head's matmul runs inside your compiled loss, chunk by chunk.

    In a function under `torch.compile(..., backend="slime_fused")` the lazy logits are hidden states times the head's
    weight, in the graph of that function. Elsewhere they behave like the tensor: the first operator computes it, once,
    and keeps it. Such a line with gradients is logged once, and `print(handle)` lists all of them.

    Exceptions: the head returns tensors in evaluation mode (unless `in_eval`), during tracing or export, with a
    backward hook on the head (it needs the logits' gradient), if hidden or weight is a torch.func tensor, has a
    forward-mode tangent or is a tensor subclass, and inside an autograd.Function (a reentrant checkpoint). A DTensor
    weight sharded by columns times replicated hidden states is deferred.

    Args:
        model: any model, also inside DDP, FSDP2, PEFT or torch.compile.
        head: the module computing the logits, or its name. Default: `get_output_embeddings()`, `lm_head` or
            `output_layer`. A torch.nn.Linear, megatron-core's ColumnParallelLinear, or a module ending in linear maps
            to the vocabulary and their sum (LoRA; a forward casting, scaling or dequantising the weight). In a
            compiled model the last kind returns tensors.
        in_eval: defer in evaluation mode too (a reference model's log-probs, for instance).

    Returns:
        A handle. `handle.remove()` undoes the change; so does the end of `with handle:`.

    Raises:
        TypeError, ValueError: the model has no such head, the head is deferred already, or it is not a linear map.
            The message has a remedy.

    Examples:
        >>> handle = slime_compile.defer_logits(model)
        >>> model.loss_function = torch.compile(model.loss_function, backend="slime_fused")
        >>> model(tokens, labels=tokens).loss.backward()
    """
    name, module = head_of(model, head)
    handle = DeferHandle(name, module, in_eval)
    vars(module)[handle.method] = handle
    return handle


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """Whether Dynamo exports; in torch 2.11 `is_exporting` is true in all traced code."""
    return torch.compiler.is_exporting()


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


class DeferHandle:
    """A head with lazy logits, returned by `slime_compile.defer_logits`; also a context manager.

    `print(handle)` counts the lazy logits and lists the entries of `places`.

    Attributes:
        name: the module's name in the model.
        module: the head.
        places: lines of eager code computing the full logits.
    """

    def __init__(self, name: str, module: nn.Module, in_eval: bool = False) -> None:
        self.name = name
        self.module = module
        self.in_eval = in_eval
        self.method = method_of(module)
        self.places = Places(name)

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.method == column_parallel.METHOD:
            return self._of_shard(input, *args, **kwargs)
        module: Any = self.module
        if type(module).forward is not nn.Linear.forward:
            return self._of_own_forward(input, *args, **kwargs)
        if not self._defers(input, module.weight):
            return type(module).forward(module, input)
        return self._made(input, module.weight, module.bias)

    def _of_own_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with deferred linear maps to the vocabulary; see `own_forward`."""
        module: Any = self.module
        width = own_forward.width_of(module)
        hooked = any(each._backward_hooks or each._backward_pre_hooks for each in module.modules())
        if torch.compiler.is_compiling() or hooked or width is None:
            return type(module).forward(module, *args, **kwargs)

        def made(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits | None:
            if not self._defers(hidden, weight):
                return None
            return DeferredLogits.of(Product.of(hidden, weight, bias, self.places.add))

        with own_forward.Deferring(width, made):
            logits = type(module).forward(module, *args, **kwargs)
        self.places.deferred += isinstance(logits, DeferredLogits)
        return logits

    def _of_shard(self, input: Tensor, weight: Tensor, bias: Tensor | None, **kwargs: Any) -> Any:
        """Megatron's matmul, in the place of `ColumnParallelLinear._forward_impl`."""
        module: Any = self.module
        buffer = kwargs.get("grad_output_buffer")
        if not self._defers(input, weight) or not column_parallel.replaceable(module, buffer):
            return type(module)._forward_impl(module, input, weight, bias=bias, **kwargs)
        exchanges = {name: kwargs[name] for name in ("allreduce_dgrad", "sequence_parallel")}
        whole = column_parallel.gathered(input, **exchanges, group=kwargs["tp_group"])
        return self._made(whole, weight, bias)

    def _made(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        if torch.compiler.is_compiling():
            return DeferredLogits.of(Product.of(hidden, weight, bias, None))
        self.places.deferred += 1
        return DeferredLogits.of(Product.of(hidden, weight, bias, self.places.add))

    def _defers(self, input: Any, weight: Any) -> bool:
        module: Any = self.module
        jit: Any = torch.jit
        if not (module.training or self.in_eval) or _is_exporting():
            return False
        if module._backward_hooks or module._backward_pre_hooks or jit.is_tracing():
            return False
        plain = type(input) is Tensor and type(weight) in (Tensor, nn.Parameter)
        if not plain and not sharded.is_sharded_head(input, weight):
            return False
        return torch.compiler.is_compiling() or not (
            run_by_function()
            or any(is_functorch_wrapped_tensor(each) or _is_dual(each) for each in (input, weight))
        )

    def remove(self) -> None:
        """The head computes its logits again. Earlier lazy logits keep working. Calling it twice is harmless."""
        if vars(self.module).get(self.method) is self:
            delattr(self.module, self.method)

    def __enter__(self) -> DeferHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        return str(self.places)

    def __repr__(self) -> str:
        state = "deferred" if vars(self.module).get(self.method) is self else "removed"
        return f"DeferHandle({self.name!r}, {state})"


only_inlined(
    autograd_functions,
    expressions,
    logits,
    methods,
    own_forward,
    places,
    pytree,
    sharded,
    sys.modules[__name__],
)
