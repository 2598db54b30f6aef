"""Page-locked host memory in one piece: for many tensors, and for what passes through on its way to a device.

torch's own pinned memory is rounded up to powers of two, and is made at 2 GB/s; memory in huge pages is locked faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable, Hashable, Mapping
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


class StagingBuffers:
    """Page-locked buffers through which several threads send bytes to a device, `per_thread` for each of them.

    Small ones stay in the processor's cache on the way, and little memory has to be page-locked.
    """

    def __init__(self, num_threads: int, per_thread: int, num_bytes: int) -> None:
        self.per_thread, self.num_bytes = per_thread, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        size = num_threads * per_thread * self.num_bytes
        self._map = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self.address = -(-address // HUGE_PAGE) * HUGE_PAGE
        error = int(torch.cuda.cudart().cudaHostRegister(self.address, size, 0))
        self._locked = not error
        if error:
            log.warning("staging buffers are not page-locked (CUDA error %d): copies take longer", error)

    def close(self) -> None:
        """After the copies have ended."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self.address)


class StagingRing:
    """The buffers of one thread, used in turn, and the stream that it sends on.

    The driver is called directly: threads that call torch for every piece wait for the interpreter's lock most of the
    time. Calls that return at once keep the lock, because giving it away and getting it back takes longer than they do.
    """

    def __init__(self, buffers: StagingBuffers, thread: int, stream: torch.cuda.Stream) -> None:
        self._quick, self._slow = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        self.num_bytes, self._stream = buffers.num_bytes, stream
        first = buffers.address + thread * buffers.per_thread * buffers.num_bytes
        self._addresses = [first + i * buffers.num_bytes for i in range(buffers.per_thread)]
        self._views = [memoryview((ctypes.c_ubyte * self.num_bytes).from_address(a)).cast("B") for a in self._addresses]
        self._left = [torch.cuda.Event() for _ in self._addresses]  # what the buffer held has left it
        for event in self._left:
            event.record(stream)
        self._turn = 0

    def send(self, read: Callable[[int, memoryview], None], begin: int, end: int, target: int) -> None:
        """Bytes [begin, end) of what `read(at, buffer)` reads, to the device address `target`."""
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        for at in range(begin, end, self.num_bytes):
            turn = self._turn = (self._turn + 1) % len(self._left)
            left = ctypes.c_void_p(self._left[turn].cuda_event)
            if self._quick.cuEventQuery(left):
                _check(self._slow.cuEventSynchronize(left))
            num = min(self.num_bytes, end - at)
            read(at, self._views[turn][:num])
            to, source = ctypes.c_uint64(target + at - begin), ctypes.c_void_p(self._addresses[turn])
            _check(self._quick.cuMemcpyHtoDAsync_v2(to, source, ctypes.c_size_t(num), stream))
            _check(self._quick.cuEventRecord(left, stream))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA error {error} while memory was copied to the device")
