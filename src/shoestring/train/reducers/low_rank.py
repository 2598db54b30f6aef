"""PowerSGD (Vogels et al. 2019): the sum of gradient matrices as a product of two thin ones.

    P = sum_i M_i Q,   P <- orthonormal(P),   Q = sum_i M_i^T P,   total = P Q^T,   error_i = M_i - P (M_i^T P)^T

One step of power iteration; Q is kept for the next step. The error is that of this replica's own part, where the paper
has the mean over replicas: both add up to the same, and ours is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.train.reducers.compressor import At, Compressor, Sum
from shoestring.train.reducers.quantizers import PLAIN
from shoestring.train.reducers.rounds import Exchange

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
        if not self.fits(x.shape):
            return (yield from PLAIN.exchange(x, at))
        self.begin(x, at)
        m_NM = x.reshape(self._matrix(x.shape))
        p_NR = (yield from PLAIN.exchange(m_NM @ orthonormal(at.memory["q"]), at)).total
        p_NR = orthonormal(p_NR)
        mine = m_NM.T @ p_NR
        q_MR = (yield from PLAIN.exchange(mine, at)).total
        at.memory["q"].copy_(q_MR)
        return Sum(self.decode(p_NR, q_MR).view(x.shape), (m_NM - self.decode(p_NR, mine)).view(x.shape))

    def decoded(self, x: Tensor, at: At) -> Tensor:
        if not self.fits(x.shape):
            return x
        self.begin(x, at)
        m_NM = x.reshape(self._matrix(x.shape))
        return self.decode(*self.encode(m_NM, orthonormal(at.memory["q"]))).view(x.shape)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        if not self.fits(shape):
            return PLAIN.sent_bytes(shape, size)
        return sum(PLAIN.sent_bytes(torch.Size([n * self.rank]), size) for n in self._matrix(shape))

    def begin(self, x: Tensor, at: At) -> None:
        if self.fits(x.shape) and "q" not in at.memory:
            noise = at.generator(torch.device("cpu"), shared=True)
            at.memory["q"] = torch.randn(self._matrix(x.shape)[1], self.rank, generator=noise).to(x.device)

    def _matrix(self, shape: torch.Size) -> tuple[int, int]:
        return (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())


def orthonormal(a_NR: Tensor) -> Tensor:
    """Columns of length 1 at right angles; columns that depend on others are replaced by some that do not."""
    return torch.linalg.qr(a_NR)[0]
