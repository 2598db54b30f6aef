"""Pre-train a decoder from scratch, or continue from a model.

Run:     shoestring run train/dense data=python steps=2000
         shoestring run train/dense data=my/texts size=small tokenizer=DIR
         shoestring run train/dense init_from=DIR data=my.jsonl lr=2e-5     continues from a Hugging Face folder
         shoestring run train/dense precision=fp8 compile=blocks size=llama-1b    products in FP8, on Hopper
         shoestring run train/dense resume=runs/train-dense-...             continues after Ctrl-C or a crash
         shoestring run train/dense publish=127.0.0.1:29600 publish_every=50    for `shoestring serve MODEL --follow`
         torchrun --nproc-per-node 4 -m shoestring run train/dense mesh.dp=2 mesh.tp=2
         torchrun --nproc-per-node 4 -m shoestring run train/dense mesh.replica=4 reducer=int8     over slow links
         torchrun --nproc-per-node 4 -m shoestring run train/dense mesh.pp=4 micro=1     stages of a pipeline
Needs:   a CPU for size=tiny and small; a GPU for the others
Time:    2,048 tokens a step: 0.7 s of processor time on a slow CPU core for size=tiny, 1.2 s with d_model=192
Expect:  with d_model=192, vocab_size=2048, context=128, lr=2e-3 on 8 MB of Python: a validation loss of 4.1 after
         300 steps
Leaves:  a run folder with model/ (Hugging Face), checkpoints/, metrics.jsonl, evals.jsonl, report.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shoestring.config import Retired, config_record, deciding, option, to_json
from shoestring.device import pick_dtype
from shoestring.errors import in_run
from shoestring.evals.model_row import evaluate_row
from shoestring.formats.convert import Rule
from shoestring.mesh import Mesh, open_mesh
from shoestring.model import Decoder, load_model, save_model
from shoestring.model.parallel import ParallelConfig
from shoestring.recipes.settings import OptimSettings, RanksSettings, TrainSettings
from shoestring.report import Section
from shoestring.runlog import AS_SAVED, RunLog, check_free, check_resume_from, open_run_folder, read_config
from shoestring.state.agreement import on_main
from shoestring.state.checkpoint import check_steps
from shoestring.state.checkpointer import Checkpointer
from shoestring.state.levels.retention import Keep
from shoestring.state.levels.settings import CheckpointConfig, check_checkpoints
from shoestring.state.run_lock import check_not_held, hold_run
from shoestring.train import precision, pretraining
from shoestring.train.cuda_graph import GraphedForwardBackward, check_graph
from shoestring.train.data import TokenData, check_pass, rows_per_pass
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import new_schedule
from shoestring.train.pipeline import StagePipeline, check_pipeline, stages_of
from shoestring.train.publish import check_publish, open_publish
from shoestring.train.reducers.build import (
    ReducerConfig,
    build_optimizer,
    build_reducer,
    check_optimizer,
    check_reducer,
    report_sections,
)
from shoestring.train.shards import CorpusConfig, load_corpus
from shoestring.train.step import Hook, Run
from shoestring.train.trainer import train

EVAL_TOKENS = 100_000  # of the validation split, for the perplexity at the end


@dataclass(frozen=True)
class Config(
    OptimSettings,
    RanksSettings,
    TrainSettings,
    CheckpointConfig,
    ReducerConfig,
    precision.PrecisionConfig,
    pretraining.ModelConfig,
    CorpusConfig,
):
    """Behind the keys of the corpus (train/shards.py), of the model (train/pretraining.py), of the products
    (train/precision.py), of the reducer (train/reducers/build.py) and of checkpoints (state/levels/settings.py)."""

    RETIRED: ClassVar[dict[str, Retired]] = {
        "publish_delta": Retired(False, "every published version is sent whole, to packed servers in their format")
    }
    steps: int = option(2000)
    context: int = option(256, least=2)
    warmup: int = option(100)
    schedule: Literal["cosine", "wsd"] = option("wsd")
    weight_decay: float = option(0.1)
    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "muon: matrices of blocks move along orthogonal matrices, the rest by AdamW", deciding=True
    )
    cooldown: float = option(
        0.2, "schedule=wsd: share of the steps in which the rate falls to zero", least=0, advanced=True, deciding=False
    )
    seed: int = option(0, "random seed of the weights and the order of the data")
    pipeline: Literal["auto", "gpipe", "1f1b", "eager1f1b", "interleaved", "zero-bubble"] = option(
        "auto",
        "with mesh.pp: order of the micro-batches; auto measures the link and takes 1f1b or eager1f1b",
        advanced=True,
    )
    graph: bool = option(
        False, "a step's passes as one CUDA graph: small models whose GPU waits for Python; one GPU", advanced=True
    )
    log_every: int = option(10, advanced=False)
    eval_every: int = option(200)
    save_every: int = option(500, "steps between checkpoints, and one at the end; 0 saves only on Ctrl-C")
    publish: str | None = option(
        None, "HOST:PORT at which servers follow this run (`shoestring serve --follow`)", advanced=True
    )
    publish_every: int = option(50, "steps between published weights", least=1, advanced=True)
    publish_insecure: bool = option(
        False, "publish at an address of a network without SHOESTRING_PUBLISH_KEY: whoever reaches it", advanced=True
    )
    resume: str | None = option(None, "a run folder to continue; its settings are used")


def main(cfg: Config) -> Path:
    return pretrain(cfg, "train/dense")


def open_checkpointer(cfg: CheckpointConfig, training: TrainSettings, folder: Path) -> Checkpointer:
    options: dict[str, Any] = {"seed": training.seed, "resume_from": training.resume_from}
    if cfg.checkpoint == "auto":
        return Checkpointer(folder / "checkpoints", cfg, last=training.steps, **options)
    keep = Keep(cfg.keep_last, cfg.keep_every, cfg.keep_best)
    last = training.steps if training.save_every else None
    return Checkpointer(folder / "checkpoints", every=training.save_every, keep=keep, last=last, **options)


def pretrain(
    cfg: Config,
    recipe: str,
    *,
    rules: Sequence[Rule] = (),
    make_hooks: Callable[[Decoder, Mesh, TokenData], list[Hook]] = lambda model, mesh, data: [],
    plots: Callable[[Path], list[Section]] = lambda folder: [],
    deliver: Callable[[Path], Sequence[str]] = lambda folder: (),
) -> Path:
    """The whole run. Other training recipes give Formats for the layers (`rules`), hooks, plots, and a function over
    model/ on the first rank that returns commands to try."""
    if cfg.resume is not None:
        check_not_held(Path(cfg.resume))
        check_steps(cfg.steps, open_run_folder(recipe, to_json(cfg), deciding(type(cfg), unless_said=False)))
    elif cfg.run is not None:
        check_free(Path(cfg.run))
    check_resume_from(to_json(cfg))
    check_checkpoints(cfg, saved=None if cfg.resume is None else read_config(Path(cfg.resume)).get("config"))
    pretraining.check_model(cfg, vocab_size=cfg.vocab_size, context=cfg.context)
    check_reducer(cfg, cfg.mesh)
    check_optimizer(cfg.optimizer, cfg)
    schedule = new_schedule(cfg.schedule, cfg.lr, warmup=cfg.warmup, steps=cfg.steps, cooldown=cfg.cooldown)
    check_publish(cfg.publish, cfg.publish_insecure)
    rows_here = cfg.batch // (cfg.mesh.replica * cfg.mesh.dp)
    whole = "graph=true" if cfg.graph else "compile=whole" if cfg.compile == "whole" else None
    check_pipeline(cfg.mesh, cfg.pipeline, whole_graph=whole, rows=rows_here, micro=cfg.micro or rows_here)
    mesh = open_mesh(cfg.mesh, cfg.device, stages=True)
    if cfg.graph:
        check_graph(mesh)
    expected = pretraining.expected_spec(cfg, vocab_size=cfg.vocab_size, context=cfg.context)
    rules = [*rules, *precision.fp8_rules(cfg, expected)]
    precision.check_precision(cfg, expected, rules, mesh, graph=cfg.graph)
    corpus = load_corpus(cfg, cfg.init_from, RunLog(None, main=mesh.is_main).progress)
    spec = pretraining.initial_spec(cfg, corpus.tokenizer, context=cfg.context, named=cfg.tokenizer)
    parallel = ParallelConfig(cfg.recompute, cfg.compile, pick_dtype(cfg.dtype, mesh.device))
    in_pass = rows_per_pass(cfg.batch, cfg.micro, mesh.dp_size)
    check_pass(in_pass, cfg.context, spec.num_layers * spec.d_model, mesh.device, parallel.compute_dtype)
    stages = stages_of(spec, cfg.mesh, cfg.pipeline)
    begin: dict[str, Any] = {"init_from": cfg.init_from, "seed": cfg.seed, "init": cfg.init, "stages": stages}
    model = pretraining.build_model(spec, mesh, parallel, rules=rules, **begin)
    pipeline = None if stages is None else StagePipeline(model, mesh, stages, cfg.pipeline)
    rows: dict[str, Any] = {"context": cfg.context, "batch": cfg.batch, "micro": cfg.micro}
    data = TokenData(corpus.train, **rows, seed=cfg.seed, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
    held_out = pretraining.validation_data(corpus, mesh, **rows)
    losses = pretraining.summed_losses if pipeline is None else pipeline.losses

    publish = open_publish(model, mesh, cfg.publish, cfg.publish_every, cfg.steps)

    # After all checks: a wrong setting leaves no folder.
    folder = on_main(mesh, open_run_folder, recipe, to_json(cfg), ())
    with in_run(folder), hold_run(folder, mesh), publish.named(folder.name):
        log = RunLog(folder, main=mesh.is_main)
        saved = read_config(folder)
        log.save_config(config_record(recipe, cfg, **AS_SAVED, run=str(folder)))
        params, tokens = model.spec.num_params() / 1e6, len(corpus.train) / 1e6
        log.say(f"{params:.1f}M parameters, {tokens:.2f}M training tokens, run in {folder}")
        if products := precision.describe_precision(model, mesh.device):
            log.say(products)
        if cfg.eval_every and held_out is None:
            log.say(f"no validation: {pretraining.few_documents(corpus, cfg.context)}")
        checkpointer = open_checkpointer(cfg, cfg, folder)
        if cfg.resume is not None and checkpointer.newest() is None:
            log.say(f"{folder} has no checkpoint that can be used: starting at step 0")
        made: dict[str, Any] = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "optimizer": cfg.optimizer}
        run = Run(model, build_optimizer(cfg, model, **made), mesh, log)
        with pretraining.can_be_continued(run, recipe, folder, saved):
            train(
                run,
                data,
                CrossEntropy(),
                steps=cfg.steps,
                schedule=schedule,
                hooks=[*make_hooks(model, mesh, data), publish],
                reducer=build_reducer(cfg, model, mesh, clip=cfg.clip, seed=cfg.seed, say=log.say, folder=folder),
                clip=cfg.clip,
                checkpointer=checkpointer,
                log_every=cfg.log_every,
                evaluate=pretraining.validation_loss(held_out, losses) if held_out else None,
                eval_every=cfg.eval_every,
                forward_backward=pipeline or (GraphedForwardBackward() if cfg.graph else None),
                rollback=cfg.rollback,
            )
        save_model(folder / "model", model, corpus.tokenizer, mesh=mesh)
        if mesh.is_main:
            commands = deliver(folder)
            trained = load_model(folder / "model", device=mesh.device, dtype=parallel.compute_dtype)
            text = corpus.val.head(EVAL_TOKENS) if len(corpus.val) > 1 else None
            label = f"{folder.name}, step {run.step}"  # a run that is resumed has a row for every end
            row = evaluate_row(trained, label, text, f"{cfg.data} (validation)", context=cfg.context)
            log.evaluated(**row)
            pretraining.report_training(recipe, log, trained.spec, [*plots(folder), *report_sections(folder)], commands)
    mesh.close()
    return folder
