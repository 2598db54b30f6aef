"""DeMo (Peng, Quesnelle, Kingma 2024): momentum stays on its replica, and its fastest components are sent.

    m <- decay * m + g,   c = the TOP largest DCT coefficients of each chunk of m,   m <- m - idct(c)
    total = sign(idct(mean over the replicas that sent a coefficient))

That is error feedback with a decay below 1, and a sign that replaces Adam. So this reducer is an optimizer too: it
needs plain SGD after it, whose weight decay is then decoupled, and refuses another. A chunk is at most 64 values of
each of the two dims of a matrix. Our momentum leaves the learning rate out: the sign makes its scale meaningless.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoestring.kernels.comm.top_magnitudes import top_magnitudes
from shoestring.train.optim import decay_groups
from shoestring.train.reducers.compressor import At, Compressor, Sum, buckets
from shoestring.train.reducers.quantizers import BF16
from shoestring.train.reducers.rounds import Exchange, ToAll, as_bytes, from_bytes, together

CHUNK = 64


@dataclass(frozen=True)
class DeMo(Compressor):
    top: int = 32
    decay: float = 0.999
    feedback = True

    @property
    def name(self) -> str:
        return "demo" if self.top == 32 else f"demo:{self.top}"

    def encode(self, coefficients_CN: Tensor) -> Tensor:
        """Bytes: the largest coefficients of each chunk in bf16, then their places in the chunks in 16 bits."""
        index = top_magnitudes(coefficients_CN, min(self.top, coefficients_CN.shape[1]))
        values = coefficients_CN.gather(1, index).reshape(-1)
        return torch.cat([BF16.encode(values), as_bytes(index.reshape(-1).to(torch.int16))])

    def decode(self, wire: Tensor, num_chunks: int) -> tuple[Tensor, Tensor]:
        """(values, places), of each chunk."""
        half = wire.numel() // 2
        values = from_bytes(wire[:half], torch.bfloat16).float().view(num_chunks, -1)
        return values, from_bytes(wire[half:], torch.int16).long().view(num_chunks, -1)

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        return (yield from self.exchange_all([x], [at]))[0]

    def exchange_all(self, xs: Sequence[Tensor], ats: Sequence[At]) -> Exchange[list[Sum]]:
        """Chunks of one size are transformed together: as few large products as possible."""
        by_size: dict[tuple[int, int], list[int]] = {}
        for i, x in enumerate(xs):
            by_size.setdefault(chunk_size(x.shape), []).append(i)
        joined = [[same[j] for j in b] for same in by_size.values() for b in buckets([xs[i] for i in same])]
        sums = yield from together([self._chunks([xs[i] for i in bucket]) for bucket in joined])
        found: dict[int, Sum] = {}
        for bucket, group in zip(joined, sums, strict=True):
            found |= zip(bucket, group, strict=True)
        return [found[i] for i in range(len(xs))]

    def _chunks(self, xs: Sequence[Tensor]) -> Exchange[list[Sum]]:
        rows, columns = chunk_size(xs[0].shape)
        parts = [to_chunks(x) for x in xs]
        chunks_CAB = torch.cat(parts)
        coefficients = to_frequencies(chunks_CAB)
        wire = self.encode(coefficients)
        error = self._without(chunks_CAB, *self.decode(wire, len(chunks_CAB)))
        total, senders = torch.zeros_like(coefficients), torch.zeros_like(coefficients)
        for answer in (yield ToAll(wire)):  # in their order; a sender has no place twice
            values, index = self.decode(answer, len(chunks_CAB))
            total.scatter_add_(1, index, values)
            senders.scatter_add_(1, index, torch.ones_like(values))
        signs = from_frequencies(total / senders.clamp_(min=1), rows, columns).sign_()
        each = [len(p) for p in parts]
        split = zip(signs.split(each), error.split(each), xs, strict=True)
        return [Sum(from_chunks(sign, x.shape), from_chunks(lost, x.shape)) for sign, lost, x in split]

    def _without(self, chunks_CAB: Tensor, values_CK: Tensor, index_CK: Tensor) -> Tensor:
        """Chunks less the coefficients that are sent, in place: K outer products for each, where K is small."""
        rows, columns = chunks_CAB.shape[1:]
        left_CKA = dct(rows, index_CK.device)[index_CK % rows] * values_CK[..., None]
        right_CKB = dct(columns, index_CK.device)[index_CK // rows]
        return chunks_CAB.baddbmm_(left_CKA.mT, right_CKB, alpha=-1)

    def decoded(self, x: Tensor, at: At) -> Tensor:
        chunks_CAB = to_chunks(x)
        coefficients = to_frequencies(chunks_CAB)
        values, index = self.decode(self.encode(coefficients), len(chunks_CAB))
        kept = torch.zeros_like(coefficients).scatter_(1, index, values)
        return from_chunks(from_frequencies(kept, *chunk_size(x.shape)), x.shape)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        chunks = num_chunks(shape)
        return (size - 1) * 4 * chunks * min(self.top, shape.numel() // chunks)


def sgd(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.SGD:
    """The optimizer that takes the signs. Without momentum, SGD's decay is decoupled: lr * (sign + decay * w)."""
    return torch.optim.SGD(decay_groups(model, weight_decay), lr=lr)


def to_chunks(x: Tensor) -> Tensor:
    """[chunks, rows, columns]"""
    (rows, columns), (a, b) = _matrix(x.shape), chunk_size(x.shape)
    return x.reshape(rows // a, a, columns // b, b).transpose(1, 2).reshape(-1, a, b)


def from_chunks(chunks_CAB: Tensor, shape: torch.Size) -> Tensor:
    (rows, columns), (a, b) = _matrix(shape), chunk_size(shape)
    return chunks_CAB.view(rows // a, columns // b, a, b).transpose(1, 2).reshape(shape)


def to_frequencies(chunks_CAB: Tensor) -> Tensor:
    """[chunks, coefficients]: the orthonormal DCT-II of each chunk, column by column.

    As products of all chunks with one matrix, which run at full speed where one product per chunk does not."""
    count, rows, columns = chunks_CAB.shape
    across = chunks_CAB.reshape(-1, columns) @ dct(columns, chunks_CAB.device).T
    return (across.view(count, rows, columns).mT.reshape(-1, rows) @ dct(rows, chunks_CAB.device).T).view(count, -1)


def from_frequencies(coefficients_CN: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of to_frequencies."""
    device = coefficients_CN.device
    down = coefficients_CN.reshape(-1, rows) @ dct(rows, device)
    return (down.view(-1, columns, rows).mT.reshape(-1, columns) @ dct(columns, device)).view(-1, rows, columns)


def num_chunks(shape: torch.Size) -> int:
    a, b = chunk_size(shape)
    return shape.numel() // (a * b)


def chunk_size(shape: torch.Size) -> tuple[int, int]:
    rows, columns = _matrix(shape)
    return chunk_side(rows), chunk_side(columns)


def chunk_side(num: int) -> int:
    """The largest divisor that is at most CHUNK."""
    return next(side for side in range(min(CHUNK, num), 0, -1) if num % side == 0)


@functools.lru_cache(maxsize=64)
def dct(num: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II as a matrix; its transpose is its inverse."""
    i = torch.arange(num, dtype=torch.float64)
    matrix = torch.cos(math.pi / num * (i[None, :] + 0.5) * i[:, None]) * math.sqrt(2 / num)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


def _matrix(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
