"""slime's loss as of slime#2011 over the real megatron-core, in a gloo group of one process.

Log-prob: clone, then Megatron's fused cross entropy. Entropy: clone, then an autograd.Function that works in place.
Skipped where megatron-core is not installed (extra `megatron`).
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slime_compile
from slime_compile.report.places import shortened
from tests.support import harness

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

ROWS, VOCAB, DRAWS = 6, 1030, 16  # just above the default min_vocab
OPTIONS = {"inner": "aot_eager", "strict": True}


class Entropy(torch.autograd.Function):
    """Exponentials and softmax in the buffer that was handed over, which the gradient then reuses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        peak = logits.max(dim=-1, keepdim=True).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        weights = (logits - peak).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax = weights.div_(total)
        expected = (softmax * logits).sum(dim=-1, keepdim=True)
        dist.all_reduce(expected, group=group)
        ctx.save_for_backward(logits, softmax, expected)
        return (peak + total.log() - expected).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, softmax, expected = ctx.saved_tensors
        logits.sub_(expected)
        softmax.mul_(logits).mul_(grad.unsqueeze(-1).neg())
        return softmax, None


def log_probs_and_entropy(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    log_prob = -fused_vocab_parallel_cross_entropy(
        logits.clone().unsqueeze(1), target.unsqueeze(1), group
    )
    return log_prob.squeeze(1), Entropy.apply(logits.clone(), group)


def policy_loss(
    logits: Tensor, target: Tensor, old: Tensor, advantage: Tensor, group: dist.ProcessGroup
) -> Tensor:
    log_prob, entropy = log_probs_and_entropy(logits, target, group)
    return clipped_loss(log_prob, entropy, old, advantage)


def plain_policy_loss(logits: Tensor, target: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The truth, in float64: Megatron's own backward rounds to bf16 whatever it is given."""
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return clipped_loss(log_probs.gather(-1, target[:, None])[:, 0], entropy, old, advantage)


def clipped_loss(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean() - 0.01 * entropy.mean()


@pytest.fixture
def group() -> dist.ProcessGroup:
    harness.world()
    torch._dynamo.reset()
    return dist.group.WORLD


def data(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=draw)
    target = torch.randint(VOCAB, (ROWS,), generator=draw)
    old = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    drift = torch.randn(ROWS, generator=draw) / 4
    advantage = torch.randn(ROWS, generator=draw)
    return logits.to(dtype).requires_grad_(), target, old + drift, advantage


def gradient(fn: Any, logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    loss = fn(leaf * 1, *rest)  # what a model hands over is no leaf
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph_with_nothing_wide_but_logits_and_gradient(
    dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    fn = torch.compile(policy_loss, backend="slime_fused", options=OPTIONS, fullgraph=True)
    earlier = len(slime_compile.reports())
    pools = {"loss": harness.Pool(), "gradient": harness.Pool()}
    for seed in range(DRAWS):
        logits, *rest = data(dtype, seed)
        got = gradient(fn, logits, *rest, group)
        with torch.compiler.set_stance("force_eager"):  # Megatron compiles its own pieces
            eager = gradient(policy_loss, logits, *rest, group)
        true = gradient(plain_policy_loss, logits.double(), *harness.to_float64(rest))
        for pool, actual, plain, wanted in zip(pools.values(), got, eager, true, strict=True):
            pool.add(actual, plain, wanted)
        if dtype is torch.float32:
            # 40 eps: a log-prob of -20, twice; eager, rounded to bf16, is off by 4e-4
            assert (got[1] - true[1]).abs().max() < 5e-6 * true[1].abs().max()
    for what, pool in pools.items():
        pool.check(what)
    (report,) = slime_compile.reports()[earlier:]
    found = report.to_dict()
    assert (found["fused"], found["wide_after"]) == (2, 0), f"{report}"
    assert found["wide_before"] > 10


def test_report_says_which_precision_is_kept_for_the_bf16_gradient(
    group: dist.ProcessGroup,
) -> None:
    """Megatron rounds its gradient to bf16, fp32 logits or not; the rewrite does not, and says so."""
    logits, *rest = data(torch.float32)
    report = slime_compile.explain(policy_loss, **OPTIONS)(logits * 1, *rest, group)
    notes = report.to_dict()["graphs"][0]["notes"]
    assert any("bfloat16" in note and "float32" in note for note in notes), notes
    assert all(shortened(note) in str(report) for note in notes)
