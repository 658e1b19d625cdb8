"""A head: `mm`, `addmm`, a `bmm` over one matrix, or one of them plus a bias; perhaps with a softcap.

Entry point: `head_of`. A matrix is known by the node that it comes from and by whether it is seen turned, so that the
weight of forward and its transpose in backward are recognised as one, however often either was permuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fx_passes.graph.emit import Emitter
from fx_passes.graph.facts import same, shape_of, value
from fx_passes.graph.operators import RESHAPES, VIEWS, turns
from fx_passes.graph.user_lines import source_of
from fx_passes.linear.softcap import Softcap, under_softcap
from fx_passes.refused import Refused

aten = torch.ops.aten

PRODUCTS = {aten.mm.default, aten.bmm.default}


@dataclass(frozen=True)
class Matrix:
    """The last two dimensions of `base`, turned or not."""

    base: Node
    turned: bool

    @classmethod
    def of(cls, node: Node, emit: Emitter) -> Matrix:
        turned = False
        node = emit.represents.get(node, node)
        while node.op == "call_function" and (node.target in _SAME or turns(node)):
            turned ^= node.target not in _SAME
            inner = node.args[0]
            assert isinstance(inner, Node), node
            node = emit.represents.get(inner, inner)
        return cls(node, turned)

    @property
    def t(self) -> Matrix:
        return Matrix(self.base, not self.turned)

    def emit(self, emit: Emitter) -> Node:
        """The matrix as a node with two dimensions."""
        node = self.base
        if len(shape_of(node)) == 3:
            node = emit.call(aten.squeeze.dim, node, 0)
        return emit.call(aten.permute.default, node, [1, 0]) if self.turned else node


_SAME = {aten.alias.default, aten.detach.default}


@dataclass(frozen=True)
class Head:
    """`root` is `hidden @ weight.t() + bias`: [N, V], or [1, N, V] of a `bmm`, or [..., V] of a sum, or that capped.

    Attributes:
        made: the matmul's result, or its sum with the bias: `root` itself where there is no softcap.
        hidden: [N, D] or [1, N, D], as the program's matmul takes it.
        weight: [V, D].
        bias: [V], or [..., V] with ones.
    """

    root: Node
    made: Node
    hidden: Matrix
    weight: Matrix
    bias: Node | None
    softcap: Softcap | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits, before a softcap."""
        dtype: torch.dtype = value(self.made).dtype
        return dtype


def is_head(node: Node) -> bool:
    """A matmul, a matmul that has no other reader than `node`, which adds something to it, or one of them capped."""
    return _found(node) is not None


def made_of(node: Node) -> tuple[Node, Softcap | None]:
    """The logits of the head `node` before a softcap, and the softcap."""
    found = _found(node)
    assert found is not None, node
    return found


def weight_of(node: Node) -> Node:
    """The matrix that a head multiplies by, under views of it."""
    parts = _parts(made_of(node)[0])
    assert parts is not None, node
    product, _ = parts
    weight = product.args[2 if product.target is aten.addmm.default else 1]
    while isinstance(weight, Node) and weight.op == "call_function" and weight.target in VIEWS:
        weight = weight.args[0]
    assert isinstance(weight, Node), node
    return weight


def _found(node: Node) -> tuple[Node, Softcap | None] | None:
    if _parts(node) is not None:
        return node, None
    for made, softcap in under_softcap(node):
        if _parts(made) is not None:
            return made, softcap
    return None


def head_of(node: Node, emit: Emitter) -> Head:
    """What the head `node` multiplies.

    Raises:
        Refused: several matrices, a bias that is not one number per column, or a softcap beside which somebody reads
            the logits, or that rounds them to a narrower dtype.
    """
    made, softcap = made_of(node)
    parts = _parts(made)
    assert parts is not None, node
    product, bias = parts
    if softcap is not None:
        _check_softcap(made, softcap, node)
    operands: Any = product.args[1:] if product.target is aten.addmm.default else product.args
    if len(shape_of(product)) == 3 and not same(shape_of(product)[0], 1):
        raise Refused("a batch of matrices is multiplied, each by a matrix of its own", product)
    if bias is not None and not _is_plain_bias(bias, made, product):
        raise Refused("the matmul gets an addend other than one number per column", made)
    hidden, weight = operands[:2]
    weight = Matrix.of(weight, emit).t
    return Head(node, made, Matrix.of(hidden, emit), weight, bias, softcap)


def _check_softcap(made: Node, softcap: Softcap, root: Node) -> None:
    for node in (made, *softcap.between):
        for user in node.users:
            if user is not root and user not in softcap.between:
                where = source_of(user)
                read = f"{user.target}{f' at {where}' if where else ''}"
                raise Refused(f"the logits are read before their softcap by {read}", user)
    if any(
        value(each).dtype.itemsize < value(made).dtype.itemsize for each in (*softcap.between, root)
    ):
        raise Refused("the softcap rounds the logits to a narrower dtype", root)


def _parts(node: Node) -> tuple[Node, Node | None] | None:
    """The matmul, and what is added to it."""
    if node.op != "call_function":
        return None
    if node.target in PRODUCTS:
        return node, None
    if node.target is aten.addmm.default:
        return node, node.args[0]  # type: ignore[return-value]
    if node.target is not aten.add.Tensor:
        return None
    left, right = node.args[:2]
    for product, bias in ((left, right), (right, left)):
        if isinstance(product, Node) and isinstance(bias, Node):
            found = _alone(product, node)
            if found is not None:
                return found, bias
    return None


def _alone(node: Node, reader: Node) -> Node | None:
    """The matmul without bias under the views of `node`, if `reader` is its only reader."""
    while list(node.users) == [reader] and node.op == "call_function":
        if node.target in PRODUCTS:
            return node
        if node.target not in RESHAPES or not _keeps_last(node):
            return None
        node, reader = node.args[0], node  # type: ignore[assignment]
    return None


def _keeps_last(node: Node) -> bool:
    shape, inner = shape_of(node), shape_of(node.args[0])
    return bool(shape) and bool(inner) and same(shape[-1], inner[-1])


def _is_plain_bias(bias: Node, node: Node, product: Node) -> bool:
    """One number per column, added as it is."""
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return False
    if len({value(each).dtype for each in (bias, node, product)}) > 1:
        return False
    *lead, columns = shape_of(bias) or (1,)
    return all(same(size, 1) for size in lead) and same(columns, shape_of(node)[-1])
