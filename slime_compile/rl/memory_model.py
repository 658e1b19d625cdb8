"""The memory of a loss by formula: its peak under `slime_fused`, and the longest fitting micro-batch.

Entry points: `peak_bytes`, `max_tokens_for`. `slime_compile.estimate_peak` looks at a real loss instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fx_passes.rows.chunks import SHARE, Sizes
from slime_compile.backend.options import MIB, Options

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
    - given logits: 2, the logits and their gradient. In fact 1 if nothing else references them; a formula cannot know.
    - given logits and `consume_logits=True`: 1, the gradient is written over them.
    - logits made inside the compiled function, `hidden_states @ weight.T`: one chunk of them
      (all of them if they fit into one); with `lm_head=False` 1.
    - `save="softmax"`: 2, the logits and the softmax; its buffer becomes the gradient. For logits made
      inside: a chunk of both.

    Logits made inside add the hidden states, their gradient and the weight's gradient, and in half
    precision the float32 sums over chunks. A gradient possible in forward counts as computed there: while
    backward multiplies the larger one, two copies exist. Not counted: the weight itself, memory allocated
    before the loss, and the operators' fixed 4 to 6 MiB a thread on the CPU.

    Args:
        tokens: N, rows of the logits.
        vocab_local: V, this rank's columns.
        hidden: size of the hidden states; only counts for logits made inside.
        dtype: of the logits (and hidden states and weight).
        options: of the backend, as given to `torch.compile`.
        logits: are the logits passed in, or made inside the compiled function?
        training: is there a backward?

    Returns:
        Bytes.

    Raises:
        ValueError: a size below 1, or a dtype other than floating.
        RuntimeError: unknown options of the backend.
    """
    loss = _loss_of(vocab_local, hidden, dtype, options, logits, training)
    return loss.peak(tokens)


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
    """The longest micro-batch with a loss fitting into memory: the largest N with `peak_bytes(N, ...)` in memory.

    Args:
        memory_bytes: free memory for the loss, with parameters, optimizer, gradients and saved
            activations of a micro-batch already allocated, but not the logits.
        vocab_local: see `peak_bytes`, as for all others.

    Returns:
        Tokens per rank: rows of the logits. A cap for `partition_by_tokens` counts whole sequences:
        times the context-parallel size.

    Raises:
        ValueError: not even one token fits, or see `peak_bytes`.
        RuntimeError: unknown options of the backend.

    Examples:
        >>> max_tokens_for(20 * 2**30, 76032, 4096, torch.float32)  # TP 2 of a 152,064 vocabulary
        35277
    """
    loss = _loss_of(vocab_local, hidden, dtype, options, logits, training)
    if memory_bytes < loss.peak(1):
        raise ValueError(
            f"`memory_bytes` must be at least {loss.peak(1)} for one token, got {memory_bytes}"
        )
    fits, too_many = 1, 2
    while loss.peak(too_many) <= memory_bytes:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if loss.peak(middle) <= memory_bytes:
            fits = middle
        else:
            too_many = middle
    return fits


@dataclass(frozen=True)
class _Loss:
    """What the peak depends on, apart from the number of tokens. `peak` never falls with more of them."""

    vocab: int
    hidden: int
    dtype: torch.dtype
    options: Options
    inside: bool
    training: bool

    @property
    def row(self) -> int:
        """Bytes of a row of logits."""
        return self.vocab * self.dtype.itemsize

    def peak(self, tokens: int) -> int:
        return max(self._moments(tokens))

    def _moments(self, tokens: int) -> list[int]:
        """Bytes at the moments at which the peak may be."""
        rows = tokens * _ROW_BYTES
        if not self.inside:
            buffers = 1 if not self.training or self._overwritten else 2
            return [buffers * tokens * self.row + rows]
        state = self.hidden * self.dtype.itemsize
        rows += tokens * state
        if not self.training:
            return [self._chunk(tokens) + rows]
        if not self.options.lm_head:
            buffers = 1 if self._overwritten else 2
            # the end of forward, and of backward: the gradients are made when one of two buffers is gone
            return [
                buffers * tokens * self.row + rows,
                tokens * (self.row + state) + self.vocab * state + rows,
            ]
        gradients = tokens * state + self.vocab * state
        chunks = self._chunk(tokens) * (1 if self.options.save == "logits" else 2)
        found = [chunks + gradients + self._sum(tokens) + rows]
        if self._may_be_in_forward and self._chunk(tokens) < tokens * self.row:
            found.append(gradients + max(tokens, self.vocab) * state + rows)
        return found

    def _chunk(self, tokens: int) -> int:
        """What a chunk may have; all logits where they are no more."""
        whole = tokens * self.row
        if not self.options.lm_head:
            return whole
        limit = self.options.chunk_mib * MIB
        sizes = Sizes(tokens, self.vocab, self.dtype.itemsize, limit, depth=self.hidden)
        return min(whole, sizes.chunk_bytes)

    def _sum(self, tokens: int) -> int:
        """Of gradients over chunks, in float32 beside them where they are narrower."""
        if self.dtype.itemsize > 2 or self._chunk(tokens) == tokens * self.row:
            return 0
        of_weight = 4 * self.vocab * self.hidden
        always = self.options.grad_in_forward == "always"
        share = tokens * self.row // SHARE
        if self._may_be_in_forward and (always or of_weight <= share):
            return of_weight
        return min(4 * tokens * self.hidden, of_weight)

    @property
    def _may_be_in_forward(self) -> bool:
        return self.options.grad_in_forward != "never" and self.dtype != torch.float16

    @property
    def _overwritten(self) -> bool:
        """The gradient takes the place of the logits."""
        keeps_logits = self.options.save == "logits"
        return keeps_logits and (self.inside or self.options.consume_logits is True)


def _loss_of(
    vocab_local: int,
    hidden: int,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None,
    logits: Literal["given", "inside"],
    training: bool,
) -> _Loss:
    for name, value in (("vocab_local", vocab_local), ("hidden", hidden)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    if not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be floating, got {dtype}")
    if logits not in ("given", "inside"):
        raise ValueError(f"`logits` must be 'given' or 'inside', got {logits!r}")
    parsed = Options.parse(options)
    return _Loss(vocab_local, hidden, dtype, parsed, logits == "inside", training)
