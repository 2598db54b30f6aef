"""Compression whose options are chosen per layer and step by a selector (selectors.py) on rank 0.

A step begins with one small message: the features of every replica, its loss, and rank 0's plan, one byte per layer.
Then each layer is exchanged by its option. After it, rank 0 makes the next plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.kernels.comm.cpu_codes import add_moments
from shoestring.methods.gradient_selection.hyper import Hyper
from shoestring.methods.gradient_selection.plan_log import PlanLog
from shoestring.methods.gradient_selection.selectors import (
    NUM_FEATURES,
    SKIP,
    Facts,
    LGreco,
    RandomLayers,
    RoundRobin,
    Selector,
    SelectorName,
    check_budget,
    option_grid,
)
from shoestring.train.reducers.compressor import At, Compressor
from shoestring.train.reducers.feedback import Compression
from shoestring.train.reducers.rounds import Exchange, ToAll, as_bytes, from_bytes


class SelectedCompression(Compression):
    wants_loss = True

    def __init__(
        self,
        compressors: Mapping[str, Compressor],
        *,
        wanted: Compressor,
        shapes: Mapping[str, torch.Size],
        selector: SelectorName,
        rank: int,
        size: int,
        seed: int = 0,
        budget: float | None = None,
        on_plan: Callable[[int, list[int]], None] = lambda step, plan: None,
    ) -> None:
        """`budget`: bytes that a replica may send in a step for the layers that are compressed by `wanted`; None: as
        many as `wanted` would take for all of them."""
        super().__init__(compressors, rank=rank, size=size, seed=seed)
        self.layers = [n for n, c in compressors.items() if c == wanted]
        self.places = {name: i for i, name in enumerate(self.layers)}
        self.options = option_grid(wanted)
        self.selector_seconds = 0.0
        self.on_plan = on_plan
        bytes_LC = np.array(
            [[c.sent_bytes(shapes[n], size) for c in self.options] for n in self.layers], dtype=np.float64
        )
        if budget is None:
            budget = float(sum(wanted.sent_bytes(shapes[n], size) for n in self.layers))
        check_budget(bytes_LC, budget, self.message_bytes())
        self.budget = budget - self.message_bytes()
        self.selector: Selector | None = None
        if rank == 0:
            self.selector = make_selector(selector, self.options, bytes_LC, self.budget, seed, self.layers)

    def scalars(self, num_steps: int) -> dict[str, float]:
        return {"selector_ms": 1e3 * self.selector_seconds / num_steps}

    def decisions(self) -> dict[str, Any]:
        return {} if self.selector is None else self.selector.state_dict()

    def load_decisions(self, state: dict[str, Any]) -> None:
        if self.selector is not None:
            self.selector.load_state_dict(state)

    def message_bytes(self) -> int:
        """What the small message costs a replica."""
        return (self.size - 1) * (4 * (NUM_FEATURES * len(self.layers) + 1) + len(self.layers))

    def exchange(self, gradients: Mapping[str, Tensor], step: int) -> Exchange[dict[str, Tensor]]:
        given = self.given({n: g for n, g in gradients.items() if n not in self.places})
        residuals = [self.residual(n, gradients[n]) for n in self.layers]
        mine = add_moments(residuals, [gradients[n] for n in self.layers])
        given |= zip(self.layers, residuals, strict=True)
        loss = torch.tensor([self.loss], device=mine.device)
        plan = self._plan(step, mine).to(mine.device)
        answers = yield ToAll(torch.cat([as_bytes(mine.flatten()), as_bytes(loss), plan]))
        chosen = answers[0, -len(self.layers) :].tolist()
        for name, option in zip(self.layers, chosen, strict=True):
            self.compressors[name] = self.options[option]
        self.on_plan(step, chosen)
        began = time.perf_counter()
        measured = () if self.selector is None else self.selector.layers_to_measure(step)
        errors = self._errors([self.layers[i] for i in measured], given, step)  # before the exchange uses `given` up
        self.selector_seconds += time.perf_counter() - began
        sums = yield from self.exchange_given(given, step)
        if self.selector is not None:
            began = time.perf_counter()
            numbers = from_bytes(answers[:, : -len(self.layers)], torch.float32).double()
            features = numbers[:, :-1].sum(0).view(-1, NUM_FEATURES).cpu().numpy()
            total_L = self._applied([sums[n] for n in self.layers], chosen)
            _, given_L, _ = features.T
            # Replicas' losses are parts of the step's loss: they are divided by the count of the whole step.
            self.selector.observe(Facts(step, given_L, total_L, float(numbers[:, -1].sum())))
            if measured:
                self.selector.errors(measured, errors)
            self.selector_seconds += time.perf_counter() - began
        return sums

    def _plan(self, step: int, own_LF: Tensor) -> Tensor:
        if self.selector is None:
            return torch.zeros(len(self.layers), dtype=torch.uint8)
        own = own_LF.double().cpu().numpy()  # waits for a GPU, which is not the selector's time
        began = time.perf_counter()
        self.selector.see(own)
        plan = torch.from_numpy(self.selector.plan(step))
        self.selector_seconds += time.perf_counter() - began
        return plan

    def _applied(self, sums: Sequence[Tensor], chosen: Sequence[int]) -> np.ndarray:
        """The squared norm of each layer's sum; where nothing is sent it is not computed."""
        sent, found = [i for i, option in enumerate(chosen) if self.options[option] != SKIP], np.zeros(len(sums))
        if sent:
            norms = torch.stack(torch._foreach_norm([sums[i] for i in sent]))
            found[sent] = norms.double().square().cpu().numpy()
        return found

    def _errors(self, names: Sequence[str], given: Mapping[str, Tensor], step: int) -> np.ndarray:
        """Of each layer by each option; of a part of the layer, another one in each step, where that is enough."""
        if self.selector is None:
            return np.zeros((0, len(self.options)))
        squares, most = self.selector.error_power == 2, self.selector.most_measured

        def part(name: str) -> Tensor:
            flat = given[name].reshape(-1)
            return flat if flat.numel() <= most else flat[(step * most) % (flat.numel() - most + 1) :][:most]

        def error(x: Tensor, option: Compressor, at: At) -> Tensor:
            lost = x - option.decoded(x, at)
            return lost.square_().sum() if squares else lost.abs_().sum()

        found = [
            torch.stack([error(part(name), option, self.at(name, step)) for option in self.options]) for name in names
        ]
        return torch.stack(found).double().cpu().numpy() if found else np.zeros((0, len(self.options)))


def make_selector(
    name: SelectorName,
    options: Sequence[Compressor],
    bytes_LC: np.ndarray,
    budget: float,
    seed: int,
    layers: Sequence[str],
) -> Selector:
    if name == "hyper":
        kinds = [n.split(".")[-2] if "." in n else n for n in layers]
        known = list(dict.fromkeys(kinds))
        return Hyper(options, bytes_LC, budget, seed, [known.index(k) for k in kinds])
    kind = {"round-robin": RoundRobin, "random": RandomLayers, "l-greco": LGreco}[name]
    return kind(options, bytes_LC, budget, seed)


def open_selected(
    compressors: Mapping[str, Compressor], *, selector: SelectorName, folder: Path | None, **options: Any
) -> SelectedCompression:
    """With its plans in `folder`, where there is one."""
    log = PlanLog(folder)
    made = SelectedCompression(compressors, selector=selector, on_plan=log.add, **options)
    log.begin(made.layers, [c.name for c in made.options])
    return made


# Entry points of shoestring.selectors.
round_robin = partial(open_selected, selector="round-robin")
random_layers = partial(open_selected, selector="random")
l_greco = partial(open_selected, selector="l-greco")
hyper = partial(open_selected, selector="hyper")
