"""The k largest magnitudes of each row, by a search for the threshold.

    index_RK, increasing in each row; of equal magnitudes the first ones are taken

The bits of |x| as an integer have the order of |x|. A GPU program takes a row. A sample of it gives a bound that a few
more than k values reach; one pass over the row keeps these, and the exact threshold is found among them by bisection.
Where the bound keeps fewer than k or too many, the bisection reads the whole row, from the cache. Rows are at most
MAX_ROW values, so that an index fits 16 bits and a row fits the cache. The result is unique, so it is the same on every
device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoestring.kernels.comm.cpu_codes import cpu_loops, num_threads
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable

MAX_ROW = 1 << 16
SAMPLE = 8192  # values of a row
SPARE_ROOM, LARGEST_ROOM = 1024, 1 << 14  # values that are kept beside 2 k, and at most


def top_magnitudes_ref(rows_RN: Tensor, k: int) -> Tensor:
    size = rows_RN.abs()
    threshold = size.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    chosen = size >= threshold
    if bool((chosen.sum(1) == k).all()):  # no value is as large as the last one
        return chosen.nonzero()[:, 1].view(-1, k)
    chosen = size > threshold
    missing = k - chosen.sum(1, keepdim=True)
    equal = size == threshold
    chosen |= equal & (equal.cumsum(1) <= missing)
    return chosen.nonzero()[:, 1].view(-1, k)


def top_magnitudes(rows_RN: Tensor, k: int) -> Tensor:
    """As top_magnitudes_ref; int64."""
    rows, num = rows_RN.shape
    assert 1 <= k <= num <= MAX_ROW
    if (loops := cpu_loops(rows_RN)) is not None:
        rows_RN = rows_RN.contiguous()
        index = torch.empty(rows, k, dtype=torch.int64)
        loops.top_magnitudes(rows_RN.data_ptr(), index.data_ptr(), rows, num, k, num_threads(rows * num))
        return index
    if rows_RN.dtype != torch.float32 or rows == 0 or not triton_usable(rows_RN):
        return top_magnitudes_ref(rows_RN, k)
    from shoestring.kernels.comm.top_magnitudes_triton import _top_kernel

    index = torch.empty(rows, k, dtype=torch.int64, device=rows_RN.device)
    room = min(LARGEST_ROOM, next_power_of_2(2 * k + SPARE_ROOM))
    kept = torch.empty(2, rows, room, dtype=torch.int32, device=rows_RN.device)
    _top_kernel[(rows,)](
        rows_RN.contiguous(), index, kept[0], kept[1], num, k, sample_rank(k, num),
        SAMPLE=SAMPLE, TILE=4096, ROOM=room, num_warps=8,
    )  # fmt: skip
    return index


def sample_rank(k: int, num: int) -> int:
    """The rank in the sample of a value that at least k of the row reach, but for one row in some ten thousand."""
    expected = k * SAMPLE / num
    return math.ceil(expected + 4 * math.sqrt(expected) + 8)
