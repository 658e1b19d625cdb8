"""Measurements: `python -m bench` makes the table of README.md; the protocol is in bench/README.md.

A GPU machine has the checkout and no installation (`bench/gpu.sh`), so nothing tells torch of the backend there:
importing this package does. It also silences two warnings at their source, before torch is imported: the profiler's
about memory from before its start, and torch's about a CUDA_HOME without a device.
"""

import logging
import os
from importlib.metadata import entry_points

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _register() -> None:
    if any(e.name == "slime_fused" for e in entry_points(group="torch_dynamo_backends")):
        return
    from torch._dynamo import register_backend

    from slime_compile.backend import slime_fused

    register_backend(slime_fused, name="slime_fused")


_register()
