"""How far a drafter's distribution q is from the target's p, per token. Pure.

Only the target's k likeliest tokens are known one by one, the rest as one mass. So both distributions are looked
at over k + 1 cells: the known tokens that the drafter can say, and everything else (`rest`). Over cells a
divergence is never larger than over tokens, and equal to it when k is the vocabulary.

    kl           sum p log(p / q)                                DistillSpec's and AdaSPEC's usual choice
    reverse_kl   sum q log(q / p)
    jsd          (KL(p || m) + KL(q || m)) / 2,  m = (p + q) / 2
    tvd          1 - a                                           total variation
    lk           -log a                                          "LK losses" (arXiv 2602.23881)
    lk_hybrid    w KL(p || q) + (1 - w)(1 - a),  w = exp(-3 a), w without gradient

with a = sum min(p, q), the chance that a guess drawn from q passes the token rule. Guesses in the rest count as
rejected: a is a lower bound that misses at most the rest's mass. The gradient of 1 - a vanishes where q has no
mass on p's tokens, which is why `tvd` alone fails from a cold start; 1/a in `lk` and the KL in `lk_hybrid` mend it.

`select_tokens` is AdaSPEC's choice of tokens by the difference to a reference drafter's loss.

Shapes: N tokens, K known tokens, V vocabulary, M tokens the drafter can say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError, suggest

ETA = 3.0  # of lk_hybrid, as published
LEAST = 1e-9  # probabilities below count as this in a logarithm


@dataclass(frozen=True)
class Cells:
    """Target and drafter over K + 1 cells, the last of which is the rest. Rows sum to 1."""

    p_NC: Tensor
    q_NC: Tensor
    logq_NC: Tensor

    @property
    def acceptance_N(self) -> Tensor:
        """sum min(p, q) over the known tokens."""
        return torch.minimum(self.p_NC[:, :-1], self.q_NC[:, :-1]).sum(-1)


def cells(
    logits_NM: Tensor, ids_NK: Tensor, logp_NK: Tensor, tail_logp_N: Tensor, place_V: Tensor | None = None
) -> Cells:
    """The drafter's logits beside the target's known tokens.

    `place_V[id]` is a token's column in the logits, -1 where the drafter cannot say it; None: columns are ids.
    Stored log-probabilities are rounded; they are scaled to a sum of 1 here.
    """
    logits = logits_NM if logits_NM.dtype == torch.float64 else logits_NM.float()
    column_NK = ids_NK if place_V is None else place_V[ids_NK]
    held_NK = column_NK >= 0
    known = torch.cat([logp_NK, tail_logp_N[:, None]], dim=1).to(logits.dtype)
    p_NC = known.softmax(-1)
    p_NK = p_NC[:, :-1] * held_NK
    p_rest_N = p_NC[:, -1] + (p_NC[:, :-1] * ~held_NK).sum(-1)
    logq_NK = logits.gather(1, column_NK.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    q_NK = logq_NK.exp() * held_NK
    q_rest_N = (1 - q_NK.sum(-1)).clamp(min=LEAST)
    return Cells(
        torch.cat([p_NK, p_rest_N[:, None]], dim=1),
        torch.cat([q_NK, q_rest_N[:, None]], dim=1),
        torch.cat([logq_NK.masked_fill(~held_NK, 0.0), q_rest_N.log()[:, None]], dim=1),
    )


def kl(c: Cells) -> Tensor:
    return (torch.xlogy(c.p_NC, c.p_NC) - c.p_NC * c.logq_NC).sum(-1)


def reverse_kl(c: Cells) -> Tensor:
    return (c.q_NC * (c.logq_NC - c.p_NC.clamp(min=LEAST).log())).sum(-1)


def jsd(c: Cells) -> Tensor:
    logm_NC = (0.5 * (c.p_NC + c.q_NC)).clamp(min=LEAST).log()
    from_p = (torch.xlogy(c.p_NC, c.p_NC) - c.p_NC * logm_NC).sum(-1)
    return 0.5 * (from_p + (c.q_NC * (c.logq_NC - logm_NC)).sum(-1))


def tvd(c: Cells) -> Tensor:
    return 1 - c.acceptance_N


def lk(c: Cells) -> Tensor:
    return -c.acceptance_N.clamp(min=LEAST).log()


def lk_hybrid(c: Cells) -> Tensor:
    a_N = c.acceptance_N
    w_N = torch.exp(-ETA * a_N.detach())
    return w_N * kl(c) + (1 - w_N) * (1 - a_N)


Loss = Callable[[Cells], Tensor]
LOSSES: dict[str, Loss] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}


def pick_loss(name: str) -> Loss:
    if name not in LOSSES:
        raise UserError(f"loss={name!r}: allowed are {', '.join(LOSSES)}.{suggest(name, list(LOSSES))}")
    return LOSSES[name]


def select_tokens(gap_N: Tensor, fraction: float) -> Tensor:
    """AdaSPEC: the tokens whose gap (drafter's loss - reference's loss) is at least its (1 - fraction) quantile.

    Equal to `gap >= torch.quantile(gap, 1 - fraction)`, ties at the threshold kept, for any number of tokens: an
    interpolated quantile lies above its lower neighbour, so the upper one decides.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction={fraction} of the tokens is not allowed; give more than 0 and at most 1")
    if gap_N.numel() == 0:
        return torch.zeros_like(gap_N, dtype=torch.bool)
    # 1e-9: 0.6 * 5 must not round up to 4.
    lowest = max(0, math.ceil((gap_N.numel() - 1) * (1 - fraction) - 1e-9))
    return gap_N >= gap_N.kthvalue(lowest + 1).values
