"""What a generated program can say: pieces of plain torch by the kind of value they make.

Entry point: `PARTS`, kind -> family -> texts. Nothing here knows what the passes recognise: families are those of
torch's documentation, neighbours of losses included. A hole `{f}` is a variable of a kind; the holes of a text have one
lead L:

    f, g  [*L, V] float      r, q  [*L, 1] float     m  [*L, V] bool     i  [*L] integers     z  [] float
    c     [V] float          s, p  [*L] float        k  [*L] bool

A text that starts with a newline is a block: several lines that end with `{out} = ...` or write over a hole's variable.

`BESIDE` are texts of the same form over numbers per row that do not belong to the logits, n and o [*L]: what is
computed of them alone, and what is written over them after they were read. `TWINS` are values that are returned
together: equal ones, with a gradient and without, or a value and a view of it.
"""

from __future__ import annotations

FULL: dict[str, tuple[str, ...]] = {
    "copies": (
        "{f}.clone()", "{f}.detach()", "{f}.float()", "{f}.double()", "{f}.to(torch.bfloat16)", "{f}.contiguous()",
        "{f}.to(torch.float32).to({g}.dtype)", "{f}.view({f}.shape)", "{f}.view_as({g})", "{f}.requires_grad_().data",
    ),
    "arithmetic": (
        "{f} / 0.7", "{f} * -1.5", "-{f}", "{f} + 2", "1 - {f}", "{f} / {r}", "{f} * {r}", "{f} - {r}", "{f} + {r}",
        "{r} - {f}", "{r} * {f}", "{f} + {c}", "{f} * {c}", "{c} - {f}", "{f} + {g}", "{f} - {g}", "{f} * {g}",
        "{f} / {g}", "{f} * {s}[..., None]", "{f} / {s}.exp().unsqueeze(-1)", "torch.add({f}, {g}, alpha=-2)",
        "torch.sub({r}, {f}, alpha=0.5)", "torch.addcmul({f}, {g}, {r})", "torch.lerp({f}, {g}, 0.25)", "{f} - {z}",
        "{f} * {g}[:1]", "{f} + {g}.mean(0, keepdim=True)", "{f}[:1] - {g}", "{f} * {r}[:1]", "{f} * {i}.unsqueeze(-1)",
        "{f} * {f}", "{f}.mul({r}).add({g})", "torch.true_divide({f}, {r})", "{f} + {m}.to({f}.dtype)", "{f} * 0",
    ),
    "without effect": (
        "{f} / 1.0", "{f} * 1", "{f} + 0", "{f} - 0.0", "{f} ** 1", "{f} + torch.zeros([])", "{f} * torch.ones_like({f})",
        "{f}[:]", "{f}.reshape({f}.shape)", "{f}.expand_as({f})", "{f}.type_as({f})", "{f}.repeat(*[1] * {f}.ndim)",
        "torch.cat([{f}])", "F.pad({f}, (0, 0))", "{f}.masked_fill(torch.zeros_like({m}), 1)", "torch.stack([{f}]).sum(0)",
    ),
    "pointwise": (
        "{f}.exp()", "{f}.log()", "({f} + 1e-6).log()", "{f}.exp().log1p()", "{f}.expm1()", "{f}.sigmoid()", "{f}.tanh() * 5",
        "F.logsigmoid({f})", "F.softplus({f})", "{f}.square()", "{f} ** 2", "{f} ** 0.5", "{f}.abs().sqrt()", "{f}.reciprocal()",
        "{f}.abs()", "F.relu({f})", "torch.xlogy({f}, {f})", "torch.special.entr({f})", "torch.logaddexp({f}, {g})",
        "torch.minimum({f}, {g})", "torch.maximum({f}, {r})", "{f}.sinh()", "torch.pow(2.0, {f})", "{f}.sign()",
        "{f}.rsqrt()", "{f}.exp2()", "F.gelu({f})", "torch.cos({f})", "{f}.log2()", "{f}.softmax(-1) * {g} / {f}.softmax(-1)",
    ),
    "softmaxes": (
        "{f}.log_softmax(-1)", "{f}.softmax(-1)", "F.log_softmax({f}, -1, dtype=torch.float32)", "{f}.log_softmax(-1).exp()",
        "F.softmin({f}, -1)", "{f}.softmax(-1).log()", "{f}.softmax(0)", "{f}.log_softmax(0)", "{f} - {f}.logsumexp(-1, True)",
        "{f} - {f}.amax(-1, keepdim=True)", "{f} - {f}.max(-1, keepdim=True).values.detach()", "{f} - {f}.mean(-1, True)",
        "{f}.exp() / {f}.exp().sum(-1, keepdim=True)", "F.softmax({f} / {r}, dim=-1)", "({f} / 2).log_softmax(-1)",
        "torch.transpose({f}.transpose(0, -1).softmax(0), 0, -1)", "Categorical(logits={f}, validate_args=False).logits",
        "F.normalize({f}, dim=-1)", "{f}.softmax(-1, dtype=torch.float64)",
    ),
    "masks": (
        "{f}.masked_fill({m}, 0)", "{f}.masked_fill(~{m}, -math.inf)", "{f}.masked_fill(~{k}[..., None], 0)",
        "{f}.masked_fill({k}.unsqueeze(-1), -math.inf)", "torch.where({m}, {f}, {g})", "torch.where({m}, {f}, 0.0)",
        "torch.where({k}[..., None], {f}, {g})", "torch.where({m}, {f}, {r})", "torch.where({f} == -math.inf, 0, {f})",
        "torch.where({g} == -math.inf, 0, {f})", "torch.where({f} > 0, {f}, 0)", "torch.where({g} * {r} > 0, {f}, 0)",
        "torch.where({f}.isinf(), torch.zeros_like({f}), {f})", "torch.where({g}.isnan(), 0, {f})", "{f} * {m}",
        "{f} * {k}[..., None]", "{f}.masked_fill({f} < -1e3, -1e4)", "{f}.masked_fill({m}, torch.finfo(torch.float16).min)",
        "torch.where({c} > 0, {f}, -math.inf)", "{f}.masked_fill({c} < 0, 0)", "torch.where({m}[:1], {f}, 0)",
        "torch.where({f} > torch.finfo(torch.float16).min, {f}, 0)", "torch.where({m}, -math.inf, {f})", "{f}.nan_to_num()",
        "{f}.nan_to_num(neginf=-1e4)", "torch.where({f}.isfinite(), {f}, 0)", "{f}.masked_fill({m} & {k}[..., None], 1)",
        "torch.where({f} >= {f}.amax(-1, True), {f}, 0)", "torch.where({m}, {f}, {f}.detach())",
        "torch.where({f} != 0, {g}, 0)", "torch.where({f} == {f}, {f}, 0)", "torch.where({f}.softmax(-1) > 0, {g}, 0.5)",
        "({f}.log_softmax(-1) * {g}).masked_fill({f}.log_softmax(-1).isinf(), 0)",
    ),
    "clamps": (
        "{f}.clamp(min=-2)", "{f}.clamp(max=1)", "{f}.clamp(-1, 1)", "{f}.clamp(min=1e-8)", "{f}.clamp_min(-65504)",
        "torch.clamp({f}, min=torch.finfo(torch.float16).min)", "{f}.clamp(min={r})", "{f}.clip(-1e4, 1e4)",
        "{f}.clamp(min=torch.finfo({f}.dtype).tiny)", "{f}.clamp(max=0)", "{f}.clamp(min=-1e4)",
    ),
    "by index": (
        "{f}.scatter(-1, {i}[..., None], 0)", "{f}.scatter(-1, {i}[..., None], 1.5)", "{f}.scatter(-1, {i}.unsqueeze(-1), {r})",
        "{f}.scatter_add(-1, {i}[..., None], {r})", "{f}.scatter_add(-1, torch.stack([{i}, {i}], -1), torch.cat([{r}, {r}], -1))",
        "torch.zeros_like({f}).scatter(-1, {i}[..., None], 1)", "F.one_hot({i}, {f}.shape[-1]).to({f}.dtype)",
        "F.one_hot({i}, {f}.shape[-1]) * {f}", "(torch.arange({f}.shape[-1]) == {i}[..., None]) * {f}",
        "{f}.index_put((torch.arange({f}.shape[0]), {i}), {s})", "{f}.index_add(-1, {i}.flatten()[:1], {f}[..., :1])",
        "torch.zeros_like({f}).scatter_add_(-1, torch.stack([{i}, {i}], -1), torch.cat([{r}, {q}], -1))",
        "{f}.index_put((torch.arange({f}.shape[0]), {i}), {s}, accumulate=True)", "{f}.index_fill(-1, {i}.flatten()[:2], 0)",
        "{f}.scatter_reduce(-1, {i}[..., None], {r}, 'amax')", "{f}.gather(-1, torch.arange({f}.shape[-1]).expand_as({f}))",
        "{f} - F.one_hot({i}, {f}.shape[-1])", "F.one_hot({i}.flatten()[0], {f}.shape[-1]) * {f}",
        "{f} * (1 - F.one_hot({i}, {f}.shape[-1]))", "{f} - F.one_hot({i}, {f}.shape[-1]) * {f}",
        "torch.where(torch.arange({f}.shape[-1]) == {i}[..., None], 0, {f})",
        "torch.full_like({f}, 0.1).scatter(-1, {i}[..., None], 0.9)", "F.one_hot({i}, {f}.shape[-1]) * 0.9 + 0.01",
    ),
    "rearranged": (
        "{f}.flip(-1)", "{f}.roll(1, -1)", "torch.cat([{f}[..., 2:], {f}[..., :2]], -1)", "{f}.sort(-1).values", "{f}.cumsum(-1)",
        "torch.cat([{f}[:1], {g}[1:]])", "torch.stack([{f}, {g}]).sum(0)", "torch.cat([{f}[:-1], {f}[-1:]])", "{f}.roll(1, 0)",
        "F.pad({f}[1:], (0, 0) * ({f}.ndim - 1) + (1, 0))", "torch.stack([a for a in {f}])", "torch.cat({f}.chunk(2))",
        "{f}.flatten().view({f}.shape)", "{f}.expand(2, *{f}.shape)[1]", "{f}.unsqueeze(0).squeeze(0)", "{f}.T.T",
        "{f}.reshape(-1, {f}.shape[-1]).view({f}.shape)", "{f}.transpose(0, -1).clone().transpose(0, -1)", "{f}[..., :]",
        "torch.cat([a.log_softmax(-1) for a in {f}.split(2)])", "torch.stack({f}.unbind(0)[::-1])", "{f}.cumsum(0)",
    ),
    "inside": ("{f} * 1 + {g} * 0", "{h} @ {e}.t()", "F.linear({h}, {e})", "({h} @ {e}.T).float()", "torch.sin({f}) * 3"),
    "own backward": (
        "StraightThrough.apply({f})", "ClippedGradient.apply({f})", "RowScaledGradient.apply({f}, {r})",
        "SoftmaxKept.apply({f})", "LogSoftmaxInPlace.apply({f})",
    ),
    "blocks": (
        "\n{out} = {f}.clone()\n{out}.div_({r})", "\n{out} = {f}.clone()\n{out}.sub_({g})", "\n{out} = {f}.clone()\n{out}.mul_(-2)",
        "\n{out} = {f}.clone()\n{out}.masked_fill_({m}, -math.inf)", "\n{out} = {f}.clone()\n{out}.masked_fill_({k}[..., None], 0)",
        "\n{out} = {f}.clone()\n{out}[1:] = {g}[1:]", "\n{out} = {f}.clone()\n{out}[:2].copy_({g}[-2:])",
        "\n{out} = {f}.clone()\n{out}[::2] = {g}[::2] * 2", "\n{out} = {f}.clone()\n{out}[..., 0] = 0",
        "\n{out} = {f}.clone()\n{out}[torch.arange({f}.shape[0]), {i}] -= 1", "\n{out} = {f}.clone()\n{out}[{k}] = 0",
        "\n{out} = {f}.clone()\n{out}.scatter_(-1, {i}[..., None], {r})", "\n{out} = {f}.clone()\n{out}[{m}] = -math.inf",
        "\n{out} = torch.empty_like({f})\n{out}[:2] = {f}[:2]\n{out}[2:] = {g}[2:]", "\n{out} = {f}.clone()\n{out}.zero_()\n{out} += {g}",
        "\n{out} = torch.zeros_like({f})\n{out}[1:] = {f}[1:]", "\n{out} = torch.zeros_like({f})\n{out}[-2:-1] = {f}[-2:-1]",
        "\n{out} = {f} - {f}.amax(-1, True)\ntorch.exp({out}, out={out})", "\n{out} = {f}.clone()\n{out}.copy_({g})",
        "\n{out} = {f}.detach().clone()\n{out} -= {out}.max(-1, True).values\n{out}.exp_()\n{out}.div_({out}.sum(-1, True))",
        "\n{out} = {f} * 1\n{out}.add_({g}, alpha=-1)", "\n{out} = {f}.clone()\n{out}.transpose(0, -1).mul_(2)",
        "\n{out} = {f} + 0\nfor a in {out}.unbind(0):\n    a.mul_(0.5)", "\n{out} = {f}.clone()\n{out}.clamp_(min=-1)",
        "\n{out} = {f}.clone()\n{out}[1] = {g}[0]", "\n{out} = {f}.clone()\n{out}.index_fill_(0, torch.tensor([0]), -1)",
    ),
}  # fmt: skip

# Blocks that write over a variable that may be given, or be a view of what is given.
WRITES: dict[str, tuple[str, ...]] = {
    "writes": (
        "\n{f}.div_({r})", "\n{f}.sub_({f}.amax(-1, keepdim=True))", "\n{f}.masked_fill_({m}, 0)", "\n{f}.mul_(0.7)",
        "\n{f}[1:].div_(2)", "\n{f}[:, 1:].mul_(2)", "\nwith torch.no_grad():\n    {f}.mul_(3)", "\n{f}.data.add_(1)",
        "\n{f}.copy_({g})", "\n{f}.detach().zero_()", "\n{f}.exp_()", "\n{f}[::2] = {g}[::2]", "\n{f}[..., 0].zero_()",
        "\n{f}.scatter_(-1, {i}[..., None], 0)", "\n{f}.add_({g}, alpha=0.5)", "\n{f}.masked_fill_(~{k}[..., None], -math.inf)",
    ),
}  # fmt: skip

ROW: dict[str, tuple[str, ...]] = {  # [*L, 1]
    "taken": (
        "{f}.gather(-1, {i}[..., None])", "{f}.gather(-1, {i}.unsqueeze(-1).long())", "{f}.take_along_dim({i}[..., None], -1)",
        "{f}[..., :1]", "{f}[..., -1:]", "{f}.narrow(-1, 1, 1)", "{f}.gather(dim=-1, index={f}.argmax(-1, keepdim=True))",
        "{f}.gather(-1, {i}.clamp(min=0)[..., None])", "{f}.index_select(-1, torch.tensor([2]))", "{f}.topk(1).values",
    ),
    "reduced": (
        "{f}.sum(-1, keepdim=True)", "{f}.mean(-1, keepdim=True)", "{f}.amax(-1, keepdim=True)", "{f}.max(-1, keepdim=True).values",
        "{f}.max(-1, keepdim=True)[0].detach()", "{f}.logsumexp(-1, keepdim=True)", "{f}.exp().sum(-1, True)", "{f}.amin(-1, True)",
        "{f}.norm(dim=-1, keepdim=True)", "({f} * {m}).sum(-1, True)", "{f}.float().logsumexp(-1, True)", "{f}.std(-1, keepdim=True)",
    ),
    "rows": (
        "{s}[..., None]", "{s}.unsqueeze(-1)", "{r} * {q}", "{r} + {q}", "{r}.exp()", "{r}.detach()", "{r}.clamp(min=0.1)",
        "{r}.log()", "{k}[..., None].float()", "{r} / {q}", "{r}.square() + 0.1", "torch.where({k}[..., None], {r}, 1)", "{r} * {z}",
    ),
}  # fmt: skip

SCALAR: dict[str, tuple[str, ...]] = {  # [*L]
    "taken": (
        "{f}.gather(-1, {i}[..., None]).squeeze(-1)", "{f}[torch.arange({f}.shape[0]), {i}]", "{f}[..., 0]", "{f}.select(-1, 1)",
        "torch.gather({f}, -1, {i}[..., None])[..., 0]", "{f}[..., -1]", "{f}[range(len({f})), {i}]", "{f}.max(-1).values",
        "{f}.flatten(0, -2)[torch.arange({i}.numel()), {i}.flatten()].view({i}.shape)", "{f}.diagonal(0, 0, -1)",
        "{f}.log_softmax(-1).gather(-1, {i}[..., None]).squeeze(-1)", "{f}[torch.arange(1).expand({f}.shape[0]), {i}]",
        "torch.stack([a[b] for a, b in zip({f}, {i})])", "{f}.log_softmax(-1).gather(-1, {i}.where({k}, 0)[..., None])[..., 0]",
        "torch.cat([a.log_softmax(-1).gather(-1, b[..., None])[..., 0] for a, b in zip({f}.split(2), {i}.split(2))])",
    ),
    "reduced": (
        "{f}.sum(-1)", "{f}.mean(-1)", "{f}.amax(-1)", "{f}.logsumexp(-1)", "{f}.max(-1).values.detach()", "{f}.exp().sum(-1).log()",
        "({f} * {m}).sum(-1)", "({f} * {g}).sum(-1)", "torch.einsum('...v,...v->...', {f}, {g})", "{f} @ {c}", "{f}.matmul({c})",
        "({f} * {c}).sum(-1)", "({f}.exp() * {f}).sum(-1)", "-({f}.softmax(-1) * {f}.log_softmax(-1)).sum(-1)", "{f}.norm(dim=-1)",
        "{f}.logsumexp(-1) - ({f}.softmax(-1) * {f}).sum(-1)", "torch.linalg.vecdot({f}, {g})", "{f}.square().sum(-1)",
        "({f}.softmax(-1) * ({f}.log_softmax(-1) - {g}.log_softmax(-1))).sum(-1)", "torch.sum({f}.softmax(-1).square(), -1)",
        "{f}.softmax(-1).sum(-1)", "torch.where({m}, {f}, 0).sum(-1)", "(F.one_hot({i}, {f}.shape[-1]) * {f}).sum(-1)",
        "((torch.arange({f}.shape[-1]) == {i}[..., None]) * {f}).sum(-1)", "{f}.masked_fill({m}, 0).sum(-1)", "{f}.amin(-1)",
        "((F.one_hot({i}, {f}.shape[-1]) * {r} + 0.1) * {f}).sum(-1)", "((F.one_hot({i}, {f}.shape[-1]) - {f}.exp()) * {f}).sum(-1)",
        "((0.7 * F.one_hot({i}, {f}.shape[-1]) + 0.3 * F.one_hot({i}.roll(1, 0), {f}.shape[-1])) * {f}).sum(-1)",
        "({f} * (1 - F.one_hot({i}, {f}.shape[-1]))).sum(-1)", "({f}.log_softmax(-1) * (1 - F.one_hot({i}, {f}.shape[-1]))).sum(-1)",
        "({f}.softmax(-1) * (1 - F.one_hot({i}, {f}.shape[-1]))).sum(-1).log()", "{f}.softmax(-1).scatter(-1, {i}[..., None], 0).sum(-1).log()",
        "({f} * torch.where(torch.arange({f}.shape[-1]) == {i}[..., None], 0, {r})).sum(-1)",
        "(F.one_hot({i}.flatten()[0], {f}.shape[-1]) * {f}).sum(-1)", "({f}[..., 1:] - {f}[..., :-1]).sum(-1)", "{f}.var(-1)",
        "({g}.softmax(-1) * {f}.log_softmax(-1)).sum(-1)", "(torch.arange({f}.shape[-1]) == {i}[..., None]).sum(-1)",
        "torch.stack([a.logsumexp(-1) for a in {f}])", "{f}.logsumexp((-1,))", "{f}.median(-1).values", "{f}.count_nonzero(-1)",
        "({f}.softmax(-1) * {m}).sum(-1)", "({f}.softmax(-1) * {m}).sum(-1).log()", "{f}.softmax(-1).amax(-1)", "{f}.argmax(-1)",
        "-({f}.softmax(-1) * {f}.softmax(-1).log()).sum(-1)", "(torch.where({f}.softmax(-1) > 0, {g}, 2) * {f}.softmax(-1)).sum(-1)",
        "torch.where({f}.softmax(-1) > 0, {f}.softmax(-1) * {f}.softmax(-1).log(), 0).sum(-1)",
        "(-torch.xlogy({f}.softmax(-1), {f}.softmax(-1))).sum(-1)", "{f}.exp().sum(-1).sqrt()", "{f}.float().exp().sum(-1)",
        "torch.where({k}[..., None], {f}.softmax(-1), {f}.softmax(-1) * {f}.log_softmax(-1)).sum(-1)",
        "torch.special.entr({f}.softmax(-1)).sum(-1)", "{f}.nansum(-1)", "torch.bmm({f}.view(-1, 1, {f}.shape[-1]), {g}.view(-1, {f}.shape[-1], 1)).view({s}.shape)",
    ),
    "losses": (
        "F.cross_entropy({f}.reshape(-1, {f}.shape[-1]), {i}.reshape(-1), reduction='none').view({i}.shape)",
        "F.cross_entropy({f}.reshape(-1, {f}.shape[-1]), {i}.reshape(-1), reduction='none', label_smoothing=0.1).view({i}.shape)",
        "F.nll_loss({f}.reshape(-1, {f}.shape[-1]), {i}.reshape(-1), reduction='none').view({i}.shape)",
        "F.cross_entropy({f}, {i}, reduction='none', ignore_index=1)", "F.cross_entropy({f}, {i}, {c}.abs(), reduction='none')",
        "F.cross_entropy({f}.flatten(0, -2), {i}.masked_fill(~{k}, -100).flatten(), reduction='none').view({i}.shape)",
        "F.cross_entropy({f}, {g}.softmax(-1), reduction='none')", "F.kl_div({f}, {g}, log_target=True, reduction='none').sum(-1)",
        "F.kl_div({f}.log_softmax(-1), F.one_hot({i}, {f}.shape[-1]) * 0.9 + 0.01, reduction='none').sum(-1)",
        "F.kl_div({f}.log_softmax(-1), torch.full_like({f}, 0.1).scatter(-1, {i}[..., None], 0.9), reduction='none').sum(-1)",
        "F.kl_div({f}.log_softmax(-1), {g}.softmax(-1), reduction='none').sum(-1)", "Categorical(logits={f}, validate_args=False).entropy()",
        "Categorical(logits={f}, validate_args=False).log_prob({i})", "F.cross_entropy({f}.movedim(-1, 1), {i}, reduction='none')",
        "F.kl_div({f}.log_softmax(-1), {g}.log_softmax(-1), log_target=True, reduction='none').sum(-1)",
        "F.multi_margin_loss({f}, {i}, reduction='none')", "F.mse_loss({f}, {g}, reduction='none').mean(-1)",
        "InPlaceCrossEntropy.apply({f}, {i})", "InPlaceCrossEntropy.apply({f}.float(), {i})", "EntropyOwnBackward.apply({f})",
        "F.cosine_similarity({f}, {g}, -1)",
    ),
    "rows": (
        "{s} + {p}", "{s} - {p}", "{s} * {p}", "{s} / {p}", "{s}.exp()", "({s} - {s}.detach()).exp()", "{s}.clamp(-2, 2)", "{s} * {k}",
        "torch.where({k}, {s}, 0)", "torch.min({s}, {p})", "{s}.detach() * {p}", "{s}.square()", "{r}.squeeze(-1)", "{r}[..., 0]", "{s}.log()",
        "{s}.masked_fill(~{k}, 0)", "{s} - {z}", "F.softplus({s})", "{s}.cumsum(0)", "-{s}", "{s}.float()", "{s}.nan_to_num()", "{s}.roll(1, 0)",
        "torch.where({s}.isfinite(), {s}, 0)", "{s}.neg().exp().clamp(max=10)", "{s}.sigmoid()", "torch.logaddexp({s}, {p})", "{s}.abs()",
    ),
}  # fmt: skip

MASK: dict[str, tuple[str, ...]] = {  # [*L, V]
    "masks": (
        "~{m}", "{m} & {k}[..., None]", "{m} | ({f} > 0)", "{f} > {g}", "{f} > 0", "{f} == -math.inf", "{f}.isinf()", "{f}.isnan()",
        "{f}.isfinite()", "{f} != 0", "torch.arange({f}.shape[-1]) == {i}[..., None]", "torch.arange({f}.shape[-1]) < {i}[..., None]",
        "torch.arange({f}.shape[-1]).expand_as({f}) != {i}.unsqueeze(-1)", "F.one_hot({i}, {f}.shape[-1]).bool()", "{f} <= -1e3",
        "torch.zeros_like({f}, dtype=torch.bool).scatter(-1, {i}[..., None], True)", "{f} >= {f}.max(-1, True).values", "{f} > {r}",
        "torch.arange({f}.shape[0]).view(-1, *[1] * ({f}.ndim - 1)).expand_as({f}) == {i}[..., None]", "{k}[..., None].expand_as({f})",
        "torch.ones_like({f}).tril().bool()", "({c} > 0).expand_as({f})", "{f} > torch.finfo(torch.float16).min", "torch.isneginf({f})",
        "{f} * {r} > 0", "torch.isclose({f}, {g})", "{f}.bool()", "torch.logical_not({f} == 0)",
        "{k}[..., None].expand_as({f}) & ({r} > 0)", "{k}[..., None].expand_as({f}) | {m}", "{f}.argmax(-1, True) == torch.arange({f}.shape[-1])",
    ),
}  # fmt: skip

ROW_MASK: dict[str, tuple[str, ...]] = {  # [*L]
    "masks": (
        "{i} != -100", "{i} >= 0", "{s} > 0", "~{k}", "{k} & ({s} < 1)", "{s}.isfinite()", "{f}.isinf().any(-1)", "{f}.argmax(-1) == {i}",
        "{m}.any(-1)", "{m}.all(-1)", "({i} >= 0) & ({i} < 3)", "{f}.isnan().any(-1)", "{r}[..., 0] != 0", "torch.zeros_like({k})",
    ),
}  # fmt: skip

INDEX: dict[str, tuple[str, ...]] = {  # [*L]
    "indices": (
        "{f}.argmax(-1)", "{i}.clamp(min=0)", "{i}.where({k}, 0)", "{i} * 0", "torch.full_like({i}, 2)", "({i} + 1) % {f}.shape[-1]",
        "{i}.to(torch.int32)", "{i}.to(torch.uint8)", "{i} + 0.5", "{i}.float()", "{i} - {f}.shape[-1]", "{i}.masked_fill(~{k}, -100)",
        "{i}.roll(-1, 0)", "{i}.clamp(0, {f}.shape[-1] - 1).long()", "{f}.max(-1).indices", "{f}.argmin(-1)", "torch.where({k}, {i}, -1)",
        "{i}.new_zeros({i}.shape)", "torch.arange({i}.numel()).view({i}.shape) % {f}.shape[-1]", "{f}.topk(2).indices[..., 1]",
    ),
}  # fmt: skip

COLUMN: dict[str, tuple[str, ...]] = {  # [V]
    "columns": (
        "{f}.flatten(0, -2).sum(0)", "{f}.flatten(0, -2)[0]", "{c}.exp()", "{f}.flatten(0, -2).mean(0)", "{c} * (torch.arange({c}.shape[0]) > 1)",
        "torch.arange({c}.shape[0]).float()", "torch.ones_like({c})",
    ),
}  # fmt: skip

NUMBER: dict[str, tuple[str, ...]] = {  # []
    "numbers": (
        "{s}.sum()", "{s}.mean()", "({s} * {k}).sum() / {k}.sum().clamp(min=1)", "({s} * {p}).mean()", "{f}.sum()", "{f}.mean()",
        "{s}.max()", "{k}.sum()", "{f}.max()", "F.cross_entropy({f}, {i})", "F.cross_entropy({f}, {i}, ignore_index=0, label_smoothing=0.2)",
        "F.nll_loss({f}.log_softmax(-1), {i})", "{f}.logsumexp(-1).mean()", "F.kl_div({f}, {g}, log_target=True, reduction='batchmean')",
        "{f}.logsumexp((0, 1))", "{f}.square().mean()", "{f}.detach().abs().max()", "({f} * {g}).sum()",
    ),
}  # fmt: skip

# Kinds that a rank's program has beside: row values that the ranks of a group reduce.
COLLECTIVE: dict[str, tuple[str, ...]] = {  # [*L, 1]
    "collectives": (
        "\n{out} = {f}.amax(-1, keepdim=True).detach().clone()\ndist.all_reduce({out}, dist.ReduceOp.MAX)",
        "\n{out} = {f}.exp().sum(-1, keepdim=True)\ndist.all_reduce({out})", "\n{out} = {r}.clone()\ndist.all_reduce({out})",
        "\n{out} = ({f} * {m}).sum(-1, True)\ndist.all_reduce({out})", "\n{out} = AllReduced.apply({r})",
        "\n{out} = AllReduced.apply({f}.exp().sum(-1, keepdim=True))", "\n{out} = AllReducedBothWays.apply({r})",
        "\n{out} = {f}.logsumexp(-1, True).exp()\ndist.all_reduce({out})\n{out} = {out}.log()",
        "\n{out} = torch.where({k}[..., None], {r}, 0)\ndist.all_reduce({out})",
    ),
}  # fmt: skip

# One function that moves the rows of many values alike.
MOVES = (
    "v[1:]", "v[:-1]", "v[::2]", "v[0:4:2]", "v[-2:]", "v[-3:-1]", "v.roll(1, 0)", "v.roll(-2, 0)", "v.flip(0)", "v.split(2)[0]",
    "torch.cat([v[2:], v[:2]])", "torch.stack([v[0], v[-1]])", "v[[1, 0]]", "v.index_select(0, torch.tensor([1, 0, 1]))",
    "torch.stack(v.unbind(0))", "torch.cat(v.split(2))", "v[None]", "v.unsqueeze(1)", "v.squeeze(0)", "v.transpose(0, 1)", "v[1]",
    "v.flatten(0, 1)", "v[torch.fmod(torch.arange(3) + 2, len(v))]", "v.repeat_interleave(2, 0)", "torch.cat([v, v])", "v.chunk(2)[-1]",
    "v.narrow(0, 1, 2)", "v[:1].expand(3, *v.shape[1:])", "v[-1]", "torch.cat([v[0:4:2], v[4:6]])", "v[1:4][::2]", "v[:, 0]",
    "v[:, 1:]", "v.unflatten(0, (-1, 1))", "v.movedim(0, 1)", "v[1::3]", "torch.stack([v, v], 1)", "v.clone()[1:]", "v.tile(2, *[1] * (v.ndim - 1))",
)  # fmt: skip

PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "f": FULL,
    "w": WRITES,
    "r": ROW,
    "s": SCALAR,
    "m": MASK,
    "k": ROW_MASK,
    "i": INDEX,
    "c": COLUMN,
    "z": NUMBER,
    "d": COLLECTIVE,
}

NUMBERS: dict[str, tuple[str, ...]] = {  # [*L]
    "numbers per row": (
        "{n} - {o}", "{n} * {o}", "({n} * 1e4) * ({o} * 1e4)", "{n} * 1e4 - {o}", "{n} * {n}", "({n} - {n}.mean()) / ({n}.std() + 1e-6)",
        "{n} / ({o}.abs() + 0.1)", "({n} - {o}).clamp(-0.5, 0.5)", "torch.where({k}, {n}, {o})", "{n}.double() - {o}", "{n}.cumsum(0)",
        "({n} * 1e4 + {o}) - {n} * 1e4", "{n}.float() * {o}", "({n} - {o}) * {k}", "{n}.exp() * 1e4", "1e4 * {n} + 1e-4 * {o}", "{n}.clone()",
    ),
    "with logits": (
        "{s} * ({n} - {o})", "{s} * {n}", "{s} + {n}", "{s} - {n} + {o}", "({s} - {n}).exp()", "torch.min({s} * {n}, {s}.clamp(-1, 1) * {n})",
        "({f} * {n}[..., None]).logsumexp(-1)", "({f} - {n}[..., None]).exp().sum(-1)", "{s}.double() * {n}", "{s} * {n} * 1e4",
        "({f} / ({n}[..., None].abs() + 0.5)).log_softmax(-1).gather(-1, {i}[..., None])[..., 0]", "{s}.detach() * {n}", "{s} * ({n} * 1e4) * ({o} * 1e4)",
        "({s} - {s}.detach()) * {n} + {s}.detach() * {o}", "torch.where({k}, {s}, {n})", "{s} - {s}.detach() + {n}", "({f}.softmax(-1) * {n}[..., None]).sum(-1)",
    ),
    "read, then changed": (  # products keep their factors for backward, which must not change in eager code
        "\n{out} = {s} * ({n} - {o})\nwith torch.no_grad():\n    {o}.copy_({n})", "\n{out} = {s} + {n}\n{n}.mul_(0.5)",
        "\n{out} = {s} - {n}\nwith torch.no_grad():\n    {n}.mul_(0.5).add_({s}, alpha=0.5)", "\n{out} = {s} * {n}.clone()\n{n}.zero_()",
        "\n{out} = ({f} + {n}[..., None]).exp().sum(-1)\n{n}.add_(1)", "\n{out} = ({f} * ({n} + 0)[..., None]).logsumexp(-1)\n{n}.mul_(3)",
        "\n{out} = {n} - {o}\n{n}.copy_({o})", "\n{out} = {s} - {n}[..., None].squeeze(-1)\n{n}[..., None].sub_(1)",
        "\n{out} = {s} * ({n} - {n}.mean())\nwith torch.no_grad():\n    {n}[1:].mul_(2)", "\n{out} = {s} - {n}\n{n}.detach().view(-1)[:2].add_(1)",
        "\n{out} = {s} * ({n} * {o})\n{n}.view(-1)[::2].fill_(0.25)\n{out} = {out} + {n}", "\n{out} = {s} * {n}.detach()\n{n}.data.mul_(2)",
        "\n{out} = {s} * {n}.exp()\nwith torch.no_grad():\n    {n}.sub_({n}.mean())", "\n{out} = {s} - {s}.detach() + {n}\n{n}.copy_({o})",
        "\n{out} = {s}.detach() * {n}\n{n}.copy_({s}.detach())", "\n{out} = torch.where({k}, {s}, {n})\n{n}.masked_fill_({k}, 0)",
    ),
}  # fmt: skip

# Blocks that write over numbers per row that are given, or over views of them.
STATES: dict[str, tuple[str, ...]] = {
    "no gradient": tuple(
        f"\nwith torch.no_grad():\n    {text}" for text in (
            "{n}.copy_({o})", "{n}.mul_(0.5).add_({o}, alpha=0.5)", "{n}.copy_({s})", "{n}.mul_(0.5).add_({s} * 0.5)", "{n}.zero_()", "{n}[1:].mul_(2)",
            "{n}[..., None].add_({r})", "{n}.lerp_({s}.to({n}.dtype), 0.25)", "{n}.masked_fill_({k}, 0)", "{n}[::2].copy_({o}[::2])", "{n}.view(-1)[:1].fill_(3)",
            "torch.add({n}, 1, out={n})", "{n}[{k}] = 0.5", "{n}.sub_({n}.mean())", "{n}.flatten().mul_(2)", "{n} += {s}", "{n}.unbind(0)[0].add_(1)",
        )
    ),
    "with one": (
        "\n{n}.mul_(0.5)", "\n{n}.copy_({o})", "\n{n}.add_({s}.detach())", "\n{n}[1:] -= 1", "\n{n}.data.copy_({o})", "\n{n}.detach().mul_(2)", "\n{n}.add_({s})",
    ),
}  # fmt: skip

# Values that are returned together.
TWINS: tuple[tuple[str, ...], ...] = (
    ("{s}", "{s}.detach()"), ("{s}.detach()", "{s}"), ("{s}", "{s}"), ("{s}", "{s}.clone()"), ("{s}", "{s}.detach().clone()"), ("{s}", "{s}[1:]"),
    ("{s}", "{s}[..., None]"), ("{s}", "{s}.detach()[:1]", "{s}.sum()"), ("{r}", "{r}.squeeze(-1)"), ("{s}", "{s}.float()"), ("{s}", "{s} * 1"),
    ("{s}", "({s} + 0).detach()"), ("{s}", "torch.zeros_like({s}) + {s}.detach()"), ("{n}", "{s}"), ("{n}.detach()", "{s}"), ("{n}[1:]", "{s}"),
    ("{n} * 1", "{n} * 1", "{s}"), ("{n} - {o}", "{n} - {o}", "{s}"), ("({s} - {s}.detach()) * {n}", "{s}.detach() * {n}"), ("{n}.clone()", "{n}", "{s}"),
    ("{f}.logsumexp(-1)", "{f}.detach().logsumexp(-1)"), ("{f}.logsumexp(-1)", "{f}.logsumexp(-1, True)"), ("{f}.amax(-1)", "{f}.max(-1).values.detach()"),
    ("{f}.argmax(-1)", "{f}.log_softmax(-1).argmax(-1)", "{f}.logsumexp(-1)"), ("{f}.log_softmax(-1)[..., 1]", "{f}.detach().log_softmax(-1)[..., 1]"),
    ("{f}.log_softmax(-1).gather(-1, {i}[..., None])", "{f}.detach().log_softmax(-1).gather(-1, {i}[..., None])"),
    ("{f}.log_softmax(-1).gather(-1, {i}[..., None])[..., 0]", "{f}[..., :].gather(-1, {i}[..., None])[..., 0] - {f}.logsumexp(-1)"),
    ("{f}.log_softmax(-1).gather(-1, {i}[..., None])", "-F.cross_entropy({f}, {i}, reduction='none')"),
    ("-({f}.softmax(-1) * {f}.log_softmax(-1)).sum(-1)", "Categorical(logits={f}.detach(), validate_args=False).entropy()"),
    ("({f}.softmax(-1) * {f}.log_softmax(-1)).sum(-1)", "({f}.softmax(-1).detach() * {f}.log_softmax(-1)).sum(-1)"),
    ("({f}.softmax(-1) * {n}[..., None]).sum(-1)", "{f}.logsumexp(-1)"), ("({f}.softmax(-1) * {r}).sum(-1)", "{r}.detach()"),
    ("{f}.softmax(-1)[..., 0]", "{f}.log_softmax(-1)[..., 0].exp().detach()"), ("{f}.sum(-1)", "{f}.detach().sum(-1)", "{f}.logsumexp(-1)"),
    ("{f}.logsumexp(-1).mean()", "{f}.detach().logsumexp(-1).mean()"), ("{f}.logsumexp(-1)", "{f}.exp().sum(-1).log().detach()"),
    ("{f}", "{f}.logsumexp(-1)"), ("{f}.detach()", "{f}.logsumexp(-1)"), ("{f}.logsumexp(-1)", "{k}", "{k} & True"), ("{i}", "{i} + 0", "{f}.logsumexp(-1)"),
)  # fmt: skip

BESIDE: dict[str, dict[str, tuple[str, ...]]] = {"s": NUMBERS, "w": STATES}
