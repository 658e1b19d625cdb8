"""Small programs of plain torch: what generated programs failed on, reduced; and what a mutant survived without.

Entry point: `RIGHT`. A row is a name, the statements over the arguments of `program_inputs`, and the tensors where they
are not the plain ones.
"""

from __future__ import annotations

from typing import Any

from tests.support.program_inputs import Spec
from tests.support.programs import Program


def program(*statements: str, **spec: Any) -> Program:
    *before, last = statements
    return Program((*before, f"return ({last},)"), Spec(**spec))


SQUARE = {"lead": (7,), "vocab": 7}
INF = {"rows": ("plain", "one +inf")}
PICKED = "v0.gather(-1, t[..., None])"

RIGHT: dict[str, Program] = {
    # which values meet
    "a value and its transpose": program("v0 = x.log_softmax(-1)", "v0 = v0 + v0.transpose(0, 1)", PICKED, **SQUARE),
    "softmaxes over both dimensions": program("v0 = x.log_softmax(-1) + x.t().log_softmax(-1)", PICKED, **SQUARE),
    "two scales, one shift": program("(x.exp() + (x * 2).exp()).sum(-1).log()"),
    "two shifts, one scale": program("(x.exp() + (x - 1).exp()).sum(-1).log()"),
    "a softmax and a given shift": program("(x.log_softmax(-1).exp() + (x - w[:, None]).exp()).sum(-1)"),
    "a softmax and its numerator": program("(x.softmax(-1) + (x - x.amax(-1, True)).exp()).sum(-1)"),
    "two targets": program("F.one_hot(t, 7) * x.log_softmax(-1) - F.one_hot(t.flip(0), 7) * x.log_softmax(-1)".join(["((", ").abs() * w[:, None]).sum(-1)"])),
    "a column of logits beside NaN": program("(F.one_hot(t, 7) * x).sum(1), F.cross_entropy(x, u)", lead=(1,), rows=("one NaN",)),
    "a column of log-probs that may be missed, of NaN": program("((torch.arange(7) == u[:, None]) * x.log_softmax(-1)).sum(-1)", rows=("plain", "one NaN"), misses="-100"),
    "a column of a softmax that may be missed, of NaN": program("((torch.arange(7) == u[:, None]) * x.softmax(-1)).sum(-1)", rows=("plain", "one NaN"), misses="-100"),
    "a column in rows that a factor takes out": program("(F.one_hot(t, 7) * (x.log_softmax(-1) * keep[:, None])).sum(-1)", rows=("plain", "one NaN")),
    "two columns of one value": program("v0 = x.log_softmax(-1)", f"{PICKED} * w[:, None] - v0.gather(-1, t.flip(0)[..., None])"),
    "logits that the program writes to behind a graph break": program("v0 = h @ e.t()", "v1 = v0.log_softmax(-1)[:, 2]", "torch._dynamo.graph_break()", "F.hardtanh(v0, -0.5, 0.5, True)", "v1 + v0.sum(-1)", grads=("inside", "inside")),
    "another use of the scaled logits": program("v0 = (h @ e.t()) / 0.7", "v0.log_softmax(-1).gather(-1, t[..., None]), v0.sin().sum(-1)"),
    "another use of masked logits": program("v0 = torch.where(keep[:, None], h @ e.t(), 0)", "v0.log_softmax(-1)[:, 2], v0.sin().sum(-1)"),
    "another use of weighted logits": program("v0 = (h @ e.t()) * w[:, None]", "v0.logsumexp(-1), (v0 * v0.cos()).sum(-1)"),
    # what is not linear
    "a square of the logits": program("x.square().sum(-1), x.logsumexp(-1)"),
    "the logits times themselves": program("(x * x * x.softmax(-1)).sum(-1), x.logsumexp(-1)"),
    "a softmax times log-probs times log-probs": program("v0 = x.log_softmax(-1)", "((v0.exp() * v0) * v0).sum(-1)"),
    "a softmax times logits times logits": program("((x.softmax(-1) * x) * x).sum(-1)"),
    "a softmax times logits and one times logits": program("((x.softmax(-1) * (x + 1)) * x).sum(-1)"),
    "a division that rounds down": program("v0 = x.log_softmax(-1).div(0.5, rounding_mode='floor')", PICKED),
    "a division of one softmax": program("(1 / x.softmax(-1)).gather(-1, t[..., None])"),
    "a cube": program("v0 = x.log_softmax(-1) ** 3", f"{PICKED}, x.logsumexp(-1)"),
    "log of a sum of softmaxes": program("v0 = (x.softmax(-1) + (x * 2).softmax(-1)).log()", PICKED),
    "exp of a softmax": program("v0 = x.softmax(-1).exp()", PICKED),
    "alpha": program("v0 = torch.sub(x.log_softmax(-1), x.softmax(-1), alpha=3)", PICKED),
    "the place of the smallest": program("(-x).argmax(-1), x.logsumexp(-1)"),
    "the place of the smallest in max": program("(x * -2).max(-1).indices, x.logsumexp(-1)"),
    # which dimension
    "a gather over rows": program("v0 = x.log_softmax(-1)", "v0.gather(0, t[None]), v0[:, 1]", **SQUARE),
    "a sum over rows": program("v0 = x.log_softmax(-1)", "v0.sum(0), v0[:, 1]", **SQUARE),
    "a mean over rows": program("v0 = x.log_softmax(-1)", "v0.mean(0), v0[:, 1]", **SQUARE),
    "a maximum over rows": program("v0 = x.log_softmax(-1)", "v0.amax(0), v0[:, 1]", **SQUARE),
    "a maximum over rows, without gradients": program("v0 = x.log_softmax(-1)", "v0.amax(0), v0[:, 1]", **SQUARE, grads=("none", "none")),
    "some columns": program("v0 = x.log_softmax(-1)", "v0[:, 2:5].sum(-1), v0[:, 1]", **SQUARE),
    "a mask of rows as columns": program("v0 = (torch.arange(7)[:, None] == t[:, None]).expand(7, 7) * x.log_softmax(-1)", "v0.sum(-1)", **SQUARE),
    "several columns per row": program("v0 = (torch.arange(7) == torch.stack([t] * 7, -1)) * x.log_softmax(-1)", "v0.sum(-1)"),
    "everywhere but at the target": program("v0 = (torch.arange(7) != t[:, None]) * x.log_softmax(-1)", "v0.sum(-1)"),
    # which rows
    "rows from the end": program("v0 = x[-3:-1].log_softmax(-1)", "v0.logsumexp(-1), v0[:, 2]"),
    "rows by steps": program("v0 = x.log_softmax(-1)[::2]", "v0[:, 2], (v0.exp() * v0).sum(-1)"),
    "rows by steps from the middle": program("v0 = x.log_softmax(-1)[1:4:2]", "v0[:, 2], (v0.exp() * v0).sum(-1)"),
    "rows by steps, then the others": program("v0 = x.log_softmax(-1)", "v0 = torch.cat([v0[0:4:2], v0[4:]])", "v0[:, 2], (v0.exp() * v0).sum(-1)"),
    "rows rolled": program("v0 = x.log_softmax(-1).roll(1, 0)", "v0[:, 2] * w, (v0.exp() * v0).sum(-1)"),
    "rows turned around": program("v0 = torch.stack(x.log_softmax(-1).unbind(0)[::-1])", "v0[:, 2] * w"),
    "rows twice": program("v0 = torch.cat([x.log_softmax(-1)[:2], x.log_softmax(-1)[:2]])", "v0[:, 2]"),
    "rows without the last": program("v0 = torch.cat([a for a in x.log_softmax(-1).split(2)][:-1])", "v0[:, 2]"),
    "rows of a sample and of all": program("v0 = x.log_softmax(-1)", "v0[1:3][:, 2], v0[:, 3] * w, v0[2:].exp()[:, 1]"),
    "a part of the rows written": program("v0 = x.clone()", "v0[1:3] = y[1:3]", "v0.log_softmax(-1)[:, 2]", grads=("inside", "leaf")),
    "chunks of different scales": program("v0 = torch.cat([(a * (k + 1)).log_softmax(-1) for k, a in enumerate(x.split(2))])", PICKED),
    "infinite rows": program("v0 = torch.where(keep[:, None], x, math.inf).log_softmax(-1)", "torch.where(keep, v0[:, 2], 0)"),
    "minus infinite rows": program("v0 = torch.where(keep[:, None], x, -math.inf).log_softmax(-1)", "torch.where(keep, v0[:, 2], 0)"),
    # masks and indices
    "a negated target mask as a number": program("v0 = (~(torch.arange(7) == t[:, None])) * x.log_softmax(-1)", "v0.sum(-1)"),
    "one row of logits and many numbers": program("v0 = x[:1].log_softmax(-1) - w[:, None]", "v0[:, 2], v0.exp().sum(-1)"),
    "one row of logits and many targets": program("v0 = x[:1].log_softmax(-1)", "((torch.arange(7) == t[:, None]) * v0).sum(-1)"),
    "more rows than logits": program("v0 = x.log_softmax(-1) - y[:, None].mean(-1, True)", "v0[..., 2], v0.logsumexp(-1)"),
    "counting from one": program("v0 = (torch.arange(1, 8) == t[:, None]) * x.log_softmax(-1)", "v0.sum(-1)"),
    "counting by two": program("v0 = (torch.arange(0, 14, 2) == t[:, None]) * x.log_softmax(-1)", "v0.sum(-1)"),
    "rows counted from one": program("x.log_softmax(-1)[torch.arange(1, 5), t[:4]]"),
    "rows counted by two": program("x.log_softmax(-1)[torch.arange(0, 5, 2), t[:3]]"),
    "bytes as columns": program("v0 = x.log_softmax(-1)", "v0[torch.arange(5), t.to(torch.uint8).long()], v0.logsumexp(-1)"),
    "columns by bytes": program("((torch.arange(7) == t.to(torch.uint8)[:, None]) * x.log_softmax(-1)).sum(-1)"),
    "a slice changed beside the one that is read": program("v0 = x.clone()", "v0[1:4].mul_(0.5)", "v0[2:5].log_softmax(-1).gather(-1, t[2:5, None])"),
    "a slice changed, then one of fewer steps": program("v0 = x.clone()", "v0[0:5:2].mul_(0.5)", "v0[0:5:1].log_softmax(-1)[:, 2]"),
    "slices changed one over the other": program("v0 = x.clone()", "v0[1:4].mul_(0.5)", "v0[2:5].mul_(3)", "v0.log_softmax(-1)[:, 2], v0[2:5].logsumexp(-1)"),
    "a slice changed twice": program("v0 = x.clone()", "v0[1:4].mul_(0.5)", "v0[1:4].mul_(3)", "v0.log_softmax(-1)[:, 2], v0[1:4].logsumexp(-1)"),
    "a slice of a slice changed": program("v0 = x.clone()", "v0[1:][:2].mul_(0.5)", "v1 = v0[1:][:2].log_softmax(-1)", "v1[:, 2], (v1.exp() * v1).sum(-1), v0[1:].logsumexp(-1)"),
    "a row changed, and another read": program("v0 = x.clone()", "v0[1].mul_(0.5)", "v0[2].log_softmax(-1)[2], v0[1].log_softmax(-1)[2]"),
    "a square of counting masks": program("v0 = (torch.arange(7)[None, :, None] == t[:2, None, None]).expand(2, 7, 7)", "(v0 * torch.stack([x, x]).log_softmax(-1)).sum(-1)", **SQUARE),
    "rows rolled by more": program("v0 = x.log_softmax(-1)[torch.fmod(torch.arange(4) + 2, 5)]", "v0[:, 2]"),
    "rows rolled by another length": program("v0 = x.log_softmax(-1)[torch.fmod(torch.arange(5) + 2, 4)]", "v0[:, 2]"),
    "above a low number": program("v0 = x.log_softmax(-1)", "torch.where(v0 > -3, v0.exp(), 0).sum(-1)"),
    "above the lowest number": program("v0 = x.log_softmax(-1)", "(torch.where(v0 > torch.finfo(v0.dtype).min, v0.exp(), 0) * x).sum(-1)", rows=("plain", "some -inf")),
    "at least a low number": program("v0 = x.log_softmax(-1)", "torch.where(x >= -2.0, v0.exp(), 0).sum(-1)"),
    "clamped at a low number": program("(x.log_softmax(-1).clamp(min=-2.0) * x.softmax(-1)).sum(-1)"),
    "above a probability": program("v0 = x.softmax(-1)", "torch.where(v0 > 0.2, v0, 0).sum(-1)"),
    "NaN where another value is": program("torch.where(y.isnan(), math.nan, x.softmax(-1)).sum(-1), y.logsumexp(-1)", rows=("plain", "one NaN")),
    "zero where another softmax is": program("v0 = x.softmax(-1)", "torch.where(y.softmax(-1) == 0, 0, v0 * x.log_softmax(-1)).sum(-1)", rows=("plain", "some -inf")),
    "one where the logits are -inf": program("torch.where(x == -math.inf, 1, x.softmax(-1)).sum(-1)", rows=("plain", "some -inf")),
    "an exponential over another's": program("(x.exp() / y.exp() * x.exp()).sum(-1), (x[1:3].exp() / x[2:4].exp() * x[1:3].exp()).sum(-1)"),
    "a softmax over another's": program("v0 = x.softmax(-1)", "(v0 / y.softmax(-1) * y).sum(-1), (v0[1:3] / v0[2:4] * w[:2, None]).sum(-1)"),
    "clamped, then compared": program("v0 = x.clamp(min=torch.finfo(torch.float32).min)", "torch.where(v0 == -math.inf, 0, v0.softmax(-1)).sum(-1)", rows=("plain", "some -inf")),
    "clamped, then added": program("v0 = x.clamp(min=torch.finfo(torch.float32).min)", "(v0 - x)[:, 3], x.logsumexp(-1)", rows=("plain", "some -inf")),
    "clamped, beside a softmax": program("v0 = x.clamp(min=torch.finfo(torch.float32).min)", "(v0 + x.softmax(-1)).sin().sum(-1), x.logsumexp(-1)", rows=("plain", "some -inf")),
    "clamped, scaled, summed": program("v0 = x.clamp(min=torch.finfo(torch.float32).min)", "(v0 * 0.01).sum(-1), x.logsumexp(-1)", rows=("plain", "some -inf")),
    "temperatures of overlapping rows": program("(x[1:4] * tau[:3]).log_softmax(-1)[:, 2], (x[2:5] * tau[2:]).log_softmax(-1)[:, 3]"),
    "softmaxes of some rows, exponentials of others": program("x.log_softmax(-1)[:2][:, 2], (x[2:] - w[2:, None]).exp().sum(-1)"),
    "multiples of a one-hot in some rows, others in others": program(
        "v0 = (torch.arange(7) == t[:, None]) * x.log_softmax(-1)",
        "v1 = (torch.arange(7) == t.flip(0)[:, None]) * x.log_softmax(-1)",
        "v2 = torch.cat([v0[:2], v1[2:]])",
        "v2.sum(-1), v2[:, 3]",
    ),
    "targets of some rows, others of others": program(
        "v0 = x.softmax(-1).scatter(-1, t[:, None], 0.0)",
        "v1 = x.softmax(-1).scatter(-1, t.flip(0)[:, None], 0.0)",
        "v2 = torch.cat([v0[:2], v1[2:]])",
        "v2.sum(-1), v2[:, 3]",
    ),
    "more at the targets of some rows, others of others": program(
        "v0 = x.softmax(-1) * (1 + F.one_hot(t, 7))",
        "v1 = x.softmax(-1) * (1 + F.one_hot(t.flip(0), 7))",
        "v2 = torch.cat([v0[:2], v1[2:]])",
        "v2.sum(-1), v2[:, 3]",
    ),
    "clamped beside another scale": program("v0 = x.clamp(min=torch.finfo(torch.float32).min)", "((x * -1).softmax(-1) * v0).sum(-1)"),
    "zero where other logits are -inf": program("torch.where(y == -math.inf, 0, x.softmax(-1)).sum(-1), y.logsumexp(-1)", rows=("plain", "some -inf")),
    "at least -inf": program("torch.where(x >= -math.inf, x.softmax(-1), 0).sum(-1), torch.where(x >= -math.inf, 0, x.softmax(-1)).sum(-1), x.logsumexp(-1)", rows=("plain", "some -inf")),
    "a number at the target": program("v0 = torch.where(torch.arange(7) == t[:, None], 0.5, x.log_softmax(-1))", f"{PICKED}, v0.sum(-1)"),
    "a number but at the target": program("v0 = torch.where(~(torch.arange(7) == t[:, None]), 0.5, x.log_softmax(-1))", f"{PICKED}, v0.sum(-1)"),
    "rows counted along the other dimension": program("x.log_softmax(-1)[torch.arange(3), torch.arange(3)[:, None], t]", lead=(3, 3)),
    "the first row for all": program("x.log_softmax(-1)[torch.arange(1), t]"),
    "two columns overwritten": program("v0 = x.log_softmax(-1).scatter(-1, torch.stack([t, t.flip(0)], -1), 0.0)", "v0.sum(-1)"),
    "columns of some rows overwritten": program("v0 = x.log_softmax(-1).scatter(-1, t[:3, None], 0.0)", "v0.sum(-1)"),
    "a target's column at another target": program("v0 = (torch.arange(7) == t[:, None]) * x.log_softmax(-1)", "v0.gather(-1, t.flip(0)[:, None])"),
    "a masked row's column": program("v0 = x.masked_fill(~keep[:, None], 0).log_softmax(-1)", PICKED, rows=("plain", "only -inf", "one NaN")),
    "an entropy's part at a column": program("v0 = x.softmax(-1) * x.log_softmax(-1)", f"{PICKED}, v0.sum(-1)"),
    "a sum of scaled logits": program("v0 = x / 0.7", "v0.sum(-1), v0.logsumexp(-1)"),
    "clamped, then summed without gradient": program(
        "v0 = x.clamp(min=torch.finfo(torch.float32).min)",
        "v0.mean(-1), x.logsumexp(-1)",
        rows=("plain", "some -inf"),
        grads=("none", "none"),
    ),
    "clamped, with empty rows": program(
        "v0 = x.clamp(min=torch.finfo(torch.float32).min)",
        "v0.softmax(-1)[..., 1], x.logsumexp(-1)",
        rows=("plain", "only -inf"),
    ),
    "clamped, then nearly nothing": program(
        "v0 = x.clamp(min=torch.finfo(torch.float32).min)",
        "(v0 * 1e-38).exp().sum(-1), x.logsumexp(-1)",
        rows=("plain", "some -inf"),
        grads=("none", "none"),
    ),
    "a division by a weighted softmax": program("v0 = x.log_softmax(-1) / (x.softmax(-1) * tau)", PICKED),
    "a division by twice an exponential": program("v0 = x / (x.exp() * 2)", "v0.sum(-1), x.logsumexp(-1)"),
    "targets of rolled logits": program("v0 = x.roll(1, 0).log_softmax(-1)", PICKED),
    "chunks in another order": program("v0 = x.log_softmax(-1)", "v0 = torch.cat([v0[2:4], v0[:2], v0[4:]])", "v0[:, 2] * w, v0.exp()[:, 3]"),
    "clamped, then summed": program("v0 = x.clamp(min=torch.finfo(torch.float32).min)", "v0.mean(-1), x.logsumexp(-1)", rows=("plain", "some -inf")),
    # found by generated programs, and right by now
    "always the first row": program("y[torch.arange(1).expand(y.shape[0]), t]"),
    "a column that is no whole number": program("((torch.arange(7) == u[..., None]) * x.log_softmax(-1)).sum(-1)", misses="float"),
    "one row three times": program("v0 = x[torch.fmod(torch.arange(3) + 2, len(x))]", "v0.softmax(-1).square().sum(-1)", lead=(1,)),
    "logsumexp in float64": program("x.double().logsumexp(1)"),
    "cross entropy over a row with +inf": program("F.cross_entropy(x, t, reduction='none')", **INF),
    "a softmax's sum over a row with +inf": program("x.softmax(-1).sum(-1)", **INF),
    "a softmax's sum over a row with NaN": program("x.softmax(-1).sum(-1)", rows=("plain", "one NaN")),
    "a column of the log of a softmax": program("x.softmax(-1).log().select(-1, 1).sum()"),
    "two rows three times": program("v0 = x.softmax(-1)[torch.fmod(torch.arange(3) + 2, len(x))]", "v0.square().mean(-1)", lead=(2,)),
    "a softmax of rounded logits, turned": program(
        "v0 = F.log_softmax(x.to(torch.bfloat16), -1, dtype=torch.float32)",
        f"v0.flip(-1).exp().sum(-1), {PICKED}",
    ),
    "the maximum of rounded logits": program(
        "v0 = x.to(torch.bfloat16)", "v0.float().amax(-1) - v0.amax(-1), v0.logsumexp(-1)"
    ),
    "softmax in float64": program("x.softmax(-1, dtype=torch.float64).log().amax(1)"),
    # seeds 1013076, 1005313 and 1005272: eager code rounds as ours, elsewhere
    "an exponential of an exponential": program("x.exp().sum(1).exp()", lead=(5,)),
    "ten thousand that cancel in backward": program(
        "F.kl_div(y.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction='none').sum(1) * 10000.0",
        lead=(1,),
        grads=("inside", "leaf"),
    ),
    "a hundred million that cancel in backward": program(
        "F.kl_div(y.log_softmax(-1), y.log_softmax(-1), log_target=True, reduction='none').sum(-1) * (state * 1e4) ** 2",
        grads=("inside", "leaf"),
    ),
    "a number that float32 has as infinite, and no gradient": program(
        "((y.exp().sum(-1) - state).exp() * 2)[:1]", lead=(3, 2), vocab=6, row_dtype="float64"
    ),
    "numbers whose product overflows, and no gradient": program(
        "v0 = x.logsumexp(-1) * (reward.abs() * 60).exp()", "(v0 * (state.abs() * 60).exp())[:1]", lead=(9,)
    ),
    "the largest of probabilities that are rounded": program(
        "v0 = x.log_softmax(-1).exp().to(torch.bfloat16).clamp_min(-65504)",
        "v0.log_softmax(-1).argmax(-1), v0.logsumexp(-1)",
        lead=(3,),
        vocab=33,
    ),
    # seed 1017051: what backward makes again is made of a result, which the caller may have changed
    "a sum of the logits and a result": program(
        "v0 = y.softmax(-1).log()",
        "v1 = torch.stack([v0, x]).sum(0).masked_fill(keep[..., None].expand_as(v0) | allow, 0)",
        "v2 = torch.where(u != -100, v1[..., 0], state)",
        "v0, v1.sum(-1), v1.detach().sum(-1), v1.logsumexp(-1)",
        lead=(3,), grads=("leaf", "none"), misses="-100",
    ),
    # seed 1006267: elements in common by two ways
    "one column's parts by two ways": program(
        "v1 = (x / 2).log_softmax(-1)",
        "v7_3, v7_4 = (v.split(2)[0] for v in (v1.select(-1, 1), v1.narrow(-1, 1, 1)))",
        "v7_3, v7_4.flatten()[1:]",
        lead=(5,), vocab=7, grads=("leaf", "none"),
    ),
    # seed 1027245: logits that the caller overwrites before backward, which can make them again
    "overwritten logits": program(
        "v0 = F.softplus(x)",
        "F.kl_div(v0.log_softmax(-1), v0.softmax(-1), reduction='none').sum(-1), v0.detach()",
        dtype="bfloat16",
    ),
    # a row with +inf has no softmax: NaN, where eager code may have an infinite value
    "logsumexp of a row with +inf": program("x.logsumexp(1)", **INF),
    "exponentials of a row with +inf": program("x.exp().sum(1)", **INF),
    "log-prob beside +inf": program("v0 = x - x.logsumexp(-1, True)", PICKED, **INF),
}  # fmt: skip
