"""Programs in which writing a gradient over the logits could be seen, one function each.

Entry point: `run(name, options)`, also as a script: `python -m tests.cases.aliasing '{"inner": "inductor"}' out.json`
runs every case (or those named after the path) and writes what it saw. A case gets a `compile` function and asserts;
`consuming` is the same with consume_logits=True.
"""

import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import slime_compile

ROWS, VOCAB, HIDDEN = 6, 1030, 8  # VOCAB just above the default min_vocab
Compile = Callable[..., Callable[..., Any]]
CASES: dict[str, Callable[[Compile, Compile], None]] = {}


def case(function: Callable[[Compile, Compile], None]) -> Callable[[Compile, Compile], None]:
    CASES[function.__name__] = function
    return function


def log_probs(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]


def made_inside(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return log_probs(hidden @ weight.t(), target)


TARGET = torch.arange(ROWS) * 97  # spread over the vocabulary


def logits() -> Tensor:
    """A leaf; `logits() * 1` is what a model would hand over."""
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)).requires_grad_()


def model() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_()


def upstream() -> Tensor:
    """Neither uniform nor of stride 0."""
    return torch.randn(ROWS, generator=torch.Generator().manual_seed(3))


def grads(outputs: Tensor, inputs: Any, grad: Tensor | None = None, **kwargs: Any) -> Any:
    return torch.autograd.grad(outputs, inputs, upstream() if grad is None else grad, **kwargs)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def expected_grad() -> Tensor:
    x = logits()
    (grad,) = grads(log_probs(x, TARGET), x)
    return grad


def in_place() -> bool | None:
    """Whether the graph compiled last wrote its gradient over the logits."""
    placements = slime_compile.reports()[-1].graphs[0].placements
    assert len(placements) == 1, placements
    return placements[0].in_place


def counted() -> tuple[int, int]:
    """Calls of the gradient of the graph compiled last, and how many of them wrote over the logits."""
    (placement,) = slime_compile.reports()[-1].graphs[0].placements
    return placement.calls, placement.over


def why_not() -> str:
    return slime_compile.reports()[-1].graphs[0].placements[0].reason


def raises(error: type[Exception], text: str, action: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(text)):
        action()


# ---- logits made in the graph -------------------------------------------------------------------------------------


@case
def donated_logits_are_overwritten(compile: Compile, consuming: Compile) -> None:
    hidden, weight = model()
    got = grads(compile(made_inside)(hidden, weight, TARGET), (hidden, weight))
    close(got, grads(made_inside(hidden, weight, TARGET), (hidden, weight)))
    assert in_place()


@case
def returned_logits_are_not(compile: Compile, consuming: Compile) -> None:
    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        made = hidden @ weight.t()
        return log_probs(made, target), made

    hidden, weight = model()
    values, made = consuming(fn)(hidden, weight, TARGET)
    before = made.detach().clone()
    close(
        grads(values, (hidden, weight)),
        grads(made_inside(hidden, weight, TARGET), (hidden, weight)),
    )
    assert torch.equal(made, before)
    assert not in_place()


@case
def logits_with_a_second_use(compile: Compile, consuming: Compile) -> None:
    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        made = hidden @ weight.t()
        return log_probs(made, target) + made.tanh().sum(-1)

    hidden, weight = model()
    got = grads(compile(fn)(hidden, weight, TARGET), (hidden, weight))
    close(got, grads(fn(hidden, weight, TARGET), (hidden, weight)))
    assert "the logits are read at" in why_not()


@case
def retain_graph(compile: Compile, consuming: Compile) -> None:
    """A retained graph stays as it is, and the last backward may overwrite; made inside and given, in any order."""
    x, (hidden, weight) = logits(), model()
    programs = [
        (compile(made_inside), (hidden, weight), lambda: (hidden, weight)),
        (compile(log_probs), (x,), lambda: (x * 1,)),
        (consuming(log_probs), (x,), lambda: (x * 1,)),
    ]
    for fn, leaves, make in programs:
        eager = made_inside if len(leaves) == 2 else log_probs
        expected = grads(eager(*leaves, TARGET), leaves)
        for times in (1, 3, 1):
            out = fn(*make(), TARGET)
            for left in reversed(range(times)):
                close(grads(out, leaves, retain_graph=left > 0), expected)
        assert counted() == (5, 3)


@case
def double_backward(compile: Compile, consuming: Compile) -> None:
    """Torch refuses the second derivative, not the first."""
    hidden, weight = model()
    out = compile(made_inside)(hidden, weight, TARGET)
    (first,) = grads(out, hidden, create_graph=True)
    close(first.detach(), grads(made_inside(hidden, weight, TARGET), hidden)[0])
    raises(RuntimeError, "double backward", lambda: first.sum().backward())


@case
def backward_twice(compile: Compile, consuming: Compile) -> None:
    hidden, weight = model()
    out = compile(made_inside)(hidden, weight, TARGET)
    grads(out, hidden)
    raises(RuntimeError, "a second time", lambda: grads(out, hidden))


@case
def checkpoints(compile: Compile, consuming: Compile) -> None:
    hidden, weight = model()
    expected = grads(made_inside(hidden, weight, TARGET), (hidden, weight))
    fn = compile(made_inside)
    for reentrant in (True, False):
        out = checkpoint(fn, hidden, weight, TARGET, use_reentrant=reentrant)
        out.backward(upstream())
        close((hidden.grad, weight.grad), expected)
        hidden.grad = weight.grad = None

    def inner(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return checkpoint(made_inside, hidden, weight, target, use_reentrant=False)

    close(grads(compile(inner)(hidden, weight, TARGET), (hidden, weight)), expected)


@case
def one_output_of_two(compile: Compile, consuming: Compile) -> None:
    def fn(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        made = hidden @ weight.t()
        return log_probs(made, target), log_probs(made * 0.5, target)

    hidden, weight = model()
    both = compile(fn)
    for used in ((0,), (1,), (0, 1)):
        got = sum(both(hidden, weight, TARGET)[i] for i in used)
        want = sum(fn(hidden, weight, TARGET)[i] for i in used)
        close(grads(got, (hidden, weight)), grads(want, (hidden, weight)))


# ---- the caller's logits ------------------------------------------------------------------------------------------


@case
def given_logits_are_left_alone(compile: Compile, consuming: Compile) -> None:
    x = logits()
    given = x * 1
    before = given.detach().clone()
    (got,) = grads(compile(log_probs)(given, TARGET), x)
    close(got, expected_grad())
    assert torch.equal(given, before)
    assert in_place() is False
    assert "Python references the logits" in why_not()


@case
def a_clone_in_the_function_is_no_permission(compile: Compile, consuming: Compile) -> None:
    def fn(logits: Tensor, target: Tensor) -> Tensor:
        return log_probs(logits.clone(), target)

    x = logits()
    given = x * 1
    before = given.detach().clone()
    close(grads(compile(fn)(given, TARGET), x)[0], expected_grad())
    assert torch.equal(given, before)


@case
def consumed_logits_hold_the_gradient(compile: Compile, consuming: Compile) -> None:
    x = logits()
    given = x * 1
    before = given._version
    close(grads(consuming(log_probs)(given, TARGET), x)[0], expected_grad())
    assert in_place()
    close(given.detach(), expected_grad())
    assert given._version > before


@case
def consumed_logits_with_other_readers(compile: Compile, consuming: Compile) -> None:
    """Whoever saved the logits and reads them later gets autograd's error."""
    fn = consuming(log_probs)
    modified = "modified by an inplace operation"

    def second_loss() -> None:
        given = logits() * 1
        (fn(given, TARGET).sum() + fn(given, TARGET).sum()).backward()

    def producer() -> None:
        fn(logits().tanh(), TARGET).sum().backward()

    def auxiliary_first() -> None:
        given = logits() * 1
        auxiliary = (given * given).sum()
        (fn(given, TARGET).sum() + auxiliary).backward()

    for action in (second_loss, producer, auxiliary_first):
        raises(RuntimeError, modified, action)

    x = logits()
    given = x * 1
    values = fn(given, TARGET)
    auxiliary = (given * given).sum()  # made later, so its backward runs first
    (got,) = torch.autograd.grad((values * upstream()).sum() + auxiliary, x)
    close(got, expected_grad() + 2 * x.detach())


@case
def consumed_slices_of_one_tensor(compile: Compile, consuming: Compile) -> None:
    """They share a version counter, so the second raises although it is safe; one call for all rows is right."""
    x = logits()
    fn = consuming(log_probs)
    given = x * 1
    halves = [fn(given[rows], TARGET[rows]) for rows in (slice(0, 3), slice(3, 6))]
    raises(RuntimeError, "modified by an inplace operation", lambda: grads(torch.cat(halves), x))
    close(grads(fn(x * 1, TARGET), x)[0], expected_grad())


@case
def a_leaf_is_never_consumed(compile: Compile, consuming: Compile) -> None:
    """Refused when known at compile time, at run time otherwise."""
    x = logits()
    before = x.detach().clone()
    close(grads(consuming(log_probs)(x, TARGET), x)[0], expected_grad())
    assert torch.equal(x, before)
    assert "a leaf that requires grad" in why_not()

    fn = consuming(log_probs)
    grads(fn(x * 1, TARGET), x)
    raises(RuntimeError, "must not be a leaf", lambda: grads(fn(x, TARGET), x))
    assert torch.equal(x, before)


@case
def returned_given_logits_are_not_consumed(compile: Compile, consuming: Compile) -> None:
    """The backward graph has the same text as in `consumed_logits_hold_the_gradient`.

    (Dynamo keeps an input that is returned as it is to itself; no graph says so. Its caller has allowed it.)
    """

    def fn(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs(logits, target), logits.view(-1)

    x = logits()
    given = x * 1
    values, returned = consuming(fn)(given, TARGET)
    close(grads(values, x)[0], expected_grad())
    assert not in_place()
    assert torch.equal(returned, x.view(-1))


@case
def two_inputs_with_one_storage(compile: Compile, consuming: Compile) -> None:
    """Compiled for two tensors, called with one and its own detach: no guard of torch's tells them apart."""

    def ratio(logits: Tensor, reference: Tensor, target: Tensor) -> Tensor:
        return log_probs(logits, target) - log_probs(reference * 0.5, target)

    def gap(logits: Tensor, reference: Tensor, target: Tensor) -> Tensor:
        difference = logits - reference * 0.5
        return log_probs(logits, target) + (difference * difference).sum(-1)

    other = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(4))
    x = logits()

    def gradient(fn: Callable[..., Any], same: bool) -> Any:
        given = x * 1
        return grads(fn(given, given.detach() if same else other, TARGET), x)[0]

    for fn in (ratio, gap):
        compiled = consuming(fn)
        for same in (False, True):
            close(gradient(compiled, same), gradient(fn, same))


@case
def odd_layouts(compile: Compile, consuming: Compile) -> None:
    x = logits()
    makers: list[Callable[[], Tensor]] = [
        lambda: x[:1].expand(ROWS, VOCAB),
        lambda: (x * 1).t().contiguous().t(),
        lambda: torch.cat([x, x], -1)[:, :VOCAB],
        lambda: torch.cat([x, x], 0)[::2],
    ]
    for make in makers:
        for each in (compile, consuming):
            got = grads(each(log_probs)(make(), TARGET), x)
            close(got, grads(log_probs(make(), TARGET), x))


@case
def logits_divided_in_place(compile: Compile, consuming: Compile) -> None:
    """The caller sees the division, and the gradient is eager's."""

    def fn(logits: Tensor, target: Tensor) -> Tensor:
        logits.div_(0.7)
        return log_probs(logits, target)

    x = logits()
    (expected,) = grads(fn(x * 1, TARGET), x)
    for each in (compile, consuming):
        given = x * 1
        values = each(fn)(given, TARGET)
        close(given.detach(), x.detach() / 0.7)
        close(grads(values, x)[0], expected)


# ---- memory -------------------------------------------------------------------------------------------------------

MANY_ROWS, WIDE = 256, 20011  # 20 MB of logits, so that everything else is a few percent
LOGITS_BYTES = 4 * MANY_ROWS * WIDE
CHUNK_BYTES = 4 << 20  # but for what the CPU operators take for chunks of rows, on one thread


def peak_bytes(step: Callable[[], object]) -> int:
    """Largest sum of what `step` has allocated and not freed, from the profiler's events."""
    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = peak = 0
    for _, change in changes:
        level += change
        peak = max(peak, level)
    return peak


@case
def peak_of_logits_made_inside(compile: Compile, consuming: Compile) -> None:
    """One N*V for the logits, which become their gradient, and the gradients that leave."""
    hidden = torch.randn(MANY_ROWS, HIDDEN, requires_grad=True)
    weight = torch.randn(WIDE, HIDDEN, requires_grad=True)
    target = torch.randint(0, WIDE, (MANY_ROWS,))
    fn = compile(made_inside)
    peak = peak_bytes(
        lambda: torch.autograd.grad(fn(hidden, weight, target).sum(), [hidden, weight])
    )
    leaving = 4 * (hidden.numel() + weight.numel())
    assert peak <= 1.02 * LOGITS_BYTES + CHUNK_BYTES + leaving, peak / LOGITS_BYTES


@case
def peak_of_consumed_logits(compile: Compile, consuming: Compile) -> None:
    """One N*V: the logits themselves."""
    leaf = torch.randn(1, requires_grad=True)
    target = torch.randint(0, WIDE, (MANY_ROWS,))
    fn = consuming(log_probs)

    def step() -> None:
        given = leaf.expand(MANY_ROWS, WIDE).contiguous()
        (gradient,) = torch.autograd.grad(fn(given, target).sum(), given)
        assert gradient.data_ptr() == given.data_ptr()

    peak = peak_bytes(step)
    assert peak <= 1.02 * LOGITS_BYTES + CHUNK_BYTES, peak / LOGITS_BYTES


@case
def peak_of_given_logits(compile: Compile, consuming: Compile) -> None:
    """Two N*V: the logits and their gradient."""
    leaf = torch.randn(1, requires_grad=True)
    target = torch.randint(0, WIDE, (MANY_ROWS,))
    fn = compile(log_probs)

    def step() -> None:
        given = leaf.expand(MANY_ROWS, WIDE).contiguous()
        torch.autograd.grad(fn(given, target).sum(), given)

    peak = peak_bytes(step)
    assert peak <= 2.02 * LOGITS_BYTES + CHUNK_BYTES, peak / LOGITS_BYTES


# ---- running them -------------------------------------------------------------------------------------------------


def run(name: str, options: dict[str, Any]) -> list[list[Any]]:
    """Runs one case; says for each graph it compiled: fused operators, and whether in place."""
    first = len(slime_compile.reports())

    def compile(fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(fn, backend="slime_fused", options={**options, **more})

    def consuming(fn: Callable[..., Any]) -> Callable[..., Any]:
        return compile(fn, consume_logits=True)

    CASES[name](compile, consuming)
    reports = slime_compile.reports()[first:]
    return [[r.fused, [p.in_place for g in r.graphs for p in g.placements]] for r in reports]


def main(options: str, path: str, *names: str) -> None:
    results: dict[str, Any] = {}
    for name in names or CASES:
        try:
            results[name] = {"graphs": run(name, json.loads(options))}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    counters = torch._dynamo.utils.counters["aot_autograd"]
    results["counters"] = {
        "hits": counters["autograd_cache_hit"],
        "misses": counters["autograd_cache_miss"],
    }
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
