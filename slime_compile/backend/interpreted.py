"""`inner="aot_eager"`: AOTAutograd and our passes; the graphs run as they are, without code generation.

Entry point: `compile_interpreted`, which dry runs use too.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from slime_compile.backend.options import Options
from slime_compile.backend.passes import donated_inputs, keep_saved, run_fuse, run_inplace
from slime_compile.ops import holders
from slime_compile.report.record import Record
from slime_compile.torch_private import aot_autograd, min_cut_rematerialization_partition

Compiled = Callable[..., Any]


def compile_interpreted(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    record: Record,
    observe: Callable[[Graph], None] = lambda graph: None,
) -> Compiled:
    """AOTAutograd with inductor's decompositions and our passes; the graphs are interpreted as they are.

    Args:
        observe: called with each joint or inference graph before the fusing pass.
    """
    from slime_compile.torch_private import select_decomp_table  # slow to import

    def partition(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        observe(gm.graph)
        run_fuse(gm.graph, options, record)
        gm.recompile()
        return min_cut_rematerialization_partition(gm, inputs, compiler="inductor", **kwargs)

    def inference(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        observe(gm.graph)
        run_fuse(gm.graph, options, record)
        return _interpreted(gm)

    def backward(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        run_inplace(gm.graph, donated_inputs(), options, record, inline=False)
        keep_saved(options, record)
        gm.recompile()
        return _interpreted(gm)

    compile_graph = aot_autograd(
        fw_compiler=lambda gm, inputs: _interpreted(gm),
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return compile_graph(gm, example_inputs)


# NOTE [Why not torch.fx.Interpreter?]
# It keeps its current node in a state of the whole process (torch.fx.traceback), also while another thread compiles.
# That thread's tracing then finds a foreign state, and fails ("Expected current_level > 0, got 0"). Less is needed
# here: operators, constants, and each value dropped after its last use, inputs included.


def _interpreted(gm: GraphModule) -> Compiled:
    """Runs the graph node by node; takes its inputs in a list and empties the list."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    unused = [node for node in placeholders if not node.users]
    steps = _steps(gm)
    returned = gm.graph.output_node().args[0]

    def run(args: list[Any]) -> Any:
        values: dict[Node, Any] = dict(zip(placeholders, args, strict=True))
        args.clear()
        for node in unused:
            del values[node]
        for node, function, last_used in steps:
            values[node] = function(
                *map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__)
            )
            for used in last_used:
                del values[used]
        return map_arg(returned, values.__getitem__)

    run._boxed_call = True  # type: ignore[attr-defined]
    holders.add_path(run.__code__, _names, _call_once)
    return run


def _names(frame: FrameType, tensor: Tensor) -> int:
    """How often a frame of `run` owns a tensor."""
    return sum(v is tensor for v in holders.local_variables(frame)["values"].values())


def _call_once(args: list[Any]) -> Any:
    """The deciding operator on a tensor of `args`, in a graph of its own."""
    graph = Graph()
    x, unread = graph.placeholder("x"), graph.placeholder("unread")
    operator_ = torch.ops.slime_fused.row_grad_over.default
    arguments = (x, unread, unread, unread, unread, False, "anyone", "")
    graph.output(graph.call_function(operator_, arguments, {"place": "probe"}))
    args.append(torch.empty(0, device="cpu"))
    return _interpreted(GraphModule(torch.nn.Module(), graph))(args)


def _steps(gm: GraphModule) -> list[tuple[Node, Callable[..., Any], list[Node]]]:
    """The call at each node, and the values unneeded after it."""
    last_use: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        last_use.update(dict.fromkeys((node, *node.all_input_nodes), node))
    ends: dict[Node, list[Node]] = {}
    for node, end in last_use.items():
        ends.setdefault(end, []).append(node)
    return [
        (node, _function(gm, node), ends.get(node, []))
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output")
    ]


def _function(gm: GraphModule, node: Node) -> Callable[..., Any]:
    if node.op == "get_attr":  # a constant, or the graph of a higher-order operator
        return functools.partial(operator.attrgetter(str(node.target)), gm)
    assert node.op == "call_function", (
        f"AOTAutograd's graphs call functions only, got {node.format_node()}"
    )
    if node.target is torch.ops.prims.convert_element_type.default:
        return _converted
    return cast(Callable[..., Any], node.target)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """prims.convert_element_type. Its own kernel returns a leaf that requires grad for such a leaf, also without
    autograd.
    """
    return tensor.to(dtype)
