"""ChunkReader: a copy in memory goes into tensors, and every chunk of it is verified on the way.

To a GPU, several threads take a chunk each and read it, piece by piece, into page-locked buffers, which are sent to a
chunk in device memory. There it is summed (kernels/checksum) and copied on to its tensors: a byte passes through the
host's memory once. As long as the kernels are not loaded, and where they cannot be, the threads sum the mapped chunk.

Left out: which boxes are read from which copy, and what happens when one is damaged (restore.py).
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.host.checksums import checksum
from shoestring.host.page_locked import StagingBuffers, StagingRing
from shoestring.kernels.checksum.xxh3 import DeviceSums
from shoestring.state.boxes import Box
from shoestring.state.files import DTYPES
from shoestring.state.levels.version import HeldBox, HeldCopy

THREADS = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
BUFFERS = 2  # of a thread: one is filled while the other leaves
BUFFER_BYTES = 4 << 20  # with more, buffers leave the cache; with less, threads wait for the interpreter's lock


@dataclass(frozen=True)
class FillPiece:
    """`wanted` of a tensor is read from `held` and goes into `target`, which holds `inside` of the tensor."""

    held: HeldBox
    wanted: Box
    target: Tensor
    inside: Box

    @property
    def is_whole(self) -> bool:
        return self.wanted == self.held.box == self.inside and self.target.is_contiguous()

    def put(self, values: Tensor) -> None:
        self.target[self.wanted.slices(self.inside)].copy_(values)


@dataclass(frozen=True)
class WholeTarget:
    """A target that takes all bytes [begin, end) of a slot; `flat` is its memory."""

    begin: int
    end: int
    flat: Tensor

    def take(self, source: Tensor, begin: int, end: int) -> None:
        """Bytes [begin, end) of the slot, which are in `source`, as far as they belong here."""
        a, b = max(begin, self.begin), min(end, self.end)
        if a < b:
            self.flat[a - self.begin : b - self.begin].copy_(source[a - begin : b - begin], non_blocking=True)


class ChunkReader:
    """Fills the pieces of one slot in several threads, and verifies every chunk that it reads."""

    def __init__(
        self, copy: HeldCopy, read: Callable[[int, memoryview], None], view: memoryview, threads: int = THREADS
    ) -> None:
        """`read(at, buffer)` fills a buffer from byte `at` of the slot; `view` is the slot, mapped."""
        self.copy, self.read, self.view, self.threads = copy, read, view, threads

    def fill(self, pieces: Sequence[FillPiece]) -> int:
        """Returns the number of damaged chunks; with any, the targets are half filled."""
        size = self.copy.chunk_bytes
        whole: dict[int, list[WholeTarget]] = defaultdict(list)
        cut: list[FillPiece] = []
        for piece in pieces:
            begin, end = piece.held.offset, piece.held.offset + piece.held.num_bytes
            chunks = range(begin // size, (end - 1) // size + 1)
            for chunk in chunks:
                whole[chunk]
            if piece.is_whole:
                target = WholeTarget(begin, end, piece.target.reshape(-1).view(torch.uint8))
                for chunk in chunks:
                    whole[chunk].append(target)
            else:
                cut.append(piece)
        bad = self._fill_whole(whole, _device_of(pieces)) if whole else 0
        if not bad:
            for piece in cut:
                piece.put(self._stored(piece.held)[piece.wanted.slices(piece.held.box)])
        return bad

    def _fill_whole(self, targets: Mapping[int, Sequence[WholeTarget]], device: torch.device) -> int:
        if device.type == "cuda":
            with contextlib.suppress(torch.OutOfMemoryError):  # no room for chunks beside the state
                return self._fill_gpu(targets, device)
        return self._fill_from_map(targets)

    def _fill_from_map(self, targets: Mapping[int, Sequence[WholeTarget]]) -> int:
        """Without buffers: for tensors in host memory."""
        slot = torch.frombuffer(self.view, dtype=torch.uint8)

        def fill(chunk: int) -> bool:
            begin, end = self._span(chunk)
            with torch.no_grad():
                for target in targets[chunk]:
                    target.take(slot[begin:end], begin, end)
            return self._sum_mapped(begin, end) != self.copy.chunks[chunk]

        with ThreadPoolExecutor(min(self.threads, len(targets))) as pool:
            return sum(pool.map(fill, sorted(targets)))

    def _fill_gpu(self, targets: Mapping[int, Sequence[WholeTarget]], device: torch.device) -> int:
        chunks = sorted(targets)
        count = min(self.threads, len(chunks))
        size = -(-min(self.copy.chunk_bytes, self.copy.num_bytes) // 8) * 8
        arrived = torch.empty((count, size), dtype=torch.uint8, device=device)
        sums = DeviceSums(len(chunks), size, count, device)
        digests: dict[int, str] = {}
        torch.cuda.current_stream(device).synchronize()  # whatever was to write the targets before has done so
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(chunks)):
            todo.put(number)

        def work(thread: int) -> None:
            stream = torch.cuda.Stream(device)
            ring = StagingRing(buffers, thread, stream)
            here = arrived[thread]
            try:
                with torch.cuda.stream(stream), torch.no_grad(), contextlib.suppress(queue.Empty):
                    while True:
                        number = todo.get_nowait()
                        begin, end = self._span(chunks[number])
                        ring.send(self.read, begin, end, here.data_ptr())
                        if self.copy.algorithm == "xxh3" and sums.can_add(end - begin):
                            sums.add(number, here, end - begin, thread)
                        else:
                            digests[number] = self._sum_mapped(begin, end)
                        for target in targets[chunks[number]]:
                            target.take(here, begin, end)
            finally:  # also after an error: copies may still read the buffers
                stream.synchronize()

        buffers = StagingBuffers(count, BUFFERS, min(BUFFER_BYTES, size))
        try:
            with ThreadPoolExecutor(count + 1) as pool:
                pool.submit(sums.load)  # where it fails, the threads sum all chunks
                for future in [pool.submit(work, thread) for thread in range(count)]:
                    future.result()
        finally:
            buffers.close()
        digests |= sums.digests()
        return sum(digests[number] != self.copy.chunks[chunk] for number, chunk in enumerate(chunks))

    def _sum_mapped(self, begin: int, end: int) -> str:
        return checksum(self.view[begin:end], self.copy.algorithm)

    def _span(self, chunk: int) -> tuple[int, int]:
        size = self.copy.chunk_bytes
        return chunk * size, min((chunk + 1) * size, self.copy.num_bytes)

    def _stored(self, held: HeldBox) -> Tensor:
        raw = torch.frombuffer(self.view, dtype=torch.uint8)[held.offset : held.offset + held.num_bytes]
        return raw.view(DTYPES[held.dtype]).reshape(held.box.shape)


def _device_of(pieces: Sequence[FillPiece]) -> torch.device:
    """A GPU where any target is on one: counters of an optimizer may be in host memory beside it."""
    devices = [p.target.device for p in pieces]
    return next((device for device in devices if device.type == "cuda"), devices[0])
