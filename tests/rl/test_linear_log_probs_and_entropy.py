"""`linear_log_probs_and_entropy`: values and gradients against plain torch in float64, one chunk of logits.

The budget is the error of plain torch in the same dtype, which has all logits, plus one rounding. Sharding is done by
two gloo ranks; how shards' statistics are put together is tested in `test_log_probs_and_entropy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.measure.measure import profiled_peak
from fx_passes.rows import chunks
from slime_compile.ops import native, torch_calls
from slime_compile.rl.linear_log_probs import (
    linear_log_probs_and_entropy,
    log_probs_entropy_and_hits,
)
from slime_compile.rl.log_probs import log_probs_and_entropy
from tests.support.dispatch import Collectives
from tests.support.harness import no_worse_than_eager
from tests.support.ranks import on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
N, V, D = (
    257,
    130,
    12,
)  # so many rows that plain torch's largest error is not one lucky number; two even shards


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighths of the logits, however few there are; and narrow ones are allowed."""
    monkeypatch.setattr(chunks, "MIN_BYTES", 1)
    monkeypatch.setattr(chunks, "COLUMNS_MIN", 1)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _sample(
    gen: torch.Generator,
    dtype: torch.dtype,
    rows: Sequence[int] = (N,),
    with_bias: bool = True,
) -> tuple[list[Tensor], Tensor]:
    head = [torch.randn(*rows, D, generator=gen), torch.randn(V, D, generator=gen)]
    if with_bias:
        head.append(torch.randn(V, generator=gen))
    return [each.to(dtype) for each in head], torch.randint(0, V, tuple(rows), generator=gen)


def _plain(head: Sequence[Tensor], target: Tensor, temperature: float | Tensor) -> list[Tensor]:
    logits = F.linear(*head)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if isinstance(temperature, Tensor):
        temperature = temperature.to(wide.dtype).expand(target.shape).unsqueeze(-1)
    log_p = (wide / temperature).log_softmax(-1)
    log_probs = log_p.gather(-1, target.long().unsqueeze(-1)).squeeze(-1)
    return [log_probs, -(log_p.exp() * log_p).sum(-1)]


def _ours(head: Sequence[Tensor], target: Tensor, temperature: float | Tensor) -> list[Tensor]:
    hidden, weight, *bias = head
    made = linear_log_probs_and_entropy(
        hidden, weight, target, bias[0] if bias else None, temperature=temperature
    )
    assert made[1] is not None
    return list(made)


def _with_grads(
    function: Callable[..., list[Tensor]],
    head: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    *rest: Any,
) -> list[Tensor]:
    """Outputs, then gradients of hidden, weight, bias."""
    leaves = [each.detach().clone().requires_grad_() for each in head]
    outputs = function(leaves, *rest)
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if g is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return [*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves)]


def _check(
    head: Sequence[Tensor],
    target: Tensor,
    grads: Sequence[Tensor | None],
    temperature: float | Tensor = 1.0,
) -> None:
    exact = temperature.double() if isinstance(temperature, Tensor) else temperature
    wide = [each.double() for each in head]
    mine = _with_grads(_ours, head, grads, target, temperature)
    eager = _with_grads(_plain, head, grads, target, temperature)
    truth = _with_grads(_plain, wide, grads, target, exact)
    names = ["log_probs", "entropy", "grad_hidden", "grad_weight", "grad_bias"]
    for name, ours, plain, true in zip(names, mine, eager, truth, strict=False):
        assert ours.dtype == plain.dtype, name
        if ours.dtype == torch.float64:  # the truth is no better: sums of hundreds of terms
            torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12, msg=name)
        else:
            no_worse_than_eager(ours, plain, true, plain.dtype, name)


def _grads(gen: torch.Generator, target: Tensor) -> list[Any]:
    return [torch.randn(target.shape, generator=gen) for _ in range(2)]


# ---- values and gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients(
    gen: torch.Generator, with_bias: bool, outputs: str, dtype: torch.dtype
) -> None:
    head, target = _sample(gen, dtype, with_bias=with_bias)
    grads = _grads(gen, target)
    if outputs != "both":
        grads[outputs == "log_probs"] = None
    _check(head, target, grads)


@pytest.mark.parametrize("shape", [None, (), (41,), (13, 1), (13, 41)])
def test_temperature(gen: torch.Generator, shape: tuple[int, ...] | None) -> None:
    head, target = _sample(gen, torch.float32, rows=(13, 41))
    temperature = 0.7 if shape is None else 0.5 + torch.rand(shape, generator=gen)
    _check(head, target, _grads(gen, target), temperature)


@pytest.mark.parametrize("rows", [(), (1,), (2, 1, 3)])
def test_leading_dimensions(gen: torch.Generator, rows: tuple[int, ...]) -> None:
    head, target = _sample(gen, torch.float32, rows=rows)
    _check(head, target, _grads(gen, target))


def test_no_rows(gen: torch.Generator) -> None:
    (hidden, weight, bias), target = _sample(gen, torch.float32, rows=(0,))
    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, target, bias)
    assert entropy is not None
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
    assert all((leaf.grad == 0).all() for leaf in leaves)


def test_strides(gen: torch.Generator) -> None:
    """Hidden as a model with the sequence first has it, a weight that was turned."""
    (hidden, weight), target = _sample(gen, torch.float32, rows=(4, 5), with_bias=False)
    turned = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    other = weight.t().contiguous().t()
    assert not turned.is_contiguous()
    assert not other.is_contiguous()
    mine, want = (
        _with_grads(_ours, head, _grads(gen.manual_seed(1), target), target, 1.0)
        for head in ([turned, other], [hidden, weight])
    )
    torch.testing.assert_close(mine, want)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_what_requires_grad(gen: torch.Generator, frozen: int) -> None:
    head, target = _sample(gen, torch.float32)
    every = _with_grads(_ours, head, [torch.ones(N), None], target, 1.0)
    leaves = [each.requires_grad_(place != frozen) for place, each in enumerate(head)]
    _ours(leaves, target, 1.0)[0].sum().backward()
    for place, leaf in enumerate(leaves):
        if place == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, every[2 + place])


def test_entropies_are_left_out(gen: torch.Generator) -> None:
    (hidden, weight, bias), target = _sample(gen, torch.float32)
    hidden.requires_grad_()
    log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, target, bias)
    alone, none = linear_log_probs_and_entropy(hidden, weight, target, bias, with_entropy=False)
    assert none is None
    torch.testing.assert_close(alone, log_probs, rtol=0, atol=0)
    _, fixed = linear_log_probs_and_entropy(hidden, weight, target, bias, entropy_grad=False)
    assert fixed is not None
    assert not fixed.requires_grad
    torch.testing.assert_close(fixed, entropy.detach(), rtol=0, atol=0)


def test_without_gradients(gen: torch.Generator) -> None:
    (hidden, weight, bias), target = _sample(gen, torch.float32)
    weight.requires_grad_()
    with torch.no_grad():
        log_probs, _ = linear_log_probs_and_entropy(hidden, weight, target, bias)
    assert not log_probs.requires_grad


@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gradcheck(fast_mode: bool, gen: torch.Generator) -> None:
    head, target = _sample(gen, torch.float64, rows=(3,))
    leaves = [each.requires_grad_() for each in head]
    torch.autograd.gradcheck(lambda *of: tuple(_ours(of, target, 0.7)), leaves, fast_mode=fast_mode)


def test_autocast(gen: torch.Generator) -> None:
    """The logits are those of autocast's `F.linear`; the gradients have the dtypes of what was given."""
    head, target = _sample(gen, torch.float32)
    rounded = [each.bfloat16() for each in head]
    grads = _grads(gen, target)
    want = _with_grads(_ours, rounded, grads, target, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = _with_grads(_ours, head, grads, target, 1.0)
        logits = F.linear(*head)
    assert logits.dtype == torch.bfloat16
    for mine, expected in zip(found, want, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, expected.float(), rtol=0, atol=0)


def test_special_rows_are_those_of_the_logits(gen: torch.Generator) -> None:
    """A token without probability, a row without a softmax, a masked row with NaN in it."""
    hidden, weight = torch.randn(4, D, generator=gen), torch.randn(V, D, generator=gen)
    bias = torch.zeros(V)
    bias[::2] = -torch.inf
    hidden[1] = torch.nan
    hidden.requires_grad_()
    target = torch.tensor([1, 1, 0, 3])
    mine = linear_log_probs_and_entropy(hidden, weight, target, bias)
    want = log_probs_and_entropy(F.linear(hidden, weight, bias), target)
    torch.testing.assert_close(mine, want, equal_nan=True)
    assert mine[0][1].isnan()
    assert mine[0][2] == -torch.inf
    mine[0][3].backward()
    assert (hidden.grad[:3] == 0).all()


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_of_logits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth (of fewer rows a quarter), what the gradients take, and a few numbers per row."""
    rows, vocab, width = 4096, 4096, 16
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", 4 * vocab)  # of the CPU without a compiler
    hidden = torch.randn(rows, width, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, dtype=dtype).requires_grad_()
    target = torch.randint(vocab, (rows,))

    def step() -> None:
        log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, target)
        assert entropy is not None
        torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))

    step()
    logits = rows * vocab * dtype.itemsize
    gradients = (rows + vocab) * width * dtype.itemsize
    summed = 0 if dtype.itemsize == 4 else min(rows, vocab) * width * 4
    scratch = 0 if native.functions() is not None else 2 * 4 * vocab * 4
    matmul = 400_000 if dtype.itemsize == 2 else 0  # of bfloat16 on a CPU, whatever its size
    per_row = rows * 200  # statistics, coefficients, their stacks
    assert profiled_peak(step) <= logits / 8 + gradients + summed + scratch + matmul + per_row
    assert profiled_peak(step) < logits


# ---- what must hold -----------------------------------------------------------------------------------------------

H, W, T = torch.zeros(4, D), torch.zeros(V, D), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((H.int(), W, T), "`hidden` must have a floating dtype, got torch.int32"),
        ((torch.zeros(()), W, T), "`hidden` must have shape [..., D], D > 0, got []"),
        ((H[:, :0], W[:, :0], T), "`hidden` must have shape [..., D], D > 0, got [4, 0]"),
        ((H, W.t(), T), f"`weight` must have shape [V, {D}], V > 0, got [{D}, {V}]"),
        ((H, W[:0], T), f"`weight` must have shape [V, {D}], V > 0, got [0, {D}]"),
        ((H, W, T, torch.zeros(V - 1)), f"`bias` must have shape [{V}], got [{V - 1}]"),
        (
            (H, W.bfloat16(), T),
            "`weight` must have the dtype and device of `hidden`, torch.float32 on cpu, got torch.bfloat16 on cpu; cast",
        ),
        (
            (H, W, T, torch.zeros(V, device="meta")),
            "`bias` must have the dtype and device of `hidden`",
        ),
        ((H, W, T[:3]), "`target` must have shape [4], got [3]"),
        ((H, W, T.float()), "`target` must have an integer dtype"),
        ((H, W, T, None, None, 0.0), "`temperature` must be positive, got 0.0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        linear_log_probs_and_entropy(*arguments)
    assert message in str(raised.value)


def test_target_out_of_range() -> None:
    with pytest.raises(
        IndexError, match=rf"index {V} is out of bounds for the first dim.*`weight`"
    ):
        linear_log_probs_and_entropy(H, W, T + V)


def test_ignored_targets(gen: torch.Generator) -> None:
    """Log-prob 0 without a gradient, no hit; entropies as of any token."""
    head, target = _sample(gen, torch.float64)
    ignored = torch.rand(N, generator=gen) < 0.3
    target = target.masked_fill(ignored, -100)
    head = [each.requires_grad_() for each in head]
    log_probs, entropy, hits = log_probs_entropy_and_hits(
        *head[:2], target, head[2], ignore_index=-100
    )
    logits = F.linear(*head)
    wanted = -F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
    plain = logits.log_softmax(-1)
    torch.testing.assert_close(log_probs, wanted)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1))
    assert torch.equal(hits, (logits.argmax(-1) == target))
    weights = torch.randn(N, generator=gen, dtype=torch.float64)
    mine = torch.autograd.grad((log_probs * weights).sum(), head)
    torch.testing.assert_close(mine, torch.autograd.grad((wanted * weights).sum(), head))
    with pytest.raises(IndexError):
        linear_log_probs_and_entropy(*head[:2], target)


def test_weight_without_memory() -> None:
    """As FSDP leaves it when it has sharded the parameter again."""
    freed = torch.zeros(V, D)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"`weight` must have memory.*reshard_after_forward"):
        linear_log_probs_and_entropy(H, freed, T)


# ---- two ranks ----------------------------------------------------------------------------------------------------


def _rank(rank: int) -> None:
    chunks.MIN_BYTES = 1
    group = dist.group.WORLD
    assert group is not None
    gen = torch.Generator().manual_seed(0)
    head, target = _sample(gen, torch.float32)
    grads = _grads(gen, target)
    whole = _with_grads(_ours, head, grads, target, 0.7)
    hidden, weight, bias = head
    for sizes in ([65, 65], [30, 100]):
        start = None if sizes[0] == sizes[1] else rank * sizes[0]
        shard = [hidden, *(each.split(sizes)[rank] for each in (weight, bias))]
        for summed in (True, False):

            def ours(of: Sequence[Tensor]) -> list[Any]:
                options = {"vocab_start": start, "sum_hidden_grad": summed}  # noqa: B023
                return list(
                    linear_log_probs_and_entropy(*of[:2], target, of[2], group, 0.7, **options)
                )

            with Collectives() as collectives:
                result = _with_grads(ours, shard, grads)
            assert collectives.count == 1 + summed
            if not summed:
                dist.all_reduce(result[2])
            torch.testing.assert_close(result[:3], whole[:3])
            for mine, want in zip(result[3:], whole[3:], strict=True):
                torch.testing.assert_close(mine, want.split(sizes)[rank])


def test_two_ranks() -> None:
    for answer in on_ranks(2, _rank):
        if isinstance(answer, Exception):
            raise answer


@pytest.mark.parametrize("dtype", DTYPES)
def test_hits(dtype: torch.dtype, gen: torch.Generator) -> None:
    """Targets that are the largest, alone or beside an equal one, are hits; others and rows of NaN are not."""
    (hidden, weight), target = _sample(gen, dtype, with_bias=False)
    weight[5] = weight[4]
    logits = F.linear(hidden, weight)
    largest = logits.argmax(-1)
    target = torch.where(torch.arange(N) % 2 == 0, largest, target)
    target = torch.where(largest == 4, 5, target)
    hidden[-1] = torch.nan
    *_, hits = log_probs_entropy_and_hits(hidden, weight, target, temperature=0.7)
    picked = F.linear(hidden, weight).gather(-1, target[:, None]).squeeze(-1)
    want = picked == F.linear(hidden, weight).amax(-1)
    assert hits.dtype == torch.bool
    assert torch.equal(hits, want)
    assert want[largest == 4][:-1].all()
    assert not want.all()
    assert not hits[-1]
