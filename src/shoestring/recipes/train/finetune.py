"""Fine-tune a model on chats, prompts or preference pairs; packed weights stay packed.

Run:     shoestring finetune MODEL chats.jsonl                               LoRA beside the weights as they are
         shoestring finetune PACKED chats.jsonl adapter=dora:r16             the file that is served, trained as it is
         shoestring finetune MODEL chats.jsonl format=nf4 merge=requantize   packs a dense model first
         shoestring finetune MODEL chats.jsonl adapter=none lr=1e-5          all weights
         shoestring finetune MODEL pairs.jsonl objective=dpo beta=0.1
         shoestring run train/finetune resume=runs/train-finetune-...        continues after Ctrl-C or a crash
         torchrun --nproc-per-node 4 -m shoestring run train/finetune model=MODEL data=chats.jsonl mesh.dp=4
Needs:   a CPU for models of some hundred million weights; a GPU for others
Time:    SmolLM2-135M, 1,024 tokens a step: some seconds of processor time on a slow CPU core
Expect:  the loss on held-out samples falls, and rises again after too many epochs; the best weights are kept
Leaves:  a run folder with adapter/ (PEFT's layout) or model/, checkpoints/, metrics.jsonl, report.html
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from shoestring.config import config_record, deciding, option, to_json
from shoestring.device import pick_dtype
from shoestring.errors import UserError, in_run
from shoestring.formats import convert, keep_decoded, pack, parse_format, use_kernels
from shoestring.formats.adapter import (
    TARGETS,
    AdapterConfig,
    LoraWeights,
    adapter_targets,
    adapter_weights,
    add_adapters,
    attach_adapters,
)
from shoestring.formats.convert import format_hosts
from shoestring.mesh import Mesh, open_mesh
from shoestring.model import Decoder, Tokenizer, load_model, save_model
from shoestring.model.adapter_folder import merge_adapter_, read_adapter, write_adapter
from shoestring.model.folder import read_spec, weight_files
from shoestring.model.parallel import ParallelConfig, parallelize
from shoestring.model.spec import ModelSpec
from shoestring.recipes.settings import OptimSettings, RanksSettings, SourceSettings, TrainSettings
from shoestring.recipes.shrink_run import check_model_given, file_stamp
from shoestring.recipes.train.dense import open_checkpointer
from shoestring.report import Section, Table, Text, run_sections, write_report
from shoestring.runlog import AS_SAVED, RunLog, check_free, check_resume_from, open_run_folder, read_config
from shoestring.state.agreement import on_main
from shoestring.state.checkpoint import check_steps, load_tensors, step_folder, step_folders, step_of
from shoestring.state.levels.retention import validation_losses
from shoestring.state.levels.settings import CheckpointConfig, check_checkpoints
from shoestring.state.run_lock import check_not_held, hold_run
from shoestring.state.run_state import model_state
from shoestring.train import pretraining
from shoestring.train.data import check_pass
from shoestring.train.examples import read_examples
from shoestring.train.objectives import CrossEntropy
from shoestring.train.optim import SCHEDULES
from shoestring.train.preference import Preference, build_reference
from shoestring.train.reducers.build import ReducerConfig, build_optimizer, build_reducer, check_reducer
from shoestring.train.samples import Encoding, SampleData, Samples, encode_examples
from shoestring.train.step import Hook, Objective, Run
from shoestring.train.trainer import train

RECIPE = "train/finetune"


@dataclass(frozen=True)
class Config(OptimSettings, RanksSettings, TrainSettings, CheckpointConfig, ReducerConfig, SourceSettings):
    data: str = option("", "a .jsonl, .json or .parquet file, a folder or a glob of them; required without resume=")
    eval_data: str | None = option(None, "samples to measure on, instead of a part of data", advanced=True)
    held_out: float = option(0.05, "part of data that is measured on and not learned", least=0)
    objective: Literal["sft", "dpo"] = option("sft", "sft: answers; dpo: pairs of chosen and rejected answers")
    train_on: Literal["assistant", "last", "all"] = option(
        "assistant", "what is learned: the assistant's turns, the last of them, or every token"
    )
    adapter: str = option("lora:r16", "lora:r16 or dora:r16, beside frozen weights; none trains all weights")
    alpha: float = option(32.0, "the branch is scaled by alpha / rank", advanced=True)
    target: str = option(",".join(TARGETS), "which linear layers get an adapter: globs with commas")
    adapter_from: str | None = option(None, "an adapter in PEFT's layout to go on from")
    format: str | None = option(None, "packs a dense model first: int2 int3 int4 int8 nf2 nf3 nf4 ..., with :g64")
    merge: Literal["none", "dense", "requantize"] = option(
        "none", "also write the model with the adapter in it: dense, or packed again in its formats", deciding=False
    )
    beta: float = option(0.1, "dpo: how strongly the model is held to where it began")
    context: int = option(2048, least=2)
    pack: bool = option(True, "several samples in a row; they do not see each other")
    too_long: Literal["error", "cut", "drop"] = option("error", "samples of more tokens than context")
    epochs: int = option(1, "times that the data is seen", least=1)
    steps: int = option(0, "optimizer steps; 0: as many as epochs need", least=0)
    batch: int = option(8)
    lr: float = option(0.0, "peak learning rate; 0: 2e-4 with an adapter, 1e-5 without, a tenth of these for dpo")
    warmup: int = option(10)
    eval_every: int = option(50)
    save_every: int = option(50)
    patience: int = option(
        3, "evaluations without a better loss after which the run ends; 0 is off", least=0, advanced=True
    )

    @property
    def adapter_config(self) -> AdapterConfig | None:
        targets = tuple(glob.strip() for glob in self.target.split(",") if glob.strip())
        return AdapterConfig.parse(self.adapter, alpha=self.alpha, targets=targets)

    @property
    def peak_lr(self) -> float:
        return self.lr or (2e-4 if self.adapter_config else 1e-5) / (10 if self.objective == "dpo" else 1)


def main(cfg: Config) -> Path:
    check_settings(cfg)
    mesh = open_mesh(cfg.mesh, cfg.device)
    spec, tokenizer = read_spec(cfg.model)
    if tokenizer is None:
        raise UserError(f"{cfg.model} has no tokenizer; copy its tokenizer.json into the folder")
    if tokenizer.vocab_size > spec.vocab_size:
        raise UserError(
            f"{cfg.model}: the tokenizer has {tokenizer.vocab_size} tokens but the embedding only {spec.vocab_size} "
            "rows (vocab_size); use the tokenizer the model was trained with"
        )
    if cfg.context > spec.max_positions:
        most = spec.max_positions
        raise UserError(f"context={cfg.context} is more than the {most} positions of {cfg.model}; give context={most}")
    encoding = Encoding()
    samples, val = read_samples(cfg, tokenizer, encoding)
    rows: dict[str, Any] = {"context": cfg.context, "micro": cfg.micro, "pack": cfg.pack}
    share: dict[str, Any] = {"dp_rank": mesh.dp_rank, "dp_size": mesh.dp_size}
    data = SampleData(samples, batch=cfg.batch, seed=cfg.seed, **rows, **share)
    held_out = SampleData(val, batch=cfg.batch, **rows, **share) if val.num_units else None
    steps = cfg.steps or data.num_steps(cfg.epochs)
    compute = pick_dtype(cfg.dtype, mesh.device)
    check_pass(data.micro, cfg.context, spec.num_layers * spec.d_model, mesh.device, compute)
    model = build_model(cfg, spec, mesh, compute)

    # After all checks: a wrong setting leaves no folder.
    folder = on_main(mesh, open_run_folder, RECIPE, to_json(cfg), ())
    with in_run(folder), hold_run(folder, mesh):
        log = RunLog(folder, main=mesh.is_main)
        saved = read_config(folder)
        log.save_config(config_record(RECIPE, cfg, **AS_SAVED, run=str(folder)))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        log.say(told(samples, val, data, encoding, steps, trained, spec.num_params(), folder))
        objective = make_objective(cfg, model, data, held_out, mesh, folder)
        run = Run(model, build_optimizer(cfg, model, lr=cfg.peak_lr, weight_decay=cfg.weight_decay), mesh, log)
        run.trained_only = cfg.adapter_config is not None
        watch = HeldOutLoss(held_out, objective[1], cfg.patience) if held_out is not None else None
        kept = dataclasses.replace(cfg, steps=steps, keep_best=max(cfg.keep_best, 1 if watch else 0))
        with pretraining.can_be_continued(run, RECIPE, folder, saved):
            train(
                run,
                data,
                objective[0],
                steps=steps,
                schedule=SCHEDULES[cfg.schedule](cfg.peak_lr, warmup=min(cfg.warmup, steps // 10), steps=steps),
                hooks=[SourceDigest(cfg.model)] if run.trained_only else [],
                reducer=build_reducer(cfg, model, mesh, clip=cfg.clip, seed=cfg.seed, say=log.say, folder=folder),
                clip=cfg.clip,
                checkpointer=open_checkpointer(kept, kept, folder),
                log_every=cfg.log_every,
                evaluate=watch,
                eval_every=cfg.eval_every,
                rollback=cfg.rollback,
            )
        take_best(run, folder)
        deliver(cfg, run, tokenizer, held_out, objective[1])
    mesh.close()
    return folder


# -- before --------------------------------------------------------------------------------------------------


def check_settings(cfg: Config) -> None:
    """What can be said without reading the model or the data."""
    if cfg.resume is not None:
        check_not_held(Path(cfg.resume))
        folder = open_run_folder(RECIPE, to_json(cfg), deciding(type(cfg), unless_said=False))
        if cfg.steps:
            check_steps(cfg.steps, folder)
    elif cfg.run is not None:
        check_free(Path(cfg.run))
    check_model_given(cfg.model)
    if not cfg.data:
        raise UserError("data= is missing: give a .jsonl, .json or .parquet file of samples")
    check_resume_from(to_json(cfg))
    check_checkpoints(cfg, saved=None if cfg.resume is None else read_config(Path(cfg.resume)).get("config"))
    check_reducer(cfg, cfg.mesh)
    if not cfg.held_out < 0.9:
        raise UserError(f"held_out={cfg.held_out:g} leaves too little to learn from; give less than 0.9")
    needs = [k for k in ("format", "adapter_from") if getattr(cfg, k) is not None]
    needs += ["merge"] if cfg.merge != "none" else []
    if cfg.adapter_config is None and needs:
        raise UserError(
            f"{needs[0]}={getattr(cfg, needs[0])} belongs to an adapter, and adapter=none trains all weights"
        )
    if cfg.adapter_from is not None:
        usual = {f.name: f.default for f in dataclasses.fields(cfg) if f.name in ("adapter", "alpha", "target")}
        if changed := [name for name, value in usual.items() if getattr(cfg, name) != value]:
            raise UserError(f"{changed[0]}= is for a new adapter, and adapter_from= brings its own; leave it out")
    if not cfg.beta > 0:
        raise UserError(f"beta={cfg.beta:g} must be positive: it is how strongly the model is held to where it began")
    if cfg.format is not None:
        parse_format(cfg.format)


def read_samples(cfg: Config, tokenizer: Tokenizer, encoding: Encoding) -> tuple[Samples, Samples]:
    """To learn from, and to measure on."""
    options: dict[str, Any] = {"context": cfg.context, "train_on": cfg.train_on, "too_long": cfg.too_long}
    options |= {"pairs": cfg.objective == "dpo", "encoding": encoding}
    held_out = cfg.held_out if cfg.eval_data is None else 0.0
    train, val = encode_examples(read_examples(cfg.data), tokenizer, held_out=held_out, **options)
    if cfg.eval_data is not None:
        val, _ = encode_examples(read_examples(cfg.eval_data, "eval_data"), tokenizer, **options)
    return train, val


def build_model(cfg: Config, spec: ModelSpec, mesh: Mesh, compute: torch.dtype) -> Decoder:
    """With an adapter: the base as it is served, and trained branches. Without: fp32 weights."""
    parallel = ParallelConfig(cfg.recompute, cfg.compile, compute)
    if cfg.adapter_config is None:
        return pretraining.build_model(spec, mesh, parallel, init_from=cfg.model, seed=cfg.seed)
    cut = mesh.axis("tp") is not None
    model = load_base(cfg, torch.device("cpu") if cut else mesh.device, compute)
    if cfg.adapter_from is not None:
        attach_adapters(model, read_adapter(cfg.adapter_from, model).weights, trained=True)
    else:
        add_adapters(model, cfg.adapter_config, seed=cfg.seed)
    parallelize(model, mesh, parallel)
    if cut and mesh.device.type != "cpu":
        model.to(mesh.device)
    ready_base(model)
    return model


def load_base(cfg: Config, device: torch.device, compute: torch.dtype) -> Decoder:
    model = load_model(cfg.model, device=device, dtype=compute, packed=True).model
    packed = [name for name, host in format_hosts(model) if host.packed]
    if cfg.format is not None:
        if packed:
            raise UserError(f"format={cfg.format} packs a dense model, and {cfg.model} is packed; leave format out")
        convert(model, [("*", parse_format(cfg.format))])
        packed = pack(model, dtype=compute)
    if cfg.merge == "requantize" and cfg.adapter_config is not None and not packed:
        raise UserError(f"merge=requantize packs weights again, and {cfg.model} is dense; give merge=dense or format=")
    if cfg.adapter_config is not None:
        adapter_targets(model, cfg.adapter_config.targets)
    return model


def ready_base(model: Decoder) -> None:
    """Fast products with packed weights: their kernels on a GPU, decoded copies on a CPU."""
    if model.device.type == "cuda":
        use_kernels(model)
    else:
        keep_decoded(model, dtype=model.compute_dtype)


def make_objective(
    cfg: Config, model: Decoder, data: SampleData, held_out: SampleData | None, mesh: Mesh, folder: Path
) -> tuple[Objective, Objective]:
    """To train on `data`, and to measure on `held_out`."""
    if cfg.objective == "sft":
        return CrossEntropy(), CrossEntropy()

    def reference(of: SampleData, name: str) -> Preference:
        identity = {"samples": of.samples.fingerprint, "model": base_stamps(cfg.model), "from": cfg.adapter_from}
        options: dict[str, Any] = {"num_targets": len(of.samples.tokens), "identity": identity, "mesh": mesh}
        return Preference(build_reference(folder / f"reference-{name}", model, of.once(), **options), cfg.beta)

    train = reference(data, "train")
    return train, reference(held_out, "val") if held_out is not None else train


def base_stamps(model: str) -> dict[str, str]:
    return {path.name: file_stamp(path) for path in weight_files(model)}


class SourceDigest(Hook):
    """Checkpoints of an adapter name the weights it belongs to."""

    def __init__(self, model: str) -> None:
        self.model, self.stamps = model, base_stamps(model)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.stamps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["base"] != self.stamps:
            raise UserError(f"the weights of {self.model} are not those that this adapter was trained beside")


def told(
    samples: Samples,
    val: Samples,
    data: SampleData,
    encoding: Encoding,
    steps: int,
    trained: int,
    params: int,
    to: Path,
) -> str:
    notes = [f"{n:,} {what}" for n, what in ((encoding.num_cut, "cut"), (encoding.num_dropped, "dropped")) if n]
    return (
        f"{trained / 1e6:.2f}M of {params / 1e6:.1f}M parameters are trained on {samples.num_units:,} samples "
        f"({int(samples.learned.sum()):,} learned tokens{''.join(f', {note}' for note in notes)}), {val.num_units:,} "
        f"held out; {steps:,} steps of {data.batch} rows, run in {to}"
    )


# -- during and after ----------------------------------------------------------------------------------------


class HeldOutLoss:
    """For `train(evaluate=...)`: the loss on the held-out samples; ends the run once it has not fallen for a while."""

    def __init__(self, data: SampleData, objective: Objective, patience: int) -> None:
        self.data, self.objective, self.patience = data, objective, patience

    def __call__(self, run: Run) -> dict[str, float]:
        loss = pretraining.mean_loss(run.model, self.data.once(), self.objective, run.mesh)
        before = [row["val_loss"] for row in run.log.history if "val_loss" in row and row["step"] < run.step]
        if self.patience and len(before) >= self.patience and loss >= min(before):
            since = len(before) - before.index(min(before))
            run.ended = since >= self.patience
            if run.ended:
                run.log.say(f"step {run.step}: the held-out loss has not fallen for {since} evaluations, the run ends")
        return {"val_loss": loss}


def take_best(run: Run, folder: Path) -> None:
    """The weights of the checkpoint with the lowest held-out loss, where that is not the last step."""

    def best() -> int:
        losses = validation_losses(folder / "metrics.jsonl")
        there = {step_of(path) for path in step_folders(folder / "checkpoints")} | {run.step}
        measured = {step: loss for step, loss in losses.items() if step in there}
        return min(measured, key=lambda step: (measured[step], -step), default=run.step)

    step = on_main(run.mesh, best)
    if step != run.step:
        state = {f"model.{name}": t for name, t in model_state(run).items()}
        load_tensors(step_folder(folder / "checkpoints", step), state, run.mesh)
        run.log.say(f"the weights of step {step} are kept, which had the lowest held-out loss")


def deliver(cfg: Config, run: Run, tokenizer: Tokenizer, held_out: SampleData | None, objective: Objective) -> None:
    """adapter/ or model/, and the losses of what is delivered."""
    folder, mesh, model = run.log.folder, run.mesh, run.model
    assert folder is not None and isinstance(model, Decoder)
    rows: list[list[str]] = []

    def measure(name: str, measured: Decoder, on: Mesh, data: SampleData | None) -> None:
        loss = math.nan if data is None else pretraining.mean_loss(measured, data.once(), objective, on)
        if data is not None:
            rows.append([name, f"{loss:.4f}"])
            run.log.log(run.step, **{f"loss_{name}": loss})

    measure("trained", model, mesh, held_out)
    commands = [f'shoestring generate {folder} "..."']
    if cfg.adapter_config is None:
        save_model(folder / "model", model, tokenizer, mesh=mesh)
    else:
        weights = adapter_weights(model)  # all ranks together
        if mesh.is_main:
            commands = deliver_adapter(cfg, run, tokenizer, weights, held_out, measure)
    if mesh.is_main:
        if rows:
            Table("Held-out loss", ["weights", "loss"], rows).print()
        tries = "\n".join(commands)
        sections: list[Section] = [*run_sections(folder), Text("Next", tries, code=True)]
        page = write_report(folder, RECIPE, sections, subtitle=str(folder))
        run.log.say(f"report in {page}. Next:\n{tries}")
        run.log.close()


def deliver_adapter(
    cfg: Config,
    run: Run,
    tokenizer: Tokenizer,
    weights: dict[str, LoraWeights],
    held_out: SampleData | None,
    measure: Any,
) -> list[str]:
    """On the first rank."""
    folder, model = run.log.folder, run.model
    assert folder is not None and isinstance(model, Decoder)
    alone = Mesh(0, 1, run.mesh.device)
    mine = None
    if held_out is not None:
        mine = SampleData(held_out.samples, context=held_out.context, batch=held_out.micro, pack=held_out.pack)
    base, reloaded = cfg.model, None
    if cfg.format is not None or cfg.merge != "none":
        reloaded = load_base(cfg, run.mesh.device, model.compute_dtype)
    if cfg.format is not None and reloaded is not None:
        base = str(folder / "base")
        save_model(base, reloaded, tokenizer)
    write_adapter(folder / "adapter", model, weights, base=str(base))
    if cfg.merge == "none" or reloaded is None:
        return [f'shoestring generate {base} "..." --adapter {folder / "adapter"}']
    merge_adapter_(reloaded, weights, requantize=cfg.merge == "requantize")
    save_model(folder / "model", reloaded, tokenizer)
    ready_base(reloaded)
    measure(f"merged_{cfg.merge}", reloaded, alone, mine)
    return [f'shoestring generate {folder} "..."']
