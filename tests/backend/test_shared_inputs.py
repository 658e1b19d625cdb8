"""Inputs that share memory, of which one is changed in place: code from the compile cache is that of other inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import slime_compile

ROWS, VOCAB = 6, 64


def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    rejected.mul_(0.5)
    return chosen.logsumexp(-1) + rejected.logsumexp(-1)


def given(how: str) -> tuple[Tensor, Tensor]:
    both = torch.randn(2 * ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    return {
        "halves": lambda: (both[:ROWS], both[ROWS:]),
        "overlapping": lambda: (both[:ROWS], both[1 : ROWS + 1]),
        "apart": lambda: (both[:ROWS].clone(), both[ROWS:].clone()),
        "the same": lambda: (both[:ROWS], both[:ROWS]),
    }[how]()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("halves", "overlapping"),
        ("apart", "overlapping"),
        ("apart", "the same"),
        ("the same", "apart"),
    ],
)
def test_code_of_other_inputs_is_not_taken(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for how in (first, second):
        torch._dynamo.reset()
        fn = torch.compile(loss, backend="slime_fused", options={"min_vocab": 32})
        torch.testing.assert_close(fn(*given(how)), loss(*given(how)))


def test_code_of_such_inputs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for cached in (False, True):
        torch._dynamo.reset()
        fn = torch.compile(loss, backend="slime_fused", options={"min_vocab": 32})
        torch.testing.assert_close(fn(*given("overlapping")), loss(*given("overlapping")))
        assert slime_compile.reports()[-1].to_dict()["graphs"][0]["cached"] == cached
