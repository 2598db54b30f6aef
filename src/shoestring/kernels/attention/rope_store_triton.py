# mypy: disallow-untyped-defs=False
"""The kernel of kernels/attention/rope_store.py: one program a row and a few heads, each head as two halves."""

import triton
import triton.language as tl


@triton.jit
def _rope_store_kernel(
    qkv,
    keys,
    values,
    slots,
    positions,
    freq,
    q_norm,
    k_norm,
    eps,
    table_scale,
    num_heads,
    num_groups,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    HALF_P: tl.constexpr,
    HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_all = num_heads + 2 * num_groups
    i = tl.arange(0, HALF_P)
    # Pairs of dims: the TURNED ones that are rotated, then what is left of the head.
    turns = i < TURNED
    left = tl.where(turns, i, i + TURNED)
    right = tl.where(turns, i + TURNED, i + HALF)
    inside = (head < num_all)[:, None] & (i < HALF)[None, :]
    at = row.to(tl.int64) * (num_all * D) + head[:, None] * D
    position = tl.load(positions + row).to(tl.float32)
    slot = tl.load(slots + row)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.load(qkv + at + left[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + at + right[None, :], mask=inside, other=0.0).to(tl.float32)

    is_q, is_v = head < num_heads, head >= num_heads + num_groups
    is_k = (head >= num_heads) & (head < num_heads + num_groups)
    turned_a, turned_b = a, b
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)
        pair = i < HALF
        q_a = tl.load(q_norm + left, mask=pair, other=0.0).to(tl.float32)
        q_b = tl.load(q_norm + right, mask=pair, other=0.0).to(tl.float32)
        k_a = tl.load(k_norm + left, mask=pair, other=0.0).to(tl.float32)
        k_b = tl.load(k_norm + right, mask=pair, other=0.0).to(tl.float32)
        turned_a = a * scale[:, None] * tl.where(is_q[:, None], q_a[None, :], k_a[None, :])
        turned_b = b * scale[:, None] * tl.where(is_q[:, None], q_b[None, :], k_b[None, :])
    if ROTATE:
        angle = position * tl.load(freq + i, mask=turns, other=0.0)
        cos = tl.where(turns, tl.cos(angle) * table_scale, 1.0)[None, :]
        sin = tl.where(turns, tl.sin(angle) * table_scale, 0.0)[None, :]
        old_a = turned_a
        turned_a = turned_a * cos - turned_b * sin
        turned_b = turned_b * cos + old_a * sin

    dtype = qkv.dtype.element_ty
    mine = inside & is_q[:, None]
    tl.store(qkv + at + left[None, :], turned_a.to(dtype), mask=mine)
    tl.store(qkv + at + right[None, :], turned_b.to(dtype), mask=mine)
    kept = inside & (slot + 0 * head >= 0)[:, None]
    store = keys.dtype.element_ty
    k_at = (slot * num_groups + head - num_heads)[:, None] * D
    mine = kept & is_k[:, None]
    tl.store(keys + k_at + left[None, :], turned_a.to(store), mask=mine)
    tl.store(keys + k_at + right[None, :], turned_b.to(store), mask=mine)
    v_at = (slot * num_groups + head - num_heads - num_groups)[:, None] * D
    mine = kept & is_v[:, None]
    tl.store(values + v_at + left[None, :], a.to(store), mask=mine)
    tl.store(values + v_at + right[None, :], b.to(store), mask=mine)
