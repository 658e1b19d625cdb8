"""Losses over a vocabulary in the spellings of public trainers: distillation, soft targets, sampling masks, diffusion.

Entry points: `LOSSES` and `HEADS`, as in `rows.py`, with `inputs_of` and the shortest spelling of each kind. Here the
losses have guards, masks, several terms, as in a repository. The functions are ours.
"""

import inspect
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases.rows import KEPT, LAST

Loss = Callable[..., Tensor]


def _wide(x: Tensor) -> Tensor:
    """In float32, or float64 for the truth."""
    return x if x.dtype == torch.float64 else x.float()


def _log(x: Tensor) -> Tensor:
    return F.log_softmax(_wide(x), -1)


def _soft(x: Tensor) -> Tensor:
    return F.softmax(_wide(x), -1)


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _mean(x: Tensor, keep: Tensor) -> Tensor:
    return (x * keep).sum() / keep.sum()


def _hot(target: Tensor, x: Tensor) -> Tensor:
    return F.one_hot(target, x.shape[-1]).to(_wide(x).dtype)


def _dead(logits: Tensor, teacher: Tensor) -> Tensor:
    return torch.isinf(logits) | torch.isinf(teacher)


def _dropped(logits: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the columns outside `mask`, the target among them."""
    mask = mask.scatter(-1, target[:, None], False)
    return F.cross_entropy(_wide(logits).masked_fill(mask, -math.inf), target)


# ---- divergences of two models ------------------------------------------------------------------------------------


def reverse_kl_where_finite(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    p, dead = _soft(logits), _dead(logits, teacher)
    terms = (p * _log(teacher)).masked_fill(dead, 0) - (p * _log(logits)).masked_fill(dead, 0)
    return -_mean(terms.sum(-1), keep)


def jensen_shannon_where_finite(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    p, q, dead = _soft(logits), _soft(teacher), _dead(logits, teacher)
    mixed = (0.1 * p + 0.9 * q).log()
    of_p = (p * mixed).masked_fill(dead, 0) - (p * _log(logits)).masked_fill(dead, 0)
    of_q = (q * mixed).masked_fill(dead, 0) - (q * _log(teacher)).masked_fill(dead, 0)
    return -0.1 * _mean(of_p.sum(-1), keep) - 0.9 * _mean(of_q.sum(-1), keep)


def skewed_forward_kl_where_finite(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    q = _soft(teacher)
    mixed = (0.1 * q + 0.9 * _soft(logits)).log()
    return -_mean((q * mixed).masked_fill(_dead(logits, teacher), 0).sum(-1), keep)


def total_variation_where_finite(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    apart = (_soft(teacher) - _soft(logits)).abs().masked_fill(_dead(logits, teacher), 0)
    return 0.5 * _mean(apart.sum(-1), keep)


def jensen_shannon_of_batches(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """Four sequences, the last position of each predicts nothing; the mixture by `logsumexp` of a stack."""
    s, t, k = (x.unflatten(0, (4, -1)) for x in (logits, teacher, keep))
    p, q = _log(s[:, :-1] / 2), _log(t[:, :-1] / 2)
    mixed = torch.logsumexp(torch.stack([p + math.log(0.5), q + math.log(0.5)]), 0)
    to_p = F.kl_div(mixed, p, reduction="none", log_target=True)
    to_q = F.kl_div(mixed, q, reduction="none", log_target=True)
    return _mean((0.5 * to_p + 0.5 * to_q).sum(-1), k[:, 1:])


def adaptive_kl(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """Forward and reverse KL by their gaps in the head and in the tail of the teacher's sorted distribution."""
    p, q = _soft(logits), _soft(teacher)
    largest, order = q.sort(-1, descending=True)
    apart, is_head = (largest - p.gather(-1, order)).abs(), largest.cumsum(-1) < 0.5
    head = apart.masked_fill(~is_head, 0).sum(-1).detach()
    share = head / (head + apart.masked_fill(is_head, 0).sum(-1).detach())
    difference = _log(teacher) - _log(logits)
    return _mean(share * (q * difference).sum(-1) - (1 - share) * (p * difference).sum(-1), keep)


def alpha_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    return ((1 - (_soft(logits).pow(0.5) * _soft(teacher).pow(0.5)).sum(-1)) / 0.25).mean()


def alpha_beta_divergence(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    a, b = 0.2, 0.7
    p, q = _soft(logits), _soft(teacher)
    terms = q.pow(a) * p.pow(b) - a / (a + b) * q.pow(a + b) - b / (a + b) * p.pow(a + b)
    return _mean(-terms.masked_fill(_dead(logits, teacher), 0).sum(-1) / (a * b), keep)


def hellinger(logits: Tensor, teacher: Tensor) -> Tensor:
    return (_soft(logits).sqrt() - _soft(teacher).sqrt()).square().sum(-1).sqrt().mean()


def logits_apart_beside(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(_wide(logits), _wide(teacher)) + F.cross_entropy(_wide(logits), target)


def cosine_beside(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    angle = F.cosine_similarity(_wide(logits), _wide(teacher), dim=-1)
    return (1 - angle).mean() + F.cross_entropy(_wide(logits), target)


def _standard(x: Tensor) -> Tensor:
    x = _wide(x)
    return (x - x.mean(-1, keepdim=True)) / (1e-7 + x.std(-1, keepdim=True))


def standardised_kd(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """Logits less their mean, by their deviation."""
    log_p, q = _log(_standard(logits) / 2), _soft(_standard(teacher) / 2)
    kl = F.kl_div(log_p, q, reduction="none").sum(1).mean()
    return 36 * kl + F.cross_entropy(_wide(logits), target)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return F.cosine_similarity(a, b).mean()


def correlation_of_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    return 1 - _correlation(_soft(logits), _soft(teacher))


def correlation_of_rows_and_columns(logits: Tensor, teacher: Tensor) -> Tensor:
    """As DIST has it."""
    p, q = _soft(logits / 4), _soft(teacher / 4)
    return 2 - _correlation(p, q) - _correlation(p.t(), q.t())


def interpolated_teacher_masked(
    logits: Tensor, teacher: Tensor, keep: Tensor, advantages: Tensor
) -> Tensor:
    """TAID, the share of the teacher a tensor."""
    share = torch.sigmoid(advantages.mean())
    q = F.softmax((1 - share) * _wide(logits).detach() + share * _wide(teacher), -1)
    return -_mean((q * _log(logits)).masked_fill(torch.isinf(logits), 0).sum(-1), keep)


def decoupled_kd_joined(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """DKD: target and others joined by `cat`, and the others without the target by a large number."""
    hot = torch.zeros_like(logits).scatter_(1, target[:, None], 1).bool()
    others = torch.ones_like(logits).scatter_(1, target[:, None], 0).bool()

    def two(p: Tensor) -> Tensor:
        return torch.cat([(p * hot).sum(1, keepdim=True), (p * others).sum(1, keepdim=True)], 1)

    p, q = two(_soft(logits / 4)), two(_soft(teacher / 4))
    of_target = F.kl_div(p.log(), q, reduction="sum")
    q = _soft(_wide(teacher) / 4 - 1000.0 * hot)
    of_others = F.kl_div(_log(_wide(logits) / 4 - 1000.0 * hot), q, reduction="sum")
    return 16 * (of_target + 8 * of_others) / len(target)


def _with_tail(log_p: Tensor) -> Tensor:
    covered = log_p.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_p, torch.log(-torch.expm1(covered))], -1)


def top_k_and_tail(logits: Tensor, teacher: Tensor) -> Tensor:
    """A bucket for all columns but the teacher's best, by `expm1`."""
    best = teacher.topk(KEPT, -1).indices
    p, q = (_with_tail(_log(each).gather(-1, best)) for each in (logits, teacher))
    return F.kl_div(p, q, reduction="none", log_target=True).sum(-1).mean()


def top_k_renormalised(logits: Tensor, teacher: Tensor) -> Tensor:
    best, at = _wide(teacher).topk(KEPT, -1)
    own = F.log_softmax(_wide(logits).gather(-1, at), -1)
    return F.kl_div(own, F.softmax(best, -1), reduction="batchmean")


def students_top_k_renormalised(logits: Tensor, teacher: Tensor) -> Tensor:
    p, at = _log(logits).topk(KEPT, -1)
    q = _log(teacher).gather(-1, at)
    p, q = p - p.logsumexp(-1, keepdim=True), q - q.logsumexp(-1, keepdim=True)
    return (p.exp() * (p - q)).sum(-1).mean()


def given_columns_clamped(logits: Tensor, teacher: Tensor, kept: Tensor, keep: Tensor) -> Tensor:
    p = _log(logits).gather(-1, kept).clamp(min=-10)
    q = _log(teacher).gather(-1, kept).clamp(min=-10)
    kl = F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    return _mean(kl.clamp(max=10), keep)


def best_of_both(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL over the best columns of either."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask = mask.scatter(-1, teacher.topk(KEPT, -1).indices, True)
    mask = mask.scatter(-1, logits.topk(KEPT, -1).indices, True)
    p, q = _log(logits), _log(teacher)
    return ((q.exp() * (q - p)) * mask).sum(-1).mean()


def clamped_log_probs(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits).clamp(min=-20), _log(teacher).clamp(min=-20)
    return (p.exp() * (p - q)).sum(-1).mean()


def contrastive_decoding(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(_log(logits) - 0.5 * _log(teacher), target)


def weighted_by_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """The teacher's, less its mean over the batch."""
    q = _log(teacher)
    entropy = -(q.exp() * q).sum(-1)
    weight = torch.sigmoid(entropy - entropy.mean())
    return (weight * (q.exp() * (q - _log(logits))).sum(-1)).mean()


def third_estimator_on_all(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits), _log(teacher)
    return (p.exp().detach() * ((q - p).exp() - (q - p) - 1)).sum(-1).mean()


def hard_and_soft(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """In the logits' own dtype."""
    log_p, q = F.log_softmax(logits / 2, -1), F.softmax(teacher / 2, -1)
    soft = 4 * F.kl_div(log_p, q, reduction="batchmean")
    return 0.5 * soft + 0.5 * F.cross_entropy(logits, target)


def sorted_apart(logits: Tensor, teacher: Tensor) -> Tensor:
    """Of two vocabularies, as ULD has it."""
    p, q = (_soft(each).sort(-1, descending=True).values for each in (logits, teacher))
    return (p - q).abs().sum(-1).mean()


def earth_mover(logits: Tensor, teacher: Tensor) -> Tensor:
    return (_soft(logits) - _soft(teacher)).cumsum(-1).abs().sum(-1).mean()


def centred_and_masked(logits: Tensor, teacher: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
    """iBOT, with a running centre."""
    q = F.softmax((_wide(teacher) - _wide(bias.detach())) / 0.5, -1)
    return -_mean((q * _log(_wide(logits) / 0.9)).sum(-1), keep)


def crops(logits: Tensor, teacher: Tensor, bias: Tensor) -> Tensor:
    """DINO: four crops of each image, two of them for the teacher, too."""
    students = (_wide(logits) / 0.5).chunk(4)
    centred = (_wide(teacher[: len(teacher) // 2]) - _wide(bias.detach())) / 0.5
    pairs = itertools.product(enumerate(centred.softmax(-1).chunk(2)), enumerate(students))
    terms = [-(q * x.log_softmax(-1)).sum(-1).mean() for (i, q), (j, x) in pairs if i != j]
    return torch.stack(terms).mean()


def two_passes(logits: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """R-Drop over a batch of both passes, cut after the softmax."""
    (log_a, log_b), (a, b) = _log(logits).chunk(2), _soft(logits).chunk(2)
    apart = F.kl_div(log_a, b, reduction="none") + F.kl_div(log_b, a, reduction="none")
    apart = apart.masked_fill(~keep[: len(a), None], 0.0)
    return F.cross_entropy(_wide(logits), target) + 0.5 * apart.sum() / len(target)


def balanced(logits: Tensor, teacher: Tensor) -> Tensor:
    """Sinkhorn's iterations over rows and columns of the teacher's scores."""
    q = torch.exp(_wide(teacher) / 3 - (_wide(teacher) / 3).amax())
    for _ in range(3):
        q = q / q.sum(0, keepdim=True) / q.shape[1]
        q = q / q.sum(1, keepdim=True) / q.shape[0]
    return -(q * q.shape[0] * _log(logits)).sum(-1).mean()


def draft_with_accuracy(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """EAGLE: soft cross entropy, and whether the teacher's best is among three."""
    q = _soft(teacher)
    loss = -(keep[:, None] * (q * _log(logits))).sum() / (keep.sum() + 1e-5)
    found = (logits.topk(3, -1).indices == q.argmax(-1, keepdim=True)).any(-1)
    return loss + 0.0 * found.float().mean()


def acceptance_rate(logits: Tensor, teacher: Tensor) -> Tensor:
    return -torch.minimum(_soft(logits), _soft(teacher)).sum(-1).clamp(min=1e-8).log().mean()


def policy_and_teacher(
    logits: Tensor, teacher: Tensor, target: Tensor, old: Tensor, advantages: Tensor, keep: Tensor
) -> Tensor:
    """On-policy distillation beside a clipped policy loss."""
    p, q = _log(logits), _log(teacher)
    ratio = (_at(p, target) - old).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return _mean(policy + 0.05 * (p.exp() * (p - q)).sum(-1), keep)


def mixture_clamped(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _soft(logits), _soft(teacher)
    mixed = ((p + q) / 2).clamp(1e-7, 1).log()
    return (F.kl_div(mixed, p, reduction="sum") + F.kl_div(mixed, q, reduction="sum")) / len(p)


def pseudo_labels(logits: Tensor, teacher: Tensor) -> Tensor:
    """FixMatch: only rows with a confident teacher."""
    best, label = _soft(teacher).detach().max(-1)
    loss = F.cross_entropy(_wide(logits), label, reduction="none")
    return (loss * best.ge(0.2)).mean()


# ---- targets ------------------------------------------------------------------------------------------------------


def smoothed_by_sum(logits: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    log_p = _log(logits)
    share = 0.1 / (log_p.shape[-1] - 1)
    loss = -(0.9 - share) * _at(log_p, target) - share * log_p.sum(-1)
    return loss.masked_fill(~keep, 0.0).sum()


def smoothed_without_padding(logits: Tensor, target: Tensor) -> Tensor:
    """A dense target with its first column set to zero."""
    dense = torch.full_like(_wide(logits), 0.1 / (logits.shape[-1] - 2))
    dense = dense.scatter_(1, target[:, None], 0.9)
    dense[:, 0] = 0
    return F.kl_div(_log(logits), dense, reduction="sum")


def towards_uniform(logits: Tensor) -> Tensor:
    uniform = torch.full_like(_wide(logits), 1 / logits.shape[-1])
    return F.kl_div(_log(logits), uniform, reduction="batchmean")


def truncated_gce(logits: Tensor, target: Tensor) -> Tensor:
    p = _at(_soft(logits), target)
    return torch.where(p > 0.5, (1 - p**0.7) / 0.7, (1 - 0.5**0.7) / 0.7).mean()


def normalised_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits)
    return ((_hot(target, logits) * log_p).sum(1) / log_p.sum(1)).mean()


def normalised_focal(logits: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits)
    focal = (1 - log_p.exp()) ** 2 * log_p
    return (_at(focal, target) / focal.sum(-1)).mean()


def _tempered(x: Tensor) -> Tensor:
    return F.relu(1 - 0.2 * x) ** -5.0


def bi_tempered(logits: Tensor, target: Tensor) -> Tensor:
    """Normalised by five iterations, with no exponential."""
    x = _wide(logits)
    best = x.amax(-1, keepdim=True)
    scaled = x - best
    for _ in range(5):
        scaled = (x - best) * _tempered(scaled).sum(-1, keepdim=True) ** -0.2
    shift = (_tempered(scaled).sum(-1, keepdim=True) ** 0.2 - 1) / 0.2
    p, hot = _tempered(x - shift - best), _hot(target, logits)
    terms = hot * ((hot + 1e-10) ** 0.2 - p**0.2) / 0.2 - (hot**1.2 - p**1.2) / 1.2
    return terms.sum(-1).mean()


def sparsemax(logits: Tensor, target: Tensor) -> Tensor:
    x = _wide(logits) - _wide(logits).amax(-1, keepdim=True)
    largest = x.sort(-1, descending=True).values
    places = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    total = largest.cumsum(-1)
    count = (1 + places * largest > total).sum(-1, keepdim=True)
    p = (x - (total.gather(-1, count - 1) - 1) / count.to(x.dtype)).clamp(min=0)
    return (0.5 * (p * (2 * x - p)).sum(-1) - _at(x, target) + 0.5).mean()


def renyi_entropy(logits: Tensor) -> Tensor:
    return -(_soft(logits) ** 2).sum(-1).log().mean()


def tsallis_beside(logits: Tensor, target: Tensor) -> Tensor:
    power = _soft(logits).pow(1.5).sum(-1)
    return 2 * (1 - power).mean() + F.cross_entropy(_wide(logits), target)


def squentropy(logits: Tensor, target: Tensor) -> Tensor:
    x = _wide(logits)
    others = (x * (1 - _hot(target, x))).square().sum(-1)
    return F.cross_entropy(x, target) + others.mean() / (x.shape[-1] - 1)


def brier(logits: Tensor, target: Tensor) -> Tensor:
    return (_soft(logits) - _hot(target, logits)).square().sum(-1).mean()


def binary_of_all(logits: Tensor, target: Tensor) -> Tensor:
    x = _wide(logits)
    hot = _hot(target, logits)
    return F.binary_cross_entropy_with_logits(x, hot, reduction="none").sum(-1).mean()


def margins_of_all(logits: Tensor, target: Tensor) -> Tensor:
    return F.multi_margin_loss(_wide(logits), target)


def unlikely_candidates(logits: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits)
    unlikely = (1 - log_p.gather(-1, kept).exp()).clamp(min=1e-5).log()
    penalty = (unlikely * (kept != target[:, None])).sum() / len(target)
    return F.nll_loss(log_p, target) - penalty


def unlikely_by_a_mask(logits: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits)
    mask = torch.zeros_like(log_p).scatter_(1, kept, 1)
    unlikely = (1 - log_p.exp()).clamp(min=1e-5).log()
    return F.nll_loss(log_p, target) - (unlikely * mask).sum() / len(target)


def contrastive_tokens(logits: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    x = _wide(logits)
    apart = x.gather(-1, kept) - _at(x, target)[:, None]
    return (1 + apart.exp().sum(-1)).log().mean() + F.cross_entropy(x, target)


def all_but_the_target(logits: Tensor, target: Tensor) -> Tensor:
    others = _wide(logits).masked_fill(_hot(target, logits).bool(), -math.inf)
    return (_wide(logits).logsumexp(-1) - others.logsumexp(-1)).mean()


def by_einsum(logits: Tensor, soft: Tensor) -> Tensor:
    return -torch.einsum("nv,nv->n", _wide(soft), _log(logits)).mean()


# ---- entropies and sampling masks ---------------------------------------------------------------------------------


def entropy_of_allowed(logits: Tensor, previous: Tensor) -> Tensor:
    masked = _wide(logits).masked_fill(previous, -1e30)
    expected = (masked.softmax(-1) * _wide(logits).masked_fill(previous, 0.0)).sum(-1)
    return (masked.logsumexp(-1) - expected).mean()


def entropy_of_top_p(logits: Tensor) -> Tensor:
    largest = _wide(logits).sort(-1, descending=True).values
    p = largest.softmax(-1)
    dropped = (p.cumsum(-1) - p) > 0.9
    log_p = largest.masked_fill(dropped, -math.inf).log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(dropped, 0.0)).sum(-1).mean()


def entropy_of_top_k_and_tail(logits: Tensor) -> Tensor:
    best = _soft(logits).topk(20, -1).values
    tail = (1 - best.sum(-1)).clamp(min=1e-12)
    return (-(best * best.clamp(min=1e-12).log()).sum(-1) - tail * tail.log()).mean()


def uncertain_rows(logits: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    """A policy loss of the fifth of the rows with the largest entropy."""
    log_p = _log(logits)
    entropy = -(log_p.exp() * log_p).sum(-1).detach()
    return _mean(-advantages * _at(log_p, target), entropy >= entropy.quantile(0.8))


def top_p_shifted(logits: Tensor, target: Tensor) -> Tensor:
    """The first column over the bound stays: the mask is written over a shifted copy of itself."""
    largest, order = _wide(logits).detach().sort(-1, descending=True)
    dropped = largest.softmax(-1).cumsum(-1) > 0.9
    dropped[..., 1:] = dropped[..., :-1].clone()
    dropped[..., 0] = False
    return _dropped(logits, torch.zeros_like(dropped).scatter(-1, order, dropped), target)


def top_k_and_top_p(logits: Tensor, target: Tensor) -> Tensor:
    """By one ascending sort; a scatter undoes its order."""
    x, order = _wide(logits).sort(-1)
    x = x.masked_fill(x < x[:, -50:-49], -math.inf)
    dropped = x.softmax(-1).cumsum(-1) <= 0.1
    dropped[:, -1] = False
    x = torch.empty_like(x).scatter_(-1, order, x.masked_fill(dropped, -math.inf))
    return -_at(x.log_softmax(-1), target).clamp(min=-30).mean()


def min_p_renormalised(logits: Tensor, target: Tensor) -> Tensor:
    p = _soft(logits)
    kept = (p >= 0.05 * p.amax(-1, keepdim=True)).scatter(-1, target[:, None], True)
    p = p * kept
    return -_at(p / p.sum(-1, keepdim=True), target).log().mean()


def typical_columns(logits: Tensor, target: Tensor) -> Tensor:
    log_p = _log(logits).detach()
    apart = (-log_p + (log_p.exp() * log_p).sum(-1, keepdim=True)).abs()
    nearest, order = apart.sort(-1)
    below = log_p.gather(-1, order).softmax(-1).cumsum(-1) < 0.9
    last = below.sum(-1, keepdim=True).clamp(max=log_p.shape[-1] - 1)
    return _dropped(logits, apart > nearest.gather(-1, last), target)


def metrics_of_logits(logits: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    x = _wide(logits)
    metrics = x.std(-1).mean() + x.abs().amax(-1).mean() + x.amin(-1).mean() + x.mean()
    return -(advantages * _at(x.log_softmax(-1), target)).mean() + 0.0 * metrics.detach()


def largest_squared(logits: Tensor, target: Tensor) -> Tensor:
    best = _wide(logits).amax(-1)
    return F.cross_entropy(_wide(logits), target) + 1e-3 * best.square().mean()


def rank_by_sort(logits: Tensor, target: Tensor) -> Tensor:
    order = logits.argsort(-1, descending=True)
    rank = (order == target[:, None]).to(torch.int).argmax(-1)
    return F.cross_entropy(_wide(logits), target) + 0.0 * rank.float().mean()


def variance_of_log_probs(logits: Tensor) -> Tensor:
    log_p = _log(logits)
    mean = (log_p.exp() * log_p).sum(-1, keepdim=True)
    return (log_p.exp() * (log_p - mean) ** 2).sum(-1).mean()


# ---- logits changed before ----------------------------------------------------------------------------------------


def zero_where_not_finite(logits: Tensor, previous: Tensor, target: Tensor) -> Tensor:
    mask = previous.scatter(-1, target[:, None], False)
    x = _wide(logits).masked_fill(mask, -math.inf)
    log_p = x.log_softmax(-1)
    log_p = torch.where(torch.isfinite(log_p), log_p, torch.zeros_like(log_p))
    return -_at(log_p, target).mean() + 0.01 * (x.softmax(-1) * log_p).sum(-1).mean()


def finite_by_nan_to_num(logits: Tensor, previous: Tensor, target: Tensor) -> Tensor:
    mask = previous.scatter(-1, target[:, None], False)
    log_p = _wide(logits).masked_fill(mask, -math.inf).log_softmax(-1)
    log_p = torch.nan_to_num(log_p, neginf=-1e4)
    return -_at(log_p, target).mean() + 0.1 * (log_p.exp() * log_p).sum(-1).mean()


def masked_by_least(logits: Tensor, previous: Tensor, target: Tensor) -> Tensor:
    mask = previous.scatter(-1, target[:, None], False)
    x = torch.where(mask, torch.finfo(torch.float32).min, _wide(logits))
    p = x.softmax(-1)
    return F.cross_entropy(x, target) + 0.01 * (p * (p + 1e-9).log()).sum(-1).mean()


def softcap_masked_squares(logits: Tensor, previous: Tensor, target: Tensor) -> Tensor:
    x = 15 * torch.tanh(logits / 15)
    p = _soft(x.masked_fill(previous, torch.finfo(logits.dtype).min))
    return -(_at(p, target) + 1e-8).log().mean() + 0.1 * (p * p).sum(-1).mean()


def temperature_of_batches(logits: Tensor, temperature: Tensor, target: Tensor) -> Tensor:
    x = _wide(logits).unflatten(0, (4, -1)) / temperature[:4].view(-1, 1, 1)
    log_p = x.log_softmax(-1).flatten(0, 1)
    return -_at(log_p, target).mean() + 0.01 * (log_p.exp() * log_p).sum(-1).mean()


def floor_of_batches(logits: Tensor, temperature: Tensor, target: Tensor) -> Tensor:
    """Log-probs, with uniform noise of another level in each sequence."""
    log_p = _log(logits).unflatten(0, (4, -1))
    noise = -5 * temperature[:4].view(-1, 1, 1)
    larger = torch.maximum(log_p, noise)
    mixed = larger + ((log_p - larger).exp() + (noise - larger).exp()).log()
    return -_at(mixed.flatten(0, 1).log_softmax(-1), target).mean()


def padding_cut(logits: Tensor, teacher: Tensor) -> Tensor:
    p, q = _log(logits[..., :-LAST]), _log(teacher[..., :-LAST])
    return (p.exp() * (p - q)).sum(-1).mean()


def repetition_penalty(logits: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    x = _wide(logits)
    own = x.gather(1, kept)
    return F.cross_entropy(x.scatter(1, kept, torch.where(own < 0, own * 1.2, own / 1.2)), target)


def odds_ratio(logits: Tensor, target: Tensor) -> Tensor:
    """ORPO: the first half of the sequences is chosen."""
    chosen, rejected = _at(_log(logits), target).view(2, 2, -1).mean(-1)
    odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    return -chosen.mean() - 0.1 * F.logsigmoid(odds).mean()


def two_answers(logits: Tensor) -> Tensor:
    return -_wide(logits)[:, [11, 42]].log_softmax(-1)[:, 0].mean()


def two_answers_of_all(logits: Tensor) -> Tensor:
    log_p = _log(logits)
    return -F.logsigmoid(log_p[:, 11] - log_p[:, 42]).mean()


def expected_number(logits: Tensor, advantages: Tensor) -> Tensor:
    numbers = torch.linspace(-1, 1, logits.shape[-1], device=logits.device)
    expected = (_soft(logits) * numbers).sum(-1)
    return F.smooth_l1_loss(expected, advantages.to(expected.dtype))


def mutual_information(logits: Tensor) -> Tensor:
    """The mean distribution of the batch; every row needs its gradient."""
    p = _soft(logits)
    mean = p.mean(0)
    return (mean * (mean + 1e-8).log()).sum() - (p * (p + 1e-8).log()).sum(-1).mean()


def columns_in_the_middle(logits: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """[B, V, T], as `F.cross_entropy` takes sequences."""
    x = _wide(logits).unflatten(0, (4, -1)).transpose(1, 2)
    loss = F.cross_entropy(x, target.view(4, -1), reduction="none")
    return _mean(loss + 0.1 * x.softmax(1).square().sum(1), keep.view(4, -1))


# ---- diffusion ----------------------------------------------------------------------------------------------------


def masked_diffusion(logits: Tensor, target: Tensor, keep: Tensor) -> Tensor:
    """MDLM: no mass on the mask token, the last column; unmasked positions keep their token."""
    x = _wide(logits).clone()
    x[:, -1] = x[:, -1] - 1e6
    x = x - x.logsumexp(-1, keepdim=True)
    copied = torch.full_like(x, -1e6).scatter(-1, target[:, None], 0.0)
    return -_at(torch.where(keep[:, None], x, copied), target).mean()


def uniform_noise(logits: Tensor, target: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    """UDLM: `other` is the noisy token."""
    vocab, alpha = logits.shape[-1], torch.sigmoid(temperature)[:, None]
    of_model = vocab * alpha * _soft(logits) + 1 - alpha
    wanted = vocab * alpha * _hot(target, logits) + 1 - alpha
    own_model, own = _at(of_model, other)[:, None], _at(wanted, other)[:, None]
    ratio = wanted / own
    terms = ratio * ((of_model / own_model).log() - ratio.log())
    return ((vocab / own - vocab / own_model)[:, 0] - terms.sum(-1) / vocab).mean()


def score_entropy(logits: Tensor, other: Tensor, temperature: Tensor) -> Tensor:
    """SEDD: ratios of the noisy token to all others."""
    x, share = _wide(logits), 1 - torch.sigmoid(temperature)
    score = x - x.logsumexp(-1, keepdim=True) + math.log(x.shape[-1])
    score = score.scatter(-1, other[:, None], 0.0)
    gained = score.exp().mean(-1) - 1 / x.shape[-1]
    return (gained - score.mean(-1) * share + share * (share.log() - 1)).mean()


def posterior(logits: Tensor, target: Tensor, other: Tensor) -> Tensor:
    """D3PM: KL of the posteriors of the token and of the model's distribution."""
    vocab = logits.shape[-1]
    step = (0.9 * _hot(other, logits) + 0.1 / vocab + 1e-6).log()
    q = F.log_softmax(step + (0.8 * _hot(target, logits) + 0.2 / vocab + 1e-6).log(), -1)
    p = F.log_softmax(step + (0.8 * _soft(logits) + 0.2 / vocab + 1e-6).log(), -1)
    return (q.exp() * (q - p)).sum(-1).mean()


# ---- heads --------------------------------------------------------------------------------------------------------


def lora_and_bias(
    hidden: Tensor, weight: Tensor, bias: Tensor, lora_a: Tensor, lora_b: Tensor, target: Tensor
) -> Tensor:
    frozen = F.linear(hidden, weight.detach(), bias.detach())
    log_p = _log(frozen + 2.0 * F.linear(F.linear(hidden, lora_a), lora_b))
    return -_at(log_p, target).mean() + 0.01 * (log_p.exp() * log_p).sum(-1).mean()


def dequantised(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    scale = weight.detach().abs().amax(-1, keepdim=True) / 127
    logits = hidden @ ((weight.detach() / scale).round() * scale).t()
    return F.cross_entropy(_wide(logits), target) + 0.1 * (_soft(logits) ** 2).sum(-1).mean()


def angular_margin(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """ArcFace over a vocabulary."""
    cosine = F.linear(F.normalize(_wide(hidden)), F.normalize(_wide(weight)))
    cosine = cosine.clamp(-1 + 1e-6, 1 - 1e-6)
    wider = torch.cos(torch.acos(cosine) + 0.3)
    return F.cross_entropy(20 * torch.where(_hot(target, cosine).bool(), wider, cosine), target)


def r_drop_by_kl_div(hidden: Tensor, hidden_2: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    a, b = hidden @ weight.t(), hidden_2 @ weight.t()
    loss = F.cross_entropy(_wide(a), target) + F.cross_entropy(_wide(b), target)
    to_b = F.kl_div(_log(a), _soft(b), reduction="none").sum(-1)
    to_a = F.kl_div(_log(b), _soft(a), reduction="none").sum(-1)
    return 0.5 * loss + 0.5 * (to_a + to_b).mean()


def r_drop_joined(hidden: Tensor, hidden_2: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """One matmul of both passes; the loss combines its halves."""
    logits = torch.cat([hidden, hidden_2]) @ weight.t()
    a, b = logits.chunk(2)
    apart = ((_soft(a) - _soft(b)) * (_log(a) - _log(b))).sum(-1)
    return F.cross_entropy(_wide(logits), torch.cat([target, target])) + 0.5 * apart.mean()


def r_drop_cut_afterwards(
    hidden: Tensor, hidden_2: Tensor, weight: Tensor, target: Tensor
) -> Tensor:
    """Sequences of both passes in one batch, a smoothed loss of all; log-probs and probabilities are cut."""
    logits = torch.cat([hidden, hidden_2]).unflatten(0, (8, -1)) @ weight.t()
    log_p, p = _log(logits), _soft(logits)
    (log_a, log_b), (a, b) = log_p.split(4), p.split(4)
    apart = F.kl_div(log_a, b, reduction="none") + F.kl_div(log_b, a, reduction="none")
    both = torch.cat([target, target]).view(8, -1)
    smoothed = -_at(log_p, both) - 0.1 * log_p.mean(-1)
    return smoothed.mean() + 0.5 * apart.sum() / target.numel()


def draft_within_vocabulary(
    hidden: Tensor, hidden_2: Tensor, weight: Tensor, weight_2: Tensor, draft: Tensor, keep: Tensor
) -> Tensor:
    """EAGLE 3: rows with the target model's best token in the draft vocabulary; and the draft's accuracy."""
    scores = (hidden_2 @ weight_2.t()).detach()
    inside = torch.zeros_like(scores[0], dtype=torch.bool).index_fill(0, draft, True)
    q, logits = _soft(scores[:, draft]), hidden @ weight[draft].t()
    kept = inside[scores.argmax(-1)] & keep
    right = ((logits.argmax(-1) == q.argmax(-1)) & kept).sum() / kept.sum().clamp(min=1)
    return -(kept[:, None] * (q * _log(logits))).sum(-1).mean() + 0.0 * right


def shifted_squares(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = (hidden.unflatten(0, (4, -1)) @ weight.t())[..., :-1, :].contiguous()
    following, log_p = target.view(4, -1)[:, 1:], _log(logits)
    right = (logits.argmax(-1) == following).float().mean()
    return -_at(log_p, following).mean() + 0.1 * (log_p.exp() ** 2).sum(-1).mean() + 0.0 * right


def following_in_the_middle(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """[B, V, T] without the last position, and the numbers of each sequence."""
    logits = (hidden.unflatten(0, (4, -1)) @ weight.t())[:, :-1].transpose(1, 2)
    loss = F.cross_entropy(_wide(logits), target.view(4, -1)[:, 1:], reduction="none")
    return F.softplus(loss.sum(-1) / 100).mean()


def contrast_of_layers(hidden: Tensor, hidden_2: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """DoLa: two layers under one head, among the likely columns of the last one."""
    last, early = _log(hidden @ weight.t()), _log(hidden_2 @ weight.t())
    unlikely = last < last.amax(-1, keepdim=True) + math.log(0.1)
    unlikely = unlikely.scatter(-1, target[:, None], False)
    return F.cross_entropy(torch.where(unlikely, -1e3, last - early), target)


def mixture_of_softmaxes(
    hidden: Tensor, hidden_2: Tensor, weight: Tensor, advantages: Tensor, target: Tensor
) -> Tensor:
    share = torch.sigmoid(advantages)[:, None]
    p = share * _soft(hidden @ weight.t()) + (1 - share) * _soft(hidden_2 @ weight.t())
    return -(_at(p, target) + 1e-8).log().mean()


def _losses() -> dict[str, Loss]:
    found = [each for each in globals().values() if inspect.isfunction(each)]
    return {f.__name__: f for f in found if f.__module__ == __name__ and f.__name__[0] != "_"}


LOSSES: dict[str, Loss] = {
    name: loss
    for name, loss in _losses().items()
    if "hidden" not in inspect.signature(loss).parameters
}
HEADS: dict[str, Loss] = {name: loss for name, loss in _losses().items() if name not in LOSSES}
