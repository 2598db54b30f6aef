"""Verification of drafts: which tokens a request gains from one target pass. Pure.

A request that ends a step with d drafts has d + 1 rows of target logits: row i predicts the token after i
drafts.

The `coupled` rule: the target token of a position is what plain decoding would choose there, argmax(logits /
temperature + Gumbel noise keyed by (seed, position)), or plain argmax when greedy. Drafts are accepted while
they equal it; the first row after them adds one more token. Without drafts this *is* plain decoding, so the
text is a function of the seed and the target's logits only: drafts change how fast it comes, never what it
says. A drafter that uses the same noise agrees more often, but nothing here relies on it.

Left out: the `token` and `block` rules, which accept more at high temperature and keep the distribution, not
the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoestring.serve.sampling import Sampling, sample


@dataclass(frozen=True)
class Check:
    """One request's question to `verify`: its drafts, where the first of them would stand, how it samples."""

    drafts: tuple[int, ...]
    position: int
    sampling: Sampling

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1


def coupled(logits_RV: Tensor, checks: Sequence[Check]) -> list[list[int]]:
    """The new tokens of each request (accepted drafts and one more). Their rows lie in order."""
    samplings = [c.sampling for c in checks for _ in range(c.num_rows)]
    positions = [c.position + i for c in checks for i in range(c.num_rows)]
    targets = sample(logits_RV, samplings, positions).tolist()  # the one host sync of a step
    gained, row = [], 0
    for check in checks:
        gained.append(accept(check.drafts, targets[row : row + check.num_rows]))
        row += check.num_rows
    return gained


def accept(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Targets up to and including the first that differs from its draft; all d + 1 when none does."""
    num_equal = 0
    while num_equal < len(drafts) and drafts[num_equal] == targets[num_equal]:
        num_equal += 1
    return list(targets[: num_equal + 1])
