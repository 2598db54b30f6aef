"""The kernels of xxh3 against the xxhash package."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import emulated
import pytest
import torch

from shoestring.host.checksums import checksum
from shoestring.kernels.checksum import xxh3
from shoestring.kernels.runtime.cpp import find_compiler

pytest.importorskip("xxhash", reason="the values are those of xxhash")


def chunk_of(num_bytes: int) -> torch.Tensor:
    """Random bytes in whole words."""
    return torch.frombuffer(bytearray(random.Random(num_bytes).randbytes(-(-num_bytes // 8) * 8)), dtype=torch.uint8)


def expected(chunk: torch.Tensor, num_bytes: int) -> str:
    return checksum(chunk.numpy()[:num_bytes].tobytes(), "xxh3")


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_xxh3_in_cuda_emulated(tmp_path: Path) -> None:
    library = emulated.library(tmp_path, "xxh3_on_cpu.h", "checksum/xxh3", macros={"HALF": 0, "THREADS": 64})
    keys = xxh3.sum_keys(torch.device("cpu"))
    for num_bytes in (xxh3.LEAST_BYTES, 1024, 1025, 1088, 2049, 18 * 1024 + 1):
        chunk, found = chunk_of(num_bytes), torch.zeros(8, dtype=torch.int64)
        scratch = torch.zeros(max(1, num_bytes // 1024) * 8, dtype=torch.int64)
        library.sum_chunk(*(ctypes.c_void_p(t.data_ptr()) for t in (chunk, keys, scratch, found)), num_bytes)
        assert xxh3.merged(found.tolist(), num_bytes) == expected(chunk, num_bytes), num_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_xxh3_on_a_gpu() -> None:
    sizes = [xxh3.LEAST_BYTES, 1024, 1025, 100_003, 64 << 20, (64 << 20) - 3]
    device = torch.device("cuda", torch.cuda.current_device())
    sums = xxh3.DeviceSums(len(sizes), max(sizes), 1, device)
    sums.load()
    chunks = [chunk_of(n) for n in sizes]
    for number, (chunk, n) in enumerate(zip(chunks, sizes, strict=True)):
        sums.add(number, chunk.to(device), n, 0)
    assert sums.digests() == dict(enumerate(expected(chunk, n) for chunk, n in zip(chunks, sizes, strict=True)))
