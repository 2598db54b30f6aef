"""Few rows choose their experts, and what the experts computed is summed.

A slot is an expert that at least one row chose. The products of kernels/experts/expert_linear.py run over slots, so
that an expert's weight is read once for all rows that chose it. The number of slots is fixed, min(E, R K), so that a
CUDA graph can hold the launches; slots that are not needed are empty.

Shapes: R rows, E experts, K chosen by each row, S slots, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.kernels.runtime.pdl import pdl_options
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable

MOST_ROWS = 16  # that one program routes; also of the products
COMBINE_BLOCK = 512


@dataclass(frozen=True)
class Routing:
    experts_S: Tensor  # int32: the expert of each slot, ascending; -1: an empty slot
    slot_RK: Tensor  # int32: where each choice of a row is computed
    weight_RK: Tensor  # fp32


def choose_experts(logits_RE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(weight, expert), each [R, K]: the largest of the softmax."""
    chance = logits_RE.softmax(-1, dtype=torch.promote_types(logits_RE.dtype, torch.float32))
    weight_RK, chosen_RK = chance.topk(top_k, dim=-1)
    if renormalize:
        weight_RK = weight_RK / weight_RK.sum(-1, keepdim=True)
    return weight_RK, chosen_RK


def route_ref(logits_RE: Tensor, top_k: int, renormalize: bool) -> Routing:
    rows, num = logits_RE.shape
    weight_RK, chosen_RK = choose_experts(logits_RE, top_k, renormalize)
    used = chosen_RK.unique()
    experts_S = used.new_full((min(num, rows * top_k),), -1, dtype=torch.int32)
    experts_S[: len(used)] = used.int()
    return Routing(experts_S, torch.searchsorted(used, chosen_RK).int(), weight_RK)


def route(logits_RE: Tensor, top_k: int, renormalize: bool) -> Routing:
    """As route_ref, for up to MOST_ROWS rows; chooses the kernel."""
    if not triton_usable(logits_RE):
        return route_ref(logits_RE, top_k, renormalize)
    from shoestring.kernels.experts.route_triton import _route_kernel

    rows, num = logits_RE.shape
    assert 0 < rows <= MOST_ROWS and logits_RE.is_contiguous()
    slots, device = min(num, rows * top_k), logits_RE.device
    experts_S = torch.empty(slots, dtype=torch.int32, device=device)
    slot_RK = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    weight_RK = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    _route_kernel[(1,)](
        logits_RE, experts_S, slot_RK, weight_RK, rows, num, slots,
        K=top_k, RENORMALIZE=renormalize, ROWS=next_power_of_2(rows), EXPERTS=next_power_of_2(num),
        SLOTS=next_power_of_2(slots), CHOICES=next_power_of_2(top_k), **pdl_options(logits_RE),
        num_warps=min(8, next_power_of_2(rows)),  # a row to a warp: its maximum needs no barrier
    )  # fmt: skip
    return Routing(experts_S, slot_RK, weight_RK)


def combine_ref(residual_RD: Tensor, part_SRD: Tensor, routing: Routing) -> Tensor:
    wide = torch.promote_types(part_SRD.dtype, torch.float32)
    rows_R1 = torch.arange(len(residual_RD), device=residual_RD.device)[:, None]
    chosen_RKD = part_SRD[routing.slot_RK.long(), rows_R1].to(wide)
    added_RD = (chosen_RKD * routing.weight_RK.to(wide)[..., None]).sum(1)
    return (residual_RD.to(wide) + added_RD).to(residual_RD.dtype)


def combine(residual_RD: Tensor, part_SRD: Tensor, routing: Routing) -> Tensor:
    """residual + the sum over a row's choices of weight * part, in fp32, rounded once; chooses the kernel."""
    if not triton_usable(residual_RD):
        return combine_ref(residual_RD, part_SRD, routing)
    from shoestring.kernels.experts.route_triton import _combine_kernel

    rows, width = residual_RD.shape
    assert residual_RD.is_contiguous() and part_SRD.is_contiguous()
    out_RD = torch.empty_like(residual_RD)
    _combine_kernel[(rows, -(-width // COMBINE_BLOCK))](
        residual_RD, part_SRD, routing.slot_RK, routing.weight_RK, out_RD, rows, width,
        K=routing.slot_RK.shape[1], BLOCK=COMBINE_BLOCK, **pdl_options(residual_RD), num_warps=4,
    )  # fmt: skip
    return out_RD
