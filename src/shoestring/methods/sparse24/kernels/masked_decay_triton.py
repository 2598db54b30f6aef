# mypy: disallow-untyped-defs=False
"""The kernel of kernels/masked_decay.py."""

import triton
import triton.language as tl


@triton.jit
def _masked_decay_kernel(grad, w, mask, strength, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    pruned = tl.load(mask + i, mask=inside, other=1) == 0
    decayed = tl.load(grad + i, mask=inside, other=0.0)
    decayed += tl.where(pruned, strength * tl.load(w + i, mask=inside, other=0.0), 0.0)
    tl.store(grad + i, decayed, mask=inside)
