"""Options: defaults, the environment, inductor's own keys, and every refusal by its text."""

import pytest

from slime_compile.backend.options import Options
from tests.support.processes import run_python

BAD = [
    ({"bogus": 1}, r"Unexpected option bogus, known options are \['inner', 'min_vocab'"),
    ({"min_vocab": "64"}, r"Unexpected type of option min_vocab, got str \('64'\), should be int"),
    ({"min_vocab": True}, "Unexpected type of option min_vocab, got bool"),
    ({"min_vocab": 1}, "Option min_vocab must be at least 2, got 1"),
    ({"strict": 1}, "Unexpected type of option strict, got int"),
    ({"save": "all"}, r"option save, got 'all', should be one of \['logits', 'softmax'\]"),
    ({"inner": None}, r"option inner, got None, should be one of \['inductor', 'aot_eager'\]"),
    (
        {"inductor.bogus": 1},
        "option inductor.bogus, inductor has none of that name; torch._inductor.list",
    ),
    ({"consume_logit": True}, "option consume_logit, did you mean consume_logits[?] known options"),
    ({"Save": "softmax"}, "option Save, did you mean save[?]"),
    ({"max_autotune": True}, r"did you mean inductor\.max_autotune[?] known options are"),
    ({"max_autotun": True}, r"did you mean inductor\.max_autotune[?]"),
    ({"inductor.max_autotun": True}, r"did you mean inductor\.max_autotune[?]"),
    (
        {"inductor.consume_logits": True},
        "option inductor.consume_logits, did you mean consume_logits[?]",
    ),
    ({"inductor.max_autotune": "yes"}, "option inductor.max_autotune, got str, should be bool"),
    (
        {"without": "fuse, lineal"},
        r"Option without must name passes, got \['lineal'\]; they are \['function_outputs', ",
    ),
    (
        {"inner": "aot_eager", "inductor.max_autotune": True},
        r"Options \['inductor.max_autotune'\] need inner='inductor'",
    ),
]


def test_defaults() -> None:
    options = Options.parse({}, {})
    assert options == Options()
    assert (options.inner, options.min_vocab, options.save) == ("inductor", 1024, "logits")


@pytest.mark.parametrize(("given", "message"), BAD, ids=lambda v: str(v)[:40])
def test_bad_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Options.parse(given, {})


def test_environment_gives_defaults_and_the_user_wins() -> None:
    environ = {"SLIME_FUSED_MIN_VOCAB": "64", "SLIME_FUSED_STRICT": "true", "PATH": "/bin"}
    assert Options.parse({}, environ) == Options(min_vocab=64, strict=True)
    assert Options.parse({"min_vocab": 32}, environ).min_vocab == 32


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SLIME_FUSED_BOGUS", "1", "Unexpected option SLIME_FUSED_BOGUS, known options are"),
        (
            "SLIME_FUSED_STRICT",
            "maybe",
            "option SLIME_FUSED_STRICT, got 'maybe', should be one of 1, true, on, 0, false, off",
        ),
        ("SLIME_FUSED_CONSUME_LOGITS", "yes", "got 'yes', should be one of auto, 1, true, on, 0"),
        ("SLIME_FUSED_MIN_VOCB", "1", "did you mean SLIME_FUSED_MIN_VOCAB"),
        ("SLIME_FUSED_MIN_VOCAB", "many", "option SLIME_FUSED_MIN_VOCAB, got str"),
        ("SLIME_FUSED_INNER", "eager", "option SLIME_FUSED_INNER, got 'eager', should be one of"),
    ],
)
def test_bad_environment_is_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Options.parse({}, {variable: text})


def test_inductor_keys_go_through() -> None:
    options = Options.parse(
        {"inductor.max_autotune": True, "inductor.triton.cudagraphs": False}, {}
    )
    assert options.inductor == {"max_autotune": True, "triton.cudagraphs": False}


def test_every_option_enters_the_key() -> None:
    variants: list[dict[str, object]] = [
        {},
        {"inner": "aot_eager"},
        {"min_vocab": 64},
        {"strict": True},
        {"verify": True},
        {"save": "softmax"},
        {"consume_logits": True},
        {"inductor.max_autotune": True},
        {"inductor.max_autotune": False},
    ]
    keys = {Options.parse(variant, {}).key() for variant in variants}
    assert len(keys) == len(variants)


def test_a_message_does_not_list_all_of_inductors() -> None:
    with pytest.raises(RuntimeError) as caught:
        Options.parse({"inductor.bogus": 1}, {})
    assert len(str(caught.value)) < 400


def test_the_environment_is_checked_when_torch_compile_is_called() -> None:
    code = """
import torch
try:
    torch.compile(lambda x: x, backend="slime_fused")
except RuntimeError as error:
    print(error)
"""
    said = run_python(code, SLIME_FUSED_CONSUME_LOGIT="1")
    assert (
        "Unexpected option SLIME_FUSED_CONSUME_LOGIT, did you mean SLIME_FUSED_CONSUME_LOGITS?"
        in said
    )


def test_passes_are_left_out_by_name() -> None:
    options = Options.parse({}, {"SLIME_FUSED_WITHOUT": "fuse, parts"})
    assert options.left_out == {"fuse", "parts"}
    assert ("without", "'fuse, parts'") in options.key()
    assert Options.parse({"without": ""}, {"SLIME_FUSED_WITHOUT": "fuse"}) == Options()
    assert Options.parse({"without": "inlined"}, {}).inlined_below == 0
