"""The codes of block_codes.py and sparse_codes.py on a CPU, in C++ (cpu_codes.cpp) with the bits of their references.

    loops = cpu_loops(tensor)     # None: not on the CPU, not fp32, or there is no compiler; then torch computes

torch takes a dozen calls for a code, each of which reads and writes the whole tensor. Tensors of a million values and
more are cut over torch's number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shoestring.kernels.runtime.cpp import load_library
from shoestring.kernels.runtime.triton_backend import interpreting

SOURCE = Path(__file__).with_name("cpu_codes.cpp")
MAX_BLOCK = 1024  # as in the source
PER_THREAD = 1 << 19  # values that are worth another thread

_P, _N = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "encode_blocks": [_P, _P, _P, *[_N] * 5],
    "decode_blocks": [_P, _N, _P, *[_N] * 5],
    "sum_blocks": [_P, _N, _P, _N, _P, *[_N] * 5],
    "add_moments": [_P, _P, _P, _P, _N],
    "top_magnitudes": [_P, _P, *[_N] * 4],
    "encode_top": [_P, _P, _P, _P, *[_N] * 4],
    "sum_top": [_P, *[_N] * 4, _P, *[_N] * 4],
}


def cpu_loops(t: Tensor) -> ctypes.CDLL | None:
    """`t`: values in fp32, or a message."""
    if interpreting():  # Triton's kernels are being tested
        return None
    if t.device.type != "cpu" or t.dtype not in (torch.float32, torch.uint8) or t.numel() == 0:
        return None
    return _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(SOURCE.read_text())
    if library is not None:
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
    return library


def add_moments(residuals: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Add each gradient to its residual, in place; [tensors, 3]: squared norms of both then, and their product.

    On a CPU in one pass over the memory, which is what takes the time; on other devices by torch."""
    loops = cpu_loops(residuals[0])
    pairs = [*residuals, *gradients]
    if loops is None or not all(t.dtype == torch.float32 and t.is_contiguous() for t in pairs):
        torch._foreach_add_(list(residuals), list(gradients))
        values = [g.float() for g in gradients]
        squares = [torch.stack(torch._foreach_norm(list(tensors))).square() for tensors in (values, residuals)]
        products = [torch.dot(g.flatten(), e.flatten()) for g, e in zip(values, residuals, strict=True)]
        return torch.stack([*squares, torch.stack(products)], dim=1)
    num, out = len(residuals), torch.empty(len(residuals), 3)
    places = [(_P * num)(*[t.data_ptr() for t in tensors]) for tensors in (residuals, gradients)]
    loops.add_moments(*places, (_N * num)(*[t.numel() for t in gradients]), out.data_ptr(), num)
    return out


def num_threads(num_values: int) -> int:
    return max(1, min(torch.get_num_threads(), num_values // PER_THREAD))


def rows_of_bytes(wire_RB: Tensor) -> Tensor:
    """Rows whose bytes lie one behind the other; the rows themselves may be parts of longer ones."""
    return wire_RB if wire_RB.stride(1) == 1 else wire_RB.contiguous()
