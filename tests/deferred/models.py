"""A model with a head, what trainers do between head and loss, and the backend with small chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slime_compile
from slime_compile.backend import options

VOCAB, HIDDEN, BATCH, LENGTH = 131, 8, 3, 7
CHUNK_ROWS = 4
OPTIONS: dict[str, Any] = {"inner": "aot_eager", "min_vocab": 32, "strict": True}


class Model(nn.Module):
    """Embedding, one layer, head."""

    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=bias)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.lm_head(torch.tanh(self.body(self.embedding(tokens))))


class CappedModel(Model):
    """With what Gemma does behind the head."""

    def forward(self, tokens: Tensor) -> Any:
        return 5 * torch.tanh(super().forward(tokens) / 5)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler without a past; `chunk_mib` counts bytes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(options, "MIB", 1)


def compiled(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """Without graph breaks."""
    chosen = OPTIONS | {"chunk_mib": CHUNK_ROWS * VOCAB * 4} | more
    made: Callable[..., Any] = torch.compile(
        function, backend="slime_fused", fullgraph=True, options=chosen
    )
    return made


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    """The loss, and the gradient of every parameter."""
    model.zero_grad()
    value = loss()
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_fused(heads: int = 1) -> None:
    """The last report: logits in chunks, nothing of their size left."""
    report = slime_compile.reports()[-1]
    report.assert_fused()
    assert report.to_dict()["chunked_heads"] == heads, report


# ---- losses over what a model returns -----------------------------------------------------------------------------


def causal(logits: Any, tokens: Tensor) -> Tensor:
    """transformers: cast, shift, flatten."""
    logits = logits.float()
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def policy(logits: Any, tokens: Tensor) -> Tensor:
    """TRL's GRPO: a temperature in place, log-probs and entropies by two readers of the same logits."""
    logits = logits[:, :-1, :]
    logits.div_(0.7)
    log_p = torch.log_softmax(logits, -1)
    chosen = log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)
    return (chosen.exp() * chosen - 0.01 * entropy).mean()


def with_metric(logits: Any, tokens: Tensor) -> Tensor:
    """An entropy that only a log sees."""
    loss = causal(logits, tokens)
    with torch.no_grad():
        log_p = torch.log_softmax(logits.float(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
    return loss + 0 * entropy


def by_rows(logits: Any, tokens: Tensor) -> Tensor:
    """A row of the batch at a time."""
    found = []
    for row, target in zip(logits, tokens, strict=True):
        found.append(F.log_softmax(row, -1).gather(-1, target[:, None]).squeeze(-1))
    return -torch.stack(found).mean()


LOSSES = [causal, policy, with_metric, by_rows]
