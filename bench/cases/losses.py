"""The measured losses, their data, and their float64 reference.

slime's policy loss (per-token log-probs and entropies of `[N, V]` logits, and a clipped policy loss of both), by the
names in `SPELLINGS`:

    megatron   slime's loss before it was fused by hand: every consumer gets a clone, log-probs come from Megatron's own
               `fused_vocab_parallel_cross_entropy`, entropies from an in-place `autograd.Function`
    reuse      slime's own patch (slime#2011): one `autograd.Function` keeps the softmax and turns it into the gradient
    plain      the formula of a paper

The vocabulary is not sharded: a process group of one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases.functions import (
    CrossEntropyLikeMegatron,
    ReusedSoftmax,
    VocabParallelEntropy,
    has_megatron,
    megatron_cross_entropy,
)

Values = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`[N, V]` logits and `[N]` targets to `[N]` log-probs and entropies."""

SPELLINGS = ("megatron", "reuse", "plain")
VARIANTS = ("given", "inside", "no_grad")
CLIP_LOW, CLIP_HIGH, ENTROPY_COEFFICIENT = 0.2, 0.28, 0.01
_DRAWN_ROWS = 256  # random numbers take longer than the losses do
_TRUTH_ROWS = 64  # at a time, so that float64 needs no [N, V] but the gradient


# ---- spellings ----------------------------------------------------------------------------------------------------


def values(spelling: str, chunk: int = -1) -> Values:
    """The function computing log-probs and entropies, by its name in `SPELLINGS`.

    Args:
        chunk: rows at a time, slime's `--log-probs-chunk-size`; -1 for all.
    """
    make = _SPELLINGS[spelling]()
    if chunk < 0:
        return make

    def chunked(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(logits.split(chunk), target.split(chunk), strict=True)
        log_probs, entropies = zip(*(make(part, tokens) for part, tokens in pairs), strict=True)
        return torch.cat(log_probs), torch.cat(entropies)

    return chunked


def world() -> None:
    """The process group of the sharded losses: one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _megatron() -> Values:
    world()
    cross_entropy: Callable[..., Tensor] = CrossEntropyLikeMegatron.apply
    if has_megatron():
        cross_entropy = megatron_cross_entropy()

    def megatron_values(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        tokens = target.unsqueeze(1)  # Megatron wants [sequence, batch, vocabulary]
        nll = cross_entropy(logits.clone().unsqueeze(1), tokens, dist.group.WORLD)
        return -nll.squeeze(-1), VocabParallelEntropy.apply(logits.clone())

    return megatron_values


def _reuse() -> Values:
    world()
    return ReusedSoftmax.apply


def _plain() -> Values:
    def plain_values(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_softmax = torch.log_softmax(logits.float(), -1)
        log_probs = log_softmax.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)

    return plain_values


_SPELLINGS: dict[str, Callable[[], Values]] = {
    "megatron": _megatron,
    "reuse": _reuse,
    "plain": _plain,
}


def policy_loss(
    log_probs: Tensor, entropy: Tensor, old_log_probs: Tensor, advantages: Tensor
) -> Tensor:
    """PPO's clipped loss minus an entropy bonus; everything `[N]`."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    policy = torch.max(-ratio * advantages, -clipped * advantages)
    return policy.mean() - ENTROPY_COEFFICIENT * entropy.mean()


# ---- data ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A measured problem, without the way to compile it.

    Attributes:
        variant: one of `VARIANTS`: logits given, made inside the function by a matmul, given and without gradient.
        rows, vocab: of the logits. hidden: width of the matmul.
        chunk: rows at a time in the loss, -1 for all.
    """

    variant: str = "given"
    spelling: str = "megatron"
    dtype: str = "float32"
    rows: int = 2048
    vocab: int = 32000
    hidden: int = 64
    chunk: int = -1
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.torch_dtype.itemsize

    def function(self) -> Callable[..., Any]:
        """The function a user would compile; called with `*wide, *rows` of `Problem`."""
        make = values(self.spelling, self.chunk)

        def no_grad(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Any:
            return make(logits, target)

        def given(logits: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
            return policy_loss(*make(logits, target), old, advantages)

        def inside(
            hidden: Tensor, weight: Tensor, target: Tensor, old: Tensor, advantages: Tensor
        ) -> Tensor:
            return policy_loss(*make(hidden @ weight.t(), target), old, advantages)

        return {"no_grad": no_grad, "given": given, "inside": inside}[self.variant]


class Problem:
    """Random data of a case, the same at each call.

    Attributes:
        wide: the sources of the logits: the logits themselves [N, V], or hidden states [N, D] and a weight [V, D].
        rows: target, old log-probs, advantages, all [N].
    """

    def __init__(self, case: Case, *, with_truth: bool = True):
        """`with_truth`: old log-probs near the logits' own, from float64; else any, for measurements of memory."""
        self.case = case
        self.wide: list[Tensor] = []
        self.refill()
        draw = torch.Generator().manual_seed(1)
        target = torch.randint(case.vocab, [case.rows], generator=draw)
        # the ratio to the old policy stays away from where the clip bites: rounding shall not decide
        drift = torch.tensor([-0.6, -0.1, 0.05, 0.5])
        drift = drift[torch.randint(4, [case.rows], generator=draw)]
        advantages = torch.randn(case.rows, generator=draw)
        target = target.to(case.device)
        old = torch.full([case.rows], -10.0, device=case.device)
        if with_truth:
            logits = _true_logits(self.wide)
            old = torch.cat([_true_values(x, target[at])[0] for at, x in logits]).float()
        self.rows = [target, old - drift.to(case.device), advantages.to(case.device)]

    def refill(self) -> None:
        """Writes the data of `wide` again: some rows, repeated. The logits' standard deviation is 3."""
        if not self.wide:
            shapes = [[self.case.rows, self.case.vocab]]
            if self.case.variant == "inside":
                sizes = (self.case.rows, self.case.vocab)
                shapes = [[size, self.case.hidden] for size in sizes]
            how: dict[str, Any] = {"dtype": self.case.torch_dtype, "device": self.case.device}
            self.wide = [torch.empty(shape, **how) for shape in shapes]
        draw = torch.Generator(self.case.device).manual_seed(0)
        deviations = [3.0] if len(self.wide) == 1 else [1.0, 3.0 / self.case.hidden**0.5]
        with torch.no_grad():
            for value, deviation in zip(self.wide, deviations, strict=True):
                first = value[:_DRAWN_ROWS].normal_(0, deviation, generator=draw)
                for part in value.split(_DRAWN_ROWS)[1:]:
                    part.copy_(first[: part.shape[0]])


# ---- truth --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """The results of a call: its outputs, and the gradients of `wide` (none without gradient)."""

    outputs: list[Tensor]
    gradients: list[Tensor]


def truth(problem: Problem) -> Result:
    """The same in float64, row by row, without any of the measured functions."""
    wide, (target, old, advantages) = problem.wide, problem.rows
    outputs: list[Tensor] = []
    gradients = [torch.zeros_like(value, dtype=torch.float64) for value in wide]
    for start in range(0, target.shape[0], _TRUTH_ROWS):
        at = slice(start, start + _TRUTH_ROWS)
        parts = [w[at] if i == 0 else w for i, w in enumerate(wide)]
        leaves = [part.double().requires_grad_() for part in parts]
        logits = leaves[0] @ leaves[1].t() if len(leaves) == 2 else leaves[0]
        found = _true_values(logits, target[at])
        if problem.case.variant == "no_grad":
            outputs.append(torch.stack(found).detach())
            continue
        share = found[0].shape[0] / target.shape[0]
        loss = share * policy_loss(*found, old[at].double(), advantages[at].double())
        outputs.append(loss.detach()[None])
        made = torch.autograd.grad(loss, leaves)
        gradients[0][at] = made[0]
        for whole, part in zip(gradients[1:], made[1:], strict=True):
            whole += part
    if problem.case.variant == "no_grad":
        return Result(list(torch.cat(outputs, 1)), [])
    return Result([torch.cat(outputs).sum()], gradients)


def errors(found: Result, true: Result) -> tuple[float, float]:
    """Largest error of the outputs, and of the gradients relative to the largest gradient."""
    pairs = zip(found.outputs, true.outputs, strict=True)
    of_outputs = max((f.double() - t).abs().max().item() for f, t in pairs)
    wide = zip(found.gradients, true.gradients, strict=True)
    relative = [((f.double() - t).abs().max() / t.abs().max()).item() for f, t in wide]
    return of_outputs, max(relative, default=0.0)


def _true_logits(wide: list[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """The logits' rows in float64, a few at a time."""
    for start in range(0, wide[0].shape[0], _TRUTH_ROWS):
        at = slice(start, start + _TRUTH_ROWS)
        part = wide[0][at].double()
        yield at, part @ wide[1].double().t() if len(wide) == 2 else part


def _true_values(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits, -1)
    log_probs = log_softmax.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)
