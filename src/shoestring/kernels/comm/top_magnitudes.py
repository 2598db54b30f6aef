"""The k largest magnitudes of each row, by a search for the threshold.

    index_RK, increasing in each row; of equal magnitudes the first ones are taken

The bits of |x| as an integer have the order of |x|. The GPU kernel counts them by their upper 11 bits, then by the next
10 within the bin that holds the k-th largest, then by the last 10: that is the exact threshold after three passes, of
which the last two find the row in the cache. A fourth pass writes the chosen indices in order. Rows are at most
MAX_ROW values, so that an index fits 16 bits and a row fits the cache. The result is unique, so it is the same on every
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import triton_usable

MAX_ROW = 1 << 16


def top_magnitudes_ref(rows_RN: Tensor, k: int) -> Tensor:
    size = rows_RN.abs()
    threshold = size.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    chosen = size > threshold
    missing = k - chosen.sum(1, keepdim=True)
    equal = size == threshold
    chosen |= equal & (equal.cumsum(1) <= missing)
    return chosen.nonzero()[:, 1].view(-1, k)


def top_magnitudes(rows_RN: Tensor, k: int) -> Tensor:
    """As top_magnitudes_ref; int64."""
    rows, num = rows_RN.shape
    assert 1 <= k <= num <= MAX_ROW
    if rows_RN.dtype != torch.float32 or rows == 0 or not triton_usable(rows_RN):
        return top_magnitudes_ref(rows_RN, k)
    from shoestring.kernels.comm.top_magnitudes_triton import _top_kernel

    index = torch.empty(rows, k, dtype=torch.int64, device=rows_RN.device)
    _top_kernel[(rows,)](rows_RN.contiguous(), index, num, k, TILE=4096, num_warps=8)
    return index
