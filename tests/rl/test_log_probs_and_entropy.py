"""`log_probs_and_entropy`: values and gradients against plain torch in float64. Needs no accelerator.

The budget is the error of plain torch in the logits' own dtype plus one rounding. Sharding is first simulated in one
process, then done by two gloo ranks.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime_compile.rl import row_statistics
from slime_compile.rl.log_probs import log_probs_and_entropy
from tests.support.dispatch import Allocations, Collectives
from tests.support.ranks import on_ranks

INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Both odd, one past a power of two; so many rows that plain torch's largest error is not one lucky number.
N, V = 257, 129


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _sample(
    gen: torch.Generator, dtype: torch.dtype, offset: float = 0.0, rows: tuple[int, ...] = (N,)
) -> tuple[Tensor, Tensor]:
    logits = offset + 5 * torch.randn(*rows, V, generator=gen, dtype=torch.float64)
    target = torch.randint(0, V, rows, generator=gen)
    return logits.to(dtype), target


def _plain(
    logits: Tensor, target: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype).expand(target.shape).unsqueeze(-1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_p = (wide / temperature).log_softmax(-1)
    log_probs = log_p.gather(-1, target.long().unsqueeze(-1)).squeeze(-1)
    return log_probs, -(log_p.exp() * log_p).sum(-1)


def _with_grad(function: Any, logits: Tensor, grads: list[Tensor | None]) -> list[Tensor]:
    """[log_probs, entropy, gradient of the logits] for these gradients of the outputs."""
    leaf = logits.detach().clone().requires_grad_()
    outputs = function(leaf)
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if g is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    assert leaf.grad is not None
    return [*(output.detach() for output in outputs), leaf.grad]


def _assert_within_budget(
    results: list[Tensor], plains: list[Tensor], truths: list[Tensor]
) -> None:
    for result, plain, truth in zip(results, plains, truths, strict=True):
        assert (result.dtype, result.shape) == (plain.dtype, plain.shape)
        if (
            result.dtype == torch.float64
        ):  # the truth is no better: logits near 1000, hundreds of roundings
            torch.testing.assert_close(result, truth, rtol=1e-11, atol=1e-11)
            continue
        rounding = torch.finfo(result.dtype).eps
        error, plain_error = result.double() - truth, plain.double() - truth
        # Both round logits / temperature once, each in its own way: so much do the errors of two draws differ.
        assert _rms(error) <= 1.25 * _rms(plain_error) + rounding * _rms(truth)
        assert error.abs().max() <= 1.5 * plain_error.abs().max() + rounding * truth.abs().max()


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _check(
    logits: Tensor,
    target: Tensor,
    grads: list[Tensor | None],
    temperature: float | Tensor = 1.0,
) -> None:
    exact = temperature.double() if isinstance(temperature, Tensor) else temperature
    _assert_within_budget(
        _with_grad(
            lambda x: log_probs_and_entropy(x, target, temperature=temperature), logits, grads
        ),
        _with_grad(lambda x: _plain(x, target, temperature), logits, grads),
        _with_grad(lambda x: _plain(x, target, exact), logits.double(), grads),
    )


def _grads(gen: torch.Generator, target: Tensor) -> list[Any]:
    return [torch.randn(target.shape, generator=gen) for _ in range(2)]


# ---- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_values_and_gradients(
    gen: torch.Generator, offset: float, outputs: str, dtype: torch.dtype
) -> None:
    logits, target = _sample(gen, dtype, offset)
    grads = _grads(gen, target)
    if outputs != "both":
        grads[outputs == "log_probs"] = None
    _check(logits, target, grads)


def test_gradients_of_a_sum_are_expanded(gen: torch.Generator) -> None:
    logits, target = _sample(gen, torch.float32)
    _check(logits, target, [torch.ones(()).expand(N)] * 2)


@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (2, 1, 3)])
def test_leading_dimensions(gen: torch.Generator, rows: tuple[int, ...]) -> None:
    logits, target = _sample(gen, torch.float32, rows=rows)
    grads = _grads(gen, target)
    results = _with_grad(lambda x: log_probs_and_entropy(x, target), logits, grads)
    flat = _with_grad(
        lambda x: log_probs_and_entropy(x, target.reshape(-1)),
        logits.reshape(-1, V),
        [grad.reshape(-1) for grad in grads],
    )
    for result, expected in zip(results, flat, strict=True):
        torch.testing.assert_close(result, expected.view(result.shape), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integer_targets(gen: torch.Generator, dtype: torch.dtype) -> None:
    logits, target = _sample(gen, torch.float32)
    _check(logits, target.to(dtype), _grads(gen, target))


def test_strides(gen: torch.Generator) -> None:
    logits, target = _sample(gen, torch.float32, rows=(4, 5))
    expected = log_probs_and_entropy(logits, target)
    wide = torch.randn(5, 4, V + 3, generator=gen)
    strided = wide.transpose(0, 1)[..., 2:-1].copy_(logits).requires_grad_()
    result = log_probs_and_entropy(strided, target)
    torch.testing.assert_close(result, expected)
    (grad,) = torch.autograd.grad(sum(output.sum() for output in result), strided)
    assert grad.shape == strided.shape


@pytest.mark.parametrize("shape", [None, (), (1,), (41,), (13, 1), (13, 41)])
def test_temperature(gen: torch.Generator, shape: tuple[int, ...] | None) -> None:
    logits, target = _sample(gen, torch.float32, rows=(13, 41))
    temperature = 0.7 if shape is None else 0.5 + torch.rand(shape, generator=gen)
    _check(logits, target, _grads(gen, target), temperature)


def test_gradcheck(gen: torch.Generator) -> None:
    logits, target = _sample(gen, torch.float64, rows=(2,))
    temperature = 0.5 + torch.rand(2, generator=gen, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda x: log_probs_and_entropy(x, target, temperature=temperature),
        logits.requires_grad_(),
    )


def test_no_rows(gen: torch.Generator) -> None:
    logits = torch.randn(0, V, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, V)


def test_without_entropy(gen: torch.Generator) -> None:
    logits, target = _sample(gen, torch.float32)
    logits.requires_grad_()
    expected, _ = log_probs_and_entropy(logits, target)
    log_probs, entropy = log_probs_and_entropy(logits, target, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(log_probs.sum(), logits), torch.autograd.grad(expected.sum(), logits)
    )


def test_entropy_without_gradient(gen: torch.Generator) -> None:
    logits, target = _sample(gen, torch.float32)
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, target, entropy_grad=False)
    assert log_probs.requires_grad
    assert not entropy.requires_grad
    (log_probs * entropy).sum().backward()


def test_logits_that_need_no_gradient(gen: torch.Generator) -> None:
    logits, target = _sample(gen, torch.float32)
    log_probs, entropy = log_probs_and_entropy(logits, target)
    assert not log_probs.requires_grad
    assert not entropy.requires_grad


def test_tokens_without_probability(gen: torch.Generator) -> None:
    logits, _ = _sample(gen, torch.float32)
    _, truth = _plain(logits[:, 1::2].double(), torch.zeros(N, dtype=torch.int64))
    logits[:, ::2] = -INF
    target = torch.ones(N, dtype=torch.int64)
    target[0] = 0
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, target)
    assert log_probs[0] == -INF
    assert log_probs[1:].isfinite().all()
    torch.testing.assert_close(entropy.detach(), truth.float())
    entropy.sum().backward()
    assert (logits.grad[:, ::2] == 0).all()
    assert logits.grad.isfinite().all()


def test_rows_that_have_no_softmax_are_nan_and_masked_ones_stay_harmless() -> None:
    logits = torch.zeros(4, V)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, INF, -INF
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, torch.zeros(4, dtype=torch.int64))
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [True, True, True, False]
    (log_probs + entropy)[3].backward()
    assert (logits.grad[:3] == 0).all()


def test_the_gradient_is_the_only_tensor_of_the_logits_size() -> None:
    logits = torch.zeros(64, 1 << 10, dtype=torch.bfloat16, requires_grad=True)
    with Allocations() as made:
        log_probs, entropy = log_probs_and_entropy(logits, torch.zeros(64, dtype=torch.int64))
        (log_probs.sum() + entropy.sum()).backward()
    wide = [size for size in made.nbytes if size >= 64 * (1 << 10)]
    assert wide == [logits.numel() * 2]


# ---- what must hold -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [-1, -100, V])
def test_target_out_of_range(gen: torch.Generator, column: int) -> None:
    logits, target = _sample(gen, torch.float32)
    target[3] = column
    with pytest.raises(IndexError, match=rf"index {column} is out of bounds.*size {V}"):
        log_probs_and_entropy(logits, target)


@pytest.mark.parametrize(
    ("logits", "target", "temperature", "message"),
    [
        (torch.zeros(4, 5).int(), torch.zeros(4).int(), 1.0, "`logits` must have a floating dtype"),
        (torch.zeros(4, 0), torch.zeros(4).int(), 1.0, "`logits` must have shape [..., V], V > 0"),
        (torch.zeros(4, 5), torch.zeros(4), 1.0, "`target` must have an integer dtype"),
        (torch.zeros(4, 5), torch.zeros(3).int(), 1.0, "`target` must have shape [4], got [3]"),
        (torch.zeros(4, 5), torch.zeros(4).int(), 0.0, "`temperature` must be positive, got 0.0"),
        (
            torch.zeros(4, 5),
            torch.zeros(4).int(),
            torch.ones(4, 1),
            "`temperature` must be broadcastable to [4], got [4, 1]",
        ),
        (
            torch.zeros(4, 5),
            torch.zeros(4).int(),
            torch.ones(4, requires_grad=True),
            "`temperature` must not require grad",
        ),
        (
            torch.zeros(4, 5),
            torch.zeros(4).int(),
            torch.tensor([1.0, 1.0, -2.0, 1.0]),
            "`temperature` must be positive, got -2.0",
        ),
    ],
)
def test_refuses(logits: Tensor, target: Tensor, temperature: float | Tensor, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        log_probs_and_entropy(logits, target, temperature=temperature)
    assert message in str(raised.value)


# ---- shards, simulated --------------------------------------------------------------------------------------------

# uneven, a shard of one column, a single shard
SPLITS = [(64, 65), (1, 100, 28), (43, 43, 43), (129,)]


class _Group:
    """Stands for a process group: `_all_gather` is answered with every shard's statistics."""


def _simulate(
    monkeypatch: pytest.MonkeyPatch,
    logits: Tensor,
    target: Tensor,
    split: tuple[int, ...],
    **options: Any,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each rank's leaf, log_probs and entropy. The first round collects what the ranks send."""
    starts = [sum(split[:rank]) for rank in range(len(split))]
    leaves = [part.clone().requires_grad_() for part in logits.split(split, -1)]
    sent: list[Tensor] = []

    def collect(stats: Tensor, group: Any) -> Tensor:
        sent.append(stats)
        return stats.unsqueeze(0)

    monkeypatch.setattr(row_statistics, "_all_gather", collect)
    for leaf, start in zip(leaves, starts, strict=True):
        log_probs_and_entropy(leaf, target, group=_Group(), vocab_start=start, **options)
    everything = torch.stack(sent)
    monkeypatch.setattr(row_statistics, "_all_gather", lambda stats, group: everything)
    for leaf, start in zip(leaves, starts, strict=True):
        outputs = log_probs_and_entropy(leaf, target, group=_Group(), vocab_start=start, **options)
        yield leaf, *outputs


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_shards(
    gen: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    offset: float,
    dtype: torch.dtype,
    split: tuple[int, ...],
) -> None:
    logits, target = _sample(gen, dtype, offset)
    temperature = 0.5 + torch.rand(N, generator=gen)
    grads = _grads(gen, target)
    ranks = list(_simulate(monkeypatch, logits, target, split, temperature=temperature))
    for _, *outputs in ranks:
        torch.autograd.backward(outputs, [grad.to(outputs[0].dtype) for grad in grads])
        torch.testing.assert_close(outputs, list(ranks[0][1:]), rtol=0, atol=0)
    grad = torch.cat([leaf.grad for leaf, *_ in ranks], -1)
    results = [*(output.detach() for output in ranks[0][1:]), grad]
    _assert_within_budget(
        results,
        _with_grad(lambda x: _plain(x, target, temperature), logits, grads),
        _with_grad(lambda x: _plain(x, target, temperature.double()), logits.double(), grads),
    )


def test_shard_without_probability(gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, _ = _sample(gen, torch.float64)
    target = torch.full((N,), 2)
    expected = log_probs_and_entropy(logits[:, :64].clone(), target)
    logits[:, 64:] = -INF
    for leaf, *outputs in _simulate(monkeypatch, logits, target, (64, 65)):
        torch.testing.assert_close(tuple(outputs), expected)
        sum(output.sum() for output in outputs).backward()
        assert leaf.grad.isfinite().all()


def test_rows_without_softmax_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(3, V)
    logits[0, 3], logits[1] = torch.nan, -INF
    target = torch.tensor([1, 1, V])  # the last one is in no shard
    for _, log_probs, entropy in _simulate(monkeypatch, logits, target, (64, 65)):
        assert log_probs.isnan().tolist() == [True, True, False]
        assert entropy.isnan().tolist() == [True, True, False]
        assert log_probs[2] == -INF


# ---- two ranks ----------------------------------------------------------------------------------------------------


def _rank(rank: int) -> None:
    group = dist.group.WORLD
    gen = torch.Generator().manual_seed(0)
    logits, target = _sample(gen, torch.float32)
    grads = _grads(gen, target)
    for sizes in ([43, 86], [64, 64]):
        width = sum(sizes)
        start = None if sizes[0] == sizes[1] else rank * sizes[0]
        inside = target.clamp(max=width - 1)
        whole = _with_grad(lambda x: log_probs_and_entropy(x, inside), logits[:, :width], grads)  # noqa: B023
        shard = logits[:, :width].split(sizes, -1)[rank]
        with Collectives() as collectives:
            result = _with_grad(
                lambda x: log_probs_and_entropy(x, inside, group=group, vocab_start=start),  # noqa: B023
                shard,
                grads,
            )
        assert collectives.count == 1
        torch.testing.assert_close(result[:2], whole[:2])
        torch.testing.assert_close(result[2], whole[2].split(sizes, -1)[rank])
    # The ranks differ in everything that may not decide about a collective.
    with Collectives() as collectives:
        shard = logits[:, :64].clone().requires_grad_(rank == 0)
        log_probs, _ = log_probs_and_entropy(
            shard, target, group=group, with_entropy=rank == 0, entropy_grad=rank == 1
        )
        if rank == 0:
            log_probs.sum().backward()
        log_probs_and_entropy(shard[:0], target[:0], group=group)
    assert collectives.count == 2
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


def test_two_ranks() -> None:
    assert on_ranks(2, _rank) == [None, None]
