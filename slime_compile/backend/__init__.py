"""The backend `slime_fused`: AOTAutograd's joint graph through the fusing pass, then inductor or plain interpretation.

Entry point: `slime_fused`, found by torch through the entry-point group `torch_dynamo_backends`; users never import it.

    options       the user's options
    identity      name and identity of a graph, the inputs that must not be overwritten
    passes        fx_passes over the graphs, with reports
    runner        guards for the passes
    inductor      inner="inductor": the passes as inductor's own
    interpreted   inner="aot_eager": graphs run as they are
    consumed      overwritten logits that another operation needs
    inference     inputs from inference mode, which autograd does not save
    returned      logits among the outputs, with or without a gradient
    registration  several threads may use the backend for the first time together
    check_ranks   the ranks of a group compare their exchanges

No file of this folder imports the name below.
"""

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from slime_compile import torch_private
from slime_compile.backend.consumed import explain_errors, watching_hooks
from slime_compile.backend.identity import new_record
from slime_compile.backend.inductor import (
    Compiled,
    compile_inductor,
    noting_first_call,
)
from slime_compile.backend.inference import copying_inference_tensors
from slime_compile.backend.interpreted import compile_interpreted
from slime_compile.backend.options import Options
from slime_compile.backend.passes import (
    BACKWARD_WITH_FORWARD,
    prepare,
)
from slime_compile.backend.registration import allow_again
from slime_compile.backend.returned import with_own_gradient
from slime_compile.backend.runner import leave_unfused, may_stay_unfused, tell_nothing_fused
from slime_compile.report.process import keep
from slime_compile.report.record import Record
from slime_compile.torch_private import functorch_config

__all__ = ["slime_fused"]

torch_private.check()
allow_again()
Options.parse()  # torch.compile itself raises errors in the environment


def slime_fused(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compiles a graph of Dynamo's: `torch.compile(fn, backend="slime_fused", options={...})`.

    Args:
        options: see `slime_compile.backend.options.Options`; not together with `mode`.
        mode: inductor's, as in `torch.compile(mode=...)`; needs inner="inductor".

    Raises:
        RuntimeError: an unknown option, a wrong type, an unknown mode.
    """
    chosen = Options.parse(options)
    if chosen.inner == "aot_eager" and mode not in (None, "default"):
        raise RuntimeError(
            f"mode={mode!r} is inductor's and needs inner='inductor', got inner='aot_eager'"
        )
    if chosen.consume_logits is True:
        explain_errors()
    record = keep(new_record(gm, example_inputs, chosen))
    with record.compiling():
        return _compiled(gm, example_inputs, chosen, mode, record)


def _compiled(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    chosen: Options,
    mode: str | None,
    record: Record,
) -> Compiled:
    returned = prepare(gm, chosen, record)

    def compiled_by_inner() -> Compiled:
        if chosen.inner == "aot_eager":
            return compile_interpreted(gm, example_inputs, chosen, record)
        return compile_inductor(gm, example_inputs, chosen, mode, record)

    with functorch_config.patch(BACKWARD_WITH_FORWARD):
        try:
            compiled = compiled_by_inner()
        except Exception as error:
            if not may_stay_unfused(chosen, record):
                raise
            leave_unfused(chosen, record, error)
            compiled = compiled_by_inner()
    record.publish()
    tell_nothing_fused(record)
    if not record.traced:
        compiled = noting_first_call(compiled, record)
    if chosen.consume_logits is True:
        compiled = watching_hooks(compiled, record)
    compiled = with_own_gradient(compiled, returned)
    return copying_inference_tensors(compiled, example_inputs)
