"""Objectives that train a drafter: distil the target's predictions on a text into a small model.

`DraftDistill`  any loss below over the target's top-k, cached or computed on the spot. With a `Selection` it is
                AdaSPEC: only the tokens count on which the drafter is furthest behind a reference drafter that was
                trained on all of them. The sum is still divided by all counted tokens.
`OnPolicy`      DistillSpec on the drafter's own text: a share of the micro-batches is cut to a prompt, continued by the
                drafter, and scored by the target. The sampled tokens carry no gradient. The other micro-batches go to
                another objective unchanged.

`scores(micro)` gives the target's TopK of every position: `cache.lookup` of a TeacherCache, or `LiveScores`.
A trimmed vocabulary (`vocab_ids`) trains the head's rows of those tokens only; the embedding keeps all of them.
AdaSPEC runs the head twice: without gradients for the losses that select, then over the selected rows only. Its
threshold is that of a micro-batch, as published, and noisy with a few dozen tokens.

The losses measure how far the drafter's distribution q is from the target's p, per token. Only the target's k likeliest
tokens are known one by one, so both are compared over k + 1 cells: the known tokens that the drafter has, and all
others (`rest`). A divergence over cells is at most the one over tokens, and equal to it when k is the vocabulary.

    kl           sum p log(p / q)                                DistillSpec's and AdaSPEC's usual choice
    reverse_kl   sum q log(q / p)
    jsd          (KL(p || m) + KL(q || m)) / 2,  m = (p + q) / 2
    tvd          1 - a                                           total variation
    lk           -log a                                          "LK losses" (arXiv 2602.23881)
    lk_hybrid    w KL(p || q) + (1 - w)(1 - a),  w = exp(-3 a), w without gradient

with a = sum min(p, q), the chance that a draft sampled from q passes the token rule. Drafts in the rest count as
rejected: a is a lower bound that misses at most the rest's mass. The gradient of 1 - a vanishes where q has no mass on
p's tokens, so `tvd` alone fails from a cold start; 1/a in `lk` and the KL in `lk_hybrid` fix that.

Shapes: N tokens, K known tokens, V vocabulary, M tokens the drafter has.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shoestring.errors import UserError, suggest
from shoestring.model.transformer import Head
from shoestring.train.objectives import chunked_head, default_chunk
from shoestring.train.step import IGNORED, Micro, Objective
from shoestring.train.teacher_cache import TopK

Scores = Callable[[Micro], TopK]
# (drafter, prompts [B, P], new tokens, seed) -> [B, P + new]
Generate = Callable[[nn.Module, Tensor, int, int], Tensor]

ETA = 3.0  # of lk_hybrid, as published
LEAST = 1e-9  # probabilities below count as this in a logarithm


# -- losses --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cells:
    """Target and drafter over K + 1 cells, the last of them the rest. Rows sum to 1."""

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

    `place_V[id]` is a token's column in the logits, -1 where the drafter does not have it; None: columns are ids.
    Stored log-probabilities are rounded, so they are normalised again.
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
LOSSES: dict[str, Loss] = {"kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tvd": tvd, "lk": lk, "lk_hybrid": lk_hybrid}


def pick_loss(name: str) -> Loss:
    if name not in LOSSES:
        raise UserError(f"loss={name!r}: allowed are {', '.join(LOSSES)}.{suggest(name, list(LOSSES))}")
    return LOSSES[name]


def select_tokens(gap_N: Tensor, fraction: float) -> Tensor:
    """AdaSPEC: the tokens whose gap (drafter's loss - reference's loss) is at least its (1 - fraction) quantile.

    Equal to `gap >= torch.quantile(gap, 1 - fraction)`, which is limited to 16M tokens: an interpolated quantile lies
    above its lower neighbour, so the upper neighbour is the threshold. Ties are kept.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction={fraction} of the tokens is not allowed; give more than 0 and at most 1")
    if gap_N.numel() == 0:
        return torch.zeros_like(gap_N, dtype=torch.bool)
    # 1e-9: 0.6 * 5 must not round up to 4.
    lowest = max(0, math.ceil((gap_N.numel() - 1) * (1 - fraction) - 1e-9))
    return gap_N >= gap_N.kthvalue(lowest + 1).values


# -- objectives ----------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """The target's predictions of N counted tokens."""

    ids_NK: Tensor
    logp_NK: Tensor
    tail_logp_N: Tensor


@dataclass(frozen=True)
class Selection:
    """AdaSPEC's filter: `fraction` of the counted tokens, by how far the drafter is behind `reference(micro)`."""

    reference: Callable[[Micro], Tensor]  # [B, T]: the reference's KL, from a ScalarCache
    fraction: float = 0.4


class DraftDistill(Objective):
    def __init__(
        self,
        scores: Scores,
        loss: str = "kl",
        *,
        vocab_ids: Sequence[int] | None = None,
        selection: Selection | None = None,
        chunk: int = 0,
    ) -> None:
        self.scores, self.loss, self.selection, self.chunk = scores, pick_loss(loss), selection, chunk
        self.vocab_ids = None if vocab_ids is None else torch.tensor(sorted(vocab_ids))

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        if micro.num_counted == 0:
            return model(micro.tokens_BT, readout=lambda hidden, head: hidden.float().sum() * 0)
        return model(micro.tokens_BT, readout=lambda hidden, head: self._readout(hidden, head, micro))

    def _readout(self, hidden_BTD: Tensor, head: Head, micro: Micro) -> Tensor:
        head, place_V = self._trim(head)
        counted, known = self._known(micro)
        hidden_ND = hidden_BTD[counted]
        if self.selection is not None:
            ours_N = token_losses(hidden_ND.detach(), head, known, kl, place_V, self.chunk)
            gap_N = ours_N - self.selection.reference(micro).to(ours_N.device)[counted]
            chosen_N = select_tokens(gap_N, self.selection.fraction)
            hidden_ND, known = hidden_ND[chosen_N], Known(*(t[chosen_N] for t in known))

        def chunk_loss(logits: Tensor, lo: int, hi: int) -> tuple[Tensor, Tensor]:
            # chunked_head runs without autograd and takes the gradient of each chunk from here.
            with torch.enable_grad():
                z = logits.detach().float().requires_grad_()
                value = self.loss(_cells(z, known, lo, hi, place_V)).sum()
                (grad,) = torch.autograd.grad(value, z)
            return value.detach(), grad.to(logits.dtype)

        return chunked_head(hidden_ND[None], head, chunk_loss, self.chunk)

    @torch.no_grad()
    def losses(self, model: nn.Module, micro: Micro, loss: str = "kl") -> Tensor:
        """[B, T] losses of a drafter, 0 where a token does not count: what Selection.reference returns."""
        found_BT = torch.zeros(micro.targets_BT.shape, device=micro.targets_BT.device)

        def readout(hidden_BTD: Tensor, head: Head) -> Tensor:
            head, place_V = self._trim(head)
            counted, known = self._known(micro)
            found_BT[counted] = token_losses(hidden_BTD[counted], head, known, pick_loss(loss), place_V, self.chunk)
            return found_BT

        return model(micro.tokens_BT, readout=readout)

    def _known(self, micro: Micro) -> tuple[Tensor, Known]:
        counted = micro.targets_BT != IGNORED
        top = self.scores(micro)
        parts = (t.to(counted.device)[counted] for t in (top.ids_BTk, top.logp_BTk, top.tail_logp_BT))
        return counted, Known(*parts)

    def _trim(self, head: Head) -> tuple[Head, Tensor | None]:
        """The head's rows of the drafter's tokens, and the row of each token (-1: none)."""
        if head.group is not None:
            raise UserError("a drafter cannot be trained tensor-parallel; leave mesh.tp at 1")
        if self.vocab_ids is None:
            return head, None
        ids_M = self.vocab_ids.to(head.weight_VD.device)
        place_V = torch.full((head.weight_VD.shape[0],), -1, device=ids_M.device)
        place_V[ids_M] = torch.arange(len(ids_M), device=ids_M.device)
        return head._replace(weight_VD=head.weight_VD[ids_M]), place_V


def _cells(z: Tensor, known: Known, lo: int, hi: int, place_V: Tensor | None) -> Cells:
    return cells(z, known.ids_NK[lo:hi], known.logp_NK[lo:hi], known.tail_logp_N[lo:hi], place_V)


@torch.no_grad()
def token_losses(
    hidden_ND: Tensor, head: Head, known: Known, loss: Loss, place_V: Tensor | None = None, chunk: int = 0
) -> Tensor:
    """Loss of every token [N], without gradients and without all logits at once."""
    head = head.to(hidden_ND.dtype)
    chunk = chunk or default_chunk(max(1, len(hidden_ND)), head.weight_VD.shape[0], hidden_ND.element_size())
    parts = [
        loss(_cells(head.logits(hidden_ND[lo : lo + chunk]), known, lo, lo + chunk, place_V))
        for lo in range(0, len(hidden_ND), chunk)
    ]
    return torch.cat(parts) if parts else hidden_ND.new_zeros(0, dtype=torch.float32)


# -- live scores ---------------------------------------------------------------------------------------------


class LiveScores:
    """The target's top-k of a micro-batch, computed on the spot."""

    def __init__(self, target: nn.Module, k: int = 64) -> None:
        self.target, self.k = target.eval(), k

    @torch.no_grad()
    def __call__(self, micro: Micro) -> TopK:
        parts: list[tuple[Tensor, Tensor, Tensor]] = []

        def readout(hidden_BTD: Tensor, head: Head) -> Tensor:
            hidden_ND = hidden_BTD.flatten(0, 1)
            head = head.to(hidden_ND.dtype)
            rows = default_chunk(len(hidden_ND), head.weight_VD.shape[0], 4)
            for part in hidden_ND.split(rows):
                logp = head.logits(part).float().log_softmax(-1)
                top = logp.topk(min(self.k, logp.shape[1]), dim=-1)
                tail = torch.log1p(-top.values.exp().sum(-1).clamp(max=1 - 1e-7))
                parts.append((top.indices, top.values, tail))
            return hidden_BTD.new_zeros(())

        self.target(micro.tokens_BT, readout=readout)
        ids, logp, tail = (torch.cat(p).unflatten(0, micro.tokens_BT.shape) for p in zip(*parts, strict=True))
        return TopK(ids, logp, tail)


# -- on the drafter's own text ------------------------------------------------------------------------------


class OnPolicy(Objective):
    def __init__(
        self,
        generate: Generate,
        own: DraftDistill,
        other: DraftDistill,
        *,
        share: float = 0.5,
        num_new: int = 64,
        seed: int = 0,
    ) -> None:
        """`own` is the objective on the drafter's text (with LiveScores), `other` that on unchanged micro-batches. The
        choice is a function of the rows and the seed, so that a resumed run repeats it."""
        if not 0 < share <= 1 or num_new < 1:
            raise UserError(f"share={share} must be in (0, 1] and num_new={num_new} at least 1")
        self.generate, self.own, self.other = generate, own, other
        self.share, self.num_new, self.seed = share, num_new, seed
        self._keys = WeakTensorKeyDictionary()  # by index_BT: reading numbers waits for the device

    def count(self, micro: Micro) -> int:
        return self.written(micro) * micro.tokens_BT.shape[0] or self.other.count(micro)

    def written(self, micro: Micro) -> int:
        """New tokens per row that the drafter generates for this micro-batch; 0: none."""
        draw = self._key(micro) / 2**64
        return min(self.num_new, micro.tokens_BT.shape[1] - 1) if draw < self.share else 0

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        num_new = self.written(micro)
        if not num_new:
            return self.other(model, micro)
        prompt_BP = micro.tokens_BT[:, : micro.tokens_BT.shape[1] - num_new]
        text_BT = self.generate(model, prompt_BP, num_new, self._key(micro) % 2**31)
        targets_BT = text_BT[:, 1:].clone()
        targets_BT[:, : prompt_BP.shape[1] - 1] = IGNORED
        rows = text_BT.shape[0]
        index_BT = torch.zeros_like(targets_BT)
        return self.own(model, Micro(text_BT[:, :-1], targets_BT, index_BT, rows * num_new))

    def _key(self, micro: Micro) -> int:
        if micro.index_BT not in self._keys:
            first, last = torch.stack([micro.index_BT[0, 0], micro.index_BT[-1, 0]]).tolist()
            said = f"{self.seed} {first} {last}".encode()
            digest = hashlib.blake2b(said, digest_size=8).digest()
            self._keys[micro.index_BT] = int.from_bytes(digest, "little")
        return self._keys[micro.index_BT]
