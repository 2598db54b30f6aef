"""Quantizers: fp32, bf16, int8, int4, QSGD and TernGrad, summed by all-to-all, re-encoding and all-gather.

    scale = |x|_max / levels (or |x|_2 / levels) per block,   code = round(x / scale)

Each rank owns one part of a tensor. It receives the codes of its part from all others, adds the decoded values in fp32,
encodes the sum, and sends it to everyone. What the owner's second rounding loses goes into the owner's error, so one
residual per replica covers both roundings. Small tensors are laid side by side and encoded as one (`exchange_all`).

QSGD (Alistarh et al. 2017) and TernGrad (Wen et al. 2017) round at random and are unbiased; error feedback would not
help them, because their error can be larger than the gradient. Ours differ from the papers in the scale per block
instead of per layer, and in the owner's re-encoding with 8 bits, where TernGrad sends sums of codes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.kernels.comm.block_codes import decode_blocks, encode_blocks, encode_with_error, in_order, sum_blocks
from shoestring.train.reducers.compressor import At, Compressor, Sum, buckets, to_rows
from shoestring.train.reducers.rounds import Exchange, ToAll, ToOwners, as_bytes, from_bytes, together


class Quantizer(Compressor):
    """Encodes rows [R, N] to bytes [R, B], each row by itself; N is a multiple of `block`."""

    block: int

    @abstractmethod
    def encode(self, rows_RN: Tensor, noise: Tensor | None = None) -> Tensor: ...

    @abstractmethod
    def decode(self, wire_RB: Tensor, num: int) -> Tensor: ...

    @abstractmethod
    def row_bytes(self, num: int) -> int:
        """Of the code of a row of `num` values."""

    def encode_with_error(self, rows_RN: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """(bytes, what they lose); the loss is 0 where it is not fed back."""
        return self.encode(rows_RN, noise), torch.zeros_like(rows_RN)

    def sum(self, wire_RB: Tensor, exact_N: Tensor, own: int) -> Tensor:
        """Of the decoded rows in their order. Row `own` did not travel, so it is taken as it is."""
        parts = self.decode(wire_RB, exact_N.numel())
        parts[own] = exact_N
        return in_order(parts)

    @property
    def reply(self) -> Quantizer:
        """How the owner of a part sends the sum."""
        return self

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        return (yield from self._joined([x], [at]))[0]

    def exchange_all(self, xs: Sequence[Tensor], ats: Sequence[At]) -> Exchange[list[Sum]]:
        sums = yield from together([self._joined([xs[i] for i in b], [ats[i] for i in b]) for b in buckets(xs)])
        return [one for bucket in sums for one in bucket]

    def _joined(self, xs: Sequence[Tensor], ats: Sequence[At]) -> Exchange[list[Sum]]:
        """The rows of all tensors side by side: every value has the owner and the block that it has alone."""
        rank, block = ats[0].rank, max(self.block, self.reply.block)
        parts = [to_rows(x, ats[0].size, block) for x in xs]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        wire, errors = self.encode_with_error(rows, self._noise(parts, ats, 0))
        total = self.sum((yield ToOwners(wire)), rows[rank], rank)[None]
        widths = [p.shape[1] for p in parts]
        reply = self.reply.encode(total, self._noise(total.split(widths, dim=1), ats, 1))
        answers = self.reply.decode((yield ToAll(reply[0])), rows.shape[1])
        errors[rank] = total[0] - answers[rank]
        split = zip(answers.split(widths, dim=1), errors.split(widths, dim=1), xs, strict=True)
        return [Sum(_from_rows(answer, x), _from_rows(error, x)) for answer, error, x in split]

    def decoded(self, x: Tensor, at: At) -> Tensor:
        rows = to_rows(x, at.size, max(self.block, self.reply.block))
        return _from_rows(self.decode(self.encode(rows, self._noise([rows], [at], 0)), rows.shape[1]), x)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        block = max(self.block, self.reply.block)
        num = -(-shape.numel() // (size * block)) * block
        return (size - 1) * (self.row_bytes(num) + self.reply.row_bytes(num))

    def _noise(self, parts: Sequence[Tensor], ats: Sequence[At], round: int) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Float(Quantizer):
    """fp32 (exact) or bf16: summed in fp32 all the same. `accounts`: what rounding loses is given back as the error."""

    dtype: torch.dtype = torch.float32
    accounts: bool = False
    block = 1

    @property
    def name(self) -> str:
        return "plain" if self.dtype == torch.float32 else "bf16"

    def encode(self, rows_RN: Tensor, noise: Tensor | None = None) -> Tensor:
        if self.dtype == torch.float32:
            return as_bytes(rows_RN)
        limit = torch.finfo(self.dtype).max  # the largest fp32 numbers would round to infinity
        return as_bytes(rows_RN.clamp(-limit, limit).to(self.dtype))

    def encode_with_error(self, rows_RN: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.accounts:
            return super().encode_with_error(rows_RN, noise)
        wire = self.encode(rows_RN)
        return wire, rows_RN - self.decode(wire, rows_RN.shape[1])

    def decode(self, wire_RB: Tensor, num: int) -> Tensor:
        return from_bytes(wire_RB, self.dtype).float()

    def exchange_all(self, xs: Sequence[Tensor], ats: Sequence[At]) -> Exchange[list[Sum]]:
        if self.dtype != torch.float32:
            return (yield from super().exchange_all(xs, ats))
        nothing = xs[0].new_zeros(())
        totals = yield from self.sums(xs, ats[0])
        return [Sum(total, nothing.expand(total.shape)) for total in totals]

    def sums(self, xs: Sequence[Tensor], at: At) -> Exchange[list[Tensor]]:
        """Exact, and as one tensor: many are as short as a norm, and who adds up a value does not matter."""
        total = yield from self._exact(torch.cat([x.flatten() for x in xs]), at)
        parts = total.split([x.numel() for x in xs])
        return [part.view(x.shape) for part, x in zip(parts, xs, strict=True)]

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        if self.dtype != torch.float32:
            return (yield from super().exchange(x, at))
        return Sum((yield from self._exact(x, at)), x.new_zeros(()).expand(x.shape))

    def _exact(self, x: Tensor, at: At) -> Exchange[Tensor]:
        """Nothing is computed but the sum."""
        received = yield ToOwners(as_bytes(to_rows(x, at.size, 1)))
        answers = yield ToAll(as_bytes(in_order(from_bytes(received, torch.float32))))
        return _from_rows(from_bytes(answers, torch.float32), x)

    def row_bytes(self, num: int) -> int:
        return num * self.dtype.itemsize


@dataclass(frozen=True)
class BlockCodes(Quantizer):
    """`bits` per value and an fp32 scale per block (kernels/comm/block_codes.py)."""

    label: str
    bits: int
    block: int = 128
    norm: str = "max"  # or l2
    stochastic: bool = False
    clip_sigma: float = 0.0

    @property
    def name(self) -> str:
        return self.label

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        return not self.stochastic

    @property
    def reply(self) -> Quantizer:
        return REPLY if self.stochastic and self.bits < REPLY.bits else self

    def encode(self, rows_RN: Tensor, noise: Tensor | None = None) -> Tensor:
        if self.clip_sigma:
            blocks = rows_RN.unflatten(1, (-1, self.block))
            limit = self.clip_sigma * blocks.square().mean(-1, keepdim=True).sqrt()
            rows_RN = blocks.clamp(-limit, limit).flatten(1)
        return encode_blocks(rows_RN, self.bits, self.block, norm=self.norm, noise=noise)

    def encode_with_error(self, rows_RN: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.feedback:
            return encode_with_error(rows_RN, self.bits, self.block)
        return super().encode_with_error(rows_RN, noise)

    def sum(self, wire_RB: Tensor, exact_N: Tensor, own: int) -> Tensor:
        return sum_blocks(wire_RB, exact_N, own, self.bits, self.block)

    def decode(self, wire_RB: Tensor, num: int) -> Tensor:
        return decode_blocks(wire_RB, num, self.bits, self.block)

    def row_bytes(self, num: int) -> int:
        return num * self.bits // 8 + num // self.block * 4

    def _noise(self, parts: Sequence[Tensor], ats: Sequence[At], round: int) -> Tensor | None:
        """Of each tensor by its own name, so that it does not depend on the bucket."""
        if not self.stochastic:
            return None
        device = parts[0].device
        drawn = [
            torch.rand(p.shape, generator=at.generator(device, part=round), device=device)
            for p, at in zip(parts, ats, strict=True)
        ]
        return torch.cat(drawn, dim=1)


PLAIN = Float()
BF16 = Float(torch.bfloat16)
ACCOUNTED_BF16 = Float(torch.bfloat16, accounts=True)
INT8 = BlockCodes("int8", 8)
INT4 = BlockCodes("int4", 4)
REPLY = BlockCodes("int8 at random", 8, stochastic=True)
QSGD = BlockCodes("qsgd", 4, block=512, norm="l2", stochastic=True)
TERNGRAD = BlockCodes("terngrad", 2, block=512, stochastic=True, clip_sigma=2.5)


def _from_rows(rows_RN: Tensor, like: Tensor) -> Tensor:
    return rows_RN.reshape(-1)[: like.numel()].view(like.shape)
