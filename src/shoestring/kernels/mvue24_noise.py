"""Random numbers as a pure function of where and when they are used: Philox4x32-10 in plain torch.

A draw is keyed by (seed, layer, step, row of the weight, group of four tokens), each a tensor, so the same
draw comes out on every rank, in every re-run, after a resume and in a recomputed forward, and no generator
has a state. The generator is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11),
the same as torch's on the GPU and `tl.philox`, so a kernel can make the same numbers.

    counter = (token group, row // 4, step, layer)      key = (seed, seed >> 32)      word = row % 4

Left out on purpose: anything but uniform numbers of 23 bits, to which fp32 adds 1 exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
WORDS = 4


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = 10) -> tuple[Tensor, ...]:
    """Four int64 tensors of 32 random bits each, broadcast over four counter and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2**64; their upper 32 bits are right once the sign is masked off.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform_rows(rows: Tensor, groups: Tensor, step: Tensor, layer: Tensor, seed: Tensor) -> Tensor:
    """fp32 in [0, 1): [len(rows), len(groups)]; `rows` come in whole runs of four (4k, 4k+1, 4k+2, 4k+3)."""
    counter = (groups.long()[None, :] & _LOW, rows.long()[::WORDS, None] >> 2, step & _LOW, layer & _LOW)
    words = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    bits = torch.stack(words, dim=1).flatten(0, 1)  # [rows / 4, 4, groups]
    return (bits >> 9).float() * 2.0**-23
