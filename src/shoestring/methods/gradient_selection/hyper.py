"""The learned selector: one small network for all layers, under a budget of bytes.

    features of a layer -> shared MLP, with the mean over layers as context -> the share of |p|_1 that each option
                           leaves behind, and a weight of the layer
    gain = weight * |p|_1 * (1 - share),   option = argmax(gain - price * bytes),   the price is raised until the plan
                           fits the budget (dual ascent)

p is gradient + residual of this very step, as rank 0 has it. It grows while a layer is not sent, so a layer with large
or agreeing gradients is sent more often. L-GreCo bounds squared errors and keeps a plan until it measures them again;
here a plan follows the norms of each step, and the network stands in for the measurement. Magnitudes are counted, not
squares, because Adam makes steps of about equal size from large and from small values.

Features: log norms of gradient and p, their cosine, agreement between replicas, staleness, size, depth, kind of layer.
The cosine is to p, which points to where the last gradients did, so that no copy of a gradient is kept.

The network learns the shares from measurements of one layer at a time, after every step of the first LESSONS and then
now and then. The weights are learned from the loss by a contextual bandit: in some of the steps they get noise, and
move towards noise that was followed by a faster fall of the smoothed loss (REINFORCE). When they no longer move, they
are frozen.

When the smoothed loss leaves its band, the next step sends everything in int8 and later steps pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.methods.gradient_selection.selectors import Facts, LGreco
from shoestring.train.reducers.compressor import Compressor
from shoestring.train.reducers.quantizers import INT8

LESSONS, LESSON_EVERY = 100, 10  # steps with a measurement each, and steps between two of them later
KEPT_LESSONS, PASSES = 128, 3  # measurements that are learned from, and how often at each new one
FIRST_LESSONS = 8  # before them, L-GreCo's first guess decides
HIDDEN, RATE = 32, 0.3
EXPLORE_EVERY, NOISE, BANDIT_RATE = 10, 0.3, 0.05
SETTLED = 0.002  # change of the mean weight per try, smoothed, below which weights are frozen
BAND = 4.0  # standard deviations
REST = 50  # steps between two fallbacks
TINY = 1e-30
GRID = np.linspace(0, 1, 17)  # of prices


class Network:
    """linear, tanh, linear; in numpy, where a pass takes a tenth of the time of torch's calls."""

    def __init__(self, num_inputs: int, num_outputs: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**64)
            net = nn.Sequential(nn.Linear(num_inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, num_outputs))
        self.parameters = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}

    def hidden(self, inputs_LF: np.ndarray) -> np.ndarray:
        return np.tanh(inputs_LF @ self.parameters["0.weight"].T + self.parameters["0.bias"])

    def outputs(self, hidden_LH: np.ndarray) -> np.ndarray:
        return hidden_LH @ self.parameters["2.weight"].T + self.parameters["2.bias"]

    def descend(
        self, inputs_LF: np.ndarray, hidden_LH: np.ndarray, slope_LO: np.ndarray, rate: float, *, body: bool
    ) -> None:
        """One step against the slope of a loss by the outputs; `body`: of the first layer too."""
        back_LH = (slope_LO @ self.parameters["2.weight"]) * (1 - hidden_LH**2)
        self.parameters["2.weight"] -= rate * slope_LO.T @ hidden_LH
        self.parameters["2.bias"] -= rate * slope_LO.sum(axis=0)
        if body:
            self.parameters["0.weight"] -= rate * back_LH.T @ inputs_LF
            self.parameters["0.bias"] -= rate * back_LH.sum(axis=0)


class Hyper(LGreco):
    def __init__(
        self, options: Sequence[Compressor], bytes_LC: np.ndarray, budget: float, seed: int, kinds_L: Sequence[int] = ()
    ) -> None:
        super().__init__(options, bytes_LC, budget, seed)
        num = len(bytes_LC)
        self.kind_LK = np.eye(max([*kinds_L, 0]) + 1)[list(kinds_L) or [0] * num]
        self.depth_L = np.arange(num) / max(num - 1, 1)
        largest = bytes_LC.max(axis=1)
        self.size_L = np.log(largest / largest.mean())
        self.agreement_L = np.ones(num)
        self.magnitude_L = np.ones(num)  # sums of |gradient + residual| on rank 0, from their squares
        self.features = np.zeros((num, 8 + self.kind_LK.shape[1]), dtype=np.float32)
        self.net = Network(2 * self.features.shape[1], len(options) + 1, seed)
        self.net.parameters["2.weight"][-1] = self.net.parameters["2.bias"][-1] = 0  # weights of layers begin equal
        self.num_lessons = 0
        # One layer each; the newest replaces the oldest.
        self.lesson_features = np.zeros((KEPT_LESSONS, 2 * self.features.shape[1]), dtype=np.float32)
        self.lesson_shares = np.zeros((KEPT_LESSONS, len(options)), dtype=np.float32)
        self.price = 1.0
        self.moved = 1.0
        self.frozen = False
        self.noise: np.ndarray | None = None  # of the weights, in the last step that explored
        self.loss_fast = self.loss_slow = math.nan
        self.spread = 0.0
        self.reward_mean = 0.0
        self.last_fallback = -REST
        self.falls_back = False

    # -- deciding ----------------------------------------------------------------------------------

    def see(self, own_LF: np.ndarray) -> None:
        gradient, given, product = own_LF.T
        self.magnitude_L = np.sqrt(given * self.bytes_LC.max(axis=1))  # bytes stand for the number of values
        norm, energy = np.log(gradient + TINY), np.log(given + TINY)
        cosine = product / np.sqrt(gradient * given + TINY)
        columns = [
            *((norm - norm.mean()) / 4, (energy - energy.mean()) / 4, (energy - norm) / 4, cosine),
            *(np.log1p(self.agreement_L), self.staleness_L / 16, self.size_L, self.depth_L),
        ]
        fresh = np.concatenate([np.stack(columns, axis=1), self.kind_LK], axis=1)
        self.features = fresh.clip(-4, 4).astype(np.float32)

    def choose(self, step: int, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        self.noise = None
        if self.falls_back:
            self.falls_back = False
            return np.full(len(self.bytes_LC), self.options.index(INT8))
        if self.num_lessons < FIRST_LESSONS:
            return super().choose(step, allowed, overdue_L)
        share_LC, weight_L = self.answers()
        if not self.frozen and step > LESSONS and step % EXPLORE_EVERY == 0:
            rng = np.random.default_rng((self.seed, step))
            self.noise = (rng.normal(size=len(weight_L)) * NOISE).astype(np.float32)
            weight_L = weight_L + self.noise
        weighted = self.magnitude_L * np.exp(weight_L)
        gain_LC = weighted[:, None] * (1 - share_LC) / (weighted.sum() + TINY)
        gain_LC[overdue_L, 0] = -np.inf
        return self._priced(gain_LC, allowed, overdue_L)

    def _priced(self, gain_LC: np.ndarray, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        """Raise or lower the price until the plan just fits: a grid of prices around the last one, then a finer one."""
        share_LC = self.bytes_LC / self.budget
        lowest, highest = self.price / 16, max(self.price * 16, 1e-9)
        found: np.ndarray | None = None
        for _ in range(2):
            prices_P = lowest * (highest / lowest) ** GRID
            chosen_PL = (gain_LC - prices_P[:, None, None] * share_LC).argmax(axis=2)
            spent_P = np.take_along_axis(self.bytes_LC[None], chosen_PL[:, :, None], axis=2).sum(axis=(1, 2))
            fits = np.flatnonzero(spent_P <= allowed)
            if len(fits):
                self.price, found = float(prices_P[fits[0]]), chosen_PL[fits[0]]
                lowest, highest = float(prices_P[fits[0] - 1]) if fits[0] else self.price / 256, self.price
            elif found is None:
                lowest, highest = highest, highest * 256
        if found is None:  # even the cheapest options are too much: only what is overdue
            self.price = min(self.price * 16, 1e9)
            return np.where(overdue_L, 1 + self.bytes_LC[:, 1:].argmin(axis=1), 0)
        return found

    def answers(self) -> tuple[np.ndarray, np.ndarray]:
        """(share that each option leaves behind, log weight of each layer)."""
        outputs = self.net.outputs(self.net.hidden(self._inputs()))
        return _shares(outputs), outputs[:, -1]

    def _inputs(self) -> np.ndarray:
        """Features of each layer, and their mean over all."""
        mean = self.features.mean(axis=0, keepdims=True)
        return np.concatenate([self.features, np.broadcast_to(mean, self.features.shape)], axis=1)

    # -- learning ----------------------------------------------------------------------------------

    error_power = 1
    most_measured = 1 << 14  # shares, unlike sums, need few values

    def layers_to_measure(self, step: int) -> Sequence[int]:
        turn, wait = divmod(max(0, step - LESSONS), LESSON_EVERY)
        return () if wait else [(min(step, LESSONS) + turn) % len(self.bytes_LC)]

    def errors(self, layers: Sequence[int], error_MC: np.ndarray) -> None:
        """Of the plan of this step; the features are those that it was made from."""
        inputs = self._inputs()
        for layer, error_C in zip(layers, error_MC, strict=True):
            at = self.num_lessons % KEPT_LESSONS
            shares = np.clip(error_C / max(error_C[0], TINY), 0, 1)
            self.lesson_features[at], self.lesson_shares[at] = inputs[layer], shares
            self.num_lessons += 1
        known = min(self.num_lessons, KEPT_LESSONS)
        features, wanted = self.lesson_features[:known], self.lesson_shares[:known]
        for _ in range(PASSES):
            hidden = self.net.hidden(features)
            outputs = self.net.outputs(hidden)
            share = _shares(outputs)
            slope = np.zeros_like(outputs)  # of the mean squared error; the first option and the weight have none
            slope[:, 1:-1] = (2 / known * (share - wanted) * share * (1 - share))[:, 1:]
            self.net.descend(features, hidden, slope, RATE, body=True)

    def observe(self, facts: Facts) -> None:
        reward = self._watch_loss(facts)
        self.agreement_L = facts.total_L / (facts.given_L + TINY)
        if self.noise is None or self.frozen:
            return
        # d log p(noise) / d weight = noise / NOISE^2 for a normal distribution around the weights.
        inputs = self._inputs()
        hidden = self.net.hidden(inputs)
        before = self.net.outputs(hidden)
        slope = np.zeros_like(before)
        slope[:, -1] = -max(-1.0, min(1.0, reward)) * self.noise / NOISE / len(before)
        self.net.descend(inputs, hidden, slope, BANDIT_RATE, body=False)
        change = float(np.abs(self.net.outputs(hidden) - before)[:, -1].mean())
        self.moved += 0.1 * (change - self.moved)
        self.frozen = self.moved < SETTLED

    def _watch_loss(self, facts: Facts) -> float:
        """How much faster than usual the loss fell, in its usual spread; asks for a fallback outside the band."""
        loss = facts.loss
        if not math.isfinite(loss):
            return 0.0
        if math.isnan(self.loss_fast):
            self.loss_fast = self.loss_slow = loss
        before = self.loss_fast
        self.loss_fast += 0.2 * (loss - self.loss_fast)
        self.loss_slow += 0.02 * (loss - self.loss_slow)
        self.spread += 0.02 * (abs(loss - self.loss_slow) - self.spread)
        fell = before - self.loss_fast
        reward = (fell - self.reward_mean) / (self.spread + 1e-9)
        self.reward_mean += 0.05 * (fell - self.reward_mean)
        outside = self.loss_fast > self.loss_slow + BAND * self.spread
        if outside and facts.step > LESSONS and facts.step - self.last_fallback >= REST:
            self.last_fallback, self.falls_back = facts.step, True
        return reward

    # -- checkpoints -------------------------------------------------------------------------------

    NUMBERS = (
        *("price", "moved", "loss_fast", "loss_slow", "spread", "reward_mean", "last_fallback", "falls_back"),
        *("frozen", "num_lessons"),
    )

    def state_dict(self) -> dict[str, Tensor]:
        numbers = torch.tensor([float(getattr(self, n)) for n in self.NUMBERS], dtype=torch.float64)
        arrays = {
            **{f"net.{name}": p for name, p in self.net.parameters.items()},
            **{"lesson_features": self.lesson_features, "lesson_shares": self.lesson_shares},
            "agreement": self.agreement_L,
        }
        copies = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {**super().state_dict(), **copies, "numbers": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.net.parameters = {name: state[f"net.{name}"].numpy().copy() for name in self.net.parameters}
        values = dict(zip(self.NUMBERS, state["numbers"].tolist(), strict=True))
        self.price, self.spread, self.reward_mean = values["price"], values["spread"], values["reward_mean"]
        self.loss_fast, self.loss_slow, self.moved = values["loss_fast"], values["loss_slow"], values["moved"]
        self.last_fallback, self.num_lessons = int(values["last_fallback"]), int(values["num_lessons"])
        self.falls_back, self.frozen = bool(values["falls_back"]), bool(values["frozen"])
        self.lesson_features = state["lesson_features"].numpy().copy()
        self.lesson_shares = state["lesson_shares"].numpy().copy()
        self.agreement_L = state["agreement"].numpy().copy()


def _shares(outputs_LO: np.ndarray) -> np.ndarray:
    shares = 1 / (1 + np.exp(-outputs_LO[:, :-1]))
    shares[:, 0] = 1  # the first option sends nothing
    return shares
