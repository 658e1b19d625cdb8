"""Every private interface of torch in this package, and the remedy if it is gone.

Entry points: `from slime_compile.torch_private import <name>`, with a lookup each time; `check`, called when the
backend is imported. A missing one raises one error with torch's version and the missing names, not an AttributeError in
the middle of a compile. To add one: a line under TYPE_CHECKING (for mypy) and a row of `INTERFACES`.

`fx_passes.torch_private` has the interfaces about graphs (fake tensors, aliases, symbolic sizes); they are
found here too.
"""

from typing import TYPE_CHECKING, Any

import torch

from fx_passes import torch_private as graphs
from fx_passes.torch_private import Interface

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._C._profiler import _EventType as ProfilerEvent
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.backends import registry as backend_registry
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.eval_frame import innermost_fn, skip_code
    from torch._dynamo.source import ConstantSource
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.descriptors import TangentAOTInput
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import CompileContext, TracingContext
    from torch._inductor import config as inductor_config
    from torch._inductor import cpp_builder, cpu_vec_isa, list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._logging._internal import trace_structured
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.autograd import Variable
    from torch.distributed import distributed_c10d
    from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, sym_or
    from torch.utils._filelock import FileLock
    from torch.utils._python_dispatch import TorchDispatchMode

    dispatch_modes = torch._C._len_torch_dispatch_stack
    function_modes = torch._C._len_torch_function_stack
    graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph
    has_internal_overlap = torch._debug_has_internal_overlap
    set_versions = torch._C._autograd._unsafe_set_version_counter
    saved_tensors_hooks_at_work = torch._C._autograd._top_saved_tensors_default_hooks
    storage_use_count = torch._C._storage_Use_Count
    torch_check = torch._check

__all__ = [
    "AutogradFunctionVariable",
    "CompileContext",
    "ConstantSource",
    "CustomGraphPass",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "FileLock",
    "MemTracker",
    "OpOverload",
    "ProfilerEvent",
    "ShapeEnv",
    "TangentAOTInput",
    "Tensor",
    "TorchDispatchMode",
    "TracingContext",
    "UntypedStorage",
    "Variable",
    "aot_autograd",
    "backend_registry",
    "cache_dir",
    "check",
    "compile_fx",
    "compile_fx_inner",
    "cpp_builder",
    "cpu_vec_isa",
    "dispatch_modes",
    "distributed_c10d",
    "dynamo_utils",
    "function_modes",
    "functional_all_reduce",
    "functorch_config",
    "get_torch_obj_rule_map",
    "graph_is_kept",
    "has_internal_overlap",
    "inductor_config",
    "innermost_fn",
    "is_functorch_wrapped_tensor",
    "list_mode_options",
    "min_cut_rematerialization_partition",
    "saved_tensors_hooks_at_work",
    "select_decomp_table",
    "set_versions",
    "skip_code",
    "storage_use_count",
    "sym_or",
    "torch_check",
    "trace_structured",
]


INTERFACES = {
    **graphs.INTERFACES,
    # ---- the backend
    "CustomGraphPass": Interface(
        "torch._inductor.custom_graph_pass:CustomGraphPass",
        "our passes in inductor's pipeline, with an identity for its cache",
        "the class that torch's documents name for `joint_custom_pre_pass`",
    ),
    "inductor_config": Interface(
        "torch._inductor:config",
        "names and types of `inductor.<name>` options, and the user's own passes",
        "torch.compile(options=...) checks the same names; read its source",
        (
            "get_config_copy",
            "get_type",
            "patch",
            "joint_custom_pre_pass",
            "post_grad_custom_post_pass",
        ),
    ),
    "list_mode_options": Interface(
        "torch._inductor:list_mode_options",
        "the settings of `mode=`",
        "public since 2.0; refuse `mode` if it is gone",
    ),
    "compile_fx": Interface(
        "torch._inductor.compile_fx:compile_fx",
        "inductor as a backend, with config_patches and an inner_compile of ours",
        "torch._inductor.standalone_compile, or the registered backend 'inductor'",
        early=False,
    ),
    "compile_fx_inner": Interface(
        "torch._inductor.compile_fx:compile_fx_inner",
        "runs after partitioning: it shows which graph is a backward",
        "the default of compile_fx's inner_compile",
        early=False,
    ),
    "aot_autograd": Interface(
        "torch._dynamo.backends.common:aot_autograd",
        "AOTAutograd with our partition function, for inner='aot_eager' and dry runs",
        "functorch.compile.aot_module_simplified",
    ),
    "backend_registry": Interface(
        "torch._dynamo.backends:registry",
        "the table of backends; several threads may add ours at the same time",
        "drop backend/registration.py if torch locks its table; tests/backend/test_threads.py tells",
        ("_COMPILER_FNS",),
    ),
    "min_cut_rematerialization_partition": Interface(
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        "inductor's partitioner",
        "inductor's `partition_fn`",
    ),
    "select_decomp_table": Interface(
        "torch._inductor.decomposition:select_decomp_table",
        "inductor's decompositions: the same operators for both inners",
        "torch._decomp.core_aten_decompositions, then compare the tests' counts",
        early=False,
    ),
    "functorch_config": Interface(
        "torch._functorch:config",
        "backward compiled with the forward; donated inputs",
        "NOTE [Backward is compiled with the forward] has the requirements without them",
        ("patch", "force_non_lazy_backward_lowering", "donated_buffer"),
    ),
    "TracingContext": Interface(
        "torch._guards:TracingContext",
        "fw_metadata.bw_donated_idxs: inputs of a backward graph without other references",
        "without it nothing may be written in place",
        ("try_get",),
    ),
    "Variable": Interface(
        "torch.autograd:Variable",
        "the engine of backward; its errors name consume_logits",
        "leave torch's message as it is: drop backend/consumed.py",
        ("_execution_engine",),
    ),
    "saved_tensors_hooks_at_work": Interface(
        "torch._C._autograd:_top_saved_tensors_default_hooks",
        "a checkpoint or save_on_cpu around a loss with consume_logits",
        "AOTAutograd's check before it inlines such hooks",
    ),
    # ---- the report and dry runs
    "trace_structured": Interface(
        "torch._logging._internal:trace_structured",
        "reports and graphs as artifacts for tlparse (TORCH_TRACE)",
        "drop the artifacts; the log keeps the reports",
    ),
    "dynamo_utils": Interface(
        "torch._dynamo:utils",
        "frames running in Python, with Dynamo's reason",
        "torch.compiler's metrics, if they have become public",
        (
            "counters",
            "get_compilation_metrics",
            "clear_compilation_metrics",
            "_compilation_metrics",
        ),
    ),
    "CompileContext": Interface(
        "torch._guards:CompileContext",
        "the compilation and the frame of a graph, for its graph breaks",
        "report breaks by their line alone",
        ("current_compile_id",),
    ),
    "innermost_fn": Interface(
        "torch._dynamo.eval_frame:innermost_fn",
        "the function below torch.compile's wrappers",
        "the attribute _torchdynamo_orig_callable",
    ),
    "FakeTensor": Interface(
        "torch._subclasses.fake_tensor:FakeTensor",
        "tells a function's arguments in a dry run from what it captured",
        "see FakeTensorMode",
    ),
    "ConstantSource": Interface(
        "torch._dynamo.source:ConstantSource",
        "a symbol for the number of rows of a chunk",
        "any Source of torch._guards",
        early=False,
    ),
    "DimDynamic": Interface(
        "torch.fx.experimental.symbolic_shapes:DimDynamic",
        "a chunk's body is compiled for any number of rows",
        "compile it for each number of rows",
        early=False,
    ),
    "ShapeEnv": Interface(
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
        "symbolic sizes of a dry run",
        "see FakeTensorMode",
    ),
    "MemTracker": Interface(
        "torch.distributed._tools.mem_tracker:MemTracker",
        "bytes of all storages alive, for estimate_peak",
        "a TorchDispatchMode counting storages",
        early=False,
    ),
    "TorchDispatchMode": Interface(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "buffers of an operator over chunks, for estimate_peak; no real tensor in a dry run",
        "torch documents it under this name; estimates would leave the chunk out",
    ),
    "set_versions": Interface(
        "torch._C._autograd:_unsafe_set_version_counter",
        "a dry run leaves the versions of the user's tensors as they were",
        "called by torch.autograd._unsafe_preserve_version_counter",
    ),
    "ProfilerEvent": Interface(
        "torch._C._profiler:_EventType",
        "allocations on the CPU in the profiler's events, for memory_probe",
        "torch.profiler's memory timeline",
    ),
    # ---- operators, ranks, remedies
    "cpp_builder": Interface(
        "torch._inductor:cpp_builder",
        "builds cpu_kernels.cpp as inductor builds its code, and finds inductor's compiler",
        "torch.utils.cpp_extension; until then the operators run in plain torch calls",
        ("CppBuilder", "CppTorchOptions", "get_cpp_compiler"),
        early=False,
    ),
    "cpu_vec_isa": Interface(
        "torch._inductor:cpu_vec_isa",
        "torch's own vector instructions",
        "see cpp_builder",
        ("VecAVX2", "VecAVX512", "pick_vec_isa"),
        early=False,
    ),
    "cache_dir": Interface(
        "torch._inductor.runtime.cache_dir_utils:cache_dir",
        "inductor's cache directory, also for our build",
        "TORCHINDUCTOR_CACHE_DIR, or a folder of our own",
        early=False,
    ),
    "FileLock": Interface(
        "torch.utils._filelock:FileLock",
        "one build for processes starting together",
        "the filelock package, a dependency of torch",
        early=False,
    ),
    "has_internal_overlap": Interface(
        "torch:_debug_has_internal_overlap",
        "elements sharing memory must not be overwritten",
        "compare size and stride",
    ),
    "Tensor": Interface(
        "torch:Tensor",
        "references to a tensor, its base, its version",
        "see storage_use_count; deferred logits check their operands for changes",
        ("_use_count", "_base", "_version"),
    ),
    "UntypedStorage": Interface(
        "torch:UntypedStorage",
        "the storage for storage_use_count",
        "see storage_use_count",
        ("_cdata",),
    ),
    "storage_use_count": Interface(
        "torch._C:_storage_Use_Count",
        "references to the logits' memory",
        "NOTE [How an operator counts the references to a tensor]: without a count nothing is overwritten",
    ),
    "graph_is_kept": Interface(
        "torch._C._autograd:_get_current_graph_task_keep_graph",
        "backward may run again, then its inputs stay as they are",
        "AOTAutograd's check before it frees saved tensors",
    ),
    "dispatch_modes": Interface(
        "torch._C:_len_torch_dispatch_stack",
        "a mode seeing every operator's arguments may keep them",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    ),
    "function_modes": Interface(
        "torch._C:_len_torch_function_stack",
        "the same for TorchFunctionMode",
        "torch.overrides._get_current_function_mode_stack",
    ),
    "OpOverload": Interface(
        "torch._ops:OpOverload",
        "the frame between generated code and an operator",
        "whatever calls an operator in a traceback",
    ),
    "torch_check": Interface(
        "torch:_check",
        "checks of arguments, as guards for symbolic sizes",
        "documented in torch since 2.5; else raise RuntimeError",
    ),
    "sym_or": Interface(
        "torch.fx.experimental.symbolic_shapes:sym_or",
        "either of two conditions on symbolic sizes",
        "torch.sym_ite, or the | of two SymBools",
    ),
    "distributed_c10d": Interface(
        "torch.distributed:distributed_c10d",
        "process groups by name, their ranks, the default store",
        "torch.distributed.get_process_group_ranks, and a group's name",
        ("_world", "_get_default_store"),
    ),
    "functional_all_reduce": Interface(
        "torch.distributed._functional_collectives:all_reduce",
        "the traceable collective, for trace_distributed_nn and trace_async_all_reduce",
        "drop the remedies if Dynamo traces torch.distributed.nn and async_op=True by itself",
    ),
    "AutogradFunctionVariable": Interface(
        "torch._dynamo.variables.misc:AutogradFunctionVariable",
        "deferred logits as an argument of a traced autograd.Function",
        "the place where Dynamo calls Function.forward; tests/deferred show it",
        ("call_apply",),
        early=False,
    ),
    "is_functorch_wrapped_tensor": Interface(
        "torch._C._functorch:is_functorch_wrapped_tensor",
        "a head under torch.func.grad or vmap in eager code makes its logits at once",
        "how torch.func tells its tensors from others",
        early=False,
    ),
    "skip_code": Interface(
        "torch._dynamo.eval_frame:skip_code",
        "methods of deferred logits are traced as a part of the user's function, never by themselves",
        "called by torch.compiler.set_stance or torch._dynamo.skip",
        early=False,
    ),
    "get_torch_obj_rule_map": Interface(
        "torch._dynamo.trace_rules:get_torch_obj_rule_map",
        "created before torch.compile is replaced, for inline_nested_compile",
        "drop the call, then run tests/dynamo",
    ),
}


def __getattr__(name: str) -> Any:
    return graphs.looked_up(INTERFACES, name)


def check() -> None:
    """Looks for the interfaces needed to compile.

    Raises:
        ImportError: with torch's version and each missing interface.
    """
    graphs.check(INTERFACES)


def missing() -> list[str]:
    """The missing ones of all interfaces, each with its purpose; imports inductor."""
    return [problem for _, problem in map(graphs.find, INTERFACES.values()) if problem]
