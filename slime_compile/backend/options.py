"""The options of the backend: one frozen value, built once per compiled graph and passed on explicitly.

Entry point: `Options.parse`. A key of the user's `options={...}` wins over the environment
(`SLIME_FUSED_<OPTION>`), which wins over the default. `inductor.<name>` keys are inductor's own settings; only their
names and types are checked. An unknown name or a wrong type is refused, with the probable name and the valid list.
Nothing else reads the environment.

Torch passes `options` to the backend at the first call of the compiled function. So `torch.compile` can check the
environment only (`slime_compile.backend` does). `slime_compile.explain(fn, **options)` checks at once.
"""

import dataclasses
import difflib
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from fx_passes.graph.formulas import Formulas
from fx_passes.inplace import Consume
from fx_passes.outcome import FuseConfig, Save
from fx_passes.pipeline import NAMES
from fx_passes.rows import InForward, RowsConfig
from slime_compile.torch_private import inductor_config

Inner = Literal["inductor", "aot_eager"]

ENVIRONMENT_PREFIX = "SLIME_FUSED_"
INDUCTOR_PREFIX = "inductor."
MIB = 1 << 20
_LEAST = {"min_vocab": 2, "chunk_mib": 0, "inline_below": 0}
_SWITCHES = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one compiled function.

    Attributes:
        inner: the compiler after the passes: "inductor", or "aot_eager" (no code generation; graphs run as they are).
        min_vocab: least number of columns of a vocabulary. Exception: shards reduced across ranks may be smaller.
        strict: raise if a pass fails. Otherwise the graph is compiled without that pass.
        verify: compare each region with its rewrite on random data at compile time; refuse the rewrite on a mismatch.
        save: the tensor saved for backward: "logits", or "softmax" (its buffer becomes the gradient).
        consume_logits: may the gradient overwrite logits passed in? "auto": if nothing else references them (checked
            at each backward). True: always. False: never. A leaf is never overwritten.
        merge_collectives: exchange the row values of a vocabulary-parallel loss by one all-gather.
        check_ranks: compare the planned exchange of all ranks at compile time; raise if it differs.
        lm_head: run a head's matmul and loss in chunks of rows, without materialising the full logits.
        by_rows: run work on vocabulary-sized tensors over chunks of rows, if each row is independent. False also
            materialises a head's logits.
        chunk_mib: MiB of a chunk of logits. 0: an eighth of the logits, or up to a quarter if an eighth is fewer than
            512 rows (2 D rows of hidden states [N, D], if these are fewer); at least 32 MiB (2 D / 512 of it) and at
            most 512 MiB.
        grad_in_forward: compute the gradient of a scalar loss over a head in forward: "auto" if possible and cheap
            in memory, "always" if possible, "never".
        inline_below: CPU only. For logits with fewer elements, inductor compiles the formulas directly, because
            an operator call would take longer. The gradient then has its own buffer. Needs static shapes and
            inner="inductor"; ignored with consume_logits=True or save="softmax".
        without: names of passes to switch off, separated by commas, to find the one at fault;
            `python -m slime_compile doctor` lists them.
        inductor: inductor's own settings by name (`inductor.<name>` keys).
    """

    inner: Inner = "inductor"
    min_vocab: int = 1024
    strict: bool = False
    verify: bool = False
    save: Save = "logits"
    consume_logits: Consume = "auto"
    merge_collectives: bool = True
    check_ranks: bool = False
    lm_head: bool = True
    by_rows: bool = True
    chunk_mib: int = 0
    grad_in_forward: InForward = "auto"
    inline_below: int = 1 << 18
    without: str = ""
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(
        cls, given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> "Options":
        """Options from the user's flat dict over the environment's defaults.

        Raises:
            RuntimeError: an unknown option, a wrong type or value; the message has the valid ones.
        """
        chosen = _from_environment(os.environ if environ is None else environ)
        inductor: dict[str, Any] = {}
        for name, value in (given or {}).items():
            if name.startswith(INDUCTOR_PREFIX):
                inductor_name = name.removeprefix(INDUCTOR_PREFIX)
                inductor[inductor_name] = _checked_inductor(inductor_name, value)
            else:
                chosen[name] = _checked(name, value, name)
        options = cls(**chosen, inductor=inductor)
        if inductor and options.inner == "aot_eager":
            raise RuntimeError(
                f"Options {sorted(INDUCTOR_PREFIX + name for name in inductor)} need inner='inductor', "
                "got inner='aot_eager'"
            )
        return options

    def key(self) -> tuple[tuple[str, str], ...]:
        """All options as plain text, for the identity of compiled code in torch's caches."""
        own = [(name, repr(getattr(self, name))) for name in known_options()]
        passed_on = [(INDUCTOR_PREFIX + n, _identity(v)) for n, v in self.inductor.items()]
        return tuple(own + sorted(passed_on))

    @property
    def inlined_below(self) -> int:
        """`inline_below`, or 0 if nothing is inlined."""
        asked = self.consume_logits is True or self.save != "logits" or "inlined" in self.left_out
        return 0 if asked or self.inner != "inductor" else self.inline_below

    @property
    def left_out(self) -> frozenset[str]:
        """The passes named by `without`."""
        return _names(self.without)

    def fuse_config(self, min_vocab: int, formulas: Formulas) -> FuseConfig:
        """The configuration of the fusing pass, for a graph with vocabularies of `min_vocab` or more."""
        return FuseConfig(
            formulas,
            min_vocab=min_vocab,
            save=self.save,
            verify=self.verify,
            merge_collectives=self.merge_collectives,
        )

    def rows_config(self, min_vocab: int) -> RowsConfig:
        """The configuration of the pass over rows."""
        return RowsConfig(
            min_vocab,
            heads=self.lm_head,
            chunk_bytes=self.chunk_mib * MIB,
            in_forward=self.grad_in_forward,
            verify=self.verify,
            compiled=self.inner == "inductor",
        )


def known_options() -> tuple[str, ...]:
    """The names a user may give, apart from `inductor.<name>`."""
    return tuple(f.name for f in dataclasses.fields(Options) if f.name != "inductor")


def _known_text() -> str:
    return f"{[*known_options(), INDUCTOR_PREFIX + '<name>']}"


def _inductor_names() -> dict[str, str]:
    """Inductor's settings, and how they are written here."""
    return {name: INDUCTOR_PREFIX + name for name in inductor_config.get_config_copy()}


def _meant(name: str, known: Mapping[str, str]) -> str:
    """The likeliest of the known options, own ones first, or ""."""
    near = known.get(name) or next(
        (
            known[match]
            for names in (known_options(), tuple(known))
            for match in difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.75)
        ),
        None,
    )
    return f"did you mean {near}? " if near else ""


def _valid(name: str) -> Any:
    """The values of a choice, or the type of a plain option."""
    hint = typing.get_type_hints(Options)[name]
    return typing.get_args(hint) or hint


def _checked(name: str, value: Any, shown: str) -> Any:
    if name not in known_options():
        if name == "options":
            raise RuntimeError(
                "Options are keyword arguments here, as in explain(fn, consume_logits=True): got options=..."
            )
        prefix = ENVIRONMENT_PREFIX if shown.startswith(ENVIRONMENT_PREFIX) else ""
        written = {each: prefix + each.upper() if prefix else each for each in known_options()}
        meant = _meant(name, written if prefix else written | _inductor_names())
        raise RuntimeError(f"Unexpected option {shown}, {meant}known options are {_known_text()}")
    valid = _valid(name)
    if isinstance(valid, tuple):
        if not any(value == each and type(value) is type(each) for each in valid):
            raise RuntimeError(
                f"Unexpected value of option {shown}, got {value!r}, should be one of {list(valid)}"
            )
        return value
    if type(value) is not valid:  # a bool is no number here
        raise RuntimeError(
            f"Unexpected type of option {shown}, got {type(value).__name__} ({value!r}), "
            f"should be {valid.__name__}; known options are {_known_text()}"
        )
    unknown = sorted(_names(value) - {*NAMES}) if name == "without" else []
    if unknown:
        raise RuntimeError(f"Option {shown} must name passes, got {unknown}; they are {[*NAMES]}")
    least = _LEAST.get(name)
    if least is not None and int(value) < least:
        raise RuntimeError(f"Option {shown} must be at least {least}, got {value}")
    return value


def _names(text: str) -> frozenset[str]:
    return frozenset(name for each in text.split(",") if (name := each.strip()))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for variable, text in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            value = _parsed(name, text)
            _check_word(name, value, variable)
            chosen[name] = _checked(name, value, variable)
    return chosen


def _check_word(name: str, value: Any, variable: str) -> None:
    """Checks an option whose value is a switch or one of several words."""
    if name not in known_options() or not isinstance(value, str):
        return
    valid = _valid(name)
    words = [each for each in valid if isinstance(each, str)] if isinstance(valid, tuple) else []
    switch = valid is bool or (isinstance(valid, tuple) and True in valid)
    if switch and value not in words:
        allowed = ", ".join([*words, *_SWITCHES])
        raise RuntimeError(
            f"Unexpected value of option {variable}, got {value!r}, should be one of {allowed}"
        )


def _parsed(name: str, text: str) -> Any:
    """The text of an environment variable as the option's type; other text is left for `_checked`."""
    if name not in known_options():
        return text
    readers: dict[Any, Callable[[], Any]] = {
        bool: lambda: _SWITCHES.get(text.strip().lower(), text),
        int: lambda: int(text) if text.strip().isdecimal() else text,
    }
    valid = _valid(name)
    kind = bool if isinstance(valid, tuple) and True in valid else valid
    return readers.get(kind, lambda: text)()


def _checked_inductor(name: str, value: Any) -> Any:
    """The same checks as `torch.compile(options=...)` makes for inductor."""
    if name not in inductor_config.get_config_copy():
        names = {each: each for each in known_options()} | _inductor_names()
        raise RuntimeError(
            f"Unexpected option {INDUCTOR_PREFIX}{name}, {_meant(name, names)}inductor has none of that name; "
            f"torch._inductor.list_options() lists its own, those of this backend are {_known_text()}"
        )
    expected = inductor_config.get_type(name)  # type: ignore[attr-defined]
    if typing.get_origin(expected) is None and not isinstance(value, expected):
        raise RuntimeError(
            f"Unexpected type of option {INDUCTOR_PREFIX}{name}, got {type(value).__name__}, "
            f"should be {getattr(expected, '__name__', expected)}"
        )
    return value


def _identity(value: Any) -> str:
    """A text equal in every process: plain values, and passes by their `uuid`."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_identity, value))}]"
    uuid = getattr(value, "uuid", None)
    return repr(uuid()) if callable(uuid) else type(value).__qualname__
