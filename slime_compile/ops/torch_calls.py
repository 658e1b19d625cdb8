"""The fused operators on a CPU without a compiler: plain torch over chunks of rows small enough for the cache.

`row_stats` and `write_grad` match `reference.py`, without any [N, V] temporary: a chunk of rows comes from memory once,
and later passes over it read the cache. The passes for special values (a logit of -inf) run on chunks with such a value
only. Shapes are checked in `ops`, not here. `cpu.py` calls this module.

NOTE [Why threads of our own?]
    Torch's threads meet after every operation, several times a chunk. If another process holds a core, each
    meeting waits for a time slice: at a load of 8 on 2 cores the total took 8 times inductor's time. So every thread
    takes complete chunks and runs torch single-threaded. The threads live for one call: nothing remains to be forked
    or torn down.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from slime_compile.ops.reference import compute_dtype

__all__ = ["row_stats", "write_grad"]

_CHUNK_ELEMENTS = 1 << 19  # 2 MiB in float32; less if three such buffers are needed, not two
_PARALLEL_ELEMENTS = 1 << 20  # a smaller root takes less time than threads take to start
_MAX_THREADS = 16  # they share the interpreter's lock; beyond it each runs torch on several

Work = Callable[[slice, Tensor, Tensor], None]
"""Done for each chunk: the rows' numbers, a view [R, V] of them, scratch [2 or 3, R, V] in the compute dtype."""


def row_stats(
    x: Tensor, scale: Tensor | None, factor: float, mean: bool, total: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.row_stats`."""
    compute = compute_dtype(x.dtype)
    rows = [*x.shape[:-1], 1]
    if scale is not None:
        scale = (scale.to(compute) * factor).expand(rows).reshape(-1, 1)
    peak, log_sum, mean_, total_ = (x.new_full(rows, torch.nan, dtype=compute) for _ in range(4))
    stats = [stat.view(-1, 1) for stat in (peak, log_sum, mean_, total_)]

    def work(at: slice, part: Tensor, scratch: Tensor) -> None:
        d, p = scratch.unbind()
        factors = factor if scale is None else scale[at]
        _chunk_stats(part, factors, d, p, [stat[at] for stat in stats], mean, total)

    _for_each_chunk(x, work, compute, 2)
    return peak, log_sum, mean_, total_


def _chunk_stats(
    x: Tensor,
    scale: Tensor | float,
    d: Tensor,
    p: Tensor,
    stats: list[Tensor],
    with_mean: bool,
    with_total: bool,
) -> None:
    # x [R, V] any dtype and strides, read only; d, p [R, V] scratch; stats 4 * [R, 1] written, the last two if wanted
    peak, log_sum, mean, total = stats
    y = _in_dtype_of(d, x)
    _write_peak(y, scale, peak)
    _scale(torch.sub(y, peak, out=d), scale)
    if with_total:
        torch.sum(d, -1, keepdim=True, out=total)
    torch.exp(d, out=p)
    sum_exp = p.sum(-1, keepdim=True)
    if with_mean:
        torch.sum(p.mul_(d), -1, keepdim=True, out=mean)
        if mean.isnan().any():
            # perhaps 0 * -inf: an element without probability has no share in the mean
            torch.sum(p.masked_fill_(d == -torch.inf, 0.0), -1, keepdim=True, out=mean)
        mean.div_(sum_exp)
    torch.log(sum_exp, out=log_sum).masked_fill_(peak * scale == -torch.inf, -torch.inf)


def _write_peak(y: Tensor, scale: Tensor | float, peak: Tensor) -> None:
    """The element that is largest after scaling."""
    if not isinstance(scale, Tensor):
        (torch.amin if scale < 0 else torch.amax)(y, -1, keepdim=True, out=peak)
        if scale == 0:
            peak.zero_()
        return
    torch.amax(y, -1, keepdim=True, out=peak)
    if (scale < 0).any():
        peak.copy_(torch.where(scale < 0, y.amin(-1, keepdim=True), peak))
    peak.masked_fill_(scale == 0, 0.0)


def write_grad(
    x: Tensor,
    terms: Tensor,
    affine: Tensor,
    index: Tensor,
    weight: Tensor,
    softmax: bool,
    out: Tensor,
) -> None:
    """See `reference.row_grad`; `out` is x itself or a new contiguous tensor."""
    lead = x.dim() - 1
    live = _flat(~_empty_rows(terms, affine, weight), lead)[:, 0]
    coefficients = [_flat(value, lead) for value in (terms, affine, index, weight)]
    flat_out = None if out is x else _flat(out, lead)

    def work(at: slice, part: Tensor, scratch: Tensor) -> None:
        target = part if flat_out is None else flat_out[at]
        chosen = live[at].nonzero()[:, 0]
        if chosen.shape[0] < part.shape[0]:  # the other rows are not read
            part = part[chosen]
            target.zero_()
        if chosen.shape[0] == 0:
            return
        z, result, *further = scratch[:, : chosen.shape[0]].unbind()
        every = part.shape == target.shape
        if every and flat_out is not None and target.dtype == result.dtype:
            result = target
        coefficients_here = [value[at][chosen] for value in coefficients]
        _chunk_grad(part, coefficients_here, softmax, z, further, result)
        if not every:
            target[chosen] = result.to(target.dtype)
        elif result is not target:
            target.copy_(result)

    _for_each_chunk(x, work, terms.dtype, 2 if terms.shape[-2] <= 1 else 3)


def _empty_rows(terms: Tensor, affine: Tensor, weight: Tensor) -> Tensor:
    """[..., 1] bool: rows with zeros in all of a, b, f, e and the weights."""
    factors = terms[..., -2:].flatten(-2), affine[..., ::2], weight
    return (torch.cat(factors, -1) == 0).all(-1, keepdim=True)


def _chunk_grad(
    x: Tensor,
    coefficients: list[Tensor],
    softmax: bool,
    z: Tensor,
    further: list[Tensor],
    out: Tensor,
) -> None:
    # x [R, V] any dtype and strides, read only; coefficients [R, ...]; z and, for several terms,
    # further[0] [R, V] scratch; out [R, V] written
    terms, affine, index, weight = coefficients
    if terms.shape[1] == 0:
        out.zero_()
    for k, term in enumerate(terms.unbind(1)):
        _chunk_term(x, term, softmax, z, further[0] if k else out)
        if k:
            out.add_(further[0])
    _add_affine(x, affine, z, out)
    inside = (index >= 0) & (index < x.shape[1])
    out.scatter_add_(1, index.where(inside, 0), weight.where(inside, 0.0))


def _chunk_term(x: Tensor, term: Tensor, softmax: bool, z: Tensor, out: Tensor) -> None:
    # out = exp(z - shift) * (a + b * z)
    scale, center, shift, a, b = term.unsqueeze(1).unbind(2)
    if softmax:
        torch.log(out.copy_(x), out=z).add_(shift)
    else:
        _scale(torch.sub(_in_dtype_of(z, x), center, out=z), scale)
        torch.sub(z, shift, out=out).exp_()
    masked = None
    if not z.amin() > -torch.inf:  # -inf, or a NaN hiding it
        masked = out == 0 if softmax else (z == -torch.inf) & ~shift.isnan()
    out.mul_(z.mul_(b).add_(a))
    if masked is not None:
        out.masked_fill_(masked, 0.0)
    unread = (a == 0) & (b == 0)  # NaN or infinity there is no concern of this term
    if unread.any():
        out.masked_fill_(unread, 0.0)


def _add_affine(x: Tensor, affine: Tensor, z: Tensor, out: Tensor) -> None:
    f, center, e = affine.unsqueeze(1).unbind(2)
    if f.any():
        z.copy_(x).sub_(center).mul_(f).add_(e)
        out.add_(torch.where(f == 0, e, z))
    elif e.any():
        out.add_(e)


def _in_dtype_of(buffer: Tensor, x: Tensor) -> Tensor:
    """x itself if it has that dtype, else a copy in the buffer."""
    return x if x.dtype == buffer.dtype and x.stride(1) == 1 else buffer.copy_(x)


def _scale(d: Tensor, scale: Tensor | float) -> None:
    """d *= scale; zeros for a scale of 0, whatever d is there."""
    if isinstance(scale, Tensor):
        if (scale != 1).any():
            d.mul_(scale)
        if not scale.all():
            d.masked_fill_(scale == 0, 0.0)
    elif scale == 0:
        d.zero_()
    elif scale != 1:
        d.mul_(scale)


def _flat(value: Tensor, lead: int) -> Tensor:
    """[..., *rest] with `lead` leading dimensions as [N, *rest]."""
    return value.unsqueeze(0) if lead == 0 else value.flatten(0, lead - 1)


# ---- chunks -------------------------------------------------------------------------------------------------------


def _for_each_chunk(x: Tensor, work: Work, dtype: torch.dtype, buffers: int) -> None:
    """Runs `work` on every chunk of x, in threads if x is large. See NOTE [Why threads of our own?]."""
    chunks = list(_chunks(x, 2 * _CHUNK_ELEMENTS // buffers))
    if not chunks:
        return
    queue = iter(chunks)
    rows = max(part.shape[0] for _, part in chunks)

    def drain() -> None:
        scratch = x.new_empty([buffers, rows, x.shape[-1]], dtype=dtype)
        for at, part in queue:  # `next` of a list's iterator is atomic
            work(at, part, scratch[:, : part.shape[0]])

    available = torch.get_num_threads()
    threads = min(available, _MAX_THREADS, len(chunks))
    if threads == 1 or x.numel() < _PARALLEL_ELEMENTS:
        drain()
    else:
        _run_in_threads(drain, threads, available)


def _run_in_threads(run: Callable[[], None], threads: int, available: int) -> None:
    """Runs `run` once in each thread, in this thread's inference mode and without autograd."""
    inference = torch.is_inference_mode_enabled()
    started = threading.Semaphore(0)

    def thread() -> None:
        torch.set_num_threads(available // threads)
        started.release()
        with torch.inference_mode(inference), torch.no_grad():
            run()

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(thread) for _ in range(threads)]
        for _ in futures:
            started.acquire()
        torch.set_num_threads(available)  # new threads inherit a thread's own settings
        for future in futures:
            future.result()


def _chunks(x: Tensor, elements: int) -> Iterator[tuple[slice, Tensor]]:
    """The rows of x [..., V] in order, about `elements` at a time: their numbers, and a view [R, V] of them."""
    if x.numel() == 0:
        return
    start, size = 0, max(1, elements // x.shape[-1])
    for slab in _slabs(x):
        for first in range(0, slab.shape[0], size):
            part = slab[first : first + size]
            yield slice(start, start + part.shape[0]), part
            start += part.shape[0]


def _slabs(x: Tensor) -> Iterator[Tensor]:
    """The rows of x in order, as few views [R, V] as x's strides allow."""
    if x.dim() <= 2:
        yield x if x.dim() == 2 else x.unsqueeze(0)
        return
    try:
        flat = x.view(-1, x.shape[-1])
    except RuntimeError:  # its leading dimensions have no common stride
        for part in x.unbind(0):
            yield from _slabs(part)
    else:
        yield flat
