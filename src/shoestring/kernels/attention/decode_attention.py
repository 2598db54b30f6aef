"""Decode attention of requests with one row each, in one kernel: head norm, RoPE, the row's own key and value into
their block of the KV cache, attention over all blocks so far.

    q, k      <- head norm and rotation, as kernels/attention/rope_store.py
    keys[p]    = k; values[p] = v          p the row's position, its place by the request's block table
    out        = softmax(q keys[0..p]^T / sqrt(D)) values[0..p]     as kernels/attention/paged_attention.py

With one request there is little work, and three launches (rope_store, paged_attention and the reduction of its splits)
are pure latency. The kernel (kernels/attention/decode_attention.cu, through NVRTC) fetches old keys and values before
the projection of q, k and v is done, and reduces the splits inside a cluster of blocks. (In Triton, with the splits
reduced by the program that finishes last, it took as long as the three launches.) With many requests it reads more keys
and values than ordinary arithmetic keeps up with, so the matrix units compute where they take the heads (`mma_usable`).
Several rows per request, fp32 and GPUs before sm_90 take the three launches.

Shapes: T rows, H query heads, G key/value heads, D head dim, L tiles, W blocks per table row, P positions per block;
a row of qkv is [H q heads, G k heads, G v heads]; cos_sin [positions, 2, D/2], cosines and sines.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from shoestring.kernels.attention.paged_attention import paged_attention_ref
from shoestring.kernels.attention.rope_store import rope_store_ref_
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable
from shoestring.kernels.runtime.nvrtc import Kernel, compile_kernel, cuda_source, pointer

KEYS, RING, UNIT = 32, 3, 16  # as in the source
WARPS, MMA_WARPS = 4, 2  # of a block; where the matrix units compute: four such blocks fit on an SM
MAX_DIM, MAX_SHARED_HEADS = 256, 16
BLOCKS = 256  # most blocks of a launch with a split above 1


def decode_attention_ref_(
    qkv_TE: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    tables_LW: Tensor,
    tiles_L4: Tensor,
    cos_sin: Tensor | None,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """[T, H, D]; keys and values are written in place. A tile is (table row, row, position, 0 or 1 rows)."""
    page = keys_NPGD.shape[1]
    slots = torch.full((qkv_TE.shape[0],), -1, dtype=torch.int64, device=qkv_TE.device)
    positions = torch.zeros_like(slots)
    for table, row, position, num in tiles_L4.tolist():
        assert num <= 1
        if num:
            slots[row] = int(tables_LW[table, position // page]) * page + position % page
            positions[row] = position
    q_THD = rope_store_ref_(
        qkv_TE, keys_NPGD.flatten(0, 1), values_NPGD.flatten(0, 1), slots, positions, cos_sin, q_norm_D, k_norm_D, eps
    )  # fmt: skip
    return paged_attention_ref(q_THD, keys_NPGD, values_NPGD, tables_LW, tiles_L4, window=window, scale=scale)


def decode_attention_usable(qkv_TE: Tensor, num_heads: int, num_groups: int, head_dim: int) -> bool:
    """Whether the kernel takes rows like these."""
    if not chunks_usable(qkv_TE) or qkv_TE.dtype not in (torch.bfloat16, torch.float16):
        return False
    return shape_usable(head_dim, num_heads // num_groups)


def shape_usable(head_dim: int, heads: int) -> bool:
    """Whether the kernel takes heads of this dim, so many to a key head."""
    if head_dim % 32 or head_dim > MAX_DIM or heads > MAX_SHARED_HEADS:
        return False
    # Threads that share dims write their sums over the stages, while others may still read what lies behind them.
    parts = 32 * WARPS // (head_dim // 2)
    return 4 * (parts - 1) * heads * head_dim <= stage_bytes(head_dim)


def mma_usable(head_dim: int, heads: int, page: int) -> bool:
    """Whether the matrix units take heads of this dim, so many to a key head, with so many positions to a block."""
    return head_dim in (64, 128) and heads <= 8 and page % UNIT == 0


def ranks_for(num_tiles: int, num_groups: int) -> int:
    """Blocks that share the keys of a request and head: 8, fewer with many requests."""
    ranks = 8
    while ranks > 1 and num_tiles * num_groups * ranks > BLOCKS:
        ranks //= 2
    return ranks


def stage_bytes(head_dim: int) -> int:
    """Shared memory of the two stages of keys and values."""
    pitch = 2 * head_dim + (0 if 2 * head_dim % 128 == 64 else 64)
    return 2 * KEYS * (pitch + 2 * head_dim)


def shared_bytes(head_dim: int, heads: int, ranks: int, mma: bool) -> int:
    """Shared memory of a block, as the source lays it out."""
    if mma:
        floats = 2 * head_dim + 2 * (MMA_WARPS + 1) * heads + heads * head_dim + 2 * ranks * heads
        return MMA_WARPS * RING * UNIT * 4 * head_dim + 16 * head_dim + 4 * floats
    floats = 2 * heads * head_dim + 2 * head_dim + KEYS * (-(-heads // 4) * 4) + heads + 2 * ranks * heads
    return stage_bytes(head_dim) + 4 * floats


def decode_attention_macros(
    head_dim: int,
    heads: int,
    page: int,
    dtype: torch.dtype,
    norm: torch.dtype | None,
    rotate: bool,
    ranks: int,
    mma: bool,
) -> dict[str, int]:
    return {
        "D": head_dim,
        "HEADS": heads,
        "PAGE": page,
        "HALF": int(dtype == torch.float16),
        "NORM": 0 if norm is None else 2 if norm == torch.float32 else 1,
        "ROTATE": int(rotate),
        "SPLIT": ranks,
        "BLOCKS": 4 if mma or heads > 8 else 8,
        "WARPS": MMA_WARPS if mma else WARPS,
        "MMA": int(mma),
    }


@functools.cache
def _kernel(device: int, *key: object) -> Kernel:
    defines = decode_attention_macros(*key)  # type: ignore[arg-type]
    return compile_kernel(cuda_source("attention/decode_attention"), "decode_attention", defines, device)


def decode_attention_(
    qkv_TE: Tensor,
    keys_NPGD: Tensor,
    values_NPGD: Tensor,
    tables_LW: Tensor,
    tiles_L4: Tensor,
    cos_sin: Tensor | None,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 0.0,
    *,
    window: int | None = None,
    scale: float | None = None,
    ranks: int | None = None,
    mma: bool | None = None,
) -> Tensor:
    """As decode_attention_ref_ on a GPU where it is usable; rows without a tile are undefined."""
    num_rows, width = qkv_TE.shape
    page, num_groups, head_dim = keys_NPGD.shape[1:]
    num_heads = width // head_dim - 2 * num_groups
    heads, num_tiles = num_heads // num_groups, tiles_L4.shape[0]
    assert shape_usable(head_dim, heads)
    assert qkv_TE.is_contiguous() and keys_NPGD.is_contiguous() and values_NPGD.is_contiguous()
    assert tables_LW.stride(1) == 1 and tables_LW.dtype == tiles_L4.dtype == torch.int32
    assert tiles_L4.is_contiguous() and keys_NPGD.dtype == values_NPGD.dtype == qkv_TE.dtype
    assert cos_sin is None or (cos_sin.is_contiguous() and cos_sin.dtype == torch.float32)
    ranks = ranks or ranks_for(num_tiles, num_groups)
    if mma is None:  # for a single request the matrix units were not timed
        mma = num_tiles > 1 and mma_usable(head_dim, heads, page)
    out_THD = torch.empty(num_rows, num_heads, head_dim, device=qkv_TE.device, dtype=qkv_TE.dtype)
    norm = None if q_norm_D is None else q_norm_D.dtype
    kernel = _kernel(qkv_TE.device.index, head_dim, heads, page, qkv_TE.dtype, norm, cos_sin is not None, ranks, mma)
    pointers = (qkv_TE, keys_NPGD, values_NPGD, tables_LW, tiles_L4, cos_sin, q_norm_D, k_norm_D, out_THD)
    kernel.launch(
        (ranks, num_groups, num_tiles),
        32 * (MMA_WARPS if mma else WARPS),
        shared_bytes(head_dim, heads, ranks, mma),
        (
            *map(pointer, pointers),
            ctypes.c_float(eps),
            ctypes.c_float((scale or head_dim**-0.5) * math.log2(math.e)),
            *map(ctypes.c_int, (tables_LW.stride(0), num_groups, 0 if window is None else window)),
        ),
        cluster=ranks,
    )
    return out_THD
