"""Page-locked host memory in one piece: for many tensors, and for what passes through on its way to a device.

torch's own pinned memory is rounded up to powers of two, and is made at 2 GB/s; memory in huge pages is locked faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import queue
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

ALIGNED = 64  # bytes
HUGE_PAGE = 2 << 20
Key = TypeVar("Key", bound=Hashable)
log = logging.getLogger("shoestring.host")


class HostBuffers(Generic[Key]):
    """Room for tensors `like` these (meta tensors will do); page-locked where they go to or come from a GPU."""

    def __init__(self, like: Mapping[Key, Tensor], device: torch.device) -> None:
        sizes = {key: -(-t.nbytes // ALIGNED) * ALIGNED for key, t in like.items()}
        memory = np.empty(sum(sizes.values()), np.uint8)  # every tensor below keeps it alive
        if device.type == "cuda" and memory.size:
            cudart, address = torch.cuda.cudart(), memory.ctypes.data
            error = int(cudart.cudaHostRegister(address, memory.size, 0))
            if error:
                log.warning("host memory for weights is not page-locked (CUDA error %d): copies take longer", error)
            else:  # before the memory is given back; at the end of the process the driver does it
                weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
        whole = torch.from_numpy(memory)
        self.tensors: dict[Key, Tensor] = {}
        at = 0
        for key, t in like.items():
            self.tensors[key] = whole[at : at + t.nbytes].view(t.dtype).view(t.shape)
            at += sizes[key]
        self.used_by: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        return self.used_by is None or self.used_by() is None


class StagingBuffer:
    """Host memory that is filled and then copied from; page-locked by `lock`, after its pages are there."""

    def __init__(self, memory: Tensor, device: torch.device | None) -> None:
        self.bytes = memory
        self.view = memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())).cast("B")
        self.fresh, self.registered = device is not None, False
        self.left = torch.cuda.Event(blocking=True) if device is not None else None  # what it held has left it

    def lock(self) -> None:
        if self.fresh:
            self.fresh = False
            error = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))
            self.registered = not error
            if error:
                log.warning("a staging buffer is not page-locked (CUDA error %d): copies take longer", error)


class StagingBuffers:
    """A few buffers that threads take turns with, on the way from a file to a device (None: to host memory)."""

    def __init__(self, count: int, num_bytes: int, device: torch.device | None) -> None:
        self.num_bytes = num_bytes
        size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        self._map = mmap.mmap(-1, count * size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        begin = -memory.data_ptr() % HUGE_PAGE
        pieces = [memory[begin + i * size :][:num_bytes] for i in range(count)]
        self._all = [StagingBuffer(piece, device) for piece in pieces]
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        for buffer in self._all:
            self._free.put(buffer)

    @contextlib.contextmanager
    def take(self) -> Iterator[StagingBuffer]:
        """A buffer that nothing is copied from any more. Copies that are launched inside, on the current stream, are
        waited for before somebody else gets it."""
        buffer = self._free.get()
        try:
            if buffer.left is not None and not buffer.left.query():
                buffer.left.synchronize()
            yield buffer
            if buffer.left is not None:
                buffer.left.record()
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """After the copies have ended."""
        for buffer in self._all:
            if buffer.registered:
                torch.cuda.cudart().cudaHostUnregister(buffer.bytes.data_ptr())
        self._all.clear()
