"""Makes the values of the stand-in, in a process that was started on it: `install`, called when torch is imported.

Nothing here asks for a device: a process that has done so can fork no other that uses one.
"""

from tests.cuda.standin import VALUES, graphs, kind, operators


def install() -> None:
    graphs.install()
    operators.install()
    if kind() == VALUES:
        from tests.cuda.standin import (
            interpreter,
        )  # imports Triton, which a run without kernels does not need

        interpreter.install()
