"""Packed 2:4 weights in the order that the kernels of _cuda/sparse24.cu read.

A chunk is 16 output rows x 256 inputs, 128 of them kept: the operands of eight sparse matrix instructions
(mma.sp.m16n8k32). Its bytes:

    values    16 bits: 4096 bytes, the words of lanes 0..31 of step 0, then of step 1, ...
              4 bits:  the chunk of kernels/lowbit_layout.py for the kept values, 16 rows x 128: 1024 bytes of codes and
                       64 bytes of scales and zero points for each group
    meta      512 bytes: four words a lane

Chunks lie one after the other along the inputs, then along the rows: [ceil(out/16), ceil(in/256), chunk]. What was
added to fill a chunk has value (or scale) 0.

The kept values of a row are the operand of the dense 16x8x16 instruction: lane g*4+t holds of step j (32 inputs)
four pairs i, row g (i even) or g+8, the two kept of inputs 32j + 4t + 16*(i//2) ... + 3. Metadata: 4 bits a group of
four inputs as stored (kernels/sparse24.py); word p of lane g*4+t holds inputs 64p + 16t ... + 15, of row g in the
lower and of row g+8 in the upper half. So the lanes t = 0, 1 hold step 2p and t = 2, 3 step 2p+1, which is what the
instruction's selector 0 and 1 ask for, and no bit is loaded twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels import lowbit_layout
from shoestring.kernels.lowbit_layout import CHUNK_ROWS
from shoestring.kernels.sparse24 import unpack24

CHUNK_WIDTH, KEPT = 256, 128
VALUE_BYTES, META_BYTES = CHUNK_ROWS * KEPT * 2, 512
FIRST_TWO = 0x44  # metadata of two groups that keep their first two: in front of zeros


@dataclass(frozen=True)
class SparseLayout:
    """What a kernel has to know of a packed weight; everything here is static for torch.compile."""

    bits: int  # of a kept value: 16 or 4
    group: int = KEPT  # kept values that share a scale inside a chunk: 32, 64 or 128
    bf16_scale: bool = False

    @property
    def codes(self) -> lowbit_layout.Layout:
        return lowbit_layout.Layout(self.bits, self.group, False, 1, self.bf16_scale)

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES if self.bits == 16 else self.codes.chunk_bytes

    @property
    def chunk_bytes(self) -> int:
        return self.value_bytes + META_BYTES


def lay_meta(meta: Tensor) -> Tensor:
    """uint8 [out, in/8] as stored -> uint8 [tiles, chunks, 512]."""
    per_chunk = CHUNK_WIDTH // 8
    meta = F.pad(meta, (0, -meta.shape[1] % per_chunk, 0, -meta.shape[0] % CHUNK_ROWS), value=FIRST_TWO)
    tiles, chunks = meta.shape[0] // CHUNK_ROWS, meta.shape[1] // per_chunk
    halves = meta.contiguous().view(torch.int16).view(tiles, 2, 8, chunks, 4, 4)  # h g c p t
    return halves.permute(0, 3, 2, 5, 4, 1).reshape(tiles, chunks, -1).view(torch.uint8)


def stored_meta(laid: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of lay_meta for a weight of `shape`."""
    tiles, chunks = laid.shape[:2]
    halves = laid.contiguous().view(torch.int16).view(tiles, chunks, 8, 4, 4, 2)  # g t p h
    rows = halves.permute(0, 5, 2, 1, 4, 3).reshape(tiles * CHUNK_ROWS, -1).view(torch.uint8)
    return rows[: shape[0], : shape[1] // 8].contiguous()


def pack_values(values: Tensor, meta: Tensor) -> Tensor:
    """16-bit values [out, in/2] and their metadata as chunks of the values' dtype."""
    kept = F.pad(values, (0, -values.shape[1] % KEPT, 0, -values.shape[0] % CHUNK_ROWS))
    tiles, chunks = kept.shape[0] // CHUNK_ROWS, kept.shape[1] // KEPT
    # [tile, row half, g, chunk, j, k half, t, pair] -> [tile, chunk, j, g, t, k half, row half, pair]
    by_lane = kept.view(tiles, 2, 8, chunks, 8, 2, 4, 2).permute(0, 3, 4, 2, 6, 5, 1, 7)
    by_lane = by_lane.reshape(tiles, chunks, -1)
    return torch.cat([by_lane, lay_meta(meta).view(values.dtype)], dim=-1)


def unpack_values(chunks: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The inverse of pack_values: values and metadata of a weight of `shape`."""
    tiles, num = chunks.shape[:2]
    values, meta = chunks[..., : VALUE_BYTES // 2], chunks[..., VALUE_BYTES // 2 :]
    kept = values.reshape(tiles, num, 8, 8, 4, 2, 2, 2).permute(0, 6, 3, 1, 2, 5, 4, 7)
    kept = kept.reshape(tiles * CHUNK_ROWS, -1)[: shape[0], : shape[1] // 2].contiguous()
    return kept, stored_meta(meta.contiguous().view(torch.uint8), shape)


def pack_codes(codes: Tensor, low: Tensor, high: Tensor, meta: Tensor, layout: SparseLayout) -> Tensor:
    """4-bit codes [out, in/2], the grid's halves as lowbit_layout.pack_chunks takes them, and metadata as chunks."""
    return torch.cat([lowbit_layout.pack_chunks(codes, low, high, layout.codes), lay_meta(meta)], dim=-1)


def unpack_codes(
    chunks: Tensor, layout: SparseLayout, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of pack_codes: codes, the grid's halves [out, in/2/layout.group], metadata."""
    inner, meta = chunks[..., : layout.value_bytes], chunks[..., layout.value_bytes :]
    kept_shape = (shape[0], shape[1] // 2)
    return *lowbit_layout.unpack_chunks(inner, layout.codes, kept_shape), stored_meta(meta, shape)


def decode_ref(chunks: Tensor, layout: SparseLayout, width: int) -> Tensor:
    """fp32 weight [out, width] that `chunks` stand for, in plain torch."""
    shape = (chunks.shape[0] * CHUNK_ROWS, width)
    if layout.bits == 16:
        values, meta = unpack_values(chunks, shape)
        return unpack24(values.float(), meta)
    codes, low, high, meta = unpack_codes(chunks, layout, shape)
    scale = low.contiguous().view(torch.bfloat16 if layout.bf16_scale else torch.float16).float()
    grouped = codes.float().unflatten(-1, (-1, layout.group))
    kept = (grouped - high.float().unsqueeze(-1)) * scale.unsqueeze(-1)
    return unpack24(kept.flatten(-2), meta)
