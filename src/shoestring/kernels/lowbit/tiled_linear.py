"""Integer weights times activations that are rounded to 8 bits on the way: our own C++, for CPUs.

    y = x W^T,  W[n, k] = (q[n, k] - z[n, g]) * s[n, g]  or  q[n, k] * s[n, g] + m[n, g],  g the group of k
    x' = x rounded, block by block, to 255 levels between plus and minus the largest magnitude of a block
    a block is 64 inputs, or 32 where 64 does not divide a group

For processors where torch has a portable loop only (all but Arm; w4a8.py): AVX-512 VNNI, AVX2, Arm's dot products or
a loop, as the machine's own compiler builds it (runtime/cpp.py). Codes of 2 and 3 bits are held as 4. Scales, zero
points and offsets are used as they are stored. The decode step of a whole model (serve/engine/cpu_decode.cpp) reads
the same tiles and shares tiles.h.

This is not x W^T, so it is opt-in: `error_bound`. `rounded` is the reference of x'. Left out: gradients.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.lowbit.chunk_layout import ceil_div
from shoestring.kernels.runtime import cpp
from shoestring.kernels.runtime.openmp import thread_pool
from shoestring.kernels.runtime.operator import registered

TILES = Path(__file__).with_name("tiles.h")
SOURCE = Path(__file__).with_name("tiled_linear.cpp")
ROWS = 8  # of a tile


class CMatrix(ctypes.Structure):
    """`Matrix` of tiles.h."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("rows", "width", "group", "bits")),
        *((n, ctypes.c_void_p) for n in ("codes", "scale", "zero", "offset", "bias")),
    ]


@dataclass(frozen=True)
class TiledWeight:
    """A weight [out, in] in tiles of 8 rows, as tiles.h reads it; rows of zeros fill the last tile."""

    bits: int
    outputs: int
    codes: Tensor  # uint8 [tiles, pieces, 4 quads, 8 rows, 4]
    scale: Tensor  # fp32 [tiles, groups, 8]
    shift: Tensor  # [tiles, groups, 8], zero points z in uint8 or offsets m in fp32

    def matrix(self, bias: Tensor | None = None) -> CMatrix:
        """Points into the tensors, and into `bias` (fp32 [rows]): they must outlive it."""
        return _matrix(self.codes, self.scale, self.shift, self.bits, bias)


def _matrix(codes: Tensor, scale: Tensor, shift: Tensor, bits: int, bias: Tensor | None = None) -> CMatrix:
    width = codes.shape[1] * _run(bits)
    zero, offset = (shift, None) if shift.dtype == torch.uint8 else (None, shift)
    pointers = map(pointer, (codes, scale, zero, offset, bias))
    return CMatrix(len(codes) * ROWS, width, width // scale.shape[1], bits, *pointers)


def _run(bits: int) -> int:
    """Inputs of a piece."""
    return 16 if bits == 8 else 32


def tile_weight(codes_NB: Tensor, scale_NG: Tensor, shift_NG: Tensor, bits: int) -> TiledWeight:
    """Of the stored parts: codes of `bits` bits (packing.py), scales, zero points (uint8) or offsets [out, groups]."""
    outputs, held = len(codes_NB), held_bits(bits)
    rows, width = ceil_div(outputs, ROWS) * ROWS, codes_NB.shape[1] * 8 // bits
    codes = torch.empty(rows // ROWS, width // _run(held), 4, ROWS, 4, dtype=torch.uint8)
    library, stored, threads = _library(), codes_NB.contiguous(), torch.get_num_threads()
    assert library is not None  # see `usable`
    library.tile_codes(stored.data_ptr(), outputs, width, bits, codes.data_ptr(), threads, _pool())
    shift_NG = shift_NG if shift_NG.dtype == torch.uint8 else shift_NG.float()
    padded = (F.pad(t, (0, 0, 0, rows - outputs)) for t in (scale_NG.float(), shift_NG))
    return TiledWeight(held, outputs, codes, *(t.unflatten(0, (-1, ROWS)).mT.contiguous() for t in padded))


def tile_codes_ref(codes_NK: Tensor, bits: int) -> Tensor:
    """Codes (one per byte, of a multiple of 8 rows) in tiles: inputs in runs of 16, four quads of a piece; at 4 bits
    two runs share its bytes."""
    runs = codes_NK.view(-1, ROWS, codes_NK.shape[1] // 16, 4, 4).permute(0, 2, 3, 1, 4)
    return (runs if bits == 8 else runs[:, ::2] | runs[:, 1::2] << 4).contiguous()


def levels_of(x_TK: Tensor, group: int) -> Tensor:
    """The distance between two levels of x', [T, in], for a weight with groups of so many inputs."""
    block = 32 if group % 64 else 64
    return (x_TK.unflatten(-1, (-1, block)).abs().amax(-1) / 127).repeat_interleave(block, -1)


def rounded(x_TK: Tensor, group: int) -> Tensor:
    """x' in plain torch."""
    step = levels_of(x_TK, group).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.round(x_TK / step) * step


def error_bound(x_TK: Tensor, w_NK: Tensor, group: int) -> Tensor:
    """How far x' W^T may be from x W^T, [T, out]: half a level for every weight."""
    return levels_of(x_TK, group) / 2 @ w_NK.abs().t()


def decode_tiles(weight: TiledWeight, index: Tensor | None = None) -> Tensor:
    """fp32 [out, in], or the rows `index` of it."""
    matrix, num = weight.matrix(), weight.outputs if index is None else len(index)
    rows = None if index is None else index.long().contiguous()
    w_RK = torch.empty(num, matrix.width)
    to, threads = w_RK.data_ptr(), torch.get_num_threads()
    if not _library().decode_tiles(ctypes.byref(matrix), pointer(rows), num, to, threads, _pool()):
        raise IndexError(f"rows {index} of a weight with {weight.outputs}")
    return w_RK


def untile(weight: TiledWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (one per byte) [out, in], scales and zero points or offsets [out, groups]."""
    codes = weight.codes.permute(0, 3, 1, 2, 4).flatten(3)  # [tiles, 8 rows, pieces, 16]
    if weight.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 3)
    found = codes.flatten(2), weight.scale.mT, weight.shift.mT
    return tuple(t.flatten(0, 1)[: weight.outputs] for t in found)  # type: ignore[return-value]


def held_bits(bits: int) -> int:
    """In how many bits tiles hold codes of so many."""
    return 8 if bits == 8 else 4


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def begin_compiling(*others: Path) -> bool:
    """This product and other sources that follow tiles.h (`cpp.begin_compiling`)."""
    return cpp.begin_compiling(*map(_with_tiles, (SOURCE, *others)))


def compiled(source: Path) -> ctypes.CDLL | None:
    """A source that follows tiles.h; None where there is no compiler."""
    return cpp.load_library(_with_tiles(source))


def _with_tiles(source: Path) -> str:
    return TILES.read_text() + source.read_text()


@functools.cache
def _library() -> Any:
    library = compiled(SOURCE)
    if library is None:
        return None
    size, address = ctypes.c_int64, ctypes.c_void_p
    library.tiled_linear.argtypes = [address, address, size, address, size, ctypes.c_int, address]
    library.tile_codes.argtypes = [address, *[size] * 3, address, ctypes.c_int, address]
    library.decode_tiles.argtypes = [address, address, size, address, ctypes.c_int, address]
    library.tiled_linear.restype = library.tile_codes.restype = None
    library.decode_tiles.restype = ctypes.c_bool
    return library


def _pool() -> Any:
    pool = thread_pool()
    return None if pool is None else ctypes.byref(pool)


def usable() -> bool:
    """Whether this machine can compile it. Compiles at the first call."""
    return _library() is not None


def tiled_linear(x_TK: Tensor, weight: TiledWeight) -> Tensor:
    """fp32 [T, in] -> [T, out]."""
    tensors = weight.codes, weight.scale, weight.shift
    return _tiled_linear(x_TK, *tensors, weight.bits, weight.outputs)


@registered("tiled_linear", lambda x_TK, codes, scale, shift, bits, outputs: x_TK.new_empty(len(x_TK), outputs))
def _tiled_linear(x_TK: Tensor, codes: Tensor, scale: Tensor, shift: Tensor, bits: int, outputs: int) -> Tensor:
    matrix = _matrix(codes, scale, shift, bits)
    assert x_TK.dtype == torch.float32 and x_TK.device.type == "cpu" and x_TK.shape[1] == matrix.width
    x_TK = x_TK.contiguous()
    y_TN = x_TK.new_empty(len(x_TK), outputs)
    if len(x_TK):
        of_x, of_y, threads = x_TK.data_ptr(), y_TN.data_ptr(), torch.get_num_threads()
        _library().tiled_linear(ctypes.byref(matrix), of_x, len(x_TK), of_y, outputs, threads, _pool())
    return y_TN


def _refuse_gradient(*unused: Any) -> Any:
    raise UserError("8-bit activations have no gradient: train without them, on the packed or unpacked model")


torch.library.register_autograd("shoestring::tiled_linear", _refuse_gradient)
