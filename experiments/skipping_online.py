"""AdaSkip with its online part against its offline set and ours: `python -m experiments.skipping online`.

A given text is scored as if it were decoded: the engine gets the prompt, and then the true next tokens as drafts that
are always accepted (`TrueText`). So the policy sees what it would see in decoding, its set changes where it would
change, and every token has a log-probability under the set of its position:

    positions of the prompt and of the first 20 new tokens     the offline set; those 20 are watched
    positions after that                                       with the FFNs that the policy added

Perplexity is that of the tokens predicted after the change, the same for every method. The decode step is timed with
the set at the end of a text.

AdaSkip skips as many sublayers as its own formula gives for the accelerations in ALPHAS; `measured` is the set on our
search's path that promises nearest to what AdaSkip's set at the end does, both by measured seconds of sublayers.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import markdown, newest, provenance, record, spread
from experiments.skipping_sets import (
    DEVICES,
    MODEL,
    calibrated,
    device_type,
    keep,
    known_costs,
    load,
    shown,
    text_of,
    time_steps,
)
from shoestring.errors import UserError
from shoestring.methods.skipping.adaskip import Idleness, adaskip, num_for_alpha
from shoestring.methods.skipping.policies import NUM_WATCHED
from shoestring.methods.skipping.search import StepCosts, StepTimer, Trials, measure_costs, search
from shoestring.model import Decoder
from shoestring.model.skip import SkipSet
from shoestring.serve import Engine, Sampling
from shoestring.serve.engine.request import Draft, Request
from shoestring.serve.engine.skip_policy import Fixed, SkipPolicy
from shoestring.serve.speculative.drafter import Drafter
from shoestring.serve.speculative.verify import Check
from shoestring.shrink.calibrate import windows

METRIC = "online_speedup"
WHOLE, OFFLINE, ONLINE, OURS = "whole model", "adaskip, offline", "adaskip, offline and online", "measured"
ALPHAS = (1.2, 1.4)  # the first is that of `--skip adaskip`
CHUNK = 2048  # rows of a step


# -- a text that is there already ----------------------------------------------------------------------------


class TrueText(Drafter):
    """For `Engine(drafter=, verify=)` with one request at a time: drafts the known continuation and accepts it."""

    def __init__(self) -> None:
        self.begin([])

    def begin(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.nll: list[float] = []  # of the tokens behind the prompt, in order

    def propose(self, requests: Sequence[Request], n: int) -> list[Draft]:
        return [Draft(self.tokens[len(r.tokens) :][:n]) for r in requests]

    def __call__(self, logits_RV: Tensor, checks: Sequence[Check]) -> list[list[int]]:
        (check,) = checks
        true = self.tokens[check.position : check.position + check.num_rows]
        logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        target_R = torch.tensor(true, device=logits_RV.device)
        self.nll += F.cross_entropy(logits_RV, target_R, reduction="none").tolist()
        return [true]


@dataclass(frozen=True)
class Read:
    """The result for one text."""

    nll: list[float]  # of each token behind the prompt
    skip: SkipSet | None  # at its end


class Reader:
    """Scores the last `num_new` tokens of texts, one text at a time, with an engine that skips."""

    def __init__(self, model: Decoder, context: int, num_new: int) -> None:
        self.num_new, self.true = num_new, TrueText()
        self.engine = Engine(
            model,
            max_requests=1,
            max_context=context,
            chunk=CHUNK,
            prefix_cache=False,
            drafter=self.true,
            num_drafts=num_new,
            verify=self.true,
            eos_ids=(),
        )

    def __call__(self, tokens: list[int], skip: SkipPolicy | None = None) -> Read:
        engine = self.engine
        # A new policy for each text: the limit of four sets must not depend on earlier texts.
        engine.skip_sets.use(skip)
        self.true.begin(tokens)
        request = engine.add(tokens[: -self.num_new], Sampling(max_tokens=self.num_new))
        while engine.busy:
            engine.step()
        return Read(self.true.nll, request.late_skip)


def perplexity_behind(reads: Sequence[Read]) -> float:
    """Perplexity of the tokens after the change; the row of the last watched token predicts one more."""
    return math.exp(statistics.fmean(nll for read in reads for nll in read.nll[NUM_WATCHED + 1 :]))


# -- the measurement -----------------------------------------------------------------------------------------


def measure_online(args: argparse.Namespace) -> None:
    if not args.context_sets:
        raise UserError("--context-sets names no length: give some, such as --context-sets 2048, or leave it out")
    if not NUM_WATCHED + 1 < args.continuation < min(args.context_sets):
        raise UserError(
            f"--continuation {args.continuation}: give more than {NUM_WATCHED + 1}, since AdaSkip watches the first "
            f"{NUM_WATCHED}, and less than the context ({min(args.context_sets)})"
        )
    loaded = load(args)
    model, test = loaded.model, text_of(loaded, args.assets, "test")
    known = known_costs(args, loaded)
    for context, idle, trials in calibrated(args, model, text_of(loaded, args.assets, "valid")):
        num = max(1, args.prompts * args.context_sets[0] // context)
        texts = windows(test, num, context).tolist()
        costs = known.get(context) or measure_costs(model, context, repeats=args.repeats)
        Comparison(args, model, texts, costs).run(idle, trials)


class Comparison:
    """All methods on the same texts of one length."""

    def __init__(self, args: argparse.Namespace, model: Decoder, texts: list[list[int]], costs: StepCosts) -> None:
        self.args, self.model, self.texts, self.costs = args, model, texts, costs
        self.timer = StepTimer(model, costs.context)
        self.reader = Reader(model, costs.context, args.continuation)
        self.config = {"model": MODEL, "context": costs.context, "device": device_type()}

    def run(self, idle: Idleness, trials: Trials) -> None:
        self.record(WHOLE, 1.0, self.read(None), {})
        promised: dict[float, float] = {}
        for alpha in ALPHAS:
            policy = adaskip(idle, num_for_alpha(self.model.spec.num_layers, alpha))
            told = {"sublayers": len(policy.fixed), "beta": round(policy.beta, 4)}
            self.record(OFFLINE, alpha, self.read(Fixed(policy.fixed)), told)
            reads = self.read(policy)
            added = [len(_mlp(read.skip)) - len(policy.fixed.mlp) for read in reads]
            self.record(ONLINE, alpha, reads, {**told, "ffns_added": added})
            ends = [read.skip for read in reads if read.skip is not None]
            promised[alpha] = statistics.median(map(self.costs.speedup, ends))
        path = search(trials, self.costs, speedup=max(promised.values()), lookahead=self.args.lookahead, name=OURS)
        for alpha, speedup in promised.items():
            choice = min(path, key=lambda c: abs(c.speedup - speedup))
            trials.use(choice.skip)
            found = {"kl": trials.refit().kl}
            skip = trials.skip_set(OURS)
            keep(self.args.sets / "online", OURS, self.costs.context, round(choice.speedup, 2), skip, found)
            self.record(OURS, alpha, self.read(Fixed(skip)), {})

    def read(self, skip: SkipPolicy | None) -> list[Read]:
        return [self.reader(tokens, skip) for tokens in self.texts]

    def record(self, case: str, alpha: float, reads: list[Read], told: dict[str, Any]) -> None:
        timed: dict[int, tuple[list[float], float]] = {}  # by number of FFNs, which all cost the same
        for read in reads:
            if len(_mlp(read.skip)) not in timed:
                timed[len(_mlp(read.skip))] = time_steps(self.timer, read.skip, repeats=self.args.repeats)
        ratios = [r for read in reads for r in timed[len(_mlp(read.skip))][0]]
        quality = {
            "perplexity": round(perplexity_behind(reads), 3),
            "attention": 0 if reads[0].skip is None else len(reads[0].skip.attn),
            "ffn": statistics.median(len(_mlp(read.skip)) for read in reads),
            **told,
            # Not part of the config: a run over more texts replaces one over fewer.
            "prompts": len(reads),
            "continuation": self.args.continuation,
        }
        line = record(
            bench="skipping",
            case=case,
            metric=METRIC,
            unit="x",
            samples=ratios,
            baseline=WHOLE,
            baseline_value=statistics.median(step for _, step in timed.values()),
            ratio=statistics.median(ratios),
            quality=quality,
            config={**self.config, "alpha": alpha},
            note="baseline_value: seconds of the whole decode step, batch 1; ffns_added: one number a prompt",
        )
        print(case, self.costs.context, alpha, line["value"], quality, flush=True)


def _mlp(skip: SkipSet | None) -> frozenset[int]:
    return frozenset() if skip is None else skip.mlp


# -- the table -----------------------------------------------------------------------------------------------


def table() -> str:
    lines = [n for n in newest("skipping") if n["metric"] == METRIC]
    if not lines:
        return "Not measured yet."
    lines.sort(key=lambda n: [n["config"][k] for k in ("device", "context", "alpha")])
    rows = []
    for n in lines:
        config, quality = n["config"], n["quality"]
        added = quality.get("ffns_added")
        low_high = [f"{v:.0f}" for v in spread(added)] if added else []
        rows.append(
            [
                DEVICES[config["device"]],
                f"{config['context']:,}",
                n["case"],
                str(quality.get("sublayers", "")),
                f"{quality['beta']:.3f}" if "beta" in quality else "",
                " to ".join(low_high),
                f"{statistics.median(added):g}" if added else "",
                f"{quality['attention']} + {quality['ffn']:g}",
                f"{n['value']:.2f}x",
                shown(quality["perplexity"]),
            ]
        )
    header = ["on", "context", "method", "offline set", "beta", "FFNs added, 20% to 80% of prompts", "median"]
    header += ["skipped: attention + FFN", "decode step", "perplexity"]
    return markdown(header, rows) + f"\n\n{_said(lines)}" + provenance(lines)


def _said(lines: list[dict[str, Any]]) -> str:
    """A summary of what was read."""
    read = {(n["config"]["device"], n["config"]["context"]): n["quality"] for n in lines}
    texts = [f"{DEVICES[d]}: {q['prompts']} texts of {context:,} tokens" for (d, context), q in read.items()]
    last = " or ".join(sorted({str(n["quality"]["continuation"]) for n in lines}))
    return (
        f"{MODEL} on the WikiText-2 test text ({'; '.join(texts)}), of each the last {last} tokens as if they were "
        f"being written. Perplexity: from token {NUM_WATCHED + 2} of those on, which are predicted behind the change. "
        "Skipped sublayers and the decode step: with the set at the end of a text, median over texts."
    )
