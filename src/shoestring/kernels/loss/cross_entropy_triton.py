# mypy: disallow-untyped-defs=False
"""The kernel of kernels/loss/cross_entropy.py."""

import triton
import triton.language as tl


@triton.jit
def _cross_entropy_kernel(logits, row_stride, target, loss, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * row_stride
    t = tl.load(target + row)
    col = tl.arange(0, BLOCK)

    if t < 0:
        tl.store(loss + row, 0.0)
        for start in range(0, vocab, BLOCK):
            tl.store(z + start + col, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=start + col < vocab)
        return

    peak = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        block = tl.load(z + start + col, mask=start + col < vocab, other=-float("inf")).to(tl.float32)
        new_peak = tl.maximum(peak, tl.max(block, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(block - new_peak), 0)
        peak = new_peak
    # Peak and sum are kept separate: exp(z - logsumexp) would have the rounding error of a large logsumexp.
    tl.store(loss + row, tl.log(total) + (peak - tl.load(z + t).to(tl.float32)))

    for start in range(0, vocab, BLOCK):
        inside = start + col < vocab
        block = tl.load(z + start + col, mask=inside, other=-float("inf")).to(tl.float32)
        grad = tl.exp(block - peak) / total - tl.where(start + col == t, 1.0, 0.0)
        tl.store(z + start + col, grad.to(logits.dtype.element_ty), mask=inside)
