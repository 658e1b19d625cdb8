"""Deferred logits under DDP and FSDP2: two processes, gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from slime_compile import DeferredLogits, defer_logits
from tests.deferred.models import BATCH, LENGTH, VOCAB, Model, causal
from tests.deferred.test_own_forward import Adapted
from tests.support.ranks import on_ranks


class AdaptedModel(Model):
    """With LoRA on the head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = Adapted(self.lm_head)  # type: ignore[assignment]


def _data(rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _ddp_looks_for_unused(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def _ddp_static(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def _fsdp(model: Any) -> nn.Module:
    fully_shard(model.body)
    return fully_shard(model)


def _fsdp_half(model: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.body, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _gradients(model: Any, loss: Callable[..., Tensor], rank: int) -> list[Tensor]:
    for _ in range(2):  # a static graph is known in the second
        model.zero_grad()
        logits = model(_data(rank))
        deferred = isinstance(logits, DeferredLogits)
        loss(logits, _data(rank)).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in grads]
    return [torch.tensor(deferred), *whole]


def _rank(rank: int) -> dict[str, list[Tensor]]:
    found = {}
    options = {"inner": "aot_eager", "min_vocab": 32, "strict": True}
    function = torch.compile(causal, backend="slime_fused", fullgraph=True, options=options)
    for wrap in (_ddp, _ddp_looks_for_unused, _ddp_static, _fsdp, _fsdp_half):
        for name, loss in (("plain", causal), ("eager", causal), ("compiled", function)):
            torch.manual_seed(0)
            model = wrap(Model())
            if name != "plain":
                defer_logits(model)
            found[f"{wrap.__name__} {name}"] = _gradients(model, loss, rank)
    for wrap in (_ddp, _ddp_looks_for_unused, _fsdp):
        for name, loss in (("plain", causal), ("eager", causal), ("compiled", function)):
            torch.manual_seed(0)
            model = wrap(AdaptedModel())
            if name != "plain":
                defer_logits(model)
            found[f"adapted{wrap.__name__} {name}"] = _gradients(model, loss, rank)
    found["own group"] = [torch.tensor(_head_in_a_group_of_its_own())]
    dist.barrier()
    return found


def _head_in_a_group_of_its_own() -> bool:
    """Whether reading says that FSDP has freed the weight, and what to do."""
    model = Model()
    fully_shard(model.lm_head)
    fully_shard(model)
    defer_logits(model)
    logits: Any = model(_data(0))
    try:
        logits.exp()
    except RuntimeError as error:
        return "`weight` must have memory" in str(error) and "reshard_after_forward" in str(error)
    return False


@pytest.mark.thorough  # two processes, twenty-five models, eight compiles
def test_wrapped_models() -> None:
    answers = on_ranks(2, _rank)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        assert answer.pop("own group")[0]
        for name, found in answer.items():
            wrap, way = name.split()
            assert bool(found[0]) == (way != "plain"), name
            want = answer[f"{wrap} plain"]
            near = {"rtol": 2e-2, "atol": 2e-4} if "half" in name else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(found[1:], want[1:], msg=name, **near)
    for name, found in answers[0].items():
        torch.testing.assert_close(found, answers[1][name], msg=name)
