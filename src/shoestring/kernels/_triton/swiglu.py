"""The kernel of kernels/swiglu.py."""

import triton
import triton.language as tl


@triton.jit
def _swiglu_kernel(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + i, value.to(out.dtype.element_ty), mask=inside)
