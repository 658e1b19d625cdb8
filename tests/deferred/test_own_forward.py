"""Heads with a forward of their own: LoRA, cast, scaled, dequantised weights. Deferred, and the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import slime_compile
from bench.measure.measure import profiled_peak
from slime_compile import DeferredLogits, defer_logits
from slime_compile.ops import torch_calls
from tests.deferred.models import (
    HIDDEN,
    LOSSES,
    VOCAB,
    Model,
    causal,
    compiled,
    fresh,
    gradients,
    tokens,
    with_metric,
)
from tests.support.harness import each_inner

__all__ = ["fresh", "tokens"]


class Adapted(nn.Module):
    """LoRA as PEFT does it: sub-modules, a dropout, a scaling, the dtype of the base."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.scaling = {"default": 2.0}

    def forward(self, hidden: Tensor) -> Any:
        result = self.base_layer(hidden)
        dtype = result.dtype
        for name, down in self.lora_A.items():
            narrow = down(self.lora_dropout[name](hidden.to(down.weight.dtype)))
            result = result + self.lora_B[name](narrow) * self.scaling[name]
        return result.to(dtype)


class Dequantised(nn.Module):
    """int8 numbers, a scale for each column."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        weight = base.weight.detach()
        self.out_features = base.out_features
        self.register_buffer("scale", weight.abs().amax(-1, keepdim=True) / 127)
        self.register_buffer("numbers", (weight / self.scale).round().to(torch.int8))
        self.bias = base.bias

    def forward(self, hidden: Tensor) -> Any:
        return F.linear(
            hidden, self.numbers.to(hidden.dtype) * self.scale.to(hidden.dtype), self.bias
        )


class Float8(nn.Module):
    """fp8 with one scale, of the logits."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.out_features = base.out_features
        self.register_buffer("weight", base.weight.detach().to(torch.float8_e4m3fn))

    def forward(self, hidden: Tensor) -> Any:
        return hidden @ self.weight.to(hidden.dtype).t() / 0.5


class Cast(nn.Linear):
    """Trained in another dtype than that of hidden."""

    def forward(self, input: Tensor) -> Any:
        return F.linear(input.double(), self.weight.double()).float()


def _adapted_dequantised(base: nn.Linear) -> nn.Module:
    made = Adapted(base)
    made.base_layer = Dequantised(base)  # type: ignore[assignment]
    return made


def _cast(base: nn.Linear) -> nn.Module:
    made = Cast(HIDDEN, VOCAB, bias=False)
    made.load_state_dict({"weight": base.weight})
    return made


HEADS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "LoRA": Adapted,
    "int8": Dequantised,
    "fp8": Float8,
    "cast": _cast,
    "LoRA over int8": _adapted_dequantised,
}
each_head = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def _model(head: Callable[[nn.Linear], nn.Module], bias: bool = False) -> Model:
    model = Model(bias=bias)
    model.lm_head = head(model.lm_head)  # type: ignore[assignment]
    return model


def same(mine: list[Tensor], want: list[Tensor]) -> None:
    assert len(mine) == len(want)
    for one, other in zip(mine, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@each_inner
@each_head
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(
    loss: Callable[..., Tensor],
    head: Callable[[nn.Linear], nn.Module],
    inner: str,
    tokens: Tensor,
) -> None:
    """Chunks of rows; in eager code, bit for bit what the head computes."""
    model = _model(head, bias=loss is causal)
    want = gradients(model, lambda: loss(model(tokens), tokens))
    defer_logits(model)
    assert isinstance(model(tokens), DeferredLogits)
    plain = gradients(model, lambda: loss(model(tokens), tokens))
    for one, other in zip(plain, want, strict=True):
        assert torch.equal(one, other)
    function = compiled(loss, inner=inner)
    same(gradients(model, lambda: function(model(tokens), tokens)), want)
    report = slime_compile.reports()[-1]
    whole = (
        1 if head is _cast and loss is with_metric else 0
    )  # a cast behind the head, two sets of rows
    assert sum(graph.wide_after for graph in report.graphs) <= whole
    assert "chunks of" in str(report)


def test_peft_draws_one_dropout(tokens: Tensor) -> None:
    """Two readers of the logits see the same dropout, and its gradient is that of this draw."""
    model = _model(lambda base: Adapted(base, dropout=0.5))

    def twice(logits: Any, tokens: Tensor) -> Tensor:
        return causal(logits, tokens) - 0.5 * causal(logits.float(), tokens)

    def half(logits: Any, tokens: Tensor) -> Tensor:
        return 0.5 * causal(logits, tokens)

    def seeded(loss: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        return gradients(model, lambda: loss(model(tokens), tokens))

    want = seeded(half)
    defer_logits(model)
    same(seeded(compiled(twice)), want)


def test_a_frozen_part_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak: a chunk of both products, what is made of it; no weight's gradient, whose memory would be 4 chunks."""
    vocab, width, rows = 4096, 512, 512
    monkeypatch.setattr(torch_calls, "_CHUNK_ELEMENTS", 4 * vocab)
    head = Adapted(nn.Linear(width, vocab, bias=False), rank=2)
    hidden = torch.randn(rows, width, requires_grad=True)
    target = torch.randint(vocab, (rows,))
    chunk = 32 * vocab * 4
    function = compiled(F.cross_entropy, min_vocab=1024, chunk_mib=chunk)
    defer_logits(head, head)

    def step() -> None:
        head.zero_grad()
        function(head(hidden), target).backward()
        hidden.grad = None

    step()
    assert head.base_layer.weight.grad is None
    own = 2 * hidden.nbytes + 4 * (vocab + width) * 2 * 4
    per_row = rows * 200
    assert 8 * chunk < head.base_layer.weight.nbytes + 4 * chunk
    assert profiled_peak(step) <= 4 * chunk + own + per_row


def test_sums_of_deferred_logits(tokens: Tensor) -> None:
    """Each reads its own product; a number or a tensor is added in eager code, as before."""
    model = _model(Adapted)
    with defer_logits(model):
        logits = model(tokens)
        total = logits + logits * 2 - logits.float()
        assert isinstance(total, DeferredLogits)
        assert isinstance(torch.add(logits, logits), DeferredLogits)
        assert isinstance(logits.add(logits, alpha=3), DeferredLogits)
        assert isinstance(logits + 1, Tensor)
        assert total.shape == logits.shape
        assert total.requires_grad
        tensor = logits.tensor()
        assert isinstance(logits + logits, Tensor)  # computed, and kept
        assert torch.equal(total.tensor(), tensor + tensor * 2 - tensor)


def test_an_operand_that_changes(tokens: Tensor) -> None:
    """A sum must be read before one of its products changes, or their weight."""
    model = _model(Adapted)
    defer_logits(model)
    logits = model(tokens)
    with torch.no_grad():
        model.lm_head.lora_B["default"].weight.add_(1)
    with pytest.raises(RuntimeError, match="`weight` has been overwritten"):
        logits.tensor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits = model(tokens)
    compiled(causal)(logits, tokens).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="overwritten"):
        compiled(causal)(logits, tokens)


def test_leaves(tokens: Tensor) -> None:
    """FSDP and DDP find the hidden states of each product."""
    model = _model(Adapted)
    defer_logits(model)
    logits = model(tokens)
    leaves, _ = tree_flatten(logits)
    assert [each.shape[-1] for each in leaves] == [HIDDEN, 2]
    assert tree_map(lambda leaf: leaf, logits) is logits
    detached = tree_map(Tensor.detach, logits)
    assert not detached.detach().requires_grad
    torch.testing.assert_close(detached.tensor(), model(tokens).tensor().detach())
    with pytest.raises(TypeError, match="must leave deferred logits as they are"):
        tree_map(lambda leaf: leaf * 2, logits)


class Unusual(nn.Linear):
    """A forward that needs the tensor of its own product."""

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        return logits - logits.amax(-1, keepdim=True)


def test_a_forward_that_reads_its_product(tokens: Tensor) -> None:
    model = _model(lambda base: Unusual(HIDDEN, VOCAB))
    want = gradients(model, lambda: causal(model(tokens), tokens))
    defer_logits(model)
    assert isinstance(model(tokens), Tensor)
    mine = gradients(model, lambda: causal(model(tokens), tokens))
    for one, other in zip(mine, want, strict=True):
        assert torch.equal(one, other)


def test_the_model_is_compiled_too(tokens: Tensor) -> None:
    """Then its logits are tensors: the head is a part of the model's graph."""
    model = _model(Adapted)
    want = gradients(model, lambda: causal(model(tokens), tokens))
    defer_logits(model)
    step = compiled(lambda tokens: causal(model(tokens), tokens))
    same(gradients(model, lambda: step(tokens)), want)
    assert "chunks of" in str(slime_compile.reports()[-1])


@pytest.mark.parametrize("name", ["base_layer", "lora_A.default"])
def test_a_backward_hook_inside(name: str, tokens: Tensor) -> None:
    """It asks for the gradient of what its module returns."""
    model = _model(Adapted)
    defer_logits(model)
    seen = []
    inner = model.lm_head.get_submodule(name)
    inner.register_full_backward_hook(lambda *_: seen.append(name))
    causal(model(tokens), tokens).backward()
    assert seen == [name]


def test_evaluation_and_removal(tokens: Tensor) -> None:
    model = _model(Adapted)
    handle = defer_logits(model)
    assert isinstance(model.eval()(tokens), Tensor)
    assert isinstance(copy.deepcopy(model).train()(tokens), DeferredLogits)
    handle.remove()
    assert isinstance(model.train()(tokens), Tensor)
