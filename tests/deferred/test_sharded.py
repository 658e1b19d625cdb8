"""Deferred logits of a head that is a DTensor: two gloo ranks, torch's ColwiseParallel and loss_parallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)

import slime_compile
from bench.measure.measure import profiled_peak
from slime_compile import DeferredLogits, defer_logits
from slime_compile.backend import options
from tests.support.ranks import on_ranks

ROWS, VOCAB, HIDDEN = 512, 4096, 8
CHUNK_ROWS = 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(HIDDEN, HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.output_layer(torch.tanh(self.body(x)))


def loss(logits: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def _gradients(model: Any, function: Callable[..., Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    value: Any = function(model(x), y)
    value.backward()
    found = [value.detach(), *(p.grad for p in model.parameters())]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def _rank(rank: int) -> dict[str, Any]:
    options.MIB = 1
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x, y = torch.randn(2, ROWS // 2, HIDDEN), torch.randint(VOCAB, (2, ROWS // 2))
    model: Any = Net()
    found: dict[str, Any] = {"whole": _gradients(model, loss, x, y)}
    plan = ColwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(model, mesh, {"output_layer": plan})
    chosen: dict[str, Any] = {
        "inner": "aot_eager", "min_vocab": 32, "strict": True, "chunk_mib": CHUNK_ROWS * VOCAB // 2 * 4
    }  # fmt: skip
    function = torch.compile(loss, backend="slime_fused", fullgraph=True, options=chosen)
    with loss_parallel():
        found["given"] = _gradients(model, function, x, y)
        handle = defer_logits(model)
        logits = model(x)
        found["deferred"] = isinstance(logits, DeferredLogits)
        found["facts"] = (
            logits.placements == (Shard(2),),
            logits.device_mesh == mesh,
            logits.shape,
        )
        found["eager"] = _gradients(model, loss, x, y)
        found["compiled"] = _gradients(model, function, x, y)
        report = slime_compile.reports()[-1]
        found["heads"] = report.to_dict()["chunked_heads"]
        found["collectives"] = [graph.collectives_after for graph in report.graphs]
        found["peak"] = profiled_peak(lambda: _gradients(model, function, x, y))
        handle.remove()
        found["peak of tensors"] = profiled_peak(lambda: _gradients(model, function, x, y))
        handle = defer_logits(model)
        logits = model(x)
        found["local"] = logits.to_local().shape
        logits = model(x)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found["changed"] = _error(lambda: function(logits, y))
    handle.remove()
    return found


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def test_colwise_parallel() -> None:
    for answer in on_ranks(2, _rank):
        if isinstance(answer, Exception):
            raise answer
        assert answer["deferred"]
        assert answer["facts"] == (True, True, (2, ROWS // 2, VOCAB))
        for way in ("given", "eager", "compiled"):
            torch.testing.assert_close(answer[way], answer["whole"], rtol=1e-4, atol=1e-6, msg=way)
        assert answer["heads"] == 1
        assert answer["collectives"] == [1]
        shard = ROWS * VOCAB // 2 * 4
        assert answer["peak"] < shard / 2 < shard < answer["peak of tensors"]
        assert answer["local"] == (2, ROWS // 2, VOCAB // 2)
        assert "overwritten" in answer["changed"]
