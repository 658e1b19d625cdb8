"""Programs made up from plain torch over hundreds of rows of one kind: where eager code loses nothing, nor do we."""

import pytest

from fx_passes.rules import pointwise
from fx_passes.walk import near
from tests.support.program_inputs import Spec
from tests.support.program_rows import COUNT, VOCAB, losses, row_programs
from tests.support.programs import Program

BATCHES, PER_BATCH = 12, 50  # 1 s each
SPEC = Spec((COUNT,), VOCAB, grads=("leaf", "none"))


# log_softmax(log_softmax(x)) is one log_softmax to us, with its roundings; in eager code the second takes away those of
# the first, forward and backward.
NORMALISED_TWICE = {1280}


def _assert_none(start: int, count: int) -> None:
    lost = {
        seed: (program.source, losses(program))
        for seed, program in row_programs(start, count)
        if seed not in NORMALISED_TWICE
    }
    told = ["\n".join([f"seed {seed}", text, *each]) for seed, (text, each) in lost.items() if each]
    assert not told, "\n".join(told)


@pytest.mark.thorough
def test_rows_of_one_kind() -> None:
    _assert_none(0, 30)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_hundreds_of_programs(batch: int) -> None:
    _assert_none(1000 + batch * PER_BATCH, PER_BATCH)


OFFSETS = Program(
    (
        "v0 = x.softmax(-1).clone()",
        "v0[::2] = x[::2]",
        "return (F.cross_entropy(v0, t, col.abs(), reduction='none') + 0 * x.sum(-1),)",
    ),
    SPEC,
)
CERTAIN = Program(
    (
        "v0, v1 = x.log_softmax(-1), y.log_softmax(-1)",
        "v2 = torch.logsumexp(torch.stack([v0, v1]), 0) - math.log(2)",
        "return (F.kl_div(v2, v0, log_target=True, reduction='none').sum(-1) + v0[..., 0].exp(),)",
    ),
    SPEC,
)


def test_a_lost_offset_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not losses(OFFSETS)
    monkeypatch.setattr(near, "_is_unknown_level", lambda *_: False)
    assert any("'offset 1000'" in told for told in losses(OFFSETS))


def test_a_lost_cancellation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not losses(CERTAIN)
    monkeypatch.setattr(pointwise, "_may_cancel", lambda _: False)
    assert any("gradients 0" in told for told in losses(CERTAIN))
