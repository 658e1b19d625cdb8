"""verl's FSDP engine (0.9): log-probs and entropies of a micro-batch in one compiled function.

The engine computes them from the logits in two calls, among nested tensors: the entropy's is compiled
(`use_torch_compile`), the log-probs' goes row by row without flash-attn. Neither shares its reading of the logits.
But the engine also supports models returning both in place of logits (`use_fused_kernels`). `enable()` puts verl's own
two formulas into one function, compiles it, and returns its results that way. Padded batches, top-k distillation, the
sum of squared probabilities and DTensor logits stay with verl's.

Upstream, `prepare_model_outputs` would take the two from one method, which could then be compiled; or
`engine_config` would name the backend of its torch.compile and compile both.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_compile.integrations.known import known

__all__ = ["disable", "enable"]

_HOME = "verl.workers.engine.fsdp.transformer_impl"
_ARGUMENTS = {
    "FSDPEngineWithLMHead.prepare_model_outputs": [
        "self", "output", "output_args", "micro_batch", "logits_processor_func",
    ],
}  # fmt: skip
_INSTEAD = (
    "Compile verl.utils.torch_functional.entropy_from_logits and logprobs_from_logits_naive with "
    "torch.compile(..., backend='slime_fused') instead"
)
_LEFT_TO_VERL = (
    "use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only",
)  # fmt: skip


def enable(options: Mapping[str, Any] | None = None) -> bool:
    """Enables it for all actors and references of this process. Calling it twice is harmless.

    verl's workers are separate processes. Call it in a module named in `VERL_USE_EXTERNAL_MODULES`; every worker
    imports these. Call `defer_logits(engine.module)` separately.

    Args:
        options: of the backend.

    Returns:
        True if enabled. Otherwise a warning gives the reason, and nothing changes.

    Raises:
        ImportError: verl is not installed.
    """
    home = known("verl", "0.9.", _HOME, _ARGUMENTS, _INSTEAD)
    if home is None:
        return False
    kind: Any = home.FSDPEngineWithLMHead
    if not hasattr(kind.prepare_model_outputs, "theirs"):
        kind.prepare_model_outputs = _over_one_function(kind.prepare_model_outputs, options)
    return True


def disable() -> None:
    """Undoes `enable()`."""
    kind: Any = importlib.import_module(_HOME).FSDPEngineWithLMHead
    kind.prepare_model_outputs = getattr(
        kind.prepare_model_outputs, "theirs", kind.prepare_model_outputs
    )


def _over_one_function(theirs: Any, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    data_of: Any = importlib.import_module("verl.utils.tensordict_utils")
    dtensor: Any = importlib.import_module("torch.distributed.tensor").DTensor
    functions: Any = importlib.import_module("verl.utils.torch_functional")
    compiled = torch.compile(
        _of_both(functions.logprobs_from_logits_naive, functions.entropy_from_logits),
        backend="slime_fused",
        options=dict(options or {}),
    )

    @functools.wraps(theirs)
    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        def asked(name: str, default: bool = False) -> Any:
            return data_of.get_non_tensor_data(data=micro_batch, key=name, default=default)

        leave = any(map(asked, _LEFT_TO_VERL)) or not asked("use_remove_padding", True)
        if leave or isinstance(output.logits, dtensor):
            return theirs(self, output, output_args, micro_batch, logits_processor_func)
        unit = output_args.get("temperature_is_one", False)
        log_probs, entropy = compiled(
            output.logits,
            output_args["input_ids_rmpad_rolled"],
            None if unit else output_args["temperature_rmpad"],
            bool(asked("calculate_entropy")),
        )
        instead = SimpleNamespace(log_probs=log_probs, entropy=entropy)
        micro_batch = data_of.assign_non_tensor(micro_batch.copy(), use_fused_kernels=True)
        return theirs(self, instead, output_args, micro_batch, logits_processor_func)

    prepare_model_outputs.theirs = theirs  # type: ignore[attr-defined]
    return prepare_model_outputs


def _of_both(log_probs_of: Any, entropy_of: Any) -> Callable[..., Any]:
    def log_probs_and_entropy(
        logits: Tensor, labels: Tensor, temperature: Tensor | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Of logits [1, T, V], each [1, T]."""
        rows = logits.squeeze(0)
        if temperature is not None:
            rows = rows / temperature.clamp(min=1e-8).to(rows.dtype).unsqueeze(-1)
        log_probs = log_probs_of(rows, labels)
        entropy = entropy_of(rows) if with_entropy else None
        return log_probs.unsqueeze(0), None if entropy is None else entropy.unsqueeze(0)

    return log_probs_and_entropy
