"""A stand-in for a CUDA device: torch's CUDA build runs here on a machine without a GPU. **Nothing runs on a GPU.**

    python -m tests.cuda.standin [--no-kernels] COMMAND ...      runs a command whose torch finds the stand-in

torch's allocator, streams, events, CUDA graphs, Dynamo and inductor's code generation for CUDA are torch's own code.
They call a library in the place of CUDA's runtime and driver (`driver/`, built by `build.py`), which counts what it is
asked for. There are two kinds of runs:

    values        Each ATen operator that has a CUDA kernel is computed by its CPU kernel over the same memory. Triton's
                  kernels, ours and inductor's, are interpreted. Sizes are small.
    no kernels    Triton's kernels are compiled by ptxas as for the device and launched into nothing. Large ATen
                  operators compute nothing. Peaks are those of torch's own caching allocator, at production sizes.

It cannot show times, races, what a GPU's instructions round (`ex2.approx`, tensor cores), cuBLAS' workspaces, or
accesses outside of a tensor. The device's name says that it is a stand-in, so no table can be taken for a GPU's.

    build.py         the library, for the torch of this interpreter
    __main__.py      the command above
    site/            loaded by every Python of that command: installs what is below as soon as torch is imported
    counts.py        what the library was asked for
    memory.py        a CPU tensor over the memory of a CUDA tensor
    graphs.py        what is called while a CUDA graph is captured, and again at each replay
    operators.py     ATen's operators; half_softmax.py: two that the CPU does not have
    interpreter.py   Triton's kernels; libdevice.py: CUDA's mathematical functions

Settings, by the environment: STANDIN_CC=80|90|100|120, STANDIN_DEVICES, STANDIN_SMS, STANDIN_MIB, STANDIN_LOG=FILE.
"""

import os

ON = "STANDIN"
VALUES, NO_KERNELS = "values", "no-kernels"


def kind() -> str:
    """VALUES or NO_KERNELS in a process on the stand-in, else an empty string."""
    return os.environ.get(ON, "")
