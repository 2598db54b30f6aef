"""Verification of drafts: which tokens a request gains from one target pass. Pure.

A request that ends a step with g drafts x_1..x_g has g + 1 rows of target logits: row i (from 0) predicts the token
after i drafts. p_i is the target's distribution there, after temperature and cuts; q_i the one that x_i was sampled
from (one-hot for a draft that was not sampled).

`coupled`  The target token of a position is what plain decoding would choose there: argmax(logits / temperature +
           Gumbel noise keyed by (seed, position)). Drafts are accepted while they equal it; the first row after them
           adds one more token. The text is a function of the seed and the target's logits only: drafts change how fast
           it comes, never what it says. A drafter that uses the same noise agrees more often; nothing relies on that.
`token`    Accept x_i with probability min(1, p_i(x_i) / q_i(x_i)), stop at the first rejection and sample from
           norm(max(p - q, 0)) there (Leviathan et al. 2023, Chen et al. 2023). Keeps the distribution of the text, not
           the text of a seed; accepts more than `coupled` at a high temperature.
`block`    The drafts are verified together (Sun et al. 2024, "Block verification"): r_i = min(1, r_{i-1} p_i(x_i) /
           q_i(x_i)); the longest prefix that passes its own test is kept. Keeps the distribution, and never accepts
           less than `token` on average.

Where the target's logits are not finite, the last token of a request is NO_TOKEN in all of them.

Without drafts all three are plain decoding with the same noise. The random numbers of `token` and `block` are keyed by
(seed, purpose, length of the text before the step): `block` looks at all drafts before it rejects one, so the noise of
a position must not be used again when the position is drafted again.

A `VerifyRule` is one such rule and states what it needs; each request has one. A `Verifier` applies the rules of all
requests of a step for an engine, and may change logits first. Left out: trees of drafts.

All numbers of a step go to the device in one copy that is not waited for, and its tokens come back in one.

Shapes: R rows, V vocabulary, N requests, G drafts (padded to the most).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.gemv.embed_argmax import NO_TOKEN
from shoestring.kernels.runtime.host_ring import to_device
from shoestring.kernels.sampling.noise import gumbel_noise, signed
from shoestring.serve.engine.sampling import RowSettings, Sampling, sample, whole

RuleName = Literal["coupled", "token", "block"]
Verify = Callable[[Tensor, Sequence["Check"]], list[list[int]]]


@dataclass(frozen=True)
class VerifyRule:
    """A rule, and what the engine and drafters must give it."""

    name: RuleName
    verify: Verify  # pure: (target logits [R, V], checks) -> new tokens of each request
    needs_logits: bool  # of the target, to verify drafts; False: the tokens that plain decoding chooses are enough
    shares_noise: bool  # a drafter samples with the target's noise, keyed by (seed, position)

    def needs_draft_probabilities(self, sampling: Sampling) -> bool:
        """Whether a drafter that samples must report the distributions it sampled from."""
        return not self.shares_noise and not sampling.greedy

    def draft_sampling(self, sampling: Sampling, position: int) -> Sampling:
        """How a drafter samples for a text of this length."""
        if not self.needs_draft_probabilities(sampling):
            return sampling
        return replace(sampling, seed=derived_seed(sampling.seed, "draft", position))


@dataclass(slots=True)  # not frozen: one per text and step, and that takes twice as long
class Check:
    """What to verify for one request: its drafts, the position of the first, and how the request samples."""

    drafts: tuple[int, ...]
    position: int
    sampling: Sampling
    probs_GV: Tensor | None = None  # what the drafts were sampled from; None: they were not sampled
    rule: VerifyRule = field(default_factory=lambda: COUPLED)

    @property
    def num_rows(self) -> int:
        return len(self.drafts) + 1


def verify(logits_RV: Tensor, checks: Sequence[Check]) -> list[list[int]]:
    """The new tokens of each request by its own rule. Rows are in the order of `checks`."""
    names = {c.rule.name for c in checks}
    if len(names) == 1:
        return checks[0].rule.verify(logits_RV, checks)
    starts = _starts(checks)
    gained: list[list[int]] = [[] for _ in checks]
    parts = [[i for i, c in enumerate(checks) if c.rule.name == name] for name in sorted(names)]
    rows = [whole([starts[i] + k for i in mine for k in range(checks[i].num_rows)]) for mine in parts]
    for mine, row_P in zip(parts, to_device(rows, logits_RV.device), strict=True):
        found = checks[mine[0]].rule.verify(logits_RV[row_P], [checks[i] for i in mine])
        for i, tokens in zip(mine, found, strict=True):
            gained[i] = tokens
    return gained


class Verifier:
    """How an engine verifies. Subclasses may change logits or record what was gained."""

    def __init__(self, function: Verify = verify) -> None:
        self._verify = function

    def __call__(self, logits_RV: Tensor, checks: Sequence[Check]) -> list[list[int]]:
        return self._verify(logits_RV, checks)

    def needs_logits(self, checks: Sequence[Check]) -> bool:
        """False: the tokens that plain decoding chooses after each row are enough (`accept`), so the engine may choose
        them on the device and not call this object. A function of the caller's own may change logits: it needs them."""
        return self._verify is not verify or any(c.drafts and c.rule.needs_logits for c in checks)

    def prepare(self, checks: Sequence[Check]) -> None:
        """Called before the forward whose logits will be verified: begin what can be computed meanwhile."""

    def ready_rows(self, checks: Sequence[Check], wait_s: float) -> list[int | UserError]:
        """How many rows of each check can be verified now, after waiting for the rest up to wait_s seconds in all; or
        why the request must end. The engine verifies those rows only; 0: the request sits out the step."""
        return [check.num_rows for check in checks]

    def note_gained(self, checks: Sequence[Check], gained: Sequence[Sequence[int]]) -> None:
        """The tokens of a step that was verified without a call of this object."""

    @property
    def notes_gains(self) -> bool:
        """Whether `note_gained` does anything, as that of a subclass may."""
        return type(self) is not Verifier


def as_verifier(function: Verify | Verifier) -> Verifier:
    return function if isinstance(function, Verifier) else Verifier(function)


# -- coupled ------------------------------------------------------------------------------------------------


def coupled(logits_RV: Tensor, checks: Sequence[Check]) -> list[list[int]]:
    samplings = [c.sampling for c in checks for _ in range(c.num_rows)]
    positions = [c.position + i for c in checks for i in range(c.num_rows)]
    targets = sample(logits_RV, samplings, positions).tolist()  # the one host sync of a step
    return [
        accept(check.drafts, targets[start : start + check.num_rows])
        for check, start in zip(checks, _starts(checks), strict=True)
    ]


def accept(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Targets up to and including the first that differs from its draft; all g + 1 when none does."""
    num_equal = 0
    while num_equal < len(drafts) and drafts[num_equal] == targets[num_equal]:
        num_equal += 1
    return list(targets[: num_equal + 1])


# -- token and block ----------------------------------------------------------------------------------------


def token_chances(p_NGV: Tensor, q_NGV: Tensor, ratio_NG: Tensor, num_N: Tensor) -> tuple[Tensor, Tensor]:
    """(chance that the test of draft i passes [N, G], weight r of p in the residual after i drafts [N, G+1])."""
    return ratio_NG.clamp(max=1.0), torch.ones_like(p_NGV[..., 0])


def block_chances(p_NGV: Tensor, q_NGV: Tensor, ratio_NG: Tensor, num_N: Tensor) -> tuple[Tensor, Tensor]:
    """h_i and r_i of the block rule; p has G + 1 rows per request, q has G."""
    r = [torch.ones_like(p_NGV[:, 0, 0])]
    for ratio_N in ratio_NG.unbind(1):
        r.append((r[-1] * ratio_N).clamp(max=1.0))
    r_NG1 = torch.stack(r, dim=1)
    # R_i for i = 1..G-1 needs the draft distribution one position further on.
    rest_NG = (r_NG1[:, 1:-1, None] * p_NGV[:, 1:-1] - q_NGV[:, 1:]).clamp(min=0).sum(-1)
    h_NG = rest_NG / (rest_NG + 1 - r_NG1[:, 1:-1])
    h_NG = h_NG.masked_fill(h_NG.isnan(), 1.0)  # 0/0: p equals q there and everything before was accepted
    h_NG = torch.cat([h_NG, r_NG1[:, -1:]], dim=1)
    index_G = torch.arange(1, ratio_NG.shape[1] + 1, device=ratio_NG.device)
    return torch.where(index_G == num_N[:, None], r_NG1[:, 1:], h_NG), r_NG1


def residual(p_NV: Tensor, q_NV: Tensor, r_N: Tensor) -> Tensor:
    """norm(max(r p - q, 0)); p itself where nothing is left, which happens by rounding only."""
    left_NV = (r_N[:, None] * p_NV - q_NV).clamp(min=0)
    mass_N1 = left_NV.sum(-1, keepdim=True)
    return torch.where(mass_N1 > 0, left_NV / mass_N1, p_NV)


def derived_seed(seed: int | None, purpose: str, position: int) -> int:
    """A seed for one purpose in the step that starts with a text of this length."""
    return int.from_bytes(blake2b(f"{seed} {purpose} {position}".encode(), digest_size=8).digest(), "little")


Chances = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _verify_by_chance(
    logits_RV: Tensor, checks: Sequence[Check], chances: Chances, count: Callable[[Tensor], Tensor]
) -> list[list[int]]:
    device, vocab, num, most = logits_RV.device, logits_RV.shape[-1], len(checks), max(len(c.drafts) for c in checks)
    # Their positions do not matter: only the distributions are asked for.
    rows = RowSettings.of([c.sampling for c in checks for _ in range(c.num_rows)], [0] * len(logits_RV))
    rows, sent = rows.to(device, *_numbers(checks, most, vocab))
    num_N, row_NG1, x_NG, sampled_S, certain_C, position_N, accept_seed_N, final_seed_N = sent
    p_NGV = rows.probabilities(logits_RV)[row_NG1]
    q_NGV = torch.zeros(num, most + 1, vocab, device=device, dtype=p_NGV.dtype)
    q_NGV.view(-1).index_fill_(0, certain_C, 1.0)
    if given := [c.probs_GV for c in checks if c.probs_GV is not None]:
        q_NGV.view(-1, vocab).index_copy_(0, sampled_S, torch.cat(given).to(q_NGV))
    # q = 0 after a request's last draft, so the residual there is p itself, which is what the extra token after a full
    # acceptance is sampled from.
    if most:
        px = p_NGV[:, :-1].gather(-1, x_NG[..., None])[..., 0]
        qx = q_NGV[:, :-1].gather(-1, x_NG[..., None])[..., 0]
        ratio_NG = torch.where(qx > 0, px / qx, 0.0)
        chance_NG, r_NG1 = chances(p_NGV, q_NGV[:, :-1], ratio_NG, num_N)
        valid_NG = torch.arange(most, device=device) < num_N[:, None]
        taken_N = count((_uniform(accept_seed_N, most) <= chance_NG) & valid_NG)
    else:
        r_NG1, taken_N = torch.ones_like(p_NGV[..., 0]), num_N
    at = torch.arange(num, device=device), taken_N
    r_N = torch.where(taken_N == num_N, 1.0, r_NG1[at])
    final_NV = residual(p_NGV[at], q_NGV[at], r_N)
    noise_NV = gumbel_noise(final_seed_N, position_N, torch.arange(vocab, device=device))
    # A maximum is NaN where there is one. No draft is accepted by a row that is not finite, nor after one.
    finite_NG1 = logits_RV.amax(dim=-1).isfinite()[row_NG1]
    finite_N = finite_NG1.long().cumprod(dim=1)[at] > 0
    token_N = torch.where(finite_N, (final_NV.log() + noise_NV).argmax(-1), NO_TOKEN)
    found = torch.stack([taken_N * finite_N, token_N], dim=1).tolist()  # the one host sync of a step
    return [[*c.drafts[:taken], extra] for c, (taken, extra) in zip(checks, found, strict=True)]


def _numbers(checks: Sequence[Check], most: int, vocab: int) -> list[Tensor]:
    """What the device has to know about each request, on the host:

    drafts [N], rows of its logits [N, G+1] (the last one again for those that it does not have), drafts [N, G]; where
    in [N, G+1] the distributions of sampled drafts belong, and where in [N, G+1, V] a draft that was not sampled has
    its 1; position of the first draft, seeds of the tests and of the last token, [N] each.
    """
    num_N = np.array([len(c.drafts) for c in checks])
    first_N, i_G = num_N.cumsum() - num_N + np.arange(len(checks)), np.arange(most + 1)
    row_NG1 = first_N[:, None] + np.minimum(i_G, num_N[:, None])
    x_NG = np.zeros((len(checks), most), dtype=np.int64)
    drafted_NG = i_G[:-1] < num_N[:, None]
    x_NG[drafted_NG] = [x for c in checks for x in c.drafts]
    sampled_N = np.array([c.probs_GV is not None for c in checks])
    place_NG = np.arange(len(checks))[:, None] * (most + 1) + i_G[:-1]
    certain_NG = drafted_NG & ~sampled_N[:, None]
    accept_seeds = [signed(derived_seed(c.sampling.seed, "accept", c.position)) for c in checks]
    final_seeds = [
        signed(derived_seed(c.sampling.seed, "final", c.position) if c.drafts else c.sampling.seed or 0) for c in checks
    ]
    return [
        torch.from_numpy(num_N),
        torch.from_numpy(row_NG1),
        torch.from_numpy(x_NG),
        torch.from_numpy(place_NG[drafted_NG & sampled_N[:, None]]),
        torch.from_numpy(place_NG[certain_NG] * vocab + x_NG[certain_NG]),
        whole([c.position for c in checks]),
        whole(accept_seeds),
        whole(final_seeds),
    ]


def _uniform(seed_N: Tensor, num: int) -> Tensor:
    """[N, num] numbers in (0, 1)."""
    noise_NG = gumbel_noise(seed_N, torch.zeros_like(seed_N), torch.arange(num, device=seed_N.device))
    return torch.exp(-torch.exp(-noise_NG))


def _leading(passed_NG: Tensor) -> Tensor:
    """How many tests pass before the first that fails."""
    return passed_NG.long().cumprod(dim=1).sum(dim=1)


def _last(passed_NG: Tensor) -> Tensor:
    """The number of the last test that passes; 0 when none does."""
    return (passed_NG * torch.arange(1, passed_NG.shape[1] + 1, device=passed_NG.device)).amax(dim=1)


def _starts(checks: Sequence[Check]) -> list[int]:
    """The row at which each request's rows begin."""
    starts, row = [], 0
    for check in checks:
        starts.append(row)
        row += check.num_rows
    return starts


# -- the rules ----------------------------------------------------------------------------------------------

COUPLED: VerifyRule = VerifyRule("coupled", coupled, needs_logits=False, shares_noise=True)
token = partial(_verify_by_chance, chances=token_chances, count=_leading)
TOKEN = VerifyRule("token", token, needs_logits=True, shares_noise=False)
block = partial(_verify_by_chance, chances=block_chances, count=_last)
BLOCK = VerifyRule("block", block, needs_logits=True, shares_noise=False)
RULES: dict[str, VerifyRule] = {rule.name: rule for rule in (COUPLED, TOKEN, BLOCK)}


def rule_for(name: RuleName | Literal["auto"], sampling: Sampling) -> VerifyRule:
    """`auto`: `coupled` where the request's settings determine its text (greedy, or with a seed), else `block`."""
    if name == "auto":
        return COUPLED if sampling.greedy or sampling.seed is not None else BLOCK
    return RULES[name]
