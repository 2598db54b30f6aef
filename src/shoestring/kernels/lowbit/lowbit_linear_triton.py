# mypy: disallow-untyped-defs=False
"""The kernel of kernels/lowbit/lowbit_linear.py that reads a Format's stored parts as they are.

Eight codes of b bits are b bytes. A block loads each byte once per code in it: more arithmetic than with the CUDA
kernels' layout, but only Triton is needed.
"""

import triton
import triton.language as tl


@triton.jit
def _lowbit_parts_kernel(
    x, codes, scale, zero, table, bias, y, M, N, K, GROUPS, x_pitch, code_pitch,
    GROUP: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y[M, N] = x[M, K] @ decode(codes)[N, K]^T; BR runs of eight codes at a time."""
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    for run0 in range(0, K // 8, BR):
        run = run0 + tl.arange(0, BR)
        inside = (n[:, None] < N) & (run[None, :] < K // 8)
        group = n[:, None].to(tl.int64) * GROUPS + run[None, :] * 8 // GROUP
        up = tl.load(scale + group * SCALES, mask=inside, other=0.0).to(tl.float32)
        if TABLE:
            down = tl.load(scale + group * SCALES + (SCALES - 1), mask=inside, other=0.0).to(tl.float32)
        else:
            down = tl.load(zero + group, mask=inside, other=0).to(tl.float32)
        byte0 = codes + n[:, None].to(tl.int64) * code_pitch + run[None, :] * BITS
        for i in tl.static_range(8):
            # Written out: a name that is a constexpr cannot be assigned again in the next round.
            byte = tl.load(byte0 + i * BITS // 8, mask=inside, other=0).to(tl.int32)
            if i * BITS % 8 + BITS > 8:
                byte = byte | (tl.load(byte0 + i * BITS // 8 + 1, mask=inside, other=0).to(tl.int32) << 8)
            code = (byte >> (i * BITS % 8)) & ((1 << BITS) - 1)
            if TABLE:
                level = tl.load(table + code)
                w = level * tl.where(level > 0, up, down)
            else:
                w = (code.to(tl.float32) - down) * up
            x_at = x + m[None, :] * x_pitch + (run[:, None] * 8 + i)
            xi = tl.load(x_at, mask=(m[None, :] < M) & (run[:, None] < K // 8), other=0.0)
            acc += tl.dot(w.to(xi.dtype), xi, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    y_at = y + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))
