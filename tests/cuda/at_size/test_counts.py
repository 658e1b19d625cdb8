"""What a step at production size asks the device for, on the stand-in: launches, waits, memory. No GPU ran it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.at_size.losses import Step, after_a_model, policy, with_the_head

KERNELS = (
    8  # of a step whose logits are given: row_stats, row_grad, what inductor makes of the rest
)


def head(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    return policy(hidden @ weight.t(), tokens, advantages)


def assert_quiet(found: Step) -> None:
    """Nothing waits, nothing is asked of the driver, nothing is illegal."""
    assert (found.asked.waits, found.asked.mallocs, found.asked.illegal) == (0, 0, 0), str(found)


FOLDERS = os.environ.get("CPATH", "").split(os.pathsep)
NO_CUDA_HEADERS = not any((Path(folder) / "nv" / "target").exists() for folder in FOLDERS)
NEEDS_HEADERS = pytest.mark.skipif(
    NO_CUDA_HEADERS, reason="no nv/target, which the wheels of torch 2.11 do not bring"
)


@pytest.mark.parametrize("cpp_wrapper", [False, pytest.param(True, marks=NEEDS_HEADERS)])
def test_given_logits(cpp_wrapper: bool) -> None:
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        found = after_a_model(torch.compile(policy, backend="slime_fused"))
    assert_quiet(found)
    assert 2 <= found.asked.driver_launches <= KERNELS, str(found)
    assert found.large <= 3  # logits; the model's gradient of its weight


@pytest.mark.parametrize(("option", "passes"), [("always", 1), ("never", 2)])
def test_a_chunk_allocates_its_logits(option: str, passes: int) -> None:
    """Each chunk asks torch's allocator for its logits and nothing else that is large, the driver for nothing."""
    few, many = (_head(option, chunk_mib) for chunk_mib in (512, 128))
    assert_quiet(many)
    assert many.large - few.large == passes * (16 - 4)
    assert few.large - passes * 4 <= 12
    assert few.asked.driver_launches < many.asked.driver_launches <= 100


def _head(option: str, chunk_mib: int) -> Step:
    torch._dynamo.reset()
    options: dict[str, Any] = {"grad_in_forward": option, "chunk_mib": chunk_mib}
    return with_the_head(torch.compile(head, backend="slime_fused", options=options), 64)
