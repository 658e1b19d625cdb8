"""What may be -inf times a number per row of several terms: log-probs of absent columns, weighted by their entropy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from tests.support.scratch import DRAWS, VOCAB, Draw, Scratch

aten = torch.ops.aten
SHAPE = (5, VOCAB)
ABSENT = (*DRAWS, *(Draw("absent", seed) for seed in range(8)))


def log_softmax(s: Scratch, x: Node) -> tuple[Node, Node]:
    """And what is subtracted from x less its maximum."""
    shifted = s.call(aten.sub.Tensor, x, s.call(aten.amax.default, x, [-1], True))
    log_sum = s.call(aten.log.default, summed(s, s.call(aten.exp.default, shifted)))
    return s.call(aten.sub.Tensor, shifted, log_sum), log_sum


def summed(s: Scratch, value: Node) -> Node:
    return s.call(aten.sum.dim_IntList, value, [-1], True)


def a_column(s: Scratch, value: Node) -> Node:
    return s.call(aten.gather.default, value, -1, s.input("hits", (SHAPE[0], 1), torch.int64))


def weighted_by_entropy(s: Scratch, x: Node) -> tuple[Node, Node]:
    log_p, _ = log_softmax(s, x)
    return log_p, summed(s, s.call(aten.mul.Tensor, s.call(aten.exp.default, log_p), log_p))


def of_log_probs(s: Scratch, x: Node) -> tuple[Node, Node]:
    return log_softmax(s, log_softmax(s, x)[0])


@pytest.mark.parametrize("read", [summed, a_column])
@pytest.mark.parametrize("make", [weighted_by_entropy, of_log_probs])
def test_a_difference_of_statistics(
    make: Callable[..., tuple[Node, Node]], read: Callable[..., Node]
) -> None:
    s = Scratch()
    x = s.input("logits", SHAPE)
    value = read(s, s.call(aten.mul.Tensor, *make(s, x)))
    walked = s.walk(value, roots=[x])
    assert value in walked.walk.account.replacements
    assert walked.check(ABSENT, [value])
