"""Few rows choose their experts, and what the experts computed is summed.

A slot is an expert that at least one row chose. The products of kernels/experts/expert_linear.py run over slots, so
that an expert's weight is read once for all rows that chose it. A slot has a place for every row, or, with `capacity`,
for so many of the rows that chose its expert; an expert that more rows chose has several slots. The number of slots is
fixed, so that a CUDA graph can hold the launches; slots that are not needed are empty.

Shapes: R rows, E experts, K chosen by each row, S slots, C places of a slot, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.kernels.runtime.operator import operator
from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2

MOST_ROWS = 16  # that one program routes; also of the products
COMBINE_BLOCK = 512
ROUTER_BLOCK = 256  # inputs at a time, of several rows


@dataclass(frozen=True)
class Routing:
    experts_S: Tensor  # int32: the expert of each slot, ascending; -1: an empty slot
    place_RK: Tensor  # int32: where each choice of a row is computed, slot * C + place in the slot
    weight_RK: Tensor  # fp32
    counts_S: Tensor | None = None  # int32: rows of a slot, and which they are; None: a slot has a place for every row
    members_SC: Tensor | None = None


def router_logits_ref(x_RD: Tensor, router_ED: Tensor, norm_D: Tensor | None = None, eps: float = 0.0) -> Tensor:
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    x = x_RD.to(wide)
    if norm_D is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_D.to(wide)
    return x @ router_ED.to(wide).mT


@operator(router_logits_ref)
def router_logits(x_RD: Tensor, router_ED: Tensor, norm_D: Tensor | None, eps: float) -> Tensor:
    """[norm] x through the router, in fp32 [R, E], for up to MOST_ROWS rows."""
    from shoestring.kernels.experts.route_triton import _router_logits_kernel

    (rows, width), num = x_RD.shape, len(router_ED)
    assert 0 < rows <= MOST_ROWS and x_RD.is_contiguous() and router_ED.is_contiguous()
    out_RE = torch.empty(rows, num, dtype=torch.float32, device=x_RD.device)
    block = min(next_power_of_2(width), ROUTER_BLOCK if rows > 1 else 1024)
    _router_logits_kernel[(num,)](
        x_RD, router_ED, norm_D, out_RE, eps, rows, num,
        WIDTH=width, ROWS=next_power_of_2(rows), BLOCK=block, **pdl_options(x_RD), num_warps=4,
    )  # fmt: skip
    return out_RE


def choose_experts(logits_RE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(weight, expert), each [R, K]: the largest of the softmax."""
    chance = logits_RE.softmax(-1, dtype=torch.promote_types(logits_RE.dtype, torch.float32))
    weight_RK, chosen_RK = chance.topk(top_k, dim=-1)
    if renormalize:
        weight_RK = weight_RK / weight_RK.sum(-1, keepdim=True)
    return weight_RK, chosen_RK


def num_slots(rows: int, num: int, top_k: int, capacity: int | None) -> int:
    """The most that are ever needed."""
    choices = rows * top_k
    if capacity is None or choices <= num:
        return min(num, choices)
    return num + (choices - num) // capacity  # a further slot of an expert takes `capacity` more choices


def route_ref(logits_RE: Tensor, top_k: int, renormalize: bool, capacity: int | None = None) -> Routing:
    rows, num = logits_RE.shape
    weight_RK, chosen_RK = choose_experts(logits_RE, top_k, renormalize)
    slots = num_slots(rows, num, top_k, capacity)
    experts_S = chosen_RK.new_full((slots,), -1, dtype=torch.int32)
    if capacity is None:
        used = chosen_RK.unique()
        experts_S[: len(used)] = used.int()
        row_R1 = torch.arange(rows, device=chosen_RK.device)[:, None]
        return Routing(experts_S, (torch.searchsorted(used, chosen_RK) * rows + row_R1).int(), weight_RK)
    place_RK = torch.zeros_like(chosen_RK, dtype=torch.int32)
    counts_S, members_SC = torch.zeros_like(experts_S), experts_S.new_zeros(slots, capacity)
    slot = 0
    for expert in chosen_RK.unique().tolist():
        chose, at = (chosen_RK == expert).nonzero(as_tuple=True)
        for first in range(0, len(chose), capacity):
            members = chose[first : first + capacity]
            experts_S[slot], counts_S[slot] = expert, len(members)
            members_SC[slot, : len(members)] = members.int()
            place = torch.arange(len(members), device=chose.device, dtype=torch.int32) + slot * capacity
            place_RK[members, at[first : first + capacity]] = place
            slot += 1
    return Routing(experts_S, place_RK, weight_RK, counts_S, members_SC)


@operator(route_ref)
def route(logits_RE: Tensor, top_k: int, renormalize: bool, capacity: int | None) -> Routing:
    """For up to MOST_ROWS rows. What a slot does not have is not written."""
    from shoestring.kernels.experts.route_triton import _route_kernel

    rows, num = logits_RE.shape
    assert 0 < rows <= MOST_ROWS and logits_RE.is_contiguous()
    slots, device = num_slots(rows, num, top_k, capacity), logits_RE.device
    experts_S = torch.empty(slots, dtype=torch.int32, device=device)
    place_RK = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    weight_RK = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    counts_S = None if capacity is None else torch.empty_like(experts_S)
    members_SC = None if capacity is None else experts_S.new_empty(slots, capacity)
    _route_kernel[(1,)](
        logits_RE, experts_S, place_RK, weight_RK, counts_S, members_SC, rows, num, slots,
        K=top_k, RENORMALIZE=renormalize, ROWS=next_power_of_2(rows), EXPERTS=next_power_of_2(num),
        SLOTS=next_power_of_2(slots), CHOICES=next_power_of_2(top_k), CAPACITY=capacity or 0, **pdl_options(logits_RE),
        num_warps=min(8, next_power_of_2(rows)),  # a row to a warp: its maximum needs no barrier
    )  # fmt: skip
    return Routing(experts_S, place_RK, weight_RK, counts_S, members_SC)


def combine_ref(residual_RD: Tensor, part_SCD: Tensor, routing: Routing) -> Tensor:
    wide = torch.promote_types(part_SCD.dtype, torch.float32)
    chosen_RKD = part_SCD.flatten(0, 1)[routing.place_RK.long()].to(wide)
    added_RD = (chosen_RKD * routing.weight_RK.to(wide)[..., None]).sum(1)
    return (residual_RD.to(wide) + added_RD).to(residual_RD.dtype)


@operator(combine_ref)
def combine(residual_RD: Tensor, part_SCD: Tensor, routing: Routing) -> Tensor:
    """residual + the sum over a row's choices of weight * part, in fp32, rounded once."""
    from shoestring.kernels.experts.route_triton import _combine_kernel

    rows, width = residual_RD.shape
    assert residual_RD.is_contiguous() and part_SCD.is_contiguous()
    out_RD = torch.empty_like(residual_RD)
    _combine_kernel[(rows, -(-width // COMBINE_BLOCK))](
        residual_RD, part_SCD, routing.place_RK, routing.weight_RK, out_RD, width,
        K=routing.place_RK.shape[1], BLOCK=COMBINE_BLOCK, **pdl_options(residual_RD), num_warps=4,
    )  # fmt: skip
    return out_RD
