"""Inputs from `torch.inference_mode()`, such as a teacher's logits: backward reads copies of them.

Entry point: `copying_inference_tensors`. Autograd refuses to save an inference tensor. Eager code may not need to: a
softmax of it is an ordinary tensor. A compiled graph saves other tensors than eager code.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_CHANGED = "the compiled function changes an inference tensor in place, as eager code may not: give it a clone()"


def copying_inference_tensors(
    compiled: Callable[..., Any], example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`compiled` itself unless it may save one of the inputs; Dynamo compiles again for other kinds of inputs.

    Raises, when it is called:
        RuntimeError: the function changes an inference tensor in place.
    """
    tensors = [each for each in example_inputs if isinstance(each, torch.Tensor)]
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if not trains or not any(each.is_inference() for each in tensors):
        return compiled

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        given = [_copied(each) for each in args]
        copies = [own for each, own in zip(args, given, strict=True) if own is not each]
        versions = [own._version for own in copies]
        outputs = compiled(*given)
        if versions != [own._version for own in copies]:
            raise RuntimeError(_CHANGED)
        return outputs

    return call


def _copied(given: Any) -> Any:
    return given.clone() if isinstance(given, torch.Tensor) and given.is_inference() else given
