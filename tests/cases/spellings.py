"""How people write log-probabilities, entropies and the losses around them: one function per spelling.

A row is a function with `@spelling(...)`: its parameters name its inputs (`harness.py` makes them), it returns a
tuple of tensors. Its classes say what it stands for in public code; the functions are ours.

Entry point: `SPELLINGS`. `fused` is the number of `row_stats` and `row_grad` calls the joint graph must hold in
training, None where a refusal is as good. Longer than a file should be: it is a table, read one row at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

NV = "[N,V]"
BSV = "[B,S,V]"
PAD = 0  # what a dummy label is overwritten with
IGNORE = -100
TEMPERATURE = 0.7

Outputs = tuple[Tensor, ...]

# Classes that have to be fused with no full-vocabulary value left; every other class may be refused.
MUST_FUSE = frozenset(
    [
        "log_softmax",
        "indexed",
        "take_along_dim",
        "nll_loss",
        "cross_entropy",
        "class axis one",
        "reduced cross_entropy",
        "logsumexp",
        "logsumexp per row",
        "logsumexp buffer",
        "row loop",
        "result buffer",
        "chunks",
        "Categorical",
        "soft targets",
        "entropy by expectation",
        "entropy of log-probs",
        "softmax times log_softmax",
        "entropy in chunks",
        "statistics by hand",
        "checkpoint",
        "whole loss",
        "sharded cross entropy",
        "sharded log-prob and entropy",
    ]
)


@dataclass(frozen=True)
class Spelling:
    """One way of writing a loss.

    Attributes:
        name: the function's name, which is also the test's id.
        classes: what it is a spelling of, in words that rows share.
        fn: the loss; returns its outputs, per token or reduced.
        shape: of the logits, "[N,V]" or "[B,S,V]".
        fused: expected row_stats + row_grad in the joint graph in training; None: fused or refused.
        inputs: names of the inputs, from the function's signature.
        mutates: writes over the caller's logits, which are therefore handed over as a non-leaf.
        collectives: reduces over the process group.
        dtypes: of the logits.
        data: of the harness, that it is judged on.
        notes: what is special.
    """

    name: str
    classes: tuple[str, ...]
    fn: Callable[..., Outputs]
    shape: str
    fused: int | None
    inputs: tuple[str, ...]
    mutates: bool = False
    collectives: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    data: tuple[str, ...] = ("plain", "hard")
    notes: str = ""

    def __str__(self) -> str:
        return self.name


SPELLINGS: list[Spelling] = []


def spelling(
    *classes: str,
    shape: str = NV,
    fused: int | None = 2,
    mutates: bool = False,
    collectives: bool = False,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    data: tuple[str, ...] = ("plain", "hard"),
    notes: str = "",
) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
    """Enter the decorated function into the table."""

    def enter(fn: Callable[..., Outputs]) -> Callable[..., Outputs]:
        SPELLINGS.append(
            Spelling(
                name=fn.__name__,
                classes=classes,
                fn=fn,
                shape=shape,
                fused=fused,
                inputs=tuple(inspect.signature(fn).parameters),
                mutates=mutates,
                collectives=collectives,
                dtypes=dtypes,
                data=data,
                notes=notes,
            )
        )
        return fn

    return enter


def pick(values: Tensor, target: Tensor) -> Tensor:
    """`values` at one column per row."""
    return values.gather(-1, target.unsqueeze(-1)).squeeze(-1)


# ---------------------------------------------------------------- log_softmax, gather


@spelling("log_softmax")
def log_softmax_gather(logits: Tensor, target: Tensor) -> Outputs:
    return (torch.gather(F.log_softmax(logits, dim=-1), -1, target[:, None]).squeeze(-1),)


@spelling("log_softmax", shape=BSV)
def log_softmax_gather_upcast(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(logits.float().log_softmax(-1), target),)


@spelling("log_softmax")
def log_softmax_gather_cast_after(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(logits.log_softmax(dim=-1).float(), target),)


@spelling("log_softmax")
def log_softmax_gather_result_cast(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(logits.log_softmax(dim=-1), target).float(),)


@spelling("log_softmax")
def log_softmax_dtype_argument(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(F.log_softmax(logits, dim=-1, dtype=torch.float32), target),)


@spelling("log_softmax", shape=BSV)
def shifted_before(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(F.log_softmax(logits[:, :-1], dim=-1), target[:, 1:]),)


@spelling("log_softmax", shape=BSV)
def shifted_after(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(torch.log_softmax(logits, dim=2)[..., :-1, :], target[:, 1:]),)


@spelling("log_softmax", shape=BSV)
def shifted_after_pick(logits: Tensor, target: Tensor) -> Outputs:
    return (pick(torch.log_softmax(logits, dim=2), torch.roll(target, -1, dims=1))[:, :-1],)


@spelling("log_softmax", shape=BSV)
def preference_sequence_log_probs(logits: Tensor, ignored_target: Tensor) -> Outputs:
    labels = ignored_target[:, 1:].clone()
    scored = labels != IGNORE
    labels[~scored] = PAD
    per_token = pick(logits[:, :-1, :].log_softmax(-1), labels)
    return (per_token * scored).sum(-1), (per_token * scored).sum(-1) / scored.sum(-1)


@spelling("log_softmax", shape=BSV)
def labels_times_mask(logits: Tensor, target: Tensor, mask: Tensor) -> Outputs:
    keep = mask[:, 1:]
    index = (keep * target[:, 1:]).unsqueeze(2)
    per_token = torch.gather(logits[:, :-1, :].log_softmax(-1), 2, index).squeeze(2)
    total = torch.mul(per_token, keep.to(torch.bfloat16)).sum(dim=1).to(torch.float64)
    return ((total / keep.sum(1)).to(logits.dtype),)


@spelling("log_softmax")
def clamped_dummy_labels(logits: Tensor, ignored_target: Tensor) -> Outputs:
    valid = ignored_target >= 0
    per_token = pick(F.log_softmax(logits.float(), -1), ignored_target.clamp(min=0))
    return (torch.where(valid, per_token, 0.0),)


@spelling("log_softmax", shape=BSV)
def temperature_number_then_shift(logits: Tensor, target: Tensor, mask: Tensor) -> Outputs:
    scaled = logits / TEMPERATURE
    per_token = pick(scaled[..., :-1, :].log_softmax(-1), target[..., 1:])
    return (per_token * mask[..., 1:],)


@spelling("log_softmax", shape=BSV)
def temperature_per_batch(logits: Tensor, target: Tensor, batch_temperature: Tensor) -> Outputs:
    return (pick((logits.float() / batch_temperature).log_softmax(-1), target),)


@spelling("log_softmax")
def temperature_per_token(logits: Tensor, target: Tensor, row_temperature: Tensor) -> Outputs:
    return (pick((logits / row_temperature[:, None]).float().log_softmax(-1), target),)


@spelling("log_softmax")
def temperature_reciprocal(logits: Tensor, target: Tensor, row_temperature: Tensor) -> Outputs:
    inverse = row_temperature.reciprocal().unsqueeze(-1)
    return (pick(F.log_softmax(logits.float() * inverse, -1), target),)


@spelling("log_softmax", shape=BSV, mutates=True, fused=1)
def temperature_in_place(logits: Tensor, target: Tensor) -> Outputs:
    logits.div_(TEMPERATURE)
    return (pick(logits.log_softmax(-1), target),)


@spelling("log_softmax", shape=BSV, mutates=True, fused=1)
def temperature_in_place_on_slice(logits: Tensor, target: Tensor) -> Outputs:
    view = logits[:, :-1, :]
    view.div_(TEMPERATURE)
    return (pick(view.log_softmax(-1), target[:, 1:]),)


@spelling("log_softmax", shape=BSV)
def clone_divided_in_place(logits: Tensor, target: Tensor) -> Outputs:
    scaled = logits.clone()
    scaled /= TEMPERATURE
    return (pick(scaled.log_softmax(-1), target),)


@spelling("log_softmax")
def autocast_log_softmax(logits: Tensor, target: Tensor) -> Outputs:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (pick(F.log_softmax(logits, dim=-1), target),)


@spelling("log_softmax")
def rows_zeroed_before(logits: Tensor, target: Tensor, mask: Tensor) -> Outputs:
    quiet = logits.masked_fill(~mask.bool().unsqueeze(-1), 0.0)
    return (pick(quiet.log_softmax(-1), target),)


@spelling("log_softmax")
def gathered_then_filtered_rows(logits: Tensor, target: Tensor, mask: Tensor) -> Outputs:
    per_token = pick(logits.log_softmax(-1), target).masked_fill(mask == 0, 0.0)
    return per_token.sum() / mask.sum(), per_token


@spelling("log_softmax", "entropy of log-probs", shape=BSV)
def left_padded_rows_to_response(logits: Tensor, target: Tensor) -> Outputs:
    response = 3  # how many last tokens were sampled
    logits = logits[:, -response - 1 : -1]
    log_probs = F.log_softmax(logits, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return pick(log_probs, target[:, -response:]), entropy


@spelling("log_softmax", fused=4, shape=BSV)
def policy_and_trained_reference(logits: Tensor, reference: Tensor, target: Tensor) -> Outputs:
    policy = pick(logits.log_softmax(-1), target)
    base = pick(reference.log_softmax(-1), target)
    return policy, base, (policy - base).sum(-1)


@spelling("log_softmax", fused=3)
def policy_and_frozen_reference(logits: Tensor, reference: Tensor, target: Tensor) -> Outputs:
    policy = pick(logits.log_softmax(-1), target)
    with torch.no_grad():
        base = pick(reference.log_softmax(-1), target)
    gap = base - policy
    return policy, gap.exp() - gap - 1


@spelling("log_softmax", fused=3)
def two_temperatures(logits: Tensor, target: Tensor) -> Outputs:
    raw = pick(logits.log_softmax(-1), target)
    tempered = pick((logits / TEMPERATURE).log_softmax(-1), target)
    return raw, tempered


@spelling("log_softmax", fused=3)
def two_temperatures_per_row(logits: Tensor, target: Tensor, row_temperature: Tensor) -> Outputs:
    raw = F.cross_entropy(logits.float(), target, reduction="none")
    tempered = pick((logits.float() / row_temperature[:, None]).log_softmax(-1), target)
    return raw, tempered


@spelling("log_softmax", notes="second use of the logits")
def log_probs_and_logits_mean(logits: Tensor, target: Tensor) -> Outputs:
    return pick(logits.log_softmax(-1), target), logits.float().mean(-1)


@spelling("log_softmax", fused=None, notes="argmax reads the logits once more")
def log_probs_and_accuracy(logits: Tensor, target: Tensor) -> Outputs:
    hits = (logits.detach().argmax(-1) == target).float()
    return pick(logits.log_softmax(-1), target), hits


@spelling("log_softmax", fused=None, notes="mean over every element, not per row")
def log_probs_and_global_logits_mean(logits: Tensor, target: Tensor) -> Outputs:
    return pick(logits.log_softmax(-1), target), logits.mean()


# ---------------------------------------------------------------- other ways to look up


@spelling("indexed")
def arange_index(logits: Tensor, target: Tensor) -> Outputs:
    rows = torch.arange(target.shape[0], device=logits.device)
    return (torch.log_softmax(logits, dim=-1)[rows, target],)


@spelling("indexed")
def range_index(logits: Tensor, target: Tensor) -> Outputs:
    return (torch.log_softmax(logits, dim=-1)[range(logits.shape[0]), target],)


@spelling("indexed")
def arange_index_shifted(logits: Tensor, target: Tensor) -> Outputs:
    log_probs = torch.log_softmax(logits, dim=-1)
    rows = torch.arange(target.shape[0] - 1)
    return (log_probs[rows, target[1:]],)


@spelling("indexed", shape=BSV)
def arange_index_grid(logits: Tensor, target: Tensor) -> Outputs:
    batch, length = target.shape
    rows = torch.arange(batch)[:, None]
    columns = torch.arange(length)[None, :]
    return (F.log_softmax(logits.float(), -1)[rows, columns, target],)


@spelling("take_along_dim", shape=BSV)
def take_along_dim(logits: Tensor, target: Tensor) -> Outputs:
    answers = logits[:, 1:].log_softmax(-1)
    return (torch.take_along_dim(answers, target[:, 1:].unsqueeze(-1), dim=2).squeeze(-1),)


# ---------------------------------------------------------------- nll_loss, cross_entropy


@spelling("nll_loss", shape=BSV)
def log_softmax_nll(logits: Tensor, target: Tensor) -> Outputs:
    flat = F.log_softmax(logits.flatten(end_dim=-2).float(), dim=-1)
    return (F.nll_loss(flat, target.flatten(end_dim=-1)),)


@spelling("nll_loss")
def log_softmax_nll_per_token(logits: Tensor, ignored_target: Tensor) -> Outputs:
    return (F.nll_loss(logits.log_softmax(1), ignored_target, reduction="none"),)


@spelling("cross_entropy", shape=BSV)
def minus_cross_entropy_flat(logits: Tensor, target: Tensor) -> Outputs:
    flat = logits.contiguous().view(-1, logits.size(-1)).float()
    loss = F.cross_entropy(flat, target.contiguous().view(-1), reduction="none")
    return (-loss.view(target.shape),)


@spelling("cross_entropy")
def minus_cross_entropy_as_given(logits: Tensor, target: Tensor) -> Outputs:
    return (-F.cross_entropy(logits, target, reduction="none"),)


@spelling("cross_entropy", shape=BSV)
def minus_cross_entropy_ignored_shifted(logits: Tensor, ignored_target: Tensor) -> Outputs:
    shifted = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    labels = ignored_target[:, 1:].reshape(-1)
    loss = F.cross_entropy(shifted, labels, reduction="none", ignore_index=IGNORE)
    return (-loss.reshape(logits.shape[0], -1),)


@spelling("cross_entropy", "entropy by expectation", shape=BSV)
def minus_cross_entropy_with_entropy_metric(logits: Tensor, ignored_target: Tensor) -> Outputs:
    wide = logits.float()
    log_probs = -F.cross_entropy(
        wide.flatten(0, 1), ignored_target.flatten(), reduction="none", ignore_index=IGNORE
    ).view_as(ignored_target)
    with torch.no_grad():
        entropy = torch.logsumexp(wide, -1) - (wide.softmax(-1) * wide).sum(-1)
    return log_probs, entropy


@spelling("cross_entropy", shape=BSV)
def dynamic_fine_tuning(logits: Tensor, ignored_target: Tensor) -> Outputs:
    labels = F.pad(ignored_target, (0, 1), value=IGNORE)[:, 1:].flatten()
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="none")
    with torch.no_grad():
        weight = torch.exp(-loss)
    scored = labels != IGNORE
    return ((loss * weight * scored).sum() / scored.sum(), loss)


@spelling("cross_entropy")
def cross_entropy_other_pad(logits: Tensor, target: Tensor) -> Outputs:
    return (F.cross_entropy(logits, target, reduction="none", ignore_index=PAD),)


@spelling("cross_entropy")
def cross_entropy_concatenated_row(logits: Tensor, target: Tensor) -> Outputs:
    zero_row = torch.zeros_like(logits[:1])
    padded = torch.cat([zero_row, logits[:-1]], 0)
    return (-F.cross_entropy(padded, target, reduction="none"),)


@spelling("class axis one", shape=BSV)
def class_axis_one(logits: Tensor, ignored_target: Tensor) -> Outputs:
    swapped = logits.permute(0, 2, 1)
    return (-F.cross_entropy(swapped, ignored_target, reduction="none", ignore_index=IGNORE),)


@spelling("class axis one", shape=BSV)
def class_axis_one_transposed(logits: Tensor, target: Tensor) -> Outputs:
    swapped = logits[:, :-1].float().transpose(1, 2)
    return (F.cross_entropy(input=swapped, target=target[:, 1:], reduction="none"),)


@spelling("reduced cross_entropy", shape=BSV)
def language_model_loss(logits: Tensor, ignored_target: Tensor) -> Outputs:
    shifted = logits[..., :-1, :].contiguous()
    labels = ignored_target[..., 1:].contiguous()
    criterion = torch.nn.CrossEntropyLoss(ignore_index=IGNORE)
    return (criterion(shifted.view(-1, shifted.size(-1)), labels.view(-1)),)


@spelling("reduced cross_entropy")
def cross_entropy_mean(logits: Tensor, target: Tensor) -> Outputs:
    return (F.cross_entropy(logits, target),)


@spelling("reduced cross_entropy")
def cross_entropy_sum(logits: Tensor, ignored_target: Tensor) -> Outputs:
    return (F.cross_entropy(logits.float(), ignored_target, reduction="sum"),)


@spelling("reduced cross_entropy")
def cross_entropy_with_z_loss(logits: Tensor, ignored_target: Tensor) -> Outputs:
    loss = F.cross_entropy(logits.float(), ignored_target, ignore_index=IGNORE)
    scored = ignored_target != IGNORE
    squares = logits.float().logsumexp(-1).pow(2)
    return loss, 1e-2 * (squares * scored).sum() / scored.sum()


@spelling("reduced cross_entropy", fused=3)
def cross_entropy_raw_beside_tempered(logits: Tensor, target: Tensor) -> Outputs:
    tempered = logits.float() / TEMPERATURE
    return F.cross_entropy(tempered, target), F.cross_entropy(logits.float(), target)


@spelling("reduced cross_entropy", fused=None)
def cross_entropy_class_weights(logits: Tensor, target: Tensor, vocab_weight: Tensor) -> Outputs:
    return (F.cross_entropy(logits.float(), target, weight=vocab_weight),)


# ---------------------------------------------------------------- logit minus logsumexp


@spelling("logsumexp", shape=BSV)
def logit_minus_logsumexp(logits: Tensor, target: Tensor) -> Outputs:
    wide = logits.to(torch.float32)
    picked = torch.gather(wide, -1, target.unsqueeze(-1)).squeeze(-1)
    return (picked - torch.logsumexp(wide, dim=-1),)


@spelling("logsumexp", "entropy by expectation")
def logit_minus_logsumexp_keepdim(logits: Tensor, target: Tensor) -> Outputs:
    lse = logits.logsumexp(-1, keepdim=True)
    probs = torch.exp(logits - lse)
    entropy = lse.squeeze(-1) - (probs * logits).sum(-1)
    return (logits.gather(-1, target[:, None]) - lse)[:, 0], entropy


@spelling("logsumexp per row", shape=BSV)
def row_loop_of_logsumexps(logits: Tensor, target: Tensor) -> Outputs:
    picked = torch.gather(logits, dim=-1, index=target.unsqueeze(-1)).squeeze(-1)
    norms = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return (picked - norms,)


@spelling("logsumexp per row")
def row_loop_over_tokens(logits: Tensor, target: Tensor) -> Outputs:
    norms = torch.stack([row.logsumexp(-1) for row in logits])
    return (pick(logits, target) - norms,)


@spelling("logsumexp per row", shape=BSV)
def row_loop_many_columns(logits: Tensor, target: Tensor) -> Outputs:
    columns = torch.stack([target, (target + 3) % logits.shape[-1]], -1)
    picked = logits.gather(-1, columns)
    norms = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return (picked - norms.unsqueeze(-1),)


@spelling("logsumexp per row", shape=BSV)
def row_loop_reinforce(logits: Tensor, target: Tensor, mask: Tensor, advantages: Tensor) -> Outputs:
    logits = logits[:, -4:-1, :] / TEMPERATURE
    tokens = target[:, -3:]
    picked = pick(logits, tokens)
    log_probs = picked - torch.stack([torch.logsumexp(row, -1) for row in logits])
    weight = torch.exp(log_probs - log_probs.detach()).detach().clamp(max=2.0)
    keep = mask[:, -3:]
    loss = -(weight * log_probs * advantages[:, -3:] * keep).sum(1) / keep.sum(1).clamp(min=1)
    return (loss.mean(),)


@spelling("logsumexp buffer", shape=BSV, mutates=True, fused=1)
def logsumexp_buffer_in_place_temperature(logits: Tensor, target: Tensor) -> Outputs:
    logits.div_(TEMPERATURE)
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    norms = torch.zeros_like(picked)
    for first in range(0, logits.shape[0], 2):
        norms[first : first + 2] = torch.logsumexp(logits[first : first + 2], dim=-1)
    return (picked - norms,)


@spelling("logsumexp buffer")
def logsumexp_buffer(logits: Tensor, target: Tensor) -> Outputs:
    wide = logits.float()
    norms = torch.empty(wide.shape[0], dtype=wide.dtype)
    for first in range(0, wide.shape[0], 3):
        norms[first : first + 3] = wide[first : first + 3].logsumexp(-1)
    return (pick(wide, target) - norms,)


# ---------------------------------------------------------------- loops and chunks


@spelling("row loop", shape=BSV)
def row_loop_log_softmax(logits: Tensor, target: Tensor) -> Outputs:
    per_row = []
    for row, tokens in zip(logits, target, strict=True):
        log_probs = F.log_softmax(row, dim=-1)
        per_row.append(log_probs.gather(dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1))
    return (torch.stack(per_row),)


@spelling("row loop", shape=BSV)
def row_loop_shifted(logits: Tensor, target: Tensor) -> Outputs:
    logits, target = logits[:, :-1, :], target[:, 1:]
    per_row = []
    for row, tokens in zip(logits, target, strict=True):
        picked = torch.gather(row.log_softmax(dim=-1), dim=1, index=tokens.unsqueeze(1))
        per_row.append(picked.squeeze(1))
    return (torch.stack(per_row, dim=0),)


@spelling("row loop", "entropy of log-probs", shape=BSV)
def row_loop_indexed(logits: Tensor, target: Tensor) -> Outputs:
    picked, entropies = [], []
    for i in range(logits.shape[0]):
        log_probs = logits[i].float().log_softmax(-1)
        picked.append(pick(log_probs, target[i]))
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.stack(picked), torch.stack(entropies)


@spelling("row loop", shape=BSV)
def ragged_samples(logits: Tensor, target: Tensor) -> Outputs:
    lengths = (2, 4, 3)  # response lengths of the batch's samples
    pieces = []
    for i, length in enumerate(lengths):
        log_probs = logits[i, -length - 1 : -1].log_softmax(-1)
        pieces.append(pick(log_probs, target[i, -length:]))
    return tuple(pieces)


@spelling("row loop")
def packed_samples(logits: Tensor, target: Tensor) -> Outputs:
    pieces, first = [], 0
    for length in (3, 4):  # two samples packed into one row dimension
        log_probs = logits[first : first + length - 1].float().log_softmax(-1)
        pieces.append(pick(log_probs, target[first + 1 : first + length]))
        first += length
    return (torch.cat(pieces),)


@spelling("result buffer", shape=BSV)
def result_buffer(logits: Tensor, target: Tensor) -> Outputs:
    result = torch.empty_like(target, dtype=torch.float32)
    for first in range(0, logits.shape[0], 2):
        part = slice(first, first + 2)
        log_probs = F.log_softmax(logits[part] / TEMPERATURE, dim=-1)
        result[part] = torch.gather(log_probs, 2, target[part].unsqueeze(-1)).squeeze(-1)
    return (result,)


@spelling("result buffer", shape=BSV)
def result_buffer_along_sequence(logits: Tensor, target: Tensor) -> Outputs:
    result = torch.zeros(target.shape, dtype=torch.float32)
    for first in range(0, logits.shape[1], 2):
        part = logits[:, first : first + 2].float()
        result[:, first : first + 2] = pick(part.log_softmax(-1), target[:, first : first + 2])
    return (result,)


@spelling("chunks")
def chunk_and_cat(logits: Tensor, target: Tensor) -> Outputs:
    pieces = [
        pick(part.float().log_softmax(-1), tokens)
        for part, tokens in zip(logits.chunk(3), target.chunk(3), strict=True)
    ]
    return (torch.cat(pieces),)


@spelling("chunks", shape=BSV)
def split_sequence_and_cat(logits: Tensor, target: Tensor) -> Outputs:
    pieces = [
        -F.cross_entropy(part.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
        for part, tokens in zip(logits.split(2, 1), target.split(2, 1), strict=True)
    ]
    return (torch.cat(pieces, dim=1),)


@spelling("chunks", "entropy of log-probs")
def slices_of_one_log_softmax(logits: Tensor, target: Tensor) -> Outputs:
    log_probs = F.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    picked, entropies = [], []
    for first in range(0, logits.shape[0], 3):
        part = log_probs[first : first + 3]
        picked.append(pick(part, target[first : first + 3]))
        entropies.append(-(part.exp() * part).sum(-1))
    return torch.cat(picked), torch.cat(entropies)


@spelling("chunks", "entropy in chunks", shape=BSV)
def microbatches(logits: Tensor, target: Tensor) -> Outputs:
    picked, entropies = [], []
    for part, tokens in zip(logits.split(2), target.split(2), strict=True):
        part = part / TEMPERATURE
        picked.append(pick(part, tokens) - part.logsumexp(-1))
        entropies.append(part.logsumexp(-1) - (part.softmax(-1) * part).sum(-1))
    return torch.cat(picked), torch.cat(entropies)


# ---------------------------------------------------------------- probability space


@spelling("probability space", fused=None)
def log_of_gathered_probability(logits: Tensor, target: Tensor) -> Outputs:
    return (torch.log(pick(logits.softmax(-1), target)),)


@spelling("probability space", fused=None)
def log_of_clamped_probability(logits: Tensor, target: Tensor) -> Outputs:
    probs = logits.softmax(-1)
    safe = probs.clamp(min=1e-4)
    return pick(probs, target).clamp(min=1e-4).log(), -(probs * safe.log()).sum(-1)


@spelling("probability space", fused=None)
def softmax_log(logits: Tensor, target: Tensor) -> Outputs:
    return (F.nll_loss(logits.softmax(-1).log(), target, reduction="none"),)


@spelling("probability space")
def entropy_of_probabilities(logits: Tensor) -> Outputs:
    """The textbook's; its gradient divides a multiple of the softmax by the softmax."""
    probs = logits.softmax(-1)
    return (-(probs * probs.log()).sum(-1),)


@spelling("probability space")
def entropy_where_probable(logits: Tensor) -> Outputs:
    probs = logits.softmax(-1)
    return (-torch.where(probs > 0, probs * probs.log(), 0.0).sum(-1),)


@spelling("probability space")
def entropy_of_safe_logarithms(logits: Tensor, row_temperature: Tensor) -> Outputs:
    probs = (logits / row_temperature[:, None]).softmax(-1)
    logs = torch.where(probs > 0, probs.log(), 0.0)
    return (-(probs * logs).sum(-1),)


@spelling("probability space")
def entropy_without_infinities(logits: Tensor) -> Outputs:
    log_probs = logits.log_softmax(-1)
    summands = (log_probs.exp() * log_probs).masked_fill(log_probs.isinf(), 0.0)
    return (-summands.sum(-1),)


@spelling("probability space")
def probability_and_its_entropy(logits: Tensor, target: Tensor) -> Outputs:
    """Both gradients meet before the softmax's: that of a column and that of a logarithm."""
    probs = logits.softmax(-1)
    return pick(probs, target).log(), -(probs * probs.log()).sum(-1)


# ---------------------------------------------------------------- Categorical


@spelling("Categorical")
def categorical_both(logits: Tensor, target: Tensor) -> Outputs:
    policy = Categorical(logits=logits, validate_args=False)
    return policy.log_prob(target), policy.entropy()


@spelling("Categorical", shape=BSV)
def categorical_entropy_flat(logits: Tensor) -> Outputs:
    flat = Categorical(logits=logits.reshape(-1, logits.shape[-1]), validate_args=False)
    return (flat.entropy().view(logits.shape[:-1]),)


@spelling("Categorical")
def categorical_log_prob(logits: Tensor, target: Tensor) -> Outputs:
    return (Categorical(logits=logits.float(), validate_args=False).log_prob(target),)


# ---------------------------------------------------------------- masked and filtered


@spelling("masked or filtered", fused=None)
def vocabulary_mask(logits: Tensor, target: Tensor, allowed: Tensor) -> Outputs:
    masked = logits.masked_fill(~allowed, float("-inf"))
    return (pick(masked.log_softmax(-1), target),)


@spelling("masked or filtered", fused=None)
def masked_rows_then_cross_entropy(logits: Tensor, target: Tensor, mask: Tensor) -> Outputs:
    labels = target.masked_fill(~mask.bool(), IGNORE)
    flat = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    return (-flat.reshape_as(target),)


@spelling("masked or filtered", fused=None)
def top_k_filter(logits: Tensor) -> Outputs:
    kept = torch.topk(logits.float(), 5, dim=-1).values[..., -1:]
    filtered = logits.float().masked_fill(logits < kept, float("-inf"))
    return (pick(filtered.log_softmax(-1), logits.argmax(-1)),)


@spelling("masked or filtered", fused=None)
def renormalised_masked_policy(logits: Tensor, target: Tensor, allowed: Tensor) -> Outputs:
    probs = Categorical(logits=logits, validate_args=False).probs
    kept = torch.where(allowed, probs, torch.zeros_like(probs))
    policy = Categorical(probs=kept, validate_args=False)
    return (policy.log_prob(target),)


# ---------------------------------------------------------------- soft targets


@spelling("soft targets")
def one_hot_product(logits: Tensor, target: Tensor) -> Outputs:
    one_hot = F.one_hot(target, logits.shape[-1]).to(logits.dtype)
    return ((one_hot * logits.log_softmax(-1)).sum(-1),)


@spelling("soft targets")
def chosen_where_the_column_is(logits: Tensor, target: Tensor) -> Outputs:
    columns = torch.arange(logits.shape[-1]) == target[:, None]
    return (torch.where(columns, logits.log_softmax(-1), 0.0).sum(-1),)


@spelling("soft targets")
def others_filled_with_zero(logits: Tensor, target: Tensor) -> Outputs:
    others = torch.arange(logits.shape[-1]) != target[:, None]
    return (logits.log_softmax(-1).masked_fill(others, 0.0).sum(-1),)


@spelling("soft targets")
def one_hot_as_a_mask(logits: Tensor, target: Tensor) -> Outputs:
    hot = F.one_hot(target, logits.shape[-1])
    chosen = torch.where(hot.bool(), logits.log_softmax(-1), 0.0).sum(-1)
    return chosen, torch.where(hot == 1, logits.softmax(-1), 0.0).sum(-1)


@spelling("soft targets")
def smoothed_by_scatter(logits: Tensor, target: Tensor) -> Outputs:
    smoothing = 0.1
    soft = torch.full_like(logits, smoothing / (logits.shape[-1] - 1))
    soft.scatter_(1, target.unsqueeze(1), 1 - smoothing)
    return (-(logits.log_softmax(1) * soft.detach()).sum() / logits.shape[0],)


@spelling("soft targets")
def smoothed_by_where(logits: Tensor, target: Tensor) -> Outputs:
    vocab = logits.shape[-1]
    at_target = torch.arange(vocab, device=logits.device) == target[:, None]
    soft = torch.where(at_target, 0.9, 0.1 / (vocab - 1))
    return (-(logits.log_softmax(-1) * soft).sum(-1),)


@spelling("soft targets", notes="target * log(target) is known from its two numbers")
def smoothed_kl_div(logits: Tensor, target: Tensor) -> Outputs:
    log_probs = logits.log_softmax(-1)
    with torch.no_grad():
        soft = log_probs.clone().fill_(0.1 / (log_probs.shape[-1] - 1))
        soft.scatter_(1, target.masked_fill(target == PAD, 1).unsqueeze(1), 0.9)
    kl = F.kl_div(log_probs, soft, reduction="none")
    return (kl.masked_fill((target == PAD).unsqueeze(1), 0).sum() / logits.shape[0],)


@spelling("soft targets", shape=BSV)
def smoothed_one_hot_kl_div(logits: Tensor, target: Tensor) -> Outputs:
    hot = F.one_hot(target, logits.shape[-1]) * 0.9 + 0.1 / logits.shape[-1]
    return (F.kl_div(logits.float().log_softmax(-1), hot, reduction="batchmean"),)


@spelling("soft targets", shape=BSV)
def smoothed_by_sum(logits: Tensor, target: Tensor) -> Outputs:
    smoothing = 0.1
    log_probs = logits.float().log_softmax(-1)
    nll = -log_probs.gather(-1, target.unsqueeze(-1))
    smooth = -log_probs.sum(-1, keepdim=True)
    pads = target.unsqueeze(-1).eq(PAD)
    nll = nll.masked_fill(pads, 0.0)
    smooth = smooth.masked_fill(pads, 0.0)
    share = smoothing / (logits.shape[-1] - 1)
    return (1.0 - smoothing - share) * nll.sum() + share * smooth.sum(), nll.sum()


@spelling("soft targets")
def cross_entropy_label_smoothing(logits: Tensor, ignored_target: Tensor) -> Outputs:
    return (F.cross_entropy(logits.float(), ignored_target, label_smoothing=0.1),)


# ---------------------------------------------------------------- entropy in one expression


def entropy_by_expectation(logits: Tensor) -> Tensor:
    probs = torch.nn.functional.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(probs * logits, dim=-1)


@spelling("entropy by expectation")
def entropy_expected_logit(logits: Tensor) -> Outputs:
    return (entropy_by_expectation(logits),)


@spelling("entropy by expectation", "log_softmax", shape=BSV)
def entropy_expected_logit_upcast(logits: Tensor, target: Tensor) -> Outputs:
    wide = logits.float() / TEMPERATURE
    return pick(wide.log_softmax(-1), target), entropy_by_expectation(wide)


@spelling("entropy by expectation", "log_softmax")
def entropy_under_no_grad(logits: Tensor, target: Tensor) -> Outputs:
    with torch.no_grad():
        entropy = entropy_by_expectation(logits)
    return pick(logits.log_softmax(-1), target), entropy


@spelling("entropy by expectation", "logsumexp")
def entropy_of_detached(logits: Tensor, target: Tensor) -> Outputs:
    entropy = entropy_by_expectation(logits.detach().float())
    wide = logits.float()
    return pick(wide, target) - wide.logsumexp(-1), entropy


@spelling("entropy by expectation", fused=1, notes="no gradient anywhere")
def entropy_metric_only(logits: Tensor) -> Outputs:
    with torch.no_grad():
        return (entropy_by_expectation(logits.float()),)


@spelling("entropy by expectation", shape=BSV)
def entropy_shifted_after(logits: Tensor) -> Outputs:
    return (entropy_by_expectation(logits)[:, :-1],)


@spelling(
    "entropy by expectation",
    "log_softmax",
    notes="an entropy bonus switched off by its coefficient",
)
def entropy_coefficient_zero(logits: Tensor, target: Tensor, advantages: Tensor) -> Outputs:
    log_probs = pick(logits.float().log_softmax(-1), target)
    entropy = entropy_by_expectation(logits.float())
    return -(log_probs * advantages).mean() - 0.0 * entropy.mean(), entropy.detach()


@spelling("entropy of log-probs", "log_softmax")
def entropy_of_one_log_softmax(logits: Tensor, target: Tensor) -> Outputs:
    log_probs = torch.nn.functional.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    entropy = -torch.sum(log_probs.exp() * log_probs, dim=-1)
    return pick(log_probs, target), entropy


@spelling("entropy of log-probs")
def entropy_as_given(logits: Tensor) -> Outputs:
    log_probs = logits.log_softmax(-1)
    return (-(torch.exp(log_probs) * log_probs).sum(-1),)


@spelling("entropy of log-probs")
def entropy_cast_back(logits: Tensor) -> Outputs:
    log_probs = logits.float().log_softmax(-1)
    return ((log_probs.exp() * log_probs).sum(-1).neg().to(logits.dtype),)


@spelling("entropy of log-probs")
def entropy_detached_weights(logits: Tensor) -> Outputs:
    log_probs = logits.float().log_softmax(-1)
    return (-(log_probs.exp().detach() * log_probs).sum(-1),)


@spelling("entropy of log-probs", "logsumexp")
def entropy_of_normalised_logits(logits: Tensor, target: Tensor) -> Outputs:
    normed = logits - logits.logsumexp(dim=-1, keepdim=True)
    return pick(normed, target), -(normed.exp() * normed).sum(-1)


@spelling("entropy of log-probs")
def entropy_by_einsum(logits: Tensor) -> Outputs:
    log_probs = logits.float().log_softmax(-1)
    return (-torch.einsum("nv,nv->n", log_probs.exp(), log_probs),)


@spelling("softmax times log_softmax")
def softmax_times_log_softmax(logits: Tensor) -> Outputs:
    return (-(logits.softmax(1) * logits.log_softmax(1)).sum(1),)


@spelling("softmax times log_softmax", shape=BSV)
def softmax_times_log_softmax_mean(logits: Tensor, mask: Tensor) -> Outputs:
    probs = logits.float().softmax(-1)
    entropy = -(probs * logits.float().log_softmax(-1)).sum(-1)
    return ((entropy * mask).sum() / mask.sum(),)


# ---------------------------------------------------------------- entropy in chunks, by hand


@spelling("entropy in chunks", shape=BSV)
def entropy_split_and_cat(logits: Tensor) -> Outputs:
    pieces = []
    for part in logits.reshape(-1, logits.shape[-1]).split(4, dim=0):
        log_probs = F.log_softmax(part, dim=-1)
        pieces.append(-(torch.exp(log_probs) * log_probs).sum(-1))
    return (torch.cat(pieces).reshape(logits.shape[:-1]),)


@spelling("entropy in chunks")
def entropy_buffer(logits: Tensor) -> Outputs:
    entropy = torch.zeros(logits.shape[0])
    for first in range(0, logits.shape[0], 3):
        part = logits[first : first + 3].float()
        probs = part.softmax(-1)
        entropy[first : first + 3] = part.logsumexp(-1) - (probs * part).sum(-1)
    return (entropy,)


@spelling("entropy in chunks", "log_softmax", shape=BSV)
def entropy_row_loop(logits: Tensor, target: Tensor) -> Outputs:
    entropy = torch.stack([entropy_by_expectation(row.float()) for row in logits])
    return pick(logits.float().log_softmax(-1), target), entropy


@spelling("statistics by hand")
def baselines_entropy(logits: Tensor) -> Outputs:
    shifted = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    weights = torch.exp(shifted)
    total = torch.sum(weights, dim=-1, keepdim=True)
    probs = weights / total
    return (torch.sum(probs * (torch.log(total) - shifted), dim=-1),)


@spelling("statistics by hand", "log_softmax")
def statistics_amax_detached(logits: Tensor, target: Tensor) -> Outputs:
    shifted = logits.float() - logits.float().amax(-1, keepdim=True).detach()
    log_sum = shifted.exp().sum(-1).log()
    probs = shifted.exp() / shifted.exp().sum(-1, keepdim=True)
    return pick(shifted, target) - log_sum, log_sum - (probs * shifted).sum(-1)


@spelling("statistics by hand")
def statistics_amax_attached(logits: Tensor, target: Tensor) -> Outputs:
    peak = logits.amax(dim=-1, keepdim=True)
    log_sum = torch.log(torch.sum(torch.exp(logits - peak), dim=-1))
    return (pick(logits, target) - peak.squeeze(-1) - log_sum,)


@spelling("statistics by hand", shape=BSV)
def statistics_max_in_place(logits: Tensor, target: Tensor) -> Outputs:
    work = logits.float().clone()
    work.sub_(work.detach().max(-1, keepdim=True).values)
    picked = pick(work, target)
    return (picked - work.exp().sum(-1).log(),)


# ---------------------------------------------------------------- entropy: guards, chunks, checkpoints


@spelling("guarded entropy", fused=None)
def entropy_where_positive(logits: Tensor) -> Outputs:
    log_probs = logits.float().log_softmax(-1)
    probs = log_probs.exp()
    return (-torch.where(probs > 0, probs * log_probs, 0.0).sum(-1),)


@spelling("guarded entropy", fused=None)
def entropy_eps(logits: Tensor) -> Outputs:
    probs = logits.softmax(-1)
    return (-(probs * torch.log(probs + 1e-3)).sum(-1),)


@spelling("guarded entropy")
def entropy_xlogy(logits: Tensor) -> Outputs:
    probs = logits.float().softmax(-1)
    return (-torch.xlogy(probs, probs).sum(-1),)


@spelling("guarded entropy")
def entropy_special(logits: Tensor) -> Outputs:
    return (torch.special.entr(logits.float().softmax(-1)).sum(-1),)


@spelling("guarded entropy")
def entropy_nansum(logits: Tensor) -> Outputs:
    log_probs = logits.float().log_softmax(-1)
    return (-torch.nansum(log_probs.exp() * log_probs, -1),)


@spelling("guarded entropy")
def entropy_nansum_of_probs(logits: Tensor) -> Outputs:
    probs = logits.float().softmax(-1)
    return (-(probs * probs.log()).nansum(-1),)


@spelling("vocabulary in chunks", fused=None)
def entropy_streaming_vocabulary(logits: Tensor) -> Outputs:
    norm = logits.float().logsumexp(-1, keepdim=True)
    entropy = torch.zeros(logits.shape[0])
    for part in logits.float().split(16, dim=-1):
        log_probs = part - norm
        entropy = entropy - (log_probs.exp() * log_probs).sum(-1)
    return (entropy,)


@spelling("top-k weight", fused=None)
def top_k_entropy_weight(logits: Tensor, target: Tensor) -> Outputs:
    loss = F.cross_entropy(logits.float(), target, reduction="none")
    with torch.no_grad():
        best = torch.topk(logits.float(), k=6, dim=-1).values
        normed = best - best.logsumexp(-1, keepdim=True)
        weight = -(normed.exp() * normed).sum(-1) / 3.0
    return (loss * weight, weight)


@spelling("squared probabilities", fused=None)
def sum_of_squared_probabilities(logits: Tensor) -> Outputs:
    wide = logits.float()
    return (torch.exp(torch.logsumexp(2 * wide, -1) - 2 * torch.logsumexp(wide, -1)),)


@spelling("checkpoint", "log_softmax")
def entropy_checkpointed(logits: Tensor, target: Tensor) -> Outputs:
    entropy = checkpoint(entropy_by_expectation, logits.float(), use_reentrant=False)
    return pick(logits.float().log_softmax(-1), target), entropy


@spelling("checkpoint", shape=BSV)
def entropy_checkpointed_whole_loss(logits: Tensor, target: Tensor) -> Outputs:
    def both(wide: Tensor) -> Outputs:
        log_probs = wide.log_softmax(-1)
        return pick(log_probs, target), -(log_probs.exp() * log_probs).sum(-1)

    return tuple(checkpoint(both, logits / TEMPERATURE, use_reentrant=False))


# ---------------------------------------------------------------- divergences over the whole vocabulary


@spelling("divergence", fused=None)
def forward_kl(logits: Tensor, teacher: Tensor) -> Outputs:
    probs = F.softmax(teacher, dim=-1, dtype=torch.float32)
    student = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    kept = torch.masked_fill(probs * student, torch.isinf(logits), 0)
    return (-kept.sum(-1),)


@spelling("kl_div", fused=None)
def kl_div_of_softmaxes(logits: Tensor, teacher: Tensor, mask: Tensor) -> Outputs:
    student, probs = F.log_softmax(logits.float(), -1), F.softmax(teacher.float(), -1)
    kl = F.kl_div(student, probs, reduction="none").sum(-1)
    return ((kl * mask).sum() / mask.sum(),)


@spelling("Jensen-Shannon", fused=None)
def jensen_shannon(logits: Tensor, teacher: Tensor) -> Outputs:
    beta = torch.tensor(0.3)
    student, other = F.log_softmax(logits.float(), -1), F.log_softmax(teacher.float(), -1)
    mixture = torch.logsumexp(
        torch.stack([student + torch.log1p(-beta), other + torch.log(beta)]), dim=0
    )
    forward = F.kl_div(mixture, other, reduction="none", log_target=True)
    backward = F.kl_div(mixture, student, reduction="none", log_target=True)
    return ((beta * forward + (1 - beta) * backward).sum(-1),)


@spelling(
    "top-k divergence",
    fused=None,
    data=("plain",),
    notes="on hard data 1 - p has no digit left: eager's rounded logsumexp is in both p and 1 - p there and cancels, the "
    "gradient's own softmax is not rounded so and does not (2.2 times eager's RMSE)",
)
def top_k_distillation(logits: Tensor, teacher: Tensor) -> Outputs:
    student_norm = torch.logsumexp(logits.float(), -1, keepdim=True)
    teacher_norm = torch.logsumexp(teacher.float(), -1, keepdim=True)
    columns = teacher.topk(4, dim=-1).indices
    student = logits.float().gather(-1, columns) - student_norm
    other = teacher.float().gather(-1, columns) - teacher_norm
    tail = torch.log(-torch.expm1(student.logsumexp(-1)))
    return (other.exp() * (other - student)).sum(-1), tail


@spelling("divergence", fused=None)
def entropy_of_top_k(logits: Tensor) -> Outputs:
    best = logits.float().topk(4, dim=-1).values - logits.float().logsumexp(-1, keepdim=True)
    return (-(best.exp() * best).sum(-1),)


@spelling("divergence", "log_softmax", fused=None)
def reverse_kl_of_full_rows(logits: Tensor, reference: Tensor, target: Tensor) -> Outputs:
    policy, base = logits.log_softmax(-1), reference.detach().log_softmax(-1)
    return pick(policy, target), (policy.exp() * (policy - base)).sum(-1)


# ---------------------------------------------------------------- vocabulary-parallel, one rank


def all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    dist.all_reduce(values, op=op, group=dist.group.WORLD)


class ShardedCrossEntropy(torch.autograd.Function):
    """Cross entropy of Megatron's kind: everything in one buffer, the softmax kept for backward."""

    @staticmethod
    def forward(ctx, logits, target):  # type: ignore[no-untyped-def]
        work = logits.float()
        peak = work.max(dim=-1)[0]
        all_reduce(peak, dist.ReduceOp.MAX)
        work -= peak.unsqueeze(dim=-1)
        start, end = 0, work.shape[-1]  # this rank's range of the vocabulary
        foreign = (target < start) | (target >= end)
        local = target.clone() - start
        local[foreign] = 0
        flat, local = work.view(-1, work.shape[-1]), local.view(-1)
        rows = torch.arange(flat.shape[0], device=flat.device)
        picked = flat[rows, local].clone().contiguous().view_as(target)
        picked[foreign] = 0.0
        all_reduce(picked)
        weights = work
        torch.exp(work, out=weights)
        total = weights.sum(dim=-1)
        all_reduce(total)
        loss = torch.log(total) - picked
        weights.div_(total.unsqueeze(dim=-1))
        ctx.save_for_backward(weights, foreign, local)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        softmax, foreign, local = ctx.saved_tensors
        flat = softmax.view(-1, softmax.shape[-1])
        rows = torch.arange(flat.shape[0], device=flat.device)
        flat[rows, local] -= 1.0 - foreign.view(-1).float()
        softmax.mul_(grad_loss.unsqueeze(dim=-1))
        return softmax, None


class ShardedCrossEntropyOneReduction(torch.autograd.Function):
    """Megatron's fused kind: both sums in one all_reduce, the gradient rounded to bf16."""

    @staticmethod
    def forward(ctx, logits, target):  # type: ignore[no-untyped-def]
        work = logits.float()
        peak = torch.max(work, dim=-1)[0]
        all_reduce(peak, dist.ReduceOp.MAX)
        work = work.sub_(peak.unsqueeze(-1))
        foreign = (target < 0) | (target >= work.shape[-1])
        local = torch.where(foreign, 0, target).view(-1)
        flat = work.view(-1, work.shape[-1])
        rows = torch.arange(flat.shape[0], device=flat.device)
        picked = flat[rows, local].view_as(target).masked_fill(foreign, 0.0)
        work.exp_()
        sums = torch.stack([picked, work.sum(-1)])
        all_reduce(sums)
        picked, total = sums.unbind(0)
        work.div_(total.unsqueeze(-1))
        ctx.save_for_backward(work, foreign, local)
        return total.log() - picked

    @staticmethod
    def backward(ctx, grad_loss):  # type: ignore[no-untyped-def]
        softmax, foreign, local = ctx.saved_tensors
        flat = softmax.view(-1, softmax.shape[-1])
        rows = torch.arange(flat.shape[0], device=flat.device)
        flat[rows, local] -= 1.0 - foreign.view(-1).float()
        softmax.mul_(grad_loss.unsqueeze(-1))
        return softmax.to(torch.bfloat16), None


class ShardedEntropy(torch.autograd.Function):
    """Entropy over a sharded vocabulary; exp and div in place, backward over the saved softmax."""

    @staticmethod
    def forward(ctx, logits):  # type: ignore[no-untyped-def]
        peak = logits.max(dim=-1, keepdim=True).values
        all_reduce(peak, dist.ReduceOp.MAX)
        weights = logits - peak
        weights.exp_()
        total = weights.sum(dim=-1, keepdim=True)
        all_reduce(total)
        probs = weights.div_(total)
        expected = (probs * logits).sum(dim=-1, keepdim=True)
        all_reduce(expected)
        entropy = peak + total.log() - expected
        ctx.save_for_backward(logits, probs, expected)
        return entropy.squeeze(dim=-1)

    @staticmethod
    def backward(ctx, grad_entropy):  # type: ignore[no-untyped-def]
        logits, probs, expected = ctx.saved_tensors
        grad = grad_entropy.unsqueeze(dim=-1) * probs * (expected - logits)
        return grad


class ShardedEntropyRestoringInput(ShardedEntropy):
    """The same; backward works on the saved logits in place and puts them back."""

    @staticmethod
    def backward(ctx, grad_entropy):  # type: ignore[no-untyped-def]
        logits, probs, expected = ctx.saved_tensors
        logits.sub_(expected)
        probs.mul_(logits)
        probs.mul_(grad_entropy.unsqueeze(dim=-1))
        logits.add_(expected)
        return probs.mul_(-1)


class ShardedLogProbEntropy(torch.autograd.Function):
    """Log-prob and entropy from one softmax buffer, as slime does today."""

    @staticmethod
    def forward(ctx, logits, target):  # type: ignore[no-untyped-def]
        wide = logits.float()
        peak = wide.max(dim=-1, keepdim=True).values
        all_reduce(peak, dist.ReduceOp.MAX)
        foreign = (target < 0) | (target >= wide.shape[-1])
        local = target.masked_fill(foreign, 0)
        rows = torch.arange(wide.shape[0], device=wide.device)
        shifted = wide - peak
        picked = shifted[rows, local]
        picked = picked.masked_fill(foreign, 0.0)
        softmax = shifted.exp_()
        total = softmax.sum(dim=-1, keepdim=True)
        all_reduce(total)
        all_reduce(picked)
        softmax.div_(total)
        expected = (softmax * wide).sum(dim=-1, keepdim=True)
        all_reduce(expected)
        log_sum = total.log()
        entropy = (peak + log_sum - expected).squeeze(-1)
        ctx.save_for_backward(wide, softmax, expected, foreign, local)
        return picked - log_sum.squeeze(-1), entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):  # type: ignore[no-untyped-def]
        wide, softmax, expected, foreign, local = ctx.saved_tensors
        from_entropy = softmax * (expected - wide)
        from_entropy.mul_(grad_entropy.unsqueeze(-1))
        grad = softmax.neg_()
        rows = torch.arange(grad.shape[0], device=grad.device)
        grad[rows, local] += (~foreign).to(grad.dtype)
        grad.mul_(grad_log_prob.unsqueeze(-1))
        grad += from_entropy
        return grad, None


class ShardedLogProbEntropyFromSoftmax(torch.autograd.Function):
    """Saves the softmax only; the entropy's gradient is made with xlogy, as AReaL does."""

    @staticmethod
    def forward(ctx, logits, target):  # type: ignore[no-untyped-def]
        shifted = logits.float() - logits.float().amax(-1, keepdim=True)
        weights = shifted.exp()
        total = weights.sum(-1, keepdim=True)
        all_reduce(total)
        softmax = weights / total
        picked = shifted.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        expected = (softmax * shifted).sum(-1)
        log_sum = total.log().squeeze(-1)
        entropy = log_sum - expected
        ctx.save_for_backward(softmax, entropy, target)
        return picked - log_sum, entropy

    @staticmethod
    def backward(ctx, grad_log_prob, grad_entropy):  # type: ignore[no-untyped-def]
        softmax, entropy, target = ctx.saved_tensors
        grad = -softmax * grad_log_prob.unsqueeze(-1)
        grad.scatter_add_(-1, target.unsqueeze(-1), grad_log_prob.unsqueeze(-1))
        inner = torch.xlogy(softmax, softmax) + softmax * entropy.unsqueeze(-1)
        return grad - inner * grad_entropy.unsqueeze(-1), None


@spelling("sharded cross entropy", collectives=True)
def sharded_cross_entropy(logits: Tensor, target: Tensor) -> Outputs:
    return (ShardedCrossEntropy.apply(logits.clone(), target),)


@spelling("sharded cross entropy", shape=BSV, collectives=True)
def sharded_log_probs(logits: Tensor, target: Tensor) -> Outputs:
    scaled = logits.float() / TEMPERATURE
    return (-ShardedCrossEntropy.apply(scaled, target),)


@spelling("sharded cross entropy", collectives=True)
def sharded_cross_entropy_one_reduction(logits: Tensor, target: Tensor) -> Outputs:
    return (-ShardedCrossEntropyOneReduction.apply(logits.clone(), target),)


@spelling(
    "sharded cross entropy", "whole loss", collectives=True, notes="slime's loss as of slime#2011"
)
def clones_sharded_log_prob_and_entropy(
    logits: Tensor, target: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    tokens = target.unsqueeze(1)
    log_probs = -ShardedCrossEntropyOneReduction.apply(logits.clone().unsqueeze(1), tokens)
    log_probs = log_probs.squeeze(-1)
    entropy = ShardedEntropy.apply(logits.float().clone())
    ratio = torch.exp(log_probs - (log_probs.detach() - drift))
    clipped = ratio.clamp(0.8, 1.28)
    policy = -torch.min(ratio * advantages, clipped * advantages).mean()
    return policy - 0.01 * entropy.mean(), log_probs, entropy


@spelling("sharded cross entropy", "sharded entropy", shape=BSV, collectives=True)
def clones_sharded_entropy_restored(logits: Tensor, target: Tensor) -> Outputs:
    log_probs = -ShardedCrossEntropy.apply(logits.clone(), target)
    return log_probs, ShardedEntropyRestoringInput.apply(logits.float().clone())


@spelling("sharded entropy", collectives=True, fused=None)
def sharded_entropy(logits: Tensor) -> Outputs:
    return (ShardedEntropy.apply(logits.float()),)


@spelling("sharded log-prob and entropy", collectives=True)
def sharded_log_prob_and_entropy(logits: Tensor, target: Tensor) -> Outputs:
    return tuple(ShardedLogProbEntropy.apply(logits, target))


@spelling("sharded log-prob and entropy", collectives=True)
def sharded_log_prob_and_entropy_chunked(logits: Tensor, target: Tensor) -> Outputs:
    pieces = [
        ShardedLogProbEntropy.apply(part / TEMPERATURE, tokens)
        for part, tokens in zip(logits.split(3), target.split(3), strict=True)
    ]
    log_probs, entropies = zip(*pieces, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


@spelling("sharded log-prob and entropy", collectives=True)
def sharded_log_prob_entropy_metric(logits: Tensor, target: Tensor) -> Outputs:
    log_probs, entropy = ShardedLogProbEntropy.apply(logits, target)
    return log_probs, entropy.detach()


@spelling("sharded log-prob and entropy", collectives=True)
def sharded_log_prob_entropy_from_softmax(logits: Tensor, target: Tensor) -> Outputs:
    return tuple(ShardedLogProbEntropyFromSoftmax.apply(logits, target))


@spelling("sharded log-prob and entropy", "whole loss", shape=BSV, collectives=True)
def sharded_samples_of_a_packed_row(logits: Tensor, target: Tensor) -> Outputs:
    packed = logits[:1].squeeze(0).float().div(TEMPERATURE).contiguous()
    tokens = torch.zeros_like(target[0])
    tokens[:-1] = target[0, 1:]
    log_probs, entropy = ShardedLogProbEntropy.apply(packed, tokens)
    return log_probs[0:2], log_probs[2:4], entropy[0:2], entropy[2:4]


class DistributedLogProb(torch.autograd.Function):
    """Gathers from a whole distributed log_softmax; backward is one-hot minus softmax."""

    @staticmethod
    def forward(ctx, logits, target):  # type: ignore[no-untyped-def]
        wide = logits.float()
        peak = wide.amax(-1, keepdim=True)
        all_reduce(peak, dist.ReduceOp.MAX)
        total = (wide - peak).exp().sum(-1, keepdim=True)
        all_reduce(total)
        log_probs = wide - peak - total.log()
        picked = log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        all_reduce(picked)
        ctx.save_for_backward(log_probs.exp(), target)
        return picked

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        softmax, target = ctx.saved_tensors
        one_hot = F.one_hot(target, softmax.shape[-1])
        return (one_hot.float() - softmax) * grad.unsqueeze(-1), None


class FunctionalLossParallel(torch.autograd.Function):
    """On functional collectives; saves the log-probabilities."""

    @staticmethod
    def forward(ctx, logits, target):  # type: ignore[no-untyped-def]
        group = dist.group.WORLD
        peak = funcol.all_reduce(logits.amax(-1, keepdim=True), "max", group)
        shifted = (logits - peak).float()
        total = funcol.all_reduce(shifted.exp().sum(-1, keepdim=True), "sum", group)
        log_probs = shifted - total.log()
        picked = log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(log_probs, target)
        ctx.input_dtype = logits.dtype
        return -funcol.all_reduce(picked, "sum", group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        log_probs, target = ctx.saved_tensors
        one_hot = torch.zeros_like(log_probs)
        rows = torch.arange(target.shape[0], device=target.device)
        one_hot[rows, target] = -1.0
        return ((one_hot + log_probs.exp()) * grad.unsqueeze(-1)).to(ctx.input_dtype), None


class ShardedSoftCrossEntropy(torch.autograd.Function):
    """A teacher's softmax against the student's log-softmax, hand-written backward."""

    @staticmethod
    def forward(ctx, logits, teacher):  # type: ignore[no-untyped-def]
        probs = teacher.float().softmax(-1)
        shifted = logits.float() - logits.float().amax(-1, keepdim=True)
        total = shifted.logsumexp(-1, keepdim=True).exp_()
        all_reduce(total)
        log_probs = shifted - total.log()
        ctx.save_for_backward(log_probs, probs)
        return torch.einsum("...v,...v->...", probs, log_probs).neg_()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        log_probs, probs = ctx.saved_tensors
        return (log_probs.exp() - probs) * grad.unsqueeze(-1), None


class CombinedNorm(torch.autograd.Function):
    """The global logsumexp out of every shard's own."""

    @staticmethod
    def forward(ctx, local):  # type: ignore[no-untyped-def]
        peak = local.clone()
        all_reduce(peak, dist.ReduceOp.MAX)
        total = (local - peak).exp()
        all_reduce(total)
        norm = peak + total.log()
        ctx.save_for_backward(local, norm)
        return norm

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        local, norm = ctx.saved_tensors
        return grad * (local - norm).exp()


@spelling("sharded distribution", collectives=True, fused=None)
def distributed_log_prob(logits: Tensor, target: Tensor) -> Outputs:
    return (DistributedLogProb.apply(logits, target),)


@spelling("functional collectives", collectives=True, fused=None)
def functional_loss_parallel(logits: Tensor, target: Tensor) -> Outputs:
    return (FunctionalLossParallel.apply(logits.float(), target),)


@spelling("shards' norms", collectives=True, fused=None)
def combined_shard_norms(logits: Tensor, target: Tensor) -> Outputs:
    wide = logits.float()
    here = (target >= 0) & (target < wide.shape[-1])
    picked = torch.where(here, pick(wide, target.clamp(0, wide.shape[-1] - 1)), 0.0)
    return (CombinedNorm.apply(wide.logsumexp(-1)) - picked,)


@spelling("sharded soft targets", collectives=True, fused=None)
def sharded_soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Outputs:
    return (ShardedSoftCrossEntropy.apply(logits, teacher),)


# ---------------------------------------------------------------- the matmul inside


class ChunkedLinearLogProb(torch.autograd.Function):
    """Logits per chunk of tokens, made again in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, target):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight, target)
        log_probs, entropies = [], []
        for rows, tokens in zip(hidden.split(3), target.split(3), strict=True):
            logits = (rows @ weight.t()).float()
            log_probs.append(pick(logits.log_softmax(-1), tokens))
            entropies.append(logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1))
        return torch.cat(log_probs), torch.cat(entropies)

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, target = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for first in range(0, hidden.shape[0], 3):
            part = slice(first, first + 3)
            logits = (hidden[part] @ weight.t()).float()
            log_probs = logits.log_softmax(-1)
            probs = log_probs.exp()
            entropy = -(probs * log_probs).sum(-1, keepdim=True)
            one_hot = torch.zeros_like(probs).scatter_(-1, target[part].unsqueeze(-1), 1.0)
            grad = (one_hot - probs) * grad_log_probs[part].unsqueeze(-1)
            grad = grad - probs * (log_probs + entropy) * grad_entropy[part].unsqueeze(-1)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] += grad @ weight
            grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight, None


@spelling("linear function", fused=None)
def linear_function_recomputing(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return tuple(ChunkedLinearLogProb.apply(hidden, weight, target))


@spelling("linear inside", fused=None)
def linear_chunk_loop(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    pieces = []
    for rows, tokens in zip(hidden.chunk(3), target.chunk(3), strict=True):
        logits = (rows @ weight.t()).float() / TEMPERATURE
        pieces.append(pick(logits, tokens) - logits.logsumexp(-1))
    return (torch.cat(pieces),)


@spelling("linear inside", fused=None, notes="tanh between the matmul and the loss")
def linear_with_softcap(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = 5.0 * torch.tanh((hidden @ weight.t()) / 5.0)
    return (F.cross_entropy(logits.float(), target, reduction="none"),)


@spelling("linear inside", "log_softmax")
def linear_inside(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    return (pick((hidden @ weight.t()).log_softmax(-1), target),)


@spelling("linear inside", "log_softmax", "entropy by expectation", shape=BSV)
def linear_inside_with_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    logits = F.linear(hidden, weight)[:, :-1].float() / TEMPERATURE
    return pick(logits.log_softmax(-1), target[:, 1:]), entropy_by_expectation(logits)


@spelling("linear checkpoint", fused=None)
def linear_checkpoint_per_chunk(hidden: Tensor, weight: Tensor, target: Tensor) -> Outputs:
    def chunk_loss(rows: Tensor, tokens: Tensor) -> Tensor:
        logits = (rows @ weight.t()).float()
        return F.nll_loss(logits.log_softmax(-1), tokens, reduction="sum")

    pieces = [
        checkpoint(chunk_loss, rows, tokens, use_reentrant=False)
        for rows, tokens in zip(hidden.split(4), target.split(4), strict=True)
    ]
    return (torch.stack(pieces).sum() / target.numel(),)


# ---------------------------------------------------------------- whole losses


@spelling("whole loss", "log_softmax", "entropy of log-probs", shape=BSV)
def group_policy_loss(
    logits: Tensor, target: Tensor, mask: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    logits = logits[:, :-1, :] / TEMPERATURE
    tokens, keep = target[:, 1:], mask[:, 1:]
    log_all = logits.float().log_softmax(-1)
    log_probs = pick(log_all, tokens)
    entropy = -(log_all.exp() * log_all).sum(-1)
    ratio = torch.exp(log_probs - (log_probs.detach() - drift[:, 1:]))
    gain = advantages[:, 1:]
    per_token = -torch.min(ratio * gain, torch.clamp(ratio, 0.8, 1.2) * gain)
    per_token = per_token - 0.01 * entropy
    loss = ((per_token * keep).sum(-1) / keep.sum(-1).clamp(min=1)).mean()
    with torch.no_grad():
        clipped = ((ratio < 0.8) | (ratio > 1.2)).float().mean()
        mean_entropy = (entropy * keep).sum() / keep.sum()
    return loss, mean_entropy, clipped


@spelling("whole loss", "logsumexp per row", "entropy in chunks", shape=BSV, mutates=True, fused=1)
def model_output_to_loss(
    logits: Tensor, target: Tensor, mask: Tensor, advantages: Tensor
) -> Outputs:
    answer = 3
    logits = logits[:, :-1, :][:, -answer:, :]
    logits.div_(TEMPERATURE)
    tokens, keep = target[:, -answer:], mask[:, -answer:]
    norms = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    log_probs = pick(logits, tokens) - norms
    with torch.no_grad():
        pieces = []
        for part in logits.reshape(-1, logits.shape[-1]).split(4):
            log_all = part.log_softmax(-1)
            pieces.append(-(log_all.exp() * log_all).sum(-1))
        entropy = torch.cat(pieces).view(log_probs.shape)
    ratio = torch.exp(log_probs - log_probs.detach())
    loss = -(ratio * advantages[:, -answer:] * keep).sum() / keep.sum()
    return loss, entropy


@spelling("whole loss", "logsumexp per row", "entropy in chunks", shape=BSV)
def slices_of_a_copy_divided_in_place(
    logits: Tensor, target: Tensor, mask: Tensor, advantages: Tensor
) -> Outputs:
    """A model's output in the same graph, with a bonus for the entropy."""
    answer = 3
    logits = logits.clone()[:, :-1, :]
    logits = logits[:, -answer:, :]
    logits.div_(TEMPERATURE)
    tokens, keep = target[:, -answer:], mask[:, -answer:]
    norms = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    log_probs = pick(logits, tokens) - norms
    pieces = []
    for part in logits.reshape(-1, logits.shape[-1]).split(4):
        log_all = part.log_softmax(-1)
        pieces.append(-(log_all.exp() * log_all).sum(-1))
    entropy = torch.cat(pieces).view(log_probs.shape)
    ratio = torch.exp(log_probs - log_probs.detach())
    gain = ratio * advantages[:, -answer:] + 0.01 * entropy
    return -(gain * keep).sum() / keep.sum(), log_probs, entropy


@spelling("log_softmax", "entropy by expectation", shape=BSV)
def a_token_of_a_copy_changed_twice(logits: Tensor, target: Tensor) -> Outputs:
    logits = logits.clone()
    token = logits[:, 1]
    token.div_(TEMPERATURE)
    token += 0.5 * target[:, 1:2]
    log_p = logits[:, 1].log_softmax(-1)
    return pick(log_p, target[:, 1]), -(log_p.exp() * log_p).sum(-1)


@spelling("whole loss", "log_softmax", "entropy by expectation")
def proximal_policy_loss(
    logits: Tensor,
    target: Tensor,
    row_temperature: Tensor,
    mask: Tensor,
    drift: Tensor,
    advantages: Tensor,
) -> Outputs:
    wide = logits.float() / row_temperature.unsqueeze(-1)
    log_probs = pick(wide.log_softmax(-1), target)
    entropy = entropy_by_expectation(wide)
    old = log_probs.detach() - drift
    ratio = (log_probs - old).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    policy = (torch.maximum(unclipped, clipped) * mask).sum() / mask.sum()
    bonus = (entropy * mask).sum() / mask.sum()
    approximate_kl = ((ratio - 1) - (log_probs - old)).mean().detach()
    return policy - 0.02 * bonus, approximate_kl


@spelling("whole loss", "log_softmax", fused=3, shape=BSV)
def group_policy_loss_with_reference(
    logits: Tensor, reference: Tensor, target: Tensor, mask: Tensor, advantages: Tensor
) -> Outputs:
    log_probs = pick(logits[:, :-1].float().log_softmax(-1), target[:, 1:])
    with torch.no_grad():
        base = pick(reference[:, :-1].float().log_softmax(-1), target[:, 1:])
    gap = base - log_probs
    kl = gap.exp() - gap - 1
    ratio = (log_probs - log_probs.detach()).exp()
    per_token = -(ratio * advantages[:, 1:] - 0.04 * kl)
    keep = mask[:, 1:]
    return (per_token * keep).sum() / keep.sum(), (kl.detach() * keep).sum() / keep.sum()


@spelling("whole loss", "log_softmax", shape=BSV)
def sequence_level_ratio(
    logits: Tensor, target: Tensor, mask: Tensor, drift: Tensor, advantages: Tensor
) -> Outputs:
    log_probs = pick(logits.float().log_softmax(-1), target)
    gap = log_probs - (log_probs.detach() - drift)
    mean_gap = (gap * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    ratio = (log_probs - log_probs.detach() + mean_gap.detach().unsqueeze(-1)).exp()
    return (-(ratio * advantages * mask).sum() / mask.sum(),)


@spelling("whole loss", "cross_entropy", "entropy by expectation", shape=BSV)
def truncated_importance_weights(
    logits: Tensor, ignored_target: Tensor, batch_temperature: Tensor, drift: Tensor
) -> Outputs:
    wide = logits.float() / batch_temperature
    flat = wide[:, :-1].reshape(-1, wide.shape[-1])
    labels = ignored_target[:, 1:].reshape(-1)
    log_probs = -F.cross_entropy(flat, labels, reduction="none", ignore_index=IGNORE)
    weight = (drift[:, 1:].reshape(-1)).exp().clamp(max=1.5)
    with torch.no_grad():
        entropy = entropy_by_expectation(flat)
    return -(weight * log_probs).sum() / (labels != IGNORE).sum(), entropy


@spelling("whole loss", "log_softmax", fused=3)
def preference_pair(logits: Tensor, reference: Tensor, target: Tensor) -> Outputs:
    half = target.shape[0] // 2
    policy = pick(logits.float().log_softmax(-1), target)
    with torch.no_grad():
        base = pick(reference.float().log_softmax(-1), target)
    margin = (policy - base)[:half].sum() - (policy - base)[half:].sum()
    return (-F.logsigmoid(0.1 * margin), margin.detach())
