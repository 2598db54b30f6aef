"""What a ChunkReader fills is what the slot holds, and a changed byte anywhere is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shoestring.host.checksums import ALGORITHM, checksum
from shoestring.state.boxes import Box
from shoestring.state.levels.chunk_reader import ChunkReader, FillPiece
from shoestring.state.levels.snapshot import lay_out
from shoestring.state.levels.version import HeldBox, HeldCopy


def test_fill_and_verify() -> None:
    check_fill("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fill_and_verify_on_a_gpu() -> None:
    check_fill("cuda")


def check_fill(device: str) -> None:
    """Boxes that end anywhere, one of which is wanted in part; a last chunk that is too short for the kernels."""
    boxes = lay_out(
        [HeldBox(f"t{i}", "U8", (n,), Box.full((n,))) for i, n in enumerate((3000, 5000, 1, 700, 3072 + 99))]
    )
    copy = HeldCopy(1, "0a", 0, 1, "h", "", boxes, {}, chunk_bytes=4096)
    data = bytearray(random.Random(0).randbytes(copy.num_bytes))
    assert 0 < copy.num_bytes % 4096 < 241
    spans = [slice(at, min(at + 4096, copy.num_bytes)) for at in range(0, copy.num_bytes, 4096)]
    copy = replace(copy, chunks=tuple(checksum(bytes(data[span]), ALGORITHM) for span in spans), algorithm=ALGORITHM)

    def read(at: int, buffer: memoryview) -> None:
        buffer[:] = data[at : at + len(buffer)]

    def fill() -> tuple[int, list[torch.Tensor]]:
        targets = [torch.zeros(b.shape, dtype=torch.uint8, device=device) for b in boxes]
        pieces = [FillPiece(b, b.box, t, b.box) for b, t in zip(boxes, targets, strict=True)]
        part = Box((1000,), (2000,))
        pieces[1] = FillPiece(boxes[1], part, targets[1], boxes[1].box)
        view = memoryview(data)
        return ChunkReader(copy, read, view, threads=2).fill(pieces), targets

    bad, found = fill()
    assert bad == 0
    for number, (box, t) in enumerate(zip(boxes, found, strict=True)):
        stored = torch.frombuffer(data, dtype=torch.uint8)[box.offset : box.offset + box.num_bytes].clone()
        if number == 1:
            stored[:1000] = stored[2000:] = 0
        assert torch.equal(t.cpu(), stored), number
    for at in (5000, len(data) - 1):
        data[at] ^= 4
        assert fill()[0] == 1
        data[at] ^= 4
