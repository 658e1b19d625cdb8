"""In-place collectives in Dynamo's graph get the gradient of eager code.

Entry point: `keep_eager_gradients`, before AOTAutograd. In eager code autograd does not see `dist.all_reduce(x)`: it
changes the values of `x`, and the gradient passes unchanged. Dynamo traces it as `x.copy_(wait(all_reduce(x)))`.
Torch's derivative of the functional collective sums the gradient over the ranks, so every gradient would silently be
multiplied by the number of ranks. This pass writes `x.detach().copy_(wait(...).detach())` instead.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node


def keep_eager_gradients(gm: GraphModule) -> list[Node]:
    """Detaches in-place collectives from autograd, in `gm` and the graphs nested in it.

    Returns:
        The nodes that write a result over the operand, for the report.
    """
    changed = []
    for module in gm.modules():
        if isinstance(module, GraphModule):
            changed += [copy for copy in list(module.graph.nodes) if _detach(copy)]
            module.recompile()
    return changed


def _detach(copy: Node) -> bool:
    """`copy` writes the result of a collective over a tensor, and autograd would see it."""
    if copy.target != "copy_" or len(copy.args) < 2 or not _is_tracked_result(copy.args[1]):
        return False
    with copy.graph.inserting_before(copy):
        detached = [copy.graph.call_method("detach", (arg,)) for arg in copy.args[:2]]
    for node, arg in zip(detached, copy.args, strict=False):
        node.meta = dict(arg.meta)  # type: ignore[union-attr]
    copy.args = (*detached, *copy.args[2:])
    return True


def _is_tracked_result(node: object) -> bool:
    if not isinstance(node, Node) or not str(node.target).startswith(
        "_c10d_functional.wait_tensor"
    ):
        return False
    example = node.meta.get("example_value")
    return example is None or example.requires_grad
