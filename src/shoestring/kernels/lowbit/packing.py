"""Bit packing: small unsigned codes to a dense byte stream and back, in plain torch.

Along the last dim, code i of a row occupies bits [i*b, (i+1)*b) of the row's little-endian bit stream, lowest
bit first; there is no padding between codes. 8 codes of b bits are therefore exactly b bytes:

    2 bits   byte 0 = c0 | c1<<2 | c2<<4 | c3<<6
    3 bits   byte 0 = c0 | c1<<3 | (c2 & 3)<<6      byte 1 = c2>>2 | c3<<1 | c4<<4 | (c5 & 1)<<7
             byte 2 = c5>>1 | c6<<2 | c7<<5
    4 bits   byte 0 = c0 | c1<<4
    8 bits   byte 0 = c0

The last dim must be a multiple of 8, so that a row ends on a byte and a cut at a multiple of 8 codes is between bytes.
This is the same stream as the 32-bit words of compressed-tensors' "pack-quantized" on a little-endian machine. Kernels
repack it into their own order.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES_PER_RUN = 8


def packed_width(width: int, bits: int) -> int:
    """Bytes that `width` codes of `bits` bits take."""
    assert width % CODES_PER_RUN == 0, f"{width} codes do not fill whole bytes"
    return width * bits // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes < 2**bits [..., k] -> uint8 bytes [..., k*bits/8]."""
    assert codes.dtype == torch.uint8 and codes.shape[-1] % CODES_PER_RUN == 0
    if bits == 8:
        return codes
    if bits == 3:
        c = codes.to(torch.int32).unflatten(-1, (-1, CODES_PER_RUN)).unbind(-1)
        run = c[0]
        for i in range(1, CODES_PER_RUN):
            run = run | (c[i] << (3 * i))
        out = torch.stack([run & 255, (run >> 8) & 255, run >> 16], dim=-1)
        return out.flatten(-2).to(torch.uint8)
    per_byte = 8 // bits
    c = codes.to(torch.int32).unflatten(-1, (-1, per_byte)).unbind(-1)
    byte = c[0]
    for i in range(1, per_byte):
        byte = byte | (c[i] << (bits * i))
    return byte.to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits: uint8 bytes [..., n] -> uint8 codes [..., n*8/bits]."""
    assert packed.dtype == torch.uint8
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    if bits != 3:
        return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
    b = packed.to(torch.int32).unflatten(-1, (-1, 3)).unbind(-1)
    run = b[0] | (b[1] << 8) | (b[2] << 16)
    shifts = torch.arange(0, 24, bits, dtype=torch.int32, device=packed.device)
    return ((run.unsqueeze(-1) >> shifts) & mask).to(torch.uint8).flatten(-2)
