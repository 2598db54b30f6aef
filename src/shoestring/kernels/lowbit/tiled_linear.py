"""Integer weights times activations that are rounded to 8 bits on the way: our own C++, for CPUs.

    y = x W^T,  W[n, k] = (q[n, k] - z[n, g]) * s[n, g],  g the group of k
    x' = x rounded, row by row, to 256 levels between its smallest and its largest value (and 0)

The same function as w4a8.py, for processors where torch has a portable loop only (all but Arm): AVX-512 VNNI, AVX2,
Arm's dot products or a loop, as the machine's own compiler builds it (runtime/cpp.py). Codes of 2 and 3 bits are held
as 4. Scales and zero points are used as they are stored. The decode step of a whole model
(serve/engine/cpu_decode.cpp) reads the same tiles and shares tiles.h.

This is not x W^T, so it is opt-in; `w4a8.error_bound` holds. `w4a8_ref` is the reference. Left out: gradients.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.runtime.cpp import load_library
from shoestring.kernels.runtime.openmp import thread_pool

TILES = Path(__file__).with_name("tiles.h")
SOURCE = Path(__file__).with_name("tiled_linear.cpp")
ROWS = 8  # of a tile
MOST_INPUTS = 2**15  # of a group: sums of 8-bit products are in 32 bits


class CMatrix(ctypes.Structure):
    """`Matrix` of tiles.h."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("rows", "width", "group", "bits")),
        *((n, ctypes.c_void_p) for n in ("codes", "scale", "zero", "total", "bias")),
    ]


@dataclass(frozen=True)
class TiledWeight:
    """A weight [out, in] in tiles of 8 rows, as tiles.h reads it; rows of zeros fill the last tile."""

    bits: int
    width: int
    outputs: int
    codes: Tensor  # uint8 [tiles, pieces, 4 quads, 8 rows, 4]
    scale: Tensor  # fp32 [tiles, groups, 8]
    zero: Tensor  # uint8 [tiles, groups, 8]
    total: Tensor  # fp32 [rows]: the sum of each row
    bias: Tensor | None

    @functools.cached_property
    def matrix(self) -> CMatrix:
        group = self.width // self.scale.shape[1]
        tensors = (self.codes, self.scale, self.zero, self.total, self.bias)
        return CMatrix(len(self.total), self.width, group, self.bits, *map(pointer, tensors))


def tile_weight(
    codes: Sequence[Tensor],
    scale: Sequence[Tensor],
    zero: Sequence[Tensor],
    bits: int,
    bias: Sequence[Tensor] | None = None,
    *,
    interleaved: bool = False,
) -> TiledWeight:
    """Codes [out, in] (one per byte), scales and zero points [out, groups] of weights that share their input, stacked;
    `interleaved`: a tile of each in turn."""
    codes_NK, scale_NG, zero_NG = (_stack(rows, interleaved) for rows in (codes, [s.float() for s in scale], zero))
    total = ((codes_NK.unflatten(1, (scale_NG.shape[1], -1)).float() - zero_NG[..., None]).sum(-1) * scale_NG).sum(-1)
    scale_TGR, zero_TGR = (t.unflatten(0, (-1, ROWS)).mT.contiguous() for t in (scale_NG, zero_NG))
    stacked = None if bias is None else _stack([b.detach().float() for b in bias], interleaved)
    width, outputs, held = codes_NK.shape[1], sum(map(len, codes)), 8 if bits == 8 else 4
    return TiledWeight(held, width, outputs, _pieces(codes_NK, held), scale_TGR, zero_TGR, total, stacked)


def _stack(parts: Sequence[Tensor], interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([p.unflatten(0, (-1, ROWS)) for p in parts], 1).flatten(0, 2)
    whole = torch.cat(list(parts))
    missing = -len(whole) % ROWS
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole


def _pieces(codes_NK: Tensor, bits: int) -> Tensor:
    """Inputs in runs of 16: four quads of a piece; at 4 bits two runs share its bytes."""
    runs = codes_NK.view(-1, ROWS, codes_NK.shape[1] // 16, 4, 4).permute(0, 2, 3, 1, 4)
    return (runs if bits == 8 else runs[:, ::2] | runs[:, 1::2] << 4).contiguous()


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def compiled(source: Path) -> ctypes.CDLL | None:
    """A source that follows tiles.h; None where there is no compiler."""
    return load_library(TILES.read_text() + source.read_text())


@functools.cache
def _function() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    size, address = ctypes.c_int64, ctypes.c_void_p
    library.tiled_linear.argtypes = [address, address, size, address, size, ctypes.c_int, address]
    library.tiled_linear.restype = None
    return library.tiled_linear


def usable(group: int) -> bool:
    """Whether this machine can compile it, for groups of so many inputs. Compiles at the first call."""
    return group <= MOST_INPUTS and _function() is not None


class _WithoutGradient(torch.autograd.Function):
    """An error where a gradient is asked for, as torch's operator gives: a result without a past would be a gradient of
    zero, without a word."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: TiledWeight) -> Tensor:
        return _multiply(x_TK, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UserError("8-bit activations have no gradient: train without them, on the packed or unpacked model")


def tiled_linear(x_TK: Tensor, weight: TiledWeight) -> Tensor:
    """fp32 [T, in] -> [T, out]."""
    if torch.is_grad_enabled() and x_TK.requires_grad:
        return _WithoutGradient.apply(x_TK, weight)  # type: ignore[no-any-return]
    return _multiply(x_TK, weight)


def _multiply(x_TK: Tensor, weight: TiledWeight) -> Tensor:
    assert x_TK.dtype == torch.float32 and x_TK.device.type == "cpu" and x_TK.shape[1] == weight.width
    x_TK = x_TK.contiguous()
    y_TN = x_TK.new_empty(len(x_TK), weight.outputs)
    if len(x_TK):
        of_x, of_y = x_TK.data_ptr(), y_TN.data_ptr()
        matrix, threads, pool = ctypes.byref(weight.matrix), torch.get_num_threads(), thread_pool()
        where = None if pool is None else ctypes.byref(pool)
        _function()(matrix, of_x, len(x_TK), of_y, weight.outputs, threads, where)
    return y_TN
