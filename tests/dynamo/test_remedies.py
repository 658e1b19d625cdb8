"""Where Dynamo leaves a loss to Python: the report names the place and the remedy, and the remedy works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn_functional
from torch import Tensor

import slime_compile
from bench.cases import functions
from tests.support import harness

OPTIONS = {"inner": "aot_eager", "min_vocab": 32, "strict": True}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "compile", torch.compile)  # restored after the test
    harness.world()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def nested_entropy(logits: Tensor) -> Tensor:
    return functions.NestedEntropy.apply(logits.clone())


def distributed_nn(logits: Tensor) -> Tensor:
    largest = nn_functional.all_reduce(logits.detach().amax(-1), dist.ReduceOp.MAX)
    return nn_functional.all_reduce((logits - largest[:, None]).exp().sum(-1)).log() + largest


def data() -> Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_nested_compile() -> None:
    before = slime_compile.explain(nested_entropy, **OPTIONS)(data())
    (line,) = {
        b.source
        for b in before.breaks
        if "inline_nested_compile" in b.reason and b.name == "forward"
    }
    assert line.endswith(
        f"functions.py:{functions.NestedEntropy.forward.__code__.co_firstlineno + 2}"
    )

    slime_compile.inline_nested_compile()
    slime_compile.inline_nested_compile()  # a second call changes nothing
    after = slime_compile.explain(nested_entropy, **OPTIONS)(data())
    assert after.breaks == ()
    assert (after.fused, len(after.graphs), after.to_dict()["wide_after"]) == (2, 1, 0)

    fn = torch.compile(nested_entropy, backend="slime_fused", options=OPTIONS, fullgraph=True)
    mine, eager = data(), data()
    fn(mine).sum().backward()
    entropy = torch.distributions.Categorical(logits=eager).entropy()
    entropy.sum().backward()
    torch.testing.assert_close(mine.grad, eager.grad)
    torch.testing.assert_close(fn(mine), entropy)


def test_nested_compile_in_a_process_that_has_not_traced_yet() -> None:
    """Dynamo makes its table of torch's functions once, by name, when it first traces."""
    program = """
import slime_compile, torch
slime_compile.inline_nested_compile()
def outer(x):
    @torch.compile(dynamic=True)
    def inner(y):
        return y + 1
    return inner(x)
print(torch.compile(outer, backend="eager", fullgraph=True)(torch.ones(1)).item())
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "2.0", result.stderr


def test_nested_compile_still_compiles_outside_of_tracing() -> None:
    slime_compile.inline_nested_compile()
    calls = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        calls.append(gm)
        return gm.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is deprecated")
def test_distributed_nn() -> None:
    before = slime_compile.explain(distributed_nn, **OPTIONS)(data())
    if torch.__version__ >= "2.12":
        assert before.graphs == ()
        assert any("trace_distributed_nn" in f.reason for f in before.python_frames)

    slime_compile.trace_distributed_nn()
    slime_compile.trace_distributed_nn()
    fn = torch.compile(distributed_nn, backend="slime_fused", options=OPTIONS, fullgraph=True)
    mine, eager = data(), data()
    fn(mine).sum().backward()
    distributed_nn(eager).sum().backward()
    torch.testing.assert_close(mine.grad, eager.grad)


def divided_by_a_number(logits: Tensor) -> Tensor:
    rows = (logits[:, 0] < 9).sum().item()
    return logits.logsumexp(-1).sum() / rows


def rows_selected(logits: Tensor) -> Tensor:
    log_probs = logits[logits[:, 0] < 9].log_softmax(-1)
    return (log_probs.exp() * log_probs).sum(-1).mean()


@pytest.mark.parametrize(
    ("loss", "setting"),
    [
        (divided_by_a_number, "capture_scalar_outputs"),
        (rows_selected, "capture_dynamic_output_shape_ops"),
    ],
)
def test_what_data_alone_says(loss: Any, setting: str) -> None:
    before = reports_of(loss)
    named = f"torch._dynamo.config.{setting} = True"
    assert any(named in each.reason for report in before for each in report.breaks)
    torch._dynamo.reset()
    with torch._dynamo.config.patch({setting: True}):
        (after,) = reports_of(loss)
    assert (after.breaks, after.to_dict()["wide_after"]) == ((), 0)


def reports_of(loss: Any) -> list[slime_compile.Report]:
    """Of a step."""
    known = len(slime_compile.reports())
    torch.compile(loss, backend="slime_fused", options=OPTIONS)(data()).backward()
    return slime_compile.reports()[known:]
