"""Packed micro-batches: targets and response rows against a layout built sample by sample."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import slime_compile
from slime_compile.rl.memory_probe import memory_probe
from slime_compile.rl.packed import (
    flatten_logits,
    join_responses,
    packed_log_probs,
    response_rows,
    response_slices,
    row_temperature,
    shifted_targets,
    split_response_rows,
    split_responses,
)
from slime_compile.rl.packing import Packing

VOCAB = 11  # any: nothing here depends on it
LAYOUTS = [
    ("thd", "none", 1),
    ("thd", "zigzag", 2),
    ("thd", "zigzag", 3),
    ("thd", "all_gather", 2),
    ("thd", "all_gather", 3),
    ("bshd", "none", 1),
    ("bshd", "zigzag", 2),
]

Place = tuple[int, int] | None  # sample and position; None for padding


def places(packing: Packing) -> list[Place]:
    """What each row of a rank holds, by padding, concatenating and cutting lists of places."""
    ranks, rank = packing.cp_size, packing.cp_rank
    samples: list[list[Place]] = [
        [(sample, position) for position in range(total)]
        for sample, total in enumerate(packing.total_lengths)
    ]
    if packing.padded_length is not None:
        samples = [pad(sample, packing.padded_length) for sample in samples]
    if packing.context_parallel == "zigzag":
        samples = [zigzag(sample, ranks, rank) for sample in samples]
    rows = list(itertools.chain.from_iterable(samples))
    if packing.context_parallel == "all_gather":
        rows = pad(rows, packing.local_rows * ranks)
        return rows[rank * packing.local_rows : (rank + 1) * packing.local_rows]
    return pad(rows, packing.local_rows)


def pad(rows: list[Place], length: int) -> list[Place]:
    return rows + [None] * (length - len(rows))


def zigzag(sample: list[Place], ranks: int, rank: int) -> list[Place]:
    chunk = -(-len(sample) // (2 * ranks))
    sample = pad(sample, 2 * ranks * chunk)
    chunks = [sample[i * chunk : (i + 1) * chunk] for i in range(2 * ranks)]
    return chunks[rank] + chunks[2 * ranks - 1 - rank]


@st.composite
def packings(draw: st.DrawFn) -> list[Packing]:
    """One micro-batch, as every rank of its context-parallel group sees it."""
    format, context_parallel, ranks = draw(st.sampled_from(LAYOUTS))
    totals = draw(st.lists(st.integers(1, 13), min_size=1, max_size=5))
    responses = [draw(st.integers(0, total - 1)) for total in totals]
    packing = Packing(
        totals,
        responses,
        format=format,
        context_parallel=context_parallel,
        cp_size=ranks,
        padded_length=max(totals) + draw(st.integers(0, 3)) if format == "bshd" else None,
    )
    if format == "thd":
        packing = replace(packing, rows=packing.local_rows + draw(st.integers(0, 4)))
    return [replace(packing, cp_rank=rank) for rank in range(ranks)]


def tokens_of(packing: Packing) -> list[Tensor]:
    """Different tokens at different places, so that a wrong place shows."""
    starts = itertools.accumulate(packing.total_lengths, initial=1)
    return [
        torch.arange(start, start + total)
        for start, total in zip(starts, packing.total_lengths, strict=False)
    ]


@given(packings())
@settings(max_examples=150)
def test_rows_against_the_layout(ranks: list[Packing]) -> None:
    seen: dict[tuple[int, int], int] = {}
    for packing in ranks:
        rows = places(packing)
        tokens = tokens_of(packing)
        expected = [
            tokens[place[0]][place[1] + 1].item()
            if place is not None and place[1] + 1 < packing.total_lengths[place[0]]
            else -100
            for place in rows
        ]
        assert len(rows) == packing.local_rows
        assert shifted_targets(tokens, packing, fill=-100).tolist() == expected
        for sample, parts in enumerate(response_slices(packing)):
            first = packing.total_lengths[sample] - packing.response_lengths[sample] - 1
            for part in parts:
                covered = range(part.rows.start, part.rows.stop)
                response = range(part.response.start, part.response.stop)
                assert len(covered) == len(response) > 0
                for row, token in zip(covered, response, strict=True):
                    assert rows[row] == (sample, first + token)
                    assert (sample, token) not in seen
                    seen[sample, token] = row
    assert set(seen) == {
        (sample, token)
        for sample, response in enumerate(ranks[0].response_lengths)
        for token in range(response)
    }


@given(packings())
@settings(max_examples=50)
def test_join_is_the_inverse_of_split(ranks: list[Packing]) -> None:
    for packing in ranks:
        values = torch.arange(1.0, packing.local_rows + 1, dtype=torch.float64)
        samples = split_responses(values, packing)
        joined = join_responses(samples, packing, fill=-1.0)
        mask = join_responses([torch.ones_like(s) for s in samples], packing) == 1
        assert mask.sum() == sum(len(sample) for sample in samples)
        assert torch.equal(joined, torch.where(mask, values, -1.0))


def per_sample_log_probs(
    logits: list[Tensor], tokens: list[Tensor], packing: Packing, temperature: list[float]
) -> list[Tensor]:
    """The old way: each whole sample's logits, one response token after another."""
    result = []
    for sample, total in enumerate(packing.total_lengths):
        first = total - packing.response_lengths[sample]
        result.append(
            torch.stack(
                [logits[sample].new_zeros(())]
                + [
                    (logits[sample][token - 1] / temperature[sample]).log_softmax(-1)[
                        tokens[sample][token]
                    ]
                    for token in range(first, total)
                ]
            )[1:]
        )
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, [0.5, 1.0, 1.7, 2.0]])
def test_log_probs_of_all_rows_at_once(
    layout: tuple[str, str, int], temperature: float | list[float]
) -> None:
    """Values and gradients of the packed way are the per-sample ones', temperature included."""
    format, context_parallel, cp_size = layout
    totals, responses = [9, 2, 7, 4], [5, 1, 6, 0]  # longest prompt 4, one token, no prompt, none
    packing = Packing(
        totals,
        responses,
        format=format,
        context_parallel=context_parallel,
        cp_size=cp_size,
        padded_length=10 if format == "bshd" else None,
    )
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(t, VOCAB, dtype=torch.float64, generator=generator) for t in totals]
    tokens = [torch.randint(VOCAB, (t,), generator=generator) for t in totals]
    each = temperature if isinstance(temperature, list) else [temperature] * len(totals)
    leaves = [logits.clone().requires_grad_() for logits in full]
    expected = per_sample_log_probs(leaves, tokens, packing, each)
    weights = [torch.rand(r, dtype=torch.float64, generator=generator) for r in responses]
    torch.stack([(e * w).sum() for e, w in zip(expected, weights, strict=True)]).sum().backward()

    got = [torch.full((r,), torch.nan, dtype=torch.float64) for r in responses]
    got_grad = [torch.zeros_like(logits) for logits in full]
    for rank in range(cp_size):
        here = replace(packing, cp_rank=rank)
        rows = [
            full[place[0]][place[1]] if place else torch.ones(VOCAB, dtype=torch.float64)
            for place in places(here)
        ]
        logits = torch.stack(rows).requires_grad_()
        shaped = logits.view(len(totals), -1, VOCAB) if format == "bshd" else logits[None]
        samples, _ = packed_log_probs(shaped, tokens, here, temperature=temperature)
        loss = logits.new_zeros(())
        for sample, parts in enumerate(response_slices(here)):
            places_here = [i for p in parts for i in range(p.response.start, p.response.stop)]
            got[sample][places_here] = samples[sample].detach()
            loss = loss + (samples[sample] * weights[sample][places_here]).sum()
        loss.backward()
        assert logits.grad is not None
        for row, place in enumerate(places(here)):
            if place:
                got_grad[place[0]][place[1]] += logits.grad[row]
            else:
                assert not logits.grad[row].any()
    for sample in range(len(totals)):
        # float64 rows of 11 numbers of size 1: a few roundings of 1e-16
        torch.testing.assert_close(got[sample], expected[sample].detach(), rtol=0, atol=1e-14)
        reference = leaves[sample].grad
        assert reference is not None or responses[sample] == 0
        reference = torch.zeros_like(full[sample]) if reference is None else reference
        torch.testing.assert_close(got_grad[sample], reference, rtol=0, atol=1e-14)


# The old way against the packed way, compiled: a real vocabulary, so that the pass looks at it.
WIDE = 2048
LONG = Packing([400, 300, 260, 64], [300, 100, 200, 48])  # 1024 rows, 8 MiB of float32 logits
TEMPERATURE = 0.8


def loss_of_rows(rows: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted log-probs and entropies; `[N, V]`, `[N]`, `[N]` to one number."""
    log_probs = (rows / TEMPERATURE).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    taken = log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return -(weight * (taken + 0.1 * entropy)).sum()


def loss_of_samples(logits: Tensor, tokens: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Sample by sample from `[1, T, V]`: cut out the rows, then the same."""
    loss, end = logits.new_zeros(()), 0
    for sample, (total, response) in enumerate(
        zip(LONG.total_lengths, LONG.response_lengths, strict=True)
    ):
        end += total
        rows = logits[0, end - response - 1 : end - 1]
        loss = loss + loss_of_rows(rows, tokens[sample][-response:], weights[sample])
    return loss


def peak_and_gradient(loss: Callable[[Tensor], Tensor]) -> tuple[int, Tensor]:
    """Bytes of forward and backward, logits included; they are made of a scalar leaf."""
    generator = torch.Generator().manual_seed(1)
    base = 3 * torch.randn(1, LONG.local_rows, WIDE, generator=generator)
    for _ in range(2):  # the first call compiles
        with memory_probe("loss", enabled=True, device="cpu", log=lambda line: None) as probe:
            logits = base + torch.zeros((), requires_grad=True)
            gradients: list[Tensor] = []
            logits.register_hook(gradients.append)  # retain_grad would copy it
            loss(logits).backward()
    assert probe.record is not None
    assert probe.record.peak_allocated is not None
    return probe.record.peak_allocated, gradients[0]


def test_sample_by_sample_is_as_cheap_as_packed() -> None:
    """Under the backend a loop over samples has the packed way's peak, and one pass for all gradients."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(WIDE, (total,), generator=generator) for total in LONG.total_lengths]
    weights = [torch.randn(r, generator=generator) / r for r in LONG.response_lengths]
    target, weight = shifted_targets(tokens, LONG), join_responses(weights, LONG)
    options = {"inner": "aot_eager", "strict": True}
    compiled_packed, compiled_loop = (
        torch.compile(function, backend="slime_fused", fullgraph=True, options=options)
        for function in (loss_of_rows, loss_of_samples)
    )
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "packed": lambda logits: compiled_packed(flatten_logits(logits, LONG), target, weight),
        "loop": lambda logits: compiled_loop(logits, tokens, weights),
        "eager loop": lambda logits: loss_of_samples(logits, tokens, weights),
    }
    known = len(slime_compile.reports())
    peaks, gradients = zip(*map(peak_and_gradient, ways.values()), strict=True)
    packed_peak, loop_peak, eager_peak = peaks

    logits_bytes = LONG.local_rows * WIDE * 4
    # of the operators on the CPU without a compiler, which copy the rows that have a gradient (torch_calls.py)
    scratch_bytes = 6 * 2**20
    assert 2 * logits_bytes <= packed_peak <= 2.01 * logits_bytes + scratch_bytes
    assert loop_peak <= 1.01 * packed_peak
    assert eager_peak > 3 * logits_bytes
    for report in slime_compile.reports()[known:]:
        assert report.fused == 2  # one pass for the statistics, one for the gradient
        assert report.to_dict()["wide_after"] == 0
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-5, atol=1e-7)


def test_a_rank_without_response_stays_attached() -> None:
    packing = Packing([8, 8], [2, 2], context_parallel="all_gather", cp_rank=0, cp_size=4)
    logits = torch.randn(packing.local_rows, VOCAB, requires_grad=True)
    log_probs = split_responses(logits.log_softmax(-1)[:, 0], packing)
    assert [len(sample) for sample in log_probs] == [0, 0]
    assert all(sample.requires_grad for sample in log_probs)
    torch.cat(log_probs).sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_join_is_differentiable() -> None:
    packing = Packing([6, 5], [3, 2], context_parallel="zigzag", cp_rank=1, cp_size=2)
    lengths = [sum(p.rows.stop - p.rows.start for p in ps) for ps in response_slices(packing)]
    values = [torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in lengths]
    weight = torch.arange(packing.local_rows, dtype=torch.float64)
    (join_responses(values, packing) * weight).sum().backward()
    for value, expected in zip(values, split_responses(weight, packing), strict=True):
        assert value.grad is not None
        assert torch.equal(value.grad, expected)


def test_no_samples() -> None:
    packing = Packing([], [], rows=3)
    assert shifted_targets([], packing).tolist() == [0, 0, 0]
    assert response_slices(packing) == split_responses(torch.zeros(3), packing) == []
    assert join_responses([], packing).tolist() == [0, 0, 0]


def test_bad_tensors() -> None:
    packing = Packing([4, 3], [2, 1])
    with pytest.raises(ValueError, match=r"of lengths \[4, 3\], got shapes \[\(4,\), \(4,\)\]"):
        shifted_targets([torch.arange(4), torch.arange(4)], packing)
    with pytest.raises(ValueError, match=r"`values` must have 7 rows, got shape \[6\]"):
        split_responses(torch.zeros(6), packing)
    with pytest.raises(ValueError, match=r"must have shapes \[\(2,\), \(1,\)\], one per sample"):
        join_responses([torch.zeros(2), torch.zeros(2)], packing)
    with pytest.raises(ValueError, match=r"must have shape \[1, 7, 'V'\] or \[7, V\], got \[2, 7"):
        flatten_logits(torch.zeros(2, 7, VOCAB), packing)
    padded = Packing([4, 3], [2, 1], format="bshd", padded_length=6)
    with pytest.raises(ValueError, match=r"must have shape \[2, 6, 'V'\] or \[12, V\], got \[3, 4"):
        flatten_logits(torch.zeros(3, 4, VOCAB), padded)
    rows = torch.zeros(7, VOCAB)
    with pytest.raises(ValueError, match=r"must be above 0, got \[1.0, 0.0\]"):
        row_temperature([1.0, 0.0], packing, rows)
    with pytest.raises(ValueError, match="must have 2 entries, one per sample, got 1"):
        row_temperature([1.0], packing, rows)


@pytest.mark.parametrize(
    ("temperature", "meant"),
    [
        (torch.tensor(0.7), 0.7),
        (numpy.float32(0.5), 0.5),
        (2, 2.0),
        (torch.tensor([0.5, 2.0]), [0.5, 2.0]),
        (numpy.array([0.5, 2.0]), [0.5, 2.0]),
        ((0.5, 2.0), [0.5, 2.0]),
    ],
    ids=repr,
)
def test_temperatures(temperature: Any, meant: float | list[float]) -> None:
    packing = Packing([4, 3], [2, 1])
    logits = torch.randn(7, VOCAB, dtype=torch.float64)
    tokens = [torch.zeros(t, dtype=torch.int64) for t in packing.total_lengths]
    found, _ = packed_log_probs(logits, tokens, packing, temperature=temperature)
    wanted, _ = packed_log_probs(logits, tokens, packing, temperature=meant)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_entropy(entropy_grad: bool) -> None:
    packing = Packing([9, 6], [4, 3], context_parallel="zigzag", cp_rank=1, cp_size=2)
    logits = torch.randn(packing.local_rows, VOCAB, dtype=torch.float64, requires_grad=True)
    tokens = [torch.zeros(t, dtype=torch.int64) for t in packing.total_lengths]
    _, entropy = packed_log_probs(
        logits, tokens, packing, temperature=0.5, entropy_grad=entropy_grad
    )
    scaled = logits / 0.5
    per_row = -(scaled.softmax(-1) * scaled.log_softmax(-1)).sum(-1)
    assert entropy is not None
    for got, expected in zip(entropy, split_responses(per_row, packing), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
        assert got.requires_grad == entropy_grad
    assert packed_log_probs(logits, tokens, packing, with_entropy=False)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_temperature(dtype: torch.dtype) -> None:
    packing = Packing([3, 2], [1, 1], rows=7)
    rows = row_temperature([0.5, 2.0], packing, torch.zeros(7, VOCAB, dtype=dtype))
    assert rows.tolist() == [0.5, 0.5, 0.5, 2.0, 2.0, 1.0, 1.0]
    assert rows.dtype == torch.float32


# ---- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, [0.5, 2.0, 1.0], torch.tensor(0.7)], ids=str)
def test_compiled_only_response_rows_are_made(temperature: float | list[float] | Tensor) -> None:
    """Of logits that a matmul of the same function makes; the report says how many."""
    torch._dynamo.reset()
    packing = Packing([5, 4, 6], [2, 3, 1], rows=17)
    tokens = [torch.arange(total) % VOCAB for total in packing.total_lengths]
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 4, generator=draw).requires_grad_()
    weight = torch.randn(VOCAB, 4, generator=draw).requires_grad_()

    def fn(hidden: Tensor, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        found = packed_log_probs(hidden @ weight.t(), tokens, packing, temperature=temperature)
        assert found[1] is not None
        return found[0], found[1]

    options = {"inner": "aot_eager", "min_vocab": VOCAB, "strict": True}
    compiled = torch.compile(fn, backend="slime_fused", options=options, fullgraph=True)
    results = []
    for each in (compiled, fn):
        values = [value for of_kind in each(hidden, weight) for value in of_kind]
        total = sum((n + 1) * value.sum() for n, value in enumerate(values))
        results.append([*values, *torch.autograd.grad(total, (hidden, weight))])  # type: ignore[arg-type]
    for mine, eager in zip(*results, strict=True):
        torch.testing.assert_close(mine, eager)
    report = slime_compile.reports()[-1].to_dict()
    (note,) = (n for n in report["graphs"][0]["notes"] if n.startswith("rows computed"))
    assert note.startswith("rows computed: 6 of 17 ")
    left_out = torch.ones(17, dtype=torch.bool)
    left_out[response_rows(packing)] = False
    assert torch.equal(results[0][-2][left_out], torch.zeros(11, 4))


@given(packings())
def test_response_rows_are_those_of_the_slices(ranks: list[Packing]) -> None:
    for packing in ranks:
        values = torch.arange(packing.local_rows)
        chosen = values[response_rows(packing)]
        for mine, want in zip(
            split_response_rows(chosen, packing), split_responses(values, packing), strict=True
        ):
            assert torch.equal(mine, want)


def test_split_response_rows_refuses() -> None:
    with pytest.raises(ValueError, match="`values` must have 5 rows, one per response token"):
        split_response_rows(torch.zeros(6), Packing([5, 4], [2, 3]))
