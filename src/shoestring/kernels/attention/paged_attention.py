"""Attention over keys and values in blocks, for decoding, speculation and chunked prefill.

The rows of a step are cut into tiles of up to `rows_per_tile` neighbouring rows of one request,

    tiles[i] = (row of the block table, first row in q, position of that row, number of rows)

int32, on the device; a tile of 0 rows does nothing, so a captured graph can be padded. A row at position p sees the
keys at positions 0..p of its request (only the last `window`, where given); position p lies in block
table[p // block_size]. out = softmax(softcap(scale q k^T)) v per head; softcap(z) = cap tanh(z / cap), where given.

A program takes one tile, one key/value head and one range of keys. The query heads that share the key head are rows of
the same matrix product, so keys and values are read once for all of them and for all drafts of the request. A few
requests would leave most of the GPU idle, so their keys are cut into up to MAX_SPLITS ranges, each a multiple of the
keys of a load, and a second kernel joins the parts by their maxima and sums. The ranges depend only on the request's
length and their number, and sums have a fixed order: equal launches give equal bits.

Shapes: T rows, H query heads, G key/value heads, D head dim, L tiles, W blocks per table row, P positions per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.hardware.device import device_limits
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable

MAX_SPLITS = 32
PROGRAMS_PER_SM = 2
PREFILL_ROWS = 128  # rows x heads of a prefill tile


def paged_attention_ref(
    q_THD: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    tables_LW: Tensor,
    tiles_L4: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    out_THD: Tensor | None = None,
) -> Tensor:
    """Rows without a tile keep their value in `out_THD` (default: 0). `scale`: default 1 / sqrt(D). Computed in fp32,
    fp64 for fp64."""
    num_heads, head_dim = q_THD.shape[1:]
    page, num_groups = keys_NPGD.shape[1:3]
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    if out_THD is None:
        out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    for table, first, position, num in tiles_L4.tolist():
        if num == 0:
            continue
        stop = position + num
        blocks = tables_LW[table, : -(-stop // page)].long()
        k_SGD, v_SGD = (t.index_select(0, blocks).flatten(0, 1)[:stop].to(wide) for t in (keys_NPGD, values_NPGD))
        q_RGhD = q_THD[first : first + num].to(wide).unflatten(1, (num_groups, num_heads // num_groups))
        score_RGhS = torch.einsum("rghd,sgd->rghs", q_RGhD, k_SGD) * (scale or head_dim**-0.5)
        if softcap is not None:
            score_RGhS = (score_RGhS / softcap).tanh() * softcap
        age_RS = (
            torch.arange(position, stop, device=q_THD.device)[:, None] - torch.arange(stop, device=q_THD.device)[None]
        )
        hidden_RS = age_RS < 0 if window is None else (age_RS < 0) | (age_RS >= window)
        weight_RGhS = score_RGhS.masked_fill(hidden_RS[:, None, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("rghs,sgd->rghd", weight_RGhS, v_SGD)
        out_THD[first : first + num] = mixed.flatten(1, 2).to(q_THD.dtype)
    return out_THD


def paged_attention(
    q_THD: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    tables_LW: Tensor,
    tiles_L4: Tensor,
    *,
    rows_per_tile: int,
    num_splits: int = 1,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    out_THD: Tensor | None = None,
) -> Tensor:
    """As paged_attention_ref; chooses the kernel. Rows without a tile are undefined where `out_THD` is None.

    `num_splits`: the most ranges of a request's keys, a power of 2. q may be a view with any row stride.
    """
    if not triton_usable(q_THD):
        return paged_attention_ref(
            q_THD, keys_NPGD, values_NPGD, tables_LW, tiles_L4,
            window=window, scale=scale, softcap=softcap, out_THD=out_THD,
        )  # fmt: skip
    from shoestring.kernels.attention.paged_attention_triton import _combine_kernel, _paged_attention_kernel

    num_rows, num_heads, head_dim = q_THD.shape
    page, num_groups = keys_NPGD.shape[1:3]
    assert q_THD.stride(2) == 1 and q_THD.stride(1) == head_dim
    assert keys_NPGD.is_contiguous() and values_NPGD.is_contiguous() and keys_NPGD.shape == values_NPGD.shape
    assert tables_LW.stride(1) == 1 and tables_LW.dtype == tiles_L4.dtype == torch.int32
    shared = num_heads // num_groups
    heads = next_power_of_2(shared)
    rows = next_power_of_2(rows_per_tile)
    rows = max(rows, -(-16 // heads))  # tl.dot needs at least 16 rows
    m, d = rows * heads, max(16, next_power_of_2(head_dim))
    num_tiles, keys = tiles_L4.shape[0], 64 if d <= 128 else 32  # keys per load: several stages fit shared memory
    if out_THD is None:
        out_THD = torch.empty(num_rows, num_heads, head_dim, device=q_THD.device, dtype=q_THD.dtype)
    assert out_THD.is_contiguous()
    if num_splits > 1:
        part = torch.empty(num_tiles, num_groups, num_splits, m, d, device=q_THD.device, dtype=torch.float32)
        peak = torch.empty(2, num_tiles, num_groups, num_splits, m, device=q_THD.device, dtype=torch.float32)
    else:
        part = peak = out_THD  # not touched
    pdl = pdl_options(q_THD)
    _paged_attention_kernel[(num_tiles, num_groups, num_splits)](
        q_THD, keys_NPGD, values_NPGD, tables_LW, tiles_L4, out_THD, part, peak, scale or head_dim**-0.5,
        softcap or 0.0, q_THD.stride(0), tables_LW.stride(0), num_groups, 0 if window is None else window,
        HEADS=shared, HEADS_P=heads, ROWS=rows, D=head_dim, D_P=d, PAGE=page, BLOCK=keys, NUM_SPLITS=num_splits,
        WINDOWED=window is not None, CAPPED=softcap is not None, **pdl, num_warps=8 if m >= 128 else 4,
        num_stages=3 if q_THD.dtype != torch.float32 else 2 if d <= 128 else 1,
    )  # fmt: skip
    if num_splits > 1:
        _combine_kernel[(num_tiles, num_groups, m)](
            tiles_L4, out_THD, part, peak, num_groups, 0 if window is None else window,
            HEADS=shared, HEADS_P=heads, M=m, D=head_dim, D_P=d, BLOCK=keys, NUM_SPLITS=num_splits,
            WINDOWED=window is not None, **pdl, num_warps=2 if num_splits > 16 else 1,
        )  # fmt: skip
    return out_THD


def prefill_rows(num_heads: int, num_groups: int) -> int:
    """Rows per tile that fill a prefill program."""
    return max(1, PREFILL_ROWS // next_power_of_2(num_heads // num_groups))


def most_programs() -> int:
    """Programs that fill the GPU."""
    return PROGRAMS_PER_SM * device_limits().num_sms


def splits_for(num_tiles: int, num_groups: int) -> int:
    """Ranges per request with which this many tiles fill the GPU."""
    num, most = MAX_SPLITS, most_programs()
    while num > 1 and num_tiles * num_groups * num > most:
        num //= 2
    return num
