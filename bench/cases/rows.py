"""Losses working row by row over the vocabulary: divergences, soft targets, kept sets, metrics.

Entry points: `LOSSES`, a name -> a loss; the names of its parameters select its inputs (`inputs_of`); `HEADS`, the same
for losses computing their logits. A loss over `logits` may be run over `hidden @ weight.t()`, and one with a `teacher`
over two heads.
"""

import inspect
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[..., Tensor]
KEPT, LAST, SHARED = 16, 64, 8


def inputs_of(
    loss: Loss, rows: int, vocab: int, dtype: torch.dtype, hidden: int = 64, seed: int = 0
) -> dict[str, Tensor]:
    """The inputs of `loss`.

    `logits`, `teacher` `[rows, vocab]`; `hidden`, `hidden_2` `[rows, hidden]`, `weight`, `weight_2` `[vocab, hidden]`;
    `target`, `other` int64 and `advantages`, `old`, `temperature` `[rows]`; `keep` bool `[rows]`; `kept` int64
    `[rows, 16]`, different columns; `shared` int64 `[8]`; `soft` `[rows, vocab]`, a distribution; `previous` bool
    `[rows, vocab]`; `bias` `[vocab]`; `lora_a`, `lora_b`; `draft` int64 `[vocab / 4]`; `value_weight` `[hidden]`.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    makers: dict[str, Callable[[], Tensor]] = {
        "logits": lambda: (3 * normal(rows, vocab)).to(dtype),
        "teacher": lambda: (3 * normal(rows, vocab)).to(dtype),
        "hidden": lambda: normal(rows, hidden).to(dtype),
        "hidden_2": lambda: normal(rows, hidden).to(dtype),
        "weight": lambda: (3 * normal(vocab, hidden) / hidden**0.5).to(dtype),
        "weight_2": lambda: (3 * normal(vocab, hidden) / hidden**0.5).to(dtype),
        "target": lambda: torch.randint(0, vocab // 2, [rows], generator=draw),
        "other": lambda: torch.randint(0, vocab // 2, [rows], generator=draw),
        "advantages": lambda: normal(rows),
        "old": lambda: -torch.rand([rows], generator=draw) - 8,
        "temperature": lambda: 0.5 + torch.rand([rows], generator=draw),
        "keep": lambda: torch.rand([rows], generator=draw) < 0.8,
        "kept": lambda: torch.rand([rows, vocab], generator=draw).topk(KEPT).indices,
        "shared": lambda: torch.randperm(vocab, generator=draw)[:SHARED],
        "soft": lambda: (3 * normal(rows, vocab)).softmax(-1).to(dtype),
        "previous": lambda: torch.rand([rows, vocab], generator=draw) < 0.01,
        "bias": lambda: normal(vocab).to(dtype),
        "lora_a": lambda: (normal(8, hidden) / 8).to(dtype),
        "lora_b": lambda: (normal(vocab, 8) / 8).to(dtype),
        "draft": lambda: torch.randperm(vocab, generator=draw)[: vocab // 4].sort().values,
        "value_weight": lambda: normal(hidden).to(dtype),
    }
    return {name: makers[name]() for name in inspect.signature(loss).parameters}


def _log(x: Tensor) -> Tensor:
    return F.log_softmax(_float(x), -1)


def _float(x: Tensor) -> Tensor:
    """In float32, or float64 for the truth."""
    return x if x.dtype == torch.float64 else x.float()


def _chosen(log_p: Tensor, target: Tensor) -> Tensor:
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)


# ---- divergences of two -------------------------------------------------------------------------------------------


def forward_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits), _log(teacher)
    return (q.exp() * (q - p)).sum(-1).mean()


def reverse_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits), _log(teacher)
    return (p.exp() * (p - q)).sum(-1).mean()


def reverse_kl_guarded(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    p, q = _log(logits), _log(teacher)
    gained = (p.exp() * (p - q)).masked_fill(logits.isinf() | teacher.isinf(), 0)
    return (gained.sum(-1) * keep).sum() / keep.sum()


def symmetric_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits), _log(teacher)
    return ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()


def kl_div(logits: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(_log(logits), _log(teacher), reduction="batchmean", log_target=True)


def jensen_shannon_skewed(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits / 2), _log(teacher / 2)
    mixture = torch.logaddexp(p + math.log(0.1), q + math.log(0.9))
    to_p = F.kl_div(mixture, p, reduction="none", log_target=True)
    to_q = F.kl_div(mixture, q, reduction="none", log_target=True)
    return (0.1 * to_p + 0.9 * to_q).sum(-1).mean()


def skewed_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """To a mixture, as DistiLLM has it."""
    q, p = _log(teacher).exp(), _log(logits).exp()
    mixed = 0.1 * q + 0.9 * p
    return (q * (q.clamp(min=1e-10).log() - mixed.clamp(min=1e-10).log())).sum(-1).mean()


def total_variation(logits: Tensor, teacher: Tensor) -> Tensor:
    return 0.5 * (_log(logits).exp() - _log(teacher).exp()).abs().sum(-1).mean()


def taid(logits: Tensor, teacher: Tensor) -> Tensor:
    between = F.softmax(0.6 * _float(logits.detach()) + 0.4 * _float(teacher), -1)
    return -(between * _log(logits)).sum(-1).mean()


def decoupled_kd(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """Target and non-target classes apart, as DKD has it."""
    hot = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, target[:, None], True)
    p, q = _log(logits).exp(), _log(teacher).exp()
    pt, qt = _chosen(p, target), _chosen(q, target)
    of_target = qt * (qt.log() - pt.log()) + (1 - qt) * ((1 - qt).log() - (1 - pt).log())
    rest_p, rest_q = _log(logits - 1000.0 * hot), _log(teacher - 1000.0 * hot)
    return (of_target + 2 * (rest_q.exp() * (rest_q - rest_p)).sum(-1)).mean()


def top_k_tail_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """Over the teacher's best columns, and a bucket for all others."""
    best = teacher.topk(KEPT, -1).indices
    p, q = _log(logits).gather(-1, best), _log(teacher).gather(-1, best)
    p_tail = (1 - p.exp().sum(-1)).clamp(min=1e-6)
    q_tail = (1 - q.exp().sum(-1)).clamp(min=1e-6)
    return ((q.exp() * (q - p)).sum(-1) + q_tail * (q_tail.log() - p_tail.log())).mean()


def students_top_k_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    best = logits.detach().topk(KEPT, -1).indices
    p, q = _log(logits).gather(-1, best), _log(teacher).gather(-1, best)
    return (p.exp() * (p - q)).sum(-1).mean()


def confidence_weighted(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits), _log(teacher)
    confidence = q.exp().amax(-1)
    return (confidence * (q.exp() * (q - p)).sum(-1)).mean()


# ---- soft targets -------------------------------------------------------------------------------------------------


def soft_targets(logits: Tensor, soft: Tensor) -> Tensor:
    return -(soft * _log(logits)).sum(-1).mean()


def soft_targets_at_temperature(logits: Tensor, soft: Tensor) -> Tensor:
    return -(soft * _log(logits / 0.1)).sum(-1).mean()


def mixup(logits: Tensor, target: Tensor, other: Tensor) -> Tensor:
    mixed = 0.7 * F.one_hot(target, logits.shape[-1]) + 0.3 * F.one_hot(other, logits.shape[-1])
    return -(mixed * _log(logits)).sum(-1).mean()


def dense_label_smoothing(logits: Tensor, target: Tensor) -> Tensor:
    vocab = logits.shape[-1]
    dense = torch.full_like(logits, 0.1 / (vocab - 1)).scatter(-1, target[:, None], 0.9)
    return F.kl_div(_log(logits), dense, reduction="batchmean")


# ---- kept sets ----------------------------------------------------------------------------------------------------


def kept_by_mask(logits: Tensor, kept: Tensor) -> Tensor:
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, kept, True)
    return -_chosen(_log(logits.masked_fill(~mask, -math.inf)), kept[:, 0]).mean()


def kept_by_added_mask(logits: Tensor, kept: Tensor) -> Tensor:
    mask = torch.full_like(logits, -math.inf).scatter(-1, kept, 0.0)
    return -_chosen(_log(logits + mask), kept[:, 0]).mean()


def kept_by_gather(logits: Tensor, kept: Tensor) -> Tensor:
    own = _float(logits).gather(-1, kept)
    return -(own[:, 0] - own.logsumexp(-1)).mean()


def top_p_by_sort(logits: Tensor, target: Tensor) -> Tensor:
    probs, order = _float(logits.detach()).softmax(-1).sort(-1, descending=True)
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(
        -1, order, (probs.cumsum(-1) - probs) > 0.9
    )
    dropped = dropped.scatter(-1, target[:, None], False)
    return -_chosen(_log(logits.masked_fill(dropped, -1e4)), target).mean()


def min_p(logits: Tensor, target: Tensor) -> Tensor:
    probs = _float(logits.detach()).softmax(-1)
    dropped = (probs < 0.05 * probs.amax(-1, keepdim=True)).scatter(-1, target[:, None], False)
    return -_chosen(_log(logits.masked_fill(dropped, -1e4)), target).mean()


def shared_columns(logits: Tensor, shared: Tensor) -> Tensor:
    """The normaliser cancels."""
    own = _log(logits)[:, shared]
    return -(own - own.logsumexp(-1, keepdim=True))[:, 0].mean()


def shared_columns_summed(logits: Tensor, shared: Tensor) -> Tensor:
    return -_log(logits)[:, shared].exp().sum(-1).log().mean()


# ---- powers and complements ---------------------------------------------------------------------------------------


def tsallis(logits: Tensor) -> Tensor:
    return (1 - (_float(logits).softmax(-1) ** 2).sum(-1)).mean()


def sum_of_squares_beside(logits: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits)
    return -_chosen(log_p, target).mean() + 0.1 * log_p.exp().square().sum(-1).mean()


def generalised_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return ((1 - _chosen(_float(logits).softmax(-1), target) ** 0.7) / 0.7).mean()


def focal_on_all(logits: Tensor, target: Tensor) -> Tensor:
    p = _float(logits).softmax(-1)
    return -((1 - p) ** 2 * _log(logits) * F.one_hot(target, logits.shape[-1])).sum(-1).mean()


def unlikelihood_on_all(logits: Tensor, target: Tensor) -> Tensor:
    other = 1 - F.one_hot(target, logits.shape[-1])
    return -(torch.log((1 - _float(logits).softmax(-1)).clamp(min=1e-6)) * other).sum(-1).mean()


def unlikelihood_of_previous(logits: Tensor, previous: Tensor) -> Tensor:
    return -(torch.log((1 - _float(logits).softmax(-1)).clamp(min=1e-5)) * previous).sum(-1).mean()


def symmetric_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """With the reverse term, as SCE has it."""
    hot = F.one_hot(target, logits.shape[-1]).to(_float(logits).dtype).clamp(min=1e-4)
    reverse = -(_float(logits).softmax(-1).clamp(min=1e-7) * hot.log()).sum(-1)
    return (0.1 * F.cross_entropy(_float(logits), target, reduction="none") + reverse).mean()


def entropy_with_epsilon(logits: Tensor) -> Tensor:
    p = _float(logits).softmax(-1)
    return (p * (p + 1e-10).log()).sum(-1).mean()


def entropy_guarded(logits: Tensor) -> Tensor:
    log_p = _log(logits)
    return (log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(-1).mean()


def entropy_after_nan_to_num(logits: Tensor) -> Tensor:
    p = _float(logits).softmax(-1)
    return -(p * p.log().nan_to_num(neginf=0.0)).sum(-1).mean()


# ---- metrics beside -----------------------------------------------------------------------------------------------


def accuracy_beside(logits: Tensor, target: Tensor) -> Tensor:
    right = (logits.argmax(-1) == target).float().mean()
    return F.cross_entropy(_float(logits), target) + 0.0 * right


def top_5_beside(logits: Tensor, target: Tensor) -> Tensor:
    found = (logits.topk(5, -1).indices == target[:, None]).any(-1).float().mean()
    return F.cross_entropy(_float(logits), target) + 0.0 * found


def rank_beside(logits: Tensor, target: Tensor) -> Tensor:
    rank = (logits > logits.gather(-1, target[:, None])).sum(-1).float().mean()
    return F.cross_entropy(_float(logits), target) + 0.0 * rank


def mean_logit_beside(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_float(logits), target) + 0.0 * _float(logits).mean(-1).mean()


def policy_with_metrics(logits: Tensor, target: Tensor, advantages: Tensor, old: Tensor) -> Tensor:
    log_p = _log(logits)
    own = _chosen(log_p, target)
    ratio = (own - old).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    confidence = log_p.exp().amax(-1).mean()
    return policy - 0.01 * entropy + 0.0 * confidence


# ---- logits changed before ----------------------------------------------------------------------------------------


def softcap_then_mask(logits: Tensor, previous: Tensor, target: Tensor) -> Tensor:
    capped = 30 * torch.tanh(_float(logits) / 30)
    masked = capped.masked_fill(previous.scatter(-1, target[:, None], False), -math.inf)
    return -_chosen(_log(masked), target).mean()


def temperature_per_sample(logits: Tensor, temperature: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits / temperature[:, None])
    return -_chosen(log_p, target).mean() + 0.1 * (log_p.exp() ** 2).sum(-1).mean()


def padded_head(logits: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits[:, :-LAST])
    return -_chosen(log_p, target).mean() + 0.1 * (log_p.exp() ** 2).sum(-1).mean()


def padding_written(logits: Tensor, target: Tensor) -> Tensor:
    x = _float(logits).clone()
    x[:, -LAST:] = torch.finfo(x.dtype).min
    log_p = _log(x)
    return -_chosen(log_p, target).mean() + 0.1 * (log_p.exp() ** 2).sum(-1).mean()


def top_k_of_log_probs(logits: Tensor) -> Tensor:
    best = _log(logits).topk(KEPT, -1).values
    return (best.exp() * best).sum(-1).mean()


def centred(logits: Tensor, teacher: Tensor) -> Tensor:
    """The teacher less its mean over the batch, as DINO has it."""
    centre = _float(teacher).mean(0, keepdim=True)
    target = F.softmax((_float(teacher) - centre) / 0.5, -1).detach()
    return -(target * _log(logits / 0.9)).sum(-1).mean()


def absorbing_diffusion(logits: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """As D3PM: the mask token is the last column, and unmasked positions copy their token."""
    masked = torch.full_like(logits[:, :1], -1e9)
    scores = torch.cat([logits[:, :-1], masked], -1)
    copied = torch.full_like(scores, -1e9).scatter(-1, target[:, None], 0.0)
    log_p = torch.where(keep[:, None], _log(scores), _float(copied))
    return -_chosen(log_p, target).mean() + 0.01 * (log_p.exp() ** 2).sum(-1).mean()


def uniform_diffusion(logits: Tensor, target: Tensor) -> Tensor:
    vocab = logits.shape[-1]
    p = _float(logits).softmax(-1)
    noisy = 0.9 * p + 0.1 / vocab
    wanted = 0.9 * F.one_hot(target, vocab) + 0.1 / vocab
    return (wanted * (wanted.log() - noisy.log())).sum(-1).mean()


# ---- heads --------------------------------------------------------------------------------------------------------


def lora_head(
    hidden: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, target: Tensor
) -> Tensor:
    logits = hidden @ weight.detach().t() + (hidden @ lora_a.t()) @ lora_b.t()
    return F.cross_entropy(_float(logits), target)


def r_drop(hidden: Tensor, hidden_2: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    a, b = _log(hidden @ weight.t()), _log(hidden_2 @ weight.t())
    apart = ((a.exp() - b.exp()) * (a - b)).sum(-1)
    return (apart - _chosen(a, target) - _chosen(b, target)).mean()


def draft_soft_cross_entropy(
    hidden: Tensor, hidden_2: Tensor, weight: Tensor, weight_2: Tensor, draft: Tensor
) -> Tensor:
    """EAGLE: the target model's distribution over the draft vocabulary."""
    target = _log((hidden_2 @ weight_2.t())[:, draft]).exp().detach()
    return -(target * _log(hidden @ weight[draft].t())).sum(-1).mean()


def two_tokens_ahead(
    hidden: Tensor, hidden_2: Tensor, weight: Tensor, target: Tensor, other: Tensor
) -> Tensor:
    """Multi-token prediction: two losses over one weight, and a metric."""
    first, second = hidden @ weight.t(), hidden_2 @ weight.t()
    right = (first.argmax(-1) == target).float().mean()
    return (
        F.cross_entropy(_float(first), target)
        + 0.3 * F.cross_entropy(_float(second), other)
        + 0.0 * right
    )


def value_head_beside(
    hidden: Tensor, weight: Tensor, value_weight: Tensor, target: Tensor, advantages: Tensor
) -> Tensor:
    log_p = _log(hidden @ weight.t())
    value = _float(hidden @ value_weight)
    squares = (log_p.exp() ** 2).sum(-1)
    return (
        -advantages * _chosen(log_p, target) + 0.01 * squares + (value - advantages) ** 2
    ).mean()


def bias_on_head(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    log_p = _log(F.linear(hidden, weight, bias))
    return -_chosen(log_p, target).mean() + 0.1 * (log_p.exp() ** 2).sum(-1).mean()


_OVER_HEADS = (
    lora_head, r_drop, draft_soft_cross_entropy, two_tokens_ahead, value_head_beside, bias_on_head,
)  # fmt: skip

HEADS: dict[str, Loss] = {loss.__name__: loss for loss in _OVER_HEADS}
LOSSES: dict[str, Loss] = {
    name: loss
    for name, loss in list(globals().items())
    if inspect.isfunction(loss)
    and loss.__module__ == __name__
    and next(iter(inspect.signature(loss).parameters), "") == "logits"
}


def over_heads(loss: Loss) -> Loss:
    """`loss` over `hidden @ weight.t()` in place of logits, and over a second head in place of a teacher."""
    names = list(inspect.signature(loss).parameters)
    two = "teacher" in names
    heads = ["hidden", "weight", *(["hidden_2", "weight_2"] if two else [])]
    others = [name for name in names if name not in ("logits", "teacher")]

    def run(*args: Tensor) -> Tensor:
        given = dict(zip([*heads, *others], args, strict=True))
        given["logits"] = given.pop("hidden") @ given.pop("weight").t()
        if two:
            given["teacher"] = (given.pop("hidden_2") @ given.pop("weight_2").t()).detach()
        return loss(**given)

    parameters = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in (*heads, *others)
    ]
    run.__name__ = loss.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


TRAINED = (
    "logits",
    "hidden",
    "hidden_2",
    "weight",
    "weight_2",
    "bias",
    "lora_a",
    "lora_b",
    "value_weight",
)
"""The inputs with a gradient."""
