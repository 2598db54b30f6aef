"""xxh3 of chunks in device memory: a copy is verified where it has arrived, at the speed of that memory.

The host's memory is then read once on the way to the device, not twice. The values are those of the xxhash package
(host/checksums.py). The kernels are CUDA C++ (xxh3.cu).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from shoestring.kernels.runtime.nvrtc import Kernel, compile_kernel, cuda_source, pointer

LEAST_BYTES = 241  # of a chunk; xxh3 sums shorter inputs in another way
MOST_BYTES = 1 << 30  # the kernels count in 32 bits
THREADS = 256
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_FIRST = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_MASK = (1 << 64) - 1


def sum_kernels(device: int) -> tuple[Kernel, Kernel]:
    """Compiled, or from the disk; UserError where they cannot be had."""
    source, macros = cuda_source("checksum/xxh3"), {"HALF": 0, "THREADS": THREADS}
    return compile_kernel(source, "block_sums", macros, device), compile_kernel(source, "accumulate", macros, device)


def sum_keys(device: torch.device) -> Tensor:
    """What the kernels know besides the data."""
    words = [*struct.unpack("<24Q", _SECRET), *struct.unpack_from("<8Q", _SECRET, 121), *_FIRST]
    return torch.frombuffer(bytearray(struct.pack("<40Q", *words)), dtype=torch.int64).to(device)


class DeviceSums:
    """Checksums of chunks on a GPU. `load` the kernels, `add` every chunk, in any order and on any stream; `digests`
    when the streams are synchronized."""

    def __init__(self, num_chunks: int, chunk_bytes: int, num_lanes: int, device: torch.device) -> None:
        """In each lane one chunk is summed at a time."""
        self._keys = sum_keys(device)
        self._accumulators = torch.zeros((num_chunks, 8), dtype=torch.int64, device=device)
        self._block_sums = torch.empty((num_lanes, max(1, chunk_bytes // 1024) * 8), dtype=torch.int64, device=device)
        self._num_bytes: dict[int, int] = {}
        self._kernels: tuple[Kernel, Kernel] | None = None

    def load(self) -> None:
        """From the disk, where they were compiled before; UserError where there is no compiler."""
        assert self._keys.device.index is not None
        self._kernels = sum_kernels(self._keys.device.index)

    def can_add(self, num_bytes: int) -> bool:
        return self._kernels is not None and LEAST_BYTES <= num_bytes <= MOST_BYTES

    def add(self, number: int, chunk: Tensor, num_bytes: int, lane: int) -> None:
        """Sum the first bytes of `chunk`, on the current stream."""
        assert self._kernels is not None and self.can_add(num_bytes)
        self._num_bytes[number] = num_bytes
        add_blocks, accumulate = self._kernels
        num_blocks = (num_bytes - 1) // 1024
        args: list[Any] = [pointer(chunk), pointer(self._keys), pointer(self._block_sums[lane])]
        if num_blocks:
            grid = (-(-num_blocks * 8 // THREADS), 1, 1)
            add_blocks.launch(grid, THREADS, 0, [*args, ctypes.c_int(num_blocks)], dependent=False)
        args += [pointer(self._accumulators[number]), ctypes.c_int(num_bytes)]
        accumulate.launch((1, 1, 1), 32, 0, args, dependent=False)

    def digests(self) -> dict[int, str]:
        """Of every chunk that was added."""
        rows = self._accumulators.cpu().tolist()
        return {number: merged(rows[number], num_bytes) for number, num_bytes in self._num_bytes.items()}


def merged(accumulators: list[int], num_bytes: int) -> str:
    """The checksum: XXH3_mergeAccs and its avalanche."""
    total = num_bytes * _PRIME64[0]
    for i in range(0, 8, 2):
        a, b = struct.unpack_from("<2Q", _SECRET, 11 + 8 * i)
        product = ((accumulators[i] & _MASK) ^ a) * ((accumulators[i + 1] & _MASK) ^ b)
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total ^= total >> 37
    total = total * 0x165667919E3779F9 & _MASK
    return f"{total ^ (total >> 32):016x}"
