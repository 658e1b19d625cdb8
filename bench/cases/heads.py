"""Losses over hidden states and a weight, by this package, torch and other libraries.

Entry points: `WAYS`, by name: for a cell a function of (hidden, weight, target, old, advantages) to a scalar; `truth`,
the same in float64, a few rows at a time. A way imports its packages on request. If one is not installed, needs a GPU,
or computes another loss, the way raises, and the table has the reason. A package missing from the index (prime-rl), or
pinning another torch, is found through PYTHONPATH.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases.losses import policy_loss

Function = Callable[..., Tensor]
_TRUTH_ROWS = 256


@dataclass(frozen=True)
class Head:
    """One cell: sizes and dtype of a loss over `hidden @ weight.t()`."""

    loss: str
    dtype: str
    rows: int
    vocab: int
    hidden: int

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def arguments(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.rows, self.hidden, generator=draw)
        weight = torch.randn(self.vocab, self.hidden, generator=draw) / self.hidden**0.5
        target = torch.randint(self.vocab, (self.rows,), generator=draw)
        old = -torch.rand(self.rows, generator=draw) - 10
        advantages = torch.randn(self.rows, generator=draw)
        leaves = [t.to(self.torch_dtype).requires_grad_() for t in (hidden, weight)]
        return [*leaves, target, old, advantages]


def _values(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    log_softmax = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    log_probs = log_softmax.gather(-1, target[:, None])[:, 0]
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)


def cross_entropy(h: Tensor, w: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -_values(h, w, target)[0].mean()


def log_probs(h: Tensor, w: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -(_values(h, w, target)[0] * advantages).mean()


def policy(h: Tensor, w: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return policy_loss(*_values(h, w, target), old, advantages)


LOSSES: dict[str, Function] = {
    "cross entropy": cross_entropy,
    "log-probs": log_probs,
    "policy and entropy": policy,
}


def _compiled(**how: Any) -> Callable[[Head], Function]:
    def make(head: Head) -> Function:
        return torch.compile(LOSSES[head.loss], fullgraph=True, dynamic=False, **how)

    return make


def _only_cross_entropy(make: Callable[[], Function]) -> Callable[[Head], Function]:
    def checked(head: Head) -> Function:
        if head.loss != "cross entropy":
            raise NotImplementedError("computes cross entropy only")
        return make()

    return checked


def _of_torch() -> Function:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    call = torch.nn.functional.linear_cross_entropy
    return lambda h, w, target, *_: call(h, w, target, options=options)


def _auto_chunker() -> Function:
    if not hasattr(importlib.import_module("torch._inductor.config"), "auto_chunker"):
        raise ImportError(f"torch {torch.__version__} has no auto_chunker")
    return torch.compile(
        lambda h, w, target, *_: F.cross_entropy(h @ w.t(), target),
        dynamic=False,
        options={"auto_chunker.enable": True},
    )


def _liger() -> Function:
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    return lambda h, w, target, *_: function.apply(h, w, target)[0]


def _cut() -> Function:
    call = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda h, w, target, *_: call(h, w, target, impl="torch_compile")


def _losses_of(head: Head, values: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    """The cell's loss over a peer's log-probs and entropies of hidden, weight and target."""

    def loss(h: Tensor, w: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        log_probs, entropy = (value.float() for value in values(h, w, target))
        if head.loss == "cross entropy":
            return -log_probs.mean()
        if head.loss == "log-probs":
            return -(log_probs * advantages).mean()
        return policy_loss(log_probs, entropy, old, advantages)

    return loss


def _verl(head: Head) -> Function:
    module = importlib.import_module("verl.utils.experimental.torch_functional")
    return _losses_of(head, module.FusedLinearForPPO())


def _prime_rl(head: Head) -> Function:
    if head.loss == "policy and entropy":
        raise NotImplementedError("its backward has no gradient of the entropy")
    module = importlib.import_module("prime_rl.trainer.models.layers.lm_head")
    function = module._SequenceChunkedLogProbEntropyFn

    def values(h: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = function.apply(
            h, w, target, h.new_ones(len(h)).float(), 2048
        )
        return found

    return _losses_of(head, values)


def _trl(head: Head) -> Function:
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    if not torch.cuda.is_available():
        raise NotImplementedError("its kernels are Triton's and need a GPU")

    def values(h: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropy, *_ = function.apply(h, w, None, target, 1.0)
        return log_probs, entropy

    return _losses_of(head, values)


def _liger_grpo(head: Head) -> Function:
    """Without old log-probs the ratio is 1, its gradient that of the log-probs; each row is a sequence of one token."""
    if head.loss != "log-probs":
        raise NotImplementedError("computes a clipped ratio of log-probs, without entropy")
    module = importlib.import_module("liger_kernel.chunked_loss")
    loss = module.LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="bnpo", chunk_size=max(head.rows // 8, 1)
    )

    def call(h: Tensor, w: Tensor, target: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        mask = torch.ones_like(target)[:, None]
        found = loss(h[:, None], w, target[:, None], mask, advantages)
        value: Tensor = found[0] if isinstance(found, tuple) else found
        return value

    return call


WAYS: dict[str, Callable[[Head], Function]] = {
    "eager": lambda head: LOSSES[head.loss],
    "inductor": _compiled(backend="inductor"),
    "slime_fused": _compiled(backend="slime_fused"),
    "slime_fused grad_in_forward=always": _compiled(
        backend="slime_fused", options={"grad_in_forward": "always"}
    ),
    "slime_fused grad_in_forward=never": _compiled(
        backend="slime_fused", options={"grad_in_forward": "never"}
    ),
    "slime_fused lm_head=False": _compiled(backend="slime_fused", options={"lm_head": False}),
    "inductor, auto_chunker": _only_cross_entropy(_auto_chunker),
    "F.linear_cross_entropy": _only_cross_entropy(_of_torch),
    "Liger fused linear cross entropy": _only_cross_entropy(_liger),
    "Cut Cross-Entropy, torch path": _only_cross_entropy(_cut),
    "Liger fused linear GRPO": _liger_grpo,
    "verl FusedLinearForPPO": _verl,
    "prime-rl chunked head": _prime_rl,
    "TRL chunked head": _trl,
}


def truth(head: Head) -> list[Tensor]:
    """The gradients of hidden and weight in float64."""
    hidden, weight, *rows = head.arguments()
    wide = weight.detach().double().requires_grad_()
    of_hidden, of_weight = [], torch.zeros_like(wide, requires_grad=False)
    for start in range(0, head.rows, _TRUTH_ROWS):
        at = slice(start, start + _TRUTH_ROWS)
        part = hidden[at].detach().double().requires_grad_()
        given = [t[at].double() if t.is_floating_point() else t[at] for t in rows]
        loss = LOSSES[head.loss](part, wide, *given) * part.shape[0] / head.rows
        found = torch.autograd.grad(loss, (part, wide))
        of_hidden.append(found[0])
        of_weight += found[1]
    return [torch.cat(of_hidden), of_weight]
