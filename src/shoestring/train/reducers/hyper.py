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

from shoestring.train.reducers.compressor import Compressor
from shoestring.train.reducers.quantizers import INT8
from shoestring.train.reducers.selectors import Facts, LGreco

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
        self.features = torch.zeros(num, 8 + self.kind_LK.shape[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body = nn.Linear(2 * self.features.shape[1], HIDDEN)
            self.head = nn.Linear(HIDDEN, len(options) + 1)
            self.net = nn.Sequential(body, nn.Tanh(), self.head)
        with torch.no_grad():
            self.head.weight[-1].zero_()  # weights of layers begin equal
            self.head.bias[-1].zero_()
        self.num_lessons = 0
        # One layer each; the newest replaces the oldest.
        self.lesson_features = torch.zeros(KEPT_LESSONS, 2 * self.features.shape[1])
        self.lesson_shares = torch.zeros(KEPT_LESSONS, len(options))
        self.price = 1.0
        self.moved = 1.0
        self.frozen = False
        self.noise: Tensor | None = None  # of the weights, in the last step that explored
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
        self.features = torch.from_numpy(np.clip(fresh, -4, 4)).float()

    def choose(self, step: int, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        self.noise = None
        if self.falls_back:
            self.falls_back = False
            return np.full(len(self.bytes_LC), self.options.index(INT8))
        if self.num_lessons < FIRST_LESSONS:
            return super().choose(step, allowed, overdue_L)
        with torch.no_grad():
            share_LC, weight_L = self.answers()
        if not self.frozen and step > LESSONS and step % EXPLORE_EVERY == 0:
            rng = np.random.default_rng((self.seed, step))
            self.noise = torch.from_numpy(rng.normal(size=len(weight_L)) * NOISE).float()
            weight_L = weight_L + self.noise
        weighted = self.magnitude_L * weight_L.exp().double().numpy()
        gain_LC = weighted[:, None] * (1 - share_LC.double().numpy()) / (weighted.sum() + TINY)
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

    def answers(self) -> tuple[Tensor, Tensor]:
        """(share that each option leaves behind, log weight of each layer)."""
        outputs = self.net(self._inputs())
        return _shares(outputs), outputs[:, -1]

    def _inputs(self) -> Tensor:
        """Features of each layer, and their mean over all."""
        return torch.cat([self.features, self.features.mean(dim=0).expand_as(self.features)], dim=1)

    # -- learning ----------------------------------------------------------------------------------

    error_power = 1

    def layers_to_measure(self, step: int) -> Sequence[int]:
        turn, wait = divmod(max(0, step - LESSONS), LESSON_EVERY)
        return () if wait else [(min(step, LESSONS) + turn) % len(self.bytes_LC)]

    def errors(self, layers: Sequence[int], error_MC: np.ndarray) -> None:
        """A layer's features are those of the step before its plan: what it was measured on."""
        inputs = self._inputs()
        for layer, error_C in zip(layers, error_MC, strict=True):
            at = self.num_lessons % KEPT_LESSONS
            shares = np.clip(error_C / max(error_C[0], TINY), 0, 1)
            self.lesson_features[at], self.lesson_shares[at] = inputs[layer], torch.from_numpy(shares)
            self.num_lessons += 1
        known = slice(0, min(self.num_lessons, KEPT_LESSONS))
        for _ in range(PASSES):
            wrong = _shares(self.net(self.lesson_features[known])) - self.lesson_shares[known]
            self._descend(wrong.square().sum(-1).mean(), self.net, RATE)

    def observe(self, facts: Facts) -> None:
        reward = self._watch_loss(facts)
        self.agreement_L = facts.total_L / (facts.given_L + TINY)
        if self.noise is None or self.frozen:
            return
        # d log p(noise) / d weight = noise / NOISE^2 for a normal distribution around the weights.
        before = self.answers()[1]
        wanted = max(-1.0, min(1.0, reward)) * self.noise / NOISE
        self._descend(-(wanted * before).mean(), self.head, BANDIT_RATE)
        with torch.no_grad():
            change = float((self.answers()[1] - before).abs().mean())
        self.moved += 0.1 * (change - self.moved)
        self.frozen = self.moved < SETTLED

    def _descend(self, loss: Tensor, part: nn.Module, rate: float) -> None:
        params = list(part.parameters())
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g in zip(params, grads, strict=True):
                p.sub_(g, alpha=rate)

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
        network = {f"net.{n}": p.detach().clone() for n, p in self.net.named_parameters()}
        lessons = {"lesson_features": self.lesson_features.clone(), "lesson_shares": self.lesson_shares.clone()}
        agreement = {"agreement": torch.from_numpy(self.agreement_L.copy())}
        return {**super().state_dict(), **network, **lessons, **agreement, "numbers": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            for n, p in self.net.named_parameters():
                p.copy_(state[f"net.{n}"])
        values = dict(zip(self.NUMBERS, state["numbers"].tolist(), strict=True))
        self.price, self.spread, self.reward_mean = values["price"], values["spread"], values["reward_mean"]
        self.loss_fast, self.loss_slow, self.moved = values["loss_fast"], values["loss_slow"], values["moved"]
        self.last_fallback, self.num_lessons = int(values["last_fallback"]), int(values["num_lessons"])
        self.falls_back, self.frozen = bool(values["falls_back"]), bool(values["frozen"])
        self.lesson_features, self.lesson_shares = state["lesson_features"], state["lesson_shares"]
        self.agreement_L = state["agreement"].numpy().copy()


def _shares(outputs: Tensor) -> Tensor:
    shares = outputs[..., :-1].sigmoid()
    return torch.cat([torch.ones_like(shares[..., :1]), shares[..., 1:]], dim=-1)  # the first option sends nothing
