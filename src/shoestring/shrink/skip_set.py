"""What a skip set costs and saves, and the sets that need no search: AdaSkip's, early exit, evenly spaced layers.

Seconds (`measure_costs`): a decode step of one row behind `context` positions is timed whole, without any FFN and
without any attention. The differences, per layer, are what leaving a sublayer out saves on this machine at this
length. Attention's share grows with the context, an FFN's does not; on a GPU both contain launches. Layers with
another window are timed apart.

AdaSkip (He et al. 2025), offline part. x is the residual stream before a sublayer, y after it; means over
tokens and windows of a calibration text:

    Sim_j = mean cos(x, y)        Scale_j = mean |y| / |x|        skip the sublayers with the largest Sim
    y_hat = Scale_j x             beta = the smallest Sim in the set (for serve/skipping.py, which adds FFNs)

An acceleration of alpha skips 2 (M - M / alpha) of the 2M sublayers, attention and FFN in one ranking.

The search by measured damage is in skip_search.py. Left out: prefill seconds (a set is judged by decoding).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.errors import UserError
from shoestring.model.skip import Kind, SkipSet, StandIn, Sublayer, all_sublayers
from shoestring.model.spec import ModelSpec
from shoestring.model.transformer import Decoder
from shoestring.serve.blocks import BlockPool
from shoestring.serve.kv_cache import Span
from shoestring.serve.runner import Batch, Runner
from shoestring.serve.sampling import Sampling
from shoestring.serve.skipping import AdaSkip

STEPS = 8  # launched at once

# -- seconds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds of a decode step behind `context` positions, and of its sublayers."""

    context: int
    step: float
    sublayers: dict[Sublayer, float]

    def saved(self, skipped: Sequence[Sublayer] | SkipSet) -> float:
        return sum(self.sublayers[s] for s in (skipped.skipped if isinstance(skipped, SkipSet) else skipped))

    def speedup(self, skipped: Sequence[Sublayer] | SkipSet) -> float:
        return self.step / (self.step - self.saved(skipped))


class StepTimer:
    """Times decode steps of one row behind `context` positions, on a cache of its own. On a GPU several are launched
    before the host waits, as when decoding: what it does in between is hidden behind them."""

    def __init__(self, model: Decoder, context: int, block_size: int = 16) -> None:
        positions = model.spec.max_positions
        if not 2 <= context <= positions:
            raise UserError(f"context={context} does not fit this model; give 2 to {positions}")
        pool = BlockPool(-(-context // block_size), block_size)
        self.runner = Runner(model, pool)
        self.batch = Batch([Span(list(range(pool.num_blocks)), context - 1, 1)], [0], [0])

    def __call__(self, skip: SkipSet | None = None) -> float:
        began = time.perf_counter()
        flights = [self.runner.choose(self.batch, [Sampling()], skip) for _ in range(STEPS)]
        if flights[-1] is not None:
            flights[-1].tokens()  # waits for the device
            return (time.perf_counter() - began) / STEPS
        self.runner.forward(self.batch, skip).argmax(-1).tolist()  # waits for the device
        return time.perf_counter() - began

    def best(self, skips: Sequence[SkipSet | None], repeats: int) -> list[float]:
        """The smallest of `repeats` seconds for each, in turns, so that a busy moment meets all of them."""
        for skip in skips:
            self(skip)
        return [min(times) for times in zip(*([self(s) for s in skips] for _ in range(repeats)), strict=True)]


def measure_costs(model: Decoder, context: int, *, repeats: int = 15) -> Costs:
    spec = model.spec
    parts = _parts(spec)
    sets = [SkipSet(part) for part in parts]
    step, *without = StepTimer(model, context).best([None, *sets], repeats)
    sublayers: dict[Sublayer, float] = {}
    for part, seconds in zip(parts, without, strict=True):
        # Noise may make a sublayer look free; a tenth of an even share keeps the ranking finite.
        each = max((step - seconds) / len(part), 0.1 * step / (2 * spec.num_layers))
        sublayers |= dict.fromkeys(part, each)
    return Costs(context, step, sublayers)


def _parts(spec: ModelSpec) -> list[list[Sublayer]]:
    """Sublayers that cost the same: FFNs, and attention by window."""
    parts: dict[tuple[Kind, int | None], list[Sublayer]] = {}
    for sub in all_sublayers(spec.num_layers):
        window = spec.window(sub.layer) if sub.kind == "attn" else None
        parts.setdefault((sub.kind, window), []).append(sub)
    return list(parts.values())


# -- AdaSkip -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idleness:
    """How little each sublayer changes the residual stream, over a calibration text."""

    similarity: dict[Sublayer, float]  # mean cosine of the stream before and after
    ratio: dict[Sublayer, float]  # mean |after| / |before|


@torch.no_grad()
def measure_idleness(model: Decoder, tokens_NT: Tensor) -> Idleness:
    sums: dict[Sublayer, Tensor] = {}

    def watch(layer: int, kind: Kind, x: Tensor, y: Tensor) -> None:
        x, y = x.double(), y.double()
        ratio = y.norm(dim=-1) / x.norm(dim=-1)
        seen = torch.stack([F.cosine_similarity(x, y, dim=-1).mean(), ratio.mean()])
        sub = Sublayer(layer, kind)
        sums[sub] = sums[sub] + seen if sub in sums else seen

    for tokens_T in tokens_NT.to(model.embed.weight.device):
        model(tokens_T[None], rows=torch.tensor([0], device=tokens_T.device), watch=watch)
    means = {sub: (seen / len(tokens_NT)).tolist() for sub, seen in sums.items()}
    return Idleness({s: m[0] for s, m in means.items()}, {s: m[1] for s, m in means.items()})


def adaskip(idleness: Idleness, num_skipped: int, *, name: str = "adaskip") -> AdaSkip:
    """The offline set with its threshold for the online part."""
    ranked = sorted(idleness.similarity, key=lambda s: -idleness.similarity[s])
    chosen = ranked[: _check_num(num_skipped, len(ranked))]
    fixed = SkipSet({s: StandIn(torch.tensor([idleness.ratio[s]])) for s in chosen}, name=name)
    beta = min(idleness.similarity[s] for s in chosen)
    layers = range(len(ranked) // 2)
    return AdaSkip(fixed, beta, tuple(idleness.ratio[Sublayer(layer, "mlp")] for layer in layers))


def num_for_alpha(num_layers: int, alpha: float) -> int:
    """AdaSkip's own count for an acceleration ratio: 2 (M - M / alpha) sublayers."""
    return max(1, round(2 * (num_layers - num_layers / alpha)))


# -- baselines -----------------------------------------------------------------------------------------------


def early_exit(num_layers: int, num_skipped: int) -> SkipSet:
    """The last sublayers, from the end; nothing stands in for them."""
    num = _check_num(num_skipped, 2 * num_layers)
    return SkipSet(all_sublayers(num_layers)[2 * num_layers - num :], name="early exit")


def unified(num_layers: int, num_skipped: int) -> SkipSet:
    """Whole layers in even steps (half a layer where the number is odd); nothing stands in for them."""
    num = _check_num(num_skipped, 2 * num_layers)
    count = -(-num // 2)
    layers = [int((i + 0.5) * num_layers / count) for i in range(count)]
    return SkipSet(
        [Sublayer(layer, kind) for layer in layers for kind in ("attn", "mlp")][:num], name="unified"
    )


def _check_num(num_skipped: int, num_sublayers: int) -> int:
    if not 1 <= num_skipped < num_sublayers:
        raise UserError(
            f"{num_skipped} of {num_sublayers} sublayers cannot be skipped; give 1 to {num_sublayers - 1}"
        )
    return num_skipped


# -- use outside of the engine -------------------------------------------------------------------------------


@contextmanager
def left_out(model: Decoder, skip: SkipSet | None) -> Iterator[Decoder]:
    """The model without the set's sublayers, for evaluations that know nothing of skipping."""
    if skip is None:
        yield model
        return
    model.forward = partial(model.forward, skip=skip.check(model.spec))  # type: ignore[method-assign]
    try:
        yield model
    finally:
        del model.forward  # the class's own shows again
