"""Mixed bits: which layer gets which Format, by measured damage, under a budget of bits per weight.

    units = measure_damage(model, [parse_format(x) for x in ("int2", "int3", "int4")], windows(tokens, 4, 512))
    choice = choose_formats(units, budget=3.0)
    quantize(model, choice.rules, ...)           # or train_blocks, or convert

The damage of a Format in a layer is what the model's predictions lose when this layer alone has it: mean over tokens of
KL(full || changed), or the rise of the loss on the text. Everything before the changed block is computed once, so that
a trial costs the blocks from there on. The method assumes that damages of different layers add up; an evaluation tells
what the chosen mix really costs. With Calibration(onload_device=device) one block at a time is on the device, beside
the output head; all trials of a block then pass through the other blocks together, each of which is moved once.

Choosing is a knapsack: minimise the summed damage with the summed bits, scales, zero points and tables included, within
the budget. It is solved exactly: a state (bits, damage) is kept while no other is better in both and its Lagrange bound
can still beat the best known solution. Beyond MAX_STATES the most promising are kept, and the result has exact=False.

Not supported: several processes, and interactions between two layers.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError, during
from shoestring.formats import Dense, Format, FormatLinear, GridFormat, parse_format
from shoestring.formats.convert import Rule, format_linear
from shoestring.host.block_offload import activation_store, on_device
from shoestring.json_files import LARGE, Fields, json_lines, parse_json
from shoestring.model.blocks import BlocksModel, block_of, block_prefixes
from shoestring.runlog import RunLog
from shoestring.shrink.calibrate import Calibration, embed_all
from shoestring.shrink.chosen_grid import round_to_nearest, state_of
from shoestring.shrink.quantize import HEADS, plan

MAX_STATES = 200_000
CHUNK = 1024  # tokens whose logits are held at once

Change = tuple[Sequence[str], Format | None]  # layers of a block, and what they are rounded to


@dataclass(frozen=True)
class FormatOption:
    format: Format
    bits: float  # stored bits of the unit, metadata included
    damage: float


@dataclass(frozen=True)
class LayerGroup:
    """Layers that get the same Format."""

    name: str
    layers: tuple[str, ...]
    num_weights: int
    options: tuple[FormatOption, ...]


@dataclass(frozen=True)
class MixedBits:
    """What was chosen: `rules` is for `convert`, `quantize` and `train_blocks`."""

    units: tuple[LayerGroup, ...]
    picks: tuple[int, ...]
    budget: float
    exact: bool

    @property
    def chosen(self) -> list[FormatOption]:
        return [u.options[i] for u, i in zip(self.units, self.picks, strict=True)]

    @property
    def bits_per_weight(self) -> float:
        return sum(o.bits for o in self.chosen) / sum(u.num_weights for u in self.units)

    @property
    def damage(self) -> float:
        return sum(o.damage for o in self.chosen)

    @property
    def rules(self) -> list[Rule]:
        return [(layer, o.format) for u, o in zip(self.units, self.chosen, strict=True) for layer in u.layers]

    def to_json(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "bits_per_weight": round(self.bits_per_weight, 5),
            "damage": self.damage,
            "exact": self.exact,
            "units": [
                {
                    "name": u.name,
                    "layers": list(u.layers),
                    "format": o.format.label,
                    "bits_per_weight": round(o.bits / u.num_weights, 5),
                    "damage": o.damage,
                    "options": {x.format.label: x.damage for x in u.options},
                }
                for u, o in zip(self.units, self.chosen, strict=True)
            ],
        }


# -- measuring -----------------------------------------------------------------------------------------------
@torch.no_grad()
def measure_damage(
    model: BlocksModel,
    candidates: Sequence[Format],
    tokens_NT: Tensor,
    *,
    units: Literal["layer", "block"] = "layer",
    measure: Literal["kl", "loss"] = "kl",
    calibration: Calibration | None = None,
    skip: Sequence[str] = HEADS,
    progress: Callable[[int, int, float], None] | None = None,
    file: Path | None = None,
) -> list[LayerGroup]:
    """Every unit with the damage of every candidate; the model is left unchanged.

    progress(trials done, trials, damage). `file` keeps finished trials, one JSON line each, for a resumed run.
    """
    check_different(candidates)
    model.check_inputs(tokens_NT)
    grouped = units_of(model, candidates, units, skip)
    known = _read(file, tokens_NT, measure)
    known |= {_key(name, f): 0.0 for name in grouped for f in candidates if isinstance(f, Dense)}
    calibration = calibration or Calibration()
    offloaded = calibration.onload_device is not None
    turns = turns_of(grouped, candidates, block_prefixes(model) if offloaded else None)
    done, total = 0, len(grouped) * len(candidates)
    with _Trials(model, tokens_NT, calibration, measure, max(map(len, turns), default=1)) as trials:
        for turn in turns:
            missing = [(name, f) for name, f in turn if _key(name, f) not in known]
            damages = trials.damages([(grouped[name], f) for name, f in missing])
            for (name, format), damage in zip(missing, damages, strict=True):
                known[_key(name, format)] = damage
                _append(file, _key(name, format), damage, tokens_NT, measure)
            for name, format in turn:
                done += 1
                if progress is not None:
                    progress(done, total, known[_key(name, format)])
    return [_unit(model, name, members, candidates, known) for name, members in grouped.items()]


def turns_of(
    grouped: dict[str, list[str]], candidates: Sequence[Format], prefixes: list[str] | None
) -> list[list[tuple[str, Format]]]:
    """The trials (unit, Format) in order: grouped by block where prefixes are given, else one by one."""
    turns: dict[object, list[tuple[str, Format]]] = {}
    for trial in itertools.product(grouped, candidates):
        turns.setdefault(trial if prefixes is None else block_of(prefixes, grouped[trial[0]][0]), []).append(trial)
    return list(turns.values())


def _key(unit: str, format: Format) -> str:
    return f"{unit} {format.label}"


def _unit(
    model: BlocksModel, name: str, members: list[str], candidates: Sequence[Format], known: dict[str, float]
) -> LayerGroup:
    shapes = [format_linear(model, m).shape for m in members]
    options = [
        FormatOption(f, sum(f.bits_per_weight(s) * s[0] * s[1] for s in shapes), known[_key(name, f)])
        for f in candidates
    ]
    return LayerGroup(name, tuple(members), sum(s[0] * s[1] for s in shapes), tuple(options))


def units_of(
    model: BlocksModel, candidates: Sequence[Format], units: str = "layer", skip: Sequence[str] = HEADS
) -> dict[str, list[str]]:
    """{unit: its layers}; raises UserError for every candidate that does not fit."""
    plans = [plan(model, [("*", f)], skip) for f in candidates if not isinstance(f, Dense)]
    prefixes = block_prefixes(model)
    grouped: dict[str, list[str]] = {}
    for t in plans[0] if plans else ():
        if (index := block_of(prefixes, t.name)) is not None:
            unit = t.name if units == "layer" else prefixes[index].removesuffix(".")
            grouped.setdefault(unit, []).append(t.name)
    return grouped


@dataclass
class _Trials:
    """The activations before the current block, and the full model's outputs to compare with."""

    model: BlocksModel
    tokens_NT: Tensor
    calibration: Calibration
    measure: str
    together: int  # trials that are computed at once, at most
    at: int = 0
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> _Trials:
        model, calibration = self.model, self.calibration
        third = replace(calibration, memory_gb=calibration.memory_gb / 3)  # there are three stores
        with ExitStack() as stack:
            (self.store,), self.passes = embed_all(model, self.tokens_NT, third, stack)
            self.device, self.batches = self.passes.device, self.passes.batches
            one = self.store.shape
            self.final, work = (
                activation_store(shape, model.compute_dtype, self.device, third, stack)
                for shape in (one, (one[0] * self.together, *one[1:]))
            )
            self.work = work.split(one[0])
            # After embed_all: a tied head is the embedding, which would be moved twice.
            for module in model.tail_modules():
                stack.enter_context(on_device(module, calibration.onload_device, model.compute_dtype))
            self.run([((), None)])
            self.final.copy_(self.work[0])
            self.full_loss = 0.0
            if self.measure == "loss":
                self.full_loss = sum(self.score(self.final[r], r) for r in self.batches) / self.num_scored
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    @property
    def num_scored(self) -> int:
        num_windows, length = self.store.shape[:2]
        return num_windows * (length - 1 if self.measure == "loss" else length)

    def run(self, changes: Sequence[Change]) -> None:
        """Write into `work` what the output head reads after each of the changes, all of which are in block `at`."""
        model, parts = self.model, self.work[: len(changes)]
        for part in parts:
            part.copy_(self.store)
        for index in range(self.at, len(model.blocks)):
            with on_device(model.blocks[index], self.calibration.onload_device, model.compute_dtype):
                for part, (layers, format) in zip(parts, changes, strict=True):
                    changed = [format_linear(model, name) for name in layers] if index == self.at else []
                    with rounded(changed, format):
                        self.passes.run(index, part)
        for part, rows in itertools.product(parts, self.batches):
            part[rows] = model.final_hidden(part[rows].to(self.device)).to(part.device)

    def logp(self, hidden_RD: Tensor) -> Tensor:
        return F.log_softmax(self.model.read_logits(hidden_RD).float(), dim=-1)

    def score(self, hidden: Tensor, rows: slice) -> float:
        """Summed over tokens: KL from the full model's predictions, or the loss of the next token."""
        hidden = hidden.to(self.device)
        total = 0.0
        if self.measure == "loss":
            hidden = hidden[:, :-1]
            targets = self.tokens_NT[rows].to(self.device)[:, 1:].flatten()
            for h, t in zip(hidden.flatten(0, 1).split(CHUNK), targets.split(CHUNK), strict=True):
                total += float(F.nll_loss(self.logp(h), t, reduction="sum"))
            return total
        full = self.final[rows].to(self.device).flatten(0, 1)
        for h, f in zip(hidden.flatten(0, 1).split(CHUNK), full.split(CHUNK), strict=True):
            total += float(F.kl_div(self.logp(h), self.logp(f), reduction="sum", log_target=True))
        return total

    def damages(self, changes: Sequence[tuple[Sequence[str], Format]]) -> list[float]:
        """The damage of each change by itself. All are in one block; blocks come in rising order."""
        if not changes:
            return []
        changed = block_of(block_prefixes(self.model), changes[0][0][0])
        assert changed is not None
        while self.at < changed:
            block = self.model.blocks[self.at]
            with on_device(block, self.calibration.onload_device, self.model.compute_dtype):
                self.passes.run(self.at, self.store)
            self.at += 1
        self.run(changes)
        sums = [sum(self.score(part[r], r) for r in self.batches) for part in self.work[: len(changes)]]
        return [total / self.num_scored - self.full_loss for total in sums]


@contextmanager
def rounded(linears: list[FormatLinear], format: Format | None) -> Iterator[None]:
    """Within the context the layers' weights are rounded to the nearest level of the Format."""
    kept = [m.weight.detach().clone() for m in linears]
    try:
        for m in linears:
            assert isinstance(format, GridFormat)
            m.weight.copy_(round_to_nearest(m.weight, format, state_of(format, m.weight)).weight)
        yield
    finally:
        for m, w in zip(linears, kept, strict=True):
            m.weight.copy_(w)


def _stamp(tokens_NT: Tensor, measure: str) -> str:
    return f"{measure} {list(tokens_NT.shape)} {int(tokens_NT.sum())}"


def _read(file: Path | None, tokens_NT: Tensor, measure: str) -> dict[str, float]:
    """Finished trials; a last line that a kill cut off is ignored."""
    known: dict[str, float] = {}
    if file is None or not file.is_file():
        return known
    for number, line in json_lines(file):
        try:
            data = parse_json(line, f"{file}:{number}")
        except UserError:
            continue
        if not isinstance(data, dict) or data.get("of") != _stamp(tokens_NT, measure):
            raise UserError(f"{file} was measured on another text or in another way: delete it and start again")
        fields = Fields(data, f"{file}:{number}")
        known[fields.text("trial")] = fields.number("damage", least=-LARGE)
    return known


def _append(file: Path | None, trial: str, damage: float, tokens_NT: Tensor, measure: str) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as f:
            line = {"trial": trial, "damage": damage, "of": _stamp(tokens_NT, measure)}
            f.write(("" if f.tell() == 0 else "\n") + json.dumps(line))


# -- choosing ------------------------------------------------------------------------------------------------
def check_different(candidates: Sequence[Format]) -> None:
    """UserError unless there are different Formats, one of which is not dense."""
    labels = [f.label for f in candidates]
    if len(set(labels)) < len(labels) or all(isinstance(f, Dense) for f in candidates):
        raise UserError(
            f"candidates for mixed bits are {', '.join(labels) or 'missing'}: give two or more different formats"
        )


def check_candidates(model: BlocksModel, candidates: Sequence[Format], budget: float) -> None:
    """UserError for candidates that do not fit the layers, and for a budget that is too small."""
    nothing: dict[str, float] = defaultdict(float)
    grouped = units_of(model, candidates)
    check_budget([_unit(model, n, members, candidates, nothing) for n, members in grouped.items()], budget)


def check_budget(units: Sequence[LayerGroup], budget: float) -> None:
    weights = sum(u.num_weights for u in units)
    least = sum(min(o.bits for o in u.options) for u in units) / max(1, weights)
    if least > budget * (1 + 1e-9):
        raise UserError(
            f"a budget of {budget} bits per weight is too small: the smallest candidates need {least:.3f}; give "
            "more bits, a larger group, or a candidate with fewer bits"
        )


def choose_formats(units: Sequence[LayerGroup], budget: float) -> MixedBits:
    """The least summed damage within `budget` bits per weight over all units, metadata included."""
    if not units or any(not u.options for u in units):
        raise UserError("mixed bits need layers and candidate formats: there are none")
    weights = sum(u.num_weights for u in units)
    check_budget(units, budget)
    bits = [[o.bits for o in u.options] for u in units]
    damage = [[o.damage for o in u.options] for u in units]
    picks, exact = knapsack(bits, damage, budget * weights)
    return MixedBits(tuple(units), tuple(picks), budget, exact)


def knapsack(
    bits: list[list[float]], damage: list[list[float]], room: float, max_states: int = MAX_STATES
) -> tuple[list[int], bool]:
    """One option of every unit, with the least summed damage whose summed bits fit into `room`."""
    room *= 1 + 1e-12  # sums in another order
    price, best_picks = lagrange(bits, damage, room)
    best = sum(d[i] for d, i in zip(damage, best_picks, strict=True))
    # What the units still to come need at least: in bits, and in damage + price * bits.
    need, rest = [0.0], [0.0]
    for b, d in zip(reversed(bits), reversed(damage), strict=True):
        need.append(need[-1] + min(b))
        rest.append(rest[-1] + min(y + price * x for x, y in zip(b, d, strict=True)))
    need, rest = need[::-1], rest[::-1]
    used, lost = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    history: list[tuple[Tensor, Tensor]] = []
    exact = True
    for i, (b, d) in enumerate(zip(bits, damage, strict=True)):
        option = torch.arange(len(b)).repeat_interleave(len(used))
        parent = torch.arange(len(used)).repeat(len(b))
        more_used = used[parent] + torch.tensor(b, dtype=torch.float64)[option]
        more_lost = lost[parent] + torch.tensor(d, dtype=torch.float64)[option]
        bound = more_lost + price * (more_used - room) + rest[i + 1]
        slack = 1e-9 * (1 + abs(best))
        keep = ((more_used + need[i + 1] <= room) & (bound <= best + slack)).nonzero().flatten()
        if len(keep) > max_states:
            keep, exact = keep[bound[keep].argsort(stable=True)[:max_states]], False
        # Sorted by bits, then damage: a state stays only if its damage is below that of every cheaper one.
        keep = keep[more_lost[keep].argsort(stable=True)]
        keep = keep[more_used[keep].argsort(stable=True)]
        least = more_lost[keep].cummin(0).values
        first = torch.ones(len(keep), dtype=torch.bool)
        first[1:] = more_lost[keep][1:] < least[:-1]
        keep = keep[first]
        if len(keep) == 0:  # rounding errors pruned the last path to `best`
            return best_picks, exact
        used, lost = more_used[keep], more_lost[keep]
        history.append((parent[keep], option[keep]))
    at = int(lost.argmin())
    if float(lost[at]) > best:
        return best_picks, exact
    picks: list[int] = []
    for parents, options in reversed(history):
        picks.append(int(options[at]))
        at = int(parents[at])
    return picks[::-1], exact


def lagrange(bits: list[list[float]], damage: list[list[float]], room: float) -> tuple[float, list[int]]:
    """The price of a bit at which the cheapest choices just fit, and these choices, improved greedily while there is
    room."""

    def at_price(price: float) -> list[int]:
        return [
            min(range(len(b)), key=lambda j, b=b, d=d: (d[j] + price * b[j], b[j]))  # type: ignore[misc]
            for b, d in zip(bits, damage, strict=True)
        ]

    def cost(picks: list[int]) -> float:
        return sum(b[i] for b, i in zip(bits, picks, strict=True))

    low, high = 0.0, 1.0
    picks = at_price(0.0)
    if cost(picks) > room:
        spread = max(max(d) - min(d) for d in damage)
        gaps = [abs(x - y) for b in bits for x in b for y in b if x != y]
        high = 2 * spread / min(gaps) + 1e-30
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(at_price(middle)) > room else (low, middle)
        picks = at_price(high)
    else:
        high = 0.0
    if cost(picks) > room:  # equal damages at every price
        picks = [min(range(len(b)), key=lambda j, b=b: b[j]) for b in bits]  # type: ignore[misc]
    while True:
        spare = room - cost(picks)
        gains = [
            (d[i] - d[j], u, j)
            for u, (b, d, i) in enumerate(zip(bits, damage, picks, strict=True))
            for j in range(len(b))
            if d[j] < d[i] and b[j] - b[i] <= spare
        ]
        if not gains:
            return high, picks
        _, u, j = max(gains)
        picks[u] = j


# -- as a stage of a run -------------------------------------------------------------------------------------
def read_candidates(bits_budget: float | None, candidates: str, damage_windows: int, rules: str | None) -> list[Format]:
    """The formats that the setting bits_budget chooses from; none without a budget."""
    if bits_budget is None:
        return []
    if not bits_budget > 0 or damage_windows < 1:
        raise UserError(
            f"bits_budget={bits_budget}, damage_windows={damage_windows}: give more than 0 bits per weight "
            "and 1 window or more"
        )
    if rules:
        raise UserError("rules and bits_budget both say which layer gets what: give one of them")
    formats = [parse_format(part) for part in candidates.split(",") if part.strip()]
    if not formats:
        raise UserError("candidates= is empty: bits_budget needs formats to choose from, say int2,int3,int4")
    check_different(formats)
    return formats


def cheapest(candidates: Sequence[Format]) -> list[Rule]:
    """The least that a budget could choose."""
    square = (4096, 4096)
    return [("*", min(candidates, key=lambda f: f.stored().bits_per_weight(square)))] if candidates else []


def choose_by_damage(
    model: BlocksModel,
    candidates: Sequence[Format],
    budget: float,
    tokens_NT: Tensor,
    log: RunLog,
    title: str,
    file: Path,
    **options: Any,
) -> MixedBits:
    """Measure the damage of every trial that `file` does not hold yet, with a progress bar, and choose."""
    num_trials = len(candidates) * len(units_of(model, candidates, options.get("units", "layer")))
    with during("measuring damage"), log.progress(num_trials, title) as bar:
        units = measure_damage(
            model,
            candidates,
            tokens_NT,
            progress=lambda done, total, damage: bar.advance(1, damage=damage),
            file=file,
            **options,
        )
    return choose_formats(units, budget)
