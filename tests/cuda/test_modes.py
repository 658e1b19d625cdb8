"""How a step runs on the device: streams, two devices, retained graphs, eager code, other sizes, deferred logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slime_compile
from tests.cuda.judge import assert_near, results, truth
from tests.cuda.losses import BF16, F32, VOCAB, Data, given, head, inside, policy
from tests.deferred.models import Model, causal

ROWS_MAX = 32
OPTIONS: dict[str, Any] = {"min_vocab": 8, "strict": True}
INNERS = ["aot_eager", "inductor"]


def fused(loss: Any = policy, **how: Any) -> Any:
    options = OPTIONS | how.pop("options", {})
    return torch.compile(loss, backend="slime_fused", options=options, **how)


def assert_right(loss: Any, got: list[Tensor], data: Data) -> None:
    assert_near(got, results(loss, data), truth(loss, data))


def test_a_retained_graph() -> None:
    data = given(F32)
    leaf = data.leaves[0].requires_grad_()
    loss = fused()(leaf * 1, *data.rest)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second)
    assert_right(policy, [loss.detach(), first], data)


def test_a_side_stream() -> None:
    data, stream = given(F32), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = results(fused(), data, handed_over=True)
    torch.cuda.current_stream().wait_stream(stream)
    assert_right(policy, got, data)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("inner", INNERS)
def test_another_device_than_the_current_one(inner: str) -> None:
    for loss, make in ((policy, given), (head, inside)):
        data = make(F32, device="cuda:1")
        got = results(fused(loss, options={"inner": inner}), data)
        assert {value.device for value in got} == {torch.device("cuda", 1)}
        assert torch.cuda.current_device() == 0
        assert_right(loss, got, data)


def test_eager_functions() -> None:
    data = given(BF16)

    def loss(logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
        chosen, entropy = slime_compile.log_probs_and_entropy(logits, tokens)
        return -(chosen * advantages).mean() - 0.01 * entropy.mean()

    assert_right(policy, results(loss, data), data)


def test_no_gradient() -> None:
    data, function = given(BF16), fused()
    true = truth(policy, data)[0].item()
    with torch.no_grad():
        assert abs(function(*data.leaves, *data.rest).item() - true) < 1e-5
    with torch.inference_mode():
        assert abs(function(*data.leaves, *data.rest).item() - true) < 1e-5


def test_sizes_that_change() -> None:
    """Compiled for one size, again for any, then never again: odd and even vocabularies, any number of rows."""
    function = fused()
    earlier = len(slime_compile.reports())
    for rows, vocab in ((16, 1027), (9, 1027), (11, 512), (3, 769)):
        whole = given(F32, rows, vocab)
        data = Data([whole.leaves[0][:rows].clone()], [each[:rows] for each in whole.rest])
        assert_right(policy, results(function, data), data)
    assert len(slime_compile.reports()) - earlier <= 3


def test_rows_cut_from_a_buffer_at_other_addresses() -> None:
    """An odd vocabulary: what is compiled for one alignment is right for another, which each call sees for itself."""
    function = fused(dynamic=False)
    for seed, start in enumerate((0, 1, 2, 5)):
        buffer = torch.empty(ROWS_MAX, VOCAB, dtype=BF16, device="cuda")
        data = given(BF16, seed)
        rows = buffer[start : start + len(data.leaves[0])].copy_(data.leaves[0])
        assert_right(policy, results(function, Data([rows], data.rest)), data)


def test_autotuned() -> None:
    data = given(BF16, vocab=2048)
    function = torch.compile(policy, backend="slime_fused", mode="max-autotune-no-cudagraphs")
    assert_right(policy, results(function, data), data)
    assert slime_compile.reports()[-1].fused == 2


@pytest.mark.parametrize("inner", INNERS)
def test_deferred_logits(inner: str) -> None:
    """The model's head runs inside of the compiled loss."""
    model = Model().to("cuda")
    tokens = torch.randint(model.lm_head.weight.shape[0], (2, 6), device="cuda")
    plain = copy.deepcopy(model)
    want = _gradients(plain, causal(plain(tokens), tokens))
    true = _gradients(plain.double(), causal(plain(tokens), tokens))
    function = fused(causal, options={"inner": inner})
    with slime_compile.defer_logits(model):
        got = _gradients(model, function(model(tokens), tokens))
    assert_near(got, want, true)
    assert slime_compile.reports()[-1].fused >= 1


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
