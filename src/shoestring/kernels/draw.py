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
may fall to the other side. Everything else is equal to the reference.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.kernels.backend import triton_usable
from shoestring.kernels.step_ends import PIECE, piece_peaks

PARAMETERS = ("temperature", "top_k", "top_p", "log_min_p")  # rows of `parameters_4R`, in fp64
SEARCH_BLOCK, SEARCH_WARPS = 8192, 16  # logits at a time while the limit is searched
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


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
        floor_R1 = _floors(scaled, parameters_4R[1].long(), top_p_R, log_min_p_R)
        scaled = scaled.masked_fill(scaled < floor_R1, -torch.inf)
    noise = gumbel_noise_at(seed_R, position_R, logits.shape[-1])
    out_R.copy_(torch.where(greedy_R, best_R, (scaled.double() + noise).argmax(dim=-1)))


def draw_tokens_(
    logits_RV: Tensor, parameters_4R: Tensor, seed_R: Tensor, position_R: Tensor, out_R: Tensor, *, cuts: bool
) -> None:
    """As draw_tokens_ref_; chooses the kernel. `cuts`: whether top_k, top_p or min_p of any row are on."""
    if not triton_usable(logits_RV) or not logits_RV.is_contiguous() or logits_RV.dtype == torch.float64:
        draw_tokens_ref_(logits_RV, parameters_4R, seed_R, position_R, out_R, cuts=cuts)
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
        CUTS=cuts, GOLDEN=signed(_GOLDEN), MIX1=signed(_MIX1), MIX2=signed(_MIX2), BLOCK=PIECE, num_warps=8,
    )  # fmt: skip
    _best_drawn_kernel[(num_rows,)](parameters_4R, peaks, places, best, best_at, out_R, **pieces, num_warps=1)


def _floors(scaled_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, log_min_p_R: Tensor) -> Tensor:
    """The smallest logit that every row keeps, [R, 1]."""
    vocab = scaled_RV.shape[-1]
    ordered_RV = scaled_RV.sort(dim=-1, descending=True).values
    last_R1 = torch.where((top_k_R > 0) & (top_k_R < vocab), top_k_R, vocab)[:, None] - 1
    floor_R1 = ordered_RV.gather(1, last_R1)
    ordered_RV = ordered_RV.masked_fill(ordered_RV < floor_R1, -torch.inf)
    prob_RV = ordered_RV.softmax(dim=-1)
    kept_RV = (prob_RV.cumsum(dim=-1) - prob_RV < top_p_R[:, None]) & (ordered_RV > -torch.inf)
    nucleus_R1 = ordered_RV.masked_fill(~kept_RV, torch.inf).amin(dim=-1, keepdim=True)
    floor_R1 = torch.where(top_p_R[:, None] < 1, torch.maximum(floor_R1, nucleus_R1), floor_R1)
    return torch.maximum(floor_R1, ordered_RV[:, :1] + log_min_p_R[:, None])


# -- noise --------------------------------------------------------------------------------------------------


def gumbel_noise_at(seed_R: Tensor, position_R: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [R, V], fp64: entry (r, v) is a function of (seed, position, v).

    Row r is the output of a SplitMix64 generator whose state is a hash of (seed, position), read at counter v.
    """
    state_R = _mix(_mix(seed_R + signed(_GOLDEN)) ^ (position_R * signed(_MIX1)))
    counter_V = torch.arange(1, vocab + 1, device=seed_R.device) * signed(_GOLDEN)
    bits_RV = _mix(state_R[:, None] + counter_V)
    # 52 bits, centred: exact in fp64 and never 0 or 1, so both logarithms stay finite.
    uniform_RV = (_shift(bits_RV, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform_RV))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around as unsigned ones do."""
    x = (x ^ _shift(x, 30)) * signed(_MIX1)
    x = (x ^ _shift(x, 27)) * signed(_MIX2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; `>>` on int64 drags the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """The signed number of the same 64 bits."""
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x
