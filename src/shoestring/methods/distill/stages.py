"""What shrink/bitdistiller and shrink/lowbit_best share: the model writes a text, and a quantized copy of it is trained
on that text against the model itself.

    rules = check(cfg)                          checks that need neither layers nor rows
    checked_run(cfg, RECIPE, check_model, n)    the processes, and the folder (new or resumed) with its log
    ...                                         the recipe's own stages, and training
    finish(cfg, run, model, corpus, notes)

A run is finished when its report is written. Until then its finished stages are kept, and it can be resumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoestring.config import deciding, option, to_json
from shoestring.device import pick_dtype
from shoestring.errors import UserError, during
from shoestring.evals.model_row import check_apart, evaluate_row, need_tokenizer, read_tokens
from shoestring.formats import Dense, Format, packed_state, parse_format
from shoestring.formats.convert import Rule, format_linear
from shoestring.json_files import Fields, read_object
from shoestring.mesh import Mesh, open_mesh
from shoestring.methods.distill.cakld import CachedCakld, Cakld, check_gamma, teacher_confidence
from shoestring.methods.distill.range_gradient import with_range_gradient
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.folder import LoadedModel, read_spec
from shoestring.model.parallel import ParallelConfig
from shoestring.model.save import round_rest
from shoestring.recipes.settings import (
    FormatSettings,
    GateSettings,
    MixSettings,
    RanksSettings,
    SourceSettings,
    TrainSettings,
)
from shoestring.recipes.shrink_run import (
    ShrinkRun,
    check_start,
    deliver_or_refuse,
    open_run,
    read_rules,
    report_before_after,
)
from shoestring.runlog import RunLog, check_outputs, write_atomically
from shoestring.serve.engine.sampling import Sampling
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.blockwise import Blockwise, train_blocks
from shoestring.shrink.calibrate import Calibration, walk, windows
from shoestring.shrink.clip import Clip
from shoestring.shrink.mixed_bits import check_candidates, read_candidates
from shoestring.shrink.qat import build_teacher, clip_weights, coarsest, learned_rules, read_grids, save_grids
from shoestring.shrink.quality_gate import judge, verify_model
from shoestring.shrink.quantize import plan
from shoestring.shrink.self_text import check_room, generate_text, read_prompts
from shoestring.shrink.whole_model import check_embedding, give_embedding
from shoestring.state.checkpoint import check_steps
from shoestring.state.checkpointer import Checkpointer
from shoestring.train.cuda_graph import GraphedForwardBackward
from shoestring.train.data import TokenData, check_pass, rows_per_pass
from shoestring.train.shards import Corpus, tokenize_corpus
from shoestring.train.teacher_cache import TeacherCache, build_cache, one_epoch

USUAL_MICRO = 8
# Folders that a finished run does not need.
STAGES = ("clipped", "teacher", "tokens", "checkpoints", "blocks")


@dataclass(frozen=True)
class LowbitSettings(GateSettings, RanksSettings, TrainSettings, FormatSettings, SourceSettings):
    format: str = option("int2:g64", "for all linear layers: int2 int3 int4 nf2 nf3 nf4, with :g128 :s1")
    prompts: str | None = option(None, "text or .jsonl of prompts; the model itself writes the training text")
    num_prompts: int = option(3000, "prompts to complete at most", least=1)
    max_new: int = option(1024, "tokens of a completion at most", least=1, advanced=True)
    temperature: float = option(0.7, "sampling temperature of the completions", least=0, advanced=True)
    max_requests: int | None = option(
        None, "completions at a time; none: 16 on a CPU, 256 on a GPU", least=1, advanced=True
    )
    data: str | None = option(None, "instead of prompts: a corpus to train on")
    max_mb: float | None = option(100.0, "read at most this many megabytes of it; none reads all", least=0.001)
    k: int = option(64, "tokens to keep of each distribution in the full model's cache", least=1, advanced=True)
    gamma: float | None = option(
        None, "weight of the reverse divergence; none: the full model's confidence", advanced=True
    )
    teacher: Literal["live", "cached"] = option(
        "live", "live: the full model runs beside the student; cached: its top-k is on disk"
    )
    steps: int = option(200, "optimizer steps end to end")
    batch: int = option(32)
    micro: int | None = option(
        USUAL_MICRO, "rows per forward pass on one rank (8: or fewer, as the batch divides); none: all at once"
    )
    seed: int = option(0, "random seed of the text and the order of the data")
    text: str | None = option(None, "a text file: perplexity before and after; not the training text")
    eval_context: int = option(1024, "tokens the model sees at once in the evaluation", least=2, advanced=True)
    eval_tokens: int = option(16384, "tokens of the text to evaluate at most", least=2, advanced=True)
    compile: Literal["off", "blocks"] = option("off", "torch.compile each block")
    log_every: int = option(5)
    clip: float = option(1.0, deciding=True)
    save_every: int = option(50)


@dataclass(frozen=True)
class BestSettings(MixSettings, LowbitSettings):
    """Of shrink/lowbit_best."""

    candidates: str = option("int2:g64,int3:g64,int4:g64")
    windows: int | None = option(
        None, "rows of the training text for the block-wise stage, 0: none; none: by the bits", least=0, advanced=True
    )
    init: str | None = option(
        None,
        "the method whose grids training starts from: rtn clip awq gptq gptq+clip; none: by the bits",
        advanced=True,
    )
    grids: Literal["learned", "derived"] | None = option(
        None,
        "trained, or following their weights from clipped ones on; none: derived at 3 bits without a budget",
        advanced=True,
    )
    epochs: int = option(4, "passes of the block-wise stage over its rows", least=1, advanced=True)
    block_batch: int = option(4, "rows in a step of the block-wise stage", least=1, advanced=True)
    memory_gb: float = option(8.0, "activations beyond this go to a file", least=0, advanced=True)
    gamma: float | None = option(
        0.0, "weight of the reverse divergence; none: the full model's confidence, as BitDistiller's"
    )
    batch: int = option(8)
    steps: int = option(800)
    lr_weight: float = option(
        5e-3, "learning rate of weights, relative to a layer's root mean square; 0 freezes them", least=0, advanced=True
    )
    lr_scale: float = option(3e-4, "learning rate of scales, relative to a layer's mean scale", least=0, advanced=True)
    lr_zero: float = option(5e-3, "learning rate of zero points, in codes", least=0, advanced=True)
    lr_norm: float = option(
        2e-3, "learning rate of norms and biases, relative to their root mean square", least=0, advanced=True
    )
    lr_rest: float = option(
        5e-3,
        "learning rate of embeddings and head, relative to their root mean square; 0 freezes them",
        least=0,
        advanced=True,
    )
    part: float | None = option(
        None,
        "multiplies these rates; none: 0.25, or 0.5 with derived grids. Very small models prefer 1 at 2 bits",
        least=0,
        advanced=True,
    )


# -- before --------------------------------------------------------------------------------------------------


def check(cfg: LowbitSettings) -> list[Rule]:
    """The rules, after the checks that need neither layers nor rows."""
    settings = to_json(cfg)
    check_start(settings, deciding(type(cfg)))
    if cfg.resume is not None:
        check_steps(cfg.steps, Path(cfg.resume))
    rules: list[Rule] = read_rules(cfg.rules, cfg.format)
    if (cfg.prompts is None) == (cfg.data is None):
        raise UserError("give prompts= (the model then writes its own training text) or data= (a corpus), and not both")
    check_apart(settings, "data", "prompts")
    check_outputs(settings, "out")
    rows_per_pass(cfg.batch, micro_of(cfg), cfg.mesh.dp * cfg.mesh.replica)
    if cfg.gamma is not None:
        check_gamma(cfg.gamma)
    spec, tokenizer = read_spec(cfg.model)
    if tokenizer is None:
        raise UserError(f"model={cfg.model} has no tokenizer; put its tokenizer.json into the folder")
    if cfg.context > spec.max_positions:
        raise UserError(
            f"context={cfg.context} is more than the {spec.max_positions} positions of {cfg.model}; give "
            f"context={spec.max_positions} or less"
        )
    if cfg.text is not None:
        read_tokens(Path(cfg.text), tokenizer)
    return rules


def check_rules(model: Decoder, rules: list[Rule]) -> None:
    """UserError unless the layers can hold these formats, and one of them is not dense."""
    if not plan(model, rules):
        raise UserError("every layer stays dense: give a format with fewer bits, for example format=int2:g64")


def range_rules(rules: list[Rule]) -> list[Rule]:
    """The rules with BitDistiller's gradient, except for dense layers."""
    return [(glob, f if isinstance(f, Dense) else with_range_gradient(f)) for glob, f in rules]


def check_rows(cfg: LowbitSettings, mesh: Mesh, num_windows: int) -> None:
    """UserError unless the text has, or can have once it is written, the rows of a step and `num_windows` windows."""
    if cfg.data is not None:
        corpus = load_corpus(cfg, Path(), RunLog(None, main=mesh.is_main))
        token_data(cfg, corpus, mesh)
        if num_windows:
            windows(corpus.train.head(num_windows * cfg.context), num_windows, cfg.context)
        return
    assert cfg.prompts is not None
    tokenizer = read_spec(cfg.model)[1]
    assert tokenizer is not None
    least = max(cfg.batch * cfg.context + 1, num_windows * cfg.context)
    check_room(read_prompts(cfg.prompts, cfg.num_prompts), tokenizer, cfg.max_new, least)


def checked_run(
    cfg: LowbitSettings, recipe: str, check_model: Callable[[Decoder], object], num_windows: int
) -> AbstractContextManager[ShrinkRun]:
    """Check the data and the model's weights; entering the result makes the run folder."""
    mesh = open_mesh(cfg.mesh, cfg.device)
    with torch.device("meta"):
        blank = Decoder(read_spec(cfg.model)[0])
    check_model(blank)  # shapes and names
    check_embedding(blank, read_rules(cfg.rules, cfg.format), cfg.embed)
    compute = pick_dtype(cfg.dtype, mesh.device)
    rows = rows_per_pass(cfg.batch, micro_of(cfg), mesh.dp_size)
    check_pass(rows, cfg.context, blank.spec.num_layers * blank.spec.d_model, mesh.device, compute)
    check_rows(cfg, mesh, num_windows)
    if mesh.is_main and cfg.resume is None:
        # Loaded for the check and dropped, so that no process holds it while training.
        check_model(load_model(cfg.model, device=mesh.device, dtype=compute).model)
    return open_run(recipe, cfg, cfg.model, device=mesh.device, mesh=mesh)


# -- text and teacher ----------------------------------------------------------------------------------------


def write_text(cfg: LowbitSettings, loaded: LoadedModel, run: ShrinkRun) -> None:
    """Evaluate the row "before", and write self_text.jsonl where the model writes its own text."""
    if cfg.text is not None and not run.log.evaluations():
        evaluate(cfg, loaded, "before", run.log)
    if cfg.prompts is not None:
        prompts = read_prompts(cfg.prompts, cfg.num_prompts)
        sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_new, seed=cfg.seed)
        out = run.folder / "self_text.jsonl"
        options: dict[str, Any] = {"max_requests": cfg.max_requests, "progress": run.log.progress}
        with during("the text that the model writes"):
            generate_text(loaded.model, need_tokenizer(loaded), prompts, out, sampling=sampling, **options)


def evaluate(cfg: LowbitSettings, loaded: LoadedModel, label: str, log: RunLog) -> None:
    tokens, name = None, ""
    if cfg.text is not None:
        tokens, name = read_tokens(Path(cfg.text), need_tokenizer(loaded)), Path(cfg.text).name
    lengths: dict[str, Any] = {"context": cfg.eval_context, "max_tokens": cfg.eval_tokens}
    log.evaluated(**evaluate_row(loaded, label, tokens, name, **lengths))


def load_corpus(cfg: LowbitSettings, folder: Path, log: RunLog) -> Corpus:
    tokenizer = read_spec(cfg.model)[1]
    if cfg.data is not None:
        max_bytes = None if cfg.max_mb is None else int(cfg.max_mb * 1e6)
        return tokenize_corpus(cfg.data, tokenizer=tokenizer, max_bytes=max_bytes, progress=log.progress)
    options: dict[str, Any] = {"val_fraction": 0.0, "progress": log.progress}
    return tokenize_corpus(str(folder / "self_text.jsonl"), folder / "tokens", tokenizer=tokenizer, **options)


def micro_of(cfg: LowbitSettings) -> int | None:
    """micro=, or where it is the usual one the most of so many rows that divide those of a rank: a small batch needs no
    other setting."""
    if cfg.micro != USUAL_MICRO:
        return cfg.micro
    rows = rows_per_pass(cfg.batch, None, cfg.mesh.dp * cfg.mesh.replica)
    return max(n for n in range(1, USUAL_MICRO + 1) if rows % n == 0)


def token_data(cfg: LowbitSettings, corpus: Corpus, mesh: Mesh) -> TokenData:
    rows: dict[str, Any] = {"context": cfg.context, "batch": cfg.batch, "micro": micro_of(cfg), "seed": cfg.seed}
    return TokenData(corpus.train, **rows, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)


def some_rows(cfg: LowbitSettings, corpus: Corpus, num: int, log: RunLog) -> Tensor:
    """[num, context] rows of the text, or as many as it has: completions may be shorter than allowed."""
    has = max(1, len(corpus.train) // cfg.context)
    if num > has:
        log.say(f"{has} rows of the text are looked at, not {num}: it has no more")
    return windows(corpus.train.head(), min(num, has), cfg.context)


def cache_teacher(cfg: LowbitSettings, run: ShrinkRun, data: TokenData) -> TeacherCache:
    """The teacher's top-k for every target of the training steps; the teacher is freed on return."""
    teacher = build_teacher(cfg.model, run.mesh, run.compute)
    with during("the full model's cache"):
        cache = build_cache(
            run.folder / "teacher",
            teacher,
            one_epoch(data, cfg.steps),
            num_targets=len(data.shards),
            k=min(cfg.k, teacher.spec.vocab_size),
            identity={"data": data.shards.fingerprint, "context": cfg.context, "model": cfg.model},
            mesh=run.mesh,
            progress=run.log.progress,
        )
    room = 8e9 if run.mesh.device.type == "cuda" else 0.0
    return cache.to(run.mesh.device) if cache.num_bytes < room else cache


def make_objective(
    cfg: LowbitSettings, run: ShrinkRun, data: TokenData, teacher: Literal["live", "cached"]
) -> Cakld | CachedCakld:
    """CAKLD against the full model beside the student, or against its top-k on disk."""
    if teacher == "cached":
        return CachedCakld(cache_teacher(cfg, run, data), cfg.gamma)
    live = build_teacher(cfg.model, run.mesh, run.compute)
    gamma, kept = cfg.gamma, run.folder / "gamma.json"
    if gamma is None and kept.is_file():
        gamma = Fields(read_object(kept), str(kept)).number("gamma", least=0.0, most=1.0)
    if gamma is None:
        gamma = teacher_confidence(live, one_epoch(data, cfg.steps), run.mesh)
        if run.mesh.is_main:
            write_atomically(kept, json.dumps({"gamma": gamma}) + "\n")
    return Cakld(live, gamma)


# -- where training starts -----------------------------------------------------------------------------------


def clip_start(
    loaded: LoadedModel, rules: list[Rule], seen_NT: Tensor, settings: Clip, memory_gb: float, run: ShrinkRun
) -> None:
    """BitDistiller's start: groups clamped to searched ranges, with finished blocks on disk."""
    files = BlockFiles(run.folder / "blocks")
    calibration = Calibration(inputs="full", memory_gb=memory_gb)
    steps = walk(loaded.model, seen_NT, calibration, start=files.count())
    with during("the clip search"), run.log.progress(len(loaded.model.blocks), "clip by block") as bar:
        clip_weights(loaded.model, rules, steps, settings, progress=lambda *_: bar.advance(1), files=files)


def blockwise_start(
    loaded: LoadedModel,
    rules: list[Rule],
    seen_NT: Tensor,
    settings: Blockwise,
    memory_gb: float,
    run: ShrinkRun,
    notes: dict[str, Any],
) -> None:
    """Train block by block, and write blockwise/ (the weights before rounding), grids.safetensors and
    blockwise.json."""
    model, folder = loaded.model, run.folder
    with during("training block by block"), run.log.progress(len(model.blocks), "block by block") as bar:
        report = train_blocks(
            model,
            rules,
            seen_NT,
            settings,
            Calibration(memory_gb=memory_gb),
            progress=lambda done, total, error: bar.advance(1, error=error),
            files=BlockFiles(folder / "blocks"),
        )
    save_grids(folder / "grids.safetensors", read_grids(model))
    write_atomically(folder / "blockwise.json", json.dumps({**report.to_json(), **notes}, indent=1) + "\n")
    with torch.no_grad():
        for name, w in report.masters.items():
            layer = format_linear(model, name)
            layer.set_format(Dense())
            layer.weight.copy_(w)
    save_model(folder / "blockwise", model, loaded.tokenizer)


# -- where shrink/lowbit_best starts, by the bits ------------------------------------------------------------


PART = 0.25  # of the rates: experiments/bitdistiller.md has the others


def part_of(cfg: BestSettings, rules: list[Rule]) -> float:
    if cfg.part is not None:
        return cfg.part
    return 2 * PART if is_derived(cfg, rules) else PART


def is_derived(cfg: BestSettings, rules: list[Rule]) -> bool:
    """Whether scales are derived from the weights (BitDistiller) instead of trained."""
    if cfg.grids is not None:
        return cfg.grids == "derived"
    usual = cfg.windows is None and cfg.init is None and cfg.bits_budget is None
    return usual and coarsest(format for _, format in rules) == 3


def check_grids(cfg: BestSettings) -> None:
    given = [f"{name}={value}" for name, value in (("windows", cfg.windows), ("init", cfg.init)) if value]
    if cfg.grids == "derived" and given:
        raise UserError(
            f"{' '.join(given)} is for the block-wise stage, which grids=derived does not have: training starts from "
            "clipped weights. Leave it out, or give grids=learned"
        )


def check_model(cfg: BestSettings, rules: list[Rule], model: Decoder) -> None:
    """UserError unless the layers can hold these formats, or with a budget each of the candidates."""
    if cfg.bits_budget is None:
        check_rules(model, rules)
    else:
        check_candidates(model, pick_candidates(cfg), cfg.bits_budget)


def pick_candidates(cfg: BestSettings) -> list[Format]:
    return read_candidates(cfg.bits_budget, cfg.candidates, cfg.damage_windows, cfg.rules)


def trained_rules(cfg: BestSettings, rules: list[Rule]) -> list[Rule]:
    if not is_derived(cfg, rules):
        return learned_rules(rules)
    return range_rules(rules)


def rules_of(mix: dict[str, Any]) -> list[Rule]:
    return [(layer, parse_format(unit["format"])) for unit in mix["units"] for layer in unit["layers"]]


# By bits: the method whose grids training starts from, and the rows of the block-wise stage. At 3 bits that stage
# overfits to its text (docs/methods/bitdistiller.md).
STARTS = {2: ("awq", 512), 3: ("clip", 0), 4: ("awq", 512)}
NUM_SEEN = 32  # rows that grids are chosen on without block-wise training


def block_settings(cfg: BestSettings, rules: list[Rule]) -> tuple[Blockwise, int]:
    """The settings of the block-wise stage, and its number of rows."""
    init, num = STARTS[min(4, max(2, coarsest(format for _, format in rules)))]
    init, num = init if cfg.init is None else cfg.init, num if cfg.windows is None else cfg.windows
    settings = Blockwise(init=init, epochs=cfg.epochs, batch=cfg.block_batch, seed=cfg.seed, keep_masters=True)
    if num:
        return settings, num
    return replace(settings, lr_weight=0.0, lr_scale=0.0, lr_zero=0.0, lr_norm=0.0), NUM_SEEN


# -- training and after --------------------------------------------------------------------------------------


def parallel_of(cfg: LowbitSettings, run: ShrinkRun) -> ParallelConfig:
    return ParallelConfig(cfg.recompute, cfg.compile, run.compute)


def training_options(cfg: LowbitSettings, run: ShrinkRun) -> dict[str, Any]:
    """The arguments of `train` that both recipes share."""
    how: dict[str, Any] = {"last": cfg.steps, "seed": cfg.seed, "resume_from": cfg.resume_from}
    return {
        "steps": cfg.steps,
        "clip": cfg.clip,
        "log_every": cfg.log_every,
        "forward_backward": GraphedForwardBackward() if cfg.compile == "off" else None,
        "checkpointer": Checkpointer(run.folder / "checkpoints", every=cfg.save_every, **how),
    }


def finish(cfg: LowbitSettings, run: ShrinkRun, model: Decoder, corpus: Corpus, notes: dict[str, Any]) -> None:
    """Pack and save on all ranks; evaluate and report on the first. Can be repeated after an interruption."""
    out = Path(cfg.out) if cfg.out else run.folder / "model"
    give_embedding(model, read_rules(cfg.rules, cfg.format), cfg.embed)
    round_rest(model)
    state = packed_state(model, dtype=model.compute_dtype)
    save_model(out, model, corpus.tokenizer, weights=state, mesh=run.mesh)
    reason = None
    if run.mesh.is_main:
        method = json.dumps({**notes, "method": run.recipe}, indent=1)
        write_atomically(out / "quantization.json", method + "\n")
        if not any(row["model"] == "after" for row in run.log.evaluations()):
            loaded = load_model(out, device=run.mesh.device, dtype=model.compute_dtype)
            verify_model(loaded.model, cfg.verify)
            evaluate(cfg, loaded, "after", run.log)
        packed = load_model(out, dtype=model.compute_dtype).model
        reason = judge(packed, run.log, max_perplexity=cfg.max_perplexity, force=cfg.force)
    deliver_or_refuse(run, reason, out)
    if run.mesh.is_main:
        report_before_after(run.recipe, run.log, run.folder, out)
        for stage in STAGES:
            shutil.rmtree(run.folder / stage, ignore_errors=True)
    run.mesh.barrier()
    run.mesh.close()
