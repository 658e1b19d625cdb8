"""Losses beyond row statistics of one tensor: the fused part must not cost more than it saves.

Entry point: `PROGRAMS`: a name -> a loss; the names of its parameters select its inputs (`inputs_of`).
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Program = Callable[..., Tensor | tuple[Tensor, ...]]


def inputs_of(program: Program, rows: int, vocab: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """`logits` and `teacher` `[rows, vocab]`, `target` `[rows]`, `keep` bool `[rows]`, `rows` the numbers of those to
    keep, `allowed` bool `[rows, vocab]` (half of all columns and each row's target), `columns` bool `[vocab]` (the
    first nine tenths).
    """
    drawn = torch.Generator().manual_seed(0)
    keep = torch.rand([rows], generator=torch.Generator().manual_seed(1)) < 0.8
    target = torch.randint(0, vocab // 2, [rows], generator=drawn)
    allowed = torch.rand([rows, vocab], generator=drawn) < 0.5
    made = {
        "logits": 3 * torch.randn([rows, vocab], generator=drawn).to(dtype),
        "teacher": 3 * torch.randn([rows, vocab], generator=drawn).to(dtype),
        "target": target,
        "keep": keep,
        "rows": keep.nonzero().squeeze(1),
        "allowed": allowed.scatter_(1, target[:, None], True),
        "columns": torch.arange(vocab) < int(0.9 * vocab),
    }
    return {name: made[name] for name in inspect.signature(program).parameters}


# -- two tensors --------------------------------------------------------------------------------------


def kl_distillation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Of `F.kl_div`, as LLaMA-Factory has it."""
    return F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1).mean()


def forward_kl(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """Cross entropy with the teacher's distribution over finite logits, as in torchtune."""
    probs = F.softmax(teacher, -1, dtype=torch.float32)
    log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    per_row = (probs * log_probs).masked_fill(logits.isinf(), 0).sum(-1)
    return -(per_row * keep).sum() / keep.sum()


def reverse_kl(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """The student's distribution on both log-probs, as torchtune has it."""
    probs = F.softmax(logits, -1, dtype=torch.float32)
    log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    of_teacher = F.log_softmax(teacher, -1, dtype=torch.float32)
    dead = logits.isinf()
    gained = (probs * of_teacher).masked_fill(dead, 0) - (probs * log_probs).masked_fill(dead, 0)
    return -(gained.sum(-1) * keep).sum() / keep.sum()


def _jensen_shannon(logits: Tensor, teacher: Tensor) -> Tensor:
    """`[rows, vocab]`: generalised, from the logarithm of a mixture, as TRL's GKD has it."""
    p, q = logits.log_softmax(-1), teacher.log_softmax(-1)
    weights = torch.tensor([0.5, 0.5], device=logits.device).log()
    mixture = torch.logsumexp(torch.stack([p + weights[0], q + weights[1]]), 0)
    to_p = F.kl_div(mixture, p, reduction="none", log_target=True)
    to_q = F.kl_div(mixture, q, reduction="none", log_target=True)
    return 0.5 * to_p + 0.5 * to_q


def jensen_shannon(logits: Tensor, teacher: Tensor) -> Tensor:
    return _jensen_shannon(logits, teacher).sum(-1).mean()


def jensen_shannon_of_rows(logits: Tensor, teacher: Tensor, rows: Tensor) -> Tensor:
    """Of picked rows: TRL drops the padding after all is computed, by a mask."""
    return _jensen_shannon(logits, teacher)[rows].sum() / len(rows)


def jensen_shannon_of_a_sample(logits: Tensor, teacher: Tensor, rows: Tensor) -> Tensor:
    """A batch of one, divided by a temperature of 1, as in TRL."""
    of_rows = _jensen_shannon(logits[None] / 1.0, teacher[None] / 1.0)
    return of_rows[:, rows].sum() / len(rows)


def jensen_shannon_of_probabilities(logits: Tensor, teacher: Tensor) -> Tensor:
    """The mixture from probabilities; each divergence computes them again, as in Liger."""
    p, q = logits.log_softmax(-1), teacher.log_softmax(-1)
    mixture = torch.lerp(p.exp(), q.exp(), 0.5).log()
    to_p = F.kl_div(mixture, p, reduction="sum", log_target=True)
    to_q = F.kl_div(mixture, q, reduction="sum", log_target=True)
    return (0.5 * to_p + 0.5 * to_q) / len(logits)


def entropies_apart(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """Cross entropy and entropy by functions of their own, each with a softmax of its own, as MiniLLM has it."""
    dead = logits.isinf()

    def expected(of: Tensor) -> Tensor:
        probs = F.softmax(logits, -1, dtype=torch.float32)
        log_probs = F.log_softmax(of, -1, dtype=torch.float32)
        return -(probs * log_probs.masked_fill(dead, 0)).sum(-1)

    return ((expected(teacher) - expected(logits)) * keep).sum() / keep.sum()


def interpolated_teacher(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    """A teacher between the student as it is and the teacher's logits, as TAID has it."""
    probs = F.softmax(0.6 * logits.detach() + 0.4 * teacher, -1, dtype=torch.float32)
    log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    per_row = (probs * log_probs).masked_fill(logits.isinf(), 0).sum(-1)
    return -(per_row * keep).sum() / keep.sum()


def _without_last(logits: Tensor) -> Tensor:
    """Rows as four sequences, `[4, rows / 4 - 1, vocab]`: the last of each predicts no token."""
    return logits.unflatten(0, (4, -1))[:, :-1]


def kl_of_shifted_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    return kl_distillation(_without_last(logits), _without_last(teacher))


def reverse_kl_of_shifted_rows(logits: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    kept = keep.unflatten(0, (4, -1))[:, 1:]
    return reverse_kl(_without_last(logits), _without_last(teacher), kept)


def jensen_shannon_of_shifted_rows(logits: Tensor, teacher: Tensor) -> Tensor:
    return jensen_shannon(_without_last(logits), _without_last(teacher))


def loss_and_kl_of_shifted_rows(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, and the teacher's KL at a temperature, as fine-tuning with a teacher has it."""
    student, of_teacher = (_without_last(each).contiguous() for each in (logits, teacher))
    following = target.unflatten(0, (4, -1))[:, 1:].flatten()
    log_probs, probs = (student / 2).log_softmax(-1), (of_teacher / 2).softmax(-1)
    kl = 4 * F.kl_div(log_probs, probs, reduction="batchmean")
    return 0.5 * F.cross_entropy(student.flatten(0, 1), following) + 0.5 * kl


class _SoftCrossEntropyKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor) -> Tensor:
        target, log_probs = teacher.softmax(-1), logits.log_softmax(-1)
        loss = -torch.einsum("...v,...v->...", target, log_probs)
        ctx.save_for_backward(log_probs.exp_(), target)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        probs, target = ctx.saved_tensors
        return (probs - target) * grad.unsqueeze(-1), None


def soft_cross_entropy_kept(logits: Tensor, teacher: Tensor) -> Tensor:
    """With its own backward keeping both softmaxes, as in SkyRL and NeMo-RL over vocabulary shards."""
    return _SoftCrossEntropyKept.apply(logits, teacher).mean()  # type: ignore[no-any-return]


def loss_and_reference_kl(logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """A policy's log-prob, and the whole KL to a reference."""
    log_probs, of_reference = logits.log_softmax(-1), teacher.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - of_reference)).sum(-1)
    return (0.1 * kl - log_probs.gather(-1, target[:, None])[:, 0]).mean()


# -- masks --------------------------------------------------------------------------------------------


def masked_loss(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    """Log-probs among each row's allowed columns (action masks)."""
    masked = logits.masked_fill(~allowed, -math.inf)
    return -masked.log_softmax(-1).gather(-1, target[:, None]).mean()


def padded_vocabulary(logits: Tensor, columns: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with padding in the last columns."""
    return F.cross_entropy(logits.masked_fill(~columns, -math.inf), target)


def masked_softmax_returned(logits: Tensor, allowed: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The loss and the whole distribution."""
    probs = logits.masked_fill(~allowed, -math.inf).softmax(-1)
    return -(probs.gather(-1, target[:, None]) + 1e-6).log().mean(), probs.detach()


def scaled_logits_returned(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The loss and its logits; the caller does not differentiate the logits."""
    scaled = logits / 0.7
    return F.cross_entropy(scaled, target), scaled


def top_p_log_probs(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    """Log-prob within the kept columns and entropy over all, as slime's top-p replay has it."""
    kept = logits.masked_fill(~allowed, -math.inf)
    log_prob = kept.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    log_p = logits.log_softmax(-1)
    return (-log_prob + 0.01 * (log_p.exp() * log_p).sum(-1)).mean()


def top_k_within(logits: Tensor, target: Tensor) -> Tensor:
    """Log-probs among the 50 largest logits of each row."""
    least = logits.topk(50, -1).values[:, -1:].detach()
    kept = logits.masked_fill(logits < least, -math.inf).log_softmax(-1)
    return -kept.gather(-1, target[:, None]).clamp(min=-20.0).mean()


# -- guards and weights -------------------------------------------------------------------------------


def entropy_of_clamped(logits: Tensor) -> Tensor:
    """Of probabilities from below, as palm-rlhf has it."""
    probs = logits.softmax(-1)
    return -(probs * probs.clamp(min=1e-20).log()).sum(-1).mean()


def weighted_columns(logits: Tensor, target: Tensor, teacher: Tensor) -> Tensor:
    """A cross entropy and an expected value of another tensor under the policy."""
    probs = logits.softmax(-1)
    return F.cross_entropy(logits, target) - (probs * teacher).sum(-1).mean()


def poly_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy plus one minus the target's probability (Open-Assistant)."""
    probability = logits.softmax(-1).gather(-1, target[:, None])[:, 0]
    return (F.cross_entropy(logits, target, reduction="none") + (1 - probability)).mean()


def focal_on_all(logits: Tensor, target: Tensor) -> Tensor:
    """A focal loss over all columns: powers of probabilities are in no row statistic."""
    log_p = logits.log_softmax(-1)
    focal = (1 - log_p.exp()) ** 2 * log_p
    return -focal.gather(-1, target[:, None]).mean() - 0.01 * focal.mean()


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        kl_distillation,
        forward_kl,
        reverse_kl,
        jensen_shannon,
        jensen_shannon_of_rows,
        jensen_shannon_of_a_sample,
        jensen_shannon_of_probabilities,
        entropies_apart,
        interpolated_teacher,
        kl_of_shifted_rows,
        reverse_kl_of_shifted_rows,
        jensen_shannon_of_shifted_rows,
        loss_and_kl_of_shifted_rows,
        soft_cross_entropy_kept,
        loss_and_reference_kl,
        masked_loss,
        padded_vocabulary,
        masked_softmax_returned,
        scaled_logits_returned,
        top_p_log_probs,
        top_k_within,
        entropy_of_clamped,
        weighted_columns,
        poly_loss,
        focal_on_all,
    )
}
