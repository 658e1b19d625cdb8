"""A small ATen graph made by hand, what the walk says of it, and whether that is what the graph computes.

Entry point: `Scratch`. Inputs have a role, which says what values they take; each kind of `DRAWS` fills all of them.
Everything the walk says (forms, masks, values per row, full-vocabulary values that leave, polynomials) is evaluated
by `dense.py` and compared with the user's operator, executed in float64; in a graph that is float64 itself nothing is
converted, so that a rounding to float32 in the rewrite shows.

Long: the graph, the data for it and the comparison are one thing to a test.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import slime_compile.ops  # noqa: F401  registers what the walk emits
from fx_passes.algebra.forms import Form, Guard, Mask
from fx_passes.graph.facts import hint, is_float_tensor, shape_of
from fx_passes.graph.operators import VIEWS
from fx_passes.graph.order import ancestors
from fx_passes.outcome import FuseConfig
from fx_passes.rules import TABLES
from fx_passes.walk.walk import Walk
from slime_compile.backend.passes import FORMULAS
from tests.support.dense import Values, dense, dense_mask, dense_poly, is_no_factor

aten = torch.ops.aten

VOCAB = 5  # also a number of rows, here and there
KINDS = ("plain", "offset", "absent", "poisoned", "infinite", "lowest", "zeros", "mixed")
"""Of data: see `_logits` and `_rows`."""

LARGE = 1e150  # squares are finite in float64

_ROW_MOVES = VIEWS | {aten.cat.default, aten.index_select.default}
_DIVISIONS = {aten.div.Tensor, aten.div.Scalar, aten.reciprocal.default}

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # tried, and refused


class Impossible(Exception):
    """torch does not do this."""


@dataclass(frozen=True)
class Input:
    """A placeholder's role, and how its memory is laid out: "contiguous", "expanded" rows, "permuted" or "sliced"."""

    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"


@dataclass(frozen=True)
class Draw:
    """One set of data; `instead` of NaN and +inf a number, to see what depends on them."""

    kind: str
    seed: int
    instead: float | None = None

    @property
    def spoils(self) -> bool:
        return self.kind in ("poisoned", "infinite", "mixed")


DRAWS = tuple(Draw(kind, seed) for seed, kind in enumerate((*KINDS, "mixed")))


class Scratch:
    """A graph in the making.

    Args:
        dtype: of the logits; for float64 nothing is converted when values are computed.
        dynamic: sizes of the leading dimensions are symbolic.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> None:
        self.dtype = dtype
        self.dynamic = dynamic
        self.graph = Graph()
        self.fake_mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
        self.inputs: dict[Node, Input] = {}
        self.lines: list[str] = []

    # -- making --------------------------------------------------------------------------------------

    def input(
        self,
        role: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: str = "contiguous",
    ) -> Node:
        given = Input(role, tuple(shape), dtype or self.dtype, layout)
        node = self.graph.placeholder(f"{role}_{len(self.inputs)}")
        self.inputs[node] = given
        node.meta["val"] = self._fake(make(given, Draw("plain", 0)))
        last = "" if layout == "contiguous" else f", {layout!r}"
        self.lines.append(f"{node} = s.input({role!r}, {given.shape}, {given.dtype}{last})")
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node of the user's.

        Raises:
            Impossible: the operator does not take these arguments.
        """
        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            with self.fake_mode:
                fake = target(*fake_args, **fake_kwargs)
        except Exception as error:  # whatever torch raises
            raise Impossible(f"{target}{args}: {error}") from None
        if target is torch.ops.aten.gather.default and _exceeds_rows(*fake_args):
            raise Impossible(f"{target}{args}: an index with more rows")  # fake tensors take it
        if target is aten.index.Tensor and 0 in fake_args[0].shape and 0 not in fake.shape:
            raise Impossible(f"{target}{args}: elements of nothing")  # so they do this
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake
        given = [repr(a) for a in args] + [f"{k}={a!r}" for k, a in kwargs.items()]
        self.lines.append(f"{node} = s.call({_name(target)}, {', '.join(given)})")
        return node

    def iota(
        self, count: int, start: int = 0, step: int = 1, dtype: torch.dtype = torch.int64
    ) -> Node:
        """start, start + step, ..."""
        made = {"start": start, "step": step, "dtype": dtype}
        return self.call(
            torch.ops.prims.iota.default, count, **made, device="cpu", requires_grad=False
        )

    def _fake(self, real: Tensor) -> Tensor:
        if not self.dynamic:
            return self.fake_mode.from_tensor(real)
        sizes = [
            DimDynamic.DYNAMIC if dim < real.ndim - 1 and size > 1 else DimDynamic.STATIC
            for dim, size in enumerate(real.shape)
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        return self.fake_mode.from_tensor(real, symbolic_context=context)

    # -- walking -------------------------------------------------------------------------------------

    def walk(
        self,
        *returned: Node,
        roots: Sequence[Node] | None = None,
        backward: Sequence[Node] = (),
        save: str = "logits",
    ) -> Walked:
        """Ends the graph, which returns `returned`, and walks over it."""
        given = ", ".join(map(repr, returned))
        only = "" if roots is None else f", roots={list(roots)}"
        self.lines.append(f"s.walk({given}{only}).check()")
        for node in backward:
            node.meta["partitioner_tag"] = "is_backward"
        self.graph.output(tuple(returned))
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        config = FuseConfig(FORMULAS, min_vocab=VOCAB, save=save)  # type: ignore[arg-type]
        only_roots = None if roots is None else frozenset(roots)
        walk = Walk(self.graph, config, self.fake_mode, TABLES, only_roots)
        walk.run()
        return Walked(self, walk, nodes)

    def script(self) -> str:
        """The graph as a program that makes it again."""
        head = [
            "import torch",
            "from tests.support.scratch import Scratch",
            "",
            f"s = Scratch({self.dtype}{', dynamic=True' if self.dynamic else ''})",
        ]
        return "\n".join([*head, *self.lines])


@functools.cache
def is_lowered(target: Any) -> bool:
    """Whether inductor compiles this operator where it stands in a graph that is decomposed already."""
    from torch._inductor import lowering  # takes seconds
    from torch._inductor.decomposition import select_decomp_table

    return target in lowering.lowerings or target not in select_decomp_table()


def _exceeds_rows(x: Tensor, dim: int, index: Tensor) -> bool:
    sizes = zip(index.shape, x.shape, strict=True)
    return any(mine > theirs for at, (mine, theirs) in enumerate(sizes) if at != dim % x.ndim)


def _name(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return f"{target.__module__.lstrip('_')}.{target.__name__}"
    return f"torch.ops.{target}"


class Walked:
    """What a walk said of a scratch graph.

    Attributes:
        nodes: the user's operators.
    """

    def __init__(self, scratch: Scratch, walk: Walk, nodes: list[Node]) -> None:
        self.scratch, self.walk, self.nodes = scratch, walk, nodes
        self.refused = {each.node: each.reason for each in walk.account.refusals}
        self.meanings: dict[Node, Any] = {}
        with scratch.graph.inserting_before(scratch.graph.output_node()):
            for node in nodes:
                if is_float_tensor(node) and isinstance(self.said(node), Node):
                    self.meanings[node] = walk.context.rows.meaning(node)
        self._zero = self._zero_outside()

    def said(self, node: Node) -> Any:
        return self.walk.context.values[node]

    def answer(self, node: Node) -> str:
        """What kind of answer a node has."""
        said = self.said(node)
        if node in self.refused:
            return "refused"
        if isinstance(said, (Form, Mask)):
            return type(said).__name__.lower()
        if isinstance(said, tuple):
            return "pieces"
        return "in place" if node in self.walk.account.replacements else "none"

    def reads(self, node: Node) -> bool:
        """The node's polynomial is more than the node itself."""
        poly = self.meanings.get(node)
        return poly is not None and set(poly.atoms()) != {node}

    # -- comparing -----------------------------------------------------------------------------------

    def check(self, draws: Sequence[Draw] = DRAWS, nodes: Sequence[Node] | None = None) -> int:
        """Assert that what was said of `nodes` (all) is what the graph computes.

        Returns:
            The number of draws on which torch computes it.
        """
        done = sum(self._check(draw, self.nodes if nodes is None else nodes) for draw in draws)
        if done:  # torch's fake kernels take some operands that the real ones refuse
            self._check_shapes()
        unknown = {n.target for n in self.walk.context.emitter.created if not is_lowered(n.target)}
        assert not unknown, f"{unknown}: inductor decomposes them before it sees our graph"
        return done

    def _check_shapes(self) -> None:
        for node in self.nodes:
            said = self.said(node)
            form = said.form if isinstance(said, Mask) else said
            if isinstance(form, Form):
                want, have = _hints(shape_of(node)), _hints(form.shape)
                assert want == have, f"{node}: a form of {have}, the value is {want}"

    def _check(self, draw: Draw, nodes: Sequence[Node]) -> bool:
        values = self._values(draw)
        if values is None:
            return False
        others = [
            found
            for number in (3.0, 4.0)
            if draw.spoils and (found := self._values(replace(draw, instead=number)))
        ]
        for node in nodes:
            want = values[node]
            free = torch.ones((), dtype=torch.bool)  # elements that NaN and +inf do not reach
            if draw.spoils and isinstance(want, Tensor):
                free = torch.stack([each[node] == want for each in others]).all(0)
            if isinstance(self.said(node), Mask):
                free = free & self._certain(self.said(node), node, values)
            elif self._overflows(node, values, torch.inf if draw.spoils else LARGE) or any(
                self._overflows(node, each, LARGE) for each in others
            ):
                continue
            for what, (found, size) in self._claims(node, values):
                self._compare(node, what, found, values, free, 1e-11 * size, draw)
        return True

    def _certain(self, mask: Mask, node: Node, values: Values) -> Tensor:
        """Elements of which a mask speaks: no NaN, and none that is -inf in the dtype of the user's value only."""
        if mask.guard in (Guard.COLUMN, Guard.ROW):
            return torch.ones((), dtype=torch.bool)
        value, _ = dense(mask.form, values, self._zero)
        compared = node
        while values[compared].dtype is torch.bool:
            compared = compared.args[0]  # type: ignore[assignment]
        spoilt = values[compared].isnan()
        mended = spoilt & ~value.isnan() if mask.guard is Guard.NAN else spoilt | value.isnan()
        lowest = torch.finfo(self.scratch.dtype).min
        return ~mended & ~(value.isfinite() & (value <= lowest))

    def _values(self, draw: Draw) -> Values | None:
        """All values of the user's; None where torch itself refuses the data."""
        dtype = None if self.scratch.dtype is torch.float64 else torch.float64
        inputs = {node: make(given, draw, dtype) for node, given in self.scratch.inputs.items()}
        values = Values(inputs, dtype)
        try:
            for node in self.nodes:
                values[node]
        except (RuntimeError, IndexError):
            return None
        return values

    def _claims(self, node: Node, values: Values) -> list[tuple[str, tuple[Any, float]]]:
        """What is said of a node, evaluated, each with the largest number that went into it."""
        said, zero = self.said(node), self._zero
        claims: list[tuple[str, tuple[Any, float]]] = []
        mine = values.largest(node)
        if isinstance(said, Form):
            found, size = dense(said, values, zero)
            claims.append(("form", (found, max(size, mine))))
        elif isinstance(said, Mask):
            claims.append(("mask", (dense_mask(said, values, zero), mine)))
        new = self.walk.account.replacements.get(node)
        if new is not None:
            fake, old = new.meta["val"], node.meta["val"]
            if isinstance(old, torch.Tensor):
                assert fake.dtype == old.dtype, f"{node} was {old.dtype}, is {fake.dtype}"
                assert _hints(fake.shape) == _hints(old.shape), f"{node}: {fake} for {old}"
            claims.append(("new node", (values[new], max(values.largest(new), mine))))
        if node in self.meanings and not _is_wide(values[node]):
            found, size = dense_poly(self.meanings[node], values, zero)
            claims.append(("polynomial", (found, max(size, mine))))
        return claims

    def _zero_outside(self) -> set[Node]:
        """Nodes that vanish outside their rows, also in another order: what is said is not yet computed."""
        found = set(self.walk.context.rows.zero_outside)
        for node in self.walk.graph.nodes:
            if node.target in _ROW_MOVES and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def _overflows(self, node: Node, values: Values, largest: float) -> bool:
        """What the value is made of has numbers beyond `largest`, or finite ones where float64 ends."""
        return any(_exceeds(values[each], largest) for each in (*ancestors([node]), node))

    def _compare(
        self,
        node: Node,
        what: str,
        found: Any,
        values: Values,
        free: Tensor,
        tolerance: float,
        draw: Draw,
    ) -> None:
        want = values[node]
        if not isinstance(want, torch.Tensor):
            assert found == want, f"{node}: {what} is {found}, the value is {want}"
            return
        if what == "form" or what == "mask":
            assert found.shape == want.shape, f"{node}: {what} of {found.shape} for {want.shape}"
        if isinstance(self.said(node), Mask) and self.said(node).guard is Guard.PEAK:
            return  # a maximum of its own decides ties
        found = torch.as_tensor(found).expand(want.shape).double()
        want = want.double()
        wrong = free & wrong_elements(found, want, tolerance, draw.kind != "plain")
        if wrong.any() and self._makes_no_numbers(node, values):
            wrong &= ~want.isnan()
        if wrong.any():
            lost = self._divides_by_zero(node, values)
            wrong &= ~self._allowed(node, found, want, lost, draw)
            if isinstance(said := self.said(node), Form):
                wrong &= ~is_no_factor(said, values, self._zero)
            wrong &= ~(found.isnan() & self._of_rows_of_nan(node, values, want))
        if wrong.any():
            at = tuple(int(i) for i in wrong.nonzero()[0])
            raise AssertionError(
                f"{node} ({node.target}): its {what} has {found[at]!s} at {at} where torch computes {want[at]!s}, "
                f"for {draw}\n{self.scratch.script()}\n\nsaid: {self.said(node)}"
            )

    def _allowed(self, node: Node, found: Tensor, want: Tensor, lost: bool, draw: Draw) -> Tensor:
        """A clamped value is some very low number; what a column mask leaves of a value is NaN where any of it is.

        So it is where any of it is +inf or all of it -inf, and what is written over a column of nothing but NaN.

        Where infinite numbers are `lost`, NaN is as good.
        """
        said = self.said(node)
        # 0 / 0, or -inf - -inf of 1 / 0; the exponential of one is 0
        by_zero = (found.isnan() | want.isnan()) & torch.tensor(lost)
        if not isinstance(said, Form):
            return by_zero
        low = (found.abs() >= 1e4) & (want * found.sign() >= 1e4) | found.isinf()
        infinite = want.isinf() & torch.tensor(draw.kind in ("infinite", "mixed"))
        row = (want.isnan() | infinite).any(said.vdim, keepdim=True)
        row |= (want == -torch.inf).all(said.vdim, keepdim=True)
        if not any(hot.multiplied for hot in said.hots):
            columns = sum(
                hint(shape_of(index)[said.vdim]) for hot in said.hots for index in hot.index
            )
            row &= want.isnan().sum(said.vdim, keepdim=True) >= want.shape[said.vdim] - columns
        left = found.isnan() & row & torch.tensor(bool(said.hots))
        return by_zero | low & torch.tensor(said.clamped) | left

    def _makes_no_numbers(self, node: Node, values: Values) -> bool:
        """Of plain numbers the program itself makes NaN by an operator that no rule knows, log(x), or fills in -inf."""
        before = (*ancestors([node]), node)
        forms = [self.walk.context.values.get(each) for each in before]
        roots = {form.x for form in forms if isinstance(form, Form) and form.x is not None}
        infinite = any(is_float_tensor(each) and values[each].isinf().any() for each in before)
        return infinite or any(bool(values[root].isnan().any()) for root in roots)

    def _of_rows_of_nan(self, node: Node, values: Values, want: Tensor) -> Tensor:
        """Elements of rows whose logits are NaN throughout: they stay NaN, though `x >= finfo.min` takes them out."""
        found = torch.zeros((), dtype=torch.bool)
        for each in (node, *node.all_input_nodes):
            form = self.walk.context.values.get(each)
            if (
                not isinstance(form, Form)
                or form.x is None
                or values[form.x].shape[-1:] != (VOCAB,)
            ):
                continue
            rows = values[form.x].isnan().all(form.vdim, keepdim=True)
            if rows.numel() == want.numel():
                found = found | rows.reshape(want.shape)
            elif rows.ndim == want.ndim and all(
                mine in (1, theirs) for mine, theirs in zip(rows.shape, want.shape, strict=True)
            ):
                found = found | rows.expand(want.shape)
        return found

    def _divides_by_zero(self, node: Node, values: Values) -> bool:
        """A sum that is divided by zero is the sum of its terms divided by zero, NaN for an infinite number."""
        for each in (*ancestors([node]), node):
            divisor: Any = None
            if each.target in _DIVISIONS:
                divisor = each.args[-1]
            elif each.target is aten.pow.Tensor_Scalar and each.args[1] < 0:  # type: ignore[operator]
                divisor = each.args[0]
            if divisor is not None:
                by = values[divisor] if isinstance(divisor, Node) else divisor
                if bool((torch.as_tensor(by) == 0).any()):
                    return True
        return False


def _is_wide(found: Tensor) -> bool:
    """Of which no rule makes a number per row."""
    return found.ndim > 1 and found.shape[-1] == VOCAB


def _exceeds(found: Any, largest: float) -> bool:
    """A finite number beyond `LARGE` of either sign, or one beyond `largest`."""
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        return False
    return bool(((found > largest) | (found.isfinite() & (found.abs() > LARGE))).any())


def _hints(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(hint, shape))


def wrong_elements(found: Tensor, want: Tensor, tolerance: float, may_mend: bool) -> Tensor:
    """Where a value is not what eager computes.

    `may_mend`: where eager has NaN, anything goes: a -inf logit, or a coefficient of zero, contributes nothing.
    """
    near = (found - want).abs() <= tolerance + 1e-9 * want.abs()
    right = near | (found == want) | (found.isnan() & want.isnan())
    if may_mend:
        right |= want.isnan()
    return ~right


# -- data ---------------------------------------------------------------------------------------------


def make(given: Input, draw: Draw, dtype: torch.dtype | None = None) -> Tensor:
    """The input's values, which its dtype can hold; a floating one in `dtype` where that is given."""
    generator = torch.Generator().manual_seed(draw.seed * 1000 + hash_of(given))
    tensor = _MAKERS[given.role](given, draw.kind, generator).to(given.dtype)
    if draw.instead is not None and tensor.is_floating_point():
        tensor = tensor.nan_to_num(draw.instead, draw.instead, -torch.inf)
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return _laid_out(tensor, given.layout)


def hash_of(given: Input) -> int:
    return sum((at + 1) * size for at, size in enumerate(given.shape)) + len(given.role)


def _logits(given: Input, kind: str, generator: torch.Generator) -> Tensor:
    """Each row of "mixed" data is of another kind.

    Moderate numbers with offsets, absent columns (-inf), poison (NaN), +inf, the lowest finite number, or zeros.
    """
    x = 2 * torch.randn(given.shape, generator=generator, dtype=torch.float64)
    if kind == "plain":
        return x
    row = torch.randint(7, (*given.shape[:-1], 1), generator=generator)
    pick = torch.rand(given.shape, generator=generator)
    some = pick <= pick.kthvalue(max(1, given.shape[-1] // 2), -1, keepdim=True).values
    all_of = torch.rand((*given.shape[:-1], 1), generator=generator) < 0.3
    lowest = torch.finfo(given.dtype).min
    kinds = {
        "offset": x + 1e4,
        "absent": torch.where(some | all_of, -torch.inf, x),
        "poisoned": torch.where(some & (pick < 0.4), torch.nan, x),
        "infinite": torch.where(some & (pick < 0.4), torch.inf, x),
        "lowest": torch.where(some | all_of, lowest, x),
        "zeros": torch.where(some, 0.0, x),
    }
    if kind != "mixed":
        return torch.where(row < 4, kinds[kind], x)
    for at, each in enumerate(kinds.values()):
        x = torch.where(row == at, each, x)
    return x


def _rows(given: Input, kind: str, generator: torch.Generator) -> Tensor:
    """Numbers per row of either sign; zeros among them where the kind says so."""
    r = torch.randn(given.shape, generator=generator, dtype=torch.float64)
    r = torch.where(r.abs() < 0.2, 0.5, r)
    if kind in ("zeros", "mixed"):
        r = torch.where(torch.rand(given.shape, generator=generator) < 0.4, 0.0, r)
    return r


def _positive(given: Input, kind: str, generator: torch.Generator) -> Tensor:
    """Temperatures."""
    return torch.rand(given.shape, generator=generator, dtype=torch.float64) + 0.5


def _hits(given: Input, kind: str, generator: torch.Generator) -> Tensor:
    """Columns that are there, also repeated ones."""
    return torch.randint(VOCAB, given.shape, generator=generator)


def _any_index(given: Input, kind: str, generator: torch.Generator) -> Tensor:
    """Columns that may be missed: negative, -100, past the end, with a fraction."""
    choice = torch.tensor([0.0, 1.0, 2.0, VOCAB - 1, VOCAB, -1.0, -100.0, 1.5, 200.0])
    if not given.dtype.is_floating_point:
        choice = choice[choice == choice.long()]
    if given.dtype in (torch.uint8, torch.bool):
        choice = choice[choice >= 0]
    return choice[torch.randint(len(choice), given.shape, generator=generator)]


def _flags(given: Input, kind: str, generator: torch.Generator) -> Tensor:
    return torch.rand(given.shape, generator=generator) < 0.6


_MAKERS = {
    "logits": _logits,
    "rows": _rows,
    "positive": _positive,
    "hits": _hits,
    "index": _any_index,
    "flags": _flags,
}


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "expanded" and tensor.ndim > 1:
        return tensor[:1].expand(tensor.shape)
    if layout == "permuted":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        whole = tensor.new_zeros([*tensor.shape[:-1], tensor.shape[-1] + 2])
        whole[..., 1:-1] = tensor
        return whole[..., 1:-1]
    return tensor
