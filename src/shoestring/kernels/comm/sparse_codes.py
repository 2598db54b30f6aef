"""Sparse codes: the largest values of a tensor in bf16, and their places in 16 bits.

A tensor is cut into rows of MAX_ROW values and a rest; of each, a share `ratio` is kept, at least one value. A message
holds all values, then all places. Places count from the beginning of their row.

    wire, error = encode_sparse(flat_N, ratio)        error = flat - what was sent
    total_N = sum_sparse(wire_SB, num, ratio)         of the messages of S senders, added one after the other

On a CPU both are loops in C++ (cpu_codes.py), on a GPU the search is a kernel (top_magnitudes.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shoestring.kernels.comm.cpu_codes import cpu_loops, num_threads, rows_of_bytes
from shoestring.kernels.comm.top_magnitudes import MAX_ROW, top_magnitudes

OFFSET = 1 << 15  # int16 stands for uint16, which few operations of torch know
LARGEST_BF16 = torch.finfo(torch.bfloat16).max  # the largest fp32 numbers would round to infinity


def num_kept(ratio: float, num: int) -> int:
    """Of a row."""
    return min(num, max(1, math.ceil(ratio * num)))


def total_kept(ratio: float, num: int) -> int:
    """Of a tensor; a message takes four bytes for each."""
    return sum(rows * k for _, rows, _, k in _parts(num, ratio))


def encode_sparse_ref(flat_N: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    values, places = [], []
    for start, num_rows, width, k in _parts(flat_N.numel(), ratio):
        rows = flat_N[start : start + num_rows * width].view(num_rows, width)
        place = top_magnitudes(rows, k)
        values.append(rows.gather(1, place).reshape(-1))
        places.append(place.reshape(-1))
    sent = torch.cat(values).clamp(-LARGEST_BF16, LARGEST_BF16).bfloat16()
    place_K = (torch.cat(places) - OFFSET).to(torch.int16)
    wire = torch.cat([sent.view(torch.uint8), place_K.view(torch.uint8)])
    error = flat_N.clone()
    index, _ = _read(wire, flat_N.numel(), ratio)
    error[index] -= sent.float()
    return wire, error


def sum_sparse_ref(wire_SB: Tensor, num: int, ratio: float) -> Tensor:
    total = torch.zeros(num, device=wire_SB.device)
    for wire in wire_SB:
        index, values = _read(wire, num, ratio)
        total[index] += values
    return total


def encode_sparse(flat_N: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """As encode_sparse_ref."""
    loops = cpu_loops(flat_N)
    if loops is None:
        return encode_sparse_ref(flat_N, ratio)
    flat_N = flat_N.contiguous()
    num = flat_N.numel()
    sent = total_kept(ratio, num)
    wire = torch.empty(4 * sent, dtype=torch.uint8)
    error = flat_N.clone()
    done = 0
    for start, rows, width, k in _parts(num, ratio):
        loops.encode_top(
            flat_N.data_ptr() + 4 * start, wire.data_ptr() + 2 * done, wire.data_ptr() + 2 * (sent + done),
            error.data_ptr() + 4 * start, rows, width, k, num_threads(rows * width),
        )  # fmt: skip
        done += rows * k
    return wire, error


def sum_sparse(wire_SB: Tensor, num: int, ratio: float) -> Tensor:
    """As sum_sparse_ref."""
    loops = cpu_loops(wire_SB)
    if loops is None:
        return sum_sparse_ref(wire_SB, num, ratio)
    wire_SB = rows_of_bytes(wire_SB)
    total = torch.zeros(num)
    sent, done = total_kept(ratio, num), 0
    assert wire_SB.shape[1] == 4 * sent
    for start, rows, width, k in _parts(num, ratio):
        loops.add_top(
            wire_SB.data_ptr(), wire_SB.stride(0), wire_SB.shape[0], 2 * done, 2 * (sent + done),
            total.data_ptr() + 4 * start, rows, width, k, num_threads(rows * k * wire_SB.shape[0]),
        )  # fmt: skip
        done += rows * k
    return total


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
