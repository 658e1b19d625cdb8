"""Triton kernels of the row operators: `row_stats_kernel`, `merge_parts_kernel`, `row_grad_kernel`.

`cuda.py` launches them and decides blocks and parts; docs/kernels.md says why the blocks look as they do. What they
compute is in docs/ops.md. float64 is not handled here.

Every argument that is not `constexpr` is excluded from specialisation: there is one compile per dtype, `VEC` and, for
`row_grad_kernel`, K and M, for statistics what is wanted (MEAN, TOTAL); never one per N, V or alignment.

NOTE [Rows as 16-byte groups]
A row of an odd vocabulary starts anywhere. Each row is cut, by its address, into `head` single elements up to the
first 16-byte boundary, `groups` groups of VEC elements, and fewer than VEC single elements after them. DEPTH tiles
[LANES, VEC] of groups are loaded together; LANES is the number of threads, so that a thread holds one group of each,
and a reduction over VEC and the tiles stays inside the thread. (One block [LANES, DEPTH, VEC] would leave the
compiler a choice, and Triton 3.6 and 3.7 choose differently.) Masks are constant along VEC, which keeps the accesses
16 bytes wide. The single elements at both ends (`edges`) are one small masked access of part 0.
VEC = 1 (another stride than 1 along the vocabulary, or an output aligned otherwise than x) has no edges.
"""

# mypy: ignore-errors
# ruff: noqa: RET505, RUF005  (Triton wants the else of a static branch, and tuples joined by +)

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.0e38)  # below the largest float32, with room for a few roundings


# ---- rows, parts, tiles -------------------------------------------------------------------------------------------


@triton.jit
def _row_offset(row, inner, outer_stride, inner_stride):
    """Offset in elements of row (row // inner, row % inner), in 64 bits."""
    outer = (row // inner).to(tl.int64)
    return outer * outer_stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit
def _cut(row_ptr, vocab, part, parts, LANES: tl.constexpr, VEC: tl.constexpr):
    """(head, groups, first, last): see NOTE [Rows as 16-byte groups]; the part is groups [first, last)."""
    head = vocab * 0
    if VEC > 1:
        item: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth // 8
        past = (row_ptr.to(tl.int64) // item) % VEC
        head = tl.minimum((VEC - past.to(tl.int32)) % VEC, vocab)
    groups = (vocab - head) // VEC
    length = tl.cdiv(tl.cdiv(groups, parts), LANES) * LANES
    first = tl.minimum(part * length, groups)
    return head, groups, first, tl.minimum(first + length, groups)


@triton.jit
def _edges(head, groups, vocab, part, LANES: tl.constexpr, VEC: tl.constexpr):
    """Columns [LANES] of the single elements and whether they are there: lanes [0, VEC) head, [VEC, 2 VEC) tail."""
    lane = tl.arange(0, LANES)
    column = tl.where(lane < VEC, lane, head + groups * VEC + lane - VEC)
    limit = tl.where(
        part == 0, vocab, 0
    )  # not `& (part == 0)`: Triton 3.9 interprets that as an integer, no mask
    present = column < tl.where(lane < VEC, tl.minimum(head, limit), limit)
    return column, present & (lane < 2 * VEC)


@triton.jit
def _body(row_ptr, head, VEC: tl.constexpr):
    """Pointer to the first group; groups of bf16 are read as 32-bit words, see `_unpack`."""
    if VEC > 1 and row_ptr.dtype.element_ty == tl.bfloat16:
        return (row_ptr + head).to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return row_ptr + head


@triton.jit
def _tile(first, last, k: tl.constexpr, LANES: tl.constexpr):
    """Groups of tile k, counted from group `first`, and whether they are in the part, [LANES, 1]."""
    group = first + k * LANES + tl.arange(0, LANES)[:, None]
    return group, group < last


@triton.jit
def _addresses(body_ptr, group, stride, WIDTH: tl.constexpr):
    """Addresses of a tile: aligned to 16 bytes for WIDTH > 1, with any vocabulary stride for WIDTH = 1."""
    if WIDTH > 1:
        return tl.multiple_of(body_ptr + group * WIDTH + tl.arange(0, WIDTH)[None, :], (1, 16))
    else:
        return body_ptr + group.to(tl.int64) * stride


@triton.jit
def _load_tiles(
    body_ptr, first, last, stride, DEPTH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """The DEPTH tiles of x from group `first` on, as a tuple; zero from group `last` on."""
    WIDTH: tl.constexpr = VEC // 2 if body_ptr.dtype.element_ty == tl.int32 else VEC
    tiles = ()
    for k in tl.static_range(DEPTH):
        group, present = _tile(first, last, k, LANES)
        tile = tl.load(_addresses(body_ptr, group, stride, WIDTH), mask=present, other=0)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _unpack(tile, flip):
    """A loaded tile as float32 [LANES, VEC], negated if `flip`.

    A word holds two bf16. One integer operation makes each of them float32, sign included; taking the word
    apart, converting and multiplying by the sign would be three.
    """
    if tile.dtype == tl.int32:
        sign = tl.where(flip, -2147483648, 0).to(tl.int32)
        low = ((tile << 16) + sign).to(tl.float32, bitcast=True)
        high = ((tile & -65536) ^ sign).to(tl.float32, bitcast=True)
        return tl.join(low, high).reshape(tile.shape[0], tile.shape[1] * 2)
    else:
        return tile.to(tl.float32) * tl.where(flip, -1.0, 1.0)


# ---- row_stats ----------------------------------------------------------------------------------------------------
#
# Online softmax (Milakov and Gimelshein, arXiv 1805.02867), with two more sums, and per thread instead of per row.
# With y = scale * x the row is flipped by the sign of scale, so that y = rate * x with rate = |scale|. Each thread
# keeps, for the elements it has seen, with peak their maximum and d = x - peak:
#
#     mass = sum exp(rate d)      first = sum exp(rate d) d      spread = sum d      count
#
# Raising the maximum from `peak` to `top`, step = peak - top, changes d by step for all of them:
#
#     mass' = exp(rate step) mass      first' = exp(rate step) (first + step mass)      spread' = spread + count step
#
# DEPTH tiles raise the maximum of a thread once: one exponential per element and one more per DEPTH * VEC elements.
# Differences are taken before scaling: a large common offset of the logits costs no digits. Special values:
# - d and step are raised to `floor`, where exp(rate floor) is 0 in float32: -inf * 0 never arises. max drops NaN.
# - spread uses d as it is, so a row with NaN or +inf has spread NaN, and nothing else has: this is how NaN gets out.
#   Without spread, mass does it: d is raised to `floor` by a maximum that keeps NaN.
# - peak = -inf (nothing, or only -inf so far) stands for a reference of 0: -inf - (-inf) never arises.


@triton.jit
def _floor(rate):
    """exp2(log2(e) rate d) is 0 for all d up to this number; finite for rate = 0."""
    return -tl.minimum(200.0 / (rate * LOG2E), LARGEST)


@triton.jit
def _raise(
    peak, mass, first, spread, count, top, rate, MEAN: tl.constexpr, TOTAL: tl.constexpr
):  # fmt: skip
    """The sums of `peak`, with respect to the larger maximum `top`; first only with MEAN, spread with TOTAL."""
    step = tl.where(peak == -float("inf"), 0.0, peak - top)
    held = tl.maximum(step, _floor(rate))
    decay = tl.exp2(held * (rate * LOG2E))
    if MEAN:
        first = (first + mass * held) * decay
    if TOTAL:
        spread += count * step
    return mass * decay, first, spread


@triton.jit
def _absorb(
    peak, mass, first, spread, count, tiles, flip, rate, begin, end,
    MASKED: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    MEAN: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Adds the tiles from group `begin` on, up to group `end` if MASKED, to the sums [LANES] of `count` elements."""
    top = peak
    for k in tl.static_range(DEPTH):
        x = _unpack(tiles[k], flip)
        if MASKED:
            x = tl.where(_tile(begin, end, k, LANES)[1], x, -float("inf"))
        top = tl.maximum(top, tl.max(x, 1))
    mass, first, spread = _raise(peak, mass, first, spread, count, top, rate, MEAN, TOTAL)
    anchor = tl.where(top == -float("inf"), 0.0, top)[:, None]
    for k in tl.static_range(DEPTH):
        d = _unpack(tiles[k], flip) - anchor
        if TOTAL:
            held = tl.maximum(d, _floor(rate))
        else:
            held = tl.maximum(d, _floor(rate), propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(held * (rate * LOG2E))
        if MASKED:
            present = _tile(begin, end, k, LANES)[1]
            d = tl.where(present, d, 0.0)
            e = tl.where(present, e, 0.0)
            count += tl.sum(present.to(tl.float32), 1) * VEC
        else:
            count += VEC
        mass += tl.sum(e, 1)
        if MEAN:
            first += tl.sum(e * held, 1)
        if TOTAL:
            spread += tl.sum(d, 1)
    return top, mass, first, spread, count


@triton.jit
def _merge(peak, mass, first, spread, count, rate, MEAN: tl.constexpr, TOTAL: tl.constexpr):
    """The sums of all threads (or parts) as scalars."""
    top = tl.max(peak, 0)
    anchor = tl.where(top == -float("inf"), 0.0, top)
    mass, first, spread = _raise(peak, mass, first, spread, count, anchor, rate, MEAN, TOTAL)
    return top, tl.sum(mass, 0), tl.sum(first, 0), tl.sum(spread, 0), tl.sum(count, 0)


@triton.jit
def _store_stats(
    row, peak_ptr, log_sum_ptr, mean_ptr, total_ptr, top, mass, first, spread, flip, rate,
    MEAN: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Writes the four outputs of one row, NaN to those not requested."""
    nan = float("nan")
    largest = rate * top
    empty = largest == -float("inf")
    bad = (mass != mass) | (spread != spread) | (largest != largest) | (largest == float("inf"))
    log_sum = tl.where(empty, -float("inf"), tl.log(mass))
    tl.store(peak_ptr + row, tl.where(bad, nan, tl.where(flip, -top, top)))
    tl.store(log_sum_ptr + row, tl.where(bad, nan, log_sum))
    tl.store(mean_ptr + row, tl.where(bad | empty, nan, rate * (first / mass)) if MEAN else nan)
    tl.store(total_ptr + row, tl.where(bad | empty, nan, rate * spread) if TOTAL else nan)


@triton.jit
def _store_part(slot, plane, peak, mass, first, spread, count):
    """Writes the sums of one part into the five planes starting at `slot`."""
    tl.store(slot, peak)
    tl.store(slot + plane, mass)
    tl.store(slot + plane * 2, first)
    tl.store(slot + plane * 3, spread)
    tl.store(slot + plane * 4, count)


@triton.jit
def _load_scale(scale_ptr, row, scale_stride, scaled, factor):
    """factor * scale[row]; scale is not read if `scaled` is 0."""
    return factor * tl.load(
        scale_ptr + row.to(tl.int64) * scale_stride, mask=scaled != 0, other=1.0
    )


ROW_STATS_ARGUMENTS = [
    "x_ptr", "scale_ptr", "peak_ptr", "log_sum_ptr", "mean_ptr", "total_ptr", "parts_ptr",
    "factor", "scale_stride", "scaled", "rows", "vocab", "inner", "outer_stride", "inner_stride", "stride", "parts",
]  # fmt: skip


@triton.jit(do_not_specialize=ROW_STATS_ARGUMENTS)
def row_stats_kernel(
    x_ptr,  # [N, V] bf16, fp16 or fp32, read only
    scale_ptr,  # [N] fp32, read only, anything where scaled is 0
    peak_ptr,  # [N] fp32, this and the next three written where parts is 1
    log_sum_ptr,
    mean_ptr,
    total_ptr,
    parts_ptr,  # [5, N, parts] fp32, written where parts is not 1
    factor: tl.float32,
    scale_stride: tl.int64,
    scaled: tl.int32,
    rows: tl.int64,
    vocab: tl.int32,
    inner: tl.int32,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    stride: tl.int64,
    parts: tl.int32,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    MEAN: tl.constexpr,
    TOTAL: tl.constexpr,
):
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    scale = _load_scale(scale_ptr, row, scale_stride, scaled, factor)
    flip, rate = scale < 0.0, tl.abs(scale)
    row_ptr = x_ptr + _row_offset(row, inner, outer_stride, inner_stride)
    head, groups, begin, end = _cut(row_ptr, vocab, part, parts, LANES, VEC)
    body_ptr = _body(row_ptr, head, VEC)
    read_end = tl.where(rate == 0.0, 0, end)  # zeros then, whatever x is
    ahead = _load_tiles(body_ptr, begin, read_end, stride, DEPTH, LANES, VEC)

    peak = tl.full([LANES], -float("inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    first, spread, count = mass, mass, mass
    if VEC > 1:
        lone, there = _edges(head, groups, vocab, part, LANES, VEC)
        readable = there & (lone < tl.where(rate == 0.0, 0, vocab))
        edge = tl.load(row_ptr + lone, mask=readable, other=0.0)
        edge = edge.to(tl.float32) * tl.where(flip, -1.0, 1.0)
        peak = tl.where(there, edge, peak)
        finite = there & (edge > -float("inf"))
        mass = tl.where(finite, 1.0, tl.where(there & (edge != edge), float("nan"), 0.0))
        spread = tl.where(there, edge - tl.where(finite, edge, 0.0), 0.0)
        count = there.to(tl.float32)

    while begin + DEPTH * LANES < end:
        tiles = ahead
        ahead = _load_tiles(body_ptr, begin + DEPTH * LANES, read_end, stride, DEPTH, LANES, VEC)
        peak, mass, first, spread, count = _absorb(
            peak, mass, first, spread, count, tiles, flip, rate, begin, end,
            False, DEPTH, LANES, VEC, MEAN, TOTAL,
        )  # fmt: skip
        begin += DEPTH * LANES
    peak, mass, first, spread, count = _absorb(
        peak, mass, first, spread, count, ahead, flip, rate, begin, end,
        True, DEPTH, LANES, VEC, MEAN, TOTAL,
    )  # fmt: skip
    peak, mass, first, spread, count = _merge(peak, mass, first, spread, count, rate, MEAN, TOTAL)
    if parts == 1:
        _store_stats(
            row, peak_ptr, log_sum_ptr, mean_ptr, total_ptr, peak, mass, first, spread, flip, rate,
            MEAN, TOTAL,
        )  # fmt: skip
    else:
        slot = parts_ptr + row.to(tl.int64) * parts + part
        _store_part(slot, rows * parts, peak, mass, first, spread, count)


# The same rescaling once more, over the parts of a row.


MERGE_PARTS_ARGUMENTS = [
    "parts_ptr", "scale_ptr", "peak_ptr", "log_sum_ptr", "mean_ptr", "total_ptr",
    "factor", "scale_stride", "scaled", "rows", "parts",
]  # fmt: skip


@triton.jit(do_not_specialize=MERGE_PARTS_ARGUMENTS)
def merge_parts_kernel(
    parts_ptr,  # [5, N, parts] fp32, read only
    scale_ptr,  # [N] fp32, read only, anything where scaled is 0
    peak_ptr,  # [N] fp32, this and the next three written
    log_sum_ptr,
    mean_ptr,
    total_ptr,
    factor: tl.float32,
    scale_stride: tl.int64,
    scaled: tl.int32,
    rows: tl.int64,
    parts: tl.int32,
    PARTS: tl.constexpr,  # power of two, at least parts
    MEAN: tl.constexpr,
    TOTAL: tl.constexpr,
):
    row = tl.program_id(0)
    scale = _load_scale(scale_ptr, row, scale_stride, scaled, factor)
    flip, rate = scale < 0.0, tl.abs(scale)
    part = tl.arange(0, PARTS)
    present = part < parts
    slot = parts_ptr + row.to(tl.int64) * parts + part
    peak = tl.load(slot, mask=present, other=-float("inf"))
    mass = tl.load(slot + rows * parts, mask=present, other=0.0)
    first = tl.load(slot + rows * parts * 2, mask=present, other=0.0)
    spread = tl.load(slot + rows * parts * 3, mask=present, other=0.0)
    count = tl.load(slot + rows * parts * 4, mask=present, other=0.0)
    peak, mass, first, spread, count = _merge(peak, mass, first, spread, count, rate, MEAN, TOTAL)
    _store_stats(
        row, peak_ptr, log_sum_ptr, mean_ptr, total_ptr, peak, mass, first, spread, flip, rate,
        MEAN, TOTAL,
    )  # fmt: skip


# ---- row_grad -----------------------------------------------------------------------------------------------------
#
# The row normal form (docs/design.md) element by element: one read, one write, one exponential per term. The row's
# coefficients are loaded once per program. What depends on the row alone is decided on scalars:
# - a term whose a and b are 0 gets 0 for scale, center and shift too, and a scale of 0 hides x: the term gives 0;
# - the affine part runs only where f is not 0, a one-hot term only in the tile that holds its column.


@triton.jit
def _scalars(values_ptr, COUNT: tl.constexpr):
    """COUNT coefficients, as a tuple of scalars."""
    values = ()
    for k in tl.static_range(COUNT):
        values = values + (tl.load(values_ptr + k),)
    return values


@triton.jit
def _silenced(terms, K: tl.constexpr):
    """The coefficients, all 0 in a term with a = b = 0 (NaN is not 0): x does not matter then."""
    values = ()
    for k in tl.static_range(5 * K):
        a = terms[5 * (k // 5) + 3]
        b = terms[5 * (k // 5) + 4]
        values = values + (tl.where(a == 0.0, tl.where(b == 0.0, 0.0, terms[k]), terms[k]),)
    return values


@triton.jit
def _one_hots(index_ptr, weight_ptr, vocab, M: tl.constexpr):
    """M columns (-1 if outside [0, V)) and M weights, as two tuples of scalars."""
    columns = ()
    weights = ()
    for k in tl.static_range(M):
        index = tl.load(index_ptr + k)
        inside = (index >= 0) & (index < vocab)
        columns = columns + (tl.where(inside, index, -1).to(tl.int32),)
        weights = weights + (tl.load(weight_ptr + k),)
    return columns, weights


@triton.jit
def _is_live(terms, affine, weights, K: tl.constexpr, M: tl.constexpr):
    """Whether any of a, b, f, e, weights is not 0 (NaN is not)."""
    live = (affine[0] != 0.0) | (affine[2] != 0.0)
    for k in tl.static_range(K):
        live = live | (terms[5 * k + 3] != 0.0) | (terms[5 * k + 4] != 0.0)
    for k in tl.static_range(M):
        live = live | (weights[k] != 0.0)
    return live


@triton.jit
def _exponential_term(x, scale, center, shift, a, b, SOFTMAX: tl.constexpr):
    """exp(z - shift) * (a + b z); with SOFTMAX x is exp(z - shift)."""
    if SOFTMAX:
        z = tl.log(x) + shift
        value = tl.where(x == 0.0, 0.0, x * (a + b * z))
    else:
        z = tl.where(scale == 0.0, 0.0, scale * (x - center))
        value = tl.exp2((z - shift) * LOG2E) * (a + b * z)
        null = shift * 0.0 - float("inf")  # NaN, unlike every z, without a softmax
        value = tl.where(z == null, 0.0, value)
    return value


@triton.jit
def _value(
    x, column, low, high, terms, affine, columns, weights,
    K: tl.constexpr, M: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The row normal form of float32 x at the columns `column`, all of them in [low, high).

    The order matters: p - 1 cancels in a row with a certain token, and an affine term added before would be rounded
    to the digits of 1.
    """
    f, center, e = affine
    value = tl.zeros(x.shape, tl.float32)
    for k in tl.static_range(K):
        value += _exponential_term(
            x, terms[5 * k], terms[5 * k + 1], terms[5 * k + 2], terms[5 * k + 3],
            terms[5 * k + 4], SOFTMAX,
        )  # fmt: skip
    for k in tl.static_range(M):
        if (columns[k] >= low) & (columns[k] < high):
            value += tl.where(column == columns[k], weights[k], 0.0)
    if f != 0.0:
        value += f * (x - center)
    return value + e


ROW_GRAD_ARGUMENTS = [
    "x_ptr", "out_ptr", "terms_ptr", "affine_ptr", "index_ptr", "weight_ptr", "vocab", "inner",
    "x_outer_stride", "x_inner_stride", "x_stride",
    "out_outer_stride", "out_inner_stride", "out_stride", "parts",
]  # fmt: skip


@triton.jit(do_not_specialize=ROW_GRAD_ARGUMENTS)
def row_grad_kernel(
    x_ptr,  # [N, V] bf16, fp16 or fp32, read only, or the same as out
    out_ptr,  # [N, V] any floating dtype, written
    terms_ptr,  # [N, K, 5] fp32, read only
    affine_ptr,  # [N, 3] fp32, read only
    index_ptr,  # [N, M] int64, read only
    weight_ptr,  # [N, M] fp32, read only
    vocab: tl.int32,
    inner: tl.int32,
    x_outer_stride: tl.int64,
    x_inner_stride: tl.int64,
    x_stride: tl.int64,
    out_outer_stride: tl.int64,
    out_inner_stride: tl.int64,
    out_stride: tl.int64,
    parts: tl.int32,
    K: tl.constexpr,
    M: tl.constexpr,
    SOFTMAX: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
):
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    wide_row = row.to(tl.int64)
    terms = _scalars(terms_ptr + wide_row * (5 * K), 5 * K)
    affine = _scalars(affine_ptr + wide_row * 3, 3)
    columns, weights = _one_hots(index_ptr + wide_row * M, weight_ptr + wide_row * M, vocab, M)
    live = _is_live(terms, affine, weights, K, M)
    read = live
    if K == 0:
        read = live & (affine[0] != 0.0)
    terms = _silenced(terms, K)

    x_row = x_ptr + _row_offset(row, inner, x_outer_stride, x_inner_stride)
    out_row = out_ptr + _row_offset(row, inner, out_outer_stride, out_inner_stride)
    head, groups, begin, end = _cut(x_row, vocab, part, parts, LANES, VEC)
    x_body = _body(x_row, head, VEC)
    read_end = tl.where(read, end, 0)
    ahead = _load_tiles(x_body, begin, read_end, x_stride, DEPTH, LANES, VEC)
    if VEC > 1:
        lone, there = _edges(head, groups, vocab, part, LANES, VEC)
        readable = there & (lone < tl.where(read, vocab, 0))
        x = tl.load(x_row + lone, mask=readable, other=0.0).to(tl.float32)
        ends = _value(x, lone, 0, vocab, terms, affine, columns, weights, K, M, SOFTMAX)
        tl.store(out_row + lone, ends.to(out_ptr.dtype.element_ty), mask=there)

    while begin < end:
        tiles = ahead
        ahead = _load_tiles(
            x_body, begin + DEPTH * LANES, read_end, x_stride, DEPTH, LANES, VEC
        )  # fmt: skip
        for k in tl.static_range(DEPTH):
            group, present = _tile(begin, end, k, LANES)
            column = head + group * VEC + tl.arange(0, VEC)[None, :]
            low = head + (begin + k * LANES) * VEC
            value = _value(
                _unpack(tiles[k], False), column, low, low + LANES * VEC,
                terms, affine, columns, weights, K, M, SOFTMAX,
            )  # fmt: skip
            here = _addresses(out_row + head, group, out_stride, VEC)
            tl.store(here, value.to(out_ptr.dtype.element_ty), mask=present)
        begin += DEPTH * LANES
