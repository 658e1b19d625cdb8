"""Divergence of a student from a teacher, per token, for eager callers: neither model's logits are whole.

Entry point: `linear_divergence`. The formulas are plain torch below; `torch.compile` with our backend runs them over
chunks of rows (the pass `rows`). Backward makes both models' chunks again. Vocabulary shards are not
handled: write the loss with its all-reduces in a compiled function (docs/tensor_parallelism.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_compile.ops.checks import check_memory
from slime_compile.ops.reference import compute_dtype
from slime_compile.rl.linear_log_probs import as_autocast, check_head
from slime_compile.rl.row_statistics import check_temperature, scale_of

__all__ = ["linear_divergence"]

Kind: TypeAlias = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    kind: Kind = "forward_kl",
    *,
    temperature: float | Tensor = 1.0,
    beta: float = 0.5,
    skew: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Divergence of two models' next-token distributions, per token, with one chunk of each model's logits at a time.

    With p = softmax(student_hidden @ student_weight.t() / temperature) and q, the same of the teacher:

        forward_kl      KL(q || skew * q + (1 - skew) * p)
        reverse_kl      KL(p || skew * p + (1 - skew) * q)
        jensen_shannon  beta * KL(q || m) + (1 - beta) * KL(p || m)
                        with m = beta * q + (1 - beta) * p

    Reverse KL is the loss of MiniLLM (arXiv 2306.08543), the generalised Jensen-Shannon divergence that of GKD
    (2306.13649), the skewed ones those of DistiLLM (2402.03898). No factor temperature**2 is applied.

    The teacher gets no gradient. The models may differ in hidden size and dtype; under autocast each is cast like in
    `F.linear`. If one vocabulary is padded, the first min(V_student, V_teacher) columns count: the rest have
    probability 0, and their rows of the student's weight a gradient of 0.

    The first call compiles; a vocabulary below 1024 columns stays in one piece. Inside a compiled function the call
    becomes part of that function's graph.

    Args:
        student_hidden: [..., D_student], any floating dtype.
        student_weight: [V_student, D_student] of student_hidden's dtype.
        teacher_hidden: [..., D_teacher], any floating dtype, the same rows.
        teacher_weight: [V_teacher, D_teacher] of teacher_hidden's dtype.
        kind: "forward_kl", "reverse_kl" or "jensen_shannon".
        temperature: a positive number, or a tensor broadcastable to the rows. No gradient is computed for it.
        beta: the teacher's part of the Jensen-Shannon mixture, between 0 and 1; the KLs ignore it.
        skew: the part of a KL's first distribution in its second one, at least 0 and below 1.
        weights: [...], a number or bool per row, multiplied with the result; no gradient is computed for it. Rows with
            0 give 0 and no gradient, even with NaN in their hidden states.

    Returns:
        [...] float32 (float64 if either model is float64). The gradients of student_hidden and student_weight have
        their dtypes.

    Raises:
        ValueError: an unsupported kind, shape, dtype, device, temperature, beta or skew (see above).
        RuntimeError: a tensor has no memory (a parameter resharded by FSDP).

    Examples:
        >>> per_token = slime_compile.linear_divergence(
        ...     hidden, lm_head.weight, teacher_hidden, teacher.lm_head.weight,
        ...     "reverse_kl", weights=response_mask,
        ... )
        >>> loss = per_token.sum() / response_mask.sum()
    """
    _check_device(student_hidden.device, teacher_hidden.device)
    student = as_autocast(student_hidden, student_weight)
    teacher = [each.detach() for each in as_autocast(teacher_hidden, teacher_weight)]
    _check_models(student, teacher, weights)
    _check_formula(kind, beta, skew)
    shape = student_hidden.shape[:-1]
    check_temperature(temperature, shape)
    vocab = min(student[1].shape[0], teacher[1].shape[0])
    rows = [_rows_of(model[0], weights) for model in (student, teacher)]
    heads = [_first_rows(model[1], vocab) for model in (student, teacher)]
    dtype = torch.promote_types(*(compute_dtype(model[0].dtype) for model in (student, teacher)))
    scale = scale_of(temperature, student_hidden[..., 0].detach(), dtype).reshape(-1, 1)
    part = beta if kind == "jensen_shannon" else skew
    mixed = scale.new_full((1,), part) if part else None
    formula = _FORMULAS[kind] if torch.compiler.is_compiling() else _compiled(kind)
    made: Tensor = formula(rows[0], heads[0], rows[1], heads[1], scale.contiguous(), mixed)
    made = made.view(shape)
    return made if weights is None else torch.where(weights != 0, made * weights.detach(), 0)


def _rows_of(hidden: Tensor, weights: Tensor | None) -> Tensor:
    """[N, D], zero in rows that do not count."""
    if weights is not None:
        hidden = hidden.masked_fill((weights == 0).unsqueeze(-1), 0)
    return hidden.reshape(-1, hidden.shape[-1])


def _first_rows(weight: Tensor, vocab: int) -> Tensor:
    return weight if weight.shape[0] == vocab else weight[:vocab]


# ---- what must hold -----------------------------------------------------------------------------------------------


def _check_device(student: torch.device, teacher: torch.device) -> None:
    if student != teacher:
        raise ValueError(
            f"`teacher_hidden` must be on the device of `student_hidden`, {student}, got {teacher}"
        )


def _check_models(student: list[Tensor], teacher: list[Tensor], weights: Tensor | None) -> None:
    for name, (hidden, weight) in (("student_", student), ("teacher_", teacher)):
        check_head(hidden, weight, None, name)
        if not torch.compiler.is_compiling():
            check_memory(**{f"{name}hidden": hidden, f"{name}weight": weight})
    rows = list(student[0].shape[:-1])
    given = list(teacher[0].shape)
    if given[:-1] != rows:
        wanted = ", ".join(map(str, [*rows, "D"]))
        raise ValueError(f"`teacher_hidden` must have shape [{wanted}], got {given}")
    if weights is not None and list(weights.shape) != rows:
        raise ValueError(f"`weights` must have shape {rows}, got {list(weights.shape)}")


def _check_formula(kind: str, beta: float, skew: float) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"`kind` must be one of {list(get_args(Kind))}, got {kind!r}")
    if kind == "jensen_shannon" and not 0 < beta < 1:
        raise ValueError(
            f"`beta` must lie between 0 and 1, got {beta}; use kind='forward_kl' or kind='reverse_kl'"
        )
    if not 0 <= skew < 1:
        raise ValueError(f"`skew` must be at least 0 and below 1, got {skew}")
    if kind == "jensen_shannon" and skew:
        raise ValueError(f"`skew` must be 0 for kind='jensen_shannon', got {skew}")


# ---- formulas -----------------------------------------------------------------------------------------------------


@functools.cache
def _compiled(kind: Kind) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(_FORMULAS[kind], backend="slime_fused", fullgraph=True)
    return made


def _log_softmax(hidden: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (F.linear(hidden, weight).to(scale.dtype) * scale).log_softmax(-1)


def _mixture(first: Tensor, second: Tensor, part: Tensor) -> Tensor:
    """log(part * first + (1 - part) * second), of log-probs."""
    return torch.logaddexp(first + part.log(), second + torch.log1p(-part))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Of log-probs."""
    return (first.exp() * (first - second)).sum(-1)


def _forward_kl(
    student_hidden: Tensor,  # [N, D_student]
    student_weight: Tensor,  # [V, D_student]
    teacher_hidden: Tensor,  # [N, D_teacher]
    teacher_weight: Tensor,  # [V, D_teacher]
    scale: Tensor,  # [N, 1] compute dtype
    skew: Tensor | None,  # [1]
) -> Tensor:
    student = _log_softmax(student_hidden, student_weight, scale)
    teacher = _log_softmax(teacher_hidden, teacher_weight, scale)
    return _kl(teacher, student if skew is None else _mixture(teacher, student, skew))


def _reverse_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    scale: Tensor,
    skew: Tensor | None,
) -> Tensor:
    return _forward_kl(teacher_hidden, teacher_weight, student_hidden, student_weight, scale, skew)


def _jensen_shannon(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    scale: Tensor,
    beta: Tensor,
) -> Tensor:
    student = _log_softmax(student_hidden, student_weight, scale)
    teacher = _log_softmax(teacher_hidden, teacher_weight, scale)
    mixture = _mixture(teacher, student, beta)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


_FORMULAS: dict[Kind, Callable[..., Tensor]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jensen_shannon": _jensen_shannon,
}
