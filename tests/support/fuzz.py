"""Losses made up from the algebra: the source text of a function, so that a failure prints as a script.

Entry points: `programs` (a Hypothesis strategy), `check`. A program moves the rows, prepares the logits, makes
full-vocabulary values and row values of them, combines row values, and returns one to three outputs. Everything it
can say has the row normal form; whether it is fused is told by `check`, whether it is right is asserted.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import slime_compile
from tests.cases.spellings import NV, Outputs, Spelling
from tests.support import harness

INPUTS = ("logits", "target", "mask", "row_temperature", "advantages")

# Each of them moves the rows of the logits (x) and of everything that belongs to them alike.
ROW_MAPS = (
    "v",
    "v[1:]",
    "v[:-1]",
    "v[2:5]",
    "v.roll(2, 0)",
    "v.flip(0)",
    "torch.cat([v[3:], v[:3]])",
    "torch.cat([v[:2], v[4:]])",
    "torch.stack([v[0], v[3], v[1]])",
    "torch.cat(v.split(3))",
    "torch.stack(v.unbind(0))",
    "v[[4, 0, 2]]",
)
PREPARED = (
    "x",
    "x.float()",
    "x.clone()",
    "x / 0.7",
    "x * 1.3",
    "x / temperature[:, None]",
    "x * temperature.reciprocal()[:, None]",
    "x.float() / 2 + 1.5",
    "x - x.amax(-1, keepdim=True)",
    "x - x.max(-1, keepdim=True).values.detach()",
    "x.masked_fill(~keep[:, None], 0.0)",
    "x.contiguous().view(-1, x.shape[-1])",
    "x.unsqueeze(0).squeeze(0)",
)
WIDE = (
    ("log_probs", "x.log_softmax(-1)"),
    ("log_probs", "F.log_softmax(x, -1, dtype=torch.float32)"),
    ("log_probs", "x - x.logsumexp(-1, keepdim=True)"),
    ("log_probs", "x.log_softmax(-1).clone()"),
    ("log_probs", "Categorical(logits=x, validate_args=False).logits"),
)
PROBS = (
    "x.softmax(-1)",
    "log_probs.exp()",
    "log_probs.exp().detach()",
    "x.softmax(-1).clone()",
    "(x - x.amax(-1, keepdim=True)).exp() / (x - x.amax(-1, keepdim=True)).exp().sum(-1, True)",
)
ROW_VALUES = (
    "pick(log_probs, target)",
    "pick(x, target) - x.logsumexp(-1)",
    "log_probs[torch.arange(target.shape[0]), target]",
    "-F.cross_entropy(x, target, reduction='none')",
    "F.nll_loss(log_probs, target.masked_fill(~keep, -100), reduction='none')",
    "-(probs * log_probs).sum(-1)",
    "x.logsumexp(-1) - (probs * x).sum(-1)",
    "-torch.xlogy(probs, probs).sum(-1)",
    "x.logsumexp(-1).square()",
    "x.amax(-1)",
    "x.float().mean(-1)",
    "log_probs.mean(-1)",
    "pick(probs, target)",
    "(F.one_hot(target, x.shape[-1]) * log_probs).sum(-1)",
    "torch.cat([pick(a.log_softmax(-1), b) for a, b in zip(x.split(2), target.split(2))])",
    "torch.stack([a.logsumexp(-1) for a in x])",
)
COMBINED = (
    "{a}",
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{a} - {b}.detach()",
    "({a} - {a}.detach()).exp() * advantages",
    "torch.where(keep, {a}, 0.0)",
    "{a} * keep",
    "-torch.min({a} * advantages, {a}.clamp(-2, 2) * advantages)",
    "{a}.detach() * {b}",
    "0.01 * {a} + advantages * {b}",
)
REDUCED = (
    "{a}",
    "{a}.mean()",
    "{a}.sum()",
    "({a} * keep).sum() / keep.sum().clamp(min=1)",
    "{a}[1:]",
)


@dataclass(frozen=True)
class Program:
    """The body of a loss, one line per statement, and the dtype of its logits."""

    lines: tuple[str, ...]
    dtype: torch.dtype

    @property
    def source(self) -> str:
        return "\n".join(
            [
                f"def loss({', '.join(INPUTS)}):",
                "    x, keep, temperature = logits, mask.bool(), row_temperature",
                *(f"    {line}" for line in self.lines),
                "",
            ]
        )

    def __repr__(self) -> str:
        return script(self)


def script(program: Program) -> str:
    """Reproduces a failure: `python the_script.py` from the repository's root."""
    return f"""
import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from tests.support import fuzz
from tests.cases.spellings import pick

{program.source}
fuzz.check_function(loss, {program.dtype})
"""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    moved = ("x", "target", "keep", "temperature", "advantages")
    lines = [
        f"{', '.join(moved)} = ({draw(st.sampled_from(ROW_MAPS))} for v in ({', '.join(moved)}))",
        *(f"x = {draw(st.sampled_from(PREPARED))}" for _ in range(draw(st.integers(0, 2)))),
        "{} = {}".format(*draw(st.sampled_from(WIDE))),
        f"probs = {draw(st.sampled_from(PROBS))}",
    ]
    names = []
    for number in range(draw(st.integers(1, 3))):
        names.append(f"row_{number}")
        lines.append(f"{names[-1]} = {draw(st.sampled_from(ROW_VALUES))}")
    outputs = []
    for _ in range(draw(st.integers(1, 3))):
        a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        combined = draw(st.sampled_from(COMBINED)).format(a=a, b=b)
        outputs.append(draw(st.sampled_from(REDUCED)).format(a=f"({combined})"))
    lines.append(f"return ({', '.join(outputs)},)")
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    return Program(tuple(lines), dtype)


def function(program: Program) -> Callable[..., Outputs]:
    """The program as a function whose lines a report can name."""
    file = f"<loss {hash(program.lines)}>"
    linecache.cache[file] = (len(program.source), None, program.source.splitlines(True), file)
    names: dict[str, Any] = {}
    exec(
        "from torch.distributions import Categorical\nfrom tests.cases.spellings import pick", names
    )
    names.update(torch=torch, F=torch.nn.functional)
    exec(compile(program.source, file, "exec"), names)
    return names["loss"]


def check(program: Program) -> dict[str, Any]:
    return check_function(function(program), program.dtype)


def check_function(fn: Callable[..., Outputs], dtype: torch.dtype) -> dict[str, Any]:
    """Assert values and gradients; returns what the reports say."""
    loss = Spelling("loss", (), fn, NV, None, INPUTS)
    harness.prepare(loss)
    ours = torch.compile(fn, backend="slime_fused", options=harness.OPTIONS)
    plain = torch.compile(fn, backend=harness.PLAIN)
    earlier = len(slime_compile.reports())
    harness.compare(ours, loss, dtype, plain=plain, draws=2, data=("plain",))
    return harness.merged(slime_compile.reports()[earlier:])
