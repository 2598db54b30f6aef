"""The learned selector: one small network for all layers, under a budget of bytes.

    features of a layer -> shared MLP, with the mean over layers as context -> a score for each option
    option = argmax(score - price * bytes / budget),   the price is raised until the plan fits the budget (dual ascent)

Features: log norms of gradient and of gradient + residual, their cosine, agreement between replicas, staleness, size,
depth, kind of layer. The cosine is to gradient + residual, which points to where the last gradients did, so that no
copy of a gradient is kept.

Three stages. Up to IMITATE steps L-GreCo decides and the network learns to answer as it does. Then a contextual bandit:
in a share of the steps scores get Gumbel noise, and scores of what was chosen go up when the loss fell faster than
usual (REINFORCE, with the change of the smoothed loss as reward). When its choices have become certain, it is frozen.

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

IMITATE = 100
EXPLORE = 0.05
CERTAIN = 0.05  # nats of entropy per layer below which the network is frozen
HIDDEN = 32
RATE, BANDIT_RATE, LESSONS = 0.5, 0.02, 10
BAND = 4.0  # standard deviations
REST = 50  # steps between two fallbacks


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
        self.features = torch.zeros(num, 7 + self.kind_LK.shape[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(2 * self.features.shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, len(options))
            )
        self.price = 1.0
        self.frozen = False
        self.chosen: Tensor | None = None  # of the last step that explored
        self.loss_fast = self.loss_slow = math.nan
        self.spread = 0.0
        self.reward_mean = 0.0
        self.last_fallback = -REST
        self.falls_back = False

    # -- deciding ----------------------------------------------------------------------------------

    def choose(self, step: int, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        self.chosen = None
        if self.falls_back:
            self.falls_back = False
            return np.full(len(self.bytes_LC), self.options.index(INT8))
        if step < IMITATE:
            return super().choose(step, allowed, overdue_L)
        with torch.no_grad():
            score_LC = self.scores()
        rng = np.random.default_rng((self.seed, step))
        explores = not self.frozen and rng.random() < EXPLORE
        values = score_LC.double().numpy()
        if explores:
            values = values + rng.gumbel(size=values.shape)
        values = np.where(overdue_L[:, None] & (np.arange(values.shape[1]) == 0), -np.inf, values)
        chosen = self._priced(values, allowed, overdue_L)
        if explores:
            self.chosen = torch.from_numpy(chosen)
        return chosen

    def _priced(self, score_LC: np.ndarray, allowed: float, overdue_L: np.ndarray) -> np.ndarray:
        """Raise or lower the price until the plan just fits."""
        share_LC = self.bytes_LC / self.budget

        def at(price: float) -> tuple[np.ndarray, float]:
            chosen = (score_LC - price * share_LC).argmax(axis=1)
            return chosen, float(self.bytes_LC[np.arange(len(chosen)), chosen].sum())

        low, high = 0.0, max(self.price, 1e-3)
        while at(high)[1] > allowed and high < 1e9:
            high *= 4
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle)[1] > allowed else (low, middle)
        self.price = high
        chosen, spent = at(high)
        if spent > allowed:  # even the cheapest options are too much: only what is overdue
            chosen = np.where(overdue_L, 1 + self.bytes_LC[:, 1:].argmin(axis=1), 0)
        return chosen

    def scores(self) -> Tensor:
        context = self.features.mean(dim=0, keepdim=True).expand_as(self.features)
        return self.net(torch.cat([self.features, context], dim=1)).log_softmax(dim=1)

    # -- learning ----------------------------------------------------------------------------------

    def observe(self, facts: Facts) -> None:
        reward = self._watch_loss(facts)
        if facts.step == IMITATE or (facts.step < IMITATE and facts.step % 5 == 0):
            self._update_features(facts)
            self._imitate()
            return
        if self.chosen is not None and not self.frozen:
            scores = self.scores()
            taken = scores.gather(1, self.chosen[:, None]).mean()
            self._descend(-max(-1.0, min(1.0, reward)) * taken, BANDIT_RATE)
            with torch.no_grad():
                self.frozen = float(-(scores.exp() * scores).sum(1).mean()) < CERTAIN
        self._update_features(facts)

    def _imitate(self) -> None:
        wanted = torch.from_numpy(super().choose(0, self.budget, np.zeros(len(self.bytes_LC), dtype=bool)))
        for _ in range(LESSONS):
            self._descend(nn.functional.nll_loss(self.scores(), wanted), RATE)

    def _descend(self, loss: Tensor, rate: float) -> None:
        grads = torch.autograd.grad(loss, list(self.net.parameters()))
        with torch.no_grad():
            for p, g in zip(self.net.parameters(), grads, strict=True):
                p.sub_(g, alpha=rate)

    def _update_features(self, facts: Facts) -> None:
        tiny = 1e-30
        norm, given = np.log(facts.gradient_L + tiny), np.log(facts.given_L + tiny)
        cosine = facts.product_L / np.sqrt(facts.gradient_L * facts.given_L + tiny)
        agreement = facts.total_L / (facts.given_L + tiny)
        columns = [
            *((norm - norm.mean()) / 4, (given - given.mean()) / 4, (given - norm) / 4, cosine, np.log1p(agreement)),
            *(self.staleness_L / 16, self.size_L),
        ]
        fresh = np.concatenate([np.stack(columns, axis=1), self.kind_LK], axis=1)
        self.features = torch.from_numpy(np.clip(fresh, -4, 4)).float()

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
        if outside and facts.step > IMITATE and facts.step - self.last_fallback >= REST:
            self.last_fallback, self.falls_back = facts.step, True
        return reward

    # -- checkpoints -------------------------------------------------------------------------------

    NUMBERS = ("price", "loss_fast", "loss_slow", "spread", "reward_mean", "last_fallback", "falls_back", "frozen")

    def state_dict(self) -> dict[str, Tensor]:
        numbers = torch.tensor([float(getattr(self, n)) for n in self.NUMBERS], dtype=torch.float64)
        network = {f"net.{n}": p.detach().clone() for n, p in self.net.named_parameters()}
        chosen = torch.full((len(self.bytes_LC),), -1) if self.chosen is None else self.chosen
        return {**super().state_dict(), **network, "numbers": numbers, "features": self.features, "chosen": chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            for n, p in self.net.named_parameters():
                p.copy_(state[f"net.{n}"])
        values = dict(zip(self.NUMBERS, state["numbers"].tolist(), strict=True))
        self.price, self.spread, self.reward_mean = values["price"], values["spread"], values["reward_mean"]
        self.loss_fast, self.loss_slow = values["loss_fast"], values["loss_slow"]
        self.last_fallback = int(values["last_fallback"])
        self.falls_back, self.frozen = bool(values["falls_back"]), bool(values["frozen"])
        self.features = state["features"]
        self.chosen = None if int(state["chosen"][0]) < 0 else state["chosen"]
