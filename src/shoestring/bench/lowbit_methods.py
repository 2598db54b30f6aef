"""The methods that bench/lowbit_quality compares, on one model in memory.

A `Subject` is a full model with what it is measured on and what it may learn from. Every method starts from its full
weights and leaves the model in its Format; `unformat` packs and decodes it, so that what is evaluated is what a packed
file would hold. BitDistiller and ours get the same text and the same number of training tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.bench.by_clock import ByClock, OutOfTime
from shoestring.evals.perplexity import perplexity
from shoestring.evals.tasks import run_task
from shoestring.formats import Dense, Format, convert, formats_of, pack, parse_format, unpack
from shoestring.formats.convert import Rule, format_linears
from shoestring.formats.range_gradient import with_range_gradient
from shoestring.mesh import open_mesh
from shoestring.model import Decoder
from shoestring.model.tokenizer import Tokenizer
from shoestring.runlog import RunLog
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import BlockStep, Calibration, walk, windows
from shoestring.shrink.clip import Clip
from shoestring.shrink.qat import (
    FallingRates,
    Rates,
    clip_weights,
    learn_grids,
    learned_rules,
    part_for,
    relative_adamw,
)
from shoestring.shrink.quantize import HEADS, METHODS, quantize, usual_inputs
from shoestring.train.cakld import CachedCakld, Cakld
from shoestring.train.data import TokenData
from shoestring.train.hooks import Hook
from shoestring.train.optim import adamw, constant
from shoestring.train.shards import TokenShards
from shoestring.train.teacher_cache import TeacherCache, build_cache, one_epoch
from shoestring.train.together import Together
from shoestring.train.trainer import Run, train

# BitDistiller's, by bits; bitdistiller@2e-4 is the method with another one.
LEARNING_RATES = {2: 5e-4, 3: 2e-4, 4: 1e-4}


@dataclass
class Subject:
    """A full model, what it is measured on and what it may learn from."""

    name: str
    model: Decoder  # fp32 weights; computes in its compute_dtype
    tokenizer: Tokenizer | None
    test: Tensor
    context: int  # of the evaluation
    calibration: Tensor  # [windows, context]
    text: TokenShards  # to train on
    steps: int
    batch: int
    train_context: int
    micro: int = 0  # rows of a pass; 0: all of the batch
    tasks: list[Path] = field(default_factory=list)
    items: int = 0
    kept_dense: tuple[str, ...] = ()  # globs of layers whose width no group divides
    top: int = 64  # tokens that the cache keeps of each distribution
    lr: float | None = None  # BitDistiller's; None: by bits
    blockwise_part: float = 0.25  # of ours' training tokens
    blockwise: Blockwise = field(default_factory=Blockwise)
    rates: Rates = field(default_factory=Rates)
    cache_folder: Path = Path()
    original: dict[str, Tensor] = field(default_factory=dict)
    shared: list[BlockStep] = field(default_factory=list)
    valid: Tensor | None = None  # to choose between settings on
    told: dict[str, Any] = field(default_factory=dict)  # about the model, for its lines
    blocks: dict[tuple[str, int], dict[str, Tensor]] = field(
        default_factory=dict
    )  # ours, after the block-wise stage
    ends: float | None = None  # of time.perf_counter: ours is trained until then at most
    known: dict[str, list[int]] = field(default_factory=dict)  # texts of the tasks in tokens

    def __post_init__(self) -> None:
        self.original = {name: t.detach().clone() for name, t in self.model.state_dict().items()}

    @property
    def training_tokens(self) -> int:
        return self.steps * self.batch * self.train_context

    def rules(self, format: Format) -> list[Rule]:
        return [*((glob, Dense()) for glob in self.kept_dense), ("*", format)]

    def fresh(self) -> Decoder:
        assert not formats_of(self.model), "a method left its formats behind: call unformat"
        self.model.load_state_dict(self.original)
        return self.model.requires_grad_(True)

    def data(self, seed: int) -> TokenData:
        return TokenData(self.text, context=self.train_context, batch=self.batch, seed=seed, micro=self.batch)

    def encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text)
        return self.known[text]

    def cache(self) -> TeacherCache:
        """Of every window, so that it serves every seed. The model is the full one afterwards."""
        data = self.data(0)
        cache = build_cache(
            self.cache_folder, self.fresh(), one_epoch(data), num_targets=len(data.shards), k=self.top
        )
        return cache.to(self.model.embed.weight.device)


# -- methods -------------------------------------------------------------------------------------------------


def after_training(subject: Subject, label: str, name: str) -> Decoder:
    """A method without training: the model then holds, packed and decoded again, what its file would."""
    model, method = subject.fresh(), METHODS[name]
    rules = subject.rules(parse_format(label))
    if usual_inputs(method) == "quantized":
        steps: Iterator[BlockStep] = walk(model, subject.calibration, Calibration(inputs="quantized"))
    else:
        if not subject.shared and name != "rtn":
            subject.shared = list(walk(model, subject.calibration, Calibration(inputs="full")))
        steps = iter(subject.shared) if name != "rtn" else iter(())
    quantize(model, rules, steps, method)
    return model


def bitdistiller(
    subject: Subject, label: str, *, lr: float, seed: int = 0, steps: int | None = None
) -> tuple[Decoder, float]:
    """Clip, then QAT with CAKLD against the live model; returns it with the mean loss of the last tenth."""
    gamma = subject.cache().confidence
    teacher = copy.deepcopy(subject.fresh()).to(subject.model.compute_dtype)
    data, model = subject.data(seed), subject.fresh()
    format = parse_format(label)
    seen = windows(subject.text.head(), min(32, data.num_windows), subject.train_context)
    clip_weights(model, subject.rules(format), walk(model, seen, Calibration(inputs="full")), Clip())
    convert(model, subject.rules(with_range_gradient(format)))
    optimizer = adamw(model, lr=lr, weight_decay=0.0)
    run = Run(model, optimizer, open_mesh(device=str(data_device(model))), RunLog(None, quiet=True))
    steps = steps or subject.steps
    objective = Together(Cakld(teacher, gamma), rows=subject.micro)
    often = max(1, steps // 10)  # looking at the loss waits for the GPU
    train(run, data, objective, steps=steps, schedule=constant(lr), log_every=often, graph=True)
    tell(run)
    return model, run.log.history[-1]["loss"]


def ours(
    subject: Subject, label: str, *, seed: int = 0, part: float = 1.0, live: bool = False
) -> tuple[Decoder, int]:
    """Block-wise, then end to end, together as many training tokens as BitDistiller, or what the subject's time
    allows; returns the model and its training tokens.

    `part` of the subject's rates end to end. `live`: against the model itself instead of its cached top-64.
    """
    cache, model = subject.cache(), subject.fresh()
    teacher = copy.deepcopy(model).to(model.compute_dtype) if live else None
    rules = subject.rules(parse_format(label))
    settings = replace(subject.blockwise, seed=seed, keep_masters=True)
    tokens = subject.blockwise_part * subject.training_tokens
    num = max(4, int(tokens / settings.epochs / subject.train_context))
    num = min(num, (len(subject.text) - 1) // subject.train_context)
    if (label, seed) in subject.blocks:  # the same for every part of the rates
        convert(model, learned_rules(rules), skip=HEADS)
        model.load_state_dict(subject.blocks[label, seed])
    else:
        seen = windows(subject.text.head(), num, subject.train_context)
        report = train_blocks(model, rules, seen, settings)
        learn_grids(model, rules, report.masters)
        subject.blocks = {(label, seed): {name: t.detach().clone() for name, t in model.state_dict().items()}}
    used = num * settings.epochs * subject.train_context
    steps = max(1, (subject.training_tokens - used) // (subject.batch * subject.train_context))
    run = Run(
        model,
        relative_adamw(model, subject.rates.softer(part)),
        open_mesh(device=str(data_device(model))),
        RunLog(None, quiet=True),
    )
    falling = FallingRates(steps, warmup=max(1, steps // 20))
    hooks: list[Hook] = [falling]
    if subject.ends is not None:
        seconds = subject.ends - time.perf_counter()
        hooks.append(ByClock(steps, seconds, falling.at, now=True))
    loss = CachedCakld(cache) if teacher is None else Cakld(teacher, cache.confidence)
    objective, often = Together(loss, rows=subject.micro), max(1, steps // 10)
    try:
        train(run, subject.data(seed), objective, steps=steps, hooks=hooks, log_every=often, graph=True)
    except OutOfTime:
        print(f"  out of time after step {run.step} of {steps}", flush=True)
    tell(run)
    return model, used + run.step * subject.batch * subject.train_context


def tell(run: Run) -> None:
    if not run.log.history:
        return
    first, last = (run.log.history[i] for i in (0, -1))
    print(
        f"  loss {first['loss']:.3f} -> {last['loss']:.3f}, {last['tokens_per_s']:,.0f} tokens/s", flush=True
    )


def data_device(model: Decoder) -> torch.device:
    return model.embed.weight.device


def shrink(subject: Subject, method: str, label: str, seed: int) -> tuple[Decoder, dict[str, Any]]:
    """Run a method: rtn, awq, gptq, ..., bitdistiller, bitdistiller@LR, ours or ours@PART (of its rates)."""
    name, _, given = method.partition("@")
    if name == "bitdistiller":
        lr = float(given) if given else subject.lr or LEARNING_RATES[parse_format(label).bits]  # type: ignore[attr-defined]
        model, _ = bitdistiller(subject, label, lr=lr, seed=seed)
        return model, {"training_tokens": subject.training_tokens, "lr": lr}
    if name == "ours":
        live, given = given.startswith("live"), given.removeprefix("live")
        part = float(given) if given else part_for([parse_format(label)])
        model, tokens = ours(subject, label, seed=seed, part=part, live=live)
        # Rounded down to whole steps; a run that was cut short says what it had.
        whole = tokens > subject.training_tokens - subject.batch * subject.train_context
        return model, {
            "training_tokens": subject.training_tokens if whole else tokens,
            "rates": part,
            "live": live,
        }
    return after_training(subject, label, method), {"training_tokens": 0}


def unformat(model: Decoder) -> float:
    """Pack and decode: dense weights that are what the packed file holds. Returns the bits per packed weight."""
    pack(model, dtype=model.compute_dtype)
    layers = [m for _, m in format_linears(model) if m.packed]
    weights = [m.shape[0] * m.shape[1] for m in layers]
    bits = sum(m.format.bits_per_weight(m.shape) * n for m, n in zip(layers, weights, strict=True))
    unpack(model)
    return bits / sum(weights)


# -- measuring -----------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(subject: Subject) -> dict[str, float]:
    model = subject.model.eval()
    batch = max(1, (16384 if data_device(model).type == "cuda" else 4096) // subject.context)
    found = {"perplexity": perplexity(model, subject.test, context=subject.context, batch=batch).value}
    if subject.valid is not None:
        found["valid"] = perplexity(model, subject.valid, context=subject.context, batch=batch).value
    for path in subject.tasks:
        result = run_task(model, subject, path, limit=subject.items, batch_rows=batch * subject.context)
        found[f"accuracy_{path.stem}"] = round(result.accuracy, 4)
    return found
