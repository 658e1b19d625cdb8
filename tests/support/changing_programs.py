"""Programs that change memory in every way around two heads, selected rows and returned logits.

Entry point: `changing(seed) -> Program`. `programs.generate` draws statements that are likely to be fused; here the
statements between two heads, or between a head and the rows that are taken of its logits, write to what both read, by
methods, flags, lists, operators of a library, functions, views and data. Values are then reduced in mixed dtypes.
"""

from __future__ import annotations

import random

import torch

from tests.support.program_inputs import Spec, make
from tests.support.programs import Program

WRITES = (
    "{}.mul_(2)", "F.relu({}, True)", "F.leaky_relu({}, 0.1, True)", "F.hardtanh({}, -0.5, 0.5, True)", "F.dropout({}, 0.0, True, True)",
    "torch._foreach_mul_([{}], 2)", "torch._foreach_add_([{0}[:1], {0}[1:]], 1)", "torch.ops.slime_tests.scaled({}, 2.0)",
    "torch.ops.slime_tests.scaled.default({}, 2.0)", "torch.ops.aten.mul_({}, 2)", "torch.mul({0}, 2, out={0})", "{}.data.mul_(2)",
    "{0}.set_({0} * 2)", "{0}.copy_({0} * 2)", "{}[1:].mul_(2)", "{0}[:1] = {0}[-1:]", "{}.view(-1)[3:].zero_()", "{}.t().mul_(2)",
    "Doubled.apply({})", "DoubledUnmarked.apply({})", "torch.clamp_({}, -0.5, 0.5)", "{}.__imul__(2)", "{}.unbind(0)[0].add_(1)",
    "nn.Hardtanh(-0.5, 0.5, inplace=True)({})", "{}.detach().neg_()", "checkpoint(lambda v: v.mul_(2).sum(), {}, use_reentrant=False)",
    "{}.index_fill_(0, torch.tensor([0]), 0.5)", "torch.neg_({})", "{0}.addcmul_({0}, {0})", "{}.t_().t_()", "{}.resize_({}.shape)",
    "{}.register_hook(lambda grad: grad * 3)",
)  # fmt: skip
TARGETS = (
    "h1",
    "h1.detach()",
    "w1",
    "w1.detach()",
    "a",
    "a.detach()",
    "a[1:]",
    "tau1",
    "col1",
    "tau1.detach()",
    "a[:2]",
    "beside",
)
HEADS = (
    "h1 @ w1.t()", "F.linear(h1, w1)", "(h1 @ w1.t()) / tau1", "h1 @ w1.t() + tau1", "F.linear(h1, w1, col1)", "torch.tanh(h1 @ w1.t() / 3) * 3",
    "(h1 @ w1.t())[1:]", "(h1 @ w1.t())[:3]", "torch.addmm(col1, h1, w1.t())",
)  # fmt: skip
ROWS = (
    "a[1:3]", "a[:2]", "a[2:]", "a[torch.arange(2) + 1]", "a[t.clamp(max=1)]", "a[1:][:2]", "torch.cat([a[:1], a[2:3]])", "a.index_select(0, t[:2] % 3)",
    "a / 0.7", "a.double()", "a.bfloat16()", "a", "a.detach()", "a[:3] - tau1[:1]", "a.view(a.shape)",
)  # fmt: skip
VALUES = (
    "{}.log_softmax(-1)[..., 1]", "{}.logsumexp(-1)", "({0}.softmax(-1) * {0}.log_softmax(-1)).sum(-1)", "{}.log_softmax(-1).sum(dtype=torch.float64)",
    "{}.tanh().mean(-1, dtype=torch.float64)", "torch.stack([{0}.float(), {0}.double()]).logsumexp(0).sum(-1)", "{}.square().sum(-1)",
    "torch.stack([{0}, {0}.bfloat16()]).amax(0).sum(-1)", "torch.cat([{0}.float(), {0}.double()]).logsumexp(-1)", "{}.exp().sum(-1, dtype=torch.float32)",
    "({0} + {0}.double()).logsumexp(-1)", "torch.where({0} > 0, {0}, {0}.double()).softmax(-1)[..., 0]",
)  # fmt: skip
RETURNED = (
    "a", "b", "c", "a[1:]", "c[:2]", "h1", "beside", "tau1", "a.detach()", "a.detach()[1:]", "a.detach()[:, 1:]", "b.detach()[:3]", "b.detach()[:, :4]",
)  # fmt: skip
"""Logits with a gradient: where the caller writes to others that backward reads, autograd raises."""

BREAKS = "Doubled.apply({})"
"""Where it records no gradient Dynamo ends the graph, and what follows writes to logits that a graph has returned."""


def changing(seed: int) -> Program:
    """The first draw of a seed that eager code runs, forward and backward."""
    rng = random.Random(f"changing {seed}")
    while True:
        program = _drawn(rng)
        if _runs(program):
            return program


def _drawn(rng: random.Random) -> Program:
    dtype = rng.choice(["float32", "float32", "float64"])
    spec = Spec((4,), rng.choice([6, 9]), dtype, dtype, grads=("inside", "none"))
    head = rng.choice(HEADS)
    other = head if rng.random() < 0.7 else rng.choice(HEADS)
    middle = [f"a = {head}", f"b = {other}", f"c = {rng.choice(ROWS)}"]
    for _ in range(rng.choice([1, 1, 2])):
        text = rng.choice(WRITES)
        target = "a" if text == BREAKS else rng.choice(TARGETS)
        write = text.format(*[target] * text.count("{"))
        if rng.random() < 0.3 and text != BREAKS:
            write = f"with torch.no_grad():\n    {write}"
        middle.insert(rng.randint(1, len(middle)), write)
    early = f"v0 = {rng.choice(VALUES).format('a')}"
    middle.insert(rng.randint(middle.index(f"a = {head}") + 1, len(middle)), early)
    first = (
        f"h1 = {rng.choice(['h * 1', 'h * 1', 'h.tanh()', 'h.detach() * 1', 'h'])}",
        f"w1 = {rng.choice(['e.detach() * 1', 'e.detach() * 1', 'e * 1', 'e'])}",
        "tau1, col1, beside = tau * 1, e[:, 0].detach() * 1, torch.ones_like(h)",
    )
    values = [
        "v0",
        *(rng.choice(VALUES).format(rng.choice("bc")) for _ in range(rng.choice([1, 2]))),
    ]
    if rng.random() < 0.5:
        values = [f"sum(v.sum() for v in ({', '.join(values)},))"]
    values += rng.sample(RETURNED, rng.choice([0, 0, 1, 2]))
    return Program((*first, *middle, f"return ({', '.join(values)},)"), spec)


def _runs(program: Program) -> bool:
    given = make(program.spec, 0)
    try:
        found = program.function()(*given.arguments)
        loss = sum(each.float().square().sum() for each in found if each.requires_grad)
        torch.autograd.grad(loss, given.leaves, allow_unused=True)  # type: ignore[arg-type]
    except Exception:  # any refusal of torch is one
        return False
    return True
