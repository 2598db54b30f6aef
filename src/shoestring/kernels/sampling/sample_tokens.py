"""Sampling of tokens: one per row, from logits, settings in tensors, and (seed, position).

A token is argmax(logits / temperature + Gumbel noise) over the tokens that top_k, top_p and min_p keep
(serve/engine/sampling.py defines them); temperature 0 takes the likeliest token. The noise is a hash of (seed,
position, index), so there is no state.

In torch this is a sort of all logits and some thirty passes over them in 64 bits; with many rows that takes longer than
all layers of a small model. The kernels read a row a few times instead:

    argmax     the largest logit of every piece of a row (kernels/gemv/embed_argmax.py)
    limit      with cuts: how far below the largest logit a kept one may be. top_p keeps the tokens with less than top_p
               of the mass above them, top_k those with fewer than k above them. Both grow with the distance, so the
               limit is found without a sort: two bits of it in every pass over the row
    best       the best of every piece of a row with its noise, then of all pieces

The mass is summed in another order than after a sort, so a token within a millionth of the edge of top_p may differ
from the reference. Everything else is equal. A CPU uses sample_tokens_cpu.py, which does less work.
A row with a NaN or without a finite largest logit gets NO_TOKEN (kernels/gemv/embed_argmax.py).

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.gemv.embed_argmax import NO_TOKEN, PIECE, finite_argmax, piece_argmax
from shoestring.kernels.runtime.triton_backend import next_power_of_2, triton_usable
from shoestring.kernels.sampling.noise import GOLDEN, MIX1, MIX2, gumbel_noise
from shoestring.kernels.sampling.sample_tokens_cpu import LEAST_VOCAB, row_threshold, sample_tokens_cpu_

PARAMETERS = ("temperature", "top_k", "top_p", "log_min_p")  # rows of `parameters_4R`, in fp64
SEARCH_BLOCK, SEARCH_WARPS = 8192, 16  # logits at a time while the limit is searched


def sample_tokens_ref_(
    logits_RV: Tensor,
    parameters_4R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    out_R: Tensor,
    *,
    cuts: bool,
    nonfinite: int = NO_TOKEN,
) -> None:
    logits = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    best_R = finite_argmax(logits, NO_TOKEN)
    temperature_R, _, top_p_R, log_min_p_R = parameters_4R.to(logits.dtype)
    greedy_R = temperature_R == 0
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled = scaled / torch.where(greedy_R, 1.0, temperature_R)[:, None]
    if cuts:
        threshold_R = logit_thresholds_ref(scaled, parameters_4R[1].long(), top_p_R, log_min_p_R)
        scaled = scaled.masked_fill(scaled < threshold_R[:, None], -torch.inf)
    noise = gumbel_noise(seed_R, position_R, torch.arange(logits.shape[-1], device=logits.device))
    token_R = torch.where(greedy_R, best_R, (scaled.double() + noise).argmax(dim=-1))
    out_R.copy_(torch.where(best_R == NO_TOKEN, nonfinite, token_R))


def sample_tokens_(
    logits_RV: Tensor,
    parameters_4R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    out_R: Tensor,
    *,
    cuts: bool,
    nonfinite: int = NO_TOKEN,
) -> None:
    """As sample_tokens_ref_; chooses the kernel. `cuts`: whether top_k, top_p or min_p of any row are on."""
    if not triton_usable(logits_RV) or not logits_RV.is_contiguous() or logits_RV.dtype == torch.float64:
        sample_tokens = sample_tokens_cpu_ if _by_row(logits_RV) else sample_tokens_ref_
        sample_tokens(logits_RV, parameters_4R, seed_R, position_R, out_R, cuts=cuts, nonfinite=nonfinite)
        return
    from shoestring.kernels.sampling.sample_tokens_triton import _best_sample_kernel, _limit_kernel, _piece_best_kernel

    num_rows, vocab = logits_RV.shape
    assert parameters_4R.dtype == torch.float64 and parameters_4R.shape == (len(PARAMETERS), num_rows)
    assert parameters_4R.is_contiguous() and seed_R.is_contiguous() and position_R.is_contiguous()
    assert seed_R.dtype == position_R.dtype == out_R.dtype == torch.int64 and out_R.is_contiguous()
    peaks, places = piece_argmax(logits_RV)
    num_pieces, device = peaks.shape[1], logits_RV.device
    pieces = {"num_pieces": num_pieces, "PIECES": next_power_of_2(num_pieces)}
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
    _best_sample_kernel[(num_rows,)](
        parameters_4R, peaks, places, best, best_at, out_R, **pieces, NONFINITE=nonfinite, num_warps=1
    )


def logit_thresholds(scaled_RV: Tensor, parameters_4R: Tensor) -> Tensor:
    """The smallest logit that every row keeps, [R]; the logits are divided by their temperature already."""
    _, top_k_R, top_p_R, log_min_p_R = parameters_4R
    if not _by_row(scaled_RV):
        return logit_thresholds_ref(scaled_RV, top_k_R.long(), top_p_R.to(scaled_RV), log_min_p_R.to(scaled_RV))
    settings = zip(top_k_R.tolist(), top_p_R.tolist(), log_min_p_R.tolist(), strict=True)
    rows = zip(scaled_RV, settings, strict=True)
    return torch.stack([row_threshold(row_V, int(k), p, log_min_p) for row_V, (k, p, log_min_p) in rows])


def _by_row(logits_RV: Tensor) -> bool:
    """Whether to use sample_tokens_cpu.py: on a GPU it would synchronize for every row."""
    return not logits_RV.is_cuda and logits_RV.shape[-1] >= LEAST_VOCAB


def logit_thresholds_ref(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, log_min_p_R: Tensor) -> Tensor:
    vocab = scaled_RV.shape[-1]
    ordered_RV = scaled_RV.sort(dim=-1, descending=True).values
    last_R1 = torch.where((top_k_R > 0) & (top_k_R < vocab), top_k_R, vocab)[:, None] - 1
    threshold_R1 = ordered_RV.gather(1, last_R1)
    ordered_RV = ordered_RV.masked_fill(ordered_RV < threshold_R1, -torch.inf)
    prob_RV = ordered_RV.softmax(dim=-1)
    kept_RV = (prob_RV.cumsum(dim=-1) - prob_RV < top_p_R[:, None]) & (ordered_RV > -torch.inf)
    nucleus_R = ordered_RV.masked_fill(~kept_RV, torch.inf).amin(dim=-1)
    threshold_R = torch.where(top_p_R < 1, torch.maximum(threshold_R1[:, 0], nucleus_R), threshold_R1[:, 0])
    return torch.maximum(threshold_R, ordered_RV[:, 0] + log_min_p_R)
