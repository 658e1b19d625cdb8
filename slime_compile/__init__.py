"""slime_compile: a torch.compile backend that cuts the peak memory of losses over a large vocabulary.

    loss_fn = torch.compile(loss_fn, backend="slime_fused")       needs no import of this package

The public names, by home; everything is imported on first use:

    report              reports, summary: the reports of this process; Report
    dry_run.explain     explain: the report of a dry run
    dry_run.estimate    estimate_peak: the peak memory of a loss at any size; Estimate
    dynamo.remedies     inline_nested_compile, trace_distributed_nn, trace_async_all_reduce: for losses that Dynamo
                        otherwise runs in Python
    deferred.handle     defer_logits: a model returns lazy logits; DeferHandle
    deferred.logits     DeferredLogits: the lazy logits; with_tensors: for a loss that needs tensors
    rl.log_probs        log_probs_and_entropy: the same operators for eager callers
    rl.linear_log_probs linear_log_probs_and_entropy: the same from hidden and weight, without full logits
    rl.divergence       linear_divergence: the divergence of two models, one chunk of each model's logits at a time
    rl.packing          Packing: the rows of samples in packed logits
    rl.packed           shifted_targets, response_slices and related functions
    rl.redistribute     redistribute_to_zigzag: per-sample values between layouts of context parallelism
    rl.micro_batches    partition_by_tokens, micro_batch_count: micro-batches within a token cap
    rl.memory_model     max_tokens_for, peak_bytes: tokens for a memory size
    rl.memory_probe     memory_probe: one line of log per step
"""

import importlib
from typing import TYPE_CHECKING, Any

from slime_compile.version import __version__

if TYPE_CHECKING:
    from slime_compile import integrations as integrations
    from slime_compile.deferred.handle import DeferHandle, defer_logits
    from slime_compile.deferred.logits import DeferredLogits, with_tensors
    from slime_compile.dry_run.estimate import Estimate, estimate_peak
    from slime_compile.dry_run.explain import explain
    from slime_compile.dynamo.remedies import (
        inline_nested_compile,
        trace_async_all_reduce,
        trace_distributed_nn,
    )
    from slime_compile.report import Report, reports, summary
    from slime_compile.rl.divergence import linear_divergence
    from slime_compile.rl.linear_log_probs import linear_log_probs_and_entropy
    from slime_compile.rl.log_probs import log_probs_and_entropy
    from slime_compile.rl.memory_model import max_tokens_for, peak_bytes
    from slime_compile.rl.memory_probe import MemoryRecord, memory_probe
    from slime_compile.rl.micro_batches import micro_batch_count, partition_by_tokens
    from slime_compile.rl.packed import (
        ResponseSlice,
        flatten_logits,
        join_responses,
        packed_log_probs,
        response_rows,
        response_slices,
        row_temperature,
        shifted_targets,
        split_response_rows,
        split_responses,
    )
    from slime_compile.rl.packing import Packing
    from slime_compile.rl.redistribute import redistribute_to_zigzag

__all__ = [
    "DeferHandle",
    "DeferredLogits",
    "Estimate",
    "MemoryRecord",
    "Packing",
    "Report",
    "ResponseSlice",
    "__version__",
    "defer_logits",
    "estimate_peak",
    "explain",
    "flatten_logits",
    "inline_nested_compile",
    "join_responses",
    "linear_divergence",
    "linear_log_probs_and_entropy",
    "log_probs_and_entropy",
    "max_tokens_for",
    "memory_probe",
    "micro_batch_count",
    "packed_log_probs",
    "partition_by_tokens",
    "peak_bytes",
    "redistribute_to_zigzag",
    "reports",
    "response_rows",
    "response_slices",
    "row_temperature",
    "shifted_targets",
    "split_response_rows",
    "split_responses",
    "summary",
    "trace_async_all_reduce",
    "trace_distributed_nn",
    "with_tensors",
]

_HOMES = {
    "DeferHandle": "deferred.handle",
    "DeferredLogits": "deferred.logits",
    "defer_logits": "deferred.handle",
    "explain": "dry_run.explain",
    "linear_divergence": "rl.divergence",
    "linear_log_probs_and_entropy": "rl.linear_log_probs",
    "log_probs_and_entropy": "rl.log_probs",
    "Estimate": "dry_run.estimate",
    "estimate_peak": "dry_run.estimate",
    "max_tokens_for": "rl.memory_model",
    "micro_batch_count": "rl.micro_batches",
    "partition_by_tokens": "rl.micro_batches",
    "peak_bytes": "rl.memory_model",
    "Packing": "rl.packing",
    "ResponseSlice": "rl.packed",
    "flatten_logits": "rl.packed",
    "join_responses": "rl.packed",
    "packed_log_probs": "rl.packed",
    "response_rows": "rl.packed",
    "response_slices": "rl.packed",
    "row_temperature": "rl.packed",
    "shifted_targets": "rl.packed",
    "split_response_rows": "rl.packed",
    "split_responses": "rl.packed",
    "MemoryRecord": "rl.memory_probe",
    "memory_probe": "rl.memory_probe",
    "redistribute_to_zigzag": "rl.redistribute",
    "inline_nested_compile": "dynamo.remedies",
    "trace_async_all_reduce": "dynamo.remedies",
    "trace_distributed_nn": "dynamo.remedies",
    "with_tensors": "deferred.logits",
    "Report": "report",
    "reports": "report",
    "summary": "report",
}


if not TYPE_CHECKING:  # for the import system any name would be one of this package

    def __getattr__(name: str) -> Any:
        if name == "integrations":
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
