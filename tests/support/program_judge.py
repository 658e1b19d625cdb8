"""Is what was compiled as right as eager code? The verdict on one program.

Entry points: `Judge(...).judge(program) -> Verdict`, `runs_in_eager`. Eager code in the same dtype gives special values
and the size of an honest error, the same program in float64 the truth, `aot_eager_decomp_partition` (or inductor) the
faults that are torch's own: where plain torch differs in the same places. Compared are outputs and their dtypes, who
requires a gradient, gradients for upstream gradients of several kinds, what is visible in everything that was given
after forward and after backward, which results share memory with one another or with what was given, and whether
gradients stay where the caller changes a result that has none.

These deviations are allowed. What is not finite in eager code because of a logit of -inf, or of an exponential that is
larger than the dtype, may be finite. A row that is multiplied with nothing but zeros may have no gradient, or that of
its other uses, where eager code has NaN for it; which rows those are is not known here, so that a NaN has to stay in
outputs and not in gradients. A row with +inf, or with the negative of -inf, has no softmax: where eager code has an
infinite value, and what it makes of one (exp(x) / inf), NaN is as good (docs/ops.md), and so it is in what would be
NaN if the +inf were; where a part of its gradient is NaN, all of it may be; and what is not finite of it in eager code
may be finite, as the softmax of the negative is. The same of rows that the program makes +inf (1 / 0), where it takes
an exponential or a maximum of them. Where it divides a row by 0, NaN is as good (docs/numerics.md).
A gradient that is infinite may be NaN: a derivative that is infinite times a gradient that is 0, but for its rounding.
Behind a graph break the program may write to logits that a graph has returned, and that backward reads; autograd then
raises (docs/aliasing.md), as inductor does. So such a program is judged once more, with copies of what graphs return.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.autograd import Variable
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slime_compile
from fx_passes.graph.writes import example
from tests.support import harness, program_functions
from tests.support.late import late
from tests.support.program_compare import EXPONENTIALS, compare
from tests.support.program_inputs import NAMES, Inputs, Shape, Spec, in_float64, make
from tests.support.program_memory import Sharing, apart_from, sharing
from tests.support.programs import Program

MIN_VOCAB = 5
DRAWS = 2  # of the tensors, all through the same compiled code
FINITE_ROWS = {"one NaN": "plain", "one +inf": "plain"}  # what stands for rows that are no numbers
MOVES = 8  # by one rounding, each from where the last one led to
MORE_DRAWS = 3  # of eager code alone, for the size of its error
EXACT = 1e-13  # relative errors below are those of float64
MASK = 1e6  # logits from here on mean one
JUMPS = re.compile(  # what may answer otherwise when a number moves by one rounding
    r"[<>]|==|!=|to\(torch\.u?int|nan_to_num|multi_margin|count_nonzero"
    r"|\.log\(\)|\b(arg\w+|a?max|a?min|maximum|minimum|clamp\w*|clip|sort|topk|median|where|sign|bool|isclose|relu|abs|any|all)\b"
)
INFINITE = {"one +inf", "some -inf", "only -inf"}
ASKS = re.compile(  # of what was computed, whether it is a number: there the deviations are visible
    r"(?<!\b[xy])\.is(finite|nan|inf)\(\)|\bis(finite|nan|inf)\((?![xy]\))"
)
TELLS_APART = re.compile(r"[<>]|[!=]=|nan_to_num|\bsign\b")  # NaN and an infinity

CHANGED = "modified by an inplace operation"  # autograd's words

_DTYPES = re.compile(r"\.(float32|float16|bfloat16|float|half)\b")
aten = torch.ops.aten
_OF_LOGITS = {aten.exp, aten.amax, aten.max, aten._softmax, aten._log_softmax, aten.logsumexp}


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: "equal"; "mismatch" or "raises": a failure of ours; "torch": plain torch fails on it too; "discarded":
            eager code raises, or what it computes depends on how it rounds, or on what is not finite of infinite rows.
        fused: number of fused operators.
        detail: the first difference, the error.
        rejections: the reasons of what was refused.
    """

    kind: str
    fused: int = 0
    detail: str = ""
    rejections: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return self.kind in ("mismatch", "raises")


KINDS = ("programs", "fused", "equal", "refused", "torch", "discarded", "mismatch", "raises")


@dataclass
class Counts:
    """Verdicts of many programs."""

    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, Program, Verdict]] = field(default_factory=list)

    def add(self, seed: int, program: Program, verdict: Verdict) -> None:
        self.kinds["programs"] += 1
        self.kinds[verdict.kind] += 1
        self.kinds["fused"] += verdict.fused > 0
        self.kinds["refused"] += not verdict.fused and bool(verdict.rejections)
        if verdict.is_failure:
            self.failures.append((seed, program, verdict))

    def __str__(self) -> str:
        words = {"torch": "failed in plain torch too"}
        return ", ".join(f"{words.get(k, k)} {self.kinds[k]}" for k in KINDS)

    def recorded(self, **how: Any) -> tuple[str, dict[str, int]]:
        """As a property of a test: how the programs were compiled, and how many came to what."""
        name = ", ".join(f"{k}={v}" for k, v in how.items()) or "aot_eager"
        return name, {kind: self.kinds[kind] for kind in KINDS}


@dataclass
class _Run:
    """Outputs, gradients, what was given after forward and after backward; beside these values, who shares memory."""

    outputs: list[Tensor]
    needs: list[Tensor]  # whether each output, and what was given, requires a gradient
    gradients: list[Tensor]
    after_forward: list[Tensor]
    after_backward: list[Tensor]
    memory: Sharing

    def values(self) -> dict[str, Tensor]:
        return {
            f"{what} {at}": value
            for what in ("outputs", "needs", "gradients", "after_forward", "after_backward")
            for at, value in enumerate(getattr(self, what))
        }


@dataclass(frozen=True)
class _Compiled:
    """What became of a compiled program.

    Attributes:
        error: what it raises, or nothing.
        values: names of values that differ from eager code's, and how.
        apart: what shares memory otherwise than in eager code, or changes with a result that is its own there, and how.
    """

    error: str = ""
    values: dict[str, str] = field(default_factory=dict)
    apart: dict[tuple[str, ...], str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """A verdict's."""
        return "raises" if self.error else "mismatch" if self.values or self.apart else "equal"

    @property
    def detail(self) -> str:
        told = (self.error, *self.values.values(), *self.apart.values())
        return next(filter(None, told), "")

    def failed_as(self, plain: _Compiled) -> bool:
        """Whether plain torch fails too: in the same values and memory; what raises tells nothing of memory."""
        if self.error:
            return plain.kind != "equal"
        if plain.error:  # inductor alone joins memory
            return not self.values
        return self.values.keys() <= plain.values.keys() and self.apart.keys() <= plain.apart.keys()


@dataclass
class _Eager:
    """What eager code says of each draw.

    Attributes:
        runs: in the dtype.
        truth: in float64.
        clean: with plain rows for those of NaN and +inf.
        without: with NaN for +inf.
        rows: the kinds of rows that may be in a draw.
        turned: names of gradients whose first dimension is the vocabulary's.
        makes_infinity: whether the program takes a softmax or a maximum of +inf.
        makes_empty_rows: whether it does of rows of -inf that were not given (a division by 0).
        divides_by_zero: whether it divides a row by a number that is 0.
        dtype: of the logits.
        precision: the coarsest dtype that its text names.
        coarse: names of the values that it computes from full-vocabulary numbers in a coarser dtype than the logits'.
        logits: the largest of them: in float64, which is the truth itself, eager code rounds as far as that.
        exponentials: the largest finite one that it takes, 1 of log-probs: what cancels there has its rounding.
        upstream: the largest finite number that its backward computes: what cancels in gradients has its rounding.
    """

    runs: list[_Run]
    truth: list[_Run]
    clean: list[_Run]
    without: list[_Run]
    errors: list[dict[str, float]]
    rows: frozenset[str]
    turned: frozenset[str]
    makes_infinity: bool
    makes_empty_rows: bool
    divides_by_zero: bool
    dtype: torch.dtype
    precision: torch.dtype
    coarse: frozenset[str]
    logits: float
    exponentials: float
    upstream: float

    def differences(self, at: int, ours: _Run) -> dict[str, str]:
        """What differs in draw `at` by more than eager's own error."""
        found = {}
        got, plain, true = ours.values(), self.runs[at].values(), self.truth[at].values()
        if got.keys() != plain.keys():
            return {"number": f"{sorted(got.keys() ^ plain.keys())} are of one only"}
        for name, value in got.items():
            eager, clean = plain[name], self.clean[at].values()[name]
            if unlike := _unlike(value, eager):
                found[name] = unlike
                continue
            if torch.equal(value, eager):
                continue
            usual = max(each.get(name, 0.0) for each in self.errors)
            allowed, lost = ~clean.isfinite(), clean.isfinite() & eager.isinf()
            if "one +inf" in self.rows:
                allowed |= ~eager.isfinite()
                lost |= eager != clean  # it depends on such a row
                lost |= self.without[at].values()[name].isnan()
            if {"some -inf", "only -inf"} & self.rows:
                lost |= eager == torch.inf
            if self.makes_infinity or self.makes_empty_rows:
                lost |= eager.isinf()
            if self.divides_by_zero:
                lost |= True
            if self.is_gradient(at, name):
                allowed |= eager.isnan()
                lost |= eager.isinf()
                of_row = eager.isnan() & (clean.isfinite() | self.makes_infinity)
                lost |= of_row.any(0 if name in self.turned else -1, keepdim=True)
            precision = self.precision_of(name, true[name], eager.dtype, usual)
            between = self.between(at, name, precision)
            found[name] = compare(
                value,
                eager,
                true[name],
                usual,
                allowed,
                lost,
                precision,
                between,
                self.exponentials,
            )
        return {name: f"draw {at}, {name}: {told}" for name, told in found.items() if told}

    def between(self, at: int, name: str, precision: torch.dtype) -> float:
        """How large values on the way to this one are, whose rounding it may have."""
        itemsize = self.runs[at].values()[name].dtype.itemsize
        sizes = [min(self.exponentials, EXPONENTIALS[itemsize])]
        if torch.float64 in (self.dtype, precision):
            sizes.append(self.logits)
        if self.is_gradient(at, name):
            sizes.append(self.upstream)
        return max(sizes)

    def is_gradient(self, at: int, name: str) -> bool:
        """Also what backward writes over what was given."""
        what, number = name.split()
        if what != "after_backward":
            return what == "gradients"
        before, after = (self.runs[at].values()[f"{w} {number}"] for w in ("after_forward", what))
        return not torch.equal(before.nan_to_num(), after.nan_to_num())

    def precision_of(
        self, name: str, true: Tensor, dtype: torch.dtype, usual: float
    ) -> torch.dtype:
        """float64 for a value that eager code computes without any that is coarser, whatever else is in the program.

        That it has no error does not say so: what is coarse may cancel, and how it is rounded with it.
        """
        if name in self.coarse:
            return self.precision
        finite = true[true.isfinite()].abs()
        magnitude = float(finite.max()) if finite.numel() else 0.0
        exact = usual <= EXACT * max(magnitude, self.logits, 1.0)
        return torch.float64 if dtype is torch.float64 and exact else self.precision


def _unlike(value: Tensor, eager: Tensor) -> str:
    """What is not a matter of rounding."""
    if value.shape != eager.shape or value.dtype != eager.dtype:
        return f"{value.dtype} {[*value.shape]}, eager has {eager.dtype} {[*eager.shape]}"
    if value.dtype is torch.bool and not torch.equal(value, eager):
        return f"{value.tolist()}, eager has {eager.tolist()}"
    return ""


class _Infinities(TorchDispatchMode):
    """Whether what runs in a `with` block takes an exponential or a maximum of +inf, or of a row of -inf.

    And whether it divides a row by 0, how large its exponentials are, and what backward computes.
    """

    any = False
    rows = False
    by_zero = False
    largest = 0.0  # exponential
    upstream = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is aten.div and isinstance(args[1], Tensor):
            over, by = args[0], args[1]
            per_row = over.shape[-1:] != by.shape[-1:] and over.numel() > by.numel()
            self.by_zero |= per_row and bool((by == 0).any())
        if func.overloadpacket in _OF_LOGITS:
            self.any |= bool((args[0] == torch.inf).any())
            self.rows |= args[0].ndim > 1 and bool((args[0] == -torch.inf).all(-1).any())
        found = func(*args, **kwargs or {})
        if func.overloadpacket in (aten.exp, aten.expm1):
            self.largest = max(self.largest, _largest_finite(found))
        if torch._C._current_graph_task_id() >= 0:  # in backward
            sizes = map(_largest_finite, _tensors(found))
            self.upstream = max([self.upstream, *(size for size in sizes if size < MASK**2)])
        return found


class _Coarser(TorchDispatchMode):
    """The memory of what a `with` block computes from full-vocabulary numbers in a coarser dtype than the logits'."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.vocab, self.eps = spec.vocab, torch.finfo(getattr(torch, spec.dtype)).eps
        self.found: dict[
            int, torch.UntypedStorage
        ] = {}  # alive, so that its place is not another's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        coarse = any(map(self.has, _tensors((args, kwargs))))
        for each in _tensors(made):
            if each.is_floating_point() and (coarse or self.rounds(each)):
                storage = each.untyped_storage()
                self.found[storage._cdata] = storage
        return made

    def rounds(self, made: Tensor) -> bool:
        return made.shape[-1:] == (self.vocab,) and torch.finfo(made.dtype).eps > self.eps

    def has(self, value: Tensor) -> bool:
        return value.untyped_storage()._cdata in self.found


def _tensors(found: Any) -> list[Tensor]:
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _largest_finite(found: Tensor) -> float:
    finite = found[found.isfinite()].abs() if found.is_floating_point() else found.new_empty(0)
    return float(finite.max()) if finite.numel() else 0.0


def _with_rows(spec: Spec, instead: dict[str, str]) -> Spec:
    return replace(spec, rows=tuple(instead.get(kind, kind) for kind in spec.rows))


def _turned(spec: Spec) -> frozenset[str]:
    layouts = [at for at, grad in zip(spec.layout, spec.grads, strict=True) if grad != "none"]
    first = (at for at, layout in enumerate(layouts) if layout == "vocabulary first")
    return frozenset(f"gradients {at}" for at in first)


def _coarsest(source: str, dtype: torch.dtype) -> torch.dtype:
    """Of the dtypes named by a program and by the functions that it calls."""
    called = [vars(program_functions).get(name) for name in set(re.findall(r"\w+", source))]
    ours = [
        each for each in called if getattr(each, "__module__", "") == program_functions.__name__
    ]
    texts = " ".join([source, *map(inspect.getsource, ours)])
    named = {getattr(torch, name) for name in _DTYPES.findall(texts)}  # torch.float is float32
    return max({dtype, *named}, key=lambda each: torch.finfo(each).eps)


@dataclass(frozen=True)
class Judge:
    """How programs are compiled.

    Attributes:
        inner, save, consume_logits: options of the backend.
        dynamic: compile for any sizes; every second draw has a row more.
        ranks, shard: how many ranks judge the program together, and which one's x and y these are.
        chunk_rows: so many rows of the logits that a head makes are there at a time; 0 for the option's default.
        grad_in_forward, inline_below: options of the backend.
        late: element-wise values are computed as late as inductor may.
    """

    inner: str = "aot_eager"
    save: str = "logits"
    consume_logits: bool = False
    dynamic: bool = False
    ranks: int = 1
    shard: int = 0
    chunk_rows: int = 0
    grad_in_forward: str = "auto"
    inline_below: int = 0
    late: bool = False

    def judge(self, program: Program) -> Verdict:
        logging.disable(logging.ERROR)  # torch tells of every program that it fails on
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._judge(program)
        finally:
            logging.disable(logging.NOTSET)

    def _judge(self, program: Program) -> Verdict:
        fn = program.function()
        try:
            eager = self.eager(fn, program)
        except Exception as error:
            return Verdict("discarded", detail=_short(error))
        options = harness.OPTIONS | {"min_vocab": MIN_VOCAB, "inner": self.inner}
        options |= {"save": self.save, "consume_logits": self.consume_logits}
        options |= {"grad_in_forward": self.grad_in_forward, "inline_below": self.inline_below}
        earlier = len(slime_compile.reports())
        with self.in_chunks(program.spec) as chunked:
            how = {"backend": "slime_fused", "options": options | chunked}
            with late() if self.late else contextlib.nullcontext():
                ours = self.compared(program, fn, eager, **how)
            if CHANGED in ours.error:
                ours = self.compared(
                    program, fn, eager, backend=functools.partial(_on_copies, **how)
                )
        kind = ours.kind
        report = harness.merged(slime_compile.reports()[earlier:])
        reasons = tuple(dict.fromkeys(r["reason"] for r in report["rejections"]))
        together = self.together(kind)
        if together != "equal":
            plain = "inductor" if self.inner == "inductor" else harness.PLAIN
            without_us = [
                self.compared(program, fn, eager, backend=each) for each in (plain, "aot_eager")
            ]
            jumps = together == "mismatch" and (
                _asks(program) or self.jumps(program, fn, eager.truth)
            )
            untouched = not report["fused"] and any(each.kind != "equal" for each in without_us)
            if untouched or any(ours.failed_as(each) for each in without_us):
                kind = "torch"  # where nothing was fused, in whatever way
            elif jumps and ours.values:
                kind = "discarded"
        return Verdict(kind, report["fused"], ours.detail, reasons)

    @contextlib.contextmanager
    def in_chunks(self, spec: Spec) -> Iterator[dict[str, int]]:
        """Options, for what is compiled in the `with` block."""
        if not self.chunk_rows:
            yield {}
            return
        row_bytes = spec.vocab * getattr(torch, spec.dtype).itemsize
        with harness.chunks_in_bytes():
            yield {"chunk_mib": self.chunk_rows * row_bytes}

    def together(self, kind: str) -> str:
        """The worst kind of any rank: what follows has collectives that all of them run, or none."""
        if self.ranks == 1:
            return kind
        kinds = [kind] * self.ranks
        dist.all_gather_object(kinds, kind)
        return next((each for each in kinds if each != "equal"), "equal")

    def eager(self, fn: Callable[..., Any], program: Program) -> _Eager:
        spec = program.spec
        inputs = self.inputs(spec)
        truth = [self.true(fn, spec, each) for each in inputs]
        with _Infinities() as seen, _Coarser(spec) as coarser:
            runs = [self.run(fn, each) for each in inputs[:DRAWS]]
            coarse = {n for each in runs for n, v in each.values().items() if coarser.has(v)}
        runs += [self.run(fn, each) for each in inputs[DRAWS:]]
        clean = without = runs
        if FINITE_ROWS.keys() & spec.rows:
            clean = self.other_rows(fn, spec, FINITE_ROWS)
        if "one +inf" in spec.rows:
            without = self.other_rows(fn, spec, {"one +inf": "one NaN"})
        errors = self.errors(fn, spec, runs, truth)
        dtype, logits = getattr(torch, spec.dtype), max(map(_largest_logit, inputs))
        precision = _coarsest(program.source, dtype)
        rows = frozenset(spec.rows)
        empty = seen.rows and "only -inf" not in rows
        turned = _turned(spec)
        made = (
            seen.any,
            empty,
            seen.by_zero,
            dtype,
            precision,
            frozenset(coarse),
            logits,
            seen.largest,
            seen.upstream,
        )
        return _Eager(runs, truth, clean, without, errors, rows, turned, *made)

    def other_rows(self, fn: Callable[..., Any], spec: Spec, instead: dict[str, str]) -> list[_Run]:
        return [self.run(fn, each) for each in self.inputs(_with_rows(spec, instead))[:DRAWS]]

    def errors(
        self, fn: Callable[..., Any], spec: Spec, eager: list[_Run], truth: list[_Run]
    ) -> list[dict[str, float]]:
        """Eager's errors in each draw; float64 is the truth itself, so that float32 speaks for it."""
        errors = [_errors(e, t) for e, t in zip(eager, truth, strict=True)]
        if spec.dtype != "float64":
            return errors
        visible = replace(spec, dtype="float32", row_dtype="float32")
        units = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        for each in self.inputs(visible):
            true = self.true(fn, visible, each)
            found = _errors(self.run(fn, each), true)
            errors.append({name: units * error for name, error in found.items()})
        return errors

    def inputs(self, spec: Spec) -> list[Inputs]:
        def lead(seed: int) -> Shape:
            longer = spec.lead[0] + seed % 2 * self.dynamic
            return (longer, *spec.lead[1:])

        finite = _with_rows(spec, FINITE_ROWS)  # NaN has no error
        return [
            make(spec if seed < DRAWS else finite, seed, lead(seed), self.shard)
            for seed in range(DRAWS + MORE_DRAWS)
        ]

    def true(self, fn: Callable[..., Any], spec: Spec, inputs: Inputs) -> _Run:
        with harness.in_float64():
            return self.run(fn, in_float64(inputs, spec))

    def run(self, fn: Callable[..., Any], inputs: Inputs) -> _Run:
        """Call on tensors of its own: the program may write over them."""
        given, leaves = inputs.arguments, inputs.leaves
        outputs = list(fn(*given))
        memory = sharing(outputs, given)
        after_forward = [v.detach().clone() for v in given]
        needs = [torch.tensor(o.requires_grad) for o in (*outputs, *given)]
        chosen = [o for o in outputs if o.requires_grad]
        gradients = _gradients(chosen, leaves) if chosen and leaves else []
        kept = given[2:] if self.consume_logits else given
        after_backward = [v.detach().clone() for v in kept]
        found = [o.detach() for o in outputs]
        return _Run(found, needs, gradients, after_forward, after_backward, memory)

    def compared(
        self, program: Program, fn: Callable[..., Any], eager: _Eager, **how: Any
    ) -> _Compiled:
        """Compile and compare."""
        torch._dynamo.reset()
        compiled = torch.compile(fn, dynamic=self.dynamic or None, **how)
        inputs = self.inputs(program.spec)[:DRAWS]
        try:
            runs = [self.run(compiled, each) for each in inputs]
        except Exception as error:
            return _Compiled(_short(error))
        values: dict[str, str] = {}
        apart: dict[tuple[str, ...], str] = {}
        for at, run in reversed([*enumerate(runs)]):
            values |= eager.differences(at, run)
            apart |= apart_from(eager.runs[at].memory, run.memory, NAMES)
        if self.ranks == 1 and not values and not apart:
            apart = self.changed(program.spec, fn, compiled, eager.runs[0])
        return _Compiled("", values, apart)

    def changed(
        self, spec: Spec, fn: Callable[..., Any], compiled: Callable[..., Any], eager: _Run
    ) -> dict[tuple[str, ...], str]:
        """Whether gradients depend on results without one, which the caller may change before it takes them."""
        own = _own(eager)
        if not own or not eager.gradients or not self.indifferent(fn, spec, own):
            return {}
        if self.indifferent(compiled, spec, own):
            return {}
        return {("gradients", "own"): f"gradients change, or raise, with results {own}"}

    def indifferent(self, fn: Callable[..., Any], spec: Spec, own: list[int]) -> bool:
        """Whether the gradients stay as they are, bit by bit, where the caller overwrites these results.

        Exception: autograd may refuse the gradient of logits that are returned and then changed
        (`Returned.keep_apart`).
        """
        found = []
        for overwrite in (False, True):
            given = make(spec, 0, shard=self.shard)
            try:
                outputs = list(fn(*given.arguments))
                for at in own if overwrite else ():
                    outputs[at].zero_()
                chosen = [o for o in outputs if o.requires_grad]
                found.append(_gradients(chosen, given.leaves))
            except RuntimeError as error:  # autograd says so, or several elements are one
                narrow = [at for at in own if outputs[at].shape[-1:] != (spec.vocab,)]
                loud = "modified by an inplace operation" in str(error) and len(narrow) < len(own)
                return loud and self.indifferent(fn, spec, narrow)
        return all(bool(_same(a, b).all()) for a, b in zip(*found, strict=True))

    def jumps(self, program: Program, fn: Callable[..., Any], truth: list[_Run]) -> bool:
        """Whether the truth itself moves by more than a thousand roundings where its inputs move by one."""
        if not JUMPS.search(program.source):
            return False
        eps = torch.finfo(getattr(torch, program.spec.dtype)).eps
        for at, each in [*enumerate(self.inputs(program.spec)[:DRAWS])] * MOVES:
            for value in (v.detach() for v in each.arguments if v.is_floating_point()):
                once = [slice(None if stride else 1) for stride in value.stride()]
                own = value[once]  # of rows that are expanded, the one
                rounding = eps * (2 * torch.rand(own.shape) - 1).to(own.dtype)
                own.copy_(torch.where(own == 0, rounding, own * (1 + rounding)))
            moved = self.true(fn, program.spec, each)
            pairs = zip(moved.values().values(), truth[at].values().values(), strict=True)
            for a, b in ((a.double(), b.double()) for a, b in pairs):
                both = a.isfinite() & b.isfinite()
                if (a.isfinite() != b.isfinite()).any():
                    return True
                if both.any() and (a - b)[both].abs().max() > 1000 * eps * b[both].abs().max():
                    return True
        return False


def _on_copies(gm: GraphModule, inputs: Any, backend: str, options: dict[str, Any]) -> Any:
    """Compiled by `backend`; what the graph returns with a gradient is a copy of what it computes."""
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        for node in output.all_input_nodes:
            if node.op != "placeholder" and example(node).requires_grad:
                copy = gm.graph.call_method("clone", (node,))
                copy.meta = {**node.meta, "example_value": example(node).clone()}
                output.replace_input_with(node, copy)
    gm.recompile()
    return lookup_backend(backend)(gm, inputs, options=options)


def runs_in_eager(judge: Judge, program: Program) -> bool:
    """Whether eager code says anything: an exception on one rank would leave the other one waiting."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judge.eager(program.function(), program)
    except Exception:  # whatever eager code refuses
        return False
    return True


def _own(run: _Run) -> list[int]:
    """Results that need no gradient and share memory with such results alone."""
    count = len(run.outputs)
    none = {at for at in range(count) if not run.needs[at]}
    return [
        at
        for at in none
        if {other for other, shared in enumerate(run.memory[at]) if shared} <= none
    ]


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _asks(program: Program) -> bool:
    """Whether the program tells NaN that it has computed from infinities, or from numbers.

    Or puts the largest number in the place of an infinity: from a normaliser as large float32 takes no logarithm.
    """
    rows = set(program.spec.rows)
    tells = "one +inf" in rows and TELLS_APART.search(program.source)
    tells = tells or (INFINITE & rows and "nan_to_num" in program.source)
    return bool(tells or (INFINITE & rows and ASKS.search(program.source)))


def _short(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    told = lines[1] if lines[0].endswith("raised:") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {told[:300]}"


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Upstream gradients by turns: noise, noise with zeros, one number expanded over all."""
    rng = random.Random(len(outputs))
    upstream = []
    for at, output in enumerate(outputs):
        draw = torch.Generator().manual_seed(at)
        noise = torch.randn(output.shape, generator=draw, dtype=torch.float32)
        kind = rng.randrange(3)
        if kind == 1:
            noise = noise * (torch.rand(output.shape, generator=draw) < 0.5)
        elif kind == 2:
            noise = torch.full((), 0.75).expand(output.shape)
        upstream.append(noise.to(output.dtype))
    grads = Variable._execution_engine.run_backward(  # see harness.gradients
        tuple(outputs), tuple(upstream), False, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )  # fmt: skip
    return [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)
    ]


def _largest_logit(inputs: Inputs) -> float:
    logits = torch.cat([given.detach().abs().flatten() for given in inputs.arguments[:2]])
    return _largest_finite(logits[logits < MASK])


def _errors(eager: _Run, truth: _Run) -> dict[str, float]:
    """Eager's largest finite error in each tensor."""
    true = truth.values()
    return {name: _largest(value, true[name]) for name, value in eager.values().items()}


def _largest(found: Tensor, true: Tensor) -> float:
    return _largest_finite(found.double() - true.double())
