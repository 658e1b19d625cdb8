"""`bench lm_head`: every way that is installed computes the same gradients; the table has a row for each."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases.heads import LOSSES, WAYS, Head, truth
from bench.commands import lm_head
from bench.measure.cells import Store
from bench.measure.measure import CellFailed

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


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="a peer that torch 2.13 brought"
)
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


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that are not there have a row that says why; what is finished is not run again; there is a picture."""
    sizes = [Head(loss, "float32", ROWS, VOCAB, HIDDEN) for loss in ("cross entropy", "log-probs")]
    names = ["eager", "TRL chunked head", "verl FusedLinearForPPO"]
    # nothing is compiled here: eager code stands in for this package
    ways = {name: WAYS[name] for name in names} | {"slime_fused": WAYS["eager"]}
    monkeypatch.setattr(lm_head, "WAYS", ways)
    monkeypatch.setattr(lm_head, "heads", lambda: sizes)
    monkeypatch.setattr(lm_head.measure, "in_fresh_process", _here)
    options = argparse.Namespace(out=tmp_path, resume=False, minutes=60, seconds=0)
    options.minutes = -1  # nothing is started
    lm_head.main(options)
    assert not (tmp_path / "lm_head.json").exists()
    options.minutes, calls = 60, []
    monkeypatch.setattr(lm_head, "heads", lambda: sizes[:1])
    lm_head.main(options)
    monkeypatch.setattr(lm_head, "heads", lambda: sizes)
    original = lm_head.cell
    monkeypatch.setattr(lm_head, "cell", lambda *a: calls.append(a[0].loss) or original(*a))  # type: ignore[func-returns-value]
    options.resume = True
    lm_head.main(options)
    assert calls == ["log-probs"]
    text = (tmp_path / "lm_head.md").read_text()
    assert text.count("TRL chunked head") == 2
    assert "No module named" in text
    assert "slime_fused: what is asked of it" in text
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / f"lm_head_{ROWS}_{VOCAB}_{HIDDEN}.png").exists()


def _here(function: Any, *args: Any) -> Any:
    """`in_fresh_process` without the process: an exception is a failed cell."""
    torch._dynamo.reset()
    try:
        return function(*args)
    except Exception as error:
        raise CellFailed(str(error)) from error


def test_peers_that_are_not_the_same_say_so() -> None:
    for way, loss, reason in (
        ("prime-rl chunked head", "policy and entropy", "no gradient of the entropy"),
        ("Liger fused linear GRPO", "cross entropy", "without entropy"),
        ("Cut Cross-Entropy, torch path", "log-probs", "cross entropy only"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            WAYS[way](Head(loss, "float32", ROWS, VOCAB, HIDDEN))
