"""What stands around a head in the graph: dry runs, memory probe, torch's cache, ranks, `retain_graph`, bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import slime_compile
from bench.measure.measure import profiled_peak
from slime_compile.backend import options
from slime_compile.ops import torch_calls
from slime_compile.rl.memory_probe import memory_probe
from tests.report.test_compile_cache import run_script
from tests.support.ranks import on_threads, own_copy

ROWS, VOCAB, HIDDEN = 250, 4096, 16  # 4 MB of logits in float32
CHUNK_ROWS = 50  # with a softcap, which halves them, still five times the row operators' buffers
LOGITS_BYTES = ROWS * VOCAB * 4
SCRATCH_ROWS = 4  # of the CPU's row operators
SCRATCH_BYTES = 2 * SCRATCH_ROWS * VOCAB * 4
OPTIONS = {"inner": "aot_eager", "strict": True}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(options, "MIB", 1)
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", SCRATCH_ROWS * VOCAB)


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(ROWS, HIDDEN).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,))


def compiled(fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    chosen = OPTIONS | {"chunk_mib": CHUNK_ROWS * VOCAB * 4} | more
    made: Callable[..., Any] = torch.compile(fn, backend="slime_fused", options=chosen)
    return made


def notes() -> list[str]:
    report = slime_compile.reports()[-1].to_dict()
    return [note for graph in report["graphs"] for note in graph["notes"]]


# ---- losses -------------------------------------------------------------------------------------------------------


def cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), target)


def capped(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(3 * torch.tanh(hidden @ weight.t() / 3), target)


def some_rows(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t())[100:200], target[100:200])


def per_token(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), target, reduction="none")


def in_pieces(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    total = hidden.new_zeros(())
    for states, tokens in zip(hidden.split(CHUNK_ROWS), target.split(CHUNK_ROWS), strict=True):
        total = total + F.cross_entropy(states @ weight.t(), tokens, reduction="sum")
    return total / ROWS


def hidden_twice(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """A head and its auxiliary loss over the same states."""
    return F.cross_entropy(hidden @ weight.t(), target) + hidden.square().mean()


def two_heads(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Of one hidden and one weight: the next token, and the one after it."""
    logits, further = hidden @ weight.t(), hidden.tanh() @ weight.t()
    return F.cross_entropy(logits, target) + F.cross_entropy(further, target.roll(-1))


LOSSES = [cross_entropy, capped, some_rows, per_token, in_pieces, hidden_twice, two_heads]


# ---- dry runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["never", pytest.param("always", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_estimate_is_what_is_measured(fn: Callable[..., Tensor], choice: str) -> None:
    """Within 3 %, the buffers of the row operators apart, which count or not by when the peak is."""
    chosen = {"chunk_mib": CHUNK_ROWS * VOCAB * 4, "grad_in_forward": choice}
    with FakeTensorMode():
        fakes = arguments()
    found = slime_compile.estimate_peak(fn, *fakes, **chosen)
    torch._dynamo.reset()
    inputs, function = arguments(), compiled(fn, **chosen)

    def step() -> None:
        torch.autograd.grad(function(*inputs).sum(), inputs[:2])

    step()
    assert any("chunk" in note or "piece" in note for note in notes())
    peak = profiled_peak(step)
    beyond = found.peak_bytes - found.inputs_bytes
    assert 0.97 * (peak - SCRATCH_BYTES) <= beyond <= 1.03 * peak
    assert beyond < 0.7 * LOGITS_BYTES  # a chunk, and what a softcap makes of it


def test_explain_at_production_sizes() -> None:
    """Nothing is computed: 29 GiB of logits."""
    with FakeTensorMode():
        hidden = torch.empty(205_280, 4096, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(76_032, 4096, dtype=torch.bfloat16, requires_grad=True)
        target = torch.empty(205_280, dtype=torch.int64)
    options.MIB = 1 << 20  # the fixture's is put back after the test
    report = slime_compile.explain(capped)(hidden, weight, target).to_dict()
    assert report["chunked_heads"] == 1
    note = report["graphs"][0]["notes"][0]
    assert "the logits [205280, 76032] at " in note
    assert " are never materialised in full: chunks of 1,755 x 76,032" in note  # 512 MiB in float32
    found = slime_compile.estimate_peak(capped, hidden, weight, target)
    gradients = 2 * (205_280 + 76_032) * 4096
    assert found.peak_bytes - found.inputs_bytes - gradients < 8 << 30


def test_memory_probe_sees_a_chunk() -> None:
    inputs = arguments()
    function = compiled(cross_entropy)
    for _ in range(2):  # the first call compiles
        with memory_probe("head", enabled=True, device="cpu", log=lambda line: None) as probe:
            function(*inputs).backward()
    assert probe.record is not None
    assert probe.record.peak_allocated is not None
    assert CHUNK_ROWS * VOCAB * 4 <= probe.record.peak_allocated < 0.5 * LOGITS_BYTES


# ---- torch's cache ------------------------------------------------------------------------------------------------

CACHED = """
import json, sys, torch, slime_compile
import torch.nn.functional as F
def loss(h, w, t):
    return F.cross_entropy((30 * torch.tanh(h @ w.t() / 30))[4:36], t[4:36])
draw = torch.Generator().manual_seed(0)
h = torch.randn(64, 8, generator=draw).requires_grad_()
w = torch.randn(32768, 8, generator=draw).requires_grad_()
t = torch.randint(32768, (64,), generator=draw)
fn = torch.compile(loss, backend="slime_fused", options={"chunk_mib": 1, "grad_in_forward": sys.argv[1]})
mine, eager = (torch.autograd.grad(f(h, w, t), (h, w)) for f in (fn, loss))
for one, other in zip(mine, eager):
    torch.testing.assert_close(one, other)
print(json.dumps([slime_compile.reports()[0].to_dict()]))
"""


@pytest.mark.slow  # two processes that import torch, one that compiles
@pytest.mark.parametrize("choice", ["never", "always"])
def test_compile_cache(tmp_path: Path, choice: str) -> None:
    """A second process loads the code, and its report says what the first one's said."""
    script = tmp_path / "head.py"
    script.write_text(CACHED)
    (cold,), (warm,) = (run_script(script, tmp_path / "cache", choice) for _ in range(2))
    assert not cold["graphs"][0].pop("cached")
    assert warm["graphs"][0].pop("cached")
    assert sorted(cold["graphs"][0].pop("notes")) == sorted(warm["graphs"][0]["notes"])
    told = warm["graphs"][0].pop("notes")
    assert sum(note.startswith("rows computed: 32 of 64 ") for note in told) == 1
    assert sum(" are never materialised in full: " in note for note in told) == 1
    assert cold == warm
    assert warm["fused"] == (2 if choice == "never" else 1)


# ---- ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_ranks_are_compared() -> None:
    """Nothing that they exchange is another for a head in the graph; rows are taken before it on both."""
    known = len(slime_compile.reports())

    def on_rank(rank: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(ROWS, HIDDEN, generator=draw).requires_grad_()
        weight = torch.randn(VOCAB, HIDDEN, generator=draw).requires_grad_()
        target = torch.randint(VOCAB, (ROWS,), generator=draw)
        function = compiled(own_copy(_averaged), check_ranks=True)
        loss = function(hidden, weight, target)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    first, second = on_threads(2, on_rank)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)
    for report in (r.to_dict() for r in slime_compile.reports()[known:]):
        told = [note for graph in report["graphs"] for note in graph["notes"]]
        assert any("are never materialised in full" in note for note in told)
        assert any(note.startswith("rows computed: 100 of 250") for note in told)


def _averaged(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = (hidden @ weight.t())[100:200]
    tokens = (target[100:200] >= 0).sum().float()
    torch.distributed.all_reduce(tokens)
    return F.cross_entropy(logits, target[100:200], reduction="sum") / tokens


# ---- backward twice, hidden twice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["never", pytest.param("always", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_gradients_once_and_again(fn: Callable[..., Tensor], choice: str) -> None:
    """Nothing that backward reads is overwritten where the graph is kept: the second time gives the same."""
    inputs = arguments()
    with torch._functorch.config.patch(donated_buffer=False):
        loss = compiled(fn, grad_in_forward=choice)(*inputs).sum()
        first = torch.autograd.grad(loss, inputs[:2], retain_graph=True)
        second = torch.autograd.grad(loss, inputs[:2])
    want = torch.autograd.grad(fn(*inputs).sum(), inputs[:2])
    for one, other, eager in zip(first, second, want, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, eager, rtol=1e-4, atol=1e-5)


# ---- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_weight_that_was_sharded_again_before_backward(inner: str) -> None:
    """FSDP keeps the parameter and frees its memory; backward must not read it."""
    hidden, weight, target = arguments()
    loss = compiled(cross_entropy, inner=inner, grad_in_forward="never")(hidden, weight, target)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"`operand \d` must have memory.*reshard_after_forward"):
        loss.backward()


def test_a_weight_that_is_not_gathered() -> None:
    hidden, weight, target = arguments()
    function = compiled(cross_entropy)
    function(hidden, weight, target)
    freed = weight.detach().clone().requires_grad_()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"`operand \d` must have memory.*reshard_after_forward"):
        function(hidden, freed, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dtype": torch.bfloat16},
            "same dtype",
        ),
        # torch's own words, while it traces the user's line
        (
            {"device": "meta"},
            "found (at least )?two (different )?devices,? cpu(,| and) meta",
        ),
    ],
)
def test_hidden_and_weight_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    hidden, weight, target = arguments()
    with pytest.raises(Exception, match=message):
        compiled(cross_entropy)(hidden, weight.detach().to(**change), target)
