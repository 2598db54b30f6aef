"""Sparse codes: the largest values of a tensor in bf16, and their places in 16 bits.

A tensor is cut into rows of MAX_ROW values and a rest; of each, a share `ratio` is kept, at least one value. A message
holds all values, then all places. Places count from the beginning of their row.

    wire = encode_sparse(flat_N, ratio, error_N)      error, where given, is filled with flat - what was sent; on a CPU
                                                      it may be flat itself
    total_N = sum_sparse(wire_SB, num, ratio)         of the messages of S senders, added one after the other

On a CPU both are loops in C++ (cpu_codes.py), on a GPU of compute capability 9.0 and later kernels that read and write
each value once (sparse_codes.cu). On others the search alone is a kernel (top_magnitudes.py).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shoestring.kernels.comm.cpu_codes import cpu_loops, num_threads, rows_of_bytes
from shoestring.kernels.comm.top_magnitudes import MAX_ROW, top_magnitudes
from shoestring.kernels.lowbit.lowbit_linear import chunks_usable
from shoestring.kernels.runtime.nvrtc import Kernel, compile_kernel, cuda_source
from shoestring.kernels.runtime.triton_backend import next_power_of_2

OFFSET = 1 << 15  # int16 stands for uint16, which few operations of torch know
LARGEST_BF16 = torch.finfo(torch.bfloat16).max  # the largest fp32 numbers would round to infinity


def num_kept(ratio: float, num: int) -> int:
    """Of a row."""
    return min(num, max(1, math.ceil(ratio * num)))


def total_kept(ratio: float, num: int) -> int:
    """Of a tensor; a message takes four bytes for each."""
    return sum(rows * k for _, rows, _, k in _parts(num, ratio))


def encode_sparse_ref(flat_N: Tensor, ratio: float, error_N: Tensor | None = None) -> Tensor:
    values, places = [], []
    for start, num_rows, width, k in _parts(flat_N.numel(), ratio):
        rows = flat_N[start : start + num_rows * width].view(num_rows, width)
        place = top_magnitudes(rows, k)
        values.append(rows.gather(1, place).reshape(-1))
        places.append(place.reshape(-1))
    sent = torch.cat(values).clamp(-LARGEST_BF16, LARGEST_BF16).bfloat16()
    place_K = (torch.cat(places) - OFFSET).to(torch.int16)
    wire = torch.cat([sent.view(torch.uint8), place_K.view(torch.uint8)])
    if error_N is not None:
        if error_N is not flat_N:
            error_N.copy_(flat_N)
        error_N[_read(wire, flat_N.numel(), ratio)[0]] -= sent.float()
    return wire


def sum_sparse_ref(wire_SB: Tensor, num: int, ratio: float) -> Tensor:
    total = torch.zeros(num, device=wire_SB.device)
    for wire in wire_SB:
        index, values = _read(wire, num, ratio)
        total[index] += values
    return total


def encode_sparse(flat_N: Tensor, ratio: float, error_N: Tensor | None = None) -> Tensor:
    """As encode_sparse_ref."""
    loops, on_gpu = cpu_loops(flat_N), chunks_usable(flat_N) and flat_N.dtype == torch.float32
    if loops is None and not on_gpu:
        return encode_sparse_ref(flat_N, ratio, error_N)
    flat_N = flat_N.contiguous()
    if on_gpu and flat_N.data_ptr() % 16:  # it is read in pieces of 16 bytes
        flat_N = flat_N.clone()
    assert error_N is None or (error_N.is_contiguous() and not (on_gpu and error_N.data_ptr() % 16))
    num = flat_N.numel()
    sent, done = total_kept(ratio, num), 0
    wire = torch.empty(4 * sent, dtype=torch.uint8, device=flat_N.device)
    for start, rows, width, k in _parts(num, ratio):
        x, values, places = (
            flat_N.data_ptr() + 4 * start,
            wire.data_ptr() + 2 * done,
            wire.data_ptr() + 2 * (sent + done),
        )
        error = 0 if error_N is None else error_N.data_ptr() + 4 * start
        if loops is not None:
            loops.encode_top(x, values, places, error, rows, width, k, num_threads(rows * width))
        else:
            room = candidates(k)
            pointers = [ctypes.c_void_p(p) for p in (x, values, places, error)]
            sizes = [ctypes.c_int(n) for n in (width, k, sample_rank(k, width))]
            kernel = _kernel(flat_N.device.index, "encode_top", room)
            kernel.launch((rows, 1, 1), THREADS, shared_bytes(room), [*pointers, *sizes], dependent=False)
        done += rows * k
    return wire


def sum_sparse(wire_SB: Tensor, num: int, ratio: float) -> Tensor:
    """As sum_sparse_ref."""
    loops, on_gpu = cpu_loops(wire_SB), chunks_usable(wire_SB)
    if loops is None and not on_gpu:
        return sum_sparse_ref(wire_SB, num, ratio)
    wire_SB = rows_of_bytes(wire_SB)
    if on_gpu and (wire_SB.data_ptr() % 2 or wire_SB.stride(0) % 2):
        wire_SB = wire_SB.clone(memory_format=torch.contiguous_format)
    total = torch.empty(num, device=wire_SB.device)
    sent, done = total_kept(ratio, num), 0
    assert wire_SB.shape[1] == 4 * sent
    senders, stride = wire_SB.shape[0], wire_SB.stride(0)
    for start, rows, width, k in _parts(num, ratio):
        wire, values_at, places_at, out = wire_SB.data_ptr(), 2 * done, 2 * (sent + done), total.data_ptr() + 4 * start
        if loops is not None:
            threads = num_threads(rows * width)
            loops.sum_top(wire, stride, senders, values_at, places_at, out, rows, width, k, threads)
        else:
            where = [ctypes.c_void_p(wire), ctypes.c_int64(stride), ctypes.c_int(senders)]
            where += [ctypes.c_int64(values_at), ctypes.c_int64(places_at), ctypes.c_void_p(out)]
            kernel = _kernel(wire_SB.device.index, "sum_top", candidates(k))
            sizes = [ctypes.c_int(width), ctypes.c_int(k)]
            kernel.launch((rows, 1, 1), THREADS, 0, [*where, *sizes], dependent=False)
        done += rows * k
    return total


# -- on a GPU ------------------------------------------------------------------------------------------------

THREADS, BLOCKS, SAMPLE = 512, 3, 8192


def candidates(k: int) -> int:
    """Values of a row that are looked at closely: the bound lets more than k pass."""
    return min(1 << 14, next_power_of_2(3 * k + 1024))


def sample_rank(k: int, num: int) -> int:
    """The rank in the sample of a value that at least k of the row reach, but for one row in some ten thousand."""
    expected = k * SAMPLE / num
    return math.ceil(expected + 4 * math.sqrt(expected) + 8)


def shared_bytes(room: int) -> int:
    """As the struct of the source."""
    return 4 * (2048 + 2048 + room) + 2 * room + 4 * (THREADS // 32) + 12


@functools.cache
def _kernel(device: int | None, name: str, room: int) -> Kernel:
    macros = {"HALF": 0, "THREADS": THREADS, "BLOCKS": BLOCKS, "ROOM": room, "SAMPLE": SAMPLE}
    return compile_kernel(cuda_source("comm/sparse_codes"), name, macros, device)


# -- rows ----------------------------------------------------------------------------------------------------


def _parts(num: int, ratio: float) -> Iterator[tuple[int, int, int, int]]:
    """(first value, rows, values of a row, values that are kept of it): the whole rows, and the rest as one row."""
    full, rest = divmod(num, MAX_ROW)
    if full:
        yield 0, full, MAX_ROW, num_kept(ratio, MAX_ROW)
    if rest:
        yield full * MAX_ROW, 1, rest, num_kept(ratio, rest)


def _read(wire: Tensor, num: int, ratio: float) -> tuple[Tensor, Tensor]:
    """(where, what): no place twice."""
    half = wire.numel() // 2
    parts = wire.clone(memory_format=torch.contiguous_format)  # a part of a message need not lie on a multiple of two
    values, index = parts[:half].view(torch.bfloat16).float(), parts[half:].view(torch.int16).long() + OFFSET
    full, k_full = num // MAX_ROW, num_kept(ratio, MAX_ROW)
    index[: full * k_full] += torch.arange(full, device=wire.device).repeat_interleave(k_full) * MAX_ROW
    index[full * k_full :] += full * MAX_ROW
    return index, values
