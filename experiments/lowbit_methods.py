"""The methods that experiments/lowbit_quality compares, on one model in memory.

A `Subject` is a full model with its texts for evaluation and training. Every method starts from its full weights and
leaves the model in its Format; `unformat` packs and decodes it, so that the evaluated weights are those of a packed
file. BitDistiller and ours get the same text and the same number of training tokens.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from experiments.time_budget import OutOfTime, TimeBudget
from shoestring.errors import UserError
from shoestring.evals.perplexity import perplexity
from shoestring.evals.tasks import run_task
from shoestring.formats import Dense, Format, Parts, convert, formats_of, pack, parse_format, unpack
from shoestring.formats.convert import Rule, format_linears, store_states
from shoestring.mesh import open_mesh
from shoestring.methods.distill.cakld import CachedCakld, Cakld, teacher_confidence
from shoestring.methods.distill.range_gradient import with_range_gradient
from shoestring.methods.sparse24.prune import SparseGpt, prune
from shoestring.methods.sparse24.retrain import Retrain, retrain
from shoestring.model import Decoder
from shoestring.model.tokenizer import Tokenizer
from shoestring.runlog import RunLog
from shoestring.shrink.blockwise import Blockwise, TrainingStep, fit, root_mean_square, train_blocks, walk_pairs
from shoestring.shrink.calibrate import BlockStep, Calibration, block_linears, walk, windows
from shoestring.shrink.clip import Clip
from shoestring.shrink.gptq import Gptq
from shoestring.shrink.mixed_bits import MixedBits, choose_formats, measure_damage
from shoestring.shrink.qat import FallingRates, Rates, clip_weights, coarsest, learned_rules, read_grids, relative_adamw
from shoestring.shrink.quantize import HEADS, METHODS, quantize, usual_inputs
from shoestring.shrink.self_text import own_windows
from shoestring.train.batched_formats import BatchedFormats
from shoestring.train.cuda_graph import GraphedForwardBackward
from shoestring.train.data import TokenData
from shoestring.train.optim import adamw, constant
from shoestring.train.shards import TokenShards
from shoestring.train.step import Hook, Run
from shoestring.train.teacher_cache import TeacherCache, build_cache, one_epoch
from shoestring.train.trainer import train

LEARNING_RATES = {2: 5e-4, 3: 2e-4, 4: 1e-4}  # BitDistiller's, by bits
PASS_ROWS = 32  # rows of a micro-batch at most: BitDistiller's batches of 128 would fill a shared GPU
CONFIDENCE_STEPS = 32  # all of a text of 500k tokens
CHECKS = 8  # evaluations of a training that keeps its best state


MIX_WINDOWS = 4  # of the training text, that the damage of a Format in a layer is measured on

# The part of ours' rates where a setting does not say one: the recipe's defaults when such rows were first recorded. It
# stays, so that a name in results/ has one meaning.
UNSAID = {2: 1.0, 3: 0.25, 4: 0.25}
# What decides the block-wise stage of ours: Format, seed, part of the training tokens, start, other formats.
Blocks = tuple[str, int, float, str, str]


@dataclass(frozen=True)
class Ours:
    """A setting of ours: `ours@live,0.5,rest=0` has the full model beside the student, half of the rates for these
    bits, and frozen embeddings."""

    part: float | None = None  # of the rates end to end; None: by bits, as in UNSAID
    live: bool = False  # the full model beside the student; else its cached top-k
    derived: bool = False  # BitDistiller's start and grids: clipped weights, whose extremes the scales follow
    gamma: float | None = None  # of CAKLD; None: the full model's confidence
    blocks: float | None = None  # part of the training tokens for the block-wise stage; None: the subject's
    batch: int = 0  # rows a step end to end; 0: the subject's
    init: str = ""  # the method whose grids it starts from; empty: the subject's
    mix: str = ""  # formats, joined by "+", that layers may have instead, at equal bits per weight altogether
    rates: tuple[tuple[str, float], ...] = ()  # instead of the subject's

    def part_at(self, label: str) -> float:
        return UNSAID.get(coarsest([parse_format(label)]), 0.25) if self.part is None else self.part

    @classmethod
    def parse(cls, given: str) -> Ours:
        found: dict[str, Any] = {}
        rates: list[tuple[str, float]] = []
        for item in filter(None, given.split(",")):
            key, _, value = item.partition("=")
            if key in ("live", "derived"):
                found[key] = True
            elif not value:
                found["part"] = float(key)
            elif key in ("gamma", "blocks", "batch", "init", "mix"):
                found[key] = {"batch": int, "init": str, "mix": str}.get(key, float)(value)
            else:
                rates.append((key, float(value)))
        return cls(**found, rates=tuple(rates))


@dataclass(frozen=True)
class Published:
    """A setting of BitDistiller. `bitdistiller@1e-3,batch=128,clip=full,best` is the published one: batches of 128
    rows, 10 x 10 ranges in the clip search, and of all states of the training the best on held-out text."""

    lr: float | None = None  # constant; None: by bits
    batch: int = 0  # rows a step; 0: the subject's
    clip: Literal["alternate", "full"] = "alternate"
    best: bool = False  # keep the state with the least perplexity on the validation text
    mix: str = ""  # as of Ours

    @classmethod
    def parse(cls, given: str) -> Published:
        found: dict[str, Any] = {}
        for item in filter(None, given.split(",")):
            key, _, value = item.partition("=")
            if key == "best":
                found[key] = True
            elif not value:
                found["lr"] = float(key)
            else:
                found[key] = int(value) if key == "batch" else value
        return cls(**found)


@dataclass
class Subject:
    """A full model, with its texts for evaluation and training."""

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
    damage_file: Path | None = None  # of formats in single layers, for another call with this model and text
    original: dict[str, Tensor] = field(default_factory=dict)
    shared: list[BlockStep] = field(default_factory=list)
    valid: Tensor | None = None  # to choose between settings on
    novels: Tensor | None = None  # another kind of text than all of the above
    told: dict[str, Any] = field(default_factory=dict)  # about the model, for its lines
    blocks: dict[Blocks, dict[str, Tensor]] = field(default_factory=dict)  # ours, after the block-wise stage
    mixes: dict[tuple[str, str], MixedBits] = field(default_factory=dict)  # by Format and other candidates
    clipped: dict[tuple[str, str, str], dict[str, Tensor]] = field(default_factory=dict)  # weights, by search too
    ends: float | None = None  # of time.perf_counter: ours is trained until then at most
    gamma: float | None = None  # of `confidence`
    known: dict[str, list[int]] = field(default_factory=dict)  # texts of the tasks in tokens
    written: Tensor | None = None  # windows that the full model wrote, as many as those of `calibration`

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

    def data(self, seed: int, batch: int = 0) -> TokenData:
        rows = batch or self.batch
        return TokenData(self.text, context=self.train_context, batch=rows, seed=seed, micro=min(rows, PASS_ROWS))

    def encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text)
        return self.known[text]

    def own(self) -> Tensor:
        """What shrink/ptq calibrates on by default. The model is the full one afterwards."""
        if self.written is None:
            assert self.tokenizer is not None
            num, context = self.calibration.shape
            self.written = own_windows(self.fresh(), self.tokenizer, num, context)
        return self.written

    def confidence(self) -> float:
        """CAKLD's gamma, on up to CONFIDENCE_STEPS batches of the text."""
        if self.gamma is None:
            self.gamma = teacher_confidence(self.fresh().eval(), one_epoch(self.data(0), CONFIDENCE_STEPS))
        return self.gamma

    def cache(self) -> TeacherCache:
        """Of every window, so that it serves every seed. The model is the full one afterwards."""
        data = self.data(0)
        cache = build_cache(self.cache_folder, self.fresh(), one_epoch(data), num_targets=len(data.shards), k=self.top)
        return cache.to(self.model.device)


# -- methods -------------------------------------------------------------------------------------------------


def after_training(subject: Subject, label: str, name: str) -> Decoder:
    """A method without training; the model then holds the weights of its packed file. `gptq+clip@act_order,token,own`:
    columns with large inputs first, every token counted alike, calibrated on text that the model wrote itself."""
    name, _, options = name.partition("@")
    model, method = subject.fresh(), METHODS[name]
    if isinstance(method, Gptq):
        method = replace(method, act_order="act_order" in options)
    rules = subject.rules(parse_format(label))
    if usual_inputs(method) == "quantized":
        calibration = Calibration(inputs="quantized", weigh="token" if "token" in options else "square")
        seen = subject.own() if "own" in options else subject.calibration
        steps: Iterator[BlockStep] = walk(model, seen, calibration)
    else:
        if not subject.shared and name != "rtn":
            subject.shared = list(walk(model, subject.calibration, Calibration(inputs="full")))
        steps = iter(subject.shared) if name != "rtn" else iter(())
    quantize(model, rules, steps, method)
    return model


def bitdistiller(subject: Subject, label: str, setting: Published, *, seed: int = 0) -> Decoder:
    """Clip, then QAT with CAKLD against the live model."""
    gamma = subject.confidence()
    teacher = copy.deepcopy(subject.fresh()).to(subject.model.compute_dtype)
    data, model = subject.data(seed, setting.batch), subject.fresh()
    start_clipped(subject, label, Clip(search=setting.clip), setting.mix)
    lr = rate_of(subject, label, setting)
    optimizer = adamw(model, lr=lr, weight_decay=0.0)
    run = Run(model, optimizer, open_mesh(device=str(data_device(model))), RunLog(None, quiet=True))
    steps = subject.training_tokens // data.tokens_per_step
    objective = BatchedFormats(Cakld(teacher, gamma), rows=subject.micro)
    often = max(1, steps // 10)  # reading the loss waits for the GPU
    kept = BestState(subject)
    train(
        run,
        data,
        objective,
        steps=steps,
        schedule=constant(lr),
        log_every=often,
        evaluate=kept.evaluate if setting.best else None,
        eval_every=max(1, steps // CHECKS),
        forward_backward=GraphedForwardBackward(),
    )
    tell(run)
    kept.restore(model)
    return model


class BestState:
    """The state with the least perplexity on the subject's validation text, of those that were evaluated."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.value, self.step = subject, math.inf, 0
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def evaluate(self, run: Run) -> dict[str, float]:
        text = self.subject.valid
        if text is None:
            raise UserError(f"{self.subject.name} has no validation text, and the test text must not choose")
        assert isinstance(run.model, Decoder)
        value = perplexity(run.model.eval(), text, context=self.subject.context, batch=eval_rows(self.subject)).value
        if value < self.value:
            self.value, self.step = value, run.step
            self.state = {name: t.detach().clone() for name, t in run.model.state_dict().items()}
        return {"val_perplexity": value}

    def restore(self, model: Decoder) -> None:
        if self.state:
            print(f"  best after step {self.step}: {self.value:.2f} on the validation text", flush=True)
            model.load_state_dict(self.state)


def rate_of(subject: Subject, label: str, setting: Published) -> float:
    return setting.lr or subject.lr or LEARNING_RATES[parse_format(label).bits]  # type: ignore[attr-defined]


def start_clipped(subject: Subject, label: str, search: Clip, mix: str = "") -> None:
    """BitDistiller's start: groups clamped to searched ranges, scales derived from their extremes."""
    model, rules, key = subject.model, rules_of(subject, label, mix), (label, search.search, mix)
    if key in subject.clipped:  # the same for every rate and seed
        model.load_state_dict(subject.clipped[key])
    else:
        most = (len(subject.text) - 1) // subject.train_context
        seen = windows(subject.text.head(), min(32, most), subject.train_context)
        clip_weights(model, rules, walk(model, seen, Calibration(inputs="full")), search)
        subject.clipped[key] = {name: t.detach().clone() for name, t in model.state_dict().items()}
    convert(
        model, [(glob, format if isinstance(format, Dense) else with_range_gradient(format)) for glob, format in rules]
    )


def ast(subject: Subject, label: str, given: str, *, seed: int = 0) -> tuple[Decoder, dict[str, Any]]:
    """SparseGPT, then AST; where `label` has bits (sparse24+int4:g32), the kept values are quantized after that.
    `ast@3e-4,frozen,batch=8,awq,blocks=0.01`: this rate, SparseGPT's masks throughout, 8 rows a step, AWQ for GPTQ +
    clip, and before AST each block's kept weights are trained against the full block's outputs, at a rate of 0.01 of
    their root mean square. The tokens of that stage are taken from AST's."""
    options = dict(item.partition("=")[::2] for item in filter(None, given.split(",")))
    lr = next((float(key) for key in options if key[0].isdigit()), 3e-4)
    teacher = copy.deepcopy(subject.fresh()).to(subject.model.compute_dtype)
    model, data = subject.fresh(), subject.data(seed, int(options.get("batch", 0)))
    walked: Iterator[BlockStep] = walk(model, subject.calibration)
    used, blocks = 0, Blockwise(epochs=2, batch=4, lr_weight=float(options.get("blocks", 0)), seed=seed)
    if blocks.lr_weight:
        walked = reconstructed(model, walk_pairs(model, subject.calibration, Calibration(), 0), blocks)
        used = blocks.epochs * subject.calibration.numel()
    prune(model, subject.rules(parse_format("sparse24:held")), walked, SparseGpt())
    steps = (subject.training_tokens - used) // data.tokens_per_step
    refresh = 1 << 30 if "frozen" in options else 10
    settings = Retrain(steps=steps, lr=lr, warmup=max(1, steps // 20), refresh=refresh)
    mesh = open_mesh(device=str(data_device(model)))
    run = Run(model, settings.optimizer(model), mesh, RunLog(None, quiet=True))
    retrain(run, teacher, data, settings, batched=True)
    tell(run)
    if label != "sparse24":
        unformat(model)
        method = METHODS["awq" if "awq" in options else "gptq+clip"]
        calibration = Calibration(inputs=usual_inputs(method))
        if isinstance(method, Gptq):  # the default of shrink/ptq
            method, calibration = replace(method, act_order=True), replace(calibration, weigh="token")
        quantize(model, subject.rules(parse_format(label)), walk(model, subject.calibration, calibration), method)
    return model, {"training_tokens": used + steps * data.tokens_per_step, "lr": lr, "batch": data.batch}


def reconstructed(model: Decoder, steps: Iterator[TrainingStep], settings: Blockwise) -> Iterator[BlockStep]:
    """The steps of a pruning. After each the block's kept weights are trained against the full block's outputs."""
    for step in steps:
        yield step  # the caller prunes the block
        block = model.blocks[step.index]
        assert isinstance(block, nn.Module)
        weights = [m.weight for m in block_linears(block).values() if not isinstance(m.format, Dense)]
        rates = [settings.lr_weight * float(root_mean_square(w[w != 0])) for w in weights]
        hooks = [keep_zeros(w) for w in weights]
        groups = [{"params": [w], "lr": rate, "full_lr": rate} for w, rate in zip(weights, rates, strict=True)]
        before, after = fit(block, step.targets, groups, settings, step.index, f"blocks.{step.index}.")
        print(f"  block {step.index}: error {before:.4f} -> {after:.4f}", flush=True)
        for hook in hooks:
            hook.remove()
        block.zero_grad()


def keep_zeros(w: Tensor) -> RemovableHandle:
    kept = w.detach() != 0
    return w.register_hook(lambda grad: grad * kept)


def ours(subject: Subject, label: str, setting: Ours, *, seed: int = 0) -> tuple[Decoder, int]:
    """Block-wise, then end to end, together as many training tokens as BitDistiller, or what the subject's time
    allows; returns the model and its training tokens."""
    loss = teacher_loss(subject, setting)
    model = subject.fresh()
    if setting.derived:
        start_clipped(subject, label, Clip())
        used = 0
    else:
        used = start_blocks(subject, label, setting, seed)
    data = subject.data(seed, setting.batch)
    steps = max(1, (subject.training_tokens - used) // data.tokens_per_step)
    rates = replace(subject.rates, **dict(setting.rates)).softer(setting.part_at(label))
    mesh = open_mesh(device=str(data_device(model)))
    run = Run(model, relative_adamw(model, rates), mesh, RunLog(None, quiet=True))
    falling = FallingRates(steps, warmup=max(1, steps // 20))
    hooks: list[Hook] = [falling]
    if subject.ends is not None:
        seconds = subject.ends - time.perf_counter()
        hooks.append(TimeBudget(steps, seconds, falling.at, now=True))
    objective, often = BatchedFormats(loss, rows=subject.micro), max(1, steps // 10)
    try:
        train(
            run, data, objective, steps=steps, hooks=hooks, log_every=often, forward_backward=GraphedForwardBackward()
        )
    except OutOfTime:
        print(f"  out of time after step {run.step} of {steps}", flush=True)
    tell(run)
    return model, used + run.step * data.tokens_per_step


def teacher_loss(subject: Subject, setting: Ours) -> Cakld | CachedCakld:
    if not setting.live:
        return CachedCakld(subject.cache(), setting.gamma)
    gamma = subject.confidence() if setting.gamma is None else setting.gamma
    return Cakld(copy.deepcopy(subject.fresh()).to(subject.model.compute_dtype), gamma)


def start_blocks(subject: Subject, label: str, setting: Ours, seed: int) -> int:
    """Turn the subject's full model into the start of end-to-end training; returns the training tokens used.

    Without block-wise training the grids are those of `init`, chosen on as many windows as BitDistiller's clip search
    sees."""
    model, rules = subject.model, rules_of(subject, label, setting.mix)
    init = setting.init or subject.blockwise.init
    settings = replace(subject.blockwise, init=init, seed=seed, keep_masters=True)
    part = subject.blockwise_part if setting.blocks is None else setting.blocks
    most = (len(subject.text) - 1) // subject.train_context
    num = min(most, max(4, int(part * subject.training_tokens / settings.epochs / subject.train_context)))
    used = num * settings.epochs * subject.train_context
    if not part:
        num, used = min(most, 32), 0
        settings = replace(settings, lr_weight=0.0, lr_scale=0.0, lr_zero=0.0, lr_norm=0.0)
    key = (label, seed, part, init, setting.mix)
    if key in subject.blocks:  # the same for every setting of the other stage
        convert(model, learned_rules(rules), skip=HEADS)
        model.load_state_dict(subject.blocks[key])
    else:
        report = train_blocks(model, rules, windows(subject.text.head(), num, subject.train_context), settings)
        learn_grids(model, rules, report.masters)
        made = {name: t.detach().clone() for name, t in model.state_dict().items()}
        subject.blocks = {**dict([*subject.blocks.items()][-1:]), key: made}  # two: with and without a mix
    return used


@torch.no_grad()
def learn_grids(
    model: nn.Module, rules: Sequence[Rule], masters: Parts | None = None, *, skip: Sequence[str] = HEADS
) -> None:
    """Grids that a method chose and fixed become Parameters with the same values.

    `masters`: the weights before rounding (Blockwise(keep_masters=True)). Rounded ones are in the middle of their bins,
    and training at small rates would hardly move any to the next bin.
    """
    grids = read_grids(model)
    convert(model, learned_rules(rules), skip=skip)
    store_states(model, grids)
    for name, w in (masters or {}).items():
        model.get_submodule(name).weight.copy_(w)  # type: ignore[operator, union-attr]


def rules_of(subject: Subject, label: str, mix: str) -> list[Rule]:
    """The Format everywhere or, with other candidates, the mix of the same bits per weight with the least damage to the
    full model, which the subject's model must still be."""
    if not mix:
        return subject.rules(parse_format(label))
    key = label, mix
    if key not in subject.mixes:
        began = time.perf_counter()
        formats = [parse_format(x) for x in (label, *mix.split("+"))]
        seen = windows(subject.text.head(), MIX_WINDOWS, subject.train_context)
        skip = (*HEADS, *subject.kept_dense)
        units = measure_damage(subject.model, formats, seen, skip=skip, file=subject.damage_file)
        budget = sum(u.options[0].bits for u in units) / sum(u.num_weights for u in units)
        chosen = subject.mixes[key] = choose_formats(units, budget)
        counts = Counter(option.format.label for option in chosen.chosen)
        print(f"  {dict(counts)}, {chosen.bits_per_weight:.3f} bits, {time.perf_counter() - began:.0f} s", flush=True)
    return [*subject.rules(Dense())[:-1], *subject.mixes[key].rules]


def tell(run: Run) -> None:
    rows = [row for row in run.log.history if "loss" in row]
    if not rows:
        return
    first, last = rows[0], rows[-1]
    print(f"  loss {first['loss']:.3f} -> {last['loss']:.3f}, {last['tokens_per_s']:,.0f} tokens/s", flush=True)


def data_device(model: Decoder) -> torch.device:
    return model.device


def shrink(subject: Subject, method: str, label: str, seed: int) -> tuple[Decoder, dict[str, Any]]:
    """Run a method: rtn, awq, gptq, ..., blockwise, ast@SETTING, bitdistiller@SETTING, ours@SETTING."""
    name, _, given = method.partition("@")
    text = {"text_id": subject.text.fingerprint[:8]}  # what trained methods saw
    if name == "bitdistiller":
        published = Published.parse(given)
        model = bitdistiller(subject, label, published, seed=seed)
        told = {"training_tokens": subject.training_tokens, "lr": rate_of(subject, label, published), **text}
        return model, {**told, "batch": published.batch} if published.batch else told
    if name == "ast":
        model, told = ast(subject, label, given, seed=seed)
        return model, {**told, **text}
    if name == "blockwise":
        model = subject.fresh()
        train_blocks(model, subject.rules(parse_format(label)), subject.calibration, Blockwise(seed=seed))
        return model, {"training_tokens": 0, "epochs": Blockwise().epochs}
    if name == "ours":
        setting = Ours.parse(given)
        model, tokens = ours(subject, label, setting, seed=seed)
        # Rounded down to whole steps; fewer where a run was cut short.
        whole = tokens > subject.training_tokens - subject.batch * subject.train_context
        told = {"rates": setting.part_at(label), "live": setting.live, "batch": setting.batch or subject.batch}
        return model, {"training_tokens": subject.training_tokens if whole else tokens, **told, **text}
    return after_training(subject, label, method), {"training_tokens": 0}


def unformat(model: Decoder) -> float:
    """Pack and decode: dense weights equal to those of the packed file. Returns the bits per packed weight."""
    pack(model, dtype=model.compute_dtype)
    layers = [m for _, m in format_linears(model) if m.packed]
    weights = [m.shape[0] * m.shape[1] for m in layers]
    bits = sum(m.format.bits_per_weight(m.shape) * n for m, n in zip(layers, weights, strict=True))
    unpack(model)
    return bits / sum(weights)


# -- measuring -----------------------------------------------------------------------------------------------


def eval_rows(subject: Subject) -> int:
    return max(1, (16384 if data_device(subject.model).type == "cuda" else 4096) // subject.context)


@torch.no_grad()
def evaluate(subject: Subject) -> dict[str, float]:
    model = subject.model.eval()
    batch = eval_rows(subject)
    found = {"perplexity": perplexity(model, subject.test, context=subject.context, batch=batch).value}
    if subject.valid is not None:
        found["valid"] = perplexity(model, subject.valid, context=subject.context, batch=batch).value
    if subject.novels is not None:
        found["novels"] = perplexity(model, subject.novels, context=512, batch=batch * subject.context // 512).value
    for path in subject.tasks:
        result = run_task(model, subject, path, limit=subject.items, batch_rows=batch * subject.context)
        found[f"accuracy_{path.stem}"] = round(result.accuracy, 4)
    return found
