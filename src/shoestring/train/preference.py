"""DPO (Rafailov et al. 2023): learning from pairs of a chosen and a rejected answer.

    margin = beta * [(log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected))]
    loss   = -log sigmoid(margin), summed over pairs

p is the model, q the model before training, whose log-probabilities per token are computed once and kept in a
`ScalarCache`: no second model. A margin needs whole answers, and the head works on chunks of tokens: one pass over the
head gives the margins, and then the gradient is that of cross entropy in which every token of a pair counts
+-beta sigmoid(-margin).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UserError
from shoestring.mesh import Mesh
from shoestring.model.segments import segment_of
from shoestring.model.transformer import Head
from shoestring.train.objectives import CrossEntropy, default_chunk, read_rows, vocab_logsumexp, vocab_take
from shoestring.train.step import IGNORED, Micro, Objective
from shoestring.train.teacher_cache import ScalarCache, build_scalar_cache


class Preference(Objective):
    """Rows hold whole pairs (`Micro.pairs_P2`)."""

    def __init__(self, reference: ScalarCache, beta: float = 0.1) -> None:
        if not beta > 0:
            raise UserError(f"beta={beta:g} must be positive: it is how far the model may move for a preference")
        self.reference, self.beta, self._head = reference, beta, CrossEntropy()

    def count(self, micro: Micro) -> int:
        """Pairs."""
        assert micro.pairs_P2 is not None
        return len(micro.pairs_P2)

    def __call__(self, model: nn.Module, micro: Micro) -> Tensor:
        assert micro.bounds_S is not None and micro.pairs_P2 is not None
        bounds_S, pairs_P2, targets_BT = micro.bounds_S, micro.pairs_P2, micro.targets_BT
        counted_BT = targets_BT != IGNORED
        before_BT = self.reference.lookup(micro.index_BT).masked_fill(~counted_BT, 0.0)
        segment_N = segment_of(bounds_S, targets_BT.numel())

        def readout(hidden_BTD: Tensor, head: Head) -> Tensor:
            gain_BT = token_logps(hidden_BTD.detach(), head, targets_BT) - before_BT
            gain_S = gain_BT.new_zeros(len(bounds_S) - 1).index_add_(0, segment_N, gain_BT.flatten())
            margin_P = self.beta * (gain_S[pairs_P2[:, 0]] - gain_S[pairs_P2[:, 1]])
            slope_P = self.beta * torch.sigmoid(-margin_P)
            weight_S = torch.zeros_like(gain_S)
            weight_S[pairs_P2[:, 0]], weight_S[pairs_P2[:, 1]] = slope_P, -slope_P
            weighted = self._head.readout(hidden_BTD, head, targets_BT, weight_S[segment_N].view_as(gain_BT))
            loss = F.softplus(-margin_P).sum()
            return weighted + (loss - weighted).detach()  # the loss, with the gradient of the weighted cross entropy

        return read_rows(model, micro, readout=readout)


@torch.no_grad()
def token_logps(hidden_BTD: Tensor, head: Head, targets_BT: Tensor) -> Tensor:
    """log p of each target [B, T] in fp32, 0 where it is not counted; a chunk of logits at a time."""
    hidden_ND, target_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
    head = head.to(hidden_ND.dtype)
    rows = default_chunk(len(target_N), head.weight_VD.shape[0], 4)
    found = []
    for hidden, target in zip(hidden_ND.split(rows), target_N.split(rows), strict=True):
        z_NV = head.logits(hidden).float()
        logp_N1 = vocab_take(z_NV, target.clamp(min=0)[:, None], head) - vocab_logsumexp(z_NV, head)
        found.append(logp_N1[:, 0].masked_fill(target == IGNORED, 0.0))
    return torch.cat(found).view_as(targets_BT)


def build_reference(
    folder: Path, model: nn.Module, batches: Iterable[Micro], *, num_targets: int, identity: dict[str, Any], mesh: Mesh
) -> ScalarCache:
    """The model's own log-probabilities, before it is trained; read back where they are complete."""

    def score(micro: Micro) -> Tensor:
        micro = micro.to(mesh.device)
        return read_rows(model, micro, readout=lambda h, head: token_logps(h, head, micro.targets_BT))

    return build_scalar_cache(folder, score, batches, num_targets=num_targets, identity=identity, mesh=mesh)
