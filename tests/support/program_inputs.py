"""The tensors of a generated program: layouts, who needs a gradient, rows of special data, indices that miss.

Entry points: `Spec` (says all of it, prints as itself) and `make` (the tensors of one draw). Names of a program's
arguments, over a lead L = (N,) or (B, S):

    x, y    [*L, V]  logits and the logits of a reference          t     [*L]     int64 indices into V
    w       [*L]     weights, some 0                                u     [*L]     other indices, see `Spec.misses`
    tau     [*L, 1]  positive                                       keep  [*L]     bool, some rows are masked
    h, e    [*L, 3], [V, 3]  hidden states and a head               allow [*L, V]  bool, each row has one at least
    col     [V]      float
    reward, state  [*L]  numbers that do not belong to the logits, and that a program may write over
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("x", "y", "t", "u", "w", "keep", "allow", "col", "tau", "h", "e", "reward", "state")
Shape = tuple[int, ...]

# Layout -> the shape of what is allocated, and the view of it that the program gets.
LAYOUTS: dict[str, tuple[Callable[[Shape], Shape], Callable[[Tensor], Tensor]]] = {
    "plain": (lambda s: s, lambda v: v),
    "vocabulary first": (lambda s: (s[-1], *s[:-1]), lambda v: v.movedim(0, -1)),
    "rows permuted": (
        lambda s: (*s[-2::-1], s[-1]),
        lambda v: v.permute(*range(v.ndim - 2, -1, -1), v.ndim - 1),
    ),
    "every second row": (lambda s: (2 * s[0], *s[1:]), lambda v: v[::2]),
    "part of the columns": (lambda s: (*s[:-1], s[-1] + 3), lambda v: v[..., 1:-2]),
    "later rows": (lambda s: (s[0] + 1, *s[1:]), lambda v: v[1:]),
    "expanded": (lambda s: (1, *s[1:]), lambda v: v),  # `_given` expands
}


RowKind = Callable[[Tensor, torch.Generator, int], Tensor]


def _peaked(row: Tensor, draw: torch.Generator, target: int, more: float = 40.0) -> Tensor:
    return _with(row, int(torch.randint(row.numel(), (), generator=draw)), more)


def _with(row: Tensor, column: int, more: float) -> Tensor:
    row = row.clone()
    row[column] += more
    return row


def _some(value: float) -> RowKind:
    """A row with `value` in about a third of its columns, one of them always, one of them never."""

    def kind(row: Tensor, draw: torch.Generator, target: int) -> Tensor:
        at = torch.rand(row.shape, generator=draw) < 0.3
        at[0], at[-1] = True, row.numel() == 1
        return torch.where(at, value, row)

    return kind


# A row of 3 N(0, 1) and its target -> a row of another kind.
ROWS: dict[str, RowKind] = {
    "plain": lambda row, *_: row,
    "offset 30": lambda row, *_: row + 30,
    "offset 1000": lambda row, *_: row + 1000,
    "offset -1e4": lambda row, *_: row - 1e4,
    "peaked": _peaked,
    "peaked at the target": lambda row, draw, target: _with(row, target, 40.0),
    "target far below": lambda row, draw, target: _with(row, target, -1e4),
    "flat": lambda row, *_: row / 50,
    "equal": lambda row, *_: torch.full_like(row, 0.5),
    "zero": lambda row, *_: torch.zeros_like(row),
    "some -inf": _some(-math.inf),
    "only -inf": lambda row, *_: torch.full_like(row, -math.inf),
    "one +inf": lambda row, *_: torch.cat([row[:-1], row.new_tensor([math.inf])]),
    "one NaN": lambda row, *_: torch.cat([row.new_tensor([math.nan]), row[1:]]),
    "some finfo.min": lambda row, *rest: _some(FINFO_MIN)(row, *rest),
}
# Further kinds, of rows with a token that is more or less certain; `program_rows` alone draws them.
CONFIDENT: dict[str, RowKind] = {
    "10 times": lambda row, *_: 10 * row,
    "token + 9": lambda row, draw, target: _peaked(row, draw, target, 9.0),
    "token + 17": lambda row, draw, target: _peaked(row, draw, target, 17.0),
    "token + 25": lambda row, draw, target: _peaked(row, draw, target, 25.0),
    "target + 17": lambda row, draw, target: _with(row, target, 17.0),
    "target - 30": lambda row, draw, target: _with(row, target, -30.0),
    "first + 17": lambda row, *_: _with(row, 0, 17.0),
    "first + 30": lambda row, *_: _with(row, 0, 30.0),
}
FINFO_MIN = -65504.0  # float16's: exists in every dtype but for bfloat16's rounding

# What `u` holds beside valid indices, and its dtype.
MISSES: dict[str, tuple[float, torch.dtype]] = {
    "-100": (-100, torch.int64),
    "negative": (-1, torch.int64),
    "beyond": (1000, torch.int64),
    "int32": (-1, torch.int32),
    "uint8": (255, torch.uint8),
    "float": (1.5, torch.float32),
    "repeats": (0, torch.int64),
}


@dataclass(frozen=True)
class Spec:
    """What the tensors are.

    Attributes:
        lead: (N,) or (B, S).
        vocab: V.
        dtype: name of the dtype of x, y, h, e, such as "float32".
        row_dtype: of w, tau, col, reward and state.
        layout: a key of `LAYOUTS`, for x and for y.
        grads: for x and y: "leaf", "inside" (a value that has a gradient), "none".
        rows: kinds of rows, keys of `ROWS` or `CONFIDENT`; each row draws one.
        misses: a key of `MISSES`.
    """

    lead: Shape = (5,)
    vocab: int = 7
    dtype: str = "float32"
    row_dtype: str = "float32"
    layout: tuple[str, str] = ("plain", "plain")
    grads: tuple[str, str] = ("leaf", "none")
    rows: tuple[str, ...] = ("plain",)
    misses: str = "-100"


@dataclass
class Inputs:
    """Arguments of one call, and the leaves whose gradients are wanted."""

    arguments: list[Tensor]
    leaves: list[Tensor]


def make(spec: Spec, seed: int, lead: Shape | None = None, shard: int = 0) -> Inputs:
    """The tensors of draw `seed`; with another `lead` for other sizes; ranks differ in x, y and e by their `shard`."""
    lead = lead or spec.lead
    own = torch.Generator().manual_seed(1000 * seed + shard)
    draw = torch.Generator().manual_seed(seed)
    dtype, row_dtype = getattr(torch, spec.dtype), getattr(torch, spec.row_dtype)
    inside = spec.grads[0] != "none"
    weights = torch.randn(*lead, generator=draw) * (torch.rand(*lead, generator=draw) < 0.7)
    hidden = torch.randn(*lead, 3, generator=draw).to(dtype).requires_grad_(inside)
    target = torch.randint(spec.vocab, lead, generator=draw)
    leaves: list[Tensor] = []
    logits = [
        _given(_rows(spec, target, own).to(dtype), layout, grad, leaves)
        for layout, grad in zip(spec.layout, spec.grads, strict=True)
    ]
    allow = torch.rand(*lead, spec.vocab, generator=own) < 0.7
    allow[..., -1] = True
    head = torch.randn(spec.vocab, 3, generator=own).to(dtype).requires_grad_(inside)
    return Inputs(
        [
            *logits,
            target,
            _missing(spec, lead, draw),
            weights.to(row_dtype),
            torch.rand(*lead, generator=draw) < 0.6,
            allow,
            torch.randn(spec.vocab, generator=own).to(row_dtype),
            (torch.rand(*lead, 1, generator=draw) + 0.5).to(row_dtype),
            hidden,
            head,
            *(torch.randn(*lead, generator=draw).to(row_dtype) for _ in ("reward", "state")),
        ],
        leaves + ([hidden, head] if inside else []),
    )


def _rows(spec: Spec, target: Tensor, draw: torch.Generator) -> Tensor:
    values = 3 * torch.randn(target.numel(), spec.vocab, generator=draw)
    for at, (row, column) in enumerate(zip(values, target.flatten().tolist(), strict=True)):
        chosen = int(torch.randint(len(spec.rows), (), generator=draw))
        values[at] = (ROWS | CONFIDENT)[spec.rows[chosen]](row, draw, column)
    return values.view(*target.shape, spec.vocab)


def _missing(spec: Spec, lead: Shape, draw: torch.Generator) -> Tensor:
    value, dtype = MISSES[spec.misses]
    index = torch.randint(spec.vocab, lead, generator=draw).to(torch.float32)
    index[torch.rand(*lead, generator=draw) < 0.4] = value
    return index.to(dtype)


def _given(values: Tensor, layout: str, grad: str, leaves: list[Tensor]) -> Tensor:
    """`values` in a layout: a leaf (or its view), a value with a gradient, or neither."""
    allocate, view = LAYOUTS[layout]
    base = torch.full(allocate(tuple(values.shape)), 0.25, dtype=values.dtype)
    view(base).copy_(values[: len(view(base))])
    if grad != "none":
        leaves.append(base.requires_grad_())
    given = view(base * 1 if grad == "inside" else base)
    return given.expand(values.shape) if layout == "expanded" else given


def in_float64(made: Inputs, spec: Spec) -> Inputs:
    """The same values with float64 for every float, as new leaves in the same layouts."""
    leaves: list[Tensor] = []
    arguments = [
        v.detach().clone().double() if v.is_floating_point() and i > 1 else v
        for i, v in enumerate(made.arguments)
    ]
    for at, (layout, grad) in enumerate(zip(spec.layout, spec.grads, strict=True)):
        arguments[at] = _given(made.arguments[at].detach().double(), layout, grad, leaves)
    if spec.grads[0] != "none":
        leaves += [arguments[NAMES.index(name)].requires_grad_() for name in ("h", "e")]
    return Inputs(arguments, leaves)
