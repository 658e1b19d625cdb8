"""verl: the example does what it says; what is not for us stays with verl's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip(
    "verl.workers.engine.fsdp.transformer_impl",
    reason="verl, or what its engine imports, is not installed",
    exc_type=ImportError,
)

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import slime_compile
from slime_compile.integrations import verl as integration
from tests.trainers.checks import check_another_release, check_on_and_off, check_runs

STEPS = 20
KIND: Any = FSDPEngineWithLMHead


def names() -> list[Any]:
    return [KIND.prepare_model_outputs]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = KIND.prepare_model_outputs
    yield
    integration.disable()
    assert KIND.prepare_model_outputs is before


def test_the_example(example: Callable[[str], Any]) -> None:
    actor = example("verl_actor")
    runs = actor.main(["--steps", str(STEPS)])
    bounds = {"as it is": 3.2, "pair": 1.2, "deferred": 0.3}
    assert len(set(runs["as it is"].losses)) == STEPS  # it trains
    check_runs(runs, STEPS, bounds, actor.LOGITS_BYTES, rel=1e-4, abs=1e-6)
    assert runs["as it is"].peak_bytes > 2.9 * actor.LOGITS_BYTES
    assert [run.fused for run in runs.values()] == [0, 2, 2]
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 1]


@pytest.mark.parametrize("flag", ["calculate_sum_pi_squared", "use_remove_padding"])
def test_what_stays_with_verl(
    flag: str, example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = example("verl_actor")
    engine = actor.Engine(actor.model())
    data = actor.micro_batch(torch.Generator().manual_seed(0))
    asked = {flag: flag != "use_remove_padding"}
    data = actor.tensordict_utils.assign_non_tensor(data, temperature=1.0, **asked)
    engine.compute_entropy_from_logits = actor.entropy_from_logits
    inputs, more = engine.prepare_model_inputs(data)
    output = engine.module(**inputs)
    want = engine.prepare_model_outputs(output, more, data, None)
    assert integration.enable()
    found = engine.prepare_model_outputs(output, more, data, None)
    assert set(found) == set(want)
    for name, value in want.items():
        assert torch.equal(found[name].values(), value.values()), name


def test_micro_batches_of_several_sizes(
    example: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One compile for the first, one for all others."""
    actor = example("verl_actor")
    config = actor.FSDPActorConfig(entropy_coeff=0.01, rollout_n=1, ppo_micro_batch_size_per_gpu=4)
    found = []
    known = len(slime_compile.reports())
    for ours in (False, True):
        torch._dynamo.reset()
        engine = actor.Engine(actor.model().train())
        engine.compute_entropy_from_logits = actor.entropy_from_logits
        if ours:
            assert integration.enable({"inner": "aot_eager", "chunk_mib": actor.CHUNK_MIB})
            slime_compile.defer_logits(engine.module)
        draw = torch.Generator().manual_seed(0)
        losses = []
        for sizes in ((240, 220, 180, 160), (200, 100, 50, 20), (221, 13, 17, 180)):
            monkeypatch.setattr(actor, "RESPONSES", sizes)
            loss = engine.loss(actor.micro_batch(draw), config)
            loss.backward()
            losses.append(loss.detach())
        found.append([*losses, *(p.grad for p in engine.module.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    reports = slime_compile.reports()[known:]
    assert [report.to_dict()["chunked_heads"] for report in reports] == [1, 1]


@pytest.mark.parametrize("in_eval", [False, True])
def test_old_log_probs(in_eval: bool, example: Callable[[str], Any]) -> None:
    """In evaluation mode, without gradients: as the actor and the reference compute them."""
    actor = example("verl_actor")
    engine = actor.Engine(actor.model().eval())
    engine.compute_entropy_from_logits = actor.entropy_from_logits
    data = actor.micro_batch(torch.Generator().manual_seed(0))
    with torch.no_grad():
        inputs, more = engine.prepare_model_inputs(data)
        want = engine.prepare_model_outputs(engine.module(**inputs), more, data, None)
        assert integration.enable({"inner": "aot_eager"})
        slime_compile.defer_logits(engine.module, in_eval=in_eval)
        found = engine.prepare_model_outputs(engine.module(**inputs), more, data, None)
    assert set(found) == set(want) == {"log_probs", "entropy"}
    for name, value in want.items():
        torch.testing.assert_close(found[name].values(), value.values(), rtol=1e-5, atol=1e-5)


def test_on_and_off() -> None:
    check_on_and_off(integration, names)


def test_another_verl(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    check_another_release(integration, names, monkeypatch, caplog)
