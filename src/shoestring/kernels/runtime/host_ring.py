"""Integers that the host and a captured program exchange without a copy of their own.

Between two replays of a CUDA graph a copy to the device and a copy from it are two more commands of the stream, each
with a wait of one engine of the GPU for another. Here both are part of the program: its first kernel reads what the
host wrote into page-locked memory, which the GPU reads in place, and its last kernel writes its results there.

The host writes the numbers of the next launch while earlier launches are still on the device, so there are SLOTS of
both. A clock on the device counts the launches and tells the program which slots are its own; the host counts along.
The host waits only where a slot is still in use: SLOTS launches later.

    numbers = ring.slot()               the host's view of the next slot
    program: ring.take_(numbers, tables_E, num_rows) ... ring.give_(chosen)
    receipt = ring.launched()           receipt.values(): the results, once the device is done

Without a GPU the same happens with torch's copies. `to_device` is for programs that are not captured: one copy for all
of their numbers, which the host does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from shoestring.kernels.runtime.triton_backend import interpreting, next_power_of_2, triton_refusal

SLOTS = 8
MOST_AT_ONCE = 4096  # integers that a program of a kernel holds


class Receipt:
    """The results of one launch."""

    def __init__(self, out_O: Tensor, event: torch.cuda.Event | None) -> None:
        self._out, self._event, self._values = out_O, event, None if event is not None else out_O.tolist()

    def values(self) -> list[int]:
        """Waits for the device."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._out.tolist()
        return self._values

    def wait(self) -> None:
        """Until the device has finished the launch."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()

    def keep(self) -> None:
        """Before the slot is used again: wait, and remember the results."""
        if self._values is None:
            self.wait()
            self._values = self._out.tolist()


class HostRing:
    def __init__(self, num_in: int, num_out: int, device: torch.device) -> None:
        self._receipts: list[Receipt | None] = [None] * SLOTS
        locked = device.type == "cuda"
        self._in_SI = torch.zeros(SLOTS, num_in, dtype=torch.int64, pin_memory=locked)
        self._out_SO = torch.zeros(SLOTS, max(1, num_out), dtype=torch.int64, pin_memory=locked)
        self._num_out = num_out
        self._clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._kernels = triton_refusal() is None if locked else interpreting()
        self._num_launched = 0

    def __del__(self) -> None:
        for receipt in self._receipts:
            if receipt is not None:
                receipt.wait()  # the device writes to this memory until then

    # -- the host -------------------------------------------------------------------------------------------
    def slot(self) -> np.ndarray:
        """What the next launch reads, to be written before it; waits until the launch that used it before is over."""
        slot = self._num_launched % SLOTS
        before, self._receipts[slot] = self._receipts[slot], None
        if before is not None:
            before.keep()
        found: np.ndarray = self._in_SI[slot].numpy()
        return found

    def launched(self) -> Receipt:
        """The program was launched."""
        slot = self._num_launched % SLOTS
        self._num_launched += 1
        event: torch.cuda.Event | None = None
        if self._clock.is_cuda:
            event = torch.cuda.Event()
            event.record()
        receipt = self._receipts[slot] = Receipt(self._out_SO[slot], event)
        return receipt

    def restart(self, numbers: np.ndarray) -> None:
        """Every slot holds these numbers, and the next launch is the first. While nothing is on the device."""
        self._in_SI.numpy()[:] = numbers
        self._clock.zero_()
        self._num_launched = 0

    # -- parts of the program -------------------------------------------------------------------------------
    def take_(self, numbers_I: Tensor, tables_E: Tensor, num_rows: int, num_steps: int = 1) -> None:
        """The first of the program: read the numbers, and note the rows' blocks in the tables. The numbers of each step
        begin with five per row; the fourth is the place of a block, the fifth the block."""
        if not self._kernels:
            numbers_I.copy_(self._in_SI[int(self._clock) % SLOTS])
            for numbers in numbers_I.view(num_steps, -1):
                at_R, block_R = numbers[3 * num_rows : 5 * num_rows].view(2, num_rows)
                tables_E.index_copy_(0, at_R, block_R.to(torch.int32))
            return
        from shoestring.kernels.runtime.host_ring_triton import _take_numbers_kernel

        num = numbers_I.numel()
        warps = 1 if num <= 128 else 4
        block = min(MOST_AT_ONCE, next_power_of_2(max(32 * warps, num)))  # no two threads read the same number
        _take_numbers_kernel[(1,)](
            self._in_SI, self._clock, numbers_I, tables_E, num, num // num_steps, num_rows, num_rows * num_steps,
            SLOTS=SLOTS, BLOCK=block, ROWS=next_power_of_2(num_rows * num_steps), num_warps=warps,
        )  # fmt: skip

    def give_(self, chosen_O: Tensor) -> None:
        """The last of the program: hand the results to the host. The clock goes on."""
        if not self._kernels:
            if self._num_out:
                self._out_SO[int(self._clock) % SLOTS].copy_(chosen_O)
            self._clock += 1
            return
        from shoestring.kernels.runtime.host_ring_triton import _give_numbers_kernel

        num, width = self._num_out, self._out_SO.shape[1]
        _give_numbers_kernel[(1,)](
            chosen_O, self._clock, self._out_SO, num, width, SLOTS=SLOTS, BLOCK=next_power_of_2(width), num_warps=1
        )


ALIGNED = 16  # bytes; a kernel is compiled again for an address that is no multiple of this


def to_device(here: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Small contiguous host tensors, sent in one copy: the copy's latency is that of thousands of numbers."""
    assert all(t.is_contiguous() for t in here)
    ends = list(accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for t in here))
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for t, end in zip(here, [0, *ends], strict=False):
        packed[end : end + t.nbytes] = t.numpy().reshape(-1).view("u1")
    sent = host.to(device, non_blocking=True)
    typed = {dtype: sent.view(dtype) for dtype in {t.dtype for t in here}}
    return [
        typed[t.dtype].as_strided(t.shape, t.stride(), end // t.itemsize)
        for t, end in zip(here, [0, *ends], strict=False)
    ]
