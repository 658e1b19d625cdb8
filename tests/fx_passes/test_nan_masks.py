"""Entropies that ask where a value is NaN or zero, as torch's entr, xlogy and nansum do, and masks of row numbers."""

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor

import slime_compile

OPTIONS = {"inner": "aot_eager", "min_vocab": 32, "strict": True}
Loss = Callable[[Tensor, Tensor], Tensor]


def plogp(x: Tensor) -> Tensor:
    log_probs = x.log_softmax(-1)
    return log_probs.exp() * log_probs


def spread(w: Tensor, x: Tensor) -> Tensor:
    return w[:, None].expand_as(x)


FUSED: dict[str, Loss] = {
    "entr": lambda x, w: torch.special.entr(x.softmax(-1)).sum(-1) * w,
    "entr of half": lambda x, w: torch.special.entr(x.softmax(-1) * 0.5).sum(-1) + x.logsumexp(-1),
    "weighted entr": lambda x, w: (w[:, None] * torch.special.entr(x.softmax(-1))).sum(-1),
    "xlogy": lambda x, w: torch.xlogy(x.softmax(-1), x.softmax(-1)).sum(-1) * w,
    "nansum": lambda x, w: plogp(x).nansum(-1) * w,
    "nansum of probs": lambda x, w: x.softmax(-1).nansum(-1) * w + plogp(x).sum(-1),
    "rows that are chosen": lambda x, w: torch.where(spread(w, x) == 0, 0.0, plogp(x)).sum(-1),
    "rows that are not": lambda x, w: torch.where(spread(w, x) > 0, 0.5, plogp(x)).sum(-1),
    "rows of a mask that is spread": lambda x, w: torch.where(
        (w == 0)[:, None].expand_as(x), 0.0, plogp(x)
    ).sum(-1),
    "rows but those of a mask": lambda x, w: (
        plogp(x).masked_fill(~(w > 0)[:, None].expand_as(x), 0.5).sum(-1)
    ),
    "a mask as a number": lambda x, w: ((w > 0)[:, None].expand_as(x) * plogp(x)).sum(-1),
    "rows but those of two masks": lambda x, w: (
        ~((spread(w, x) > 7) | ~(w > 0)[:, None].expand_as(x)) * plogp(x)
    ).sum(-1),
    "rows of two masks": lambda x, w: (
        ((spread(w, x) > 0) & (spread(w, x) <= 7) | (w > 8)[:, None]) * plogp(x)
    ).sum(-1),
    "rows that are counted": lambda x, w: ((spread(w, x) > 0) * plogp(x)).sum(-1),
    "p or p log p": lambda x, w: choose_rows(w, x.softmax(-1), plogp(x)).sum(-1),
    "mean of p or p log p": lambda x, w: choose_rows(w, x.softmax(-1), plogp(x)).mean(-1),
    "p log p or p": lambda x, w: choose_rows(w, plogp(x), x.softmax(-1)).sum(-1) * w,
    "p or another": lambda x, w: choose_rows(w, x.softmax(-1), x * (2 * x).softmax(-1)).sum(-1),
    "p and lse": lambda x, w: (x.softmax(-1) * (x.logsumexp(-1) + w)[:, None]).sum(-1),
    "not zero and not less": lambda x, w: torch.where(x.softmax(-1) <= 0, 0.0, plogp(x)).sum(-1),
}


def choose_rows(w: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where((w < 1)[:, None], one, other)


LEFT: dict[str, Loss] = {
    "nansum, weighted within": lambda x, w: (plogp(x) * w[:, None]).nansum(-1),
    "nansum of log-probs": lambda x, w: x.log_softmax(-1).nansum(-1) * w + plogp(x).sum(-1),
    "nansum of logits": lambda x, w: x.nansum(-1) * w + plogp(x).sum(-1),
    "xlogy of another": lambda x, w: torch.xlogy(x.softmax(-1), x.softmax(-1) * 0.5).sum(-1) * w,
    "another number at zero": lambda x, w: choice(x.softmax(-1), plogp(x), 3.0, -inf),
    "a number where it is NaN": lambda x, w: choice(x.softmax(-1), plogp(x), 0.0, 5.0),
    "rows and columns": lambda x, w: (
        ((w > 0)[:, None].expand_as(x) & (torch.arange(40) > 5)) * plogp(x)
    ).sum(-1),
    "rows of what is no form": lambda x, w: (
        torch.where(spread(w, x) > 0, 0.0, x.sin()).sum(-1) + plogp(x).sum(-1)
    ),
    "weighted": lambda x, w: choice(x.softmax(-1), w[:, None] * plogp(x), 0.0, -inf),
}


def choice(p: Tensor, positive: Tensor, zero: float, less: float) -> Tensor:
    return torch.where(p > 0, positive, torch.where(p == 0, zero, less)).sum(-1)


def logits() -> Tensor:
    """Rows: three of numbers, one with -inf, with NaN, with +inf, of nothing but -inf; three times."""
    x = 3 * torch.randn(21, 40, generator=torch.Generator().manual_seed(0))
    for first in (0, 7, 14):
        x[first + 3, 5], x[first + 4, 6], x[first + 5, 7], x[first + 6] = -inf, nan, inf, -inf
    return x


def run(loss: Loss) -> tuple[Tensor, Tensor]:
    x = logits().requires_grad_()
    w = torch.arange(21.0).sub(7).clamp(min=-1)  # negative, 0, and positive
    w[7:9] = 0
    value = loss(x, w)
    value.backward(torch.ones(21))
    assert x.grad is not None
    return value.detach(), x.grad


@pytest.mark.parametrize("name", [*FUSED, *LEFT])
def test_as_eager(name: str) -> None:
    loss = FUSED.get(name) or LEFT[name]
    (value, grad), (eager, eager_grad) = (
        run(torch.compile(loss, backend="slime_fused", options=OPTIONS)),
        run(loss),
    )
    report = slime_compile.reports()[-1].to_dict()
    assert (report["fused"] > 0 and report["wide_after"] == 0) == (name in FUSED)
    numbers = eager.isfinite()
    torch.testing.assert_close(value[numbers], eager[numbers])
    at_minus_inf = torch.arange(21) % 7 == 3  # finite, where eager code has 0 * -inf
    assert not value[~numbers & ~at_minus_inf].isfinite().any()
    numbers = eager_grad.isfinite()
    torch.testing.assert_close(grad[numbers], eager_grad[numbers])
