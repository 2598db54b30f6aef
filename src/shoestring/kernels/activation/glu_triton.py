# mypy: disallow-untyped-defs=False
"""The kernels of glu.py, and the arithmetic of the gates in fp32, which 2:4 layers use too."""

import triton
import triton.language as tl

from shoestring.kernels.activation.gates import GATES

SILU = tl.constexpr(GATES["swiglu"])
GELU = tl.constexpr(GATES["geglu"])
GELU_TANH = tl.constexpr(GATES["geglu_tanh"])

ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TAU = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
CUBIC = tl.constexpr(0.044715)
# Always on the right of products: the interpreter makes a product that begins with a constexpr a constexpr.


@triton.jit
def _cdf(g):
    """Phi(g), the normal distribution."""
    return 0.5 * (1.0 + tl.math.erf(g * ROOT_HALF))


@triton.jit
def _tanh_cdf(g, square):
    """(1 + tanh z) / 2 = sigmoid(2 z), where z = sqrt(2 / pi) (g + 0.044715 g^3): no cancellation far below zero."""
    return 1.0 / (1.0 + tl.exp(g * -TWICE_ROOT * (1.0 + square * CUBIC)))


@triton.jit
def _square(g):
    """g^2, at most 1000, where the sigmoid is 0 or 1: its slope, 0, times infinity would be NaN."""
    return tl.minimum(g * g, 1000.0)


@triton.jit
def _activated(g, ACT: tl.constexpr):
    if ACT == SILU:
        out = g / (1.0 + tl.exp(-g))
    elif ACT == GELU:
        out = g * _cdf(g)
    else:
        tl.static_assert(ACT == GELU_TANH)
        out = g * _tanh_cdf(g, _square(g))
    return out


@triton.jit
def _glu_grads(g, u, d, ACT: tl.constexpr):
    """d act(g) u / dg and d act(g) u / du, times d."""
    if ACT == SILU:
        s = 1.0 / (1.0 + tl.exp(-g))
        dg, du = d * u * s * (1.0 + g * (1.0 - s)), d * g * s
    elif ACT == GELU:
        # gelu' = Phi + g phi
        p = _cdf(g)
        dg, du = d * u * (p + g * (tl.exp(g * g * -0.5) * ROOT_TAU)), d * g * p
    else:
        # (g s)' = s + g s (1 - s) (2 z)', where (2 z)' = 2 sqrt(2 / pi) (1 + 3 * 0.044715 g^2)
        tl.static_assert(ACT == GELU_TANH)
        square = _square(g)
        s = _tanh_cdf(g, square)
        dg = d * u * (s + g * s * (1.0 - s) * ((1.0 + square * (3.0 * CUBIC)) * TWICE_ROOT))
        du = d * g * s
    return dg, du


@triton.jit
def _glu_kernel(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr):
    """Rows of gate and up side by side."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(both + row * 2 * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * WIDTH + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    value = _activated(gate, ACT) * up
    tl.store(out + row * WIDTH + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _glu_pair_kernel(gate, up, out, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up as two contiguous tensors, in any order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, (_activated(g, ACT) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _glu_pair_grad_kernel(gate, up, dout, dgate, dup, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    g = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dout + i, mask=inside, other=0.0).to(tl.float32)
    dg, du = _glu_grads(g, u, d, ACT)
    tl.store(dgate + i, dg.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + i, du.to(dup.dtype.element_ty), mask=inside)
