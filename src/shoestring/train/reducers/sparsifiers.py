"""Sparsifiers: Top-K with its own coordinates per replica, and Top-K on coordinates that all replicas agree on.

Top-K: each replica sends its largest values and where they are; everyone gathers them. The traffic grows with the
number of replicas. A tensor is cut into rows of at most 65,536 values, so that an index takes 16 bits; values are sent
in bf16, and error feedback keeps what that loses.

ARC-Top-K (2025): replicas agree on rows from a sketch of the gradient, then sum only these rows. No index travels, and
the traffic does not grow with the number of replicas. The owner of a row adds the sketches and sends one score per row,
so all replicas choose from the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.kernels.comm.top_magnitudes import MAX_ROW, top_magnitudes
from shoestring.train.reducers.compressor import At, Compressor, Sum, in_order, to_rows
from shoestring.train.reducers.quantizers import BF16, PLAIN
from shoestring.train.reducers.rounds import Exchange, ToAll, ToOwners, as_bytes, from_bytes

SKETCH_DIMS = 4  # of a row's sketch
SKETCH_SHARE = 0.25  # bytes of sketches, as a share of the bytes of values


@dataclass(frozen=True)
class TopKSparsifier(Compressor):
    ratio: float
    feedback = True

    @property
    def name(self) -> str:
        return f"topk:{self.ratio:g}"

    def encode(self, x: Tensor) -> Tensor:
        """Bytes: all values in bf16, then their indices within the rows in 16 bits."""
        values, indices = [], []
        for rows, k in self._rows(x.reshape(-1)):
            index = top_magnitudes(rows, k)
            values.append(rows.gather(1, index).reshape(-1))
            indices.append(index.reshape(-1))
        # int16 stands for uint16, which few operations of torch know.
        index_K = (torch.cat(indices) - (1 << 15)).to(torch.int16)
        return torch.cat([BF16.encode(torch.cat(values)), as_bytes(index_K)])

    def decode(self, wire: Tensor, num: int) -> Tensor:
        index, values = self.places(wire, num)
        return torch.zeros(num, device=wire.device).scatter_(0, index, values)

    def places(self, wire: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """(where, what): no place twice."""
        half = wire.numel() // 2
        values = from_bytes(wire[:half], torch.bfloat16).float()
        index = from_bytes(wire[half:], torch.int16).long() + (1 << 15)
        full, k_full = divmod(num, MAX_ROW)[0], self._k(MAX_ROW)
        index[: full * k_full] += torch.arange(full, device=wire.device).repeat_interleave(k_full) * MAX_ROW
        index[full * k_full :] += full * MAX_ROW
        return index, values

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        wire = self.encode(x)
        error = x.flatten().clone()
        index, values = self.places(wire, x.numel())
        error[index] -= values
        total = torch.zeros_like(error)
        for answer in (yield ToAll(wire)):
            index, values = self.places(answer, x.numel())
            total[index] += values
        return Sum(total.view(x.shape), error.view(x.shape))

    def decoded(self, x: Tensor, at: At) -> Tensor:
        return self.decode(self.encode(x), x.numel()).view(x.shape)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        full, rest = divmod(shape.numel(), MAX_ROW)
        return (size - 1) * 4 * (full * self._k(MAX_ROW) + (self._k(rest) if rest else 0))

    def _k(self, num: int) -> int:
        return min(num, max(1, math.ceil(self.ratio * num)))

    def _rows(self, flat: Tensor) -> list[tuple[Tensor, int]]:
        """The whole rows, and the rest as a row of its own."""
        cut = flat.numel() // MAX_ROW * MAX_ROW
        parts = [flat[:cut].view(-1, MAX_ROW), flat[None, cut:]]
        return [(p, self._k(p.shape[1])) for p in parts if p.numel()]


@dataclass(frozen=True)
class ArcTopK(Compressor):
    ratio: float
    feedback = True

    @property
    def name(self) -> str:
        return f"arc-topk:{self.ratio:g}"

    @property
    def width(self) -> int:
        """Values per row: so many that sketches are a small share of what is sent."""
        wide = SKETCH_DIMS / (SKETCH_SHARE * self.ratio)
        return min(1024, max(32, 2 ** round(math.log2(wide))))

    def sketch(self, rows_RN: Tensor, noise: torch.Generator) -> Tensor:
        """[rows, SKETCH_DIMS]: its norm estimates that of the row, and sketches of replicas can be added."""
        signs = torch.randint(0, 2, (rows_RN.shape[1], SKETCH_DIMS), generator=noise, device=noise.device)
        return rows_RN @ (2.0 * signs.to(rows_RN.device) - 1.0)

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        rows = to_rows(x, self._num_rows(x.numel(), at.size), 1)
        # On the CPU: all replicas must draw the same numbers, whatever their device is.
        mine = self.sketch(rows, at.generator(torch.device("cpu"), shared=True))
        received = yield ToOwners(PLAIN.encode(mine.view(at.size, -1)))
        score = in_order(PLAIN.decode(received, 0)).view(-1, SKETCH_DIMS).square().sum(1)
        scores = PLAIN.decode((yield ToAll(PLAIN.encode(score))), 0).reshape(1, -1)
        chosen = _top_scores(scores, self._k(rows.shape[0]))
        summed = yield from PLAIN.exchange(rows[chosen], at)
        total, error = torch.zeros_like(rows), rows.clone()
        total[chosen] = summed.total
        error[chosen] = summed.error
        return Sum(_back(total, x), _back(error, x))

    def decoded(self, x: Tensor, at: At) -> Tensor:
        rows = to_rows(x, self._num_rows(x.numel(), at.size), 1)
        score = self.sketch(rows, at.generator(torch.device("cpu"), shared=True)).square().sum(1)
        chosen = _top_scores(score[None], self._k(rows.shape[0]))
        kept = torch.zeros_like(rows)
        kept[chosen] = rows[chosen]
        return _back(kept, x)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        rows = self._num_rows(shape.numel(), size)
        width = -(-shape.numel() // rows)
        values = PLAIN.sent_bytes(torch.Size([self._k(rows) * width]), size)
        return values + (size - 1) * (rows // size * SKETCH_DIMS * 4 + rows // size * 4)

    def _num_rows(self, num: int, size: int) -> int:
        """A multiple of the number of replicas: each owns as many."""
        return -(-num // (self.width * size)) * size

    def _k(self, num_rows: int) -> int:
        return min(num_rows, max(1, math.ceil(self.ratio * num_rows)))


def _top_scores(scores: Tensor, k: int) -> Tensor:
    return scores[0].sort(descending=True, stable=True).indices[:k].sort().values


def _back(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(-1)[: like.numel()].view(like.shape)
