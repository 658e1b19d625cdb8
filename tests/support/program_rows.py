"""What most rows of one kind lose, beside eager code.

Entry points: `row_programs`, `losses`. `program_judge` allows in every row what eager code loses in some of them. Where
one token is certain, eager code may lose nothing, and a rewrite that adds what cancels there all that the row has. So
here all rows of a draw are of one kind, and what is compared is no largest error, which is luck, but the one that a row
in twenty exceeds.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support import harness
from tests.support.program_inputs import CONFIDENT, MISSES, Spec, make
from tests.support.program_judge import MIN_VOCAB, Judge, runs_in_eager
from tests.support.programs import Program, generate

COUNT, VOCAB = 240, 13
KINDS = (
    *("plain", "offset 1000", "offset -1e4", "peaked", "peaked at the target", "target far below", "flat"),
    *CONFIDENT,
)  # fmt: skip
QUANTILE = 0.95
FACTOR = 4  # on eager's error, and on a rounding of the largest number
TINY = 1e-14  # numbers below are of rows in which nothing happens


def row_programs(start: int, count: int) -> Iterator[tuple[int, Program]]:
    """`count` programs over many rows, with their seeds, from seed `start`."""
    for seed in range(start, start + count):
        rng = random.Random(f"rows {seed}")
        grads = (rng.choice(["leaf", "inside"]), rng.choice(["none", "leaf"]))
        spec = Spec((COUNT,), VOCAB, grads=grads, misses=rng.choice([*MISSES]))
        yield seed, generate(seed, spec)


def losses(program: Program) -> list[str]:
    """Outputs and gradients that lose more than eager code and plain torch do, by kinds of rows.

    What raises, in eager code or compiled, is for `program_judge`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not runs_in_eager(Judge(), program):
            return []
        options = harness.OPTIONS | {"min_vocab": MIN_VOCAB, "inner": "aot_eager"}
        try:
            found = _losses(program, KINDS, backend="slime_fused", options=options)
        except RuntimeError:
            return []
        kinds = tuple(dict.fromkeys(loss.kind for loss in found))
        if not kinds or _mixes_rows(program):
            return []
        plain = _losses(program, kinds, backend=harness.PLAIN)
    without_us = {(loss.name, loss.kind) for loss in plain}
    return [str(loss) for loss in found if (loss.name, loss.kind) not in without_us]


@dataclass(frozen=True)
class _Loss:
    """The errors that one row in twenty exceeds, and so the size of its largest number."""

    name: str
    kind: str
    ours: float
    eager: float
    size: float

    @property
    def counts(self) -> bool:
        rounding = torch.finfo(torch.float32).eps * self.size
        return self.ours > FACTOR * (self.eager + rounding) and self.size > TINY

    def __str__(self) -> str:
        return (
            f"{self.name}, rows {self.kind!r}: error {self.ours:.1e} where eager code has {self.eager:.1e}, "
            f"of {self.size:.1e}"
        )


def _losses(program: Program, kinds: tuple[str, ...], **how: Any) -> list[_Loss]:
    fn, judge, found = program.function(), Judge(), []
    torch._dynamo.reset()
    compiled = torch.compile(fn, **how)
    for kind in kinds:
        spec = replace(program.spec, rows=(kind,))
        eager, ours = (judge.run(each, make(spec, 0)).values() for each in (fn, compiled))
        truth = judge.true(fn, spec, make(spec, 0)).values()
        found += [
            _loss(name, kind, ours[name], eager[name], true)
            for name, true in truth.items()
            if name.startswith(("outputs", "gradients")) and _is_of_rows(true, eager[name])
        ]
    return [loss for loss in found if loss.counts]


def _mixes_rows(program: Program) -> bool:
    """Whether a row's gradient depends on other rows (`x.softmax(0)`): what they lose is not of their kind."""
    fn, judge, found = program.function(), Judge(), []
    for changed in (False, True):
        inputs = make(program.spec, 0)
        for logits in inputs.arguments[:2] if changed else ():
            logits.data[0] = logits.data[0].flip(0)
        values = judge.true(fn, program.spec, inputs).values()
        found.append({name: v for name, v in values.items() if name.startswith("gradients")})
    return any(
        not torch.allclose(one[1:], found[1][name][1:], rtol=1e-9, atol=0, equal_nan=True)
        for name, one in found[0].items()
        if one.ndim and len(one) == COUNT
    )


def _is_of_rows(true: Tensor, eager: Tensor) -> bool:
    return true.ndim > 0 and len(true) == COUNT and eager.dtype is torch.float32


def _loss(name: str, kind: str, ours: Tensor, eager: Tensor, true: Tensor) -> _Loss:
    """Of each row its largest error; what is not finite is for `program_judge`."""
    rows = [each.double().reshape(COUNT, -1) for each in (ours, eager, true)]
    finite = torch.stack([each.isfinite() for each in rows]).all(0)
    ours, eager, true = (each.where(finite, 0.0) for each in rows)
    largest = [each.abs().amax(-1) for each in (ours - true, eager - true, true)]
    return _Loss(name, kind, *(float(each.quantile(QUANTILE)) for each in largest))
