"""The settings and stages of shrink/prune24: checks, one-shot pruning into a folder, training, delivery, report.

check(cfg), check_texts(...)  all checks of the settings and texts, before the run folder is made
prune_one_shot(run, ...)      oneshot/ and branch.safetensors; block by block, and a stopped run continues
train_student(cfg, ...)       AST or CAST on the corpus, or on text that the dense model writes (`write_text`)
load_pruned(run.folder, ...)  the one-shot model with its Formats and branches, for delivery without training
deliver_pruned(run, ...)      model/ and packed/, after every group of four has been checked
report_pruned(run, ...)       report.html
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoestring.config import deciding, option, to_json
from shoestring.device import pick_dtype
from shoestring.errors import UserError
from shoestring.evals.model_row import check_apart, evaluate_row, need_tokenizer, read_tokens, text_tokens
from shoestring.formats import convert, pack, parse_format
from shoestring.formats.convert import Rule, store_states
from shoestring.host.block_offload import BlockOffload, check_spill
from shoestring.json_files import Fields, read_object
from shoestring.mesh import Mesh, MeshConfig
from shoestring.methods.sparse24.format import Sparse24
from shoestring.methods.sparse24.prune import PRUNERS, Pruner, SparseGpt, plan_pruning, prune, take_branches
from shoestring.methods.sparse24.retrain import Coverage, Retrain, build_student, check_coverage, retrain
from shoestring.methods.sparse24.slorb import Slorb
from shoestring.methods.sparse24.training import check_torch, flip_plots
from shoestring.model import Decoder, LoadedModel, ModelSpec, Tokenizer, load_model, save_model
from shoestring.model.parallel import ParallelConfig
from shoestring.recipes.settings import (
    CalibSettings,
    GateSettings,
    OffloadSettings,
    OptimSettings,
    RanksSettings,
    SourceSettings,
    TrainSettings,
)
from shoestring.recipes.shrink_run import ShrinkRun, calibration_windows, check_model_given, load_where_it_fits
from shoestring.report import Curves, Section, Series, Table, Text, eval_table, in_words, run_sections, write_report
from shoestring.runlog import (
    RunLog,
    check_free,
    check_resume_from,
    open_run_folder,
    read_config,
    resumable,
    write_atomically,
)
from shoestring.shrink.block_files import BlockFiles
from shoestring.shrink.calibrate import BlockStep, Calibration, walk
from shoestring.shrink.self_text import PAPER, check_room, generate_text, read_prompts
from shoestring.shrink.whole_model import EMBED_HELP, give_embedding
from shoestring.state.checkpoint import check_steps
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.run_lock import check_not_held
from shoestring.train.data import TokenData, check_pass, rows_per_pass
from shoestring.train.pretraining import few_documents, validation_data, validation_loss
from shoestring.train.shards import Corpus, tokenize_corpus
from shoestring.train.step import Run

RECIPE = "shrink/prune24"
SELF = "self.jsonl"  # the generated text, in the run folder


@dataclass(frozen=True)
class RetrainSettings(OptimSettings, RanksSettings, TrainSettings):
    start: Literal["auto", "oneshot", "dense"] = option(
        "auto", "weights that training starts from; auto: one-shot for ast, dense for cast", advanced=True
    )
    data: str | None = option(None, "training corpus, not the evaluated text; self: text the dense model writes")
    prompts: str | None = option(None, "data=self: a text, corpus or .jsonl to take prompts from", advanced=True)
    self_texts: int = option(2000, "data=self: texts to write", least=1, advanced=True)
    self_tokens: int = option(512, "data=self: tokens of a text at most", least=1, advanced=True)
    max_mb: float | None = option(100.0, "read at most this many megabytes of the corpus; none reads all", least=0.001)
    lr: float = option(2e-4, "peak learning rate; cast needs a larger one")
    warmup: int = option(50, deciding=False)
    weight_decay: float = option(0.0, "AdamW decay of all matrices; separate from the pull on masked weights")
    pull: float | None = option(
        None,
        "strength of the pull on masked weights; none: from the gradients of the first step",
        least=0,
        advanced=True,
    )
    anneal: float | None = option(
        None,
        "share of the steps until the pull reaches its full strength; none: 1/4 for ast, 1 for cast",
        advanced=True,
    )
    refresh: int = option(10, "steps between new masks", least=1, advanced=True)
    distill: bool = option(True, "learn from the dense model's predictions too")
    kl: float | None = option(
        None, "weight of the dense model's predictions; none: 0.67 for ast, 1/3 for cast", least=0, advanced=True
    )
    ce: float | None = option(
        None, "weight of the tokens of the text; none: 0.33 for ast, 2/3 for cast", least=0, advanced=True
    )
    temperature: float | None = option(
        None, "softmax temperature of the predictions; none: 2 for ast, 1 for cast", least=0, advanced=True
    )
    mesh: MeshConfig = option(MeshConfig(), "how processes share the retraining; pruning runs on the first")
    flip_every: int = option(10, "steps between measurements of the flip rate", least=1, advanced=True, deciding=False)


# What the one-shot pruning needs of them; the others do nothing with train=none.
ONE_SHOT = ("device", "run", "resume", "resume_from", "dtype", "mesh")
TRAINING = [f.name for f in fields(RetrainSettings) if f.name not in ONE_SHOT]


@dataclass(frozen=True)
class Prune24Settings(GateSettings, RetrainSettings, OffloadSettings, CalibSettings, SourceSettings):
    layers: str = option("*", "glob of the layers to prune; the output head only if it is named")
    embed: str = option("dense", f"packed/: {EMBED_HELP}", deciding=False)
    method: Literal["sparsegpt", "wanda", "magnitude"] = option("sparsegpt", "the one-shot method")
    calib: str | None = option(None, "calibration text or corpus; a run is calibrated on its own training text")
    damping: float = option(0.01, "sparsegpt: added to the Hessian's diagonal, as a part of its mean", advanced=True)
    stream: Literal["auto", "true", "false"] = option(
        "auto",
        "one-shot; true: the model stays in the host's memory and one block at a time goes to the device; auto: "
        "where the whole model would take more than half of the device's free memory",
    )
    slorb: int = option(0, "add a branch over sums of this many inputs, 16 is the paper's; 0: none", least=0)
    projection: Literal["sum", "trained"] = option(
        "sum", "slorb: block sums, or train the projection as well", advanced=True
    )
    train: Literal["ast", "cast", "none"] = option("ast", "how to retrain; none stops after the one-shot pruning")
    text: str | None = option(
        None, "a text file: perplexity of every stage; default: a run's own validation split", deciding=False
    )
    max_tokens: int = option(16384, "tokens of the text to evaluate at most", least=2, advanced=True, deciding=False)


# -- before --------------------------------------------------------------------------------------------------


def check(cfg: Prune24Settings) -> None:
    """UserError for every mistake in the settings, before the run folder is made."""
    check_model_given(cfg.model)
    if cfg.train == "none":
        saved = {} if cfg.resume is None else read_config(Path(cfg.resume)).get("config", {})
        given, usual = to_json(cfg), {**to_json(Prune24Settings()), **saved}
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
        raise UserError(f"text={cfg.text} is not a file; give a text file")
    check_spill(cfg.spill)
    parse_format(cfg.embed)
    pruner(cfg)
    if cfg.train != "none":
        check_training(cfg)
    check_resume_from(to_json(cfg))
    if cfg.resume is not None:
        check_not_held(Path(cfg.resume))
        check_steps(cfg.steps, open_run_folder(RECIPE, to_json(cfg), deciding(type(cfg))))  # before any text is read
    elif cfg.run is not None:
        check_free(Path(cfg.run))


def check_training(cfg: Prune24Settings) -> None:
    """Checks of the training settings, before minutes of one-shot pruning."""
    rows_per_pass(cfg.batch, cfg.micro, cfg.mesh.dp * cfg.mesh.replica)
    if cfg.data == "self":
        assert cfg.prompts is not None
        read_prompts(cfg.prompts, cfg.self_texts)
    if cfg.temperature == 0:
        raise UserError(f"temperature={cfg.temperature} must be positive")
    if cfg.ce == 0 and (cfg.kl == 0 or not cfg.distill):
        raise UserError("ce=0 and no distillation leave nothing to learn from: give one of them a weight")


def check_memory(cfg: Prune24Settings, spec: ModelSpec, mesh: Mesh) -> None:
    rows = rows_per_pass(cfg.batch, cfg.micro, mesh.dp_size)
    check_pass(rows, cfg.context, spec.num_layers * spec.d_model, mesh.device, pick_dtype(cfg.dtype, mesh.device))


def check_texts(cfg: Prune24Settings, blank: LoadedModel) -> Tensor | None:
    """Check that every text exists and is long enough; returns the calibration windows, where pruning still needs
    them."""
    if cfg.train != "none" and cfg.context > blank.spec.max_positions:
        raise UserError(
            f"context={cfg.context} is more than the {blank.spec.max_positions} positions of {cfg.model}; give "
            f"context={blank.spec.max_positions} or less"
        )
    if cfg.text is not None:
        read_tokens(Path(cfg.text), need_tokenizer(blank))
    if cfg.train != "none" and cfg.data != "self":
        corpus = training_text(cfg, Path(), RunLog(None), blank.tokenizer)
        TokenData(corpus.train, context=cfg.context, batch=cfg.batch)
    elif cfg.train != "none":
        assert cfg.prompts is not None
        prompts = read_prompts(cfg.prompts, cfg.self_texts)
        check_room(prompts, need_tokenizer(blank), cfg.self_tokens, cfg.batch * cfg.context + 1)
    pruned = cfg.resume is not None and (Path(cfg.resume) / "oneshot/config.json").is_file()
    if pruned or (cfg.calib is None and not pruner(cfg).needs_text):
        return None
    return calibration_windows(blank, cfg.model, cfg.calib, cfg.calib_windows, cfg.calib_context, cfg.method)


def pruner(cfg: Prune24Settings) -> Pruner:
    return SparseGpt(cfg.damping) if cfg.method == "sparsegpt" else PRUNERS[cfg.method]


def make_rules(cfg: Prune24Settings) -> list[Rule]:
    held = Sparse24(hold_mask=True)
    return [(cfg.layers, Slorb(held, cfg.slorb, cfg.projection) if cfg.slorb else held)]


def retraining(cfg: Prune24Settings) -> Retrain:
    assert cfg.train != "none"
    return Retrain(
        steps=cfg.steps, rule=cfg.train, lr=cfg.lr, warmup=cfg.warmup, schedule=cfg.schedule, clip=cfg.clip,
        weight_decay=cfg.weight_decay, pull=cfg.pull, anneal=cfg.anneal, refresh=cfg.refresh, kl=cfg.kl, ce=cfg.ce,
        temperature=cfg.temperature, flip_every=cfg.flip_every,
    )  # fmt: skip


# -- one-shot ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluatedText:
    """The text that the rows of evals.jsonl are measured on."""

    model: str
    text: str | None
    context: int
    max_tokens: int

    def measure(
        self,
        run: ShrinkRun,
        loaded: LoadedModel,
        label: str,
        offload: BlockOffload | None = None,
        *,
        changed: bool = False,
    ) -> None:
        """With an offload that has an onload_device, the model stays in host memory. `changed`: as in evaluate_row."""
        tokens, name = text_tokens(loaded, self.model, text=self.text)  # of a run: its own validation split
        if offload is not None and offload.onload_device is None:
            offload = None
        sizes: dict[str, Any] = {"context": self.context, "max_tokens": self.max_tokens}
        run.log.evaluated(**evaluate_row(loaded, label, tokens, name, **sizes, offload=offload, changed=changed))


def prune_one_shot(
    cfg: Prune24Settings,
    run: ShrinkRun,
    rules: list[Rule],
    method: Pruner,
    calib_NT: Tensor | None,
    evaluated: EvaluatedText,
) -> None:
    """oneshot/: a model folder whose pruned weights are zeros, and branch.safetensors beside it."""
    folder, log = run.folder, run.log
    if (folder / "oneshot" / "config.json").is_file():
        return
    loaded, onload_device = load_where_it_fits(cfg.model, run.mesh.device, run.compute, cfg.stream)
    calibration = Calibration(memory_gb=cfg.memory_gb, folder=cfg.spill, onload_device=onload_device)
    plan_pruning(loaded.model, rules)
    if not any(row.get("model") == "dense" for row in log.evaluations()):
        evaluated.measure(run, loaded, "dense", calibration)
    files = BlockFiles(folder / "blocks")
    steps: Iterable[BlockStep] = ()
    if calib_NT is not None:
        steps = walk(loaded.model, calib_NT, calibration, start=files.count())
    total = len(loaded.model.blocks)
    with (
        resumable(run.recipe, folder, lambda: f" after {files.count()} of {total} blocks"),
        log.progress(0 if calib_NT is None else total, f"{method.name} by block") as bar,
    ):
        report = prune(
            loaded.model, rules, steps, method, files=files, onload_device=onload_device,
            progress=lambda done, total, error: bar.advance(1, error=error),
        )  # fmt: skip
    evaluated.measure(run, loaded, f"one-shot {method.name}", calibration, changed=True)
    write_atomically(folder / "layers.json", json.dumps(report.to_json(), indent=1) + "\n")
    branches = take_branches(loaded.model)
    save_file({n: parts["low"].contiguous() for n, parts in branches.items()}, folder / "branch.safetensors")
    loaded.model.to(run.compute)  # also what was never on the device: the files do not depend on streaming
    save_model(folder / "oneshot", loaded.model, loaded.tokenizer)  # last: marks this stage as finished
    shutil.rmtree(files.folder, ignore_errors=True)


def read_branches(folder: Path, device: torch.device | str = "cpu") -> dict[str, dict[str, Tensor]]:
    return {n: {"low": t} for n, t in load_file(folder / "branch.safetensors", device=str(device)).items()}


# -- training ------------------------------------------------------------------------------------------------


def training_text(cfg: Prune24Settings, folder: Path, log: RunLog, tokenizer: Tokenizer | None) -> Corpus:
    source = str(folder / SELF) if cfg.data == "self" else cfg.data
    assert source is not None
    max_bytes = None if cfg.max_mb is None else int(cfg.max_mb * 1e6)
    return tokenize_corpus(source, tokenizer=tokenizer, max_bytes=max_bytes, progress=log.progress)


def write_text(cfg: Prune24Settings, run: ShrinkRun) -> None:
    loaded = load_model(cfg.model, device=run.mesh.device, dtype=run.compute)
    assert cfg.prompts is not None and loaded.tokenizer is not None
    prompts = read_prompts(cfg.prompts, cfg.self_texts)
    sampling = replace(PAPER, max_tokens=cfg.self_tokens, seed=cfg.seed)
    options: dict[str, Any] = {"sampling": sampling, "progress": run.log.progress}
    generate_text(loaded.model, loaded.tokenizer, prompts, run.folder / SELF, **options)


def train_student(
    cfg: Prune24Settings, settings: Retrain, rules: list[Rule], run: ShrinkRun, corpus: Corpus
) -> Decoder:
    folder, log, mesh = run.folder, run.log, run.mesh
    from_dense = cfg.start == "dense" or (cfg.start == "auto" and cfg.train == "cast")
    parallel = ParallelConfig(cfg.recompute, cfg.compile, run.compute)
    student = build_student(cfg.model if from_dense else folder / "oneshot", rules, mesh, parallel)
    if not from_dense:
        store_states(student, read_branches(folder, mesh.device))
    share = {"context": cfg.context, "dp_rank": mesh.dp_rank, "dp_size": mesh.dp_size}
    data = TokenData(corpus.train, **share, batch=cfg.batch, micro=cfg.micro, seed=cfg.seed)
    held_out = validation_data(corpus, mesh, context=cfg.context, batch=cfg.batch, micro=None)
    tokens = cfg.steps * data.tokens_per_step
    log.say(
        f"{cfg.train}: {tokens / 1e6:.2f}M tokens, {min(tokens, len(corpus.train)) / 1e6:.2f}M of them different "
        f"({cfg.steps / data.steps_per_epoch:.2f} epochs)"
    )
    if cfg.eval_every and held_out is None:
        log.say(f"no validation: {few_documents(corpus, cfg.context)}")
    teacher = load_model(cfg.model, device=mesh.device, dtype=run.compute).model if cfg.distill else None
    retrain(
        Run(student, settings.optimizer(student), mesh, log),
        teacher,
        data,
        settings,
        checkpointer=Checkpointer(
            folder / "checkpoints", every=cfg.save_every, seed=cfg.seed, resume_from=cfg.resume_from
        ),
        log_every=cfg.log_every,
        evaluate=validation_loss(held_out) if held_out else None,
        eval_every=cfg.eval_every,
        graph=True,
        batched=cfg.compile == "off",
    )
    return student


# -- after ---------------------------------------------------------------------------------------------------


def load_pruned(folder: Path, rules: list[Rule], dtype: torch.dtype) -> Decoder:
    """The one-shot model with its Formats, whole, on the CPU of this process."""
    model = load_model(folder / "oneshot", dtype=dtype).model
    convert(model, rules)
    store_states(model, read_branches(folder))
    return model


def deliver_pruned(
    run: ShrinkRun, model: Decoder, rules: list[Rule], tokenizer: Tokenizer | None, embed: str, **notes: Any
) -> Coverage:
    """Write model/ and packed/ with pruning.json, after checking every group of four of every pruned layer. `embed`:
    the Format of embedding and head in packed/."""
    model.compute_dtype = run.compute
    coverage = check_coverage(model, rules, run.compute)
    content = {"format": rules[0][1].label, **coverage.to_json(), **notes}
    save_model(run.folder / "model", model, tokenizer)
    give_embedding(model, rules, embed)
    pack(model, dtype=run.compute)
    save_model(run.folder / "packed", model, tokenizer)
    for name in ("model", "packed"):
        write_atomically(run.folder / name / "pruning.json", json.dumps(content, indent=1) + "\n")
    run.log.say(f"{coverage.layers} layers are 2:4, {coverage.kept:,} of {coverage.weights:,} weights are left")
    return coverage


def report_pruned(run: ShrinkRun, coverage: Coverage, *, trained: bool) -> None:
    folder, log = run.folder, run.log
    eval_table(log.evaluations(), "Dense, pruned, retrained").print()
    counted = [[in_words(k), v] for k, v in coverage.to_json().items()]
    sections: list[Section] = [Table("Coverage", ["", "counted"], counted)]
    layers = Fields(read_object(folder / "layers.json"), f"{folder}/layers.json").list("layers")
    known = [(i, e["output_error"]) for i, e in enumerate(layers) if e["output_error"] is not None]
    if known:
        series = Series("one-shot", [i for i, _ in known], [e for _, e in known])
        sections.append(Curves("Error by layer", [series], "layer", "mean square of the outputs' change, relative"))
    if trained:
        sections += flip_plots(folder)[:2]
    commands = f'shoestring inspect {folder}/packed\nshoestring generate {folder}/packed "Once upon a time"'
    sections += [*run_sections(folder), Text("Next", commands, code=True)]
    page = write_report(folder, run.recipe, sections, subtitle=str(folder))
    log.say(f"model in {folder}/model, packed in {folder}/packed, report in {page}. Next:\n{commands}")
    log.close()
