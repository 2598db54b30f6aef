"""Prune a pretrained model to 2:4: one-shot (SparseGPT, Wanda or magnitude), then retrain it (AST), with SLoRB.

Run:     shoestring run shrink/prune24 model=DIR calib=some.txt data=texts/ steps=2000 text=other.txt
         shoestring run shrink/prune24 model=DIR calib=some.txt train=none               one-shot only, no data
         shoestring run shrink/prune24 model=DIR calib=some.txt data=texts/ slorb=16     with a branch over block sums
         shoestring run shrink/prune24 model=DIR calib=some.txt data=texts/ train=cast   the rival: dense until the end
         shoestring run shrink/prune24 model=DIR calib=some.txt data=self prompts=questions.jsonl     on its own text
         shoestring run shrink/prune24 resume=RUN        goes on at the next block or step after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run shrink/prune24 mesh.dp=4 ...
Needs:   one-shot: the model in fp32 or bf16 on the device, or one block of it (stream=true, the model in the host's
         memory), and one block's activations (or disk: memory_gb); at the end 3 bytes a weight in the host's memory
         (5 in fp32 or with slorb).
         Retraining: 16 bytes a weight for the student and the model again as its teacher; a GPU beyond toy sizes
Time:    SmolLM2-135M, SparseGPT: 6 minutes of a CPU core with 12 windows of 512, half a minute on an H200 with 32;
         2,441 steps of AST with 16k tokens each: 7 minutes on an H200 that has two such runs, compile=blocks
Expect:  SmolLM2-135M, WikiText-2, context 2048: perplexity 18.5 dense; one-shot 5,664 (magnitude), 98 (wanda), 40.3
         (sparsegpt, calib_windows=64), 38.4 (with slorb=16); retrained on 40M tokens of free English and of what the
         model wrote (lr=3e-4): 24.0 (ast), 25.0 (start=dense), 23.8 (slorb=16), 30.3 (train=cast
         lr=5e-4)
Leaves:  a run folder with model/ (Hugging Face, zeros in dense weights; with slorb the branch is added in, which makes
         them dense again), packed/ (9 bits per weight, 10 with slorb=16), pruning.json in both (what was counted:
         every pruned layer is 2:4), oneshot/, checkpoints/, flip rates and magnitudes in metrics.jsonl, report.html
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoestring.config import option, to_json
from shoestring.errors import UserError, in_run
from shoestring.formats import Slorb, Sparse24, convert, pack
from shoestring.formats.convert import Rule
from shoestring.measure import check_apart, evaluate_row, need_tokenizer, pick_dtype, read_tokens, text_tokens
from shoestring.mesh import Mesh, MeshConfig, open_mesh
from shoestring.model import Decoder, Tokenizer, load_model, save_model
from shoestring.model.folder import Loaded, read_spec
from shoestring.model.parallel import CompileMode, ParallelConfig
from shoestring.recipes.shrink import ptq
from shoestring.recipes.train.dense import check_steps, few_documents, validation_loss
from shoestring.recipes.train.sparse24_fst import flip_plots
from shoestring.report import (
    Curves,
    Section,
    Series,
    Table,
    Text,
    eval_table,
    in_words,
    run_sections,
    write_report,
)
from shoestring.runlog import RunLog, check_free, open_run_folder, read_config, resumable, write_atomically
from shoestring.shrink.calibrate import BlockStep, Calibration, check_spill, walk
from shoestring.shrink.prune import (
    PRUNERS,
    Pruner,
    SparseGpt,
    hold_branches,
    plan_pruning,
    prune,
    take_branches,
)
from shoestring.shrink.qat import once
from shoestring.shrink.resume import BlockFiles
from shoestring.shrink.retrain24 import Coverage, Retrain, build_student, check_coverage, gather, retrain
from shoestring.shrink.self_text import PAPER, generate_text, read_prompts
from shoestring.shrink.visit import load_where_it_fits
from shoestring.state.checkpoint import Checkpointer
from shoestring.train.data import TokenData, rows_per_pass
from shoestring.train.shards import Corpus, prepare
from shoestring.train.sparse24 import check_torch
from shoestring.train.trainer import Run

RECIPE = "shrink/prune24"
SELF = "self.jsonl"  # what the model wrote, in the run's folder
# Settings that finished blocks and steps depend on.
DECIDING = (
    "model", "layers", "method", "calib", "calib_windows", "calib_context", "damping", "slorb", "projection", "train",
    "start", "data", "max_mb", "batch", "context", "lr", "refresh", "seed", "dtype", "pull", "anneal", "distill", "kl",
    "ce", "temperature", "prompts", "self_texts", "self_tokens",
)  # fmt: skip
# Settings that do nothing with train=none.
TRAINING = (
    "start", "data", "prompts", "self_texts", "self_tokens", "max_mb", "steps", "batch", "context", "micro", "lr",
    "warmup", "schedule", "weight_decay", "clip", "pull", "anneal", "refresh", "distill", "kl", "ce", "temperature",
    "seed", "recompute", "compile", "log_every", "eval_every", "save_every", "flip_every",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    model: str = option("", "a Hugging Face folder, a run folder or a .gguf file")
    layers: str = option(
        "*", "glob of the layers to prune; the output head only where its name is spelled out"
    )
    method: Literal["sparsegpt", "wanda", "magnitude"] = option("sparsegpt", "the one-shot method")
    calib: str | None = option(
        None, "calibration text or corpus; a run is calibrated on its own training text"
    )
    calib_windows: int = option(32, "windows of calibration text", least=1)
    calib_context: int = option(512, "tokens in a window", least=1)
    damping: float = option(0.01, "sparsegpt: added to the Hessian's diagonal, as a part of its mean")
    stream: Literal["auto", "true", "false"] = option(
        "auto",
        "one-shot; true: the model stays in the host's memory and one block at a time goes to the device; auto: where "
        "the whole model would take more than half of the device's free memory",
    )
    memory_gb: float = option(4.0, "activations beyond this go to a file", least=0)
    spill: str | None = option(None, "folder for that file; none: the system's temporary folder")
    slorb: int = option(0, "add a branch over sums of this many inputs, 16 is the paper's; 0: none", least=0)
    projection: Literal["sum", "trained"] = option(
        "sum", "slorb: block sums, or train the projection as well"
    )
    train: Literal["ast", "cast", "none"] = option(
        "ast", "how to retrain; none stops after the one-shot pruning"
    )
    start: Literal["auto", "oneshot", "dense"] = option(
        "auto", "weights that training starts from; auto: one-shot for ast, dense for cast"
    )
    data: str | None = option(
        None, "training corpus, not the evaluated text; self: text the dense model writes"
    )
    prompts: str | None = option(None, "data=self: a text, corpus or .jsonl to take prompts from")
    self_texts: int = option(2000, "data=self: texts to write", least=1)
    self_tokens: int = option(512, "data=self: tokens of a text at most", least=1)
    max_mb: float | None = option(
        100.0, "read at most this many megabytes of the corpus; none reads all", least=0.001
    )
    steps: int = option(1000, "optimizer steps", least=1)
    batch: int = option(16, "rows per step over all ranks", least=1)
    context: int = option(1024, "tokens per row", least=1)
    micro: int | None = option(
        None, "rows per forward pass on one rank, to save memory; none: all at once", least=1
    )
    lr: float = option(2e-4, "peak learning rate; cast wants more", least=0)
    warmup: int = option(50, "steps of linear warm-up", least=0)
    schedule: Literal["cosine", "wsd"] = option("cosine", "cosine to a tenth, or stable, then linear to zero")
    weight_decay: float = option(0.0, "of all matrices; the pull on masked weights is apart", least=0)
    clip: float = option(1.0, "largest gradient norm; 0 is off", least=0)
    pull: float | None = option(None, "on masked weights; none: by the gradients of the first step", least=0)
    anneal: float | None = option(
        None, "share of the steps until the full pull; none: 1/4 for ast, 1 for cast"
    )
    refresh: int = option(10, "steps between new masks", least=1)
    distill: bool = option(True, "learn from the dense model's predictions too")
    kl: float | None = option(None, "their weight; none: 0.67 for ast, 1/3 for cast", least=0)
    ce: float | None = option(None, "weight of the text; none: 0.33 for ast, 2/3 for cast", least=0)
    temperature: float | None = option(None, "of the predictions; none: 2 for ast, 1 for cast", least=0)
    text: str | None = option(None, "a text file: perplexity of dense, one-shot and retrained model")
    max_tokens: int = option(16384, "tokens of that text at most", least=2)
    seed: int = option(0, "of the order of the data")
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", "compute precision, masters are fp32; auto: bf16 on GPU"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:1 ...")
    recompute: bool = option(
        False, "keep one activation per block, recompute the rest: less memory, more time"
    )
    compile: Literal["off", "blocks", "whole"] = option(
        "off", "torch.compile each block, or all as one graph"
    )
    mesh: MeshConfig = option(MeshConfig(), "how processes share the retraining; pruning runs on the first")
    log_every: int = option(10, "steps between lines of metrics.jsonl", least=1)
    eval_every: int = option(100, "steps between validation losses; 0 is off", least=0)
    save_every: int = option(200, "steps between checkpoints; 0 saves only on Ctrl-C", least=0)
    flip_every: int = option(10, "steps between measurements of the flip rate", least=1)
    run: str | None = option(None, "folder for this run; none makes runs/shrink-prune24-DATE")
    resume: str | None = option(None, "a stopped run folder to go on with; its settings are taken over")


def main(cfg: Config) -> Path:
    check(cfg)
    settings = None if cfg.train == "none" else retraining(cfg)
    mesh = open_mesh(cfg.mesh, cfg.device)
    rules = make_rules(cfg)
    compute = pick_dtype(cfg.dtype, mesh.device)
    spec, tokenizer = read_spec(cfg.model)
    with torch.device("meta"):
        blank = Decoder(spec)
        convert(blank, rules)  # layers that cannot be 2:4 are said before there is a folder
    calib_NT = check_texts(cfg, Loaded(blank, tokenizer, spec, Path(cfg.model))) if mesh.is_main else None
    folder = mesh.broadcast_object(open_run_folder(RECIPE, to_json(cfg), ()) if mesh.is_main else None)
    with in_run(folder), resumable(RECIPE, folder):
        log = RunLog(folder, main=mesh.is_main)
        log.save_config({"recipe": RECIPE, "config": to_json(replace(cfg, resume=None, run=str(folder)))})
        once(mesh, folder, "pruned", lambda: one_shot(cfg, rules, folder, log, mesh, calib_NT))
        corpus = None
        student: Decoder | None = None
        if settings is not None:
            if cfg.data == "self":
                once(mesh, folder, "written", lambda: write_text(cfg, folder / SELF, log, mesh))
            corpus = training_text(cfg, folder, log, tokenizer)
            student = train_stage(cfg, settings, rules, folder, log, mesh, corpus)
        whole = None
        if student is not None:
            whole = gather(student, rules, mesh)
        elif mesh.is_main:
            # As it was written; a branch is kept in fp32 until it is packed.
            whole = load_start(folder, rules, torch.float32 if cfg.slorb else compute)
        if whole is not None:
            coverage = deliver(cfg, whole, rules, folder, log, tokenizer, compute, corpus, mesh.device)
            finish(cfg, folder, log, coverage)
    mesh.barrier()
    mesh.close()
    return folder


def check(cfg: Config) -> None:
    """What can be wrong with the settings, said before there is a folder."""
    if not cfg.model:
        raise UserError("model= is missing: give a Hugging Face folder, a run folder or a .gguf file")
    if cfg.train == "none":
        saved = {} if cfg.resume is None else read_config(Path(cfg.resume)).get("config", {})
        given, usual = to_json(cfg), {**to_json(Config()), **saved}
        if idle := [f"{key}={given[key]}" for key in TRAINING if given[key] != usual[key]]:
            raise UserError(f"train=none does not train and would ignore {', '.join(idle)}: leave that out")
    elif cfg.data is None:
        raise UserError(
            f"train={cfg.train} needs data=, a corpus to train on (or data=self); train=none prunes without training"
        )
    if cfg.train != "none":
        check_torch(Sparse24(hold_mask=True), cfg.mesh.num_processes)
    if cfg.data == "self" and cfg.prompts is None:
        raise UserError("data=self needs prompts=, a text or .jsonl file that the model goes on from")
    if cfg.slorb == 0 and cfg.projection == "trained":
        raise UserError("projection=trained is about the branch: give slorb=16 too")
    check_apart(to_json(cfg), "calib", "data")
    if cfg.text is not None and not Path(cfg.text).is_file():
        raise UserError(f"text={cfg.text} is no file; give a text file")
    check_spill(cfg.spill)
    pruner(cfg)
    if cfg.train != "none":
        check_training(cfg)
    if cfg.resume is not None:
        check_steps(cfg.steps, open_run_folder(RECIPE, to_json(cfg), DECIDING))  # before any text is read
    elif cfg.run is not None:
        check_free(Path(cfg.run))


def check_training(cfg: Config) -> None:
    """Before minutes of one-shot pruning, not after them."""
    rows_per_pass(cfg.batch, cfg.micro, cfg.mesh.dp * cfg.mesh.replica)
    if cfg.data == "self":
        assert cfg.prompts is not None
        read_prompts(cfg.prompts, cfg.self_texts)
    if cfg.temperature == 0:
        raise UserError(f"temperature={cfg.temperature} must be positive")
    if cfg.ce == 0 and (cfg.kl == 0 or not cfg.distill):
        raise UserError("ce=0 and no distillation leave nothing to learn from: give one of them a weight")


def check_texts(cfg: Config, blank: Loaded) -> Tensor | None:
    """Every text is long enough, and there; the calibration windows, where pruning is still to come and needs them."""
    if cfg.train != "none" and cfg.context > blank.spec.max_positions:
        raise UserError(
            f"context={cfg.context} is more than the {blank.spec.max_positions} positions of {cfg.model}"
        )
    if cfg.text is not None:
        read_tokens(Path(cfg.text), need_tokenizer(blank))
    if cfg.train != "none" and cfg.data != "self":
        corpus = training_text(cfg, Path(), RunLog(None), blank.tokenizer)
        TokenData(corpus.train, context=cfg.context, batch=cfg.batch)
    pruned = cfg.resume is not None and (Path(cfg.resume) / "oneshot/config.json").is_file()
    if pruned or (cfg.calib is None and not pruner(cfg).needs_text):
        return None
    return calibration_windows(cfg, blank)


def pruner(cfg: Config) -> Pruner:
    return SparseGpt(cfg.damping) if cfg.method == "sparsegpt" else PRUNERS[cfg.method]


def make_rules(cfg: Config) -> list[Rule]:
    held = Sparse24(hold_mask=True)
    return [(cfg.layers, Slorb(held, cfg.slorb, cfg.projection) if cfg.slorb else held)]


def retraining(cfg: Config) -> Retrain:
    assert cfg.train != "none"
    return Retrain(
        steps=cfg.steps, rule=cfg.train, lr=cfg.lr, warmup=cfg.warmup, schedule=cfg.schedule, clip=cfg.clip,
        weight_decay=cfg.weight_decay, pull=cfg.pull, anneal=cfg.anneal, refresh=cfg.refresh, kl=cfg.kl, ce=cfg.ce,
        temperature=cfg.temperature, flip_every=cfg.flip_every,
    )  # fmt: skip


# -- one-shot ------------------------------------------------------------------------------------------------
def one_shot(
    cfg: Config, rules: list[Rule], folder: Path, log: RunLog, mesh: Mesh, calib_NT: Tensor | None
) -> None:
    """oneshot/: a model folder whose pruned weights are zeros, and branch.safetensors beside it."""
    if (folder / "oneshot" / "config.json").is_file():
        return
    compute = pick_dtype(cfg.dtype, mesh.device)
    loaded, visit = load_where_it_fits(cfg.model, mesh.device, compute, cfg.stream)
    calibration = Calibration(memory_gb=cfg.memory_gb, folder=cfg.spill, visit=visit)
    plan_pruning(loaded.model, rules)
    if not any(row.get("model") == "dense" for row in log.evaluations()):
        measure(cfg, loaded, "dense", log, calibration)
    files = BlockFiles(folder / "blocks")
    method = pruner(cfg)
    steps: Iterable[BlockStep] = ()
    if calib_NT is not None:
        steps = walk(loaded.model, calib_NT, calibration, start=files.count())
    total = len(loaded.model.blocks)
    with (
        resumable(RECIPE, folder, lambda: f" after {files.count()} of {total} blocks"),
        log.progress(total, f"{method.name} by block") as bar,
    ):
        report = prune(
            loaded.model, rules, steps, method, files=files, visit=visit,
            progress=lambda done, total, error: bar.advance(1, error=error),
        )  # fmt: skip
    measure(cfg, loaded, f"one-shot {method.name}", log, calibration)
    write_atomically(folder / "layers.json", json.dumps(report.to_json(), indent=1) + "\n")
    branches = take_branches(loaded.model)
    save_file({n: parts["low"].contiguous() for n, parts in branches.items()}, folder / "branch.safetensors")
    loaded.model.to(compute)  # what never left home: streamed or not, the files are the same
    save_model(folder / "oneshot", loaded.model, loaded.tokenizer)  # last: it says that all of this is there
    shutil.rmtree(files.folder, ignore_errors=True)


def calibration_windows(cfg: Config, loaded: Loaded) -> Tensor:
    shared = ptq.Config(
        model=cfg.model, calib=cfg.calib, calib_windows=cfg.calib_windows, calib_context=cfg.calib_context,
        method="gptq",
    )  # fmt: skip
    try:
        found = ptq.calibration_windows(shared, loaded)
    except UserError as error:
        raise UserError(str(error).replace("method=gptq", f"method={cfg.method}")) from None
    assert found is not None
    return found


def read_branches(folder: Path, device: torch.device | str = "cpu") -> dict[str, dict[str, Tensor]]:
    return {n: {"low": t} for n, t in load_file(folder / "branch.safetensors", device=str(device)).items()}


def load_start(folder: Path, rules: list[Rule], dtype: torch.dtype) -> Decoder:
    """The one-shot model with its Formats, whole, on the CPU of this process."""
    model = load_model(folder / "oneshot", dtype=dtype).model
    convert(model, rules)
    hold_branches(model, read_branches(folder))
    return model


# -- training ------------------------------------------------------------------------------------------------
def training_text(cfg: Config, folder: Path, log: RunLog, tokenizer: Tokenizer | None) -> Corpus:
    source = str(folder / SELF) if cfg.data == "self" else cfg.data
    assert source is not None
    max_bytes = None if cfg.max_mb is None else int(cfg.max_mb * 1e6)
    return prepare(source, tokenizer=tokenizer, max_bytes=max_bytes, progress=log.progress)


def write_text(cfg: Config, out: Path, log: RunLog, mesh: Mesh) -> None:
    loaded = load_model(cfg.model, device=mesh.device, dtype=pick_dtype(cfg.dtype, mesh.device))
    assert cfg.prompts is not None and loaded.tokenizer is not None
    prompts = read_prompts(cfg.prompts, cfg.self_texts)
    sampling = replace(PAPER, max_tokens=cfg.self_tokens, seed=cfg.seed)
    generate_text(loaded.model, loaded.tokenizer, prompts, out, sampling=sampling, progress=log.progress)


def train_stage(
    cfg: Config, settings: Retrain, rules: list[Rule], folder: Path, log: RunLog, mesh: Mesh, corpus: Corpus
) -> Decoder:
    compute = pick_dtype(cfg.dtype, mesh.device)
    from_dense = cfg.start == "dense" or (cfg.start == "auto" and cfg.train == "cast")
    compiled: CompileMode = cfg.compile
    parallel = ParallelConfig(cfg.recompute, compiled, compute)
    student = build_student(cfg.model if from_dense else folder / "oneshot", rules, mesh, parallel)
    if not from_dense:
        hold_branches(student, read_branches(folder, mesh.device))
    share = {"context": cfg.context, "dp_rank": mesh.dp_rank, "dp_size": mesh.dp_size}
    data = TokenData(corpus.train, **share, batch=cfg.batch, micro=cfg.micro, seed=cfg.seed)
    num_rows = min(cfg.batch, len(corpus.val) // cfg.context // mesh.dp_size * mesh.dp_size)
    held_out = TokenData(corpus.val, **share, batch=num_rows, micro=None) if num_rows else None
    tokens = cfg.steps * data.tokens_per_step
    log.say(
        f"{cfg.train}: {tokens / 1e6:.2f}M tokens, {min(tokens, len(corpus.train)) / 1e6:.2f}M of them different "
        f"({cfg.steps / data.steps_per_epoch:.2f} epochs)"
    )
    if cfg.eval_every and held_out is None:
        log.say(f"no validation: {few_documents(corpus, cfg.context)}")
    teacher = load_model(cfg.model, device=mesh.device, dtype=compute).model if cfg.distill else None
    retrain(
        Run(student, settings.optimizer(student), mesh, log),
        teacher,
        data,
        settings,
        checkpointer=Checkpointer(folder / "checkpoints", every=cfg.save_every),
        log_every=cfg.log_every,
        evaluate=validation_loss(held_out) if held_out else None,
        eval_every=cfg.eval_every,
        graph=True,
        together=cfg.compile == "off",
    )
    return student


# -- what is delivered ---------------------------------------------------------------------------------------
def deliver(
    cfg: Config,
    model: Decoder,
    rules: list[Rule],
    folder: Path,
    log: RunLog,
    tokenizer: Tokenizer | None,
    compute: torch.dtype,
    corpus: Corpus | None,
    device: torch.device,
) -> Coverage:
    """model/ and packed/, after every group of four of every pruned layer has been counted."""
    model.compute_dtype = compute
    coverage = check_coverage(model, rules, compute)
    told: dict[str, Any] = {"format": rules[0][1].label, **coverage.to_json(), "one_shot": cfg.method}
    if corpus is not None:
        tokens = cfg.steps * cfg.batch * cfg.context
        told |= {"train": cfg.train, "train_tokens": tokens, "unique_tokens": min(tokens, len(corpus.train))}
    save_model(folder / "model", model, tokenizer)
    pack(model, dtype=compute)
    save_model(folder / "packed", model, tokenizer)
    for name in ("model", "packed"):
        write_atomically(folder / name / "pruning.json", json.dumps(told, indent=1) + "\n")
    log.say(f"{coverage.layers} layers are 2:4, {coverage.kept:,} of {coverage.weights:,} weights are left")
    if cfg.train != "none":
        loaded = load_model(folder / "packed", device=device, dtype=compute)
        measure(cfg, loaded, f"{cfg.train}{' + slorb' if cfg.slorb else ''}", log)
    return coverage


def measure(
    cfg: Config, loaded: Loaded, label: str, log: RunLog, calibration: Calibration | None = None
) -> None:
    """With a calibration whose blocks visit a device, the model stays at home for this too."""
    tokens, text = text_tokens(loaded, cfg.model, text=cfg.text) if cfg.text else (None, "")
    stream = calibration if calibration is not None and calibration.visit is not None else None
    sizes: dict[str, Any] = {"context": cfg.calib_context, "max_tokens": cfg.max_tokens}
    log.evaluated(**evaluate_row(loaded, label, tokens, text, **sizes, stream=stream))


def finish(cfg: Config, folder: Path, log: RunLog, coverage: Coverage) -> None:
    rows = log.evaluations()
    eval_table(rows, "Dense, pruned, retrained").print()
    counted = [[in_words(k), v] for k, v in coverage.to_json().items()]
    sections: list[Section] = [Table("Coverage", ["", "counted"], counted)]
    layers = json.loads((folder / "layers.json").read_text())["layers"]
    known = [(i, e["output_error"]) for i, e in enumerate(layers) if e["output_error"] is not None]
    if known:
        series = Series("one-shot", [i for i, _ in known], [e for _, e in known])
        sections.append(
            Curves("Error by layer", [series], "layer", "mean square of the outputs' change, relative")
        )
    if cfg.train != "none":
        sections += flip_plots(folder)[:2]
    commands = f'shoestring inspect {folder}/packed\nshoestring generate {folder}/packed "Once upon a time"'
    page = write_report(
        folder,
        RECIPE,
        [*sections, *run_sections(folder), Text("Next", commands, code=True)],
        subtitle=str(folder),
    )
    log.say(f"model in {folder}/model, packed in {folder}/packed, report in {page}. Next:\n{commands}")
    log.close()
