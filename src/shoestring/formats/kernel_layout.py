"""Stored parts <-> kernel parts: the order in which the low-bit kernels read a weight.

    IntAsym, FloatAsym    chunks of kernels/lowbit/chunk_layout.py, and `table` where there is one

Kernel parts hold the same numbers as the stored parts; `Format.stored_parts` is the inverse, bit for bit, for saving,
exporting and moving. A function returns None where no kernel reads this weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.formats.base import Parts
from shoestring.formats.groups import SCALE_DTYPES, group_width
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS, ChunkLayout, pack_chunks, unpack_chunks
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable, lowbit_linear, lowbit_parts_linear, parts_usable
from shoestring.kernels.lowbit.packing import pack_bits, unpack_bits


def to_chunks(parts: Parts, layout: ChunkLayout) -> Tensor | None:
    rows = parts["codes"].shape[0]
    if not chunks_usable(parts["codes"]) or rows % CHUNK_ROWS or layout.bits > 4 or not layout.group:
        return None
    if layout.table and not zero_in_the_middle(parts["table"]):
        return None
    return lay_out(parts, layout)


def zero_in_the_middle(table: Tensor) -> bool:
    """Whether the lower half of the codes stands for no positive level and the upper half for no negative one."""
    below, above = table.float().chunk(2)
    return bool((below <= 0).all() and (above >= 0).all())


def lay_out(parts: Parts, layout: ChunkLayout) -> Tensor:
    scale = parts["scale"].view(torch.int16)
    if layout.table:
        low, high = scale[..., 0], scale[..., -1]
    else:
        low, high = scale, parts["zero"].to(torch.int16)
    return pack_chunks(unpack_bits(parts["codes"], layout.bits), low, high, layout)


def from_chunks(chunks: Tensor, layout: ChunkLayout, shape: tuple[int, int], group: int, scale_dtype: str) -> Parts:
    """codes, scale and zero (integers) as they were stored; `group` is the Format's."""
    codes, low, high = unpack_chunks(chunks, layout, shape)
    every = group_width(shape[1], group) // layout.group
    low, high = (t[:, ::every].contiguous() for t in (low, high))
    as_scale = SCALE_DTYPES[scale_dtype]
    parts = {"codes": pack_bits(codes.contiguous(), layout.bits)}
    if layout.table:
        scale = torch.stack([low, high], dim=-1)[..., : layout.scales].contiguous()
        return {**parts, "scale": scale.view(as_scale)}
    return {**parts, "scale": low.view(as_scale), "zero": high.to(torch.uint8)}


def apply_parts(x: Tensor, parts: Parts, bias: Tensor | None, layout: ChunkLayout) -> Tensor | None:
    """x times the weight of kernel parts or stored parts."""
    table = parts.get("table")
    if "chunks" in parts:
        return lowbit_linear(x, parts["chunks"], table, bias, layout)
    if layout.bits <= 4 and parts_usable(x):
        return lowbit_parts_linear(x, parts["codes"], parts["scale"], parts.get("zero"), table, bias, layout.bits)
    return None
