"""Selectors: which layer is sent how, in each step, under a budget of bytes.

Rank 0 decides and sends one byte per layer, together with every replica's features, so one small message a step goes
in front of the gradients. Ranks do not decide alone: the same network may differ in its last bits between them. The
plan of a step is made from rank 0's own features, and from those of all replicas in the step before.

    uniform       every layer by the reducer's own method; no message at all
    round-robin   whole layers in int4, in turn; a layer that never fits goes as the largest share of it that does
    random        the same, drawn at random (a baseline)
    l-greco       L-GreCo (Alimohammadi et al. 2023): the options with the least total error within the budget, by
                  dynamic programming over measured errors; where the paper bounds the error, we bound the bytes
    hyper         a small network learns from l-greco, then from the loss (hyper.py)

Bytes that a step leaves over are carried to the next ones, at most MAX_CARRY budgets. A layer that has not been sent
for MAX_STALENESS steps is sent. Error feedback keeps what is not sent, so a skipped layer is late, not lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.train.reducers.compressor import At, Compressor, Sum
from shoestring.train.reducers.quantizers import INT4, INT8
from shoestring.train.reducers.rounds import Exchange
from shoestring.train.reducers.sparsifiers import TopKSparsifier

SelectorName = Literal["round-robin", "random", "l-greco", "hyper"]
MAX_CARRY = 2.0
MAX_STALENESS = 32
MEASURE_EVERY = 25  # steps between L-GreCo's measurements of errors
BUCKETS = 1024  # of the budget, in the dynamic programme
NUM_FEATURES = 3  # squared norms of gradient and of gradient + residual, and their product


@dataclass(frozen=True)
class Skip(Compressor):
    """Sends nothing; everything stays in the residual."""

    feedback = True

    @property
    def name(self) -> str:
        return "skip"

    def exchange(self, x: Tensor, at: At) -> Exchange[Sum]:
        yield from ()
        return Sum(torch.zeros_like(x), x)

    def decoded(self, x: Tensor, at: At) -> Tensor:
        return torch.zeros_like(x)

    def sent_bytes(self, shape: torch.Size, size: int) -> int:
        return 0


SKIP = Skip()
WHOLE = INT4  # how round-robin and random send a layer


def option_grid(wanted: Compressor) -> tuple[Compressor, ...]:
    """What a layer may be sent as, cheapest first. The same for all selectors."""
    ratio = wanted.ratio if isinstance(wanted, TopKSparsifier) else 0.01
    sparse = [TopKSparsifier(min(1.0, ratio * f)) for f in (0.25, 1.0, 4.0)]
    return (SKIP, *dict.fromkeys(sparse), INT4, INT8)


@dataclass
class Facts:
    """What rank 0 knows after a step. Squared norms are sums over the replicas."""

    step: int
    given_L: np.ndarray  # of gradient + residual
    total_L: np.ndarray  # squared norm of the sum that was applied
    loss: float


class Selector(ABC):
    """Lives on rank 0. `bytes_LC`: what a replica sends for each layer and option."""

    def __init__(self, options: Sequence[Compressor], bytes_LC: np.ndarray, budget: float, seed: int) -> None:
        self.options, self.bytes_LC, self.budget, self.seed = tuple(options), bytes_LC, budget, seed
        self.staleness_L = np.zeros(len(bytes_LC), dtype=np.int64)
        self.carry = 0.0
        # What a layer goes as where layers take turns: WHOLE, or the most that fits after saving for some steps. A
        # layer that waited for more would stop all others.
        size_LC = bytes_LC.astype(np.float64, copy=True)
        size_LC[(size_LC > bytes_LC[:, [self.options.index(WHOLE)]]) | (size_LC > most_in_a_step(budget))] = -1
        size_LC[:, 0] = -1
        self.whole_L = size_LC.argmax(axis=1)

    def plan(self, step: int) -> np.ndarray:
        """The option of each layer for this exchange, within budget and carry."""
        allowed = self.budget + self.carry
        overdue = self.staleness_L >= MAX_STALENESS - 1
        # Where many layers are overdue at once, the oldest go first.
        while overdue.any() and self._least(overdue) > allowed:
            overdue[np.flatnonzero(overdue)[np.argmin(self.staleness_L[overdue])]] = False
        chosen = self.choose(step, allowed, overdue)
        spent = float(self.bytes_LC[np.arange(len(chosen)), chosen].sum())
        self.carry = min(allowed - spent, MAX_CARRY * self.budget)  # a debt is paid in full
        self.staleness_L = np.where(chosen > 0, 0, self.staleness_L + 1)
        return chosen.astype(np.uint8)

    @abstractmethod
    def choose(self, step: int, allowed: float, overdue_L: np.ndarray) -> np.ndarray: ...

    def see(self, own_LF: np.ndarray) -> None:
        """Features of rank 0's own gradients in the step that `plan` is made for."""
        return

    error_power = 2  # of what is summed up over an error: squares or magnitudes
    most_measured = 1 << 62  # values of a layer

    def layers_to_measure(self, step: int) -> Sequence[int]:
        """Those for which `errors` is to be called after this step."""
        return ()

    def errors(self, layers: Sequence[int], error_MC: np.ndarray) -> None:
        """The error of each of these layers by each option, measured on rank 0."""
        return

    def observe(self, facts: Facts) -> None:
        return

    def state_dict(self) -> dict[str, Tensor]:
        return {"staleness": torch.from_numpy(self.staleness_L.copy()), "carry": _scalar(self.carry)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.staleness_L = state["staleness"].numpy().copy()
        self.carry = float(state["carry"])

    def _least(self, overdue_L: np.ndarray) -> float:
        """Bytes to send these layers in the cheapest way."""
        return float(self.bytes_LC[overdue_L, 1:].min(axis=1).sum()) if overdue_L.any() else 0.0

    def _in_order(self, order: Sequence[int], allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        """Whole layers in this order while they fit, after what is overdue."""
        chosen = np.zeros(len(self.bytes_LC), dtype=np.int64)
        chosen[overdue_L] = 1 + self.bytes_LC[overdue_L, 1:].argmin(axis=1)
        left = allowed - self._least(overdue_L)
        for layer in order:
            if chosen[layer]:
                continue
            size = self.bytes_LC[layer, self.whole_L[layer]]
            if size > left:
                break  # the next step has more left over
            chosen[layer] = self.whole_L[layer]
            left -= size
        return chosen


class RoundRobin(Selector):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.next = 0

    def choose(self, step: int, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        num = len(self.bytes_LC)
        order = [(self.next + i) % num for i in range(num)]
        chosen = self._in_order(order, allowed, overdue_L)
        self.next = next((layer for layer in order if chosen[layer] != self.whole_L[layer]), self.next)
        return chosen

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "next": _scalar(self.next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.next = int(state["next"])


class RandomLayers(Selector):
    def choose(self, step: int, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        order = np.random.default_rng((self.seed, step)).permutation(len(self.bytes_LC))
        return self._in_order(order.tolist(), allowed, overdue_L)


class LGreco(Selector):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.error_LC = np.ones(self.bytes_LC.shape)
        self.error_LC[:, 1:] = 1 - 0.5 * self.bytes_LC[:, 1:] / self.bytes_LC.max(axis=1, keepdims=True)
        self.usual: np.ndarray | None = None  # the plan of steps in which nothing is overdue

    def layers_to_measure(self, step: int) -> Sequence[int]:
        return range(len(self.bytes_LC)) if step % MEASURE_EVERY == 0 else ()

    def errors(self, layers: Sequence[int], error_MC: np.ndarray) -> None:
        self.error_LC[list(layers)], self.usual = error_MC, None

    def choose(self, step: int, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        # The plan stays until errors are measured again, so the budget is that of a step, not what was carried.
        if overdue_L.any() or allowed < self.budget:
            return least_error(self.error_LC, self.bytes_LC, min(allowed, self.budget), overdue_L)
        if self.usual is None:
            self.usual = least_error(self.error_LC, self.bytes_LC, self.budget, overdue_L)
        return self.usual

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), "error": torch.from_numpy(self.error_LC.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.error_LC, self.usual = state["error"].numpy().copy(), None


def check_budget(bytes_LC: np.ndarray, budget: float, message: float) -> None:
    """UserError where a budget, of which `message` bytes are not for layers, cannot be kept; on all ranks alike."""
    cheapest_L = bytes_LC[:, 1:].min(axis=1)
    largest = float(cheapest_L.max()) / most_in_a_step(1.0)
    least = max(float(cheapest_L.sum()) / MAX_STALENESS, largest) + message
    if budget < least:
        raise UserError(
            f"a budget of {budget:,.0f} bytes a step cannot be met: every layer is sent at least once in "
            f"{MAX_STALENESS} steps, the largest one in a single step, which takes {least:,.0f} a step; give a larger "
            "budget_mb or leave it out"
        )


def most_in_a_step(budget: float) -> float:
    """Bytes, after steps that sent nothing."""
    return budget * (1 + MAX_CARRY)


def least_error(error_LC: np.ndarray, bytes_LC: np.ndarray, budget: float, overdue_L: np.ndarray) -> np.ndarray:
    """The option of each layer with the least total error within the budget; layers that are overdue are not skipped.

    best[b] = min over options c of best_before[b - bytes(c)] + error(c), where bytes are counted in BUCKETS of the
    budget, rounded up, so that the budget holds.
    """
    num_layers, num_options = error_LC.shape
    unit = max(budget, 1.0) / BUCKETS
    size_LC = np.ceil(bytes_LC / unit).astype(np.int64)
    best = np.zeros(BUCKETS + 1)
    taken_LB = np.zeros((num_layers, BUCKETS + 1), dtype=np.int64)
    for layer in range(num_layers):
        tried_CB = np.full((num_options, BUCKETS + 1), np.inf)
        for c in range(1 if overdue_L[layer] else 0, num_options):
            size = int(size_LC[layer, c])
            if size <= BUCKETS:
                tried_CB[c, size:] = best[: BUCKETS + 1 - size] + error_LC[layer, c]
        taken_LB[layer] = tried_CB.argmin(axis=0)
        best = tried_CB.min(axis=0)
    chosen, at = np.zeros(num_layers, dtype=np.int64), BUCKETS
    if not np.isfinite(best[at]):  # rounding up left no room: what is overdue goes, in the cheapest way
        chosen[overdue_L] = 1 + bytes_LC[overdue_L, 1:].argmin(axis=1)
        return chosen
    for layer in reversed(range(num_layers)):
        chosen[layer] = taken_LB[layer, at]
        at -= int(size_LC[layer, chosen[layer]])
    return chosen


def _scalar(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
