"""Runs a spelling three ways (compiled, eager, eager in float64) and says whether the compiled one is good enough.

Entry points: `check` for a row of the table, `no_worse_than_eager` for two tensors and their truth, `count_fused`
and `wide_nodes` for the joint graph. Truth is the same function in float64, with every cast of the function to a
smaller floating dtype turned into a cast to float64; nothing is compared with stored numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from spellings import BSV, IGNORE, MUST_FUSE, Spelling
from torch import Tensor
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

VOCAB = 37  # odd, above MIN_VOCAB, equal to no other size here
MIN_VOCAB = 32
ROWS = 7  # no multiple of any chunk size in the table
BATCH, LENGTH = 3, 5
HIDDEN = 4
DRAWS = 3  # pooled, so that "eager's largest error" is not one lucky number
DATA = ("plain", "hard")

OPTIONS: dict[str, Any] = {"inner": "aot_eager", "min_vocab": MIN_VOCAB, "strict": True}
LEAVES = ("logits", "reference", "hidden", "weight")

SMALLER = (torch.float16, torch.bfloat16, torch.float32)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


# ---------------------------------------------------------------- truth


class InFloat64(TorchFunctionMode):
    """Everything that asks for a smaller floating dtype gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in CASTS:
            return args[0].double()
        args = tuple(torch.float64 if _is_smaller(a) else a for a in args)
        kwargs = {k: torch.float64 if _is_smaller(a) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _is_smaller(argument: object) -> bool:
    return isinstance(argument, torch.dtype) and argument in SMALLER


@contextmanager
def in_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(default)


def to_float64(values: Sequence[Any]) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


# ---------------------------------------------------------------- the budget


def no_worse_than_eager(
    actual: Tensor, eager: Tensor, truth: Tensor, dtype: torch.dtype, what: str = "values"
) -> None:
    """Assert that `actual` is as near to `truth` as `eager` is.

    Every element: error <= eager's largest error in this tensor + one rounding to `dtype`. All together: RMSE <=
    2 (3 for halves or fewer than 1000 elements) x eager's RMSE + one rounding. NaN and inf are compared first; a
    value that is finite where eager's is not has to be near the truth, if there is one.

    Args:
        actual: what was compiled.
        eager: plain torch in the same dtype.
        truth: plain torch in float64.
        dtype: of the output; one rounding is half its eps.
        what: names the tensor in the message.
    """
    assert actual.shape == eager.shape, f"{what}: shape {actual.shape}, eager has {eager.shape}"
    got, plain, true = actual.double(), eager.double(), truth.double()
    _same_special_values(got, plain, true, what)
    finite = got.isfinite() & true.isfinite()
    if not finite.any():
        return
    got, true = got[finite], true[finite]
    plain = torch.where(plain.isfinite(), plain, torch.nan_to_num(truth.double()))[finite]
    info = torch.finfo(dtype)
    rounding = info.eps / 2 * true.abs() + info.smallest_normal * info.eps
    error, allowed = (got - true).abs(), (plain - true).abs().max() + rounding
    if dtype is torch.float64:
        # The truth is float64 as well, so eager's error is not seen: as much again as summing in another order.
        allowed = allowed + 16 * info.eps * (true.abs() + true.abs().max())
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (
        f"{what}: error {error[worst]:.3e} where eager's largest is {(plain - true).abs().max():.3e} and one "
        f"rounding {rounding[worst]:.3e}; got {got[worst]:.9g}, truth {true[worst]:.9g}"
    )
    factor = 3 if dtype.itemsize == 2 or true.numel() < 1000 else 2
    limit = factor * _rms(plain - true) + info.eps * _rms(true) + info.smallest_normal
    if dtype is torch.float64:
        limit = limit + 16 * info.eps * _rms(true)
    assert _rms(got - true) <= limit, (
        f"{what}: RMSE {_rms(got - true):.3e}, eager's is {_rms(plain - true):.3e}, limit {limit:.3e}"
    )


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _same_special_values(got: Tensor, plain: Tensor, true: Tensor, what: str) -> None:
    improved = got.isfinite() & ~plain.isfinite()
    agree = (got.isnan() == plain.isnan()) & (got.isinf() == plain.isinf())
    agree &= ~got.isinf() | (got == plain)
    wrong = ~agree & ~improved
    assert not wrong.any(), (
        f"{what}: {got[wrong][0]} where eager has {plain[wrong][0]} (and {int(wrong.sum())} such elements)"
    )
    lost = got.isnan() & true.isfinite() & plain.isfinite()
    assert not lost.any(), f"{what}: NaN where the truth is {true[lost][0]}"


@dataclass
class Pool:
    """The same tensor over several draws of the data, three ways."""

    actual: list[Tensor] = field(default_factory=list)
    eager: list[Tensor] = field(default_factory=list)
    truth: list[Tensor] = field(default_factory=list)

    def check(self, what: str) -> None:
        dtype = self.eager[0].dtype
        no_worse_than_eager(
            *(torch.stack(part) for part in (self.actual, self.eager, self.truth)), dtype, what
        )


# ---------------------------------------------------------------- inputs


def make_inputs(
    spelling: Spelling, dtype: torch.dtype, seed: int, data: str = "plain", rows: int = ROWS
) -> list[Tensor]:
    """Random inputs by the names of the spelling's parameters; leaves require grad.

    `data`: "plain" is 3 N(0, 1); "hard" has rows with offsets of 30 and -40, nearly uniform rows and rows where the
    target's probability is near one. `rows` is N, or the batch size for [B,S,V].
    """
    draw = torch.Generator().manual_seed(seed)
    lead = (rows if rows != ROWS else BATCH, LENGTH) if spelling.shape == BSV else (rows,)
    return [_make(name, lead, dtype, draw, data) for name in spelling.inputs]


def _make(
    name: str, lead: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator, data: str
) -> Tensor:
    match name:
        case "logits" | "reference" | "teacher":
            logits = _logits(lead, draw, data).to(dtype)
            return logits.requires_grad_(name in LEAVES)
        case "hidden":
            return torch.randn(*lead, HIDDEN, generator=draw).to(dtype).requires_grad_()
        case "weight":
            return torch.randn(VOCAB, HIDDEN, generator=draw).to(dtype).requires_grad_()
        case "target":
            return torch.randint(VOCAB, lead, generator=draw)
        case "ignored_target":
            target = torch.randint(VOCAB, lead, generator=draw)
            flat = target.view(-1)
            flat[1::3] = IGNORE  # never all of them
            return target
        case "mask":
            mask = (torch.rand(*lead, generator=draw) < 0.7).long()
            mask[..., -1:] = 1
            return mask
        case "allowed":
            allowed = torch.rand(*lead, VOCAB, generator=draw) < 0.8
            allowed[..., 0] = True
            return allowed
        case "vocab_weight":
            return torch.rand(VOCAB, generator=draw) + 0.5
        case "row_temperature":
            return torch.rand(*lead, generator=draw) + 0.5
        case "batch_temperature":
            return torch.rand(lead[0], 1, 1, generator=draw) + 0.5
        case "drift":  # log of the ratio to the old policy, away from where the clip bites
            choice = torch.tensor([-0.6, -0.1, 0.05, 0.5])
            return choice[torch.randint(4, lead, generator=draw)]
        case "advantages":
            return torch.randn(*lead, generator=draw)
        case _:
            raise ValueError(f"no input is called {name!r}")


def _logits(lead: tuple[int, ...], draw: torch.Generator, data: str) -> Tensor:
    noise = torch.randn(*lead, VOCAB, generator=draw)
    if data == "plain":
        return 3 * noise
    kind = torch.randint(4, (*lead, 1), generator=draw)
    peak = torch.zeros(*lead, VOCAB)
    peak.scatter_(-1, torch.randint(VOCAB, (*lead, 1), generator=draw), 14.0)
    return torch.where(
        kind == 0,
        30 + 5 * noise,
        torch.where(kind == 1, -40 + noise, torch.where(kind == 2, noise / 50, noise + peak)),
    )


def world() -> None:
    """The process group of one process that the sharded spellings reduce over."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# ---------------------------------------------------------------- running


@dataclass
class Run:
    """Outputs of one call, its leaves, and what was left in a mutated argument."""

    outputs: tuple[Tensor, ...]
    leaves: list[Tensor]
    mutated: Tensor | None


def call(fn: Callable[..., Any], spelling: Spelling, inputs: Sequence[Tensor]) -> Run:
    """Call on fresh leaves; a spelling that writes over its logits gets a non-leaf."""
    fresh = [v.detach().clone().requires_grad_(v.requires_grad) for v in inputs]
    leaves = [v for v in fresh if v.requires_grad]
    arguments = list(fresh)
    mutated = None
    if spelling.mutates:
        position = spelling.inputs.index("logits")
        mutated = arguments[position] = fresh[position] * 1
    outputs = fn(*arguments)
    return Run(tuple(outputs), leaves, mutated)


def gradients(run: Run, chosen: Sequence[int], upstream: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of all leaves; zeros where eager's autograd says None."""
    # The engine itself: autograd.grad and autograd.backward take a TorchFunctionMode, and so the truth, off before
    # they call it, and the backward of an autograd.Function would make its own float32 tensors.
    grads = Variable._execution_engine.run_backward(
        tuple(run.outputs[i] for i in chosen),
        tuple(upstream[i] for i in chosen),
        False,  # keep_graph
        False,  # create_graph
        tuple(run.leaves),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return [
        torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, run.leaves, strict=True)
    ]


def choices(differentiable: Sequence[int]) -> list[list[int]]:
    """All outputs together, then each one alone."""
    alone = [[i] for i in differentiable] if len(differentiable) > 1 else []
    return ([list(differentiable)] if differentiable else []) + alone


def compare(
    compiled: Callable[..., Any],
    spelling: Spelling,
    dtype: torch.dtype,
    *,
    data: Sequence[str] = DATA,
    draws: int = DRAWS,
    rows: int = ROWS,
) -> None:
    """Assert that values, gradients and dtypes of `compiled` are as good as eager's."""
    for kind in data:
        pools: dict[str, Pool] = {}
        for seed in range(draws):
            inputs = make_inputs(spelling, dtype, 1000 * rows + seed, kind, rows)
            _one_draw(compiled, spelling, inputs, seed, pools)
        for what, pool in pools.items():
            pool.check(f"{spelling.name}, {kind} data, {what}")


def _one_draw(
    compiled: Callable[..., Any],
    spelling: Spelling,
    inputs: Sequence[Tensor],
    seed: int,
    pools: dict[str, Pool],
) -> None:
    draw = torch.Generator().manual_seed(seed)
    eager = call(spelling.fn, spelling, inputs)
    upstream = [
        torch.randn(o.shape, generator=draw).to(o.dtype) if o.requires_grad else None
        for o in eager.outputs
    ]
    differentiable = [i for i, o in enumerate(eager.outputs) if o.requires_grad]
    for turn, chosen in enumerate(choices(differentiable) or [[]]):
        actual = call(compiled, spelling, inputs)
        eager = call(spelling.fn, spelling, inputs)
        with in_float64():
            truth = call(spelling.fn, spelling, to_float64(inputs_with_grad(inputs)))
        if turn == 0:
            _add_outputs(pools, actual, eager, truth)
        if not chosen:
            continue
        with in_float64():
            true_grads = gradients(truth, chosen, to_float64(upstream))
        names = [n for n, v in zip(spelling.inputs, inputs, strict=True) if v.requires_grad]
        for name, got, plain, true in zip(
            names,
            gradients(actual, chosen, upstream),
            gradients(eager, chosen, upstream),
            true_grads,
            strict=True,
        ):
            assert got.dtype == plain.dtype, f"grad {name}: {got.dtype}, eager has {plain.dtype}"
            _add(pools, f"grad {name} of outputs {chosen}", got, plain, true)


def inputs_with_grad(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Detached copies that keep requires_grad through a cast."""
    return [v.detach().double().requires_grad_() if v.requires_grad else v for v in inputs]


def _add_outputs(pools: dict[str, Pool], actual: Run, eager: Run, truth: Run) -> None:
    assert len(actual.outputs) == len(eager.outputs)
    for i, (got, plain, true) in enumerate(
        zip(actual.outputs, eager.outputs, truth.outputs, strict=True)
    ):
        assert got.dtype == plain.dtype, f"output {i}: {got.dtype}, eager has {plain.dtype}"
        assert got.requires_grad == plain.requires_grad, f"output {i}: requires_grad differs"
        _add(pools, f"output {i}", got, plain, true)
    if eager.mutated is not None and actual.mutated is not None and truth.mutated is not None:
        _add(pools, "mutated logits", actual.mutated, eager.mutated, truth.mutated)


def _add(pools: dict[str, Pool], what: str, got: Tensor, plain: Tensor, true: Tensor) -> None:
    pool = pools.setdefault(what, Pool())
    for part, values in ((pool.actual, got), (pool.eager, plain), (pool.truth, true)):
        part.append(values.detach().clone())


# ---------------------------------------------------------------- the graph


def must_fuse(spelling: Spelling) -> bool:
    return spelling.fused is not None and bool(MUST_FUSE & set(spelling.classes))


def check(
    spelling: Spelling, dtype: torch.dtype, *, inner: str = "aot_eager", **options: Any
) -> None:
    """Compile a spelling and compare it with eager: values, gradients, dtypes, fused operators, the report."""
    import slime_compile

    prepare(spelling)
    chosen = OPTIONS | {"inner": inner} | options
    compiled = torch.compile(spelling.fn, backend="slime_fused", options=chosen)
    compare(compiled, spelling, dtype)
    arguments = example_arguments(spelling, dtype)
    report = slime_compile.explain(spelling.fn, **OPTIONS)(*arguments).to_dict()
    if spelling.fused is not None:
        assert report["fused"] == spelling.fused, (
            f"{spelling.name}: {report['fused']} fused operators, expected {spelling.fused}; "
            f"rejections {report['rejections']}"
        )
    if must_fuse(spelling):
        assert report["wide_after"] == 0, f"{spelling.name}: {report['wide_after']} wide values left"
        assert report["wide_before"] > 0


def prepare(spelling: Spelling) -> None:
    torch._dynamo.reset()
    if spelling.collectives:
        world()


def example_arguments(spelling: Spelling, dtype: torch.dtype, rows: int = ROWS) -> list[Tensor]:
    """One set of arguments; logits that are written over are no leaf."""
    inputs = make_inputs(spelling, dtype, 0, "plain", rows)
    if spelling.mutates:
        position = spelling.inputs.index("logits")
        inputs[position] = inputs[position] * 1
    return inputs
