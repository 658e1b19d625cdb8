"""What a rank alone knows decides nothing about what it exchanges: NOTE [The same on all ranks].

One process stands for a rank of two. Nothing is sent: compared is what each would send, and how it is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Graph

from fx_passes import pipeline
from fx_passes.graph.operators import is_collective
from slime_compile.backend import check_ranks
from tests.cases.shards import LOSSES, Combined, CrossEntropy, Entropy, Outputs, Shard
from tests.support.ranks import own_copy

LEAST = 64
fuse_module = sys.modules["fx_passes.fuse"]  # the package has a function of that name
ROWS, BATCH = 48, 2
Loss = Callable[[Shard, Tensor, Tensor], Outputs]


@pytest.fixture(scope="module", autouse=True)
def one_of_two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # the spellings' group of one rank, which they make again
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each graph that is compiled exchanges: every value, and the sizes of what is sent."""
    found: list[list[str]] = []

    def keep(graph: Graph, name: str) -> str:
        group = dist.group.WORLD.group_name
        sizes = [n.args[0].meta["val"].shape for n in graph.nodes if is_collective(n)]  # type: ignore[union-attr]
        found.append([*check_ranks.describe(graph, group), *map(str, sizes)])
        return ""

    monkeypatch.setattr(check_ranks, "check", keep)
    return found


def exchanged(sent: list[list[str]], fn: Loss, width: int, **rank: Any) -> list[str]:
    """What a rank with `width` columns sends for `fn`; `rank` is what else it alone has."""
    torch._dynamo.reset()
    start, gradient = rank.pop("start", 0), rank.pop("gradient", True)
    shard = Shard(start, start + width, dist.group.WORLD)

    def loss(logits: Tensor, target: Tensor) -> Outputs:
        return fn(shard, logits, target)

    options = {"inner": "aot_eager", "min_vocab": LEAST, "check_ranks": True, "strict": True}
    compiled = torch.compile(own_copy(loss), backend="slime_fused", options=options | rank)
    logits = torch.randn(BATCH * ROWS, width, requires_grad=gradient)
    compiled(logits * 1, torch.zeros(BATCH * ROWS, dtype=torch.long))
    forward = sent.copy()
    sent.clear()
    (lines,) = forward
    return lines


def batched(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """Rows in two dimensions, of which the last is as large as some shards are wide."""
    logits, target = logits.view(BATCH, ROWS, -1), target.view(BATCH, ROWS)
    peak = logits.detach().amax(-1)
    dist.all_reduce(peak, dist.ReduceOp.MAX, shard.group)
    shifted = logits - peak[..., None]
    total = shifted.exp().sum(-1)
    dist.all_reduce(total, group=shard.group)
    picked = shifted.gather(-1, target[..., None])[..., 0] * (target < shard.stop)
    dist.all_reduce(picked, group=shard.group)
    return (picked - total.log(),)


class InPlace(torch.autograd.Function):
    """Megatron's kind, in the logits themselves: they are left as their softmax, or without their peak."""

    @staticmethod
    def forward(ctx, logits, target, shard, softmax):  # type: ignore[no-untyped-def]
        peak = logits.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
        logits -= peak[:, None]
        picked = logits.gather(-1, target[:, None])[:, 0]
        exponentials = logits.exp_() if softmax else logits.exp()
        total = exponentials.sum(-1)
        dist.all_reduce(picked, group=shard.group)
        dist.all_reduce(total, group=shard.group)
        if softmax:
            logits.div_(total[:, None])
        ctx.softmax = softmax
        ctx.save_for_backward(logits, total, target)
        return total.log() - picked

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        logits, total, target = ctx.saved_tensors
        probs = logits if ctx.softmax else logits.exp() / total[:, None]
        hit = torch.zeros_like(probs).scatter(-1, target[:, None], 1.0)
        return (probs - hit) * grad[:, None], None, None, None


def left_as_softmax(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    return (InPlace.apply(logits, target, shard, True),)


def left_without_a_peak(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    return (InPlace.apply(logits, target, shard, False),)


def read_again(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """Logits that an entropy reads, before a cross entropy changes them."""
    entropy = Entropy.apply(logits.clone(), shard)
    return InPlace.apply(logits, target, shard, True), entropy


def two_heads(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """The matmul that makes the logits stands there twice."""
    weight = torch.eye(logits.shape[-1])
    first, second = logits @ weight, logits @ weight
    return -CrossEntropy.apply(first.clone(), target, shard), Entropy.apply(second, shard)


def some_rows(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    logits = logits @ torch.eye(logits.shape[-1])
    return (*LOSSES["log_probs_and_entropy"](shard, logits[3:40], target[3:40]),)


def changed(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """Logits that are divided in place before they are read."""
    return LOSSES["log_probs_and_entropy"](shard, logits.mul(2).div_(0.7), target)


def divided(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
    """Given logits that autograd sees divided in place."""
    return LOSSES["log_probs_and_entropy"](shard, logits.div_(0.7), target)


PROGRAMS: dict[str, Loss] = {
    **LOSSES,
    **{
        fn.__name__: fn
        for fn in (
            batched,
            two_heads,
            some_rows,
            changed,
            left_as_softmax,
            left_without_a_peak,
            read_again,
            divided,
        )
    },
}
ALONE: dict[str, dict[str, Any]] = {
    "the widest": {"width": 200},
    "just a vocabulary": {"width": LEAST},
    "just none": {"width": LEAST - 1, "start": LEAST},
    "as many columns as rows": {"width": ROWS},
    "as many columns as all rows": {"width": BATCH * ROWS},
    "as many columns as a batch": {"width": BATCH},
    "as many columns as rows in a chunk": {"width": 24},
    "as many columns as ranks, and other logits": {"width": 2, "start": 200},
    "no gradient": {"width": 200, "gradient": False},
    "a narrow shard without a gradient": {"width": 40, "gradient": False},
    "another min_vocab": {"width": 200, "min_vocab": 1024},
    "save": {"width": 200, "save": "softmax"},
    "verify": {"width": 40, "verify": True},
    "lm_head": {"width": 40, "lm_head": False},
    "chunk_mib": {"width": 200, "chunk_mib": 1},
    "grad_in_forward": {"width": 200, "grad_in_forward": "never"},
    "consume_logits": {"width": 40, "consume_logits": True},
}


COMMON: dict[str, list[str]] = {}


EACH_TIME = ("log_probs_and_entropy", "batched", "read_again", "two_heads")


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in EACH_TIME else pytest.mark.thorough) for n in PROGRAMS],
)
def test_ranks_send_the_same(name: str, alone: str, sent: list[list[str]]) -> None:
    if name not in COMMON:
        COMMON[name] = exchanged(sent, PROGRAMS[name], 100)
    if (name, alone) == ("some_rows", "lm_head"):
        pytest.skip(
            "ranks must share lm_head where rows of a head are selected: it says how many are sent"
        )
    assert exchanged(sent, PROGRAMS[name], **ALONE[alone]) == COMMON[name]


@pytest.mark.parametrize("width", [0, 1])
def test_a_shard_of_less_than_two_columns_is_an_error(width: int, sent: list[list[str]]) -> None:
    def norms(shard: Shard, logits: Tensor, target: Tensor) -> Outputs:
        return (Combined.apply(logits.logsumexp(-1), shard),)

    with pytest.raises(BackendCompilerFailed, match=f"two columns or more.*has {width}"):
        exchanged(sent, norms, width)
    exchanged(sent, norms, width, merge_collectives=False)


def test_a_mismatch_that_one_rank_finds_is_an_error(
    sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_module, "mismatch", lambda *_: "values differ")
    for strict in (True, False):
        with pytest.raises(BackendCompilerFailed, match="other ranks may not see it"):
            exchanged(sent, LOSSES["log_probs_and_entropy"], 100, verify=True, strict=strict)


@pytest.mark.filterwarnings("ignore")
def test_a_pass_that_raises_on_one_rank(
    sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After fusing it is taken back alone."""
    common = exchanged(sent, LOSSES["log_probs_and_entropy"], 100)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "use_whole_logits", fails)
    assert exchanged(sent, LOSSES["log_probs_and_entropy"], 100, strict=False) == common
