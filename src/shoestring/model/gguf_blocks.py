"""Weights as the blocks of GGUF: exactly where our grid is one of llama.cpp's, rounded and measured otherwise.

An integer weight of ours is (q - z) * s with a 16-bit scale s per group (IntAsym), or q * s + m with m in 16 bits, too
(IntOffset). llama.cpp's blocks have 32 weights each:

    Q4_0  d * n,  -8 <= n < 8       Q5_0  d * n,  -16 <= n < 16      Q8_0  d * n,  -128 <= n < 128
    Q4_1  d * q + m,  0 <= q < 16   Q5_1  d * q + m,  0 <= q < 32

With d = s and n = q - z the first three hold the values of IntAsym bit for bit, as far as n fits: symmetric int4 and
all of int2 and int3 are Q4_0, asymmetric int4 is Q5_0, symmetric int8 is Q8_0. Q4_1 keeps the codes of int4 in half a
bit less than Q5_0 and rounds m = -z * s to fp16; that is exact for some groups only. Q4_1 and Q5_1 hold IntOffset.
Groups must be multiples of 32.

`decode_grid` reads all five back. Q4_K and Q5_K are Q4_1 and Q5_1 whose eight pairs of d and m are products of two
fp16 numbers and of 6-bit integers: they are read with the products rounded to fp16.

Every result is decoded again and compared, so "exact" is a measurement. All other weights go through the quantizers of
the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.formats import Format
from shoestring.formats.base import Parts
from shoestring.formats.groups import group_width
from shoestring.formats.int_asym import IntAsym
from shoestring.formats.int_offset import IntOffset
from shoestring.formats.quantized import QuantizedFormat
from shoestring.kernels.lowbit.packing import unpack_bits
from shoestring.model.export_names import KINDS

BLOCK = 32
_PIECE = 1 << 22  # weights that are compared at a time
FLOAT_KINDS = ("F32", "F16", "BF16")
_LOWEST = {"Q4_0": -8, "Q5_0": -16, "Q8_0": -128}  # n of these begins here, and ends at its negative
_OFFSET_TOP = {"Q4_1": 16, "Q5_1": 32}
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176}
_FLOAT_BITS = {"F32": 32.0, "F16": 16.0, "BF16": 16.0, "MXFP4": 4.25}


def bits_of(kind: str) -> float:
    """Bits per weight, for one of KINDS."""
    return _FLOAT_BITS[kind] if kind in _FLOAT_BITS else 8 * _BLOCK_BYTES[kind] / BLOCK


# Kinds whose values are those of a Format of ours.
GRIDS: dict[str, QuantizedFormat] = {
    "Q4_0": IntAsym(4, BLOCK, symmetric=True),
    "Q5_0": IntAsym(8, BLOCK),
    "Q8_0": IntAsym(8, BLOCK, symmetric=True),
    "Q4_1": IntOffset(4, BLOCK),
    "Q5_1": IntOffset(8, BLOCK),
    "Q4_K": IntOffset(4, BLOCK),
    "Q5_K": IntOffset(8, BLOCK),
}
_ZERO_POINTS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}


@dataclass(frozen=True)
class Blocks:
    """A matrix as bytes [rows, n] of one kind, and what that costs."""

    kind: str
    data: Tensor  # uint8
    error: float  # sum of squared differences
    norm: float  # sum of squares
    exact: bool  # the decoded values are equal, bit for bit


def encode_blocks(weight: Tensor, kind: str) -> Blocks:
    """A dense matrix in `kind`, by the package's quantizer."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    values = np.ascontiguousarray(weight.float().numpy())
    with np.errstate(all="ignore"):
        raw = quantize(values, GGMLQuantizationType[kind])
    return _measured(kind, torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8)), weight)


def encode_grid(format: Format, parts: Parts, weight: Tensor, kind: str) -> Blocks | None:
    """The codes of a packed weight in blocks of `kind`, None where they do not fit in there; `weight`: its values."""
    if not isinstance(format, IntAsym | IntOffset) or group_width(weight.shape[1], format.group) % BLOCK:
        return None
    rows, repeats = weight.shape[0], group_width(weight.shape[1], format.group) // BLOCK
    scale = parts["scale"].repeat_interleave(repeats, dim=1)  # [rows, blocks]
    shift = parts["offset" if isinstance(format, IntOffset) else "zero"].repeat_interleave(repeats, dim=1)
    codes = unpack_bits(parts["codes"], format.bits).view(rows, -1, BLOCK).to(torch.int32)
    half = scale.to(torch.float16)
    if not torch.equal(half.float(), scale.float()):
        return None
    if kind in _OFFSET_TOP:
        offset = shift.float() if isinstance(format, IntOffset) else -shift.float() * scale.float()
        offset = offset.to(torch.float16)
        if int(codes.max()) >= _OFFSET_TOP[kind] or not bool(offset.isfinite().all()):
            return None
        head, numbers = [half, offset], codes
    elif kind in _LOWEST and isinstance(format, IntAsym):
        numbers, lowest = codes - shift[..., None].to(torch.int32), _LOWEST[kind]
        if int(numbers.min()) < lowest or int(numbers.max()) >= -lowest:
            return None
        head, numbers = [half], numbers if kind == "Q8_0" else numbers - lowest
    else:
        return None
    heads = [h[..., None].view(torch.uint8) for h in head]
    return _measured(kind, torch.cat([*heads, *_packed(numbers, kind)], dim=-1).flatten(1), weight)


def decode_grid(data: Tensor, kind: str) -> Parts:
    """Blocks of a kind of GRIDS, bytes [rows, n], as parts of its Format: the same values, bit for bit, but for what K
    types round."""
    blocks = data.view(len(data), -1, _BLOCK_BYTES[kind])
    if kind in ("Q4_K", "Q5_K"):
        return _decode_k(blocks, kind)
    numbers = blocks[..., : 4 if kind in _OFFSET_TOP else 2].contiguous().view(torch.float16)
    scale, nibbles = numbers[..., 0], blocks[..., -BLOCK // 2 :]  # of weights i and i + 16
    if kind == "Q8_0":
        codes = blocks[..., 2:] ^ 128  # n + 128
    elif kind in ("Q4_0", "Q4_1"):
        codes = torch.cat([_pairs(nibbles & 15), _pairs(nibbles >> 4)], dim=-1)
    else:
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1) | _bits(blocks[..., -20:-16]) << 4
    parts = {"codes": codes.flatten(1), "scale": scale.contiguous()}
    if kind in _OFFSET_TOP:
        return {**parts, "offset": numbers[..., 1].contiguous()}
    return {**parts, "zero": torch.full(scale.shape, _ZERO_POINTS[kind], dtype=torch.uint8)}


def _decode_k(blocks: Tensor, kind: str) -> Parts:
    """Blocks of 256 weights: d, dmin, twelve bytes with eight scales and minima of 6 bits, at 5 bits 32 bytes with the
    highest bit of every weight, four runs of 32 bytes with the rest of 64 weights."""
    d, d_min = blocks[..., :4].contiguous().view(torch.float16).float().unsqueeze(-2).unbind(-1)
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    runs = blocks[..., -128:].unflatten(-1, (4, 32))
    if kind == "Q4_K":
        codes = torch.stack([_pairs(runs & 15), _pairs(runs >> 4)], dim=-2)
    else:
        # Bit i of byte l belongs to weight l of 32 in group i.
        fifth = (blocks[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1).mT.unflatten(-2, (4, 2))
        codes = torch.stack([runs & 15, runs >> 4], dim=-2) | fifth << 4
    scale, offset = (d * scales).to(torch.float16), (-d_min * minima).to(torch.float16)
    return {"codes": codes.flatten(1), "scale": scale.flatten(1), "offset": offset.flatten(1)}


def _pairs(codes: Tensor) -> Tensor:
    """Two neighbours a byte, as packing.py has codes of 4 bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _bits(data: Tensor) -> Tensor:
    """The bits of bytes, from the lowest one on, one per byte."""
    return (data[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _packed(numbers: Tensor, kind: str) -> list[Tensor]:
    """The bytes behind the scales of blocks [rows, blocks, 32]: low bits of weights i and i + 16 share a byte."""
    if kind == "Q8_0":
        return [numbers.to(torch.int8).view(torch.uint8)]
    low, high = (numbers & 15).split(BLOCK // 2, dim=-1)
    nibbles = (low | high << 4).to(torch.uint8)
    if kind in ("Q4_0", "Q4_1"):
        return [nibbles]
    fifth = ((numbers >> 4) & 1).view(*numbers.shape[:-1], 4, 8)  # bit i of 32 belongs to weight i
    weights = 1 << torch.arange(8, dtype=torch.int32)
    return [(fifth * weights).sum(-1).to(torch.uint8), nibbles]


def exact_kinds(weight: Tensor) -> Iterator[str]:
    """The kinds, smallest first, that may hold a dense matrix exactly, because they do so for its first rows."""
    some = weight[: min(4, len(weight))]
    for kind in KINDS[1:]:
        if fits(weight, kind) and encode_blocks(some, kind).exact:
            yield kind


def fits(weight: Tensor, kind: str) -> bool:
    return kind in FLOAT_KINDS or weight.shape[-1] % BLOCK == 0


def _measured(kind: str, data: Tensor, weight: Tensor) -> Blocks:
    error = norm = 0.0
    exact, step = True, max(1, _PIECE // weight.shape[-1])
    for at in range(0, len(data), step):
        want, got = weight[at : at + step].float(), decode_blocks(data[at : at + step], kind)
        if not bool(got.isfinite().all()):
            raise UserError(f"the weights do not fit into {kind}: some are beyond its range; use BF16 or F32")
        error += float((got - want).double().square().sum())
        norm += float(want.double().square().sum())
        exact = exact and torch.equal(got, want)
    return Blocks(kind, data, error, norm, exact)


def decode_blocks(data: Tensor, kind: str) -> Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        values: Any = dequantize(np.ascontiguousarray(data.numpy()), GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(values, dtype=np.float32))
