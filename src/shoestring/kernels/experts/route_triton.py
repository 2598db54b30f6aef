# mypy: disallow-untyped-defs=False
"""The kernels of kernels/experts/route.py: a program computes one expert's logits, routes all rows, or sums a piece of
a row."""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-2.0)  # in place of a chance that was chosen; below that of experts that do not exist


@triton.jit
def _router_logits_kernel(
    x, weight, norm, out, eps, num_rows, num_experts,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    e, r, k = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    w_at, x_at = weight + e * WIDTH + k, x + r[:, None] * WIDTH + k[None, :]
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(w_at, mask=k < WIDTH, other=0.0).to(tl.float32)  # which no kernel before writes
    if norm is not None:
        w *= tl.load(norm + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, WIDTH, BLOCK):
        inside = start + k < WIDTH
        ahead = start + BLOCK + k < WIDTH
        next_w = tl.load(w_at + start + BLOCK, mask=ahead, other=0.0).to(tl.float32)
        if norm is not None:
            next_w *= tl.load(norm + start + BLOCK + k, mask=ahead, other=0.0).to(tl.float32)
        x_k = tl.load(x_at + start, mask=(r < num_rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        acc += x_k * w[None, :]
        squares += x_k * x_k
        w = next_w
    z = tl.sum(acc, 1)
    if norm is not None:
        z *= 1.0 / tl.sqrt(tl.sum(squares, 1) / WIDTH + eps)
    tl.store(out + r * num_experts + e, z, mask=r < num_rows)


@triton.jit
def _route_kernel(
    logits, experts, place, weight, counts, members, num_rows, num_experts, num_slots,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    CHOICES: tl.constexpr, CAPACITY: tl.constexpr, PDL: tl.constexpr,
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
    taken = there & (chance == TAKEN)
    chose = taken.to(tl.int32)
    if CAPACITY:
        before = tl.cumsum(chose, 0) - chose  # rows that chose the same expert
        count = tl.sum(chose, 0)
        num = (count + CAPACITY - 1) // CAPACITY
        slot = (tl.cumsum(num, 0) - num)[None, :] + before // CAPACITY
        at_place = slot * CAPACITY + before % CAPACITY
        first = taken & (before % CAPACITY == 0)
        tl.store(experts + slot, e[None, :] + tl.zeros_like(slot), mask=first)
        tl.store(counts + slot, tl.minimum(count[None, :] - before, CAPACITY), mask=first)
        tl.store(members + at_place, r[:, None] + tl.zeros_like(slot), mask=taken)
    else:
        num = tl.max(chose, 0)
        slot_of = tl.cumsum(num, 0) - num
        at_place = slot_of[None, :] * num_rows + r[:, None]
        tl.store(experts + slot_of, e, mask=num > 0)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 1)[:, None]
    for k in tl.static_range(K):
        at = tl.sum(tl.where(c[None, :] == k, chosen, 0), 1)
        found = tl.sum(tl.where(e[None, :] == at[:, None], at_place, 0), 1)
        tl.store(place + r * K + k, found, mask=r < num_rows)
    tl.store(weight + r[:, None] * K + c[None, :], weights, mask=(r < num_rows)[:, None] & (c < K)[None, :])
    s = tl.arange(0, SLOTS)
    tl.store(experts + s, -1, mask=(s >= tl.sum(num, 0)) & (s < num_slots))


@triton.jit
def _combine_kernel(residual, part, place, weight, out, width, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(residual + row * width + d, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        at = tl.load(place + row * K + k).to(tl.int64)
        w = tl.load(weight + row * K + k)
        total += w * tl.load(part + at * width + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + d, total.to(out.dtype.element_ty), mask=inside)
