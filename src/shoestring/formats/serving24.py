"""Stored parts <-> the order that the 2:4 kernels read; shared by Sparse24 and Stacked.

Serving parts are `chunks` (kernels/sparse24_layout.py): in the values' own dtype for Sparse24, bytes where the kept
values are 4-bit codes. `stored_parts` gives the stored parts back bit for bit, so a served model saves, exports and
moves as before.
Values in fp32 have no kernel; rounding them here would lose what was stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.formats.base import Format, Parts
from shoestring.formats.groups import SCALE_DTYPES, group_width
from shoestring.formats.int_asym import IntAsym
from shoestring.kernels.lowbit import chunks_usable
from shoestring.kernels.lowbit_layout import CHUNK_ROWS
from shoestring.kernels.packing import pack_bits, unpack_bits
from shoestring.kernels.sparse24_layout import (
    SparseLayout,
    chunk_group,
    pack_codes,
    pack_values,
    unpack_codes,
    unpack_values,
)
from shoestring.kernels.sparse24_rows import DTYPES

VALUES = SparseLayout(16)


def values_to_chunks(parts: Parts) -> Tensor | None:
    """The chunks of values and meta, or None where no kernel would read them."""
    values = parts["values"]
    if not chunks_usable(values) or values.shape[0] % CHUNK_ROWS or values.dtype not in DTYPES:
        return None
    return pack_values(values, parts["meta"])


def values_from_chunks(chunks: Tensor, shape: tuple[int, int]) -> Parts:
    values, meta = unpack_values(chunks, shape)
    return {"values": values, "meta": meta}


def codes_layout(second: Format, width: int) -> SparseLayout | None:
    """How the kernel sees a 2:4 weight of `width` inputs whose kept values `second` stores; None: not at all."""
    if not isinstance(second, IntAsym) or second.bits != 4:
        return None
    group = chunk_group(group_width(width // 2, second.group))
    return SparseLayout(4, group, second.scale_dtype == "bfloat16") if group else None


def codes_to_chunks(parts: Parts, layout: SparseLayout | None) -> Tensor | None:
    """The chunks of codes, scale, zero and meta, or None where no kernel would read them."""
    codes = parts["codes"]
    if layout is None or not chunks_usable(codes) or codes.shape[0] % CHUNK_ROWS:
        return None
    scale, zero = parts["scale"].view(torch.int16), parts["zero"].to(torch.int16)
    return pack_codes(unpack_bits(codes, layout.bits), scale, zero, parts["meta"], layout)


def codes_from_chunks(chunks: Tensor, second: IntAsym, shape: tuple[int, int]) -> Parts:
    layout = codes_layout(second, shape[1])
    assert layout is not None
    codes, low, high, meta = unpack_codes(chunks, layout, shape)
    every = group_width(shape[1] // 2, second.group) // layout.group
    return {
        "meta": meta,
        "codes": pack_bits(codes.contiguous(), layout.bits),
        "scale": low[:, ::every].contiguous().view(SCALE_DTYPES[second.scale_dtype]),
        "zero": high[:, ::every].contiguous().to(torch.uint8),
    }
