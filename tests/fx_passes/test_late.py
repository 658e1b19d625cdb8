"""What overwrites logits, with all that is element-wise computed as late as inductor may: `tests/support/late.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_compile.ops import row_body
from tests.support import harness
from tests.support.late import late

ROWS, VOCAB, HIDDEN = 22, 160, 12
CHUNK = 6  # rows


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    torch._dynamo.reset()
    with harness.chunks_in_bytes():
        yield


def _chosen(log_p: Tensor, target: Tensor) -> Tensor:
    return log_p.gather(-1, target[:, None]).squeeze(-1)


def _powers(x: Tensor) -> Tensor:
    return (x.softmax(-1) ** 1.4).sum()


def _log_mean(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    mean = torch.logaddexp(p, q) - 0.7
    return (p.exp() * (p - mean)).sum() + (q.exp() * (q - mean)).sum()


def _below_largest(x: Tensor) -> Tensor:
    below = x - x.max(-1, keepdim=True).values.detach()
    return below.square().sum() + x.logsumexp(-1).mean()


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
GIVEN: dict[str, Loss] = {
    "outside the algebra": lambda x, y, t: _powers(x),
    "a metric of each row": lambda x, y, t: _powers(x) * x.detach().tanh().sum(-1).mean(),
    "a matmul reads them": lambda x, y, t: _powers(x) + (x[:, :5] @ y[:5, :5]).tanh().sum(),
    "all of them read again": lambda x, y, t: F.cross_entropy(x, t) + (x * y).tanh().sum(),
    "two levels": lambda x, y, t: (_chosen(x.log_softmax(-1), t) - x.logsumexp(-1).mean()).square().sum() + _powers(x),
    "two logits": lambda x, y, t: _log_mean(x, y) + (x * y).sigmoid().sum(),
    "numbers of a row of theirs": lambda x, y, t: _powers(x + y) + (x[:, :1] * y).sin().sum(),
    "a product with itself": lambda x, y, t: F.cross_entropy(x, t) + (x.softmax(-1).t() @ x).tanh().sum(),
}  # fmt: skip
HEADS: dict[str, Loss] = {
    "an entropy": lambda x, y, t: (
        _chosen(x.log_softmax(-1), t).square().sum() + (x.softmax(-1) * x).sum()
    ),
    "numbers of columns": lambda x, y, t: F.cross_entropy(x, t) * x.detach()[:, :2].tanh().sum(),
    "the largest and where it is": lambda x, y, t: _below_largest(x / (t[:, None] + 9)),
    "a mask": lambda x, y, t: ((x.detach() > 1) * x.log_softmax(-1)).sum(),
    "the largest": lambda x, y, t: (x.topk(4, -1).values - x.logsumexp(-1)[:, None]).exp().sum(),
}


def _step(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The loss and gradients; only autograd references the first two while the gradients are taken."""
    leaves = [each.clone().requires_grad_() for each in given[:2]]
    loss = fn(*(leaf * 1 for leaf in leaves), *given[2:])
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *found]


def _check(fn: Callable[..., Tensor], given: list[Tensor], **options: object) -> None:
    chosen = harness.OPTIONS | {"inner": "aot_eager", "chunk_mib": CHUNK * VOCAB * 4} | options
    with late(("graph", "anyone")):
        found = _step(torch.compile(fn, backend="slime_fused", options=chosen), given)
    for value, true in zip(found, _step(fn, harness.to_float64(given)), strict=True):
        assert (value - true).norm() <= 1e-5 * true.norm()


def _drawn(*shapes: tuple[int, int]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=draw) for shape in shapes]
    return [*tensors, torch.randint(VOCAB, (ROWS,), generator=draw)]


@pytest.mark.parametrize("name", GIVEN)
def test_given_logits(name: str) -> None:
    """Their gradient overwrites them at the end of backward."""
    _check(GIVEN[name], _drawn((ROWS, VOCAB), (ROWS, VOCAB)))


def _of_head(name: str) -> Callable[..., Tensor]:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return HEADS[name](hidden @ weight.t(), weight, target)

    return loss


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("when", ["always", "never"])
def test_heads(name: str, when: str) -> None:
    """Their gradient overwrites a chunk of logits in the middle of a loop."""
    _check(_of_head(name), _drawn((ROWS, HIDDEN), (VOCAB, HIDDEN)), grad_in_forward=when)


def test_what_is_computed_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_body._Compiled, "_read_before", lambda *_: [])
    with pytest.raises(AssertionError):
        _check(
            _of_head("an entropy"),
            _drawn((ROWS, HIDDEN), (VOCAB, HIDDEN)),
            grad_in_forward="always",
        )
