"""Block codes: rows of fp32 values as integers of 8, 4 or 2 bits with one fp32 scale per block, packed into bytes.

    scale = max|x| / levels   (norm="l2": |x|_2 / levels),   code = round(x / scale),   levels = 127, 7 or 1

`noise` in [0, 1) makes rounding random and unbiased: floor(x / scale + noise). A row of the result holds its codes,
then its scales. With 4 bits, byte j of a block holds the values j (low bits) and j + block/2; with 2 bits, four
quarters.
Blocks whose largest value is below TINY are zero: their scale would not be a normal number.

Nearest rounding with 8 and 4 bits runs in one pass, on a GPU (block_codes_triton.py) and on a CPU (cpu_codes.py), with
the same bits as here.
"""

from __future__ import annotations

from ctypes import CDLL

import torch
from torch import Tensor

from shoestring.kernels.comm.cpu_codes import MAX_BLOCK, cpu_loops, num_threads, rows_of_bytes
from shoestring.kernels.runtime.triton_backend import triton_usable

LEVELS = {8: 127, 4: 7, 2: 1}
TINY = 1e-30
HUGE = 3e38  # codes times scale must not round to infinity
TILE = 4096  # values per program


def num_code_bytes(num: int, bits: int) -> int:
    return num * bits // 8


def encode_blocks_ref(
    rows_RN: Tensor, bits: int, block: int, *, norm: str = "max", noise: Tensor | None = None
) -> Tensor:
    x = rows_RN.float().unflatten(1, (-1, block))
    most = x.abs().amax(-1, keepdim=True)
    most = torch.where(most < TINY, 0.0, most.clamp(max=HUGE))
    if norm == "l2":  # of the block over its largest value, so that squares do not overflow
        unit = x / torch.where(most > 0, most, 1.0)
        most = (most * unit.square().sum(-1, keepdim=True).sqrt()).clamp(max=HUGE)
    scale = most / torch.full_like(most, LEVELS[bits])  # on a GPU, torch multiplies with a number's reciprocal
    steps = x / torch.where(scale > 0, scale, torch.inf)  # blocks of tiny values get codes of 0
    steps = steps.round_() if noise is None else steps.add_(noise.unflatten(1, (-1, block))).floor_()
    codes = steps.clamp_(-LEVELS[bits], LEVELS[bits]).to(torch.int8)
    return torch.cat([_pack(codes, bits).flatten(1), scale.flatten(1).contiguous().view(torch.uint8)], dim=1)


def decode_blocks_ref(wire_RB: Tensor, num: int, bits: int, block: int) -> Tensor:
    cut = num_code_bytes(num, bits)
    scale = wire_RB[:, cut:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes = _unpack(wire_RB[:, :cut].unflatten(1, (-1, num_code_bytes(block, bits))), bits)
    return codes.float().mul_(scale[..., None]).flatten(1)


def encode_blocks(rows_RN: Tensor, bits: int, block: int, *, norm: str = "max", noise: Tensor | None = None) -> Tensor:
    """As encode_blocks_ref."""
    rows, num = rows_RN.shape
    if noise is None and norm == "max" and (loops := _cpu_loops(rows_RN, bits, block)) is not None:
        return _encode_on_cpu(loops, rows_RN.contiguous(), bits, block, None)
    if noise is not None or norm != "max" or not _fused(rows_RN, bits, block):
        return encode_blocks_ref(rows_RN, bits, block, norm=norm, noise=noise)
    from shoestring.kernels.comm.block_codes_triton import _encode_kernel

    cut = num_code_bytes(num, bits)
    wire = rows_RN.new_empty(rows, cut + num // block * 4, dtype=torch.uint8)
    tile = max(1, TILE // block)
    grid = (rows, -(-num // (block * tile)))
    _encode_kernel[grid](
        rows_RN.contiguous(), wire, wire.view(torch.float32), num, wire.shape[1], cut,
        BITS=bits, BLOCK=block, TILE=tile, LEVELS=LEVELS[bits], TINY=TINY, HUGE=HUGE, num_warps=8,
    )  # fmt: skip
    return wire


def decode_blocks(wire_RB: Tensor, num: int, bits: int, block: int) -> Tensor:
    """As decode_blocks_ref."""
    rows = wire_RB.shape[0]
    if (loops := _cpu_loops(wire_RB, bits, block)) is not None:
        wire_RB, out = rows_of_bytes(wire_RB), torch.empty(rows, num)
        where = (wire_RB.data_ptr(), wire_RB.stride(0), out.data_ptr())
        loops.decode_blocks(*where, rows, num, bits, block, num_threads(out.numel()))
        return out
    if not _fused(wire_RB, bits, block):
        return decode_blocks_ref(wire_RB, num, bits, block)
    from shoestring.kernels.comm.block_codes_triton import _decode_kernel

    if not wire_RB.is_contiguous() or wire_RB.data_ptr() % 4:
        wire_RB = wire_RB.clone(memory_format=torch.contiguous_format)
    out = wire_RB.new_empty(rows, num, dtype=torch.float32)
    tile = max(1, TILE // block)
    grid = (rows, -(-num // (block * tile)))
    _decode_kernel[grid](
        wire_RB, wire_RB.view(torch.float32), out, num, wire_RB.shape[1], num_code_bytes(num, bits),
        BITS=bits, BLOCK=block, TILE=tile, num_warps=8,
    )  # fmt: skip
    return out


def encode_with_error(rows_RN: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """(wire, rows - decoded wire)."""
    if (loops := _cpu_loops(rows_RN, bits, block)) is not None:
        rows_RN = rows_RN.contiguous()
        error = torch.empty_like(rows_RN)
        return _encode_on_cpu(loops, rows_RN, bits, block, error), error
    wire = encode_blocks(rows_RN, bits, block)
    return wire, rows_RN - decode_blocks(wire, rows_RN.shape[1], bits, block)


def sum_blocks(wire_RB: Tensor, exact_N: Tensor, own: int, bits: int, block: int) -> Tensor:
    """The sum of the decoded rows in their order, where row `own` is `exact_N`, which did not travel."""
    rows, num = wire_RB.shape[0], exact_N.numel()
    if (loops := _cpu_loops(wire_RB, bits, block)) is not None:
        wire_RB, exact_N, out = rows_of_bytes(wire_RB), exact_N.contiguous(), torch.empty(num)
        where = (wire_RB.data_ptr(), wire_RB.stride(0), exact_N.data_ptr(), own, out.data_ptr())
        loops.sum_blocks(*where, rows, num, bits, block, num_threads(rows * num))
        return out
    parts = decode_blocks(wire_RB, num, bits, block)
    parts[own] = exact_N
    return in_order(parts)


def in_order(parts_RN: Tensor) -> Tensor:
    """The sum over the first dim, one after the other: the same bits on every machine."""
    total = parts_RN[0].clone()
    for part in parts_RN[1:]:
        total += part
    return total


def _cpu_loops(t: Tensor, bits: int, block: int) -> CDLL | None:
    return cpu_loops(t) if bits in (8, 4) and block % 2 == 0 and block <= MAX_BLOCK else None


def _encode_on_cpu(loops: CDLL, rows_RN: Tensor, bits: int, block: int, error: Tensor | None) -> Tensor:
    rows, num = rows_RN.shape
    wire = torch.empty(rows, num_code_bytes(num, bits) + num // block * 4, dtype=torch.uint8)
    where = (rows_RN.data_ptr(), wire.data_ptr(), None if error is None else error.data_ptr())
    loops.encode_blocks(*where, rows, num, bits, block, num_threads(rows * num))
    return wire


def _fused(t: Tensor, bits: int, block: int) -> bool:
    known = bits in (8, 4) and block >= 32 and block & (block - 1) == 0 and t.numel() > 0
    return known and t.dtype in (torch.float32, torch.uint8) and triton_usable(t.new_empty(0, dtype=torch.float32))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """int8 [..., block] -> uint8 [..., block * bits / 8]."""
    if bits == 8:
        return codes.view(torch.uint8)
    shifted = (codes + (1 << (bits - 1))).view(torch.uint8)
    parts = shifted.chunk(8 // bits, dim=-1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.contiguous().view(torch.int8)
    low = (1 << bits) - 1
    parts = [(packed >> (bits * i)) & low for i in range(8 // bits)]
    return torch.cat(parts, dim=-1).view(torch.int8) - (1 << (bits - 1))
