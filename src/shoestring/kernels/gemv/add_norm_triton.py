# mypy: disallow-untyped-defs=False
"""The kernel of kernels/gemv/add_norm.py: one program a row."""

import triton
import triton.language as tl


@triton.jit
def _add_norm_kernel(
    x, delta, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    scale_i = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row + i, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row + i, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    weighed = value * scale * scale_i
    tl.store(out + row + i, weighed.to(out.dtype.element_ty), mask=inside)
