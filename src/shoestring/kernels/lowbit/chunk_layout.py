"""The order of packed weights in memory that the low-bit kernels read, made once from a Format's stored parts.

A chunk is 16 output rows x 128 inputs: the operand fragments of eight m16n8k16 matrix instructions. Its bytes:

    codes   256 * bits bytes: the words of lane 0..31, each lane holding its own 64 codes (first four words of
            every lane, then the others, so that a warp's loads are 16 bytes a lane and contiguous)
    grid    64 bytes per group inside the chunk: for each of the 16 rows the scale's 16 bits, then the zero
            point as uint16, or the 16 bits of the second scale (one scale: the same twice)

Chunks are contiguous along the inputs, then along the rows: uint8 [ceil(out/16), ceil(in/128), chunk]. Padding rows and
inputs have scale 0.

Lane g*4+t holds, for step j of 16 inputs, four pairs i: row g (i even) or g+8, inputs 16j + 2t + 8*(i//2) and the
next one. `bit_map` gives the bits of pair 4j+i in the lane's words; the reasons are in kernels/lowbit/decode.cu.
`unpack_chunks` is the inverse in plain torch and the definition that the kernels are tested with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ROWS, CHUNK_WIDTH, LANES, PAIRS = 16, 128, 32, 32


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class ChunkLayout:
    """What a kernel needs to know about a packed weight; static for torch.compile."""

    bits: int
    group: int  # inputs that share a scale inside a chunk: 32, 64 or 128
    table: bool  # levels from a table, else evenly spaced with a zero point
    scales: int  # 1, or 2: one for each sign (tables only)
    bf16_scale: bool

    @property
    def label(self) -> str:
        """How tables of measured plans name the format: "int4 g128", "nf4:s2 g64"."""
        kind = f"nf{self.bits}:s{self.scales}" if self.table else "dense" if self.dense else f"int{self.bits}"
        return f"{kind} g{self.group}"

    def macros(self, dtype: torch.dtype) -> dict[str, int]:
        """Of kernels/lowbit/decode.cu, for activations of `dtype`."""
        return {
            "BITS": self.bits,
            "TABLE": int(self.table),
            "TWO": int(self.scales == 2),
            "HALF": int(dtype == torch.float16),
            "SBF16": int(self.bf16_scale),
            "GROUP": self.group,
        }

    @property
    def code_bytes(self) -> int:
        return 256 * self.bits

    @property
    def pair_table_bytes(self) -> int:
        """Shared memory for a table of pairs of levels, a copy for each lane; 3 bits are read as 7 with a hole."""
        return 128 * (0, 0, 16, 128, 256)[self.bits] if self.table else 0

    @property
    def dense(self) -> bool:
        """Whether the weight is no packed one: rows of 16-bit numbers, in place of chunks."""
        return self.bits == 16

    @property
    def chunk_bytes(self) -> int:
        return self.code_bytes + (0 if self.dense else 64 * (CHUNK_WIDTH // self.group))


DENSE = ChunkLayout(16, CHUNK_WIDTH, False, 1, False)


def aligned(x_MK: Tensor) -> Tensor:
    """x itself where 16-byte copies can read its rows, else a copy. (`contiguous` would keep a misaligned view.)"""
    if x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 and x_MK.data_ptr() % 16 == 0:
        return x_MK
    return x_MK.clone(memory_format=torch.contiguous_format)


def chunk_group(group: int) -> int:
    """Inputs per stored scale in a chunk for a Format's group (a larger group is repeated), or 0: not possible."""
    return next((g for g in (128, 64, 32) if group % g == 0), 0)


@functools.cache
def bit_map(bits: int, table: bool) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For pair 4j+i the (word, bit) of each of its 2*bits bits: those of the first code, then of the second."""
    pairs = []
    for p in range(PAIRS):
        j, i = divmod(p, 4)
        if table and bits == 2:
            places = [(p // 8, (7 + n + 4 * (p % 8)) % 32) for n in range(4)]
        elif table:
            # eight nibbles a step, from bit 7 on; with 3 bits their fourth bits are the codes of the last two steps
            nibbles = [7 + 16 * (i % 2) + 8 * (i // 2) + 4 * n for n in range(2)]
            if bits == 4 or j < 6:
                places = [(j, (n + b) % 32) for n in nibbles for b in range(bits)]
            else:
                places = [(3 * (j - 6) + b, (n + 3) % 32) for n in nibbles for b in range(3)]
        else:
            low = _field(bits, j, i)
            places = [(w, (b + half) % 32) for half in (0, 16) for w, b in low]
        pairs.append(tuple(places))
    return tuple(pairs)


def _field(bits: int, j: int, i: int) -> list[tuple[int, int]]:
    """(word, bit) of the code of pair 4j+i in the lower half words."""
    if bits == 4:
        return [(j, 4 * i + n) for n in range(4)]
    if bits == 2:
        return [(j // 2, j % 2 * 8 + 2 * i + n) for n in range(2)]
    # The lower two bits as with 2 bits; the third in words of its own.
    two = [(j // 2, j % 2 * 8 + 2 * i + n) for n in range(2)]
    shift = (2, 4, 3, 5)[i] if j // 2 % 2 == 0 else (6, 8, 7, 9)[i]
    return [*two, (4 + j // 4, j % 2 * 8 + shift)]


def _runs(places: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int, int]]:
    """Neighbouring bits together: (bit of the code, count, word, bit of the word)."""
    runs: list[tuple[int, int, int, int]] = []
    for n, (word, bit) in enumerate(places):
        if runs and runs[-1][2] == word and runs[-1][3] + runs[-1][1] == bit:
            first, count, *rest = runs[-1]
            runs[-1] = (first, count + 1, rest[0], rest[1])
        else:
            runs.append((n, 1, word, bit))
    return runs


def pack_chunks(codes: Tensor, low: Tensor, high: Tensor, layout: ChunkLayout) -> Tensor:
    """uint8 codes [out, in] and the 16-bit halves of each group's grid (int16 [out, in/group]) as chunks."""
    rows, width = codes.shape
    per_group = width // low.shape[1]
    assert per_group % layout.group == 0
    low, high = (t.repeat_interleave(per_group // layout.group, dim=1) for t in (low, high))
    more_rows, more = -rows % CHUNK_ROWS, -width % CHUNK_WIDTH
    if more_rows or more:
        codes = torch.nn.functional.pad(codes, (0, more, 0, more_rows))
        low, high = (torch.nn.functional.pad(t, (0, more // layout.group, 0, more_rows)) for t in (low, high))
    tiles, chunks = codes.shape[0] // CHUNK_ROWS, codes.shape[1] // CHUNK_WIDTH

    # [tile, row half, g, chunk, j, k half, t, pair] -> [j, k half, row half, tile, chunk, lane, pair]
    by_slot = codes.view(tiles, 2, 8, chunks, 8, 2, 4, 2).permute(4, 5, 1, 0, 3, 2, 6, 7)
    by_slot = by_slot.reshape(PAIRS, tiles, chunks, LANES, 2)
    words = torch.zeros(2 * layout.bits, tiles, chunks, LANES, dtype=torch.int32, device=codes.device)
    for slot, places in zip(by_slot, bit_map(layout.bits, layout.table), strict=True):
        pair = slot[..., 0].int() | (slot[..., 1].int() << layout.bits)
        for first, count, word, bit in _runs(places):
            words[word] |= ((pair >> first) & ((1 << count) - 1)) << bit
    blocks = [words[:4].permute(1, 2, 3, 0), words[4:].permute(1, 2, 3, 0)]
    code_bytes = torch.cat([b.reshape(tiles, chunks, -1) for b in blocks], dim=-1).view(torch.uint8)

    grid = torch.stack([low, high], dim=-1).contiguous().view(torch.uint8)  # [out, groups, 4]
    grid = grid.view(tiles, CHUNK_ROWS, chunks, -1, 4).permute(0, 2, 3, 1, 4).reshape(tiles, chunks, -1)
    return torch.cat([code_bytes, grid], dim=-1)


def unpack_chunks(chunks: Tensor, layout: ChunkLayout, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of pack_chunks: codes [out, in], and the grid's halves int16 [out, in/layout.group]."""
    tiles, num = chunks.shape[:2]
    code_bytes, grid = chunks[..., : layout.code_bytes], chunks[..., layout.code_bytes :]
    flat = code_bytes.contiguous().view(torch.int32)
    parts = [flat[..., :128].view(tiles, num, LANES, 4), flat[..., 128:].view(tiles, num, LANES, -1)]
    words = torch.cat(parts, dim=-1).unbind(-1)
    slots = []
    for places in bit_map(layout.bits, layout.table):
        pair = torch.zeros_like(words[0])
        for first, count, word, bit in _runs(places):
            pair |= ((words[word] >> bit) & ((1 << count) - 1)) << first
        slots.append(torch.stack([pair & ((1 << layout.bits) - 1), pair >> layout.bits], dim=-1))
    codes = torch.stack(slots).to(torch.uint8).view(8, 2, 2, tiles, num, 8, 4, 2)
    codes = codes.permute(3, 2, 5, 4, 0, 1, 6, 7).reshape(tiles * CHUNK_ROWS, num * CHUNK_WIDTH)
    halves = grid.contiguous().view(torch.int16).view(tiles, num, -1, CHUNK_ROWS, 2).permute(0, 3, 1, 2, 4)
    halves = halves.reshape(tiles * CHUNK_ROWS, -1, 2)
    rows, width = shape
    groups = width // layout.group
    return codes[:rows, :width], halves[:rows, :groups, 0], halves[:rows, :groups, 1]
