"""Sampling: from logits to one token, as a pure function of the logits, the settings and (seed, position).

A token is argmax(logits / temperature + Gumbel noise), which draws from softmax(logits / temperature). The
noise comes from no generator with a state: it is a hash of (seed, absolute position of the token, vocabulary
index). So the same seed gives the same text alone, in any batch, in any chunking, and with or without
speculative drafts. Greedy decoding is the same argmax without noise.

top_k, top_p and min_p each turn into a threshold on the logit; what lies below the largest of the thresholds
is removed. Tokens tied with the last one kept are kept too, so the result does not depend on the order of a
sort.

Left out: penalties, logit bias and grammars, which change logits before they come here.

Shapes: R rows (one per token to choose), V vocabulary.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.draw import gumbel_noise_at, signed

_COLD = 1e-5  # a temperature below this divides by nothing in fp32; greedy is its limit
_LIKELIEST = 1e-9  # a top_p that the likeliest token reaches alone, and that is not 0 in fp32


@dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens and when it stops. The default is greedy."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 and -1 = all
    top_p: float = 1.0  # keep the likeliest tokens that together hold this probability; 1 = all, 0 = one
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest; 0 = all
    seed: int | None = None  # None = the engine draws one per request
    max_tokens: int = 128  # new tokens at most
    stop: tuple[str, ...] = ()  # the first of these to appear ends the text, which is cut before it
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in _ALLOWED:
            check_setting(name, getattr(self, name))
        # Values that mean the same become one, so that nobody else has to know of the others.
        object.__setattr__(self, "temperature", self.temperature if self.temperature >= _COLD else 0.0)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        object.__setattr__(self, "top_p", max(_LIKELIEST, self.top_p))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


# What is good, and how it is said.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: _is_number(x) and 0 <= x <= 1e6, "from 0 (greedy) to 1e6"),
    "top_k": (
        lambda x: _is_int(x) and -1 <= x <= 2**31,
        "-1 or 0 (off), or a whole number from 1 to 2**31",
    ),
    "top_p": (lambda x: _is_number(x) and 0 <= x <= 1, "from 0 (only the likeliest token) to 1 (off)"),
    "min_p": (lambda x: _is_number(x) and 0 <= x <= 1, "from 0 (off) to 1 (only the likeliest token)"),
    "seed": (
        lambda x: x is None or (_is_int(x) and -(2**63) <= x < 2**64),
        "a whole number of at most 64 bits",
    ),
    "max_tokens": (lambda x: _is_int(x) and x >= 1, "1 or more"),
    "stop": (lambda x: all(isinstance(s, str) and s for s in x), "non-empty strings"),
}


def check_setting(name: str, value: object) -> None:
    """Raises UserError unless `value` may be the setting `name`: the one rule, for the command line and the server."""
    good, allowed = _ALLOWED[name]
    if not good(value):
        raise UserError(f"{name}={reprlib.repr(value)} is not allowed; it must be {allowed}")


def sample(logits_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token id per row, [R] int64. positions[r] is the index that the token will have in its request."""
    num_rows, vocab = logits_RV.shape
    assert len(samplings) == len(positions) == num_rows
    logits = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    tokens = logits.argmax(dim=-1)
    drawn = [r for r in range(num_rows) if not samplings[r].greedy]
    if drawn:
        chosen = [samplings[r] for r in drawn]
        device = logits.device
        scaled = logits[torch.tensor(drawn, device=device)] if len(drawn) < num_rows else logits
        # Subtracting the maximum first keeps a tiny temperature from overflowing.
        scaled = scaled - scaled.amax(dim=-1, keepdim=True)
        scaled = (
            scaled / torch.tensor([s.temperature for s in chosen], device=device, dtype=scaled.dtype)[:, None]
        )
        scaled = keep_likely(scaled, chosen)
        noise = gumbel_noise([_seed_of(s) for s in chosen], [positions[r] for r in drawn], vocab, device)
        tokens[torch.tensor(drawn, device=device)] = (scaled.double() + noise).argmax(dim=-1)
    return tokens


def keep_likely(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits after temperature -> the same with everything that top_k, top_p and min_p remove at -inf.

    top_p looks at the distribution that top_k left; min_p compares with the likeliest token, which all of
    them keep.
    """
    if all(s.top_k == 0 and s.top_p == 1 and s.min_p == 0 for s in samplings):
        return logits_RV
    floor_R = torch.stack([_floor(row_V, s) for row_V, s in zip(logits_RV, samplings, strict=True)])
    return logits_RV.masked_fill(logits_RV < floor_R[:, None], -torch.inf)


def _floor(row_V: Tensor, s: Sampling) -> Tensor:
    """The smallest logit that one row keeps, as a 0-dim tensor."""
    floor = row_V.amin()
    if 0 < s.top_k < len(row_V):
        floor = torch.topk(row_V, s.top_k).values[-1]
    if s.top_p < 1:
        ordered_V = row_V.masked_fill(row_V < floor, -torch.inf).sort(descending=True).values
        prob_V = ordered_V.softmax(dim=-1)
        # A token is kept while those before it do not reach top_p yet: the likeliest always is.
        kept_V = (prob_V.cumsum(dim=-1) - prob_V < s.top_p) & (ordered_V > -torch.inf)
        floor = torch.maximum(floor, ordered_V.masked_fill(~kept_V, torch.inf).amin())
    if s.min_p > 0:
        floor = torch.maximum(floor, row_V.amax() + math.log(s.min_p))
    return floor


# -- the same with everything on the device -----------------------------------------------------------------


def parameters(samplings: Sequence[Sampling]) -> tuple[list[list[float]], list[int]]:
    """What draw_tokens_ (kernels/draw.py) takes, as numbers: PARAMETERS x tokens, and the seeds."""
    columns = [
        (s.temperature, s.top_k, s.top_p, math.log(s.min_p) if s.min_p > 0 else -math.inf) for s in samplings
    ]
    seeds = [0 if s.greedy else signed(_seed_of(s)) for s in samplings]
    return [list(row) for row in zip(*columns, strict=True)], seeds


# -- noise --------------------------------------------------------------------------------------------------


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str
) -> Tensor:
    """Standard Gumbel noise [R, V], fp64: entry (r, v) is a function of (seeds[r], positions[r], v).

    Row r is the output of a SplitMix64 generator whose state is a hash of (seed, position), read at counter
    v.
    """
    seed_R = torch.tensor([signed(s) for s in seeds], device=device)
    position_R = torch.tensor(list(positions), device=device, dtype=torch.int64)
    return gumbel_noise_at(seed_R, position_R, vocab)


def _seed_of(s: Sampling) -> int:
    if s.seed is None:
        raise UserError(
            f"sampling with temperature={s.temperature} needs a seed here; give Sampling(seed=...)"
        )
    return s.seed


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
