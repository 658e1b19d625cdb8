"""`bench lm_head`: every way that is installed computes the same gradients; the table has a row for each."""

from pathlib import Path

import pytest
import torch

from bench.cases.heads import LOSSES, WAYS, Head, truth
from bench.commands import lm_head
from bench.measure.cells import Store

ROWS, VOCAB, HIDDEN = 70, 1030, 8  # more rows than the truth takes at a time; more than min_vocab


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_agree_with_the_truth(loss: str) -> None:
    head = Head(loss, "float32", ROWS, VOCAB, HIDDEN)
    arguments = head.arguments()
    found = torch.autograd.grad(WAYS["eager"](head)(*arguments), arguments[:2])
    for got, true in zip(found, truth(head), strict=True):
        assert (got - true).abs().max() < 1e-5 * true.abs().max()


def test_peers_say_what_they_compute() -> None:
    head = Head("policy and entropy", "float32", ROWS, VOCAB, HIDDEN)
    for way in ("F.linear_cross_entropy", "Liger fused linear cross entropy"):
        with pytest.raises(NotImplementedError, match="cross entropy only"):
            WAYS[way](head)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head("cross entropy", "float32", ROWS, VOCAB, HIDDEN)
    names = ["eager", "F.linear_cross_entropy"]
    monkeypatch.setattr(lm_head, "WAYS", {name: WAYS[name] for name in names})
    found = lm_head.times_and_errors(head, names, seconds=0)
    store = Store(tmp_path, "lm_head")
    peaks = dict.fromkeys(names, head.logits_bytes)
    store.put(lm_head._name(head), {**found, "peaks_bytes": peaks, "missing": {"Liger": "no"}})
    _, _, rows = lm_head._table(store, head)
    assert [row[0] for row in rows] == [*names, "Liger"]
    assert rows[0][1] == "1.00"
    assert max(found["errors"].values()) < 1e-5
