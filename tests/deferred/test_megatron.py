"""megatron-core's ColumnParallelLinear as the head: two gloo ranks, each with half of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slime_compile
from slime_compile.backend import options
from tests.deferred.models import OPTIONS
from tests.support.ranks import on_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

LENGTH, BATCH, HIDDEN, VOCAB = 6, 2, 8, 64


class Model(nn.Module):
    """The end of a GPTModel: hidden [s, b, h] to logits [b, s, v]."""

    def __init__(self, config: Any, group: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear

        self.norm = nn.LayerNorm(HIDDEN)
        self.output_layer = ColumnParallelLinear(
            HIDDEN, VOCAB, config=config, init_method=nn.init.normal_, bias=False, gather_output=False, tp_group=group
        )  # fmt: skip

    def forward(self, hidden: Tensor) -> Any:
        logits, _ = self.output_layer(self.norm(hidden))
        return logits.transpose(0, 1).contiguous()


def loss(logits: Any, target: Tensor) -> Tensor:
    """Megatron's own cross entropy, which is an autograd.Function over the ranks."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits.float().clone(), target).mean()


def _rank(rank: int) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.cuda.current_device = lambda: "cpu"  # Megatron makes its buffers there
    options.MIB = 1
    group = parallel_state.get_tensor_model_parallel_group()
    found: dict[str, Any] = {}
    for sequence_parallel in (False, True):
        torch._dynamo.reset()
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, use_cpu_initialization=True,
            tensor_model_parallel_size=2, sequence_parallel=sequence_parallel, perform_initialization=False,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=draw)
        target = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
        weight = torch.randn(VOCAB, HIDDEN, generator=draw)
        given = hidden.chunk(2)[rank] if sequence_parallel else hidden
        model = Model(config, group)
        with torch.no_grad():
            model.output_layer.weight.copy_(weight.chunk(2)[rank])
        ways: dict[str, Any] = {"plain": loss, "eager": slime_compile.with_tensors(loss)}
        chunk = {"chunk_mib": 4 * VOCAB // 2 * 4}  # bytes of four rows
        ways["compiled"] = torch.compile(
            ways["eager"], backend="slime_fused", fullgraph=True, options=OPTIONS | chunk
        )
        for name, function in ways.items():
            if name == "eager":
                handle = slime_compile.defer_logits(model)
            leaf = given.clone().requires_grad_()
            model.zero_grad()
            logits = model(leaf)
            deferred = isinstance(logits, slime_compile.DeferredLogits)
            value = function(logits, target)
            value.backward()
            grads = [leaf.grad, *(p.grad for p in model.parameters())]
            found[f"{sequence_parallel} {name}"] = (deferred, [value.detach(), *grads])
        found[f"{sequence_parallel} heads"] = slime_compile.reports()[-1].to_dict()
        handle.remove()
        assert "_forward_impl" not in vars(model.output_layer)
    dist.barrier()
    return found


@pytest.mark.thorough  # two processes that import megatron-core, two compiles
def test_column_parallel_linear() -> None:
    for answer in on_ranks(2, _rank):
        if isinstance(answer, Exception):
            raise answer
        for sequence_parallel in (False, True):
            want = answer[f"{sequence_parallel} plain"][1]
            for name in ("eager", "compiled"):
                deferred, found = answer[f"{sequence_parallel} {name}"]
                assert deferred, name
                torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
            assert answer[f"{sequence_parallel} heads"]["chunked_heads"] == 1
