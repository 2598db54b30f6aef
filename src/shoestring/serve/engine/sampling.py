"""Sampling: from logits to one token, as a pure function of the logits, the settings and (seed, position).

A token is argmax(logits / temperature + Gumbel noise), which draws from softmax(logits / temperature). The
noise comes from no generator with a state: it is a hash of (seed, absolute position of the token, vocabulary
index). So the same seed gives the same text alone, in any batch, in any chunking, and with or without
speculative drafts. Greedy decoding is the same argmax without noise.

top_k, top_p and min_p each turn into a threshold on the logit; what lies below the largest of the thresholds
is removed. Tokens tied with the last one kept are kept too, so the result does not depend on the order of a
sort.

Settings reach the device in one copy that is not waited for (`RowSettings`): a copy from a Python list would wait for
everything that was launched before it, and on a GPU that several processes share also for a turn.

Left out: penalties, logit bias and grammars, which change logits before they come here.

Shapes: R rows (one per token to choose), D of them drawn and not greedy, V vocabulary.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.gemv.embed_argmax import finite_argmax
from shoestring.kernels.runtime.host_ring import to_device
from shoestring.kernels.sampling import noise
from shoestring.kernels.sampling.sample_tokens import logit_thresholds, sample_tokens_

_COLD = 1e-5  # below this, dividing by the temperature overflows in fp32; greedy is the limit
_LIKELIEST = 1e-9  # a top_p that the likeliest token alone reaches, and that is not 0 in fp32


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
    shown_special: frozenset[int] = frozenset()  # special tokens that the text shows; the others are left out

    def __post_init__(self) -> None:
        given: object = self.stop
        if isinstance(given, Iterable):  # what is none is refused below
            object.__setattr__(self, "stop", (given,) if isinstance(given, str) else tuple(given))
        for name in _ALLOWED:
            check_setting(name, getattr(self, name))
        # Values that mean the same become one, so that other code has one case only.
        object.__setattr__(self, "temperature", self.temperature if self.temperature >= _COLD else 0.0)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        object.__setattr__(self, "top_p", max(_LIKELIEST, self.top_p))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


# What is allowed, and how the error message says it.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: _is_number(x) and 0 <= x <= 1e6, "from 0 (greedy) to 1e6"),
    "top_k": (lambda x: _is_int(x) and -1 <= x <= 2**31, "-1 or 0 (off), or a whole number from 1 to 2**31"),
    "top_p": (lambda x: _is_number(x) and 0 <= x <= 1, "from 0 (only the likeliest token) to 1 (off)"),
    "min_p": (lambda x: _is_number(x) and 0 <= x <= 1, "from 0 (off) to 1 (only the likeliest token)"),
    "seed": (lambda x: x is None or (_is_int(x) and -(2**63) <= x < 2**64), "a whole number of at most 64 bits"),
    "max_tokens": (lambda x: _is_int(x) and x >= 1, "1 or more"),
    "stop": (lambda x: isinstance(x, Iterable) and all(isinstance(s, str) and s for s in x), "non-empty strings"),
}
# Of penalties, which change logits before they are sampled from (logit_rules.py).
_ALLOWED_PENALTIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "presence_penalty": (lambda x: _is_number(x) and -2 <= x <= 2, "from -2 to 2 (0: off)"),
    "frequency_penalty": (lambda x: _is_number(x) and -2 <= x <= 2, "from -2 to 2 (0: off)"),
    "repetition_penalty": (lambda x: _is_number(x) and 0 < x <= 100, "above 0 and at most 100 (1: off)"),
}
_RANGES = _ALLOWED | _ALLOWED_PENALTIES


def check_setting(name: str, value: object) -> None:
    """Raises UserError unless `value` may be the setting `name`: the one rule, for the command line and the server."""
    good, allowed = _RANGES[name]
    if not good(value):
        raise UserError(f"{name}={reprlib.repr(value)} is not allowed; it must be {allowed}")


def sample(logits_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token id per row, [R] int64; NO_TOKEN where its logits are not finite. positions[r] is the index that the
    token will have in its request."""
    rows, _ = RowSettings.of(samplings, positions).to(logits_RV.device)
    return rows.sample(logits_RV)


@dataclass(frozen=True)
class RowSettings:
    """How the tokens of R rows are chosen, as tensors."""

    num_rows: int
    cuts: bool  # whether some tokens cannot be drawn
    row_D: Tensor  # which rows are drawn; the following are theirs
    parameters_4D: Tensor
    seed_D: Tensor
    position_D: Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], positions: Sequence[int]) -> RowSettings:
        """On the host."""
        assert len(samplings) == len(positions)
        drawn = [r for r, s in enumerate(samplings) if not s.greedy]
        chosen = [samplings[r] for r in drawn]
        numbers, seeds = parameters(chosen)
        row_D, seed_D, position_D = (whole(n) for n in (drawn, seeds, [positions[r] for r in drawn]))
        parameters_4D = torch.from_numpy(np.array(numbers, dtype=np.float64))
        return cls(len(samplings), any(s.cuts for s in chosen), row_D, parameters_4D, seed_D, position_D)

    def to(self, device: torch.device, *others: Tensor) -> tuple[RowSettings, list[Tensor]]:
        """The same on a device, with `others`, in one copy; none where there is nothing to send."""
        here = [self.row_D, self.parameters_4D, self.seed_D, self.position_D] if len(self.row_D) else []
        if not here and not others:
            return self, []
        sent = to_device([*here, *others], device)
        if not here:
            return self, sent
        row_D, parameters_4D, seed_D, position_D, *rest = sent
        there = replace(self, row_D=row_D, parameters_4D=parameters_4D, seed_D=seed_D, position_D=position_D)
        return there, rest

    def sample(self, logits_RV: Tensor, ahead: int = 0) -> Tensor:
        """As the function `sample`, for tokens so many positions further on."""
        assert len(logits_RV) == self.num_rows
        if not len(self.row_D):
            return finite_argmax(logits_RV)
        token_D = torch.empty_like(self.row_D)
        position_D = self.position_D + ahead if ahead else self.position_D
        given = self.parameters_4D, self.seed_D, position_D
        sample_tokens_(self._drawn(logits_RV), *given, token_D, cuts=self.cuts)
        return token_D if self._all else finite_argmax(logits_RV).index_copy_(0, self.row_D, token_D)

    def probabilities(self, logits_RV: Tensor) -> Tensor:
        """The distributions that `sample` samples from, fp64 [R, V]; one-hot for greedy rows."""
        logits = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        if not self._all:
            probs_RV = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
            probs_RV.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
            if not len(self.row_D):
                return probs_RV
        drawn_DV = self._drawn(logits)
        scaled_DV = drawn_DV - drawn_DV.amax(dim=-1, keepdim=True)
        scaled_DV = scaled_DV / self.parameters_4D[0].to(scaled_DV.dtype)[:, None]
        if self.cuts:
            scaled_DV = keep_likely(scaled_DV, self.parameters_4D)
        probs_DV = scaled_DV.double().softmax(dim=-1)
        return probs_DV if self._all else probs_RV.index_copy_(0, self.row_D, probs_DV)

    @property
    def _all(self) -> bool:
        """Whether no row is greedy."""
        return len(self.row_D) == self.num_rows

    def _drawn(self, logits_RV: Tensor) -> Tensor:
        return logits_RV if self._all else logits_RV[self.row_D]


def whole(numbers: Sequence[int]) -> Tensor:
    """Whole numbers as a tensor of the host."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def keep_likely(logits_RV: Tensor, parameters_4R: Tensor) -> Tensor:
    """Logits after temperature -> the same with everything that top_k, top_p and min_p remove at -inf.

    top_p looks at the distribution that top_k left; min_p compares with the likeliest token, which all of
    them keep.
    """
    return logits_RV.masked_fill(logits_RV < logit_thresholds(logits_RV, parameters_4R)[:, None], -torch.inf)


def parameters(samplings: Sequence[Sampling]) -> tuple[list[list[float]], list[int]]:
    """What sample_tokens_ (kernels/sampling/sample_tokens.py) takes, as numbers: PARAMETERS x tokens, and the seeds."""
    columns = [(s.temperature, s.top_k, s.top_p, math.log(s.min_p) if s.min_p > 0 else -math.inf) for s in samplings]
    numbers = [list(row) for row in zip(*columns, strict=True)]
    return numbers, [0 if s.greedy else noise.signed(_seed_of(s)) for s in samplings]


def _seed_of(s: Sampling) -> int:
    if s.seed is None:
        raise UserError(f"sampling with temperature={s.temperature} needs a seed here; give Sampling(seed=...)")
    return s.seed


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
