"""Shrink a model to 2 or 3 bits by training it against itself: BitDistiller, as published.

Clip every group's range, let the full model write a text, train the quantized copy on it with CAKLD against the full
model. The steps are Formats and an objective in the ordinary trainer.

Run:     shoestring run shrink/bitdistiller model=DIR format=int2:g128 prompts=some.txt text=other.txt
         shoestring run shrink/bitdistiller model=DIR format=nf3:g64 data=my/texts teacher=cached steps=400
         shoestring run shrink/bitdistiller resume=RUN       goes on in the stage it was in, after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run shrink/bitdistiller mesh.dp=4 model=DIR ...
Needs:   a GPU for anything but tiny models: fp32 masters, gradients and Adam's moments (16 bytes a weight) and the
         teacher in 16 bits; teacher=cached keeps 261 bytes of disk a token instead
Time:    stories260K (260k parameters), 81,920 training tokens: 20 to 40 s on one CPU core. Writing 270k tokens of text
         with SmolLM2-135M took 33 s on an H200 that two other programs shared
Expect:  stories260K at int2:g64, perplexity 4.97 before: 12.9 with lr=1e-3, where AWQ gets 65 and GPTQ 108
         (docs/methods/bitdistiller.md). Larger models are not measured yet. The published settings (8e-6, 200 steps of
         128 rows) were made for models from 3B parameters; stories260K took a larger lr
Leaves:  a run folder with the packed model/ (or out=), self_text.jsonl, checkpoints/, evals.jsonl, report.html
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoestring.config import option, to_json
from shoestring.errors import UserError
from shoestring.formats import convert, packed_state, parse_format
from shoestring.formats.convert import Rule
from shoestring.formats.range_gradient import with_range_gradient
from shoestring.measure import evaluate_row, need_tokenizer, pick_dtype, read_tokens
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.folder import Loaded, read_spec
from shoestring.model.parallel import ParallelConfig
from shoestring.recipes.shrink.rtn import parse_rules
from shoestring.report import Scatter, Section, Text, eval_table, run_sections, write_report
from shoestring.runlog import RunLog, check_outputs, open_run_folder, write_atomically
from shoestring.serve.sampling import Sampling
from shoestring.shrink.calibrate import Calibration, walk, windows
from shoestring.shrink.clip import Clip
from shoestring.shrink.qat import build_student, build_teacher, clip_weights, once
from shoestring.shrink.quantize import plan
from shoestring.shrink.self_text import generate_text, read_prompts
from shoestring.state.checkpoint import Checkpointer
from shoestring.train.cakld import CachedCakld, Cakld, check_gamma, teacher_confidence
from shoestring.train.data import TokenData
from shoestring.train.optim import adamw, constant
from shoestring.train.shards import Corpus, prepare
from shoestring.train.teacher_cache import build_cache, one_epoch
from shoestring.train.trainer import Run, train

# What a resumed run may change; everything else is in its finished stages already.
FREE = (
    *("run", "resume", "device", "mesh", "micro", "recompute", "compile", "log_every", "save_every", "steps"),
    *("text", "eval_context", "eval_tokens", "out"),
)


@dataclass(frozen=True)
class Config:
    model: str = option("", "a Hugging Face folder, a run folder or a .gguf file")
    format: str = option("int2:g64", "for all linear layers: int2 int3 int4 nf2 nf3 nf4, with :g128 :s1")
    rules: str | None = option(
        None, "instead of format: glob=format;glob=format, the first that matches wins"
    )
    prompts: str | None = option(None, "text or .jsonl of prompts; the model itself writes the training text")
    num_prompts: int = option(3000, "prompts to complete at most")
    max_new: int = option(1024, "tokens of a completion at most")
    temperature: float = option(0.7, "of the completions")
    max_requests: int | None = option(None, "completions at a time; none: 16 on a CPU, 256 on a GPU")
    data: str | None = option(None, "instead of prompts: a corpus to train on")
    max_mb: float | None = option(100.0, "read at most this many megabytes of it; none reads all")
    calib_windows: int = option(128, "windows of the training text for the clip search; 0 does not clip")
    search: Literal["full", "alternate"] = option("full", "clip: 100 pairs as published, or 19 trials")
    teacher: Literal["live", "cached"] = option("live", "beside the student, or its top-k on disk")
    k: int = option(64, "teacher=cached: tokens to keep of each distribution")
    gamma: float | None = option(None, "weight of the reverse divergence; none: the teacher's confidence")
    range_gradient: bool = option(True, "as published: the ends of a group also get the scale's gradient")
    steps: int = option(200, "optimizer steps")
    batch: int = option(128, "rows per step over all ranks")
    context: int = option(1024, "tokens per row")
    micro: int | None = option(8, "rows per forward pass on one rank; none: all at once")
    lr: float = option(8e-6, "learning rate of AdamW, constant, without decay")
    clip: float = option(1.0, "largest gradient norm; 0 is off")
    seed: int = option(0, "of the text and the order of the data")
    text: str | None = option(None, "a text file: perplexity before and after; not the training text")
    eval_context: int = option(1024, "tokens the model sees at once in the evaluation")
    eval_tokens: int = option(16384, "tokens of the text to evaluate at most")
    dtype: Literal["auto", "fp32", "bf16"] = option("auto", "compute precision, masters are fp32")
    device: str = option("auto", "auto, cpu or cuda")
    recompute: bool = option(False, "keep one activation per block: less memory, more time")
    compile: Literal["off", "blocks"] = option("off", "torch.compile each block")
    mesh: MeshConfig = option(MeshConfig(), "how processes share the training")
    log_every: int = option(5, "steps between lines of metrics.jsonl")
    save_every: int = option(50, "steps between checkpoints; 0 saves only on Ctrl-C")
    out: str | None = option(None, "folder for the packed model; none puts it into the run folder")
    run: str | None = option(None, "folder for this run; none makes runs/shrink-bitdistiller-DATE")
    resume: str | None = option(None, "a stopped run folder to go on with; its settings are taken over")


def main(cfg: Config) -> Path:
    rules = check(cfg)
    trained_rules = [(glob, with_range_gradient(f)) for glob, f in rules] if cfg.range_gradient else rules
    mesh = open_mesh(cfg.mesh, cfg.device)
    if cfg.data is not None:
        token_data(cfg, load_corpus(cfg, Path(), RunLog(None, main=mesh.is_main)), mesh)
    compute = pick_dtype(cfg.dtype, mesh.device)
    folder = mesh.broadcast_object(open_folder(cfg, "shrink/bitdistiller", FREE) if mesh.is_main else None)
    log = RunLog(folder, main=mesh.is_main)
    log.save_config(
        {"recipe": "shrink/bitdistiller", "config": to_json(replace(cfg, resume=None, run=str(folder)))}
    )
    once(mesh, folder, "prepared", lambda: make_start(cfg, rules, folder, log, mesh.device, compute))
    corpus = load_corpus(cfg, folder, log)
    spec = read_spec(cfg.model)[0]
    data = token_data(cfg, corpus, mesh)
    objective = make_objective(cfg, folder, data, mesh, compute, log)
    parallel = ParallelConfig(cfg.recompute, cfg.compile, compute)
    start = folder / "clipped" if cfg.calib_windows else cfg.model
    model = build_student(spec, trained_rules, mesh, start, parallel)
    log.say(f"{data.tokens_per_step * cfg.steps / 1e6:.2f}M training tokens, gamma {objective.gamma:.3f}")
    train(
        Run(model, adamw(model, lr=cfg.lr, weight_decay=0.0), mesh, log),
        data,
        objective,
        steps=cfg.steps,
        schedule=constant(cfg.lr),
        clip=cfg.clip,
        checkpointer=Checkpointer(folder / "checkpoints", every=cfg.save_every, last=cfg.steps),
        log_every=cfg.log_every,
    )
    finish(cfg, "shrink/bitdistiller", model, corpus, log, folder, mesh, {"gamma": objective.gamma})
    return folder


# -- what shrink/lowbit_best shares --------------------------------------------------------------------------


def check(cfg: Any) -> list[Rule]:
    """Everything that can be said before a model is loaded; the rules."""
    if not cfg.model:
        raise UserError("model= is missing: give a Hugging Face folder, a run folder or a .gguf file")
    rules: list[Rule] = parse_rules(cfg.rules) if cfg.rules else [("*", parse_format(cfg.format))]
    if (cfg.prompts is None) == (cfg.data is None):
        raise UserError(
            "give prompts= (the model then writes its own training text) or data= (a corpus), and not both"
        )
    if cfg.text is not None and cfg.text in (cfg.data, cfg.prompts):
        raise UserError(
            f"text={cfg.text} is what is trained on: a perplexity measured there flatters the result; give two texts"
        )
    check_outputs(to_json(cfg), "out")
    if cfg.steps < 1:
        raise UserError(f"steps={cfg.steps} is not possible; give 1 or more")
    if cfg.k < 1:
        raise UserError(f"k={cfg.k} is not possible; give 1 or more tokens to keep")
    if cfg.gamma is not None:
        check_gamma(cfg.gamma)
    spec, tokenizer = read_spec(cfg.model)
    if tokenizer is None:
        raise UserError(f"model={cfg.model} has no tokenizer; put its tokenizer.json into the folder")
    if cfg.context > spec.max_positions:
        raise UserError(
            f"context={cfg.context} is more than the {spec.max_positions} positions of {cfg.model}"
        )
    with torch.device("meta"):
        convert(Decoder(spec), rules)  # shapes and names
    if cfg.prompts is not None:
        read_prompts(cfg.prompts, cfg.num_prompts)
    if cfg.text is not None:
        read_tokens(Path(cfg.text), tokenizer)
    return rules


def open_folder(cfg: Any, recipe: str, free: tuple[str, ...]) -> Path:
    settings = to_json(cfg)
    if cfg.resume is not None and (Path(cfg.resume) / "report.html").exists():  # the last thing a run writes
        raise UserError(f"resume={cfg.resume}: that run is finished; start a new one")
    return open_run_folder(recipe, settings, [key for key in settings if key not in free])


def make_start(
    cfg: Config, rules: list[Rule], folder: Path, log: RunLog, device: torch.device, compute: torch.dtype
) -> None:
    """On the first rank: the evaluation before, the text, the clipped weights."""
    loaded = load_model(cfg.model, device=device, dtype=compute)
    plan(loaded.model, rules)
    write_text(cfg, loaded, folder, log)
    if cfg.calib_windows and not (folder / "clipped").exists():
        corpus = load_corpus(cfg, folder, log)
        tokens = corpus.train.head()
        context = min(cfg.context, loaded.spec.max_positions)
        steps = walk(
            loaded.model, windows(tokens, cfg.calib_windows, context), Calibration(inputs="full", memory_gb=8)
        )
        with log.progress(len(loaded.model.blocks), "clip by block") as bar:
            settings = Clip(search=cfg.search)
            clip_weights(loaded.model, rules, steps, settings, progress=lambda done, total: bar.advance(1))
        save_model(folder / "clipped", loaded.model, loaded.tokenizer)


def write_text(cfg: Any, loaded: Loaded, folder: Path, log: RunLog) -> None:
    """The row "before", and self_text.jsonl where the model writes its own text."""
    tokenizer = need_tokenizer(loaded)
    if cfg.text is not None and not log.evaluations():
        tokens = read_tokens(Path(cfg.text), tokenizer)
        log.evaluated(**evaluate_row(loaded, "before", tokens, Path(cfg.text).name, **eval_options(cfg)))
    if cfg.prompts is not None:
        prompts = read_prompts(cfg.prompts, cfg.num_prompts)
        sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_new, seed=cfg.seed)
        out = folder / "self_text.jsonl"
        options: dict[str, Any] = {"max_requests": cfg.max_requests, "progress": log.progress}
        generate_text(loaded.model, tokenizer, prompts, out, sampling=sampling, **options)


def eval_options(cfg: Any) -> dict[str, Any]:
    return {"context": cfg.eval_context, "max_tokens": cfg.eval_tokens}


def load_corpus(cfg: Any, folder: Path, log: RunLog) -> Corpus:
    tokenizer = read_spec(cfg.model)[1]
    if cfg.data is not None:
        max_bytes = None if cfg.max_mb is None else int(cfg.max_mb * 1e6)
        return prepare(cfg.data, tokenizer=tokenizer, max_bytes=max_bytes, progress=log.progress)
    options: dict[str, Any] = {"val_fraction": 0.0, "progress": log.progress}
    return prepare(str(folder / "self_text.jsonl"), folder / "tokens", tokenizer=tokenizer, **options)


def token_data(cfg: Any, corpus: Corpus, mesh: Mesh) -> TokenData:
    rows = {"context": cfg.context, "batch": cfg.batch, "micro": cfg.micro, "seed": cfg.seed}
    return TokenData(corpus.train, **rows, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)


def make_objective(
    cfg: Config, folder: Path, data: TokenData, mesh: Mesh, compute: torch.dtype, log: RunLog
) -> Cakld | CachedCakld:
    if cfg.teacher == "cached":
        return CachedCakld(cache_teacher(cfg, folder, data, mesh, compute, log), cfg.gamma)
    teacher = build_teacher(read_spec(cfg.model)[0], mesh, cfg.model, compute)
    gamma = cfg.gamma
    kept = folder / "gamma.json"
    if gamma is None and kept.is_file():
        gamma = float(json.loads(kept.read_text())["gamma"])
    if gamma is None:
        gamma = teacher_confidence(teacher, one_epoch(data, cfg.steps), mesh)
        if mesh.is_main:
            write_atomically(kept, json.dumps({"gamma": gamma}) + "\n")
    return Cakld(teacher, gamma)


def cache_teacher(
    cfg: Any, folder: Path, data: TokenData, mesh: Mesh, compute: torch.dtype, log: RunLog
) -> Any:
    """The teacher's top-k for every target that training will see; the teacher is gone when this returns."""
    teacher = build_teacher(read_spec(cfg.model)[0], mesh, cfg.model, compute)
    cache = build_cache(
        folder / "teacher",
        teacher,
        one_epoch(data, cfg.steps),
        num_targets=len(data.shards),
        k=min(cfg.k, teacher.spec.vocab_size),
        identity={"data": data.shards.fingerprint, "context": cfg.context, "model": cfg.model},
        mesh=mesh,
        progress=log.progress,
    )
    room = 8e9 if mesh.device.type == "cuda" else 0.0
    return cache.to(mesh.device) if cache.num_bytes < room else cache


def finish(
    cfg: Any,
    recipe: str,
    model: Decoder,
    corpus: Corpus,
    log: RunLog,
    folder: Path,
    mesh: Mesh,
    told: dict[str, Any],
) -> None:
    """Pack and save on all ranks; evaluate and report on the first. Cut short, it can be done again."""
    out = Path(cfg.out) if cfg.out else folder / "model"
    state = packed_state(model, dtype=model.compute_dtype)
    save_model(out, model, corpus.tokenizer, weights=state, mesh=mesh)
    if mesh.is_main:
        write_atomically(out / "quantization.json", json.dumps({**told, "method": recipe}, indent=1) + "\n")
        loaded = load_model(out, device=mesh.device, dtype=model.compute_dtype)
        if not any(row["model"] == "after" for row in log.evaluations()):
            tokens = None if cfg.text is None else read_tokens(Path(cfg.text), need_tokenizer(loaded))
            name = "" if cfg.text is None else Path(cfg.text).name
            log.evaluated(**evaluate_row(loaded, "after", tokens, name, **eval_options(cfg)))
        write_page(recipe, log, folder, out)
        for stage in (
            "clipped",
            "teacher",
            "tokens",
            "checkpoints",
            "blocks",
        ):  # only now: no resume needs them
            shutil.rmtree(folder / stage, ignore_errors=True)
    mesh.barrier()
    mesh.close()


def write_page(recipe: str, log: RunLog, folder: Path, out: Path) -> None:
    rows = log.evaluations()
    eval_table(rows, "Before and after").print()
    points = [(r["format"], r["megabytes"], r["perplexity"]) for r in rows if r.get("perplexity")]
    commands = (
        f'shoestring inspect {out}\nshoestring generate {out} "Once upon a time"\nshoestring export {out} DIR'
    )
    sections: list[Section] = [
        Scatter("Size and perplexity", points, "MB", "perplexity (lower is better)"),
        *run_sections(folder),
        Text("Next", commands, code=True),
    ]
    page = write_report(folder, recipe, sections, subtitle=str(folder))
    log.say(f"packed model in {out}, report in {page}. Next:\n{commands}")
    log.close()
