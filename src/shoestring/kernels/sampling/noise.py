"""Gumbel noise as a function of (seed, position, index), without a generator's state.

A row is the output of a SplitMix64 generator whose state is a hash of (seed, position), read at counter index + 1, so
that any entry can be computed alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def signed(x: int) -> int:
    """The signed number of the same 64 bits."""
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX1 = signed(0xBF58476D1CE4E5B9)
MIX2 = signed(0x94D049BB133111EB)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, index_V: Tensor) -> Tensor:
    """Standard Gumbel noise [R, V], fp64, at these indices."""
    return gumbel(uniform_bits(seed_R, position_R, index_V))


def uniform_bits(seed_R: Tensor, position_R: Tensor, index_V: Tensor) -> Tensor:
    """[R, V] whole numbers below 2^52."""
    state_R = _mix(_mix(seed_R + GOLDEN) ^ (position_R * MIX1))
    return _shift(_mix(state_R[:, None] + (index_V + 1) * GOLDEN), 12)


def gumbel(bits: Tensor) -> Tensor:
    # 52 bits, centred: exact in fp64 and never 0 or 1, so both logarithms stay finite.
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around as unsigned ones do."""
    x = (x ^ _shift(x, 30)) * MIX1
    x = (x ^ _shift(x, 27)) * MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; `>>` on int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
