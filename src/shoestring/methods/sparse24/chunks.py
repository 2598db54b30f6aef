"""Stored parts <-> kernel parts of 2:4 weights: the order in which their kernel reads them.

    Sparse24    chunks of kernels/chunk_layout24.py in the dtype of the values
    Stacked     the same in bytes, where the kept values are 4-bit integers

As in formats/kernel_layout.py; None where no kernel reads this weight. Values in fp32 have no kernel: rounding them
would change the stored weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.formats import kernel_layout
from shoestring.formats.base import Parts
from shoestring.formats.groups import SCALE_DTYPES, group_width
from shoestring.kernels.lowbit.chunk_layout import CHUNK_ROWS
from shoestring.kernels.lowbit.packing import pack_bits, unpack_bits
from shoestring.methods.sparse24.kernels import chunk_layout24
from shoestring.methods.sparse24.kernels.chunk_layout24 import ChunkLayout24
from shoestring.methods.sparse24.kernels.sparse24_linear import DTYPES

VALUES = ChunkLayout24(16)


def values_to_chunks(parts: Parts) -> Tensor | None:
    values = parts["values"]
    if not kernel_layout.chunks_usable(values) or values.shape[0] % CHUNK_ROWS or values.dtype not in DTYPES:
        return None
    return chunk_layout24.pack_values(values, parts["meta"])


def values_from_chunks(chunks: Tensor, shape: tuple[int, int]) -> Parts:
    values, meta = chunk_layout24.unpack_values(chunks, shape)
    return {"values": values, "meta": meta}


def codes_layout(group: int, scale_dtype: str, width: int) -> ChunkLayout24 | None:
    """Of a 2:4 weight of `width` inputs whose kept values are 4-bit integers in groups of `group`."""
    chunked = chunk_layout24.chunk_group(group_width(width // 2, group))
    return ChunkLayout24(4, chunked, scale_dtype == "bfloat16") if chunked else None


def codes_to_chunks(parts: Parts, layout: ChunkLayout24 | None) -> Tensor | None:
    codes = parts["codes"]
    if layout is None or not kernel_layout.chunks_usable(codes) or codes.shape[0] % CHUNK_ROWS:
        return None
    scale, zero = parts["scale"].view(torch.int16), parts["zero"].to(torch.int16)
    return chunk_layout24.pack_codes(unpack_bits(codes, layout.bits), scale, zero, parts["meta"], layout)


def codes_from_chunks(
    chunks: Tensor, layout: ChunkLayout24, shape: tuple[int, int], group: int, scale_dtype: str
) -> Parts:
    codes, low, high, meta = chunk_layout24.unpack_codes(chunks, layout, shape)
    every = group_width(shape[1] // 2, group) // layout.group
    return {
        "meta": meta,
        "codes": pack_bits(codes.contiguous(), layout.bits),
        "scale": low[:, ::every].contiguous().view(SCALE_DTYPES[scale_dtype]),
        "zero": high[:, ::every].contiguous().to(torch.uint8),
    }
