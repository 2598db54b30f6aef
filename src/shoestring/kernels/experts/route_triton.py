# mypy: disallow-untyped-defs=False
"""The kernels of kernels/experts/route.py: one program routes all rows; one program sums a piece of a row."""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-2.0)  # in place of a chance that was chosen; below that of experts that do not exist


@triton.jit
def _route_kernel(
    logits, experts, slot, weight, num_rows, num_experts, num_slots,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    CHOICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r, e, c = tl.arange(0, ROWS), tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    there = (r < num_rows)[:, None] & (e < num_experts)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    z = tl.load(logits + r[:, None] * num_experts + e[None, :], mask=there, other=float("-inf")).to(tl.float32)
    z = tl.where((r < num_rows)[:, None], z, 0.0)
    chance = tl.exp(z - tl.max(z, 1)[:, None])
    chance = tl.where(there, chance / tl.sum(chance, 1)[:, None], -1.0)
    weights = tl.zeros((ROWS, CHOICES), tl.float32)
    chosen = tl.zeros((ROWS, CHOICES), tl.int32)
    for k in tl.static_range(K):
        best, at = tl.max(chance, 1, return_indices=True)
        # Clamped: logits that are not numbers may choose any place.
        at = tl.minimum(at.to(tl.int32), num_experts - 1)
        weights = tl.where(c[None, :] == k, best[:, None], weights)
        chosen = tl.where(c[None, :] == k, at[:, None], chosen)
        chance = tl.where(e[None, :] == at[:, None], TAKEN, chance)
    used = tl.max((there & (chance == TAKEN)).to(tl.int32), 0)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 1)[:, None]
    rank = tl.cumsum(used, 0) - 1
    for k in tl.static_range(K):
        at = tl.sum(tl.where(c[None, :] == k, chosen, 0), 1)
        found = tl.sum(tl.where(e[None, :] == at[:, None], rank[None, :], 0), 1)
        tl.store(slot + r * K + k, found, mask=r < num_rows)
    tl.store(weight + r[:, None] * K + c[None, :], weights, mask=(r < num_rows)[:, None] & (c < K)[None, :])
    tl.store(experts + rank, e, mask=used > 0)
    s = tl.arange(0, SLOTS)
    tl.store(experts + s, -1, mask=(s >= tl.sum(used, 0)) & (s < num_slots))


@triton.jit
def _combine_kernel(
    residual, part, slot, weight, out, num_rows, width, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(residual + row * width + d, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        s = tl.load(slot + row * K + k).to(tl.int64)
        w = tl.load(weight + row * K + k)
        total += w * tl.load(part + (s * num_rows + row) * width + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=inside)
