"""Drawing tokens: one a row, from logits, settings that lie in tensors, and (seed, position).

A token is argmax(logits / temperature + Gumbel noise) over the tokens that top_k, top_p and min_p leave, as
serve/sampling.py tells; a row whose temperature is 0 takes its likeliest token. The noise is a hash of (seed,
position, index), so nothing here has a state.

In torch that is a sort of all logits and some thirty passes over them in 64 bits; with many rows it takes longer than
all layers of a small model. The kernels read a row a few times instead:

    peak       the largest logit of every piece of a row (those of step_ends.py)
    limit      where cuts are on: how far below the largest logit one may lie. The tokens that top_p leaves are those
               above which lies less than top_p of the mass, those of top_k have fewer than k above them. Both grow with
               the distance, so the limit is found without a sort: two bits of it in every pass over the row
    best       the best of every piece of a row with its noise, then of all pieces

The mass is summed in another order than after a sort, so a token that lies at the very edge of top_p, to a millionth,
may fall to the other side. Everything else is equal to the reference. On a CPU draw_host.py does less instead.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.backend import triton_usable
from shoestring.kernels.draw_host import LEAST_VOCAB, draw_tokens_host_, row_floor
from shoestring.kernels.noise import GOLDEN, MIX1, MIX2, gumbel_noise
from shoestring.kernels.step_ends import PIECE, piece_peaks

PARAMETERS = ("temperature", "top_k", "top_p", "log_min_p")  # rows of `parameters_4R`, in fp64
SEARCH_BLOCK, SEARCH_WARPS = 8192, 16  # logits at a time while the limit is searched


def draw_tokens_ref_(
    logits_RV: Tensor, parameters_4R: Tensor, seed_R: Tensor, position_R: Tensor, out_R: Tensor, *, cuts: bool
) -> None:
    logits = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    best_R = logits.argmax(dim=-1)
    heat_R, _, top_p_R, log_min_p_R = parameters_4R.to(logits.dtype)
    greedy_R = heat_R == 0
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled = scaled / torch.where(greedy_R, 1.0, heat_R)[:, None]
    if cuts:
        floor_R = floors_ref(scaled, parameters_4R[1].long(), top_p_R, log_min_p_R)
        scaled = scaled.masked_fill(scaled < floor_R[:, None], -torch.inf)
    noise = gumbel_noise(seed_R, position_R, torch.arange(logits.shape[-1], device=logits.device))
    out_R.copy_(torch.where(greedy_R, best_R, (scaled.double() + noise).argmax(dim=-1)))


def draw_tokens_(
    logits_RV: Tensor, parameters_4R: Tensor, seed_R: Tensor, position_R: Tensor, out_R: Tensor, *, cuts: bool
) -> None:
    """As draw_tokens_ref_; chooses the kernel. `cuts`: whether top_k, top_p or min_p of any row are on."""
    if not triton_usable(logits_RV) or not logits_RV.is_contiguous() or logits_RV.dtype == torch.float64:
        draw_tokens = draw_tokens_host_ if _by_row(logits_RV) else draw_tokens_ref_
        draw_tokens(logits_RV, parameters_4R, seed_R, position_R, out_R, cuts=cuts)
        return
    from shoestring.kernels._triton.draw import _best_drawn_kernel, _limit_kernel, _piece_best_kernel

    num_rows, vocab = logits_RV.shape
    assert parameters_4R.dtype == torch.float64 and parameters_4R.shape == (len(PARAMETERS), num_rows)
    assert parameters_4R.is_contiguous() and seed_R.is_contiguous() and position_R.is_contiguous()
    assert seed_R.dtype == position_R.dtype == out_R.dtype == torch.int64 and out_R.is_contiguous()
    peaks, places = piece_peaks(logits_RV)
    num_pieces, device = peaks.shape[1], logits_RV.device
    pieces = {"num_pieces": num_pieces, "PIECES": 1 << (num_pieces - 1).bit_length()}
    limits = torch.empty(num_rows if cuts else 0, dtype=torch.int32, device=device)
    if cuts:
        _limit_kernel[(num_rows,)](
            logits_RV,
            peaks,
            parameters_4R,
            limits,
            num_rows,
            vocab,
            **pieces,
            BLOCK=SEARCH_BLOCK,
            num_warps=SEARCH_WARPS,
        )
    best = torch.empty(num_rows, num_pieces, dtype=torch.float64, device=device)
    best_at = torch.empty(num_rows, num_pieces, dtype=torch.int32, device=device)
    _piece_best_kernel[(num_rows, num_pieces)](
        logits_RV, peaks, parameters_4R, limits, seed_R, position_R, best, best_at, num_rows, vocab, **pieces,
        CUTS=cuts, GOLDEN=GOLDEN, MIX1=MIX1, MIX2=MIX2, BLOCK=PIECE, num_warps=8,
    )  # fmt: skip
    _best_drawn_kernel[(num_rows,)](parameters_4R, peaks, places, best, best_at, out_R, **pieces, num_warps=1)


def floors(scaled_RV: Tensor, parameters_4R: Tensor) -> Tensor:
    """The smallest logit that every row keeps, [R]: of logits that are divided by their temperature."""
    _, top_k_R, top_p_R, log_min_p_R = parameters_4R
    if not _by_row(scaled_RV):
        return floors_ref(scaled_RV, top_k_R.long(), top_p_R.to(scaled_RV), log_min_p_R.to(scaled_RV))
    settings = zip(top_k_R.tolist(), top_p_R.tolist(), log_min_p_R.tolist(), strict=True)
    rows = zip(scaled_RV, settings, strict=True)
    return torch.stack([row_floor(row_V, int(k), p, log_min_p) for row_V, (k, p, log_min_p) in rows])


def _by_row(logits_RV: Tensor) -> bool:
    """Whether draw_host.py is quicker; on a GPU it would wait for every row."""
    return not logits_RV.is_cuda and logits_RV.shape[-1] >= LEAST_VOCAB


def floors_ref(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, log_min_p_R: Tensor) -> Tensor:
    vocab = scaled_RV.shape[-1]
    ordered_RV = scaled_RV.sort(dim=-1, descending=True).values
    last_R1 = torch.where((top_k_R > 0) & (top_k_R < vocab), top_k_R, vocab)[:, None] - 1
    floor_R1 = ordered_RV.gather(1, last_R1)
    ordered_RV = ordered_RV.masked_fill(ordered_RV < floor_R1, -torch.inf)
    prob_RV = ordered_RV.softmax(dim=-1)
    kept_RV = (prob_RV.cumsum(dim=-1) - prob_RV < top_p_R[:, None]) & (ordered_RV > -torch.inf)
    nucleus_R = ordered_RV.masked_fill(~kept_RV, torch.inf).amin(dim=-1)
    floor_R = torch.where(top_p_R < 1, torch.maximum(floor_R1[:, 0], nucleus_R), floor_R1[:, 0])
    return torch.maximum(floor_R, ordered_RV[:, 0] + log_min_p_R)
