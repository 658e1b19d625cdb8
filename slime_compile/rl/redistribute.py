"""From the all-gather layout to zigzag: per-sample values move to the ranks training on them.

Under all-gather context parallelism a rank computes the log-probs of one contiguous piece of the
concatenated samples; the rest of a trainer expects each sample in the two zigzag chunks of ring
attention (see `packed.Packing`). `redistribute_to_zigzag` moves them, differentiably, with one
all-reduce for all samples and names in the forward and one in the backward.

NOTE [Why every rank or none has a backward collective]
A collective entered by some ranks only hangs the others, or is paired with an unrelated one.
Autograd runs a backward depending on each rank's own `requires_grad`, and that differs: a
rank without a response has nothing to differentiate. In slime (#1822) ranks with responses computed
an entropy under `no_grad`, and ranks without had zeros with `requires_grad=True`.
So no decision here depends on one rank's values. The forward's all-reduce carries, next to the
values, the number of ranks tracking a gradient of each name. Every rank reads the same sums and gives
its result the same `requires_grad`, as outputs of one autograd node for all names: its backward is
entered on all ranks or on none. Errors travel the same way, and every rank raises.

The caller's part: all ranks call with the same names, lengths, group and grad mode, and each runs
the backward of a loss that uses at least one tracked output, an empty one included (`empty.sum()`
is enough).

Not handled: values with more than one number per token, and double backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_compile.rl.packed import ResponseSlice, response_slices
from slime_compile.rl.packing import Packing

Values = Mapping[str, Sequence[Tensor | None] | None]

# Values travel as float64, which is exact for each of these dtypes: a rank without a name's values
# does not know the dtype of the other ranks.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIRE = torch.float64


@torch.compiler.disable(reason="whether its result requires grad is agreed on at run time")
def redistribute_to_zigzag(
    values: Values, packing: Packing, group: dist.ProcessGroup | None = None
) -> dict[str, list[Tensor] | None]:
    """Move per-sample response values from the all-gather layout to zigzag.

    One all-reduce in the forward; one in the backward if any rank's values of any name track a
    gradient, and then on all ranks. The ranks agree on a few numbers, read on the host: on CUDA each
    call waits for the stream once.

    Args:
        values: by name, for instance `log_probs` and `entropy`, per sample the values of the
            response tokens predicted by this rank's rows (see `split_responses`): `[n]`
            floating, one dtype per name, one device. None or an empty tensor if there are none;
            None for an uncomputed name. The same names on all ranks.
        packing: this rank's rows, with `context_parallel="all_gather"`.
        group: the context-parallel group, of `packing.cp_size` ranks; None for the default group.

    Returns:
        By name, per sample `[m]`: the values of the response tokens this rank predicts under
        zigzag, its first chunk's before its second's, bit-equal to the input, in the name's dtype
        on every rank. A name that is None on all ranks stays None. The tensors of a name
        require a gradient if and only if some rank's values of that name do.

    Raises:
        ValueError: the values do not agree with `packing`, or not between ranks.
        RuntimeError: another rank's values do not agree with its `packing`: every rank raises.
    """
    group = _checked_group(packing, group)
    plan = _Plan.of(packing)
    names = sorted(values)
    device = _device(values, group)
    problem = _problem(values, plan, packing, group)

    header = _Agreed.local(values, names, plan, group, problem is not None)
    message = torch.zeros(len(header) + len(names) * plan.tokens, dtype=_WIRE)
    message[: len(header)] = torch.tensor(header, dtype=_WIRE)
    message = message.to(device)
    body = message[len(header) :].view(len(names), plan.tokens)
    source = plan.source.to(device)
    if problem is None:
        for row, name in enumerate(names):
            held = [value.detach() for value in values[name] or () if value is not None]
            if held:
                body[row, source] = torch.cat(held).to(_WIRE)
    dist.all_reduce(message, group=group)
    agreed = _Agreed.read(message[: len(header)].tolist(), names, group.size())
    if problem is not None:
        raise ValueError(problem)
    agreed.check(names)

    flat = [_flat(values[name], agreed, row, device) for row, name in enumerate(names)]
    call = _Call(plan.tokens, source, plan.zigzag.to(device), agreed, group)
    moved: tuple[Tensor, ...] = _Move.apply(call, body, *flat)
    result: dict[str, list[Tensor] | None] = {
        name: list(value.split(plan.zigzag_lengths)) if listed else None
        for name, value, listed in zip(names, moved, agreed.listed, strict=True)
    }
    return {name: result[name] for name in values}


@dataclass(frozen=True)
class _Plan:
    """Places in the responses of all samples, one after another: `tokens` of them."""

    tokens: int
    source: Tensor  # [n] int64, the places on this rank before
    source_lengths: list[int]  # of each sample
    zigzag: Tensor  # [m] int64, the places on this rank after
    zigzag_lengths: list[int]

    @staticmethod
    def of(packing: Packing) -> "_Plan":
        starts = list(accumulate(packing.response_lengths, initial=0))
        after = replace(packing, context_parallel="zigzag", rows=None)
        before_slices, after_slices = response_slices(packing), response_slices(after)
        return _Plan(
            starts[-1],
            _places(before_slices, starts),
            _lengths(before_slices),
            _places(after_slices, starts),
            _lengths(after_slices),
        )


def _places(slices: list[tuple[ResponseSlice, ...]], starts: list[int]) -> Tensor:
    pieces = [
        torch.arange(start + part.response.start, start + part.response.stop)
        for parts, start in zip(slices, starts, strict=False)
        for part in parts
    ]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def _lengths(slices: list[tuple[ResponseSlice, ...]]) -> list[int]:
    return [sum(part.response.stop - part.response.start for part in parts) for parts in slices]


@dataclass(frozen=True)
class _Agreed:
    """The result of the forward's all-reduce, equal on all ranks; by row of the body."""

    failed: list[int]  # ranks with wrong values
    listed: list[bool]  # the name is not None on some rank
    tracked: list[bool]  # some rank's values require a gradient
    missing: list[bool]  # the name is None on a rank that holds responses
    dtypes: list[list[torch.dtype]]  # of the values; it should be one

    @staticmethod
    def local(
        values: Values, names: list[str], plan: _Plan, group: dist.ProcessGroup, failed: bool
    ) -> list[float]:
        """This rank's part of the header; the ranks' parts are summed."""
        header = [float(failed and rank == group.rank()) for rank in range(group.size())]
        for name in names:
            listed = values[name]
            # A rank without a response has no say, unless no rank has one.
            voters = [
                value
                for value in listed or ()
                if value is not None and (value.numel() > 0 or plan.tokens == 0)
            ]
            header.append(float(listed is not None))
            header.append(float(_any_tracked(voters)))
            header.append(float(listed is None and len(plan.source) > 0))
            header.extend(float(any(v.dtype == dtype for v in voters)) for dtype in _DTYPES)
        return header

    @staticmethod
    def read(header: list[float], names: list[str], ranks: int) -> "_Agreed":
        width = 3 + len(_DTYPES)
        rows = [header[ranks + width * k : ranks + width * (k + 1)] for k in range(len(names))]
        return _Agreed(
            failed=[rank for rank in range(ranks) if header[rank]],
            listed=[row[0] > 0 for row in rows],
            tracked=[row[1] > 0 for row in rows],
            missing=[row[2] > 0 for row in rows],
            dtypes=[[d for d, n in zip(_DTYPES, row[3:], strict=True) if n] for row in rows],
        )

    def check(self, names: list[str]) -> None:
        if self.failed:
            raise RuntimeError(
                f"ranks {self.failed} of the group got values in disagreement with their "
                "packing; see their own errors"
            )
        for name, listed, missing, dtypes in zip(
            names, self.listed, self.missing, self.dtypes, strict=True
        ):
            if listed and missing:
                raise ValueError(
                    f"`values[{name!r}]` is None on a rank with responses, and not on others"
                )
            if len(dtypes) > 1:
                raise ValueError(
                    f"`values[{name!r}]` must have one dtype on all ranks, got {dtypes}"
                )

    def dtype(self, row: int) -> torch.dtype:
        return self.dtypes[row][0] if self.dtypes[row] else torch.float32


def _any_tracked(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _flat(
    listed: Sequence[Tensor | None] | None, agreed: _Agreed, row: int, device: torch.device
) -> Tensor:
    """One name's values on this rank, `[n]`, requiring a gradient as all ranks agreed.

    Empty tensors stay in: they attach a rank without a response to its own model, whose backward
    may have collectives too.
    """
    held = [value for value in listed or () if value is not None]
    nothing = torch.zeros(0, dtype=agreed.dtype(row), device=device)
    flat = torch.cat([value.to(nothing.dtype) for value in held]) if held else nothing
    if not agreed.tracked[row]:
        return flat.detach()
    return flat if flat.requires_grad else flat.detach().requires_grad_()


@dataclass(frozen=True)
class _Call:
    tokens: int
    source: Tensor
    zigzag: Tensor
    agreed: _Agreed
    group: dist.ProcessGroup


class _Move(torch.autograd.Function):
    """`[n]` per name to `[m]` per name; the forward's collective has filled `body` already."""

    @staticmethod
    def forward(ctx: Any, call: _Call, body: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        moved = tuple(
            values.index_select(0, call.zigzag).to(call.agreed.dtype(row))
            for row, values in enumerate(body)
        )
        untracked = [
            value for value, tracked in zip(moved, call.agreed.tracked, strict=True) if not tracked
        ]
        ctx.mark_non_differentiable(*untracked)
        ctx.call = call
        return moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        rows = [row for row, tracked in enumerate(call.agreed.tracked) if tracked]
        body = torch.zeros(len(rows), call.tokens, dtype=_WIRE, device=call.source.device)
        for place, row in enumerate(rows):
            body[place, call.zigzag] = grads[row].to(_WIRE)
        dist.all_reduce(body, group=call.group)
        result: list[Tensor | None] = [None] * len(grads)
        for place, row in enumerate(rows):
            result[row] = body[place, call.source].to(call.agreed.dtype(row))
        return None, None, *result


def _checked_group(packing: Packing, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Checks of values that the program makes equal on all ranks: these may raise at once."""
    if packing.context_parallel != "all_gather":
        raise ValueError(
            "`packing.context_parallel` must be 'all_gather', the layout to move from, "
            f"got {packing.context_parallel!r}"
        )
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("`group` must be given if torch.distributed has no default group")
    if group.size() != packing.cp_size:
        raise ValueError(
            f"`group` must have packing.cp_size = {packing.cp_size} ranks, got {group.size()}"
        )
    return group


def group_device(group: dist.ProcessGroup) -> torch.device:
    """A device on which `group` can reduce: the current GPU for NCCL, else the CPU."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _device(values: Values, group: dist.ProcessGroup) -> torch.device:
    for listed in values.values():
        for value in listed or ():
            if value is not None:
                return value.device
    return group_device(group)


def _problem(values: Values, plan: _Plan, packing: Packing, group: dist.ProcessGroup) -> str | None:
    """An error on this rank, found before the collective and sent to the others in it."""
    if packing.cp_rank != group.rank():
        return (
            f"`packing.cp_rank` must be the rank in `group`, {group.rank()}, got {packing.cp_rank}"
        )
    device = _device(values, group)
    for name, listed in values.items():
        if listed is None:
            continue
        shapes = [(0,) if value is None else tuple(value.shape) for value in listed]
        expected = [(length,) for length in plan.source_lengths]
        if shapes != expected:
            return (
                f"`values[{name!r}]` must have shapes {expected}, one per sample (None for (0,)), "
                f"got {shapes}"
            )
        held = [value for value in listed if value is not None]
        kinds = {value.dtype for value in held if value.numel()}
        if len(kinds) > 1 or not kinds <= set(_DTYPES):
            return (
                f"`values[{name!r}]` must have one dtype of {_DTYPES}, "
                f"got {sorted(map(str, kinds))}"
            )
        if any(value.device != device for value in held):
            return f"`values[{name!r}]` must be on one device, got {[v.device for v in held]}"
    return None
