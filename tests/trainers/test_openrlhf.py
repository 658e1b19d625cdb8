"""OpenRLHF: the example does what it says; what is not for us stays with its actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import slime_compile
from slime_compile.integrations import openrlhf as integration
from tests.trainers.checks import (
    check_another_release,
    check_not_known,
    check_on_and_off,
    check_runs,
)

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("openrlhf", "deepspeed", "peft"))),
    reason="openrlhf, deepspeed or peft is not installed; make test-trainers does",
)
STEPS = 20


@pytest.fixture
def module(example: Callable[[str], Any]) -> Iterator[Any]:
    found = example("openrlhf_actor")
    yield found
    integration.disable()


def names() -> list[Any]:
    import openrlhf.models.actor as home

    functions = [getattr(home, name) for name in integration._ARGUMENTS]
    return [*functions, home.Actor.forward]


def test_the_example(module: Any) -> None:
    before = names()
    runs = module.main(["--steps", str(STEPS)])
    assert names() == before
    bounds = {"as it is": 4.2, "pair": 1.15, "deferred": 0.25}
    assert len(set(runs["as it is"].losses)) == STEPS  # it trains
    check_runs(runs, STEPS, bounds, module.LOGITS_BYTES, rel=1e-4, abs=1e-6)
    assert runs["as it is"].peak_bytes > 3.9 * module.LOGITS_BYTES
    assert [run.fused for run in runs.values()] == [0, 2, 2]
    assert [run.chunked_heads for run in runs.values()] == [0, 0, 1]


CALLS: list[dict[str, Any]] = [
    {"action_mask": torch.ones(2, 5)},
    {"return_logprobs": True},
    {"action_mask": torch.ones(2, 5), "return_output": True},
    {"return_logprobs": True, "return_output": True, "return_entropy": True},
    {"return_output": True, "return_entropy": True},
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "+".join(call))
def test_what_a_forward_returns(call: dict[str, Any], module: Any) -> None:
    """The same values; the logits only where no log-probs are."""
    actor = module.actor()
    tokens = torch.randint(module.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    want = actor(tokens, attention_mask=torch.ones(2, 12), **call)
    assert integration.enable({"inner": "aot_eager"})
    found = actor(tokens, attention_mask=torch.ones(2, 12), **call)
    assert actor.temperature == 0.7
    if isinstance(want, tuple):
        assert found[1].logits is None
        if "return_entropy" in call:
            torch.testing.assert_close(found[1].entropy, want[1].entropy, rtol=1e-5, atol=1e-5)
        found, want = found[0], want[0]
    if not isinstance(want, torch.Tensor):
        assert torch.equal(found.logits, want.logits)
        found, want = found.entropy, want.entropy
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_old_log_probs(module: Any) -> None:
    """In evaluation mode, without gradients: as the actor computes them before it trains."""
    actor = module.actor().eval()
    tokens = torch.randint(module.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    given = {"attention_mask": torch.ones(2, 12), "action_mask": torch.ones(2, 5)}
    with torch.no_grad():
        want = actor(tokens, **given)
        assert integration.enable({"inner": "aot_eager"})
        slime_compile.defer_logits(actor.model, in_eval=True)
        torch.testing.assert_close(actor(tokens, **given), want, rtol=1e-5, atol=1e-5)


def test_packed_samples(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's packing needs flash_attn; one that packs samples of equal length stands in for it."""
    import openrlhf.models.actor as home

    def pack(sequences: Any, attention_mask: Any, ring_attn_group: Any) -> Any:
        places = (attention_mask.long().cumsum(-1) - 1).reshape(1, -1)
        return sequences.reshape(1, -1), places, sequences.roll(-1, 1).reshape(1, -1), 0, None

    monkeypatch.setattr(home, "unpad_and_slice_tensor", pack)
    monkeypatch.setattr(
        home, "gather_and_pad_tensor", lambda values, *_: values.view(2, 12), raising=True
    )
    actor = module.actor()
    actor.packing_samples = True
    tokens = torch.randint(module.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    given = {"attention_mask": torch.ones(2, 12), "action_mask": torch.ones(2, 5)}
    more = {"return_output": True, "return_entropy": True}
    want, other = actor(tokens, **given, **more)
    assert integration.enable({"inner": "aot_eager"})
    found, output = actor(tokens, **given, **more)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.entropy, other.entropy, rtol=1e-5, atol=1e-5)
    integration.disable()


def test_on_and_off(module: Any) -> None:
    check_on_and_off(integration, names)


def test_another_openrlhf(module: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import openrlhf.models.actor as home

    with monkeypatch.context() as context:
        check_another_release(integration, names, context, caplog)
    monkeypatch.setattr(home, "compute_entropy", lambda logits, chunk: None)
    check_not_known(integration, names, caplog)
