"""What a compressor is: a lossy code for gradients, and the exchange that sums them with it.

    exchange(x, at)     x is this replica's tensor in fp32; the exchange returns Sum(total, error)

With error feedback x belongs to the exchange, which may leave the error in it.

`total` is the same on all replicas. `error` is what this replica must add to its next gradient (feedback.py), so that
over the replicas    sum(total) + sum(errors) = sum(x)    holds exactly but for the rounding of fp32.

Encoding and decoding are functions over plain tensors: no process group, no model, no state but what `at` holds.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoestring.train.reducers.rounds import Exchange, together

BUCKET_VALUES = 1 << 22  # a joined copy must not cost much memory


@dataclass
class At:
    """Where and when a tensor is exchanged. `memory` belongs to one tensor and is kept between steps."""

    rank: int
    size: int
    name: str = ""
    step: int = 0
    seed: int = 0
    memory: dict[str, Tensor] = field(default_factory=dict)

    def generator(self, device: torch.device, *, shared: bool = False, part: int = 0) -> torch.Generator:
        """Random numbers keyed by seed, step and tensor; `shared` ones are the same on all replicas."""
        key = f"{self.seed}/{self.step}/{self.name}/{-1 if shared else self.rank}/{part}"
        number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
        return torch.Generator(device=device).manual_seed(number)


@dataclass(frozen=True)
class Sum:
    total: Tensor
    error: Tensor


class Compressor(ABC):
    """A frozen dataclass that is its own config. `feedback`: whether the error is kept and added to the next gradient;
    a residual of the last step counts `decay` times."""

    feedback: bool = False
    decay: float = 1.0

    @property
    @abstractmethod
    def name(self) -> str:
        """As a user writes it: topk:0.01."""

    def begin(self, x: Tensor, at: At) -> None:
        """Make what `at.memory` holds, for a tensor like x: before the first step, and before a state is loaded."""
        return

    @abstractmethod
    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]: ...

    def exchange_all(self, xs: Sequence[Tensor], ats: Sequence[At]) -> Exchange[list[Sum]]:
        """Many tensors at once. Each has the sum of `exchange`; which others it goes with changes the time alone."""
        return together([self.exchange(x, at) for x, at in zip(xs, ats, strict=True)])

    @abstractmethod
    def decoded(self, x: Tensor, at: At) -> Tensor:
        """What the others would see of x: decode(encode(x)), without an exchange."""

    @abstractmethod
    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        """What one of `size` replicas sends for a tensor of this shape."""


def to_rows(x: Tensor, num_rows: int, block: int) -> Tensor:
    """x as [num_rows, a multiple of block], padded with zeros: one row per owner."""
    flat = x.reshape(-1)
    per_row = -(-flat.numel() // (num_rows * block)) * block
    padding = num_rows * per_row - flat.numel()
    return (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(num_rows, per_row)


def buckets(xs: Sequence[Tensor]) -> Iterator[list[int]]:
    """Which tensors, one after the other, are joined into one: up to BUCKET_VALUES, or a large one alone."""
    bucket: list[int] = []
    for i, x in enumerate(xs):
        if bucket and sum(xs[j].numel() for j in bucket) + x.numel() > BUCKET_VALUES:
            yield bucket
            bucket = []
        bucket.append(i)
    if bucket:
        yield bucket
