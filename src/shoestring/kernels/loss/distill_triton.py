# mypy: disallow-untyped-defs=False
"""The kernel of kernels/loss/distill.py."""

import triton
import triton.language as tl


@triton.jit
def _distill_kernel(
    logits, z_stride, teacher, y_stride, target, loss, vocab,
    forward, reverse, ce, warmth,
    REVERSE: tl.constexpr, CE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z, y = logits + row * z_stride, teacher + row * y_stride
    t = tl.load(target + row)
    col = tl.arange(0, BLOCK)

    if t < 0:
        tl.store(loss + row, 0.0)
        for start in range(0, vocab, BLOCK):
            tl.store(z + start + col, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=start + col < vocab)
        return

    # Peaks and sums; the student's also at temperature 1 where the cross entropy is wanted.
    z_peak = -float("inf")
    y_peak = -float("inf")
    z_sum = 0.0
    y_sum = 0.0
    plain_sum = 0.0
    for start in range(0, vocab, BLOCK):
        inside = start + col < vocab
        zb = tl.load(z + start + col, mask=inside, other=-float("inf")).to(tl.float32)
        yb = tl.load(y + start + col, mask=inside, other=-float("inf")).to(tl.float32)
        new_z, new_y = tl.maximum(z_peak, tl.max(zb, 0)), tl.maximum(y_peak, tl.max(yb, 0))
        z_sum = z_sum * tl.exp((z_peak - new_z) * warmth) + tl.sum(tl.exp((zb - new_z) * warmth), 0)
        y_sum = y_sum * tl.exp((y_peak - new_y) * warmth) + tl.sum(tl.exp((yb - new_y) * warmth), 0)
        if CE:
            plain_sum = plain_sum * tl.exp(z_peak - new_z) + tl.sum(tl.exp(zb - new_z), 0)
        z_peak, y_peak = new_z, new_y
    z_log, y_log = tl.log(z_sum), tl.log(y_sum)

    back = 0.0
    if REVERSE:
        for start in range(0, vocab, BLOCK):
            inside = start + col < vocab
            zb = tl.load(z + start + col, mask=inside, other=0.0).to(tl.float32)
            yb = tl.load(y + start + col, mask=inside, other=0.0).to(tl.float32)
            logq, logp = (zb - z_peak) * warmth - z_log, (yb - y_peak) * warmth - y_log
            back += tl.sum(tl.where(inside, tl.exp(logq) * (logq - logp), 0.0), 0)

    total = reverse * back
    if CE:
        total += ce * (tl.log(plain_sum) + (z_peak - tl.load(z + t).to(tl.float32)))
    for start in range(0, vocab, BLOCK):
        inside = start + col < vocab
        zb = tl.load(z + start + col, mask=inside, other=0.0).to(tl.float32)
        yb = tl.load(y + start + col, mask=inside, other=0.0).to(tl.float32)
        logq, logp = (zb - z_peak) * warmth - z_log, (yb - y_peak) * warmth - y_log
        p, q, gap = tl.exp(logp), tl.exp(logq), logq - logp
        total -= forward * tl.sum(tl.where(inside, p * gap, 0.0), 0)
        grad = forward * (q - p)
        if REVERSE:
            grad += reverse * q * (gap - back)
        grad *= warmth
        if CE:
            grad += ce * (tl.exp(zb - z_peak) / plain_sum - tl.where(start + col == t, 1.0, 0.0))
        tl.store(z + start + col, grad.to(logits.dtype.element_ty), mask=inside)
    tl.store(loss + row, total)
