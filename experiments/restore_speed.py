"""Which way from a tmpfs file to the GPU is the fastest, every chunk verified: parts and variants, one table."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shoestring.host.arena import Arena
from shoestring.host.checksums import RunningSum, checksums
from shoestring.state.boxes import Box
from shoestring.state.levels import restore
from shoestring.state.levels.restore import ChunkReader, FillPiece
from shoestring.state.levels.snapshot import lay_out
from shoestring.state.levels.version import HeldBox, HeldCopy

MIB = 1 << 20


def state(num_bytes: int) -> list[tuple[int, ...]]:
    shapes = []
    total = 0
    while total < num_bytes:
        for shape in ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,), (), ()):
            shapes.append(shape)
            total += 4 * max(1, torch.Size(shape).numel())
    return shapes


class Buffers:
    def __init__(self, count: int, size: int, gpu: bool, huge: bool) -> None:
        self.size = -(-size // (2 * MIB)) * 2 * MIB
        self.map = mmap.mmap(-1, count * self.size + 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self.map, dtype=torch.uint8)
        skip = -whole.data_ptr() % (2 * MIB)
        self.tensors = [whole[skip + i * self.size :][:size] for i in range(count)]
        self.views = [memoryview((ctypes.c_ubyte * size).from_address(t.data_ptr())).cast("B") for t in self.tensors]
        self.gpu = gpu
        self.registered: list[int] = []
        self.events = [torch.cuda.Event(blocking=True) if gpu else None for _ in range(count)]
        self.register_s = 0.0

    def pin(self, i: int) -> None:
        if self.gpu and self.tensors[i].data_ptr() not in self.registered:
            began = time.perf_counter()
            p = self.tensors[i].data_ptr()
            e = torch.cuda.cudart().cudaHostRegister(p, self.size, 0)
            assert int(e) == 0, e
            self.registered.append(p)
            self.register_s += time.perf_counter() - began

    def close(self) -> None:
        for p in self.registered:
            torch.cuda.cudart().cudaHostUnregister(p)


def fill(copy, read, pieces, device, *, threads, piece, extra, sub=0, huge=True, hashing=True, sending=True, pin_first=False):
    size = copy.chunk_bytes
    gpu = device.type == "cuda"
    flats = []
    by_chunk: dict[int, list] = {}
    for p in pieces:
        flat = p.target.reshape(-1).view(torch.uint8)
        a, b = p.held.offset, p.held.offset + p.held.num_bytes
        for c in range(a // size, (b - 1) // size + 1):
            by_chunk.setdefault(c, []).append((a, b, flat))
    chunks = iter(sorted(by_chunk))
    began = time.perf_counter()
    buffers = Buffers(threads + extra, piece, gpu, huge)
    if pin_first:
        for i in range(threads + extra):
            buffers.tensors[i].zero_()
            buffers.pin(i)
    pinned_s = time.perf_counter() - began
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(threads + extra):
        free.put(i)
    bad = []

    def work() -> None:
        stream = torch.cuda.Stream(device) if gpu else None
        with torch.cuda.stream(stream), torch.no_grad():
            for c in chunks:
                begin, end = c * size, min((c + 1) * size, copy.num_bytes)
                total = RunningSum(copy.algorithm)
                for at in range(begin, end, piece):
                    i = free.get()
                    stop = min(at + piece, end)
                    event = buffers.events[i]
                    if event is not None and not event.query():
                        event.synchronize()
                    view = buffers.views[i]
                    step = sub or piece
                    for s in range(at, stop, step):
                        part = view[s - at : min(s + step, stop) - at]
                        read(s, part)
                        if hashing:
                            total.add(part)
                    if sending:
                        buffers.pin(i)
                        t = buffers.tensors[i]
                        for a, b, flat in by_chunk[c]:
                            lo, hi = max(a, at), min(b, stop)
                            if lo < hi:
                                flat[lo - a : hi - a].copy_(t[lo - at : hi - at], non_blocking=True)
                        if event is not None:
                            event.record()
                    free.put(i)
                if hashing and total.digest() != copy.chunks[c]:
                    bad.append(c)
            if stream is not None:
                stream.synchronize()

    with ThreadPoolExecutor(threads) as pool:
        for f in [pool.submit(work) for _ in range(threads)]:
            f.result()
    assert not bad, bad
    took = time.perf_counter() - began
    buffers.close()
    return took, pinned_s, buffers.register_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=12.0)
    parser.add_argument("--most-seconds", type=float, default=75.0)
    options = parser.parse_args()
    start = time.monotonic()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    for name in ("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"):
        if Path(name).exists():
            print(name, Path(name).read_text().strip())
    print(os.cpu_count(), os.uname().release, sys.version.split()[0], flush=True)
    shapes = state(int(options.gib * 2**30))
    boxes = lay_out([HeldBox(f"t{i}", "F32", s, Box.full(s)) for i, s in enumerate(shapes)])
    copy = HeldCopy(1, "0a", 0, 1, "h", "", boxes)
    path = Path("/dev/shm") / f"restore-speed-{os.getpid()}.arena"
    arena = Arena.create(path, 1 << 20, copy.num_bytes)
    try:
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            t = time.perf_counter()
            arena.touch(0, pool)
            print(f"touch {time.perf_counter() - t:.2f} s", flush=True)
            view = arena.slot_view(0)[: copy.num_bytes]
            whole = torch.frombuffer(view, dtype=torch.uint8)
            t = time.perf_counter()

            def pattern(at: int) -> None:
                some = whole[at : at + 64 * MIB].view(torch.int32)
                some.copy_(torch.arange(at, at + some.numel(), dtype=torch.int32))

            list(pool.map(pattern, range(0, copy.num_bytes // 4 * 4, 64 * MIB)))
            t2 = time.perf_counter()
            sums = checksums(view, pool, copy.chunk_bytes, arena.algorithm)
            print(f"pattern {t2 - t:.2f} s, sums {time.perf_counter() - t2:.2f} s {copy.num_bytes / (time.perf_counter() - t2) / 1e9:.1f} GB/s", flush=True)
            del whole
            view.release()
        copy = replace(copy, chunks=tuple(sums), algorithm=arena.algorithm)
        targets = [torch.zeros(s, device=device) for s in shapes]
        pieces = [FillPiece(b, b.box, t, b.box) for b, t in zip(boxes, targets, strict=True)]
        read = partial(arena.read_into, 0)
        gb = copy.num_bytes / 1e9

        def show(name: str, result) -> None:
            took, pinned, register = result if isinstance(result, tuple) else (result, 0, 0)
            print(f"{name:60s} {gb / took:6.1f} GB/s  {took:.3f} s  pin first {pinned:.3f}  register {register:.3f}", flush=True)

        def check() -> None:
            for n in (0, 4, len(targets) // 2, len(targets) - 5):
                b = boxes[n]
                v = arena.slot_view(0)
                there = torch.frombuffer(v[b.offset : b.offset + b.num_bytes], dtype=torch.uint8)
                assert torch.equal(targets[n].reshape(-1).view(torch.uint8).cpu(), there), n
                del there
                v.release()

        def current(bytes_: int) -> float:
            restore.STAGING_BYTES = bytes_
            t = time.perf_counter()
            v = arena.slot_view(0)
            assert ChunkReader(copy, read, v).fill(pieces) == 0
            v.release()
            return time.perf_counter() - t

        many = min(12, max(1, (os.cpu_count() or 1) * 3 // 4))
        run = partial(fill, copy, read, pieces, device)
        if gpu:
            torch.zeros(1, device=device)
            fixed = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
            room = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
            torch.cuda.synchronize()
            t = time.perf_counter()
            for _ in range(32):
                room.copy_(fixed, non_blocking=True)
            torch.cuda.synchronize()
            print(f"PCIe {32 * 64 * MIB / (time.perf_counter() - t) / 1e9:.1f} GB/s")
        show("current, 8 MiB", current(8 * MIB))
        for t_, p, e, s, h in (
            (many, 16, 4, 0, True),
            (many, 32, 4, 0, True),
            (many, 16, 4, 0, False),
            (many, 8, 6, 0, True),
            (many, 16, 4, 2, True),
            (many, 16, 12, 0, True),
            (many, 64, 2, 4, True),
            (many + 3, 16, 4, 0, True),
            (8, 16, 4, 0, True),
        ):
            if time.monotonic() - start > options.most_seconds:
                break
            show(f"readers send: {t_} threads, {p} MiB +{e}, sub {s}, huge {h}", run(threads=t_, piece=p * MIB, extra=e, sub=s * MIB, huge=h))
            check()
            for t in targets[:5]:
                t.zero_()
        show("  parts: no hash", run(threads=many, piece=16 * MIB, extra=4, hashing=False))
        show("  parts: no send", run(threads=many, piece=16 * MIB, extra=4, sending=False))
        show("  parts: read only", run(threads=many, piece=16 * MIB, extra=4, sending=False, hashing=False))
        show("  parts: read only, 2 MiB", run(threads=many, piece=2 * MIB, extra=4, sending=False, hashing=False))
        show("  parts: no send, 2 MiB", run(threads=many, piece=2 * MIB, extra=4, sending=False))
        show("  pin first, huge", run(threads=many, piece=16 * MIB, extra=4, pin_first=True))
        show("  pin first, small", run(threads=many, piece=16 * MIB, extra=4, pin_first=True, huge=False))
        show("again: 16 MiB", run(threads=many, piece=16 * MIB, extra=4))
        show("current, 16 MiB", current(16 * MIB))
        show("current, 32 MiB", current(32 * MIB))
        if gpu and time.monotonic() - start < options.most_seconds + 20:
            libc = ctypes.CDLL(None, use_errno=True)
            for count, size in ((1, 256), (4, 256), (8, 64)):
                fresh = mmap.mmap(arena._fd, arena.slot_begin(1))
                address = torch.frombuffer(fresh, dtype=torch.uint8).data_ptr()
                done: list[int] = []
                def register(at: int) -> None:
                    length = min(size * MIB, 4096 * MIB - at)
                    place = address + arena.slot_begin(0) + at
                    libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(length), 22)
                    assert int(torch.cuda.cudart().cudaHostRegister(place, length, 0)) == 0
                    done.append(place)
                t = time.perf_counter()
                with ThreadPoolExecutor(count) as pool:
                    list(pool.map(register, range(0, 4096 * MIB, size * MIB)))
                took = time.perf_counter() - t
                print(f"register the map, {count} threads, {size} MiB: {4.295 / took:.1f} GB/s", flush=True)
                for place in done:
                    torch.cuda.cudart().cudaHostUnregister(place)
    finally:
        path.unlink()


if __name__ == "__main__":
    main()
