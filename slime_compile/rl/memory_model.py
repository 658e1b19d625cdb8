"""What a loss takes, by formula: the peak of one compiled under `slime_fused`, and the longest micro-batch that fits.

Entry points: `peak_bytes`, `max_tokens_for`. `slime_compile.estimate_peak` looks at a real loss instead.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from slime_compile.backend.options import Options

# Per-row values of a loss that are alive at the peak: statistics, targets, coefficients of the
# gradient, the caller's log-probs, advantages and masks. Small beside a row of logits.
_ROW_BYTES = 256


def peak_bytes(
    tokens: int,
    vocab_local: int,
    hidden: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    *,
    logits: Literal["given", "inside"] = "given",
    training: bool = True,
) -> int:
    """Peak memory of a loss compiled under `slime_fused`, the logits included.

    In multiples of the logits, N * V elements of `dtype`:

    - `training=False`, without a gradient: 1.
    - given logits: 2, the logits and their gradient.
    - given logits and `consume_logits`: 1, the gradient is written over them.
    - logits made inside the compiled function: 1, for the same reason.
    - `save="softmax"`: 2, the logits and the softmax, which becomes the gradient; of logits made
      inside in forward only.

    Logits made inside the compiled function, `hidden_states @ weight.T`, add the hidden states,
    their gradient and the weight's gradient. The weight itself and all that is alive before the
    loss are not counted, nor what the operators take on the CPU whatever the size: 4 to 6 MiB a
    thread.

    Args:
        tokens: N, rows of the logits.
        vocab_local: V, this rank's columns.
        hidden: size of the hidden states; only counts for logits made inside.
        dtype: of the logits (and hidden states and weight).
        options: of the backend, as given to `torch.compile`.
        logits: whether the compiled function is given the logits or makes them.
        training: whether there is a backward.

    Returns:
        Bytes.

    Raises:
        ValueError: a size below 1, or a dtype that is not floating.
        RuntimeError: options that the backend does not know.
    """
    moments = _moments(vocab_local, hidden, dtype, options, logits, training)
    return max(fixed + tokens * per_token for fixed, per_token in moments)


def max_tokens_for(
    memory_bytes: int,
    vocab_local: int,
    hidden: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    *,
    logits: Literal["given", "inside"] = "given",
    training: bool = True,
) -> int:
    """The longest micro-batch whose loss fits: the largest N with `peak_bytes(N, ...)` in memory.

    Args:
        memory_bytes: what is free for the loss: with parameters, optimizer, gradients and saved
            activations of a micro-batch already there, but not the logits.
        vocab_local: see `peak_bytes`, as for all others.

    Returns:
        Tokens per rank: rows of the logits. A cap for `partition_by_tokens` counts whole sequences:
        times the context-parallel size.

    Raises:
        ValueError: not even one token fits, or see `peak_bytes`.
        RuntimeError: options that the backend does not know.

    Example:
        >>> max_tokens_for(20 * 2**30, 76032, 4096, torch.float32)  # TP 2 of a 152,064 vocabulary
        35277
    """
    moments = _moments(vocab_local, hidden, dtype, options, logits, training)
    fixed, per_token = max(moments, key=sum)
    if memory_bytes < fixed + per_token:
        raise ValueError(
            f"`memory_bytes` must be at least {fixed + per_token} for one token "
            f"({fixed} and {per_token} per token), got {memory_bytes}"
        )
    return min((memory_bytes - fixed) // per_token for fixed, per_token in moments)


def _moments(
    vocab_local: int,
    hidden: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None,
    logits: Literal["given", "inside"],
    training: bool,
) -> list[tuple[int, int]]:
    """Moments at which the peak may be: bytes whatever the number of tokens, and bytes per token."""
    for name, value in (("vocab_local", vocab_local), ("hidden", hidden)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    if not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be floating, got {dtype}")
    if logits not in ("given", "inside"):
        raise ValueError(f"`logits` must be 'given' or 'inside', got {logits!r}")
    parsed = Options.parse(options)
    row = wide = vocab_local * dtype.itemsize
    if training and not _gradient_takes_the_place_of_logits(parsed, logits):
        wide += row
    if logits == "given":
        return [(0, wide + _ROW_BYTES)]
    state = hidden * dtype.itemsize
    if not training:
        return [(0, wide + state + _ROW_BYTES)]
    # the end of forward, and of backward: the gradients of hidden and weight are made when one of two buffers is gone
    return [(0, wide + state + _ROW_BYTES), (vocab_local * state, row + 2 * state + _ROW_BYTES)]


def _gradient_takes_the_place_of_logits(options: Options, logits: str) -> bool:
    return options.save == "logits" and (logits == "inside" or options.consume_logits)
