"""Packed 2:4 weights in the order that the kernels of kernels/sparse24_linear.cu read.

A chunk is 16 output rows x 128 inputs, 64 of them kept: the operands of four sparse matrix instructions
(mma.sp.m16n8k32). Its bytes:

    values    16 bits: 2048 bytes, the words of lanes 0..31 of step 0, then of step 1, ...
              4 bits:  512 bytes of codes, a word of each lane for every step (bits as in
                       kernels/lowbit/chunk_layout.py), and 64 bytes of scales and zero points for each group, 16 + 16
                       bits for each of the 16 rows
    meta      256 bytes: two words a lane

Chunks are contiguous along the inputs, then along the rows: [ceil(out/16), chunks, chunk]. Padding has value (or
scale) 0.

The kept values of a row are the operand of the dense 16x8x16 instruction: lane g*4+t holds of step j (32 inputs)
four pairs i, row g (i even) or g+8, the two kept of inputs 32j + 4t + 16*(i//2) ... + 3. Metadata: 4 bits a group of
four inputs as stored (kernels/masks.py); word p of lane g*4+t holds inputs 64p + 16t ... + 15, of row g in the
lower and of row g+8 in the upper half. So the lanes t = 0, 1 hold step 2p and t = 2, 3 step 2p+1, which is what the
instruction's selectors 0 and 1 read, and no bit is loaded twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.lowbit import chunk_layout
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS
from shoestring.methods.sparse24.kernels.masks import unpack24

CHUNK_WIDTH, KEPT = 128, 64
VALUE_BYTES, CODE_BYTES, GRID_BYTES, META_BYTES = CHUNK_ROWS * KEPT * 2, CHUNK_ROWS * KEPT // 2, 64, 256
FIRST_TWO = 0x44  # metadata of two groups that keep their first two: in front of zeros


@dataclass(frozen=True)
class ChunkLayout24:
    """What a kernel needs to know about a packed weight; static for torch.compile."""

    bits: int  # of a kept value: 16 or 4
    group: int = KEPT  # kept values that share a scale inside a chunk: 32 or 64
    bf16_scale: bool = False

    @property
    def codes(self) -> chunk_layout.ChunkLayout:
        return chunk_layout.ChunkLayout(self.bits, self.group, False, 1, self.bf16_scale)

    @property
    def label(self) -> str:
        """How tables of measured plans name the format."""
        return "values" if self.bits == 16 else f"int{self.bits} g{self.group}"

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES if self.bits == 16 else CODE_BYTES + GRID_BYTES * (KEPT // self.group)

    @property
    def chunk_bytes(self) -> int:
        return self.value_bytes + META_BYTES


def chunk_group(group: int) -> int:
    """Kept values per stored scale in a chunk for a Format's group (a larger one is repeated), or 0: not possible."""
    return min(KEPT, chunk_layout.chunk_group(group))


def lay_meta(meta: Tensor) -> Tensor:
    """uint8 [out, in/8] as stored -> uint8 [tiles, chunks, META_BYTES]."""
    per_chunk = CHUNK_WIDTH // 8
    meta = F.pad(meta, (0, -meta.shape[1] % per_chunk, 0, -meta.shape[0] % CHUNK_ROWS), value=FIRST_TWO)
    tiles, chunks = meta.shape[0] // CHUNK_ROWS, meta.shape[1] // per_chunk
    halves = meta.contiguous().view(torch.int16).view(tiles, 2, 8, chunks, 2, 4)  # h g c p t
    return halves.permute(0, 3, 2, 5, 4, 1).reshape(tiles, chunks, -1).view(torch.uint8)


def stored_meta(laid: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of lay_meta for a weight of `shape`."""
    tiles, chunks = laid.shape[:2]
    halves = laid.contiguous().view(torch.int16).view(tiles, chunks, 8, 4, 2, 2)  # g t p h
    rows = halves.permute(0, 5, 2, 1, 4, 3).reshape(tiles * CHUNK_ROWS, -1).view(torch.uint8)
    return rows[: shape[0], : shape[1] // 8].contiguous()


def pack_values(values: Tensor, meta: Tensor) -> Tensor:
    """16-bit values [out, in/2] and their metadata as chunks of the values' dtype."""
    kept = F.pad(values, (0, -values.shape[1] % KEPT, 0, -values.shape[0] % CHUNK_ROWS))
    tiles, chunks = kept.shape[0] // CHUNK_ROWS, kept.shape[1] // KEPT
    # [tile, row half, g, chunk, j, k half, t, pair] -> [tile, chunk, j, g, t, k half, row half, pair]
    by_lane = kept.view(tiles, 2, 8, chunks, 4, 2, 4, 2).permute(0, 3, 4, 2, 6, 5, 1, 7)
    by_lane = by_lane.reshape(tiles, chunks, -1)
    return torch.cat([by_lane, lay_meta(meta).view(values.dtype)], dim=-1)


def unpack_values(chunks: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The inverse of pack_values: values and metadata of a weight of `shape`."""
    tiles, num = chunks.shape[:2]
    values, meta = chunks[..., : VALUE_BYTES // 2], chunks[..., VALUE_BYTES // 2 :]
    kept = values.reshape(tiles, num, 4, 8, 4, 2, 2, 2).permute(0, 6, 3, 1, 2, 5, 4, 7)
    kept = kept.reshape(tiles * CHUNK_ROWS, -1)[: shape[0], : shape[1] // 2].contiguous()
    return kept, stored_meta(meta.contiguous().view(torch.uint8), shape)


def pack_codes(codes: Tensor, low: Tensor, high: Tensor, meta: Tensor, layout: ChunkLayout24) -> Tensor:
    """4-bit codes [out, in/2], the grid's halves as chunk_layout.pack_chunks takes them, and metadata as chunks."""
    # A chunk of the dense kernel holds the kept values of two chunks here: words 0..3 of every lane, then 4..7.
    both = chunk_layout.pack_chunks(codes, low, high, layout.codes)
    tiles, num = both.shape[:2]
    words, grid = (t.reshape(tiles, 2 * num, -1) for t in (both[..., : 2 * CODE_BYTES], both[..., 2 * CODE_BYTES :]))
    laid = lay_meta(meta)
    num = laid.shape[1]
    return torch.cat([words[:, :num], grid[:, :num], laid], dim=-1)


def unpack_codes(
    chunks: Tensor, layout: ChunkLayout24, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of pack_codes: codes, the grid's halves [out, in/2/layout.group], metadata."""
    tiles, num = chunks.shape[:2]
    inner, meta = chunks[..., : layout.value_bytes], chunks[..., layout.value_bytes :]
    inner = F.pad(inner, (0, 0, 0, num % 2))
    parts = [t.reshape(tiles, (num + 1) // 2, -1) for t in (inner[..., :CODE_BYTES], inner[..., CODE_BYTES:])]
    both = torch.cat(parts, dim=-1)
    kept_shape = (shape[0], shape[1] // 2)
    return *chunk_layout.unpack_chunks(both, layout.codes, kept_shape), stored_meta(meta, shape)


def decode_chunks24_ref(chunks: Tensor, layout: ChunkLayout24, width: int) -> Tensor:
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
