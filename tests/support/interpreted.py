"""Triton's interpreter in less time, for tests that run kernels in it; called in the child that interprets."""

from typing import Any


def patch_once_a_launch() -> None:
    """Triton's language is patched once in a launch for each module with kernels.

    The interpreter does it in every call of a function within a kernel, and finds what it has patched: a third of its
    time. What is patched is told by the globals of the function alone.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another release: as it is
        return
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return interpreter._LangPatchScope()  # with nothing to take back
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # the launch before has taken its own back
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
