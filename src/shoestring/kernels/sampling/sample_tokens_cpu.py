"""Sampling of tokens on a CPU, row by row, with little work for most of the vocabulary (see sample_tokens.py).

The logarithms of the noise and the sort of top_p are slow beside a step of a small model, and few tokens can win:

    noise      -log(-log u) <= -log(1 - u) <= a straight line through the exponent and the mantissa of 1 - u. Tokens
               whose bound is below the exact value of another need no logarithm
    top_p      the likeliest tokens are found without sorting the rest; mostly they hold the mass

Shapes: K tokens that may be sampled, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoestring.kernels.sampling.noise import gumbel, uniform_bits

LEAST_VOCAB = 4096  # below this, plain torch is faster
_FIRST = 256  # likeliest tokens that top_p tries first
_CLOSE = 0.5  # distance to the largest bound within which values are computed first
_SLACK = 1e-4  # far above the fp32 rounding error of a value that can win
_OCTAVE = 1 << 23  # from x to 2x, in float32 read as whole numbers
_OF_2_52 = (127 + 52) * _OCTAVE


def sample_tokens_cpu_(
    logits_RV: Tensor,
    parameters_4R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    out_R: Tensor,
    *,
    cuts: bool,
    nonfinite: int,
) -> None:
    for row, (temperature, top_k, top_p, log_min_p) in enumerate(parameters_4R.T.tolist()):
        row_V = logits_RV[row] if logits_RV.dtype == torch.float64 else logits_RV[row].float()
        peak = row_V.amax()  # NaN where there is one
        if not peak.isfinite():
            out_R[row] = nonfinite
            continue
        if temperature == 0:
            out_R[row] = row_V.max(dim=0).indices  # a third of the time of argmax
            continue
        scaled_V = (row_V - peak) / temperature
        index_K = None
        if cuts:
            index_K = (scaled_V >= row_threshold(scaled_V, int(top_k), top_p, log_min_p)).nonzero()[:, 0]
            scaled_V = scaled_V[index_K]
        own = slice(row, row + 1)
        out_R[row] = _winner(scaled_V, index_K, seed_R[own], position_R[own])


def _winner(scaled_K: Tensor, index_K: Tensor | None, seed_1: Tensor, position_1: Tensor) -> int:
    """The token with the best sum of logit and noise; `index_K` None: the whole vocabulary."""
    at_K = torch.arange(len(scaled_K)) if index_K is None else index_K
    bits_K = uniform_bits(seed_1, position_1, at_K)[0]
    most_K = scaled_K + _most_noise(bits_K)
    most = most_K.amax()

    def best(enough: Tensor) -> tuple[Tensor, Tensor]:
        """The best among those whose bound is at least `enough`."""
        near = (most_K >= enough).nonzero()[:, 0]
        value, place = (scaled_K[near].double() + gumbel(bits_K[near])).max(dim=0)
        return value, at_K[near[place]]

    value, token = best(most - _CLOSE)
    if value - _SLACK < most - _CLOSE:
        _, token = best(value - _SLACK)
    return int(token)


def _most_noise(bits: Tensor) -> Tensor:
    """An upper bound of gumbel(bits), fp32: -log(1 - u), with 1 - u half a step too small and the logarithm replaced by
    its chord between powers of 2, which lies below it."""
    rest = ((1 << 52) - 1 - bits).float()
    return (_OF_2_52 - rest.view(torch.int32)).float() * (math.log(2) / _OCTAVE)


def row_threshold(scaled_V: Tensor, top_k: int, top_p: float, log_min_p: float) -> Tensor:
    """The smallest logit that one row keeps."""
    threshold = scaled_V.amax() + log_min_p
    if 0 < top_k < len(scaled_V):
        likeliest = scaled_V.topk(top_k).values[-1]
        threshold = torch.maximum(threshold, likeliest)
        scaled_V = scaled_V.masked_fill(scaled_V < likeliest, -torch.inf)
    return torch.maximum(threshold, _nucleus(scaled_V, top_p)) if top_p < 1 else threshold


def _nucleus(scaled_V: Tensor, top_p: float) -> Tensor:
    """The smallest logit with less than top_p of the mass above it; the likeliest token is always kept."""
    vocab, num = len(scaled_V), _FIRST
    log_total = scaled_V.logsumexp(dim=0)
    while True:
        num = min(num, vocab)
        ordered = scaled_V.topk(num).values
        prob = (ordered - log_total).exp()
        kept = (prob.cumsum(dim=0) - prob < top_p) & (ordered > -torch.inf)
        if num == vocab or not kept.all():
            return ordered.masked_fill(~kept, torch.inf).amin()
        num *= 16
