"""PowerSGD (Vogels et al. 2019): the sum of gradient matrices as a product of two thin ones.

    P = sum_i M_i Q,   P <- orthonormal(P),   Q = sum_i M_i^T P,   total = P Q^T,   error_i = M_i - P (M_i^T P)^T

One step of power iteration; Q is kept for the next step. The error is that of this replica's own part, where the paper
has the mean over replicas: both add up to the same, and ours is smaller. P and Q are sent in bf16: any P will do as
long as all replicas have the same one, and what Q loses goes into the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.train.reducers.compressor import At, Compressor, Sum
from shoestring.train.reducers.quantizers import ACCOUNTED_BF16, PLAIN
from shoestring.train.reducers.rounds import Exchange, together

WIRE = ACCOUNTED_BF16
MIN_RATE = 2  # smaller savings are not worth an error


@dataclass(frozen=True)
class PowerSGD(Compressor):
    rank: int
    feedback = True

    @property
    def name(self) -> str:
        return f"powersgd:{self.rank}"

    def fits(self, shape: torch.Size) -> bool:
        rows, columns = self._matrix(shape)
        return (rows + columns) * self.rank * MIN_RATE < rows * columns

    def encode(self, m_NM: Tensor, q_MR: Tensor) -> tuple[Tensor, Tensor]:
        """(P, Q) of one matrix alone."""
        p_NR = orthonormal(m_NM @ q_MR)
        return p_NR, m_NM.T @ p_NR

    def decode(self, p_NR: Tensor, q_MR: Tensor) -> Tensor:
        return p_NR @ q_MR.T

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        return (yield from self.exchange_all([x], [at]))[0]

    def exchange_all(self, xs: Sequence[Tensor], ats: Sequence[At]) -> Exchange[list[Sum]]:
        """One sum for all P, one for all Q, and one for all tensors that are too small for factors."""
        thin = [i for i, x in enumerate(xs) if self.fits(x.shape)]
        rest = [i for i, x in enumerate(xs) if not self.fits(x.shape)]
        exchanges = [self._factors([xs[i] for i in thin], [ats[i] for i in thin])] if thin else []
        exchanges += [PLAIN.exchange_all([xs[i] for i in rest], [ats[i] for i in rest])] if rest else []
        sums = yield from together(exchanges)
        found = dict(zip([*thin, *rest], [one for group in sums for one in group], strict=True))
        return [found[i] for i in range(len(xs))]

    def _factors(self, xs: Sequence[Tensor], ats: Sequence[At]) -> Exchange[list[Sum]]:
        for x, at in zip(xs, ats, strict=True):
            self.begin(x, at)
        matrices = [x.reshape(self._matrix(x.shape)) for x in xs]
        kept = orthonormal_all([at.memory["q"] for at in ats])
        started = [m @ q for m, q in zip(matrices, kept, strict=True)]
        ps = orthonormal_all([p.total for p in (yield from _summed(started, ats[0]))])
        mine = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        qs = yield from _summed(mine, ats[0])
        torch._foreach_copy_([at.memory["q"] for at in ats], [q.total for q in qs])
        return [
            Sum(self.decode(p, q.total).view(x.shape), m.addmm_(p, (own - q.error).T, alpha=-1).view(x.shape))
            for x, m, p, q, own in zip(xs, matrices, ps, qs, mine, strict=True)
        ]

    def decoded(self, x: Tensor, at: At) -> Tensor:
        if not self.fits(x.shape):
            return x
        self.begin(x, at)
        m_NM = x.reshape(self._matrix(x.shape))
        return self.decode(*self.encode(m_NM, orthonormal(at.memory["q"]))).view(x.shape)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        if not self.fits(shape):
            return PLAIN.sent_bytes(shape, size)
        return sum(WIRE.sent_bytes(torch.Size([n * self.rank]), size) for n in self._matrix(shape))

    def begin(self, x: Tensor, at: At) -> None:
        if self.fits(x.shape) and "q" not in at.memory:
            noise = at.generator(torch.device("cpu"), shared=True)
            at.memory["q"] = torch.randn(self._matrix(x.shape)[1], self.rank, generator=noise).to(x.device)

    def _matrix(self, shape: torch.Size) -> tuple[int, int]:
        return (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())


def _summed(factors: Sequence[Tensor], at: At) -> Exchange[list[Sum]]:
    """As one tensor: they are small."""
    joined = yield from WIRE.exchange(torch.cat([f.flatten() for f in factors]), at)
    sizes = [f.numel() for f in factors]
    parts = zip(joined.total.split(sizes), joined.error.split(sizes), factors, strict=True)
    return [Sum(total.view(f.shape), error.view(f.shape)) for total, error, f in parts]


def orthonormal(a_NR: Tensor) -> Tensor:
    """Columns of length 1 at right angles; columns that depend on others are replaced by some that do not."""
    return torch.linalg.qr(a_NR)[0]


def orthonormal_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthonormal` of each; those of one shape in one call, which takes most of the time of a small one."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, a_NR in enumerate(matrices):
        by_shape.setdefault(a_NR.shape, []).append(i)
    found: dict[int, Tensor] = {}
    for same in by_shape.values():
        found |= zip(same, orthonormal(torch.stack([matrices[i] for i in same])), strict=True)
    return [found[i] for i in range(len(matrices))]
