"""Skip sets that need no search: AdaSkip's, early exit, evenly spaced layers.

AdaSkip (He et al. 2025), offline part. x is the residual stream before a sublayer, y after it; means over
tokens and windows of a calibration text:

    Sim_j = mean cos(x, y)        Scale_j = mean |y| / |x|        skip the sublayers with the largest Sim
    y_hat = Scale_j x             beta = the smallest Sim in the set (for policies.py, which adds FFNs)

An acceleration of alpha skips 2 (M - M / alpha) of the 2M sublayers, attention and FFN in one ranking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.methods.skipping.policies import AdaSkip
from shoestring.model.skip import Kind, SkipSet, StandIn, Sublayer, all_sublayers
from shoestring.model.transformer import Decoder


@dataclass(frozen=True)
class Idleness:
    """How little each sublayer changes the residual stream: means over a calibration text."""

    similarity: dict[Sublayer, float]  # mean cosine of the stream before and after
    ratio: dict[Sublayer, float]  # mean |after| / |before|


@torch.no_grad()
def measure_idleness(model: Decoder, tokens_NT: Tensor) -> Idleness:
    sums: dict[Sublayer, Tensor] = {}

    def watch(layer: int, kind: Kind, x: Tensor, y: Tensor) -> None:
        x, y = x.double(), y.double()
        ratio = y.norm(dim=-1) / x.norm(dim=-1)
        seen = torch.stack([F.cosine_similarity(x, y, dim=-1).mean(), ratio.mean()])
        sub = Sublayer(layer, kind)
        sums[sub] = sums[sub] + seen if sub in sums else seen

    for tokens_T in tokens_NT.to(model.device):
        model(tokens_T[None], rows=torch.tensor([0], device=tokens_T.device), watch=watch)
    means = {sub: (seen / len(tokens_NT)).tolist() for sub, seen in sums.items()}
    for sub, values in means.items():
        if not all(map(math.isfinite, values)):
            raise UserError(
                f"the stream before or behind layer {sub.layer}'s {sub.kind} is 0 or not finite on the calibration "
                "text; check the model's files, give another text, or compute in bf16 or fp32"
            )
    return Idleness({s: m[0] for s, m in means.items()}, {s: m[1] for s, m in means.items()})


def adaskip(idleness: Idleness, num_skipped: int) -> AdaSkip:
    """The set of the most similar sublayers, with the threshold of the online part."""
    ranked = sorted(idleness.similarity, key=lambda s: -idleness.similarity[s])
    chosen = ranked[: _check_num(num_skipped, len(ranked))]
    fixed = SkipSet({s: StandIn(torch.tensor([idleness.ratio[s]])) for s in chosen}, name="adaskip")
    beta = min(idleness.similarity[s] for s in chosen)
    layers = range(len(ranked) // 2)
    return AdaSkip(fixed, beta, tuple(idleness.ratio[Sublayer(layer, "mlp")] for layer in layers))


def num_for_alpha(num_layers: int, alpha: float) -> int:
    """The number of sublayers that AdaSkip skips for an acceleration of alpha: 2 (M - M / alpha)."""
    return max(1, round(2 * (num_layers - num_layers / alpha)))


# -- baselines -----------------------------------------------------------------------------------------------


def early_exit(num_layers: int, num_skipped: int) -> SkipSet:
    """The last sublayers, without stand-ins."""
    num = _check_num(num_skipped, 2 * num_layers)
    return SkipSet(all_sublayers(num_layers)[2 * num_layers - num :], name="early exit")


def unified(num_layers: int, num_skipped: int) -> SkipSet:
    """Evenly spaced whole layers (one half layer where the number is odd), without stand-ins."""
    num = _check_num(num_skipped, 2 * num_layers)
    count = -(-num // 2)
    layers = [int((i + 0.5) * num_layers / count) for i in range(count)]
    return SkipSet([Sublayer(layer, kind) for layer in layers for kind in ("attn", "mlp")][:num], name="unified")


def _check_num(num_skipped: int, num_sublayers: int) -> int:
    if not 1 <= num_skipped < num_sublayers:
        raise UserError(f"{num_skipped} of {num_sublayers} sublayers cannot be skipped; give 1 to {num_sublayers - 1}")
    return num_skipped
