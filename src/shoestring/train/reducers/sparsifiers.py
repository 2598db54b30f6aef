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

from shoestring.kernels.comm.block_codes import in_order
from shoestring.kernels.comm.sparse_codes import encode_sparse, num_kept, sum_sparse, total_kept
from shoestring.train.reducers.compressor import At, Compressor, Sum, to_rows
from shoestring.train.reducers.quantizers import PLAIN
from shoestring.train.reducers.rounds import Exchange, ToAll, ToOwners

SKETCH_DIMS = 4  # of a row's sketch
SKETCH_SHARE = 0.25  # bytes of sketches, as a share of the bytes of values


@dataclass(frozen=True)
class TopKSparsifier(Compressor):
    ratio: float
    feedback = True

    @property
    def name(self) -> str:
        return f"topk:{self.ratio:g}"

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        in_place = x.device.type == "cpu" and x.is_contiguous()  # the kernel for GPUs reads values again
        error = x if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)
        wire = encode_sparse(x.reshape(-1), self.ratio, error.view(-1))
        total = sum_sparse((yield ToAll(wire)), x.numel(), self.ratio)
        return Sum(total.view(x.shape), error)

    def decoded(self, x: Tensor, at: At) -> Tensor:
        wire = encode_sparse(x.reshape(-1), self.ratio)
        return sum_sparse(wire[None], x.numel(), self.ratio).view(x.shape)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        return (size - 1) * 4 * total_kept(self.ratio, shape.numel())


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
        return num_kept(self.ratio, num_rows)


def _top_scores(scores: Tensor, k: int) -> Tensor:
    return scores[0].sort(descending=True, stable=True).indices[:k].sort().values


def _back(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(-1)[: like.numel()].view(like.shape)
