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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoestring.kernels.comm.top_magnitudes import top_magnitudes
from shoestring.train.optim import decay_groups
from shoestring.train.reducers.compressor import At, Compressor, Sum
from shoestring.train.reducers.quantizers import BF16
from shoestring.train.reducers.rounds import Exchange, ToAll, as_bytes, from_bytes

CHUNK = 64


@dataclass(frozen=True)
class DeMo(Compressor):
    top: int = 32
    decay: float = 0.999
    feedback = True

    @property
    def name(self) -> str:
        return "demo" if self.top == 32 else f"demo:{self.top}"

    def encode(self, x: Tensor) -> Tensor:
        """Bytes: coefficients in bf16, then their places in the chunks in 16 bits."""
        coefficients = to_frequencies(x)
        index = top_magnitudes(coefficients, min(self.top, coefficients.shape[1]))
        values = coefficients.gather(1, index).reshape(-1)
        return torch.cat([BF16.encode(values), as_bytes(index.reshape(-1).to(torch.int16))])

    def decode_parts(self, wire: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """(coefficients by chunk, which of them were sent)."""
        chunks = num_chunks(shape)
        half = wire.numel() // 2
        values = from_bytes(wire[:half], torch.bfloat16).float().view(chunks, -1)
        index = from_bytes(wire[half:], torch.int16).long().view(chunks, -1)
        empty = torch.zeros(chunks, shape.numel() // chunks, device=wire.device)
        return empty.scatter(1, index, values), empty.scatter(1, index, 1.0)

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        wire = self.encode(x)
        error = x - from_frequencies(self.decode_parts(wire, x.shape)[0], x.shape)
        parts = [self.decode_parts(answer, x.shape) for answer in (yield ToAll(wire))]
        total, senders = (sum(pair[1:], pair[0]) for pair in zip(*parts, strict=True))
        return Sum(from_frequencies(total / senders.clamp(min=1), x.shape).sign(), error)

    def decoded(self, x: Tensor, at: At) -> Tensor:
        return from_frequencies(self.decode_parts(self.encode(x), x.shape)[0], x.shape)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        chunks = num_chunks(shape)
        return (size - 1) * 4 * chunks * min(self.top, shape.numel() // chunks)


def sgd(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.SGD:
    """The optimizer that takes the signs. Without momentum, SGD's decay is decoupled: lr * (sign + decay * w)."""
    return torch.optim.SGD(decay_groups(model, weight_decay), lr=lr)


def to_frequencies(x: Tensor) -> Tensor:
    """[chunks, coefficients]: the orthonormal DCT-II of each chunk."""
    rows, columns = _matrix(x.shape)
    a, b = chunk_side(rows), chunk_side(columns)
    tiles = x.reshape(rows // a, a, columns // b, b)
    out = torch.einsum("ia,manb,jb->mnij", dct(a, x.device), tiles, dct(b, x.device))
    return out.reshape(-1, a * b)


def from_frequencies(coefficients: Tensor, shape: torch.Size) -> Tensor:
    rows, columns = _matrix(shape)
    a, b = chunk_side(rows), chunk_side(columns)
    tiles = coefficients.view(rows // a, columns // b, a, b)
    device = coefficients.device
    return torch.einsum("ia,mnij,jb->manb", dct(a, device), tiles, dct(b, device)).reshape(shape)


def num_chunks(shape: torch.Size) -> int:
    rows, columns = _matrix(shape)
    return rows // chunk_side(rows) * (columns // chunk_side(columns))


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
