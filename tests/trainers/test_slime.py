"""slime: the example does what it says. In no package registry: `make test-trainers SLIME=/path/to/a/checkout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from slime_compile.integrations import slime as integration
from tests.trainers.checks import check_not_known, check_on_and_off, check_runs

pytestmark = pytest.mark.skipif(
    find_spec("slime") is None or find_spec("slime.backends") is None,
    reason="slime is in no package registry: make test-trainers SLIME=/path/to/a/checkout",
)

STEPS = 20


@pytest.fixture
def module(example: Callable[[str], Any]) -> Iterator[Any]:
    found = example("slime_actor")
    yield found
    integration.disable()


def names() -> list[Any]:
    import slime.backends.megatron_utils.loss as home

    return [getattr(home, name) for name in integration._ARGUMENTS]


def in_float32(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron_gpt

    config = megatron_gpt.TransformerConfig
    chosen = {"bf16": False, "params_dtype": torch.float32}
    monkeypatch.setattr(megatron_gpt, "TransformerConfig", lambda **k: config(**k | chosen))
    monkeypatch.setattr(module, "Float16Module", lambda config, model: model)


def test_the_example(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16: as near to training in float32 as slime's own is."""
    before = names()
    runs = module.main(["--steps", str(STEPS)])
    assert names() == before
    in_float32(module, monkeypatch)
    true = module.train("as it is", STEPS, "aot_eager").losses
    drift = {
        way: max(abs(mine - exact) for mine, exact in zip(run.losses, true, strict=True))
        for way, run in runs.items()
    }
    assert max(drift.values()) <= 2 * drift["as it is"], drift
    bounds = {"as it is": 4.4, "loss": 1.8, "deferred": 0.45}
    assert len(set(runs["as it is"].losses)) == STEPS  # it trains
    check_runs(runs, STEPS, bounds, module.LOGITS_BYTES, abs=3 * drift["as it is"])
    assert runs["as it is"].peak_bytes > 4 * module.LOGITS_BYTES
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 1]
    assert runs["loss"].fused == runs["deferred"].fused == 2


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_float32(module: Any, inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but the order of sums differs."""
    in_float32(module, monkeypatch)
    plain, deferred = (module.train(way, 3, inner).losses for way in ("as it is", "deferred"))
    assert deferred == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_on_and_off(module: Any) -> None:
    check_on_and_off(integration, names)


def test_another_slime(module: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import slime.backends.megatron_utils.loss as home

    monkeypatch.setattr(home, "get_log_probs_and_entropy", lambda logits, tokens: None)
    check_not_known(integration, names, caplog)
    assert "this slime is not known here" in caplog.text
