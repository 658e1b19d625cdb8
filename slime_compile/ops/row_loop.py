"""`slime_fused::row_loop`: a row-by-row computation, over one chunk of rows after the other.

`fx_passes/rows/program.py` writes what it computes, NOTE [Loops as text] there says how it looks. Results with rows are
buffers that each chunk writes its rows of; sums over rows are kept in float32 for half precision (float64 for float64)
and rounded once. At any time there is one chunk of every value that the body needs at that time.

`row_body.py` computes the chunks.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fx_passes.rows.chunks import Sizes
from fx_passes.rows.program import values_read
from slime_compile.ops import holders
from slime_compile.ops.checks import check_memory
from slime_compile.ops.linear_chunks import Sum
from slime_compile.ops.operators import holders_named, register, why_beside
from slime_compile.ops.regions import on_call, placed, was_under_hooks
from slime_compile.ops.row_body import Chunk, Steps, body_of, may_show

__all__ = ["row_loop", "row_loop_over", "run_loop"]

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library: Any = cast(Any, torch.library).Library("slime_fused", "FRAGMENT")
_library.define(
    "row_loop(Tensor[] rows, Tensor[] whole, SymInt[] sizes, str program, bool compiled, int chunk_bytes,"
    " str region) -> Tensor[]",
    tags=_TAGS,
)
# A result may be x's memory, which is not declared: NOTE [What is decided at run time] in fx_passes/inplace.py.
_library.define(
    "row_loop_over(Tensor x, Tensor[] rows, Tensor[] whole, SymInt[] sizes, str program, bool compiled,"
    " int chunk_bytes, int[2] over, str owner, str region, *, str place='', Tensor[]? others=None,"
    " Tensor[]? after=None) -> Tensor[]",
    tags=_TAGS,
)

_OF_TWO = ("product", "matmul")
_FEW = 64  # numbers per row
_ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "max": lambda total, found: torch.maximum(total, found, out=total),
    "min": lambda total, found: torch.minimum(total, found, out=total),
}


@dataclass(frozen=True)
class Program:
    """A loop's text, read.

    Attributes:
        blocks: the dimensions with rows, of each tensor that has them.
        parts: of each of these tensors the value that says which of its rows are the loop's, -1 for all.
        steps, results: see NOTE [Loops as text].
        wide: columns, and bytes of one, of the widest value of a chunk; of what number its rows are a multiple; the
            depth of the matmuls that compute it.
    """

    blocks: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]
    steps: tuple[Any, ...]
    results: tuple[Any, ...]
    wide: tuple[int, int, int, int]

    def steps_of(self, over: tuple[int, int] | None) -> Steps:
        """With the values that are written into results, and those that are added.

        Args:
            over: a tensor with rows, and the result that is written over it.
        """
        told = [
            each
            for at, each in enumerate(self.results)
            if over is None or at != over[1] or each[0] != "rows"
        ]
        written = tuple(each[1]["v"] for each in told if _is_written(each))
        added = [v["v"] for each in told if not _is_written(each) for v in _values(each)]
        target = None if over is None else (self.results[over[1]][1]["v"], over[0])
        if over is not None and self.parts[over[0]] >= 0:
            target = None  # the chunk is a copy of these rows
        return Steps(self.steps, written, tuple(dict.fromkeys(added)), target)

    def sums_read(self, at: int, given: int) -> bool:
        """Whether a sum over rows reads tensor number `at`, or a view of it, once the chunk is computed.

        Args:
            given: the number of tensors that the loop is given.
        """
        if self.parts[at] >= 0:
            return False  # the sum reads a copy of these rows
        shown = {at}
        for number, (name, args, _) in enumerate(self.steps, given):
            if may_show(name) and not shown.isdisjoint(values_read(args)):
                shown.add(number)
        return not shown.isdisjoint(self.steps_of(None).returned)


def _values(result: Sequence[Any]) -> list[Any]:
    """Of a result, what a chunk gives for it."""
    return list(result[1:3] if result[0] in _OF_TWO else result[1:2])


def _is_written(result: Sequence[Any]) -> bool:
    """Whether the body itself writes the rows of a result.

    A few numbers per row are copied behind it: inductor keeps no part of a chunk in a row's loop where another loop, of
    single numbers, is beside it.
    """
    how, *_, sizes = result[:4]
    return how == "rows" and (not all(isinstance(n, int) for n in sizes) or math.prod(sizes) > _FEW)


def _numbers(result: Sequence[Any]) -> int:
    """The value that says at which rows a result is put, -1 for no such result."""
    return int(result[4]["v"]) if result[0] == "put" else -1


@functools.lru_cache(maxsize=256)
def read(text: str) -> Program:
    told = json.loads(urllib.parse.unquote(text))
    blocks = tuple(tuple(block) for block, *_ in told["rows"])
    parts = tuple(part[0] if part else -1 for _, *part in told["rows"])
    return Program(blocks, parts, tuple(told["steps"]), tuple(told["results"]), tuple(told["wide"]))


# ---- rows ---------------------------------------------------------------------------------------------------------


class Cut:
    """A tensor with its rows in front: [N, ...], as a view where its strides allow one, else chunk by chunk.

    Args:
        numbers: of the rows that the loop works on; None for all of them.
    """

    def __init__(
        self, tensor: Tensor, block: tuple[int, ...], numbers: Tensor | None = None
    ) -> None:
        self.numbers = numbers
        count = len(block)
        self.tensor = tensor.detach().movedim(list(block), list(range(count)))
        self.lead, self.rest = self.tensor.shape[:count], list(self.tensor.shape[count:])
        self.flat = self._flattened()

    @property
    def rows(self) -> int:
        return math.prod(self.lead) if self.numbers is None else len(self.numbers)

    def _flattened(self) -> Tensor | None:
        if len(self.lead) == 1:
            return self.tensor
        try:
            return self.tensor.view([math.prod(self.lead), *self.rest])
        except RuntimeError:  # its rows are not one behind the other in memory
            return None

    def at(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), [n, ...]."""
        if self.flat is not None and self.numbers is None:
            return self.flat[start:stop]
        if self.numbers is None:
            found = list(self._neighbours(start, stop))
            return found[0].contiguous() if len(found) == 1 else torch.cat(found)
        places = self.numbers[start:stop]
        if self.flat is not None:
            return self.flat.index_select(0, places)
        return self.tensor[torch.unravel_index(places, self.lead)]

    def _neighbours(self, start: int, stop: int) -> Iterator[Tensor]:
        """Views of rows [start, stop), those in one that differ in the last dimension of rows only."""
        *outer, size = self.lead
        while start < stop:
            number, first = divmod(start, size)
            last = min(first + stop - start, size)
            sequence = self.tensor
            for at, each in enumerate(outer, 1):
                sequence = sequence[number // math.prod(outer[at:]) % each]
            yield sequence[first:last]
            start += last - first


def _row_count(cuts: Sequence[Cut]) -> int:
    counts = {cut.rows for cut in cuts}
    if len(counts) != 1:
        raise RuntimeError(f"`rows` must have equally many rows, got {sorted(counts)}")
    return counts.pop()


def pieces(rows: int, size: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """[start, stop) of as few chunks of at most `size` rows as there can be, as equal as they can be.

    Args:
        multiple: where `size` is one of it, a chunk's rows are, too, but for the last chunk's.
    """
    count = max(-(-rows // max(size, 1)), 1)
    multiple = multiple if size % multiple == 0 else 1
    start = 0
    for number in range(count):
        stop = min(-(-rows * (number + 1) // count // multiple) * multiple, rows)
        yield start, stop
        start = stop


def _row_chunk(program: Program, rows: int, chunk_bytes: int) -> int:
    columns, item, multiple, depth = program.wide
    return Sizes(rows, columns, item, chunk_bytes, multiple, depth).row_chunk


# ---- results ------------------------------------------------------------------------------------------------------


class _Result:
    """One result: a chunk's rows are written into it, or what a chunk gives is added to it.

    Args:
        out: the memory of a tensor that the body writes it over.
        numbers: of the rows, where they are put among others.
    """

    def __init__(
        self,
        told: Sequence[Any],
        like: Tensor,
        sizes: Sequence[int],
        rows: int,
        chunks: int,
        out: Tensor | None,
        numbers: Tensor | None,
    ) -> None:
        self.how = told[0]
        self.is_written = _is_written(told) and out is None
        self.values = [each["v"] for each in _values(told)]
        self.is_over = out is not None
        self.numbers = numbers
        if out is None:
            out = _made(told, like, sizes, rows)
            if numbers is not None:
                out.zero_()
        self.out = out
        self.total: Any = Sum(self.out, chunks) if self.how == "product" else None

    def add(self, found: Mapping[int, Tensor], start: int, stop: int) -> None:
        if self.is_written or (self.is_over and self.how == "rows"):
            return
        given = [found[at] for at in self.values]
        if self.how == "rows":
            self.out[start:stop].copy_(given[0])
        elif self.numbers is not None:
            self.out.index_copy_(0, self.numbers[start:stop], given[0])
        elif self.how == "matmul":
            torch.mm(*given, out=self.out[start:stop])
        elif self.how == "product":
            self.total.add(given[0].t(), given[1])
        elif self.total is None:
            self.total = given[0].reshape(self.out.shape).clone()
        else:
            _ADDED[self.how](self.total, given[0].reshape(self.out.shape))

    def made(self) -> Tensor:
        if self.numbers is not None and self.is_over:
            others = torch.ones(len(self.out), dtype=torch.bool, device=self.out.device)
            self.out.masked_fill_(others.index_fill_(0, self.numbers, False)[:, None], 0)
        if self.how in ("rows", "put", "matmul"):
            return self.out
        if self.how == "product":
            return cast(Sum, self.total).result()
        return self.out.copy_(self.total)


def _made(told: Sequence[Any], like: Tensor, sizes: Sequence[Any], rows: Any) -> Tensor:
    """Memory of a result."""
    at = 4 if told[0] in _OF_TWO else 3
    dtype, shape = told[at - 1], told[at]
    wanted = [sizes[size["s"]] if isinstance(size, dict) else size for size in shape]
    if told[0] == "rows" and len(told) > 4:
        at = told[4]
        wanted.insert(at, rows)
        return like.new_empty(wanted, dtype=getattr(torch, dtype)).movedim(at, 0)
    if told[0] in ("rows", "matmul"):
        wanted = [rows, *wanted]
    elif told[0] == "put":
        wanted = [math.prod(wanted[:-1]), wanted[-1]]
    return like.new_empty(wanted, dtype=getattr(torch, dtype))


# ---- the operator -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _row_loop(
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    sizes: Sequence[int],
    program: str,
    compiled: bool,
    chunk_bytes: int,
    region: str,
) -> list[Tensor]:
    on_call(region)
    return run_loop(rows, whole, sizes, program, compiled, chunk_bytes, None)


def _row_loop_over(
    x: Tensor,
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    sizes: Sequence[int],
    program: str,
    compiled: bool,
    chunk_bytes: int,
    over: Sequence[int],
    owner: str,
    region: str,
    *,
    place: str = "",
    others: Sequence[Tensor] | None = None,
    after: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    seen = holders.counts(sys.getrefcount(x), x)  # before all else
    if owner == "caller" and was_under_hooks(place):
        owner = "anyone"
    at, result = over
    reason = why_beside(x, seen, owner, others or (), False)
    if read(program).sums_read(at, len(rows) + 1 + len(whole)):
        reason = reason or "a sum over rows reads them"
    on_call(region)
    placed(place, reason, functools.partial(holders_named, reason, x))
    every = [*rows[:at], x, *rows[at:]]
    target = None if reason else (at, result)
    with torch.no_grad():
        found = run_loop(every, whole, sizes, program, compiled, chunk_bytes, target)
    if target is not None:
        # readers of a saved x must get an error, not other values
        torch.autograd.graph.increment_version(x)
    return found


def run_loop(
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    sizes: Sequence[int],
    program: str,
    compiled: bool,
    chunk_bytes: int,
    over: tuple[int, int] | None,
) -> list[Tensor]:
    """All chunks. `over`: a contiguous tensor of `rows`, and the number of the result that is written over it."""
    told = read(program)
    check_memory(**{f"operand {at}": each for at, each in enumerate((*rows, *whole))})
    shared = [tensor.detach() for tensor in whole]

    def given(value: int) -> Tensor | None:
        return shared[value - len(rows)] if value >= 0 else None

    parts = map(given, told.parts)
    cuts = list(map(Cut, rows, told.blocks, parts))
    count = _row_count(cuts)
    every = list(pieces(count, _row_chunk(told, count, chunk_bytes), told.wide[2]))
    outs = {} if over is None else {over[1]: cuts[over[0]].flat}
    results = [
        _Result(each, rows[0], sizes, count, len(every), outs.get(at), given(_numbers(each)))
        for at, each in enumerate(told.results)
    ]
    body = body_of(program, told.steps_of(over), compiled)
    for start, stop in every:
        out = [each.out[start:stop] for each in results if each.is_written]
        found = body(Chunk([cut.at(start, stop) for cut in cuts], shared, sizes, out))
        for each in results:
            each.add(found, start, stop)
        del found
    return [each.made() for each in results]


def _fake_row_loop(
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    sizes: Sequence[Any],
    program: str,
    compiled: bool,
    chunk_bytes: int,
    region: str,
) -> list[Tensor]:
    told = read(program)
    part = told.parts[0]
    lead = [rows[0].shape[dim] for dim in told.blocks[0]]
    counted = lead if part < 0 else whole[part - len(rows)].shape
    return [_made(each, rows[0], sizes, math.prod(counted)) for each in told.results]


def _fake_row_loop_over(
    x: Tensor,
    rows: Sequence[Tensor],
    whole: Sequence[Tensor],
    sizes: Sequence[Any],
    program: str,
    compiled: bool,
    chunk_bytes: int,
    over: Sequence[int],
    owner: str,
    region: str,
    *,
    place: str = "",
    others: Sequence[Tensor] | None = None,
    after: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    every = [*rows[: over[0]], x, *rows[over[0] :]]
    return _fake_row_loop(every, whole, sizes, program, compiled, chunk_bytes, region)


register(_library, "row_loop", _row_loop, _fake_row_loop)
register(_library, "row_loop_over", _row_loop_over, _fake_row_loop_over)
row_loop_over = torch.ops.slime_fused.row_loop_over.default
row_loop = torch.ops.slime_fused.row_loop.default
