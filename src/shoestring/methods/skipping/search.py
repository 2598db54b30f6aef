"""A skip set by measured damage per measured second, with fitted stand-ins.

Cosine similarity tells how little a sublayer changes the stream, not how much the change matters. Here the damage of
leaving a candidate out is measured at the output: KL(whole model || without) over tokens of a calibration text. The
candidate with the lowest price is skipped next,

    price = (damage with it - damage so far) / seconds that it saves at the wanted context length

Prices change as the set grows, so before each choice the `lookahead` cheapest candidates are measured again under the
set so far (the first round measures all). A trial runs only the blocks from the candidate on.

A stand-in is fitted by least squares, one scale and a shift per channel,

    minimise  sum over tokens of |scale x + shift - y|^2 / |x|^2

relative because a norm follows. Attention sinks (mostly the first token of a window, whose stream is fifty times as
long as others) are left out of the fit. They are also why the scale is one number: a scale per channel, good for all
other tokens, ruined the sinks and every later attention (KL 0.70 instead of 0.16 for one FFN of SmolLM2-135M). x is the
input under the set so far, so that stand-ins compensate those before them; after the search all are fitted once more,
in order, where that lowers the damage.

Seconds (`measure_costs`): a decode step of one row behind `context` positions is timed whole, without any FFN and
without any attention; the differences per layer are the savings. Attention's share grows with the context, an FFN's
does not; on a GPU both include launches. Layers with another window are timed apart.

Not supported: low-rank stand-ins, training the kept layers, tensor-parallel models, prefill seconds.

Shapes: N windows, T tokens, D width, R measured rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.evals.scoring import NanLikelihood
from shoestring.model.skip import KINDS, PASS, BlockSkip, Kind, SkipSet, StandIn, Sublayer, Watch, all_sublayers
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder
from shoestring.serve.engine.block_pool import BlockPool, RowSpan
from shoestring.serve.engine.runner import Batch, Runner
from shoestring.serve.engine.sampling import Sampling

SearchProgress = Callable[[int, int], None]  # sublayers measured and skipped so far
STEPS = 8  # decode steps launched before the host waits
SINK = 5.0  # a token whose stream is longer than this many medians is a sink


# -- seconds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a decode step behind `context` positions, and of its sublayers."""

    context: int
    step: float
    sublayers: dict[Sublayer, float]

    def saved(self, skipped: Sequence[Sublayer] | SkipSet) -> float:
        return sum(self.sublayers[s] for s in (skipped.skipped if isinstance(skipped, SkipSet) else skipped))

    def speedup(self, skipped: Sequence[Sublayer] | SkipSet) -> float:
        return self.step / (self.step - self.saved(skipped))


class StepTimer:
    """Times decode steps of one row behind `context` positions, on its own KV cache. On a GPU several steps are
    launched before the host waits, as in decoding."""

    def __init__(self, model: Decoder, context: int, block_size: int = 16) -> None:
        positions = model.spec.max_positions
        if not 2 <= context <= positions:
            raise UserError(f"context={context} does not fit this model; give 2 to {positions}")
        pool = BlockPool(-(-context // block_size), block_size)
        self.runner = Runner(model, pool)
        self.batch = Batch([RowSpan(list(range(pool.num_blocks)), context - 1, 1)], [0], [0])

    def __call__(self, skip: SkipSet | None = None) -> float:
        began = time.perf_counter()
        pending = [self.runner.launch_decode(self.batch, [Sampling()], skip) for _ in range(STEPS)]
        if pending[-1] is not None:
            pending[-1].tokens()  # waits for the device
            return (time.perf_counter() - began) / STEPS
        self.runner.forward(self.batch, skip).argmax(-1).tolist()  # waits for the device
        return time.perf_counter() - began

    def best(self, skips: Sequence[SkipSet | None], repeats: int) -> list[float]:
        """The smallest of `repeats` seconds for each, in turns, so that a busy machine slows all of them."""
        for skip in skips:
            self(skip)
        return [min(times) for times in zip(*([self(s) for s in skips] for _ in range(repeats)), strict=True)]


def measure_costs(model: Decoder, context: int, *, repeats: int = 15) -> StepCosts:
    spec = model.spec
    parts = _parts(spec)
    sets = [SkipSet(part) for part in parts]
    step, *without = StepTimer(model, context).best([None, *sets], repeats)
    sublayers: dict[Sublayer, float] = {}
    for part, seconds in zip(parts, without, strict=True):
        # At least a tenth of an even share: with noise a saving may be 0, and the price infinite.
        each = max((step - seconds) / len(part), 0.1 * step / (2 * spec.num_layers))
        sublayers |= dict.fromkeys(part, each)
    return StepCosts(context, step, sublayers)


def _parts(spec: ModelSpec) -> list[list[Sublayer]]:
    """Sublayers that cost the same: FFNs, and attention by window."""
    parts: dict[tuple[Kind, int | None], list[Sublayer]] = {}
    for sub in all_sublayers(spec.num_layers):
        window = spec.window(sub.layer) if sub.kind == "attn" else None
        parts.setdefault((sub.kind, window), []).append(sub)
    return list(parts.values())


# -- damage --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """The change of the predictions on the calibration text when sublayers are left out."""

    kl: float  # mean KL(whole || without), nats per token
    agreement: float  # tokens whose likeliest continuation stays the same
    overlap: float  # mean sum of min(p, q): the chance that a drafted token is accepted


@dataclass(frozen=True)
class SearchStep:
    """The set after one more choice."""

    skip: SkipSet
    damage: Damage
    speedup: float  # of a decode step, from the measured seconds


def fit_stand_in(x_RD: Tensor, y_RD: Tensor) -> StandIn:
    """The least-squares stand-in for a sublayer, without sinks."""
    length_R = x_RD.double().square().mean(-1)
    usual_R = length_R <= SINK**2 * length_R.median()
    x, change = x_RD[usual_R].double(), (y_RD - x_RD)[usual_R].double()
    weight_R1 = 1 / length_R[usual_R, None].clamp_min(1e-30)
    weight_R1 = weight_R1 / weight_R1.sum()
    mean_x, mean_change = (weight_R1 * x).sum(0), (weight_R1 * change).sum(0)
    spread = (weight_R1 * (x - mean_x).square()).sum().clamp_min(1e-30)
    slope = (weight_R1 * (x - mean_x) * (change - mean_change)).sum() / spread
    shift_D = mean_change - slope * mean_x
    return StandIn((1 + slope).float().reshape(1).cpu(), shift_D.float().cpu())


class Trials:
    """A model on a calibration text, with a set that grows."""

    def __init__(self, model: Decoder, tokens_NT: Tensor, *, num_rows: int = 256, fitted: bool = True) -> None:
        """`num_rows`: predictions compared, evenly spaced over the text. Without `fitted` the stream passes
        skipped sublayers unchanged."""
        if model.embed.group is not None:
            raise UserError("skip sets are searched on one device; run the recipe without torchrun")
        self.model, self.fitted = model, fitted
        self.tokens_NT = tokens_NT.to(model.device)
        self.args = model.block_args(tokens_NT.shape[1], self.tokens_NT.device)
        num = tokens_NT.numel()
        self.rows = torch.arange(num_rows, device=self.tokens_NT.device) * num // num_rows
        self._known: dict[tuple[str, Sublayer], tuple[StandIn, Damage]] = {}
        with torch.no_grad():
            self._inputs = [model.embed_inputs(self.tokens_NT)]  # the stream before each block, under the set
            self.reset()
            self._whole_RV = self._log_probs(self._inputs[-1])
            if bool(self._whole_RV.isnan().any()):
                raise NanLikelihood
            self.damage = self._compare(self._whole_RV)

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the whole model. Measurements stay cached, for a search with other costs."""
        self.use(SkipSet([]))
        self.damage = Damage(0.0, 1.0, 1.0)

    @torch.no_grad()
    def use(self, skip: SkipSet) -> None:
        """Continue from this set; `refit` measures its damage."""
        self.skipped: dict[Sublayer, StandIn] = dict(skip.skipped)
        self._run_from(0)

    @torch.no_grad()
    def measure(self, sub: Sublayer) -> tuple[StandIn, Damage]:
        """A stand-in for one more sublayer, and the damage of the set with it."""
        key = self.skip_set("").id, sub
        if key not in self._known:
            self._known[key] = self._measure(sub)
        return self._known[key]

    def _measure(self, sub: Sublayer) -> tuple[StandIn, Damage]:
        stand = self._fit(sub) if self.fitted else PASS
        x = self._inputs[sub.layer]
        for layer in range(sub.layer, len(self.model.blocks)):
            x = self._block(layer, x, {**self.skipped, sub: stand})
        return stand, self._compare(self._log_probs(x))

    @torch.no_grad()
    def add(self, sub: Sublayer, stand: StandIn, damage: Damage) -> None:
        self.skipped[sub] = stand
        self.damage = damage
        self._run_from(sub.layer)

    @torch.no_grad()
    def refit(self) -> Damage:
        """Fit every stand-in again, in order, each under those before it; the old ones stay if that is worse."""
        self._run_from(0)
        old, self.damage = dict(self.skipped), self._compare(self._log_probs(self._inputs[-1]))
        if self.fitted:
            del self._inputs[1:]
            for sub in sorted(self.skipped):
                del self.skipped[sub]
                self._run_to(sub.layer)
                self.skipped[sub] = self._fit(sub)
            self._run_to(len(self.model.blocks))
            damage = self._compare(self._log_probs(self._inputs[-1]))
            if damage.kl < self.damage.kl:
                self.damage = damage
            else:
                self.skipped = old
                self._run_from(0)
        return self.damage

    def skip_set(self, name: str) -> SkipSet:
        return SkipSet(dict(self.skipped), name=name)

    def _fit(self, sub: Sublayer) -> StandIn:
        seen: dict[Kind, tuple[Tensor, Tensor]] = {}

        def watch(layer: int, kind: Kind, x: Tensor, y: Tensor) -> None:
            seen[kind] = x, y

        self._block(sub.layer, self._inputs[sub.layer], self.skipped, watch)
        x, y = seen[sub.kind]
        return fit_stand_in(x.flatten(0, 1), y.flatten(0, 1))

    def _run_from(self, start: int) -> None:
        """Recompute the cached streams behind block `start`."""
        del self._inputs[start + 1 :]
        self._run_to(len(self.model.blocks))

    def _run_to(self, stop: int) -> None:
        for layer in range(len(self._inputs) - 1, stop):
            self._inputs.append(self._block(layer, self._inputs[layer], self.skipped))

    def _block(self, layer: int, x: Tensor, skipped: dict[Sublayer, StandIn], watch: Watch | None = None) -> Tensor:
        skip = BlockSkip(*(_on(skipped.get(Sublayer(layer, kind)), x.device) for kind in KINDS))
        return self.model.blocks[layer](x, *self.args[layer], skip, watch)

    def _log_probs(self, x_NTD: Tensor) -> Tensor:
        hidden_RD = self.model.final_hidden(x_NTD.flatten(0, 1)[self.rows])
        return self.model.read_logits(hidden_RD).float().log_softmax(-1)

    def _compare(self, other_RV: Tensor) -> Damage:
        p = self._whole_RV.exp()
        kl = (p * (self._whole_RV - other_RV)).sum(-1).mean()
        agreement = (self._whole_RV.argmax(-1) == other_RV.argmax(-1)).double().mean()
        overlap = torch.minimum(p, other_RV.exp()).sum(-1).mean()
        return Damage(float(kl), float(agreement), float(overlap))


def _on(stand: StandIn | None, device: torch.device) -> StandIn | None:
    return None if stand is None else StandIn(*(None if t is None else t.to(device) for t in stand))


def search(
    trials: Trials,
    costs: StepCosts,
    *,
    speedup: float,
    lookahead: int = 6,
    name: str = "measured",
    progress: SearchProgress | None = None,
) -> list[SearchStep]:
    """Greedy choices until the measured seconds promise `speedup` (or one sublayer is left), in order.

    The stand-ins are those of the search; `Trials.refit` fits them again."""
    if speedup <= 1:
        raise UserError(f"speedup={speedup} is not allowed; give more than 1")
    price: dict[Sublayer, float] = {}
    found: dict[Sublayer, tuple[StandIn, Damage]] = {}
    choices: list[SearchStep] = []
    left = [s for s in all_sublayers(len(trials.model.blocks)) if s not in trials.skipped]
    done = 0

    def look(sub: Sublayer) -> None:
        nonlocal done
        found[sub] = trials.measure(sub)
        price[sub] = (found[sub][1].kl - trials.damage.kl) / costs.sublayers[sub]
        done += 1
        if progress is not None:
            progress(done, len(trials.skipped))

    for sub in left:
        look(sub)
    while len(left) > 1:
        near = sorted(left, key=lambda s: price[s])[:lookahead]
        if choices:  # before the first choice all have just been measured
            for sub in near:
                look(sub)
        best = min(near, key=lambda s: price[s])
        left.remove(best)
        trials.add(best, *found[best])
        skip = trials.skip_set(name)
        choices.append(SearchStep(skip, trials.damage, costs.speedup(skip)))
        if choices[-1].speedup >= speedup:
            break
    return choices


def draft_gain(choice: SearchStep, num_drafts: int) -> float:
    """Expected speed-up of decoding with the set as a drafter (Leviathan et al. 2023, theorem 3.8): tokens per pass
    over the cost of a pass and its drafts. The acceptance of a draft is the agreement of the likeliest tokens."""
    a, g = choice.damage.agreement, num_drafts
    tokens = g + 1 if a == 1 else (1 - a ** (g + 1)) / (1 - a)
    return tokens / (1 + g / choice.speedup)


def best_drafter(choices: list[SearchStep]) -> tuple[SearchStep, int, float]:
    """The choice with the largest gain as a drafter, its draft length (1 to 8) and the gain."""
    return max(((c, g, draft_gain(c, g)) for c in choices for g in range(1, 9)), key=lambda item: item[2])
