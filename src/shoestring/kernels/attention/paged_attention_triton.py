# mypy: disallow-untyped-defs=False
"""The kernels of kernels/attention/paged_attention.py.

Row m of a tile's matrices is (row m // HEADS_P of the tile, head m % HEADS_P of the group): the query heads that
share a key head sit side by side.
"""

import triton
import triton.language as tl


@triton.jit
def _paged_attention_kernel(
    q,
    keys,
    values,
    tables,
    tiles,
    out,
    part,
    peaks,
    scale,
    cap,
    q_stride,
    table_stride,
    num_groups,
    window,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    M: tl.constexpr = ROWS * HEADS_P
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table = tl.load(tiles + 4 * tile)
    first = tl.load(tiles + 4 * tile + 1)
    position = tl.load(tiles + 4 * tile + 2)
    num = tl.load(tiles + 4 * tile + 3)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = 0
    if WINDOWED:
        begin = tl.maximum(position - window + 1, 0) // BLOCK * BLOCK
    end = position + num
    if NUM_SPLITS > 1:
        size = tl.cdiv(tl.cdiv(end - begin, NUM_SPLITS), BLOCK) * BLOCK
        begin += split * size
        end = tl.minimum(end, begin + size)
    if (num == 0) | (begin >= end):
        return

    m = tl.arange(0, M)
    row, head = m // HEADS_P, m % HEADS_P
    d = tl.arange(0, D_P)
    live = (row < num) & (head < HEADS)
    column = (group * HEADS + head) * D
    q_at = (first + row).to(tl.int64) * q_stride + column
    q_MD = tl.load(q + q_at[:, None] + d[None, :], mask=live[:, None] & (d[None, :] < D), other=0.0)

    peak = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D_P), tl.float32)
    for start in range(begin, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        held = key < end
        block = tl.load(tables + table.to(tl.int64) * table_stride + key // PAGE, mask=held, other=0)
        at = ((block.to(tl.int64) * PAGE + key % PAGE) * num_groups + group) * D
        inside = held[:, None] & (d[None, :] < D)
        k_SD = tl.load(keys + at[:, None] + d[None, :], mask=inside, other=0.0)
        v_SD = tl.load(values + at[:, None] + d[None, :], mask=inside, other=0.0)
        score = tl.dot(q_MD, tl.trans(k_SD), input_precision="ieee")
        if CAPPED:
            score = cap * (2.0 * tl.sigmoid(2.0 * scale / cap * score) - 1.0) * 1.4426950408889634  # cap tanh(. / cap)
        else:
            score *= scale * 1.4426950408889634
        age = (position + row)[:, None] - key[None, :]
        seen = (age >= 0) & held[None, :]
        if WINDOWED:
            seen = seen & (age < window)
        score = tl.where(seen, score, -1e30)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A row may see nothing of a block: its weights must be 0, not exp2(-1e30 + 1e30).
        weight = tl.where(seen, tl.exp2(score - new_peak[:, None]), 0.0)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v_SD.dtype), v_SD, acc, input_precision="ieee")
        peak = new_peak

    if NUM_SPLITS == 1:
        out_at = (first + row).to(tl.int64) * (num_groups * HEADS * D) + column
        # A row past the tile's last has seen nothing and is not stored.
        tl.store(
            out + out_at[:, None] + d[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=live[:, None] & (d[None, :] < D),
        )
    else:
        num_tiles = tl.num_programs(0)
        at = ((tile.to(tl.int64) * num_groups + group) * NUM_SPLITS + split) * M
        tl.store(part + (at + m)[:, None] * D_P + d[None, :], acc)
        tl.store(peaks + at + m, peak)
        tl.store(peaks + num_tiles.to(tl.int64) * num_groups * NUM_SPLITS * M + at + m, total)


@triton.jit
def _combine_kernel(
    tiles,
    out,
    part,
    peaks,
    num_groups,
    window,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, group, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = m // HEADS_P, m % HEADS_P
    first = tl.load(tiles + 4 * tile + 1)
    position = tl.load(tiles + 4 * tile + 2)
    num = tl.load(tiles + 4 * tile + 3)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if (row >= num) | (head >= HEADS):
        return
    # The same ranges as the first kernel wrote.
    begin = 0
    if WINDOWED:
        begin = tl.maximum(position - window + 1, 0) // BLOCK * BLOCK
    end = position + num
    size = tl.cdiv(tl.cdiv(end - begin, NUM_SPLITS), BLOCK) * BLOCK
    d = tl.arange(0, D_P)
    split = tl.arange(0, NUM_SPLITS)
    real = begin + split * size < end
    base = (tile.to(tl.int64) * num_groups + group) * NUM_SPLITS
    totals = peaks + tl.num_programs(0).to(tl.int64) * num_groups * NUM_SPLITS * M
    at = (base + split) * M + m
    peak_S = tl.load(peaks + at, mask=real, other=-1e30)
    total_S = tl.load(totals + at, mask=real, other=0.0)
    part_SD = tl.load(part + at[:, None] * D_P + d[None, :], mask=real[:, None], other=0.0)
    shrink_S = tl.where(real, tl.exp2(peak_S - tl.max(peak_S, 0)), 0.0)
    mixed = tl.sum(part_SD * shrink_S[:, None], 0) / tl.sum(total_S * shrink_S, 0)
    out_at = (first + row).to(tl.int64) * (num_groups * HEADS * D) + (group * HEADS + head) * D
    tl.store(out + out_at + d, mixed.to(out.dtype.element_ty), mask=d < D)
